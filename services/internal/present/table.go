package present

import (
	"fmt"
	"io"
	"strings"

	"github.com/meander-rl/meander/services/internal/boot"
)

// Table is rows of cells in columns. It shows every cell: columns that do not fit into the terminal go below the
// others.
type Table struct {
	// Indent is the number of blanks before each row.
	Indent int
	// Right aligns the cells to the right; Numbers does so with single columns.
	Right   bool
	Numbers []bool
	// Blocks says how columns go below the others: in a block for all rows, which begins with the first column again.
	// Otherwise each row goes on in an indented line of its own.
	Blocks bool
	// Fit shortens a cell of the last column to the width that is left for it; nil: cells are not shortened. That
	// column is aligned to the left.
	Fit func(cell string, columns int) string

	rows [][]string
}

// New returns a table with a heading and left-aligned cells.
func New(head ...string) *Table { return &Table{rows: [][]string{head}} }

// Samples returns a table with a column for each sample and a row for each property, whose name is the first cell.
func Samples() *Table { return &Table{Indent: Indent, Right: true, Blocks: true} }

// Row adds a row. Rows may have fewer cells than the first one.
func (t *Table) Row(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = strings.ReplaceAll(boot.SafeOutput(fmt.Sprint(c), true), "\t", `\t`)
	}
	t.rows = append(t.rows, row)
}

// Print writes the table as wide as out is. Without a terminal, a table of left-aligned cells has no limit.
func (t *Table) Print(out io.Writer) {
	columns := Width(out)
	if !t.Right {
		columns = LineWidth(out)
	}
	fmt.Fprint(out, t.layout(columns))
}

// leastFirst is how far Rows shortens the first column.
const leastFirst = 8

// Rows returns each row as one line of at most columns characters, for the screen of 'meander top'. Where rows would be
// wider, the cells of their first column are cut, to leastFirst characters at least.
func (t *Table) Rows(columns int) (lines []string) {
	widths := t.widths(columns)
	over := t.Indent - tableGap - columns
	for _, w := range widths {
		over += tableGap + w
	}
	if over > 0 {
		widths[0] = max(min(widths[0], leastFirst), widths[0]-over)
	}
	for _, row := range t.rows {
		cells := t.cells(row, [2]int{1, len(row)}, widths)
		first := row[0]
		if Columns(first) > widths[0] {
			first = Cut(first, widths[0])
		}
		lines = append(lines, line(t.Indent, append([]string{Pad(first, widths[0], t.right(0))}, cells...), tableGap))
	}
	return lines
}

func (t *Table) right(i int) bool { return t.Right || i < len(t.Numbers) && t.Numbers[i] }

// Columns returns how wide the table would be with all columns side by side, without the one that Fit shortens.
func (t *Table) Columns() int {
	widths := t.widths(0)
	if t.Fit != nil {
		widths = widths[:len(widths)-1]
	}
	n := t.Indent + tableGap*(len(widths)-1)
	for _, w := range widths {
		n += w
	}
	return n
}

// Gaps between columns, and the least width of a column with Fit.
const (
	tableGap = 2
	leastFit = 12
)

// layout returns the table as text of at most that many columns; columns that do not fit go below, indented. The gap
// between them shrinks to one blank where that makes all fit.
func (t *Table) layout(columns int) string {
	widths, gap := t.widths(columns), tableGap
	parts := t.columnRanges(widths, gap, columns)
	if len(parts) > 1 && !t.Blocks {
		if closer := t.columnRanges(widths, 1, columns); len(closer) == 1 {
			parts, gap = closer, 1
		}
	}
	var s strings.Builder
	if t.Blocks {
		for _, part := range parts {
			for _, row := range t.rows {
				cells := append([]string{t.cell(row, 0, widths)}, t.cells(row, part, widths)...)
				s.WriteString(line(t.Indent, cells, gap) + "\n")
			}
		}
		return s.String()
	}
	for _, row := range t.rows {
		for k, part := range parts {
			indent := t.Indent + min(k, 1)*Indent
			cells := t.cells(row, part, widths)
			if len(cells) == 1 && Columns(cells[0]) > columns-indent { // it is alone in its line
				cells[0] = Wrap(cells[0], columns, indent+Indent)
			}
			if text := line(indent, cells, gap); k == 0 || text != "" {
				s.WriteString(text + "\n")
			}
		}
	}
	return s.String()
}

// widths returns the widths of the columns. With Fit the last column has what is left.
func (t *Table) widths(columns int) []int {
	var widths []int
	for _, row := range t.rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], Columns(cell))
		}
	}
	if last := len(widths) - 1; last > 0 && t.Fit != nil {
		left := columns - t.Indent
		for _, w := range widths[:last] {
			left -= w + tableGap
		}
		if left < leastFit { // it goes below
			left = max(leastFit, columns-t.Indent-Indent)
		}
		widths[last] = left
	}
	return widths
}

// columnRanges splits the columns of a table into ranges [from, to) that fit side by side. With Blocks the first
// column is repeated in front of each range, and is in none.
func (t *Table) columnRanges(widths []int, gap, columns int) (parts [][2]int) {
	from, used, next := 0, t.Indent, t.Indent+Indent
	if t.Blocks && len(widths) > 0 {
		from, used = 1, t.Indent+widths[0]+gap
		next = used
	}
	for i := from; i < len(widths); i++ {
		if i > from && used+widths[i] > columns {
			parts = append(parts, [2]int{from, i})
			from, used = i, next
		}
		used += widths[i] + gap
	}
	return append(parts, [2]int{from, len(widths)})
}

// cells returns one range of a row's cells, padded to their columns.
func (t *Table) cells(row []string, part [2]int, widths []int) []string {
	var cells []string
	for i := part[0]; i < min(part[1], len(row)); i++ {
		cells = append(cells, t.cell(row, i, widths))
	}
	return cells
}

// cell returns one cell, padded to its column or shortened by Fit.
func (t *Table) cell(row []string, i int, widths []int) string {
	if t.Fit != nil && i == len(widths)-1 {
		return t.Fit(row[i], widths[i])
	}
	return Pad(row[i], widths[i], t.right(i))
}

// line joins cells with gaps, without blanks at the end.
func line(indent int, cells []string, gap int) string {
	text := strings.TrimRight(strings.Join(cells, blanks(gap)), " ")
	if text == "" {
		return ""
	}
	return blanks(indent) + text
}
