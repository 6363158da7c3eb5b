package command

import (
	"strings"
	"testing"
)

// A table has all its cells at any width, and no line beyond it that has two.
func TestColumns(t *testing.T) {
	rows := [][]string{
		{"RUN", "GROUPS", "SIZE", "NEWEST"},
		{"night", "12", "\x1b[31m457.7 KiB\x1b[0m", "7s ago"},
		{"a", "2", "-"},
	}
	for room, want := range map[int]string{
		33: "RUN    GROUPS  SIZE       NEWEST\nnight  12      \x1b[31m457.7 KiB\x1b[0m  7s ago\na      2       -\n",
		29: "RUN   GROUPS SIZE      NEWEST\nnight 12     \x1b[31m457.7 KiB\x1b[0m 7s ago\na     2      -\n",
		28: "RUN    GROUPS  SIZE\n  NEWEST\nnight  12      \x1b[31m457.7 KiB\x1b[0m\n  7s ago\na      2       -\n",
		14: "RUN    GROUPS\n  SIZE\n  NEWEST\nnight  12\n  \x1b[31m457.7 KiB\x1b[0m\n  7s ago\na      2\n  -\n",
	} {
		var out strings.Builder
		layOut(&out, rows, room)
		if got := out.String(); got != want {
			t.Errorf("%d columns:\n%q, want\n%q", room, got, want)
		}
		for line := range strings.Lines(out.String()) {
			if n := shownWidth(strings.TrimSuffix(line, "\n")); n > room {
				t.Errorf("%d columns: %q has %d", room, line, n)
			}
		}
	}
	var out strings.Builder
	layOut(&out, [][]string{{"NAME", "NOTE"}, {"x", "words that do not fit into one line of this width"}}, 20)
	if want := "NAME\n  NOTE\nx\n  words that do\n    not fit into one\n    line of this\n    width\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

// Lines without cells stand as they are, between tables of their own.
func TestColumns_Lines(t *testing.T) {
	var out strings.Builder
	c := newColumns(&out)
	if _, err := c.Write([]byte("A\tB\nlong\tx\n\nplain  text\na\tb\n")); err != nil {
		t.Fatal(err)
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if want := "A     B\nlong  x\n\nplain  text\na  b\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
