package sampling_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// The contract, the mathematics and the cards of models know the same grids and rules for mu: what a policy may say, a
// schedule computes.
func TestSchedule_TakesWhatPoliciesSay(t *testing.T) {
	const (
		unipc = `{"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": true,
			"prediction_type": "flow_prediction"}`
		dynamic = `{"use_dynamic_shifting": true}`
	)
	seen := map[string]string{}
	for _, grid := range append([]string{""}, schemas.Grids...) {
		for _, mu := range append([]string{""}, schemas.MuRules...) {
			p := &schemas.Policy{Tenant: schemas.TenantMain, SchedulerConfig: []byte(dynamic), Grid: grid, Mu: mu}
			if grid == schemas.GridDiffusion {
				p.SchedulerConfig = []byte(`{"_class_name": "EulerDiscreteScheduler"}`)
			}
			if grid == schemas.GridUniFlow {
				p.SchedulerConfig = []byte(unipc)
			}
			if grid == schemas.GridPipeline {
				p.Pipeline = []byte(`{"random_access": "exact",
					"sigmas": [[1, 0.95, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0]]}`)
			}
			if mu == schemas.MuNone && grid != schemas.GridUniFlow && grid != schemas.GridDiffusion {
				p.SchedulerConfig = []byte(`{"shift": 3}`)
			}
			s, err := sampling.Schedule(p)
			if err != nil {
				t.Errorf("grid %q, mu %q: %v", grid, mu, err)
				continue
			}
			sigmas, err := s.Sigmas(10, 4096)
			if err != nil {
				t.Errorf("grid %q, mu %q: %v", grid, mu, err)
			}
			seen[fmt.Sprint(sigmas)] += fmt.Sprintf("%s/%s ", grid, mu)
		}
	}
	// linspace, linspace_torch and scheduler have four rules each; nothing shifts uni_flow, diffusion and pipeline here
	if len(seen) != 15 {
		t.Errorf("%d different schedules; want 15: %v", len(seen), seen)
	}
	early := &schemas.Policy{Tenant: schemas.TenantMain, Grid: schemas.GridPipeline, Pipeline: []byte("{}")}
	if s, err := sampling.Schedule(early); err != nil || s.Own != nil {
		t.Errorf("a pipeline that is not loaded: %+v, %v; want a schedule for an estimate", s, err)
	}
	if _, err := sampling.Schedule(&schemas.Policy{
		Tenant: schemas.TenantMain, SchedulerConfig: []byte(dynamic), Mu: "none",
	}); err == nil {
		t.Error("dynamic shifting without a rule for mu is accepted")
	}
}

// What the contract says of a transition is what its formulas do, and neither has one that the other lacks.
func TestTransitions_AreThoseOfTheFormulas(t *testing.T) {
	var names []flow.Transition
	sigmas := []float32{1, 0.5, 0}
	for _, x := range schemas.Transitions {
		name := flow.Transition(x.Name)
		names = append(names, name)
		if name.Stochastic() != x.Stochastic {
			t.Errorf("%s: stochastic %v", x.Name, name.Stochastic())
		}
		if _, err := flow.NewStepTransition(name, 1.5, sigmas, 0); (err != nil) != x.LevelIsShare {
			t.Errorf("%s: at a noise level of 1.5: %v", x.Name, err)
		}
		for i := range 2 {
			k, err := flow.NewStepTransition(name, 0.5, sigmas, i)
			if noise := x.Stochastic && (i == 0 || !x.EndsWithoutNoise); err != nil || (k.NoiseStd > 0) != noise {
				t.Errorf("%s: step %d has a standard deviation of %v, %v", x.Name, i, k.NoiseStd, err)
			}
		}
	}
	if !slices.Equal(names, flow.AllTransitions) {
		t.Errorf("%v have formulas, %v are in the contract", flow.AllTransitions, names)
	}
	for _, s := range schemas.Solvers {
		if !flow.Solver(s).Valid() {
			t.Errorf("solver %s has no formula", s)
		}
	}
}
