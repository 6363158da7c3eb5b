package command

import (
	"bytes"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"
)

// columns lays out lines of cells, with a tab between two of them, below each other. What is
// wider than the terminal is set closer, and then goes on in a second line under each first:
// nothing is cut off. Lines without a tab stand as they are, and begin another table.
type columns struct {
	out   io.Writer
	lines bytes.Buffer
}

func newColumns(out io.Writer) *columns { return &columns{out: out} }

func (c *columns) Write(p []byte) (int, error) { return c.lines.Write(p) }

// Flush writes what was laid out.
func (c *columns) Flush() error {
	var text strings.Builder
	var rows [][]string
	for line := range strings.Lines(c.lines.String()) {
		line = strings.TrimSuffix(line, "\n")
		if strings.Contains(line, "\t") {
			rows = append(rows, strings.Split(line, "\t"))
			continue
		}
		layOut(&text, rows, lineWidth(c.out))
		rows = nil
		text.WriteString(line + "\n")
	}
	layOut(&text, rows, lineWidth(c.out))
	c.lines.Reset()
	_, err := io.WriteString(c.out, text.String())
	return err
}

// columnIndent is before what goes on in a second line.
const columnIndent = "  "

// layOut writes one table for a terminal of so many columns.
func layOut(s *strings.Builder, rows [][]string, room int) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], shownWidth(cell))
		}
	}
	gap := 2
	parts := foldColumns(widths, gap, room)
	if closer := foldColumns(widths, 1, room); len(parts) > 1 && len(closer) == 1 {
		parts, gap = closer, 1
	}
	for _, row := range rows {
		for k, part := range parts {
			var line strings.Builder
			if k > 0 {
				line.WriteString(columnIndent)
			}
			for i := part[0]; i < min(part[1], len(row)); i++ {
				cell := row[i]
				if shownWidth(cell) > room-len(columnIndent) { // then it is alone
					cell = breakLines(cell, room-2*len(columnIndent), "\n"+columnIndent+columnIndent)
				}
				line.WriteString(cell + strings.Repeat(" ", max(0, widths[i]-shownWidth(row[i])+gap)))
			}
			if text := strings.TrimRight(line.String(), " "); k == 0 || text != "" {
				s.WriteString(text + "\n")
			}
		}
	}
}

// foldColumns are the columns, from one to another, of each line that a row takes.
func foldColumns(widths []int, gap, room int) (parts [][2]int) {
	from, used := 0, 0
	for i, w := range widths {
		if i > from && w > room-used {
			parts = append(parts, [2]int{from, i})
			from, used = i, len(columnIndent)
		}
		used += w + gap
	}
	return append(parts, [2]int{from, len(widths)})
}

var sgr = regexp.MustCompile("\x1b\\[[0-9;]*m")

// shownWidth is how many columns a text takes, its colours none.
func shownWidth(text string) int { return utf8.RuneCountInString(sgr.ReplaceAllString(text, "")) }
