package command

import (
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// People judge samples: what waits is listed, what they say closes the group.
func TestVerdict(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, "accepted  p1  2 samples x 10 steps", "publish", "--run", "r1", "-n", "2", "--reward", "external", "--deadline", "1h", "a red fox")
	var lines []map[string]any
	bustest.Until(t, "samples that wait for a verdict", func() error {
		if lines = linesOf(t, expect(t, exitOK, "", "verdict", "--run", "r1", "--out", "images", "--json")); len(lines) < 2 {
			return errNotYet
		}
		return nil
	})
	if lines[0]["uid"] != "p1" || lines[1]["sample_index"] != 1.0 {
		t.Errorf("waiting %v", lines)
	}
	expect(t, exitUsage, "0=x", "verdict", "--run", "r1", "p1", "0=x")
	expect(t, exitOK, "2 verdicts given", "verdict", "--run", "r1", "p1", "0=0.25", "1=0.75")
	lines = linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "advantage", "--count", "1", "--json"))
	if len(lines) != 1 {
		t.Fatalf("advantages %v", lines)
	}
	expect(t, exitOK, "0.750000", "show", "--run", "r1", "p1")
	expect(t, exitOK, "no finished sample of run r1 waits for a verdict", "verdict", "--run", "r1")
}
