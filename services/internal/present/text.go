// Package present lays out what people read: tables (Table) and running text (Wrap, Lines, Terms) that fit the
// terminal, and colours (Paint) where the terminal shows them. Output that another program reads through a pipe has
// no colours and no broken lines.
package present

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strings"

	"github.com/mattn/go-runewidth"
	"golang.org/x/term"

	"github.com/meander-rl/meander/services/internal/boot"
)

// PlainWidth is the width of tables and help where there is no terminal.
const PlainWidth = 100

// Width is the number of columns of out: those of the terminal, else PlainWidth.
func Width(out io.Writer) int {
	if f, ok := boot.File(out); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return PlainWidth
}

// LineWidth is the number of columns that a line of text may have: without a terminal there is no limit.
func LineWidth(out io.Writer) int {
	if !boot.IsTerminal(out) {
		return math.MaxInt
	}
	return Width(out)
}

// Colour is the SGR parameter of a terminal.
type Colour string

// The colours of messages.
const (
	Bold   Colour = "1"
	Red    Colour = "31"
	Green  Colour = "32"
	Yellow Colour = "33"
)

// Colourful reports whether out shows colours and the user wants them (no-color.org).
func Colourful(out io.Writer) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && boot.IsTerminal(out)
}

// Paint colours a text where out shows colours.
func Paint(out io.Writer, c Colour, text string) string {
	if c == "" || !Colourful(out) {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

// Indent is the number of blanks before a line that continues another.
const Indent = 2

// width measures runes as terminals show them, the same in every locale.
var width = runewidth.Condition{StrictEmojiNeutral: true}

var colours = regexp.MustCompile("\x1b\\[[0-9;]*m")

// Columns returns the number of columns that a text needs on a terminal: two for each wide rune, none for colours.
func Columns(text string) int {
	if strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) < 0 {
		return len(text)
	}
	return width.StringWidth(colours.ReplaceAllString(text, ""))
}

// Cut shortens a text without colours to that many columns; a shortened text ends with an ellipsis.
func Cut(text string, columns int) string { return width.Truncate(text, max(columns, 1), "…") }

// CutFront is Cut from the other end: the end of the text stays.
func CutFront(text string, columns int) string {
	if n := Columns(text); n > columns {
		return width.TruncateLeft(text, n-max(columns, 1)+1, "…")
	}
	return text
}

// Wrap breaks a text between words, so that no line is wider than columns. All lines but the first are indented.
func Wrap(text string, columns, indent int) string {
	var s strings.Builder
	used := 0
	for i, word := range strings.Fields(text) {
		n := Columns(word)
		switch {
		case i == 0:
		case used >= columns-indent-n:
			s.WriteString("\n" + blanks(indent))
			used = 0
		default:
			s.WriteByte(' ')
			used++
		}
		s.WriteString(word)
		used += n
	}
	return s.String()
}

// Reflow breaks each paragraph of a text at that many columns. A paragraph with indented lines stays as it is.
func Reflow(text string, columns int) string {
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, p := range paragraphs {
		if !strings.Contains(p, "\n ") {
			paragraphs[i] = Wrap(p, columns, 0)
		}
	}
	return strings.Join(paragraphs, "\n\n")
}

// Lines writes a text line by line, as help and errors are. A line that is wider than the terminal is broken between
// words.
func Lines(out io.Writer, text string) {
	columns := LineWidth(out)
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimRight(line, " ")
		if Columns(line) > columns {
			indent := len(line) - len(strings.TrimLeft(line, " "))
			line = blanks(indent) + Wrap(line, columns, indent+Indent)
		}
		fmt.Fprintln(out, line)
	}
}

// Linef is Lines for a formatted text.
func Linef(out io.Writer, format string, args ...any) { Lines(out, fmt.Sprintf(format, args...)) }

// Field writes a name, in as many columns, and a text beside it, which is broken between words where it is wider than
// the terminal.
func Field(out io.Writer, columns int, name, text string) {
	fmt.Fprintln(out, field(name, text, columns, LineWidth(out)))
}

func field(name, text string, columns, width int) string {
	if columns+Columns(text) > width { // else its blanks stay
		text = Wrap(text, max(width, 3*columns), columns)
	}
	return strings.TrimRight(Pad(name, columns, false)+text, " ")
}

// Terms lays out terms, each with its text beside it, or below it where the term is long.
func Terms(list [][2]string, columns int) string {
	widest := 0
	for _, d := range list {
		widest = max(widest, Columns(d[0]))
	}
	indent := max(min(2+widest+3, columns/2, columns-36), 8)
	var s strings.Builder
	for _, d := range list {
		term, text := "  "+d[0], Wrap(d[1], columns, indent)
		if Columns(term)+2 > indent {
			s.WriteString(term + "\n")
			term = ""
		}
		s.WriteString(Pad(term, indent, false) + text + "\n")
	}
	return s.String()
}

// FirstLine returns the first line of a text, with dots if there are more, as boot.Safe has it.
func FirstLine(text string) string {
	first, _, more := strings.Cut(text, "\n")
	if more {
		first += " ..."
	}
	return boot.Safe(first)
}

// PrintEscaped writes a message that may quote foreign texts, such as an error, as Lines does.
func PrintEscaped(out io.Writer, text string) { Lines(out, boot.Safe(text)) }

// OrDash returns the text, or a dash for an empty one.
func OrDash[S ~string](text S) string { return cmp.Or(string(text), "-") }

// Count returns a number with its noun: "1 group", "1,234 groups".
func Count[N int | int64 | uint64](n N, thing string) string {
	switch {
	case n == 1:
		return "1 " + thing
	case strings.HasSuffix(thing, "ch"):
		return Thousands(n) + " " + thing + "es"
	}
	return Thousands(n) + " " + thing + "s"
}

// When returns a part of a text where it is to be there; else nothing.
func When(there bool, format string, args ...any) string {
	if !there {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// Thousands returns a number with its digits in groups of three: 1,234,567.
func Thousands[N int | int64 | uint64](n N) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// Size returns a number of bytes with its unit; a dash for 0 and less.
func Size[N int | int64 | uint64](n N) string {
	if n <= 0 {
		return "-"
	}
	return boot.Bytes(n).Rough()
}

func blanks(n int) string { return strings.Repeat(" ", max(0, n)) }

// Pad adds blanks to that many columns, before the text (right) or after it.
func Pad(text string, columns int, right bool) string {
	fill := blanks(columns - Columns(text))
	if right {
		return fill + text
	}
	return text + fill
}

// ShellWord returns a text as one word of a POSIX shell.
func ShellWord(text string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("/._-:=,@%+", r)
	}
	if text != "" && strings.IndexFunc(text, func(r rune) bool { return !plain(r) }) < 0 {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
