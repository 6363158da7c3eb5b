package scheduled

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/portable"
	"github.com/meander-rl/meander/schemas"
)

// Strategy says how an offset is drawn from 0 .. MaxStepOffset.
type Strategy string

// The strategies. Early and late speak of the offset: an early one is small.
const (
	Uniform     Strategy = "uniform"      // each of 0 .. M alike
	BiasedEarly Strategy = "biased_early" // round(u^2 M), u uniform in [0, 1)
	BiasedLate  Strategy = "biased_late"  // round((1 - u^2) M)
)

// Sampler names how a rollout steps.
type Sampler string

// The samplers. All but rk4 ask the model once per step.
const (
	Euler Sampler = "euler" // order 1
	DPM   Sampler = "dpm"   // DPM-Solver++ multistep, order 1 to 3 (Lu et al. 2022)
	UniPC Sampler = "unipc" // UniPC with B(h) = e^-h - 1, order 1 to 9 (Zhao et al. 2023)
	UniP  Sampler = "unip"  // the same without its corrector
	RK4   Sampler = "rk4"   // the classical Runge-Kutta method: 4 evaluations per step
)

// method is what is true of a sampler.
type method struct {
	usual, highest int // order
	// exact is up to which order the library that the public trainer pins computes what the formulas say; 0: all. Its
	// coefficients lose their digits the faster the shorter a step is. Of rollouts of 40 steps over 1000 timesteps it
	// is within 1e-10 up to here; unipc 6 is 2e-3 away, unipc 7 has no digit left.
	exact       int
	evaluations int  // of the model for each step
	fixed       bool // it has one order, where it evaluates the model between levels, and that trainer does not have it
	directed    bool // a step has a direction: of flow models it follows the velocity alone
	corrects    bool // the latent is corrected once the estimate at its level is known
	// weights are those of a step, from the levels of the earlier estimates, newest first.
	weights func(v interval, past []Level) weights
}

var methods = map[Sampler]method{
	Euler: {usual: 1, highest: 1, evaluations: 1, directed: true, weights: firstOrder},
	DPM:   {usual: 2, highest: 3, evaluations: 1, weights: dpmWeights},
	UniPC: {usual: 2, highest: 9, exact: 3, evaluations: 1, corrects: true, weights: unipWeights},
	UniP:  {usual: 2, highest: 9, exact: 6, evaluations: 1, weights: unipWeights},
	RK4:   {usual: 4, highest: 4, evaluations: 4, fixed: true},
}

// Evaluations returns how often a step evaluates the model.
func (s Sampler) Evaluations() int { return methods[s].evaluations }

// Prediction says what the model's output is.
type Prediction string

// The predictions.
const (
	Flow    Prediction = "flow_prediction" // the velocity noise - x0
	Epsilon Prediction = "epsilon"         // the noise
	V       Prediction = "v_prediction"    // a*noise - u*x0 (Salimans and Ho 2022)
)

// Compat says whose behaviour to follow.
type Compat string

// The two ways.
const (
	// Exact does what the settings say.
	Exact Compat = "exact"
	// SimpleTuner does what that trainer does with the library it pins (skrample 0.5):
	//   - a prob_start or prob_end of 0 counts as unset, and unset is the probability;
	//   - flow models step with Euler, whatever the sampler;
	//   - epsilon and v models step the wrong way: the latent gets noisier, one table
	//     entry up for each that the timestep goes down, and the history's levels are
	//     looked up below the step where they were made above it; the entry is t/N*N cut
	//     to an integer, which is not t for some (29 of 100), of the data estimate too;
	//   - a table that ends without data (zero SNR) ends at U/A = 1e6;
	//   - of unipc and unip the higher orders, whose coefficients that library computes
	//     without their digits, are refused;
	//   - orders beyond the sampler's are brought down to it; there is no rk4.
	SimpleTuner Compat = "simpletuner"
)

// Switch of ReflexFlow.
type Switch string

// The positions. Auto is on for flow models where anything may roll, MaxStepOffset > 0.
const (
	Auto Switch = "auto"
	On   Switch = "on"
	Off  Switch = "off"
)

// Settings of scheduled sampling, by their names in prompts.
type Settings struct {
	Timesteps     int      `key:"timesteps" range:"2..1048576"` // N: training timesteps are 0 .. N-1
	MaxStepOffset int      `key:"max_step_offset"`              // M: 0 rolls nothing
	Strategy      Strategy `key:"strategy" enum:"OffsetStrategies"`
	Ramp          Ramp
	Prediction    Prediction `key:"prediction" enum:"Predictions"`
	Sampler       Sampler    `key:"sampler"`
	Order         int        `key:"order"` // 0 is the sampler's usual one: 2 of dpm and unipc
	Compat        Compat     `key:"compat" enum:"RolloutCompats"`
	Switch        Switch     `key:"reflexflow" enum:"ReflexModes"` // it changes nothing for epsilon and v
	ReflexFlow    ReflexFlow
}

