package integration_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A watch of a run that is over shows what happened, in the order in which it did.
func TestWatch_AfterTheRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--model", "synthetic", "--run", "done", "-n", "2", "--steps", "3", "--out", "-", "a red fox").must(t, 0)
	meander(t, dir, "run", "--model", "synthetic", "--run", "other", "-n", "2", "--steps", "3", "--out", "-", "two owls").must(t, 0)
	// 1 prompt, 6 steps, 2 trajectories, 2 rewards, 1 advantage
	out := meander(t, dir, "watch", "--run", "done", "--json", "--count", "12").must(t, 0)
	var kinds []string
	last := 0.0
	for line := range strings.Lines(out.stdout) {
		var e struct {
			Kind    string
			Time    float64
			Subject string
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		if e.Time < last || !strings.Contains(e.Subject, ".done") {
			t.Errorf("%s at %v, after one at %v", e.Subject, e.Time, last)
		}
		last = e.Time
		kinds = append(kinds, e.Kind)
	}
	if kinds[0] != "prompt" || kinds[11] != "advantage" {
		t.Errorf("begins with %s and ends with %s", kinds[0], kinds[11])
	}
	slices.Sort(kinds)
	if got := strings.Join(kinds, " "); got != "advantage prompt reward reward step step step step step step trajectory trajectory" {
		t.Errorf("printed %s", got)
	}
}

// Why a sample failed is said where its status is.
func TestFailures_AreExplained(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "scorers.yaml"), []byte("http:\n  gone:\n    url: http://127.0.0.1:9/score\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := meander(t, dir, "run", "--model", "synthetic", "--run", "r", "-n", "3", "--steps", "2", "--out", "-",
		"--scorers", "scorers.yaml", "--score-patience", "1s", "--reward", "http:gone", "--seed", "1", "a red fox").must(t, 1)
	show := meander(t, dir, "show", "--run", "r", "0000-a-red-fox").must(t, 0)
	for name, text := range map[string]string{"run": run.stdout, "show": show.stdout} {
		said := map[string]bool{}
		for line := range strings.Lines(text) {
			samples, reason, ok := strings.Cut(line, " failed: ")
			if !ok || !strings.Contains(reason, "http:gone") || !strings.Contains(reason, "connection refused") {
				continue
			}
			for _, sample := range strings.Fields(samples) {
				said[sample] = true
			}
		}
		if !said["#0"] || !said["#1"] || !said["#2"] {
			t.Errorf("%s does not say why:\n%s", name, text)
		}
	}
}
