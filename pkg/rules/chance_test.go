package rules_test

import (
	"math/rand/v2"
	"testing"

	"github.com/meander-rl/meander/pkg/rules"
	"github.com/meander-rl/meander/schemas"
)

// Noise of any form breaks no rule: of 100 runs of 4,000 groups, or updates, whose numbers have one distribution from
// beginning to end, in which the reward always rises, none does. (Of 2,000 runs of 10,000 groups, drawn once, one at
// most did, of each form.)
func TestRules_Chance(t *testing.T) {
	t.Parallel()
	event := func(p, value float64) func(r *rand.Rand) float64 {
		return func(r *rand.Rand) float64 {
			if r.Float64() < p {
				return value
			}
			return 0
		}
	}
	for name, draw := range map[string]func(r *rand.Rand) float64{
		"normal": func(r *rand.Rand) float64 { return 0.5 + 0.2*r.NormFloat64() },
		"around": (*rand.Rand).NormFloat64,
		"rarely": event(0.02, 1),
		"mostly": event(0.998, 1),
		"heavy":  func(r *rand.Rand) float64 { x := r.ExpFloat64(); return -x * x * x },
		"groups": func(r *rand.Rand) (n float64) { // of eight samples, of prompts that are easy or hard
			p := r.Float64()
			for range 8 {
				n += event(p, 0.125)(r)
			}
			return n
		},
	} {
		r := rand.New(rand.NewPCG(1, 2))
		for run := range 100 {
			x, y := make([]float64, 4000), make([]float64, 4000)
			for i := range x {
				x[i], y[i] = draw(r), float64(i)
			}
			for _, rule := range []string{schemas.RuleReader, schemas.RuleDiversity} {
				if rules.Falls(rule, 64, x, y) {
					t.Errorf("%s: run %d breaks %s", name, run, rule)
				}
				for from := range 10 { // evaluations, of ten runs
					if x, y := x[400*from:400*from+400], y[:400]; rules.Falls(rule, 8, x, y) {
						t.Errorf("%s: run %d breaks %s by evaluations", name, 10*run+from, rule)
					}
				}
			}
		}
	}
	for name, draw := range map[string]func(r *rand.Rand) float64{ // each with the mean 0.5, which is the limit
		"normal": func(r *rand.Rand) float64 { return 0.5 + 0.2*r.NormFloat64() },
		"coin":   event(0.5, 1),
		"spikes": event(0.05, 10),
		"heavy":  func(r *rand.Rand) float64 { return r.ExpFloat64() / 2 },
	} {
		r := rand.New(rand.NewPCG(1, 2))
		for run := range 100 {
			x := make([]float64, 4000)
			for i := range x {
				x[i] = draw(r)
			}
			for _, size := range []int{8, 64} {
				if rules.Above(schemas.RuleKL, 0.5, size, x) {
					t.Errorf("%s: run %d is above its own mean", name, run)
				}
			}
		}
	}
}
