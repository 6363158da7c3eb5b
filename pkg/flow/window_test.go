package flow_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
)

// Progressive windows of verl-omni's mix_grpo: lo 0, hi 5, size 2, two iterations each.
func TestWindow_Progressive(t *testing.T) {
	starts := []int{0, 0, 2, 2, 3, 3, 3}
	for iteration, start := range starts {
		w := flow.Window{
			Size: 2, Lo: 0, Hi: 5, Strategy: flow.ProgressiveWindow, Iteration: iteration, ItersPerGroup: 2,
		}
		got, err := w.Indices(10, 1)
		if err != nil {
			t.Fatal(err)
		}
		if want := []int{start, start + 1}; !slices.Equal(got, want) {
			t.Errorf("iteration %d: %v, want %v", iteration, got, want)
		}
	}
}

// Whatever the window: Size steps within [Lo, Hi), ascending, without repeats, and a run
// unless noncontiguous; the same again from the same seed.
func TestWindow_Indices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := rapid.IntRange(1, flow.MaxSteps).Draw(t, "steps")
		lo := rapid.IntRange(0, steps-1).Draw(t, "lo")
		hi := rapid.IntRange(lo+1, steps).Draw(t, "hi")
		w := flow.Window{
			Size: rapid.IntRange(1, hi-lo).Draw(t, "size"), Lo: lo, Hi: hi,
			Strategy: rapid.SampledFrom([]flow.Strategy{
				flow.RandomWindow, flow.ProgressiveWindow,
				flow.NoncontiguousWindow,
			}).Draw(t, "strategy"),
			Iteration:     rapid.IntRange(0, math.MaxUint32).Draw(t, "iteration"),
			ItersPerGroup: rapid.IntRange(1, 100).Draw(t, "iters"),
		}
		seed := rapid.Uint64().Draw(t, "seed")
		got, err := w.Indices(steps, seed)
		if err != nil {
			t.Fatal(err)
		}
		again, err := w.Indices(steps, seed)
		if err != nil || !slices.Equal(got, again) {
			t.Fatalf("%v then %v, %v", got, again, err)
		}
		if len(got) != w.Size || got[0] < lo || got[len(got)-1] >= hi {
			t.Fatalf("%v, want %d steps of [%d, %d)", got, w.Size, lo, hi)
		}
		for i := 1; i < len(got); i++ {
			if got[i] <= got[i-1] || w.Strategy != flow.NoncontiguousWindow && got[i] != got[i-1]+1 {
				t.Fatalf("%v is not ascending, or not a run", got)
			}
		}
	})
}

// Over many seeds every start of a random window, and every step of a noncontiguous
// one, comes equally often (within 5 standard errors).
func TestWindow_Uniform(t *testing.T) {
	const draws = 20000
	random := flow.Window{Size: 2, Lo: 1, Hi: 6, Strategy: flow.RandomWindow}
	subset := flow.Window{Size: 2, Lo: 1, Hi: 6, Strategy: flow.NoncontiguousWindow}
	starts, members := map[int]int{}, map[int]int{}
	for seed := range uint64(draws) {
		r, err := random.Indices(8, seed)
		if err != nil {
			t.Fatal(err)
		}
		starts[r[0]]++
		s, err := subset.Indices(8, seed)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range s {
			members[i]++
		}
	}
	check := func(what string, got int, p float64) {
		if want, limit := draws*p, 5*math.Sqrt(draws*p*(1-p)); !near(float64(got), want, limit) {
			t.Errorf("%s: %d of %d, want %.0f within %.0f", what, got, draws, want, limit)
		}
	}
	for start := 1; start <= 4; start++ {
		check(fmt.Sprintf("start %d", start), starts[start], 1.0/4)
	}
	for i := 1; i <= 5; i++ {
		check(fmt.Sprintf("step %d", i), members[i], 2.0/5)
	}
	if len(starts) != 4 || len(members) != 5 {
		t.Errorf("starts %v, members %v out of range", starts, members)
	}
}

