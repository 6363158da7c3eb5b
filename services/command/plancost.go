package command

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// defaultGroupSize and defaultLatents are intake's, stated in the schema of a Prompt.
const (
	defaultGroupSize = 8
	defaultLatents   = "F32"
)

// What a step event takes in its stream, subject and headers included, without tensors, and
// what each tensor adds to its elements. Measured; names make a difference of some percent.
const (
	stepEventBytes = 700
	tensorBytes    = 150
	// What a trajectory takes beside its prompt, and more for each step.
	trajectoryBytes, trajectoryStepBytes = 1450, 107
)

// planCost is what samples take. In the sum of a plan, what differs between groups is 0
// or empty.
type planCost struct {
	Pictures string `json:"pictures"` // width x height in pixels
	// NumInferenceSteps is T; StartStepIndex to StopStepIndex, exclusive, run of them, and SDESteps
	// are those of one sample that are stochastic.
	NumInferenceSteps int64   `json:"num_inference_steps"`
	StartStepIndex    int64   `json:"start_step_index"`
	StopStepIndex     int64   `json:"stop_step_index"`
	SDESteps          int64   `json:"sde_steps"`
	TrueCFGScale      float64 `json:"true_cfg_scale"`
	// LatentsKept is the states of one sample that are stored, each LatentsShape of
	// LatentsDType.
	LatentsKept   int64   `json:"latents_kept"`
	LatentsDType  string  `json:"latents_dtype"`
	LatentsShape  []int64 `json:"latents_shape"`
	BytesOfSample int64   `json:"bytes_per_sample"`
	// The rest is over all samples. Evaluations are those of the model, two where guidance is
	// active. PictureBytes is of uncompressed pictures: as PNG they are smaller.
	Steps           int64 `json:"steps"`
	Stochastic      int64 `json:"stochastic_steps"`
	Evaluations     int64 `json:"evaluations"`
	StepBytes       int64 `json:"step_bytes"`
	TrajectoryBytes int64 `json:"trajectory_bytes"`
	PictureBytes    int64 `json:"picture_bytes"`

	counted bool
}

// costOf is one sample of a valid prompt. The rules are intake's.
func costOf(e *schemas.Prompt, policy *schemas.Policy) (*planCost, error) {
	height, width := or(e.Height, policy.Height), or(e.Width, policy.Width)
	tokens, err := intake.Tokens(height, width, policy)
	if err != nil {
		return nil, err
	}
	total := int64(len(e.Sigmas))
	if e.Sigmas == nil {
		total = or(e.NumInferenceSteps, policy.NumInferenceSteps)
	}
	if !e.Evaluation {
		if err := e.Rollout.ValidateSteps(total); err != nil {
			return nil, err
		}
	}
	sigmas, err := intake.Sigmas(e, policy, tokens)
	if err != nil {
		return nil, err
	}
	begin, end, err := intake.Segment(e, sigmas)
	if err != nil {
		return nil, err
	}
	// The draw of a window needs the run: where the steps need not be neighbours, the states
	// kept may be a few more or less.
	chosen, kept, err := intake.Steps("", e, int(total), begin, end)
	if err != nil {
		return nil, err
	}
	sde := int64(0)
	for _, i := range chosen {
		if begin <= i && i < end {
			sde++
		}
	}
	steps := int64(end - begin)
	c := &planCost{
		Pictures: fmt.Sprintf("%d x %d pixels", width, height), NumInferenceSteps: total, StartStepIndex: int64(begin), StopStepIndex: int64(end), SDESteps: sde, TrueCFGScale: or(e.TrueCFGScale, policy.TrueCFGScale),
		LatentsKept: int64(len(kept)), LatentsDType: cmp.Or(e.Rollout.LatentsDType, defaultLatents), LatentsShape: []int64{int64(tokens), policy.LatentChannels},
	}
	elements := c.LatentsShape[0] * c.LatentsShape[1]
	item, _ := schemas.DTypeSize(c.LatentsDType)
	debug := int64(0)
	for _, name := range e.Rollout.Debug {
		if debug += tensorBytes; name != "std" { // a single number
			debug += 4 * elements
		}
	}
	c.Steps, c.Stochastic = steps, c.SDESteps
	c.Evaluations = c.SDESteps + (steps-c.SDESteps)*int64(flow.Solver(cmp.Or(e.Rollout.Solver, string(flow.Euler))).Evaluations())
	if c.TrueCFGScale > 1 {
		c.Evaluations *= 2
	}
	c.StepBytes = c.LatentsKept*(elements*item+tensorBytes) + steps*(stepEventBytes+debug)
	if int64(end) == total || e.Stop.Decode {
		c.PictureBytes = 3 * height * width
	}
	c.TrajectoryBytes = trajectoryBytes + trajectoryStepBytes*steps + int64(len(e.Prompt))
	c.BytesOfSample = c.StepBytes + c.PictureBytes
	return c, nil
}

