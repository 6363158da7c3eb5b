package command

import (
	"strings"
	"testing"
)

// Events of a run come in their order, one line each.
func TestWatch(t *testing.T) {
	inStore(t)
	got := expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "trajectory,step", "--count", "8")
	if steps, trajectories := strings.Count(got, "  step "), strings.Count(got, "  trajectory "); steps != 6 || trajectories != 2 {
		t.Errorf("%d steps and %d trajectories; want 6 and 2:\n%s", steps, trajectories, got)
	}
	lines := linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--uid", "p", "--kinds", "advantage", "--count", "1", "--json"))
	if len(lines) != 1 {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitUsage, `--kinds: "stepp"; did you mean step?`, "watch", "--kinds", "stepp")
	expect(t, exitUsage, "--count: -1; must be at least 0", "watch", "--count", "-1")
	expect(t, exitUsage, `--uid: "a b"`, "watch", "--uid", "a b")
	expect(t, exitUsage, `--run: "a b"`, "watch", "--run", "a b")
	expect(t, exitUsage, "[all since] were all set", "watch", "--since", "1m", "--all")
}
