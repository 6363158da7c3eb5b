package command

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// A conversation in one line ends with its last answer, whatever room there is.
func TestSpoken(t *testing.T) {
	turns := []schemas.Turn{{}, {Generated: true, Text: "395", Reply: "too low"}, {}, {Generated: true, Text: "405", Reply: "never said"}}
	line := conversationLine(turns)
	if line != "395 › too low › 405" {
		t.Errorf("%q", line)
	}
	if got := cutConversation(line, 8); got != "…w › 405" {
		t.Errorf("%q", got)
	}
	if got := cutConversation("a long answer", 8); got != "a long …" {
		t.Errorf("%q", got)
	}
}

func TestFailures(t *testing.T) {
	got := failureLines([]view.Member{
		{SampleResult: view.SampleResult{SampleIndex: 0, Status: "scored"}},
		{SampleResult: view.SampleResult{SampleIndex: 1, Status: "failed", Error: "no tesseract\nsecond line"}},
		{SampleResult: view.SampleResult{SampleIndex: 2, Status: "missing"}},
		{SampleResult: view.SampleResult{SampleIndex: 3, Status: "failed", Error: "no tesseract\nsecond line"}},
	})
	want := "#1 #3 failed: no tesseract ...|#2 missing"
	if s := strings.Join(got, "|"); s != want {
		t.Errorf("got %s, want %s", s, want)
	}
}
