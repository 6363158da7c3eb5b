package command

import "testing"

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
	expect(t, exitUsage, "is already a run with other rewards or settings", "rescore", "--run", "r1", "--pass", "r1--jpeg_incompressibility", "--reward", "synthetic")
}