// DefaultSettings are the public trainer's defaults for a flow model of 1000 timesteps,
// exact. Nothing rolls until MaxStepOffset and a probability are given.
func DefaultSettings() Settings {
	return Settings{
		Timesteps: 1000, Strategy: Uniform, Ramp: Ramp{Shape: Linear}, Prediction: Flow,
		Sampler: UniPC, Compat: Exact, Switch: Auto, ReflexFlow: DefaultReflexFlow(),
	}
}

// Validate joins every fault by the field's name in prompts. Draw calls it, and intake before it
// accepts a prompt with scheduled sampling.
func (s Settings) Validate() error {
	var offset error
	if s.MaxStepOffset < 0 || s.MaxStepOffset >= s.Timesteps {
		offset = fmt.Errorf("max_step_offset: %v; must be at least 0 and below timesteps", s.MaxStepOffset)
	}
	return errors.Join(schemas.CheckFields(&s), offset, checkSampler(s.Sampler, s.Order, s.Prediction, s.Compat))
}

// maxTimesteps bounds N, so that no list of levels is huge.
const maxTimesteps = 1 << 20

// checkSampler returns an error, for the author of a prompt, if the sampler cannot run with this
// order, prediction and compat; nil if it can. Order 0 is the sampler's own.
func checkSampler(s Sampler, order int, p Prediction, compat Compat) error {
	m, known := methods[s]
	switch {
	case !known:
		return fmt.Errorf("sampler: %q; must be euler, dpm, unipc, unip or rk4", string(s))
	case compat == SimpleTuner && m.fixed:
		return fmt.Errorf("sampler: %s; must be euler, dpm, unipc or unip with compat simpletuner, which has no %s",
			s, s)
	case order < 0 || order > 9:
		return fmt.Errorf("order: %d; must be 1 to 9, or 0 for the sampler's own", order)
	case compat == SimpleTuner && p != Flow && m.exact > 0 && order > m.exact:
		return fmt.Errorf("order: %d; must be at most %d with %s and compat simpletuner: the library of that trainer "+
			"loses the digits of higher ones", order, m.exact, s)
	case compat == SimpleTuner || order == 0:
		return nil
	case m.fixed && order != m.highest:
		return fmt.Errorf("order: %d; must be %d with %s", order, m.highest, s)
	case order > m.highest:
		return fmt.Errorf("order: %d; must be at most %d with %s", order, m.highest, s)
	}
	return nil
}

// Warnings returns notes on valid settings that do what their author hardly means; nil: none.
// Intake returns them to the author with the prompt.
func (s Settings) Warnings() []string {
	var w []string
	if s.ReflexOn() && s.ReflexFlow.Alpha > 1 {
		w = append(w, fmt.Sprintf("reflexflow.alpha: %v; above 1 weights of the loss can be negative",
			s.ReflexFlow.Alpha))
	}
	if s.Switch == On && s.Prediction != Flow {
		w = append(w, fmt.Sprintf("reflexflow: on; changes nothing with %s", s.Prediction))
	}
	if s.Compat == SimpleTuner {
		sampler, order := s.Steps()
		if sampler != s.Sampler {
			w = append(w, fmt.Sprintf("sampler: %s; flow models step with euler with compat simpletuner", s.Sampler))
		} else if s.Order > order {
			w = append(w, fmt.Sprintf("order: %d; %s uses %d with compat simpletuner", s.Order, s.Sampler, order))
		}
		if s.Prediction != Flow {
			w = append(w, fmt.Sprintf("compat: simpletuner; with %s a rollout adds noise where it should remove it",
				s.Prediction))
		}
	}
	return w
}

// Steps returns the sampler and the order that rollouts run.
func (s Settings) Steps() (Sampler, int) {
	return effectiveSampler(s.Sampler, s.Order, s.Prediction, s.Compat)
}

// effectiveSampler returns the sampler and the order that run, where settings that checkSampler
// accepts say another: with compat simpletuner a flow model always steps by euler, order 0 is the
// usual one, and an order is at most the sampler's highest.
func effectiveSampler(sampler Sampler, order int, p Prediction, compat Compat) (Sampler, int) {
	if compat == SimpleTuner && p == Flow {
		sampler = Euler
	}
	m := methods[sampler]
	return sampler, min(cmp.Or(order, m.usual), m.highest)
}

// ReflexOn reports whether the loss of these settings is ReflexFlow's.
func (s Settings) ReflexOn() bool {
	return s.Prediction == Flow && (s.Switch == On || s.Switch == Auto && s.MaxStepOffset > 0)
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

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
