package command

import (
	"slices"
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
	var kinds []string
	last := 0.0
	for _, e := range linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--json", "--count", "12")) {
		if at := e["time"].(float64); at < last {
			t.Errorf("%v is before what it follows", e)
		} else {
			last = at
		}
		kinds = append(kinds, e["kind"].(string))
	}
	if kinds[0] != "prompt" || kinds[11] != "advantage" {
		t.Errorf("begins with %s and ends with %s", kinds[0], kinds[11])
	}
	slices.Sort(kinds)
	if all := strings.Join(kinds, " "); all != "advantage prompt reward reward "+strings.Repeat("step ", 6)+"trajectory trajectory" {
		t.Errorf("printed %s", all)
	}
	expect(t, exitUsage, `--kinds: "stepp"; did you mean step?`, "watch", "--kinds", "stepp")
	expect(t, exitUsage, "--count: -1; must be at least 0", "watch", "--count", "-1")
	expect(t, exitUsage, "--since: -5m0s; must not be negative", "watch", "--since", "-5m")
	expect(t, exitUsage, `--uid: "a b"`, "watch", "--uid", "a b")
	expect(t, exitUsage, `--run: "a b"`, "watch", "--run", "a b")
	expect(t, exitUsage, "[all since] were all set", "watch", "--since", "1m", "--all")
}
