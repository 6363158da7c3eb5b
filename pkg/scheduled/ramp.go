package scheduled

import "github.com/meander-rl/meander/pkg/models/portable"

// Shape of a ramp.
type Shape string

// The shapes.
const (
	Linear Shape = "linear"
	Cosine Shape = "cosine"
)

// Ramp is the probability that a sample is eligible to roll, over the training steps.
type Ramp struct {
	Probability float64 `key:"probability" range:"0..1"` // without a ramp, RampSteps = 0
	StartStep   int     `key:"start_step" range:"0.."`   // before it the probability is Start
	RampSteps   int     `key:"ramp_steps" range:"0.."`   // steps from Start to End
	Shape       Shape   `key:"ramp_shape" enum:"RampShapes"`
	// Start and End are the ramp's ends; nil is Probability. 0 is a value. Compat simpletuner differs (At).
	Start *float64 `key:"prob_start" range:"0..1"`
	End   *float64 `key:"prob_end" range:"0..1"`
}

// At is the probability that a sample rolls at a training step, in [0, 1]. With q = clip((step -
// StartStep)/RampSteps, 0, 1), and for a cosine q = (1 - cos(pi q))/2,
//
//	p = Start + (End - Start) q
//
// With compat simpletuner a Start or End of 0 is Probability, and an End of nil is 0.5. The bits of a cosine are
// sin^2(q pi/2) by schemas/noise.md.
func (r Ramp) At(step int, c Compat) float64 {
	if r.RampSteps <= 0 {
		return r.Probability
	}
	start, end := r.Probability, r.Probability
	if r.Start != nil && !(c == SimpleTuner && *r.Start == 0) {
		start = *r.Start
	}
	switch {
	case r.End != nil && !(c == SimpleTuner && *r.End == 0):
		end = *r.End
	case r.End == nil && c == SimpleTuner:
		end = 0.5
	}
	if step < r.StartStep {
		return start
	}
	q := min(float64(step-r.StartStep)/float64(r.RampSteps), 1)
	if r.Shape == Cosine {
		s, _ := portable.SincosQuarter(q)
		q = float64(s * s)
	}
	if q == 1 {
		return end
	}
	return min(max(start+float64((end-start)*q), 0), 1)
}
