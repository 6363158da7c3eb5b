package integration_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	proof "github.com/meander-rl/meander/services/verify"
)

// perfect is the synthetic models with data that is one point, which they therefore know.
func perfect(t *testing.T) (models model.Registry, point func(prediction string) *schemas.Tensor) {
	t.Helper()
	open := func(prediction string) *synthetic.Model {
		return synthetic.NewWith(synthetic.Config{
			Components: 1, MinStd: 1e-9, MaxStd: 1e-9, Contrast: 1, Prediction: prediction,
		})
	}
	for _, f := range append([]model.Family{synthetic.Family()}, synthetic.VarianceFamilies()...) {
		info, err := f.Inspect("")
		if err != nil {
			t.Fatal(err)
		}
		f.Open = func(string, model.Options) (model.Model, error) { return open(info.Prediction), nil }
		models = append(models, f)
	}
	return models, func(prediction string) *schemas.Tensor {
		mix, err := open(prediction).Mixture("a red fox", 32, 32)
		if err != nil {
			t.Fatal(err)
		}
		return &schemas.Tensor{
			DType: "F32", Shape: []int64{1, 4, int64(len(mix.Means[0]) / 4)},
			Data: tensor.F32.AppendFloats(nil, mix.Means[0]),
		}
	}
}

// A perfect model lands on the teacher-forced latent, with every sampler and order, for what
// models predict: through the real pipeline, and proven by verify. Noise falls in every step. In
// the public trainer's way models that predict epsilon or v add noise instead.
func TestScheduled_PerfectModelLands(t *testing.T) {
	t.Parallel()
	models, point := perfect(t)
	for _, family := range models {
		t.Run(family.Name, func(t *testing.T) {
			t.Parallel()
			w := start(t, func(c *config) { c.sampler.Models, c.sampler.Model = models, family.Name })
			info, err := family.Inspect("")
			if err != nil {
				t.Fatal(err)
			}
			roll := func(run schemas.Run, sampler string, order int64, compat string) []*schemas.Trajectory {
				got, _ := w.rolled(t, run, &schemas.Prompt{
					UID: "u", Prompt: "a red fox",
					ImageSettings: schemas.ImageSettings{
						Height: new(int64(32)), Width: new(int64(32)),
						Start: &schemas.Start{Data: &schemas.Data{Latents: point(info.Prediction)}},
						ScheduledSampling: &schemas.ScheduledSampling{
							MaxStepOffset: new(int64(10)), Strategy: "biased_late", Probability: new(1.0),
							BaseTimesteps: []float64{0, 120, 600, 980},
							Sampler:       sampler, Order: &order, Compat: compat,
						},
					},
					Seed:      new(int64(5)),
					GroupSize: new(int64(4)),
				})
				return got
			}
			for _, c := range []struct {
				sampler string
				order   int64
			}{{"euler", 1}, {"unipc", 1}, {"unipc", 2}, {"dpm", 1}, {"dpm", 2}, {"dpm", 3}, {"rk4", 4}} {
				run := schemas.Run(fmt.Sprintf("%s-%d", c.sampler, c.order))
				steps := 0
				for i, tr := range roll(run, c.sampler, c.order, "exact") {
					steps += len(tr.Steps)
					if c.sampler == "rk4" && info.Prediction == "" && i == 0 {
						continue // it asks at 0 as well, where no noise is left to tell the velocity by
					}
					if d := tr.Rolled.Drift; d == nil || *d > 3e-6 {
						t.Errorf("%s: sample %d drifts by %v over %d steps", run, i, number(d), len(tr.Steps))
					}
					for _, ref := range tr.Steps {
						step, err := w.Bus.LoadStepRef(t.Context(), ref)
						if err != nil {
							t.Fatal(err)
						}
						if s := step.ScheduledSampling; !(s.UNext < s.U) || step.Transition != "ode" ||
							step.LogProb != nil ||
							s.Sampler != c.sampler {
							t.Errorf("%s: step %+v", run, s)
						}
					}
				}
				report, err := proof.Run(t.Context(), w.Bus, run, proof.Options{Models: models})
				if err != nil || !report.OK(0) || report.Rolled < steps {
					t.Errorf("%s, %d steps: %+v, %v", run, steps, report, err)
				}
			}
			away := 0.0
			for _, tr := range roll("compat", "unipc", 2, "simpletuner") {
				away = max(away, *tr.Rolled.Drift)
			}
			if wrong := info.Prediction != ""; wrong != (away > 1e-3) {
				t.Errorf("in the public trainer's way drifts of %v", away)
			}
		})
	}
}

func number(x *float64) string {
	if x == nil {
		return "null"
	}
	return fmt.Sprint(*x)
}
