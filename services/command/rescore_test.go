package command

import (
	"maps"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// A pass shows the rewards before and after, is there to stay, and leaves the run alone.
func TestRescore(t *testing.T) {
	inStore(t)
	pass := []string{"rescore", "--reward", "jpeg_incompressibility", "--out", "-", "--json"}
	lines := linesOf(t, expect(t, exitOK, "", pass...))
	if len(lines) != 2 {
		t.Fatalf("lines %v; want a group and the summary", lines)
	}
	for _, m := range lines[0]["members"].([]any) {
		member := m.(map[string]any)
		if before, after := member["source_reward"].(float64), member["reward"].(float64); before != -after {
			t.Errorf("rewards %g before and %g after; want opposites", before, after)
		}
	}
	summary := lines[1]["summary"].(map[string]any)
	if summary["run"] != "r1--jpeg_incompressibility" || summary["source_run"] != "r1" || summary["scored"] != 2.0 {
		t.Errorf("summary %v", summary)
	}
	expect(t, exitOK, "2 of 2 samples are scored already, resuming", append(pass, "--run", "r1")...)
	expect(t, exitOK, "a pass over run r1", "show", "--run", "r1--jpeg_incompressibility", "p")
	expect(t, exitUsage, "name the reward functions", "rescore")
	expect(t, exitUsage, "is the run itself", "rescore", "--run", "r1", "--pass", "r1", "--reward", "synthetic")
	expect(t, exitUsage, "is already a run with other rewards or settings", "rescore", "--run", "r1", "--pass",
		"r1--jpeg_incompressibility", "--reward", "synthetic")
}

// A pass is a file, too: with the run that it scored it goes into another store, and comes to the same file there.
func TestRescore_Export(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	expect(t, exitOK, "", "rescore", "--run", "r1", "--pass", "p1", "--reward", "jpeg_compressibility", "--out", "-")
	expect(t, exitOK, "", "runs", "export", "r1", "--out", "r1.tar")
	expect(t, exitOK, "", "runs", "export", "p1", "--out", "p1.tar")
	other := func(args ...string) []string { return append(args, "--store", "other") }
	expect(t, exitFailed, "import an export of run r1 first", other("runs", "import", "p1.tar")...)
	if runs := linesOf(t, expect(t, exitOK, "", other("runs", "ls", "--json")...)); len(runs) != 0 {
		t.Errorf("a refused import has left %v", runs)
	}
	expect(t, exitOK, "", other(append([]string{"run", "--run", "fill"}, small...)...)...) // so that sequences differ
	expect(t, exitOK, " 0 events there already", other("runs", "import", "r1.tar")...)
	expect(t, exitOK, "a pass over run r1", other("runs", "import", "p1.tar")...)
	expect(t, exitOK, "complete", other("status", "p1")...)
	expect(t, exitOK, "1 group", other("report", "p1", "--out", "p1.html")...)
	expect(t, exitOK, "are scored already", other("rescore", "--run", "r1", "--pass", "p1", "--reward",
		"jpeg_compressibility", "--out", "-")...)
	expect(t, exitOK, "", other("runs", "export", "p1", "--out", "again.tar")...)
	want, got := contentOf(t, "p1.tar"), contentOf(t, "again.tar")
	if len(want) < 3 || !maps.Equal(want, got) {
		t.Errorf("exported again are %v, were %v", got, want)
	}
	expect(t, exitOK, "", "runs", "rm", "p1")
	expect(t, exitOK, "p1: 5 events stored", "runs", "import", "p1.tar")
}
