package estimate

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// Measured sizes in bytes: of a step event in its stream, with subject and headers but without tensors, and what each
// tensor adds to its elements. Names make a difference of some percent. Samplers reserve Request.StepBytes, which is an
// upper bound and larger.
const (
	stepEventBytes = 775
	tensorBytes    = 150
	// A trajectory without its prompt, and what each step adds.
	trajectoryBytes, trajectoryStepBytes = 1450, 107
)

// Cost is what samples need. In the sum of an estimate, a value that differs between groups is 0 or empty.
type Cost struct {
	// Settings are those of the samples, with what all have in common.
	Settings  *schemas.Settings `json:"settings"`
	ImageSize string            `json:"image_size"` // width x height in pixels
	// NumInferenceSteps is T. Steps StartStepIndex to StopStepIndex, exclusive, run; SDESteps of
	// one sample are stochastic.
	NumInferenceSteps int64 `json:"num_inference_steps"`
	StartStepIndex    int64 `json:"start_step_index"`
	StopStepIndex     int64 `json:"stop_step_index"`
	SDESteps          int64 `json:"sde_steps"`
	// GuidedSteps is how many of the T steps have classifier-free guidance.
	GuidedSteps int64 `json:"guided_steps"`
	// LatentsKept is how many states of one sample are stored, each of LatentsShape.
	LatentsKept int64 `json:"latents_kept"`
	// Checkpoints is how many more states are stored so that another attempt can go on from them.
	Checkpoints   int64   `json:"checkpoints"`
	LatentsShape  []int64 `json:"latents_shape"`
	BytesOfSample int64   `json:"bytes_per_sample"`
	// ConditioningBytes bounds the encoded texts of one prompt, if they are kept: once for all its samples, and
	// the negative prompt once for all prompts. ConditioningOfSample is one sample's share.
	ConditioningBytes    int64 `json:"conditioning_bytes"`
	ConditioningOfSample int64 `json:"conditioning_bytes_per_sample"`
	Totals
	TextCost

	text bool // of a text
}

// TextCost is what texts cost besides. Tokens is the most that one sample generates. LogitsPerToken of each token are
// stored at most, as LogitsDType, in LogitsBytes. LogitsDiffer says that prompts ask for different logits.
type TextCost struct {
	Tokens         int64  `json:"tokens,omitempty"`
	LogitsPerToken int64  `json:"logits_per_token,omitempty"`
	LogitsDType    string `json:"logits_dtype,omitempty"`
	LogitsBytes    int64  `json:"logits_bytes_per_token,omitempty"`
	LogitsDiffer   bool   `json:"logits_differ,omitempty"`
	// DrawnBy is the server that draws the tokens; empty: the sampler does. Numbers are those that it gives of each
	// token; none: that is not known yet.
	DrawnBy string   `json:"drawn_by,omitempty"`
	Numbers []string `json:"numbers,omitempty"`
}

// Totals are over all samples. Evaluations counts evaluations of the model, two per step with guidance. ImageBytes is
// for uncompressed images; PNGs are smaller. The files of a group's conditions are shared by its samples.
type Totals struct {
	ConditioningStored int64 `json:"conditioning_stored_bytes"`
	Steps              int64 `json:"steps"`
	Stochastic         int64 `json:"stochastic_steps"`
	Evaluations        int64 `json:"evaluations"`
	// FlatEvaluations is what samples without shared steps would need: more than Evaluations for trees.
	FlatEvaluations int64 `json:"flat_evaluations"`
	// PrunedEvaluations is how many of Evaluations rewards at a step save at most: those of the samples beyond Keep.
	PrunedEvaluations int64 `json:"pruned_evaluations,omitempty"`
	StepBytes         int64 `json:"step_bytes"`
	TrajectoryBytes   int64 `json:"trajectory_bytes"`
	ImageBytes        int64 `json:"image_bytes"`
}

// addTimes adds the totals of n samples that each cost s.
func (t *Totals) addTimes(s Totals, n int64) {
	v, w := reflect.ValueOf(t).Elem(), reflect.ValueOf(s)
	for i := range v.NumField() {
		v.Field(i).SetInt(v.Field(i).Int() + n*w.Field(i).Int())
	}
}