func TestWindow_Refuses(t *testing.T) {
	good := flow.Window{Size: 2, Lo: 0, Hi: 5, Strategy: flow.RandomWindow}
	cases := []struct {
		name   string
		change func(*flow.Window)
		want   string
	}{
		{"size 0", func(w *flow.Window) { w.Size = 0 }, "sde_window.size: 0"},
		{"size beyond range", func(w *flow.Window) { w.Size = 6 }, "sde_window.size: 6"},
		{"negative lo", func(w *flow.Window) { w.Lo = -1 }, "sde_window.range: [-1, 5)"},
		{"hi beyond T", func(w *flow.Window) { w.Hi = 11 }, "sde_window.range: [0, 11)"},
		{"empty range", func(w *flow.Window) { w.Hi = 0 }, "sde_window.range: [0, 0)"},
		{"strategy", func(w *flow.Window) { w.Strategy = "" }, `sde_window.strategy: ""`},
		{"iteration", func(w *flow.Window) { w.Iteration = -1 }, "sde_window.iteration: -1"},
		{"iters", func(w *flow.Window) { w.Strategy = flow.ProgressiveWindow }, "sde_window.iters_per_group: 0"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := good
			c.change(&w)
			_, err := w.Indices(10, 0)
			wantError(t, err, c.want)
		})
	}
}

func TestStepIndices(t *testing.T) {
	cases := []struct {
		name string
		in   []int
		want []int
		err  string
	}{
		{"null is all", nil, []int{0, 1, 2, 3}, ""},
		{"empty is none", []int{}, []int{}, ""},
		{"sorted", []int{3, 0}, []int{0, 3}, ""},
		{"negative", []int{-1}, nil, "sde_step_indices: -1; must be a step from 0 to 3"},
		{"T", []int{4}, nil, "sde_step_indices: 4; must be a step from 0 to 3"},
		{"repeat", []int{1, 2, 1}, nil, "sde_step_indices: 1; must come at most once"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := flow.StepIndices(c.in, 4)
			if c.err != "" {
				wantError(t, err, c.err)
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("StepIndices(%v) = %v, %v, want %v", c.in, got, err, c.want)
			}
		})
	}
}

// A bad number of steps is an error of its own, never a panic or a huge allocation.
func TestIndices_BadSteps(t *testing.T) {
	for _, steps := range []int{-1, 0, flow.MaxSteps + 1, math.MaxInt} {
		want := fmt.Sprintf("num_inference_steps: %d", steps)
		_, err := flow.StepIndices(nil, steps)
		wantError(t, err, want)
		_, err = flow.ReturnIndices(nil, nil, steps)
		wantError(t, err, want)
		_, err = flow.Window{Size: 1, Hi: steps, Strategy: flow.NoncontiguousWindow}.Indices(steps, 0)
		wantError(t, err, want)
	}
	if got := flow.Transitions(flow.SDE, nil, -1); len(got) != 0 {
		t.Errorf("Transitions of -1 steps = %v, want none", got)
	}
}

func TestReturnIndices(t *testing.T) {
	cases := []struct {
		name    string
		in, sde []int
		want    []int
		err     string
	}{
		{"before and after each", nil, []int{2}, []int{2, 3}, ""},
		{"neighbours share", nil, []int{0, 1, 3}, []int{0, 1, 2, 3, 4}, ""},
		{"nothing stochastic", nil, []int{}, []int{}, ""},
		{"given", []int{4, 0}, []int{2}, []int{0, 4}, ""},
		{"empty given", []int{}, []int{2}, []int{}, ""},
		{"beyond T", []int{5}, nil, nil, "return_step_indices: 5; must be a step from 0 to 4"},
		{"repeat", []int{0, 0}, nil, nil, "return_step_indices: 0; must come at most once"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := flow.ReturnIndices(c.in, c.sde, 4)
			if c.err != "" {
				wantError(t, err, c.err)
				return
			}
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("ReturnIndices(%v, %v) = %v, %v, want %v", c.in, c.sde, got, err, c.want)
			}
		})
	}
}

func ExampleWindow_Indices() {
	w := flow.Window{Size: 2, Lo: 0, Hi: 5, Strategy: flow.RandomWindow}
	steps, err := w.Indices(10, flow.GroupSeed(flow.RunBase("demo"), "batch-1"))
	if err != nil {
		fmt.Println(err)
		return
	}
	kept, err := flow.ReturnIndices(nil, steps, 10)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(steps, kept)
	// Output: [2 3] [2 3 4]
}
