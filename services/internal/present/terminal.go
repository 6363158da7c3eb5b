// Package present lays out what people read: tables (Table) and running text (Wrap, Lines, Terms) that fit the
// terminal, and colours (Paint) where the terminal shows them. Output that another program reads through a pipe has
// no colours and no broken lines.
package present

import (
	"io"
	"math"
	"os"

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
