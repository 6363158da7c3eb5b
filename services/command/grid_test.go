package command

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// A conversation in one line ends with its last answer, whatever room there is.
func TestSpoken(t *testing.T) {
	turns := []schemas.Turn{{}, {Generated: true, Text: "395", Reply: "too low"}, {}, {Generated: true, Text: "405", Reply: "never said"}}
	line := spoken(turns)
	if line != "395 › too low › 405" {
		t.Errorf("%q", line)
	}
	if got := cutTalk(line, 8); got != "…w › 405" {
		t.Errorf("%q", got)
	}
	if got := cutTalk("a long answer", 8); got != "a long …" {
		t.Errorf("%q", got)
	}
}

// A grid never goes beyond the width it is given, and shows every cell once.
func TestGrid(t *testing.T) {
	g := &grid{}
	g.row("sample", []string{"#0", "#1", "#2", "#3", "#4"})
	g.row("read", []string{`"ÄÖÜ"`, `"A"`, `""`, `"B"`, `"long"`})
	for columns, want := range map[int]string{
		100: "  sample     #0   #1  #2   #3      #4\n    read  \"ÄÖÜ\"  \"A\"  \"\"  \"B\"  \"long\"\n",
		20:  "  sample     #0   #1\n    read  \"ÄÖÜ\"  \"A\"\n  sample  #2   #3\n    read  \"\"  \"B\"\n  sample      #4\n    read  \"long\"\n",
		1:   "  sample     #0\n    read  \"ÄÖÜ\"\n  sample   #1\n    read  \"A\"\n  sample  #2\n    read  \"\"\n  sample   #3\n    read  \"B\"\n  sample      #4\n    read  \"long\"\n",
	} {
		var out strings.Builder
		g.print(&out, columns)
		if got := out.String(); got != want {
			t.Errorf("%d columns:\n%swant\n%s", columns, got, want)
		}
		for _, line := range strings.Split(out.String(), "\n") {
			if n := utf8.RuneCountInString(line); columns >= 20 && n > columns {
				t.Errorf("%d columns: %q has %d", columns, line, n)
			}
		}
	}
}

func TestFailures(t *testing.T) {
	got := failures([]results.Member{
		{SampleResult: results.SampleResult{SampleIndex: 0, Status: "scored"}},
		{SampleResult: results.SampleResult{SampleIndex: 1, Status: "failed", Error: "no tesseract\nsecond line"}},
		{SampleResult: results.SampleResult{SampleIndex: 2, Status: "missing"}},
		{SampleResult: results.SampleResult{SampleIndex: 3, Status: "failed", Error: "no tesseract\nsecond line"}},
	})
	want := "#1 #3 failed: no tesseract ...|#2 missing"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("got %s, want %s", s, want)
	}
}
