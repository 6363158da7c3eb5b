package command

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
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

// Below the groups of a run are the updates of the weights that a trainer made of them, the newest.
func TestShow_Updates(t *testing.T) {
	inStore(t)
	b := connected(t)
	for i := range int64(mostUpdates + 2) {
		e := &schemas.Update{Run: "r1", Lane: "m", Tenant: schemas.TenantMain, Step: i + 1, PolicyVersion: i, Loss: new(0.25)}
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	got := expect(t, exitOK, "\n2 updates before: meander watch --kinds update --run r1\nm update 3: version 2, loss 0.25, ", "show")
	if strings.Count(got, "m update ") != mostUpdates {
		t.Errorf("updates\n%s", got)
	}
}

// A sample that was continued says which attempt made which of its steps.
func TestShow_Attempts(t *testing.T) {
	sample := &schemas.Trajectory{
		Identity: schemas.Identity{SampleIndex: 3}, Provenance: schemas.Provenance{Attempt: "b"},
		Steps: []schemas.StepRef{{Attempt: "a"}, {Attempt: "a"}, {}},
	}
	sample.Sigmas = []float32{1, .7, .3, 0}
	const want = "sample 3 was continued: steps 0 to 1 by attempt a, 2 to 2 by attempt b"
	if got := attemptsLine(sample); got != want {
		t.Errorf("%q; want %q", got, want)
	}
}