// costOf returns the cost of one sample of a group, from its request as intake resolves it: evaluations of the model
// and bytes. It fails if the size of the image does not fit the model.
func costOf(r *schemas.Request, policy *schemas.Policy) (*Cost, error) {
	if r.Text != nil {
		return textCost(r, policy), nil
	}
	tokens, err := intake.Tokens(sampling.SizeOf(&r.Sampling), policy)
	if err != nil {
		return nil, err
	}
	begin, end := r.Segment()
	sde := int64(len(r.StochasticSteps()))
	steps := end - begin
	c := &Cost{
		Settings:  (*schemas.Settings)(&r.Sampling),
		ImageSize: fmt.Sprintf("%d x %d pixels", r.Width, r.Height), NumInferenceSteps: int64(len(r.Transitions)),
		StartStepIndex: begin, StopStepIndex: end, SDESteps: sde, GuidedSteps: r.GuidedSteps(),
		LatentsKept: int64(len(r.ReturnStepIndices)), Checkpoints: int64(len(r.CheckpointStepIndices)),
		LatentsShape: []int64{int64(tokens), policy.LatentChannels},
	}
	c.Steps, c.Stochastic = steps, c.SDESteps
	c.Evaluations = sampling.Evaluations(&r.Sampling, begin, end)
	if s := r.ScheduledSampling; s != nil {
		if c.Evaluations = rolledEvaluations(s, steps); r.TrueCFGScale > 1 {
			c.Evaluations *= 2
		}
	}
	c.FlatEvaluations = c.Evaluations
	if r.Group.TreeOf(r.Stage) != nil {
		c.StartStepIndex = 0 // the leaf has all steps behind it
		c.FlatEvaluations = sampling.Evaluations(&r.Sampling, 0, end)
	}
	elements := c.LatentsShape[0] * c.LatentsShape[1]
	item, _ := schemas.DTypeSize(r.LatentsDType)
	debug := int64(0)
	for _, name := range r.Debug {
		if debug += tensorBytes; name != "std" { // a single number
			debug += 4 * elements
		}
	}
	c.StepBytes = (c.LatentsKept+c.Checkpoints)*(elements*item+tensorBytes) + steps*(stepEventBytes+debug)
	switch s := r.ScheduledSampling; {
	case s != nil:
		c.ImageBytes = elements * item // the latents to train on
		if s.RollSettings.ReflexFlow != nil && s.RollSettings.ReflexFlow.Keep == schemas.KeepTensors {
			c.ImageBytes += 2 * 4 * elements
		}
		if s.RollSettings.Decode {
			c.ImageBytes += 3 * (3 + r.Frames) * r.Height * r.Width
		}
	case r.Stop == nil || r.Stop.Decode:
		c.ImageBytes = 3 * (1 + r.Frames) * r.Height * r.Width // of a video all frames besides the middle one
	}
	for _, of := range r.Conditions {
		c.ImageBytes += (of.Ref.Size + r.GroupSize - 1) / r.GroupSize
	}
	c.TrajectoryBytes = trajectoryBytes + trajectoryStepBytes*steps + int64(len(r.Prompt)+len(r.Prompt2)+len(r.Prompt3))
	c.BytesOfSample = c.StepBytes + c.ImageBytes
	if r.ReturnConditioning {
		for _, text := range r.Texts() { // the longest decides
			c.ConditioningBytes = max(c.ConditioningBytes, conditioningBytes(text, policy))
		}
		if r.TrueCFGScale > 1 {
			c.ConditioningBytes += conditioningBytes(r.NegativePrompt, policy)
		}
		c.ConditioningOfSample = (c.ConditioningBytes + r.GroupSize - 1) / r.GroupSize
		c.ConditioningStored = c.ConditioningOfSample
		c.TrajectoryBytes += 4 * tensorBytes
	}
	return c, nil
}

// templateTokens is about how many tokens a family's template adds to a text.
const templateTokens = 8

// conditioningBytes bounds the size of an encoded text with its mask: a text has at most one token per byte.
func conditioningBytes(text string, policy *schemas.Policy) int64 {
	if policy.ConditioningTokenBytes == 0 {
		return policy.ConditioningBytes
	}
	tokens := min(int64(len(text))+templateTokens, policy.ConditioningBytes/policy.ConditioningTokenBytes)
	return tokens * (policy.ConditioningTokenBytes + 1)
}

// rolledEvaluations returns how often a sample of scheduled sampling evaluates the model, when its roll takes that
// many steps.
func rolledEvaluations(s *schemas.ScheduledSample, steps int64) int64 {
	n := steps * int64(scheduled.Sampler(s.RollSettings.Sampler).Evaluations())
	if s.RollSettings.ReflexFlow != nil {
		if n++; s.Roll.IsRolled() {
			n++
		}
	}
	return n
}

// addSamplesOf adds n samples that each cost s, all of one group. Values that differ between samples are cleared,
// totals are summed.
func (c *Cost) addSamplesOf(s *Cost, n int64) {
	if c.Settings == nil { // the first
		*c = *s
		c.Settings, c.Totals = new(*s.Settings), Totals{}
	}
	largest := max(c.BytesOfSample, s.BytesOfSample)
	c.addTimes(s.Totals, n)
	c.Settings.KeepEqual(s.Settings)
	v, w := reflect.ValueOf(c).Elem(), reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Int64, reflect.String, reflect.Slice:
			if !reflect.DeepEqual(f.Interface(), w.Field(i).Interface()) {
				f.SetZero()
			}
		}
	}
	if c.text && s.text {
		c.BytesOfSample = largest
		c.keepLargest(&s.TextCost)
	}
}

