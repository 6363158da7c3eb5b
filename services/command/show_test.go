package command

import (
	"strings"
	"testing"
)

func TestShow(t *testing.T) {
	inStore(t)
	if got := expect(t, exitOK, "run r1: complete\n", "show"); !strings.Contains(got, "p    complete  2") {
		t.Errorf("groups\n%s", got)
	}
	got := expect(t, exitOK, "group p of run r1\n", "show", "p")
	for _, want := range []string{`prompt "a red fox"`, "log-probs by step", "step   sigma  runs", "   sde"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	lines := linesOf(t, expect(t, exitOK, "", "show", "--json", "p"))
	if len(lines) != 1 || len(lines[0]["trajectories"].([]any)) != 2 || lines[0]["advantage"].(map[string]any)["status"] != "complete" {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitFailed, `run "r1" has no group "q"`, "show", "q")
	expect(t, exitUsage, "uid: ", "show", "a b")
	expect(t, exitUsage, "--run: ", "show", "--run", "*")
}
