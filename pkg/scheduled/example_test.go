package scheduled_test

import (
	"fmt"

	"github.com/meander-rl/meander/pkg/scheduled"
)

// A batch of three is planned, and the samples that roll are rolled.
func Example() {
	settings := scheduled.DefaultSettings()
	settings.MaxStepOffset, settings.Ramp.Probability = 10, 0.8
	plan, err := settings.Draw(7, 100, []float64{600, 20, 999})
	if err != nil {
		fmt.Println(err)
		return
	}
	levels, err := scheduled.FlowLevels(settings.Timesteps)
	if err != nil {
		fmt.Println(err)
		return
	}
	x0, noise := []float32{0.5, -0.25}, []float32{1, 0.8}
	velocity := []float32{0.9 * (noise[0] - x0[0]), 0.9 * (noise[1] - x0[1])} // 90 % of the true one
	for _, s := range plan.Samples {
		if !s.Rolls() {
			fmt.Printf("sample %d at %d does not roll: %s\n", s.Index, s.Base, s.Reason)
			continue
		}
		x, teacher := make([]float32, 2), make([]float32, 2)
		scheduled.Noised(x, x0, noise, levels.At(float64(s.Source)))
		scheduled.Noised(teacher, x0, noise, levels.At(float64(s.Base)))
		r, err := scheduled.NewRoller(scheduled.Rollout{
			Levels: levels, Sampler: settings.Sampler, Compat: settings.Compat, Source: s.Source, Target: s.Base,
		}, x)
		if err != nil {
			fmt.Println(err)
			return
		}
		for !r.Done() { // a real model is asked for r.Input
			if _, _, err := r.Advance(velocity); err != nil {
				fmt.Println(err)
				return
			}
		}
		fmt.Printf("sample %d rolled from %d to %d, drift %.5f\n", s.Index, s.Source, s.Base,
			scheduled.Drift(r.Latent(), teacher))
	}
	// Output:
	// sample 0 rolled from 604 to 600, drift 0.00053
	// sample 1 rolled from 22 to 20, drift 0.00042
	// sample 2 at 999 does not roll: clipped
}
