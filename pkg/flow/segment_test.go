package flow_test

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/flow/flowtest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// segment is p from the state before step begin to the one before step end.
func segment(p flow.Plan, begin, end int) flow.Plan {
	p.Begin, p.End = begin, end
	return p
}

// entries are the steps where a stored state is all there is to know.
func entries(p flow.Plan) []int {
	var all []int
	for i := range p.Steps() {
		if p.CheckStart(i) == nil {
			all = append(all, i)
		}
	}
	return all
}

// through is x as it is stored and read back.
func through(t failer, storage tensor.DType, x []float32) []float32 {
	t.Helper()
	y := make([]float32, len(x))
	if err := storage.DecodeFloats(y, storage.AppendFloats(nil, x)); err != nil {
		t.Fatal(err)
	}
	return y
}

// Any part of any rollout, begun from the state that the whole one stored, is that part to
// the bit: latents, means, noise, velocities and log-probs.
func TestPlan_SegmentIsAPartOfTheWhole(t *testing.T) {
	field := gaussian{0.4}
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlan(t)
		x := noise(rapid.IntRange(1, 20).Draw(t, "elements"), p.Seed)
		whole := run(t, p, x, field.velocity)
		begin := rapid.SampledFrom(entries(p)).Draw(t, "begin")
		end := rapid.IntRange(begin+1, p.Steps()).Draw(t, "end")
		part := run(t, segment(p, begin, end), through(t, p.Storage, whole[begin].X), field.velocity)
		if !reflect.DeepEqual(part, whole[begin:end]) {
			t.Fatalf("steps %d to %d by themselves: %+v, in the whole rollout %+v", begin, end-1, part,
				whole[begin:end])
		}
	})
}

// Cut where it may be entered, a rollout in pieces ends where the whole one does.
func TestPlan_PiecesEqualTheWhole(t *testing.T) {
	field := gaussian{0.4}
	rapid.Check(t, func(t *rapid.T) {
		p := drawPlan(t)
		x := noise(rapid.IntRange(1, 20).Draw(t, "elements"), p.Seed)
		whole := run(t, p, x, field.velocity)
		cuts := append(entries(p)[1:], p.Steps())
		begin := 0
		for i, end := range cuts {
			if i < len(cuts)-1 && rapid.Bool().Draw(t, "go on") {
				continue
			}
			var err error
			if x, err = flowtest.Sample(context.Background(), segment(p, begin, end), x, field.velocity,
				nil); err != nil {
				t.Fatal(err)
			}
			begin = end
		}
		if want := whole[len(whole)-1].Next; !slices.Equal(x, want) {
			t.Fatalf("in pieces x = %v, as a whole %v", x, want)
		}
	})
}

// A multistep solver may be entered at the first of a run of ode steps, and nowhere else;
// the others anywhere.
func TestPlan_Enter(t *testing.T) {
	cases := []struct {
		stochastic []int
		want       []int // of ten steps, for dpm and unipc
	}{
		{nil, []int{0}},
		{[]int{0}, []int{0, 1}},
		{[]int{4}, []int{0, 4, 5}},
		{[]int{2, 3, 7}, []int{0, 2, 3, 4, 7, 8}},
		{[]int{9}, []int{0, 9}},
	}
	all := flowSteps(uniform(10))
	for _, solver := range []flow.Solver{flow.Euler, flow.Heun, flow.RK4, flow.DPM, flow.UniPC} {
		for _, c := range cases {
			p := sdePlan(flow.SDE, c.stochastic, uniform(10))
			p.Solver = solver
			want := c.want
			if !solver.Multistep() {
				want = all
			}
			if got := entries(p); !slices.Equal(got, want) {
				t.Errorf("%s with stochastic steps %v can be entered at %v, want %v", solver, c.stochastic, got, want)
			}
		}
	}
}

// What is refused would have other bits: with what the solver remembers its step leads
// elsewhere than without.
func TestPlan_EnterRefusesWhatDiffers(t *testing.T) {
	for _, solver := range []flow.Solver{flow.DPM, flow.UniPC} {
		p := sdePlan(flow.SDE, []int{1}, uniform(10))
		p.Solver = solver
		whole := run(t, p, noise(4, 1), gaussian{0.5}.velocity)
		for index := 3; index < 9; index++ {
			_, err := flow.NewRollout(segment(p, index, 10), whole[index].X)
			wantError(t, err, fmt.Sprintf("start.step_index: %d; must be 2", index), string(solver),
				fmt.Sprintf("the ode steps 2 to %d", index-1))
			fresh := run(t, odePlan(solver, p.Sigmas[index:]), whole[index].X, gaussian{0.5}.velocity)
			if slices.Equal(fresh[0].Next, whole[index].Next) {
				t.Errorf("%s: step %d without memory leads where it leads with it: it need not be refused", solver,
					index)
			}
		}
	}
}

// A segment evaluates the model for its own steps, no other.
func TestPlan_SegmentEvaluations(t *testing.T) {
	for _, solver := range []flow.Solver{flow.Euler, flow.Heun, flow.RK4} {
		p := sdePlan(flow.SDE, []int{5}, uniform(10))
		p.Solver = solver
		calls := 0
		count := func(ctx context.Context, dst, x []float32, sigma float32) error {
			calls++
			return halfX(ctx, dst, x, sigma)
		}
		run(t, segment(p, 4, 7), noise(4, 1), count)
		if want := 2*solver.Evaluations() + 1; calls != want {
			t.Errorf("%s: %d evaluations of steps 4 to 6, want %d", solver, calls, want)
		}
	}
}

func TestPlan_SegmentRefused(t *testing.T) {
	for _, c := range []struct {
		begin, end int
		want       string
	}{
		{-1, 0, "start.step_index: -1; must be 0 to 4"},
		{5, 0, "start.step_index: 5; must be 0 to 4"},
		{2, 2, "stop.step_index: 2; must be 3 to 5"},
		{3, 1, "stop.step_index: 1; must be 4 to 5"},
		{0, 6, "stop.step_index: 6; must be 1 to 5"},
		{0, -1, "stop.step_index: -1; must be 1 to 5"},
	} {
		p := segment(sdePlan(flow.SDE, []int{1}, fiveSteps), c.begin, c.end)
		wantError(t, p.Validate(), c.want)
		if _, err := flow.NewRollout(p, caseX); err == nil {
			t.Errorf("[%d, %d): a rollout of it was begun", c.begin, c.end)
		}
	}
}
