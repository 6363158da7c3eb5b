package flow_test

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
)

// Wherever a rollout is cut off, it redoes at most that many steps, or is as near as it can be
// entered; and no checkpoint is stored that this does not need.
func TestPlan_Checkpoints(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlan(t)
		p.Begin = rapid.SampledFrom(entries(p)).Draw(t, "begin")
		p.End = rapid.IntRange(p.Begin+1, p.Steps()).Draw(t, "end")
		kept := rapid.SliceOfNDistinct(rapid.IntRange(p.Begin, p.End), 0, 3, rapid.ID).Draw(t, "kept")
		slices.Sort(kept)
		every := rapid.IntRange(1, p.Steps()).Draw(t, "every")
		enter := slices.DeleteFunc(entries(p), func(i int) bool { return i <= p.Begin || i >= p.End })
		more, err := p.Checkpoints(every, kept)
		if nowhere := len(enter) == 0 && p.End-p.Begin > every; (err != nil) != nowhere {
			t.Fatalf("%v, where the plan can be entered at %v", err, enter)
		} else if nowhere {
			return
		}
		stored := []int{p.Begin}
		for _, i := range enter {
			if slices.Contains(kept, i) || slices.Contains(more, i) {
				stored = append(stored, i)
			}
		}
		stored = append(stored, p.End)
		for i, at := range stored[1:] {
			between := slices.ContainsFunc(enter, func(e int) bool { return stored[i] < e && e < at })
			if at-stored[i] > every && between {
				t.Errorf("checkpoints %v beside %v: from %d to %d are more than %d steps, and it can be entered at %v",
					more, kept,
					stored[i], at, every, enter)
			}
		}
		for _, c := range more {
			at := slices.Index(stored, c)
			if at < 1 || slices.Contains(kept, c) || stored[at+1]-stored[at-1] <= every {
				t.Errorf("checkpoints %v beside %v, every %d, entered at %v: %d is not needed", more, kept, every,
					enter, c)
			}
		}
	})
}

func TestPlan_Checkpoints_cases(t *testing.T) {
	plan := func(solver flow.Solver, sde ...int) flow.Plan {
		p := flow.Plan{Transitions: flow.Transitions(flow.SDE, sde, 10), Solver: solver, End: 10}
		return p
	}
	for name, c := range map[string]struct {
		plan  flow.Plan
		every int
		kept  []int
		want  []int
		fault string
	}{
		"each":                       {plan(flow.Euler), 1, nil, []int{1, 2, 3, 4, 5, 6, 7, 8, 9}, ""},
		"some":                       {plan(flow.RK4), 4, nil, []int{4, 8}, ""},
		"beside those that are kept": {plan(flow.Heun), 3, []int{0, 2, 3, 9, 10}, []int{6}, ""},
		"none is needed":             {plan(flow.DPM), 10, nil, nil, ""},
		"a solver that looks back":   {plan(flow.UniPC, 2, 3), 5, nil, []int{4}, ""},
		"which kept what it cannot be entered at": {plan(flow.DPM, 2), 3, []int{7}, []int{3}, ""},
		"which nothing interrupts": {
			plan(flow.DPM), 5, nil, nil,
			"checkpoint_every: 5; must be absent, or a solver without memory: dpm looks back on the ode steps 0 to 9",
		},
		"not positive": {plan(flow.Euler), 0, nil, nil, "checkpoint_every: 0; must be positive"},
	} {
		got, err := c.plan.Checkpoints(c.every, c.kept)
		if c.fault == "" && err != nil || c.fault != "" && (err == nil || !strings.HasPrefix(err.Error(), c.fault)) {
			t.Errorf("%s: %v, want %q", name, err, c.fault)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}
