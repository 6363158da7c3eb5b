package command

import (
	"path/filepath"
	"testing"
)

func TestRuns(t *testing.T) {
	inStore(t)
	runs := linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json"))
	if len(runs) != 1 || runs[0]["run"] != "r1" || runs[0]["groups"] != 1.0 || runs[0]["open_groups"] != 0.0 || runs[0]["samples"] != 2.0 {
		t.Fatalf("runs %v", runs)
	}
	expect(t, exitOK, "r1", "runs", "ls")
	expect(t, exitOK, "MDR_TRAJECTORIES  2", "runs", "show", "r1")
	file := filepath.Join(t.TempDir(), "r1.tar")
	expect(t, exitOK, "2 blobs", "runs", "export", "r1", "--out", file)
	expect(t, exitFailed, "", "runs", "export", "r1", "--out", file) // it is there
	expect(t, exitOK, "2 blobs", "runs", "read", file)
	// Two images, the embeddings of the prompt and its mask, of samples of which another is the parent.
	expect(t, exitOK, "", append([]string{"run", "--run", "r2", "--branch-from", "r1/p/0@1", "--return-conditioning"}, small...)...)
	expect(t, exitOK, "4 blobs", "runs", "export", "r2", "--out", filepath.Join(t.TempDir(), "r2.tar"))
	expect(t, exitOK, "", "runs", "rm", "r2")
	steps := 0
	for _, e := range linesOf(t, expect(t, exitOK, "", "runs", "read", file, "--json")) {
		if e["stream"] == "MDR_STEPS" {
			steps++
			if event := e["event"].(map[string]any); event["run"] != "r1" || event["uid"] != "p" {
				t.Errorf("an exported step: %v", event)
			}
		}
	}
	if steps != 6 {
		t.Errorf("%d steps exported, want 6", steps)
	}
	expect(t, exitUsage, "", "gc")
	expect(t, exitOK, "would free 0 groups", "gc", "--gc-age", "1ms", "--dry-run")
	expect(t, exitOK, "freed 0 groups", "gc", "--blobs")
	expect(t, exitFailed, `run "nowhere": nothing is stored of it`, "gc", "--gc-age", "1ms", "--run", "nowhere")
	expect(t, exitFailed, "", "runs", "rm", "nobody")
	expect(t, exitOK, "run r1: ", "runs", "rm", "r1")
	if left := linesOf(t, expect(t, exitOK, "", "runs", "ls", "--json")); len(left) != 0 {
		t.Errorf("left are %v", left)
	}
}
