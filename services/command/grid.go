package command

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// grid is rows of cells with a label before each. What does not fit side by side is
// printed below, in blocks of columns.
type grid struct {
	labels []string
	rows   [][]string
}

// row adds a row. All have the same number of cells.
func (g *grid) row(label string, cells []string) {
	g.labels, g.rows = append(g.labels, label), append(g.rows, cells)
}

// gridGap stands before each cell.
const gridGap = "  "

// print writes the grid in that many columns of characters, right-aligned.
func (g *grid) print(out io.Writer, columns int) {
	if len(g.rows) == 0 {
		return
	}
	label := 0
	for _, l := range g.labels {
		label = max(label, utf8.RuneCountInString(l))
	}
	widths := make([]int, len(g.rows[0]))
	for _, row := range g.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for begin := 0; begin < len(widths) || begin == 0; {
		end, used := begin, len(gridGap)+label
		for end < len(widths) && (end == begin || used+len(gridGap)+widths[end] <= columns) {
			used += len(gridGap) + widths[end]
			end++
		}
		for i, row := range g.rows {
			fmt.Fprint(out, gridGap, pad(g.labels[i], label))
			for k := begin; k < end; k++ {
				fmt.Fprint(out, gridGap, pad(row[k], widths[k]))
			}
			fmt.Fprintln(out)
		}
		if begin = end; len(widths) == 0 {
			return
		}
	}
}

// pad puts blanks before a text.
func pad(text string, columns int) string {
	return strings.Repeat(" ", max(0, columns-utf8.RuneCountInString(text))) + text
}
