package present

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/services/internal/boot"
)

const red, plain = "\x1b[31m", "\x1b[0m"

// A table has all its cells at any width. What does not fit goes on in a line below.
func TestTable_Folds(t *testing.T) {
	t.Parallel()
	x := New("RUN", "GROUPS", "SIZE", "NEWEST")
	x.Row("night", 12, red+"457.7 KiB"+plain, "7s ago")
	x.Row("a", 2, "-")
	size := red + "457.7 KiB" + plain
	for columns, want := range map[int]string{
		33: "RUN    GROUPS  SIZE       NEWEST\nnight  12      " + size + "  7s ago\na      2       -\n",
		29: "RUN   GROUPS SIZE      NEWEST\nnight 12     " + size + " 7s ago\na     2      -\n",
		28: "RUN    GROUPS  SIZE\n  NEWEST\nnight  12      " + size + "\n  7s ago\na      2       -\n",
		14: "RUN    GROUPS\n  SIZE\n  NEWEST\nnight  12\n  " + size + "\n  7s ago\na      2\n  -\n",
	} {
		if got := x.layout(columns); got != want {
			t.Errorf("%d columns:\n%q, want\n%q", columns, got, want)
		}
	}
	x = New("NAME", "NOTE")
	x.Row("x", "words that do not fit into one line of this width")
	want := "NAME\n  NOTE\nx\n  words that do\n    not fit into one\n    line of this\n    width\n"
	if got := x.layout(20); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// Rows have a line each at any width: the first column gives way, numbers are at the right of theirs.
func TestTable_Rows(t *testing.T) {
	t.Parallel()
	x := New("RUN", "STATE", "N")
	x.Numbers = []bool{false, false, true}
	x.Row("a-long-name-of-a-run", "done", 7)
	x.Row("b", "running", 120)
	for columns, want := range map[int]string{
		40: "RUN                   STATE      N\na-long-name-of-a-run  done       7\nb                     running  " +
			"120",
		24: "RUN         STATE      N\na-long-na…  done       7\nb           running  120",
		9:  "RUN       STATE      N\na-long-…  done       7\nb         running  120",
	} {
		if got := strings.Join(x.Rows(columns), "\n"); got != want {
			t.Errorf("%d columns:\n%s\nwant\n%s", columns, got, want)
		}
	}
}

// A table of samples shows every cell once, in blocks that begin with the names of the rows.
func TestTable_Blocks(t *testing.T) {
	t.Parallel()
	x := Samples()
	x.Row("sample", "#0", "#1", "#2", "#3", "#4")
	x.Row("read", `"ÄÖÜ"`, `"A"`, `""`, `"B"`, `"long"`)
	for columns, want := range map[int]string{
		100: "  sample     #0   #1  #2   #3      #4\n    read  \"ÄÖÜ\"  \"A\"  \"\"  \"B\"  \"long\"\n",
		20: "  sample     #0   #1\n    read  \"ÄÖÜ\"  \"A\"\n  sample  #2   #3\n    read  \"\"  \"B\"\n" +
			"  sample      #4\n    read  \"long\"\n",
		1: "  sample     #0\n    read  \"ÄÖÜ\"\n  sample   #1\n    read  \"A\"\n  sample  #2\n    read  \"\"\n" +
			"  sample   #3\n    read  \"B\"\n  sample      #4\n    read  \"long\"\n",
	} {
		if got := x.layout(columns); got != want {
			t.Errorf("%d columns:\n%swant\n%s", columns, got, want)
		}
	}
}

// The last column takes what is left, or goes below where that is too little.
func TestTable_Fit(t *testing.T) {
	t.Parallel()
	table := func() *Table {
		x := &Table{Indent: Indent, Right: true, Fit: Cut}
		x.Row("sample", "reward", "answer")
		x.Row("#0", "0.500", "a long answer that is cut")
		return x
	}
	for columns, want := range map[int]string{
		80: "  sample  reward  answer\n      #0   0.500  a long answer that is cut\n",
		30: "  sample  reward  answer\n      #0   0.500  a long answ…\n",
		24: "  sample  reward\n    answer\n      #0   0.500\n    a long answer that …\n",
	} {
		if got := table().layout(columns); got != want {
			t.Errorf("%d columns:\n%swant\n%s", columns, got, want)
		}
	}
}

// No line is wider than the terminal, with wide runes and colours as well.
func TestTable_Widths(t *testing.T) {
	t.Parallel()
	for columns := 60; columns <= 200; columns += 7 {
		fold, blocks := New("NAME", "WHAT", "NOTE"), Samples()
		for i := range 12 {
			wide := strings.Repeat("赤い看板", 1+i%5)
			fold.Row(fmt.Sprintf("run-%d", i*i*i), red+wide+plain, strings.Repeat("words of a note ", i))
			blocks.Row(fmt.Sprint("row ", i), wide, "#1", strings.Repeat("x", 3*i), wide, "#4", wide)
		}
		for _, table := range []*Table{fold, blocks} {
			text := table.layout(columns)
			for line := range strings.Lines(text) {
				if n := Columns(strings.TrimSuffix(line, "\n")); n > columns {
					t.Errorf("%d columns: %q has %d", columns, line, n)
				}
			}
			if strings.Count(text, "赤い看板") != strings.Count(table.layout(1<<20), "赤い看板") {
				t.Errorf("%d columns: cells are lost in\n%s", columns, text)
			}
		}
	}
}

func TestWrap(t *testing.T) {
	t.Parallel()
	if got, want := Wrap("one two 赤い看板 four", 12, 2), "one two\n  赤い看板\n  four"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	text := "one two three\nfour five\n\nsix\n  seven eight nine ten eleven\n\ntwelve"
	want := "one two\nthree four\nfive\n\nsix\n  seven eight nine ten eleven\n\ntwelve"
	if got := Reflow(text, 10); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// A field fits the terminal, however narrow, and its text stands in one column.
func TestField(t *testing.T) {
	t.Parallel()
	for _, columns := range []int{60, 200} {
		for i, line := range strings.Split(field("  prompt", strings.Repeat("a photo of a red sign ", 20), 16, columns),
			"\n") {
			if Columns(line) > columns || i > 0 && !strings.HasPrefix(line, blanks(16)+"a") && line[16] == ' ' {
				t.Errorf("at %d columns: %q", columns, line)
			}
		}
	}
	if got := field("  ok", "", 16, 60); got != "  ok" {
		t.Errorf("%q", got)
	}
}

func TestCut(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ got, want string }{
		{Cut("a long answer", 8), "a long …"},
		{Cut("赤い看板", 5), "赤い…"},
		{Cut("short", 8), "short"},
		{CutFront("395 › too low › 405", 8), "…w › 405"},
		{CutFront("赤い看板", 5), "…看板"},
		{CutFront("short", 8), "short"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

// Foreign texts cannot tell the terminal anything: only their line breaks stay.
func TestShowable(t *testing.T) {
	const foreign = "no \x1b[31mred\x1b]0;title\x07\rprompts\nand ü"
	const want = `no \u001b[31mred\u001b]0;title\u0007\rprompts` + "\nand ü"
	if got := boot.Safe(foreign); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if got, want := FirstLine(foreign), strings.Split(want, "\n")[0]+" ..."; got != want {
		t.Errorf("first line %q, want %q", got, want)
	}
	var out strings.Builder
	if PrintEscaped(&out, foreign); out.String() != want+"\n" {
		t.Errorf("fault %q", out.String())
	}
}

func TestNumbers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ got, want string }{
		{Count(1, "batch"), "1 batch"},
		{Count(int64(1234), "batch"), "1,234 batches"},
		{Count(uint64(0), "group"), "0 groups"},
		{Thousands(-123456), "-123,456"},
		{Size(0), "-"},
		{Size(int64(3 << 20)), "3.0 MiB"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}