// or is the value that p points to, else def.
func or[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// sum adds n samples of one group.
func (c *planCost) sum(s *planCost, n int64) {
	if !c.counted {
		*c = *s
		c.Steps, c.Stochastic, c.Evaluations, c.StepBytes, c.TrajectoryBytes, c.PictureBytes, c.counted = 0, 0, 0, 0, 0, 0, true
	}
	same(&c.Pictures, s.Pictures)
	same(&c.NumInferenceSteps, s.NumInferenceSteps)
	same(&c.StartStepIndex, s.StartStepIndex)
	same(&c.StopStepIndex, s.StopStepIndex)
	same(&c.SDESteps, s.SDESteps)
	same(&c.TrueCFGScale, s.TrueCFGScale)
	same(&c.LatentsKept, s.LatentsKept)
	same(&c.LatentsDType, s.LatentsDType)
	same(&c.BytesOfSample, s.BytesOfSample)
	if !slices.Equal(c.LatentsShape, s.LatentsShape) {
		c.LatentsShape = nil
	}
	c.Steps += n * s.Steps
	c.Stochastic += n * s.Stochastic
	c.Evaluations += n * s.Evaluations
	c.StepBytes += n * s.StepBytes
	c.TrajectoryBytes += n * s.TrajectoryBytes
	c.PictureBytes += n * s.PictureBytes
}

// same empties a value that another group has otherwise.
func same[T comparable](v *T, other T) {
	if *v != other {
		*v = *new(T)
	}
}

// print writes the lines of steps and latents.
func (c *planCost) print(line func(name, format string, args ...any)) {
	each := ""
	switch n := c.StopStepIndex - c.StartStepIndex; {
	case n < 1 || c.NumInferenceSteps == 0:
	case n < c.NumInferenceSteps:
		each = fmt.Sprintf("%d a sample, from %d to %d of %d, ", n, c.StartStepIndex, c.StopStepIndex, c.NumInferenceSteps)
	default:
		each = fmt.Sprintf("%d a sample, ", n)
	}
	guidance := ""
	if c.TrueCFGScale > 1 {
		guidance = fmt.Sprintf(" (guidance, scale %g)", c.TrueCFGScale)
	}
	line("steps", "%s%s in all, %s stochastic; %s%s", each, thousands(int(c.Steps)), thousands(int(c.Stochastic)), count(int(c.Evaluations), "model evaluation"), guidance)
	if c.BytesOfSample > 0 && c.LatentsDType != "" && c.LatentsShape != nil {
		line("latents", "%s of %s [%d, %d] kept; a sample stores %s", count(int(c.LatentsKept), "state"), c.LatentsDType, c.LatentsShape[0], c.LatentsShape[1], size(c.BytesOfSample))
	}
}

// checkNames finds reward functions and estimators that a prompt cannot have.
func checkNames(e *schemas.Prompt, defaults []string) error {
	specs := e.Reward
	if len(specs) == 0 {
		for _, name := range defaults {
			specs = append(specs, schemas.RewardSpec{Name: name})
		}
	}
	var errs []error
	for _, r := range specs {
		errs = append(errs, scorer.Check(r.Name, e.Prompt, r.GroundTruth, r.Params))
	}
	_, err := estimator.Default(cmp.Or(e.Advantage.Estimator, estimator.FlowGRPO))
	return errors.Join(append(errs, err)...)
}

// rewardLine is the reward functions of a prompt, and why not the model's own.
func rewardLine(e *schemas.Prompt, defaults []string, policy *schemas.Policy) string {
	var parts []string
	for _, r := range e.Reward {
		s := r.Name
		if w := or(r.Weight, 1); w != 1 {
			s += fmt.Sprintf(" x %g", w)
		}
		if !or(r.Required, true) {
			s += " (optional)"
		}
		parts = append(parts, s)
	}
	switch {
	case len(parts) > 0:
		return strings.Join(parts, " + ")
	case len(defaults) > 0 && policy != nil && len(policy.Reward) > 0 && !slices.Equal(defaults, policy.Reward):
		return fmt.Sprintf("%s (default without a text in double quotes, which %s needs)", strings.Join(defaults, " + "), strings.Join(policy.Reward, " + "))
	case len(defaults) > 0:
		return strings.Join(defaults, " + ") + " (default)"
	}
	return "the pipeline's default"
}

// advantageLine is the estimator of a prompt with its options.
func advantageLine(e *schemas.Prompt) string {
	a := e.Advantage
	c, err := estimator.Default(cmp.Or(a.Estimator, estimator.FlowGRPO))
	if err != nil {
		return a.Estimator // refused before
	}
	s := fmt.Sprintf("%s, std %s", c.Name, cmp.Or(a.Std, c.Std))
	if std := cmp.Or(a.Std, c.Std); std != estimator.StdNone {
		s += fmt.Sprintf(" (%s, epsilon %g)", cmp.Or(a.StdBasis, c.StdBasis), or(a.Epsilon, c.Epsilon))
	}
	if mode := cmp.Or(a.Mode, c.Mode); mode != "" {
		s += ", mode " + mode
	}
	if single := cmp.Or(a.Singleton, c.Singleton); single != c.Singleton {
		s += ", groups of one " + single
	}
	if gamma := or(a.Gamma, c.Gamma); gamma != 1 {
		s += fmt.Sprintf(", gamma %g", gamma)
	}
	if clip := or(a.AdvClipMax, c.AdvClipMax); clip > 0 {
		s += fmt.Sprintf(", clamped to %g", clip)
	}
	if g := e.GroupPolicy; g != nil {
		if zero := cmp.Or(g.ZeroStd, schemas.GroupKeep); zero != schemas.GroupKeep {
			s += ", zero std: " + zero
		}
		if failed := cmp.Or(g.Failed, schemas.GroupKeep); failed != schemas.GroupKeep {
			s += ", failed: " + failed
		}
	}
	return s
}
