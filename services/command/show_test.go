package command

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
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
	if len(lines) != 1 || len(lines[0]["trajectories"].([]any)) != 2 ||
		lines[0]["advantage"].(map[string]any)["status"] != "complete" {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitFailed, `run "r1" has no group "q"`, "show", "q")
	expect(t, exitUsage, "uid: ", "show", "a b")
	expect(t, exitUsage, "--run: ", "show", "--run", "*")
}

// Steps that were freed when all had read them are missed by nobody: the text and the JSON say it.
func TestShow_FreedSteps(t *testing.T) {
	inStore(t)
	b := connected(t)
	m, err := b.Last(t.Context(), schemas.StreamTrajectories, schemas.TrajectoryFilter("r1", "p"))
	if err != nil {
		t.Fatal(err)
	}
	record, err := b.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("r1", "p"))
	if err != nil {
		t.Fatal(err)
	}
	var e schemas.Trajectory
	var result schemas.Advantage
	if err := errors.Join(bus.Fits(m, &e), bus.Fits(record, &result)); err != nil {
		t.Fatal(err)
	}
	result.UID, result.Batch = "freed", "freed"
	if _, err := b.Publish(t.Context(), &result); err != nil {
		t.Fatal(err)
	}
	e.UID, e.Group.Batch, e.Group.FreeReadSteps = "freed", "freed", true
	if _, err := b.Publish(t.Context(), &e); err != nil {
		t.Fatal(err)
	}
	const why = "freed when all had read them (--free-read-steps)"
	expect(t, exitOK, "its steps were "+why, "show", "freed")
	if lines := linesOf(t, expect(t, exitOK, "", "show", "--json", "freed")); lines[0]["steps_gone"] != why {
		t.Errorf("JSON %v", lines)
	}
	if lines := linesOf(t, expect(t, exitOK, "", "show", "--json", "p")); lines[0]["steps_gone"] != nil {
		t.Errorf("JSON %v", lines)
	}
}

// Below the groups of a run are the updates of the weights that a trainer made of them, the newest.
func TestShow_Updates(t *testing.T) {
	inStore(t)
	b := connected(t)
	for i := range int64(mostUpdates + 2) {
		e := &schemas.Update{
			Run: "r1", Lane: "m", Tenant: schemas.TenantMain, Trainer: "main", Step: i + 1,
			PolicyVersion: i, Loss: new(0.25),
		}
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	got := expect(t, exitOK, "\n2 updates before: meander watch --kinds update --run r1\nm update 3 by main: version "+
		"2, loss 0.25\n", "show")
	if strings.Count(got, "m update ") != mostUpdates {
		t.Errorf("updates\n%s", got)
	}
	lines := linesOf(t, expect(t, exitOK, "", "show", "--json"))
	if last := lines[len(lines)-1]; len(lines) != mostUpdates+3 || last["kind"] != "update" ||
		last["event"].(map[string]any)["loss"] != 0.25 {
		t.Errorf("JSON %v", lines)
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

func TestDrawTree(t *testing.T) {
	tree := &schemas.Tree{Branches: []schemas.BranchPoint{{StepIndex: 2, Width: 2}, {StepIndex: 11, Width: 3}}}
	child := func(sample, leaves int64, a *float64) schemas.BranchChild {
		return schemas.BranchChild{SampleIndex: sample, Leaves: leaves, Reward: a, Advantage: a}
	}
	adv := &schemas.Advantage{
		BranchScope: "siblings",
		Branches: []schemas.BranchGroup{
			{StepIndex: 2, Children: []schemas.BranchChild{child(0, 3, new(-0.5)), child(3, 2, new(0.5))}},
			{StepIndex: 11, Children: []schemas.BranchChild{child(0, 1, new(1.0)), child(1, 1, new(0.0)), child(2, 1, new(-1.0))}},
			{StepIndex: 11, Children: []schemas.BranchChild{child(3, 1, new(0.25)), child(4, 0, nil), child(5, 1, new(-0.25))}},
		},
	}
	for i, reward := range []float64{3, 2, 1, 5, 0, 4} {
		m := schemas.Member{
			SampleIndex: int64(i), Status: schemas.StatusScored, Reward: new(reward), Advantage: new(reward - 3),
		}
		if i == 4 {
			m = schemas.Member{SampleIndex: 4, Status: schemas.StatusFailed}
		}
		adv.Members = append(adv.Members, m)
	}
	for name, c := range map[string]struct {
		adv     *schemas.Advantage
		columns int
		want    string
	}{
		"closed": {adv, 80, `
   2 step    11
───┬ -0.50 ──┬ +1.00 ── #0  3.000  +0.000
   │         ├ +0.00 ── #1  2.000  -1.000
   │         └ -1.00 ── #2  1.000  -2.000
   └ +0.50 ──┬ +0.25 ── #3  5.000  +2.000
             ├───────── #4  failed
             └ -0.25 ── #5  4.000  +1.000`},
		"narrow": {adv, 50, `
   2  11
───┬──┬── #0  3.000  +0.000
   │  ├── #1  2.000  -1.000
   │  └── #2  1.000  -2.000
   └──┬── #3  5.000  +2.000
      ├── #4  failed
      └── #5  4.000  +1.000`},
		"open": {nil, 50, `
   2  11
───┬──┬── #0
   │  ├── #1
   │  └── #2
   └──┬── #3
      ├── #4
      └── #5`},
	} {
		if got := "\n" + strings.Join(drawTree(tree, c.adv, c.columns), "\n"); got != c.want {
			t.Errorf("%s:%s\nwant%s", name, got, c.want)
		}
	}
}

// Every field of an event that may have all 64 bits is a string in JSON; sequences, which
// count messages, stay numbers.
func TestJSONOf_Seeds(t *testing.T) {
	found := 0
	for _, e := range schemas.Events() {
		v := reflect.ValueOf(e).Elem()
		for i := range v.NumField() {
			name, field := v.Type().Field(i).Name, v.Field(i)
			if field.Kind() != reflect.Uint64 || name != "SampleSeed" && name != "NoiseSeed" {
				continue
			}
			for seed, want := range map[uint64]string{7: "7", math.MaxUint64: "18446744073709551615"} {
				field.SetUint(seed)
				text, err := json.Marshal(schemas.JSON(e))
				if err != nil {
					t.Fatal(err)
				}
				var got map[string]any
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatal(err)
				}
				key := map[string]string{"SampleSeed": "sample_seed", "NoiseSeed": "noise_seed"}[name]
				if got[key] != want {
					t.Errorf("%T.%s %d is %#v in JSON, want %q", e, name, seed, got[key], want)
				}
				found++
			}
		}
	}
	if found == 0 {
		t.Error("no event has a seed")
	}
}