// rewardLine describes the reward functions of a prompt in one line, and why they are not the model's own.
func rewardLine(e *schemas.Prompt, defaults []string, policy *schemas.Policy) string {
	var parts []string
	for _, r := range e.Reward {
		s := r.Name
		schemas.SetDefaults(&r)
		if *r.Weight != 1 {
			s += fmt.Sprintf(" x %g", *r.Weight)
		}
		if !*r.Required {
			s += " (optional)"
		}
		if r.GroupMin > 0 {
			s += fmt.Sprintf(" (of whole groups of at least %d)", r.GroupMin)
		}
		parts = append(parts, s)
	}
	switch {
	case len(parts) > 0:
		return strings.Join(parts, " + ")
	case e.ScheduledSampling != nil:
		return "none: the samples are to train on"
	case len(defaults) > 0 && policy != nil && len(policy.Reward) > 0 && !slices.Equal(defaults, policy.Reward):
		return fmt.Sprintf("%s (default without a text in double quotes, which %s needs)",
			strings.Join(defaults, " + "), strings.Join(policy.Reward, " + "))
	case len(defaults) > 0:
		return strings.Join(defaults, " + ") + " (default)"
	}
	return "the pipeline's default"
}

// advantageLine describes the estimator of a group with its options, and the group rules, in one line.
func advantageLine(a *schemas.AdvantageSpec, g *schemas.GroupPolicy) string {
	c, err := estimator.Of(*a)
	if err != nil {
		return a.Estimator // refused before
	}
	s := fmt.Sprintf("%s, std %s", c.Name, c.Std)
	if c.Std != schemas.StdNone {
		s += fmt.Sprintf(" (%s, epsilon %g)", c.StdBasis, c.Epsilon)
	}
	if c.Mode != "" {
		s += ", mode " + c.Mode
	}
	if own, err := estimator.Default(c.Name); err == nil && own.Singleton != c.Singleton {
		s += ", groups of one " + c.Singleton
	}
	if c.Gamma != 1 {
		s += fmt.Sprintf(", gamma %g", c.Gamma)
	}
	if c.AdvClipMax > 0 {
		s += fmt.Sprintf(", clamped to %g", c.AdvClipMax)
	}
	if g == nil {
		return s
	}
	if g.ZeroStd != schemas.GroupKeep {
		s += ", zero std: " + g.ZeroStd
	}
	if g.Failed != schemas.GroupKeep {
		s += ", failed: " + g.Failed
	}
	return s
}

// Measured sizes in bytes: of an event of tokens without logits, what each token adds to it, and what each token adds
// to the trajectory of a text.
const (
	tokensEventBytes     = 900
	tokenBytes           = 28
	trajectoryTokenBytes = 21
)

// textCost returns the cost of a text sample of a lane's policy, if its answers are as long as allowed.
func textCost(r *schemas.Request, policy *schemas.Policy) *Cost {
	x := r.Text
	tokens := x.Answers() * x.MaxNewTokens
	c := &Cost{
		Settings: (*schemas.Settings)(&r.Sampling), text: true,
		TextCost: TextCost{Tokens: tokens, LogitsPerToken: x.PerToken(), LogitsBytes: x.LogitsBytes()},
	}
	if by := policy.Text.Engine; by != nil {
		c.DrawnBy = by.String()
		if by.Values != "" {
			n, _ := by.Gives(x) // intake has asked before
			for _, of := range []struct {
				given bool
				name  string
			}{
				{n.LogProbs, "log-probs"},
				{n.ProcessedLogProbs, "processed log-probs"},
				{n.LogSumExps, "log-sum-exps"},
				{n.Entropies, "entropies"},
			} {
				if of.given {
					c.Numbers = append(c.Numbers, of.name)
				}
			}
		}
	}
	if x.Logits != nil {
		c.LogitsDType = x.Logits.DType
	}
	all := x.Tokens(policy.Text.MaxTokens)
	c.Steps = x.Answers() * (1 + max(1, (x.MaxNewTokens+x.TokensPerEvent-1)/x.TokensPerEvent))
	c.Evaluations, c.FlatEvaluations = tokens, tokens
	logits := int64(0)
	for answer := range x.Answers() {
		if x.StoresLogits(answer) {
			logits += x.MaxNewTokens * c.LogitsBytes
		}
	}
	c.StepBytes = c.Steps*tokensEventBytes + tokenBytes*all + logits
	c.TrajectoryBytes = trajectoryBytes + trajectoryStepBytes*c.Steps + trajectoryTokenBytes*all + int64(len(r.Prompt))
	c.BytesOfSample = c.StepBytes
	return c
}

// keepLargest keeps the larger token and logits values of c and s, which are of two groups of texts.
func (c *TextCost) keepLargest(s *TextCost) {
	c.LogitsDiffer = c.LogitsDiffer || c.LogitsPerToken != s.LogitsPerToken || c.LogitsDType != s.LogitsDType
	if s.LogitsBytes > c.LogitsBytes {
		c.LogitsPerToken, c.LogitsDType, c.LogitsBytes = s.LogitsPerToken, s.LogitsDType, s.LogitsBytes
	}
	c.Tokens = max(c.Tokens, s.Tokens)
}
