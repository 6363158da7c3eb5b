package command

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/meander-rl/meander/services/internal/boot"
)

// plainWidth is what is printed to where there is no terminal.
const plainWidth = 100

// width is how many columns lines of out may have.
func width(out io.Writer) int {
	if f, ok := boot.File(out); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return w
		}
	}
	return plainWidth
}

// lineWidth is where running text is broken: nowhere in what another program reads.
func lineWidth(out io.Writer) int {
	if !boot.IsTerminal(out) {
		return math.MaxInt
	}
	return width(out)
}

// colourful says whether out shows colours, and the user wants them (no-color.org).
func colourful(out io.Writer) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && boot.IsTerminal(out)
}

// Colours of a terminal, as SGR parameters.
const (
	sgrBold   = "1"
	sgrRed    = "31"
	sgrGreen  = "32"
	sgrYellow = "33"
)

func paint(out io.Writer, sgr, text string) string {
	if !colourful(out) {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

func bold(out io.Writer, text string) string { return paint(out, sgrBold, text) }

// paintStatus shows what a group or sample came to: green is done, yellow is less than
// asked for, red is nothing.
func paintStatus(out io.Writer, status string) string {
	switch status {
	case "complete", "scored", "done", "running":
		return paint(out, sgrGreen, status)
	case "failed", "refused":
		return paint(out, sgrRed, status)
	}
	return paint(out, sgrYellow, status)
}

// reflow breaks the paragraphs of a text at that many columns. Indented lines stay.
func reflow(text string, columns int) string {
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	for i, p := range paragraphs {
		if !strings.Contains(p, "\n ") {
			paragraphs[i] = breakLines(p, columns, "\n")
		}
	}
	return strings.Join(paragraphs, "\n\n")
}

// printBroken writes lines, those that are wider than the terminal broken between words.
func printBroken(out io.Writer, text string) {
	for line := range strings.SplitSeq(text, "\n") {
		if columns := lineWidth(out); shownWidth(line) > columns {
			indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
			line = indent + breakLines(line, columns-len(indent)-len(columnIndent), "\n"+indent+columnIndent)
		}
		fmt.Fprintln(out, line)
	}
}

// breakLines puts between, which begins with a line feed, before each word that would go
// beyond so many columns, counted from where between ends.
func breakLines(text string, columns int, between string) string {
	var s strings.Builder
	used := 0
	for i, word := range strings.Fields(text) {
		n := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case used >= columns-n:
			s.WriteString(between)
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
