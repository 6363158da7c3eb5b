package schemas

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Identity names one stage of one sample.
type Identity struct {
	Run         Run   `msgpack:"run" form:"token" digest:"-"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	Stage       Stage `msgpack:"stage" form:"token"`
	GroupSize   int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	Lane        Lane  `msgpack:"lane" form:"token" digest:"-"`
	// Tenant is the one whose weights of the lane make the sample.
	Tenant Tenant `msgpack:"tenant,omitempty" form:"token" absent:"main" digest:"-"`
}

// Condition is a file that a network is given besides texts, such as an image to edit: inline or as a blob in a prompt,
// as a blob in what intake makes of it.
type Condition struct {
	// Name is the input of the network. Several files of one name are in the order in which the network takes them.
	Name string `msgpack:"name" form:"token"`
	// Type is image, mask, video or audio; intake knows it by the name.
	Type string `msgpack:"type,omitempty" enum:"ConditionTypes?"`
	// Stage is the stage of the same sample that makes the file, its image or its video.
	Stage Stage `msgpack:"stage,omitempty" form:"token" absent:"the file is given"`
	DataImage
}

// String says what is given, for people: image 3f2a91c04d5e.
func (c Condition) String() string {
	if c.Ref == nil {
		return c.Name
	}
	return fmt.Sprintf("%s %.12s", c.Name, c.Ref.Digest)
}

// checkConditions checks the conditions of a request or a trajectory: each has a type and is a blob, sorted by name.
func (f *faults) checkConditions(list []Condition) {
	for i, c := range list {
		item := f.inItem("conditions", i)
		if i > 0 && c.Name < list[i-1].Name {
			item.add("name", quote(c.Name), "must not be below the one before it")
		}
		item.requireOneOf("type", c.Type, ConditionTypes)
		if c.Ref == nil && c.Stage == "" || c.Data != nil {
			item.add("ref", "null, or beside data", "must be the only one of the two")
		}
	}
}

// Sampling is every setting that decides the bits of a sample, resolved. The request has it and the trajectory repeats
// it, so that the sampler, verify and trainers compute with the same values. A sample of text has the prompt and the
// seeds, and in its Text how tokens are drawn.
//
// A field without a tag digest is part of the schedule digest, where it is set; one that samples of a group may differ
// in has the tag "content" (see digest.go).
type Sampling struct {
	Prompt         string `msgpack:"prompt" size:"0..MaxPromptBytes" digest:"content"`
	NegativePrompt string `msgpack:"negative_prompt" size:"0..MaxPromptBytes" for:"image" digest:"content"`
	// TruncatePrompt cuts texts that are too long for the model, where others fail.
	TruncatePrompt bool `msgpack:"truncate_prompt,omitempty" for:"image" digest:"content"`
	// SampleSeed keys the noise of this sample (see noise.md). It is the bits of an unsigned 64-bit number.
	SampleSeed uint64 `msgpack:"sample_seed" digest:"content"`
	// NoiseSeed keys x_T alone: SampleSeed, or the group's when the initial noise is shared.
	NoiseSeed uint64 `msgpack:"noise_seed" digest:"content"`
	// StepSeeds take over from SampleSeed at some steps: of one leaf of a tree that is made alone.
	StepSeeds []StepSeed `msgpack:"step_seeds,omitempty" size:"0..MaxBranches" for:"image" digest:"content"`
	// Start is where the sample begins; absent: at step 0, with drawn noise. NoiseSeed is
	// unused where it is there.
	Start *SegmentStart `msgpack:"start,omitempty" for:"image" digest:"content"`
	// Stop is where the sample ends; absent: at T.
	Stop *SegmentStop `msgpack:"stop,omitempty" for:"image" digest:"content"`
	// ScheduledSampling is what the sample rolls; absent: it is an ordinary one.
	ScheduledSampling *ScheduledSample `msgpack:"scheduled_sampling,omitempty" for:"image" digest:"content"`

	// Sigmas are post-shift, length T+1, strictly decreasing, the last is 0, or above it beside NetworkTimesteps: the
	// whole schedule, whatever part of it runs.
	Sigmas []float32 `msgpack:"sigmas" size:"0..MaxSteps+1" range:"0..MaxSigma" for:"image"`
	// Transitions are what each of the T steps runs.
	Transitions []string `msgpack:"transitions" size:"0..MaxSteps" enum:"SDETypes" for:"image"`
	NoiseLevel  float64  `msgpack:"noise_level" range:"0..MaxNoiseLevel" for:"image"`
	Solver      string   `msgpack:"solver" enum:"Solvers?" for:"image"`
	LogProbKind string   `msgpack:"log_prob_kind" enum:"LogProbKinds?" for:"image"`
	// LatentsDType is the type that states are rounded to, before they are scored and stored.
	LatentsDType string `msgpack:"latents_dtype" enum:"LatentsDTypes?" for:"image"`
	// TrueCFGScale > 1 means two model evaluations per point.
	TrueCFGScale float64 `msgpack:"true_cfg_scale" range:"0..MaxCFGScale" through:"cfg_scales" for:"image"`
	Height       int64   `msgpack:"height" range:"0..MaxSide" for:"image"`
	Width        int64   `msgpack:"width" range:"0..MaxSide" for:"image"`
	// Prompt2 is the text for the second text encoder; empty: the prompt.
	Prompt2 string `msgpack:"prompt_2,omitempty" size:"0..MaxPromptBytes" for:"image"`
	// Prompt3 is the text for the third text encoder; empty: the prompt.
	Prompt3 string `msgpack:"prompt_3,omitempty" size:"0..MaxPromptBytes" for:"image"`
	// Guidance is the guidance input of the network; 0: it has none.
	Guidance float64 `msgpack:"guidance,omitempty" range:"0..MaxCFGScale" for:"image"`
	// Frames is the number of frames of a video; 0: the sample is an image.
	Frames int64 `msgpack:"frames,omitempty" range:"0..MaxFrames" for:"image"`
	// CFGFrom is the share of steps before classifier-free guidance begins, where it does not begin with the first.
	CFGFrom float64 `msgpack:"cfg_from,omitempty" range:"[0..1)" through:"cfg_scales" for:"image"`
	// CFGUntil is the share of steps after which classifier-free guidance ends, where it ends before the last.
	CFGUntil float64 `msgpack:"cfg_until,omitempty" range:"0..1" through:"cfg_scales" for:"image"`
	// TrueCFGScale2 is the scale of guidance at noise levels below BoundaryRatio; 0: TrueCFGScale at all of them.
	TrueCFGScale2 float64 `msgpack:"true_cfg_scale_2,omitempty" range:"0..MaxCFGScale" through:"cfg_scales" for:"image"`
	// BoundaryRatio is the noise level below which the model's second network computes; there with TrueCFGScale2 only.
	BoundaryRatio float64 `msgpack:"boundary_ratio,omitempty" range:"0..1" through:"cfg_scales" for:"image"`
	// GuidanceRescale is the share in which a velocity under classifier-free guidance is brought to the standard
	// deviation of the prompt's own; 0: it stays as it is.
	GuidanceRescale float64 `msgpack:"guidance_rescale,omitempty" range:"0..1" for:"image"`
	// NetworkTimesteps [T] are what a network that predicts no velocity knows the steps by; absent: 1000 * sigma.
	NetworkTimesteps []float32 `msgpack:"network_timesteps,omitempty" size:"0..MaxSteps" range:"0..1000*MaxSigma" for:"image"`
	// InitialStd is the standard deviation of the initial noise, there with NetworkTimesteps only; else it is 1.
	InitialStd float64 `msgpack:"initial_std,omitempty" range:"0..1" for:"image"`
	// Conditions are the files that the network is given besides texts, sorted by name.
	Conditions []Condition `msgpack:"conditions,omitempty" size:"0..MaxConditioning" for:"image"`
	// Arguments are what else the network's pipeline is called with, by name; values as texts, numbers in the shortest
	// form. What is not here is the pipeline's default.
	Arguments map[string]string `msgpack:"arguments,omitempty" size:"0..MaxParams" for:"image"`
	// NoNegativePrompt says that none was given, and none is to the network's pipeline: some compute otherwise than
	// with an empty one. NegativePrompt is empty beside it.
	NoNegativePrompt bool `msgpack:"no_negative_prompt,omitempty" for:"image" digest:"content"`

	unknown []string // what Decode found and does not know, as in "cfg_from=0.2"
}

func (s *Sampling) noteUnknown(keys []string) { s.unknown = keys }

// CheckKnown returns an error that names what a sample has and this version does not know, in its settings or in what
// they came to. Readers that compute with a sample call it: without a setting they would get the numbers of another.
// What decides no rollout is left out: the rules of the group, and times.
func (s *Sampling) CheckKnown() error { return checkKnown(s.unknown) }

// CheckUses is CheckKnown, and also refuses each setting that is set and that a reader does not use. uses are those
// that it does, by their names on the wire. Those with a tag through are used by whom that field is used.
func (s *Sampling) CheckUses(uses []string) error {
	if err := s.CheckKnown(); err != nil {
		return err
	}
	var errs []error
	v := reflect.ValueOf(s).Elem()
	for _, f := range Fields(v.Type()) {
		if f.isSet(f.In(v)) && !slices.Contains(uses, cmp.Or(f.Through, f.Name)) {
			errs = append(errs, fmt.Errorf("setting %s=%v is not used here; take a reader that computes with it",
				f.Name, f.In(v)))
		}
	}
	return errors.Join(errs...)
}

// checkKnown is CheckKnown of keys with their values.
func checkKnown(unknown []string) error {
	var errs []error
	for _, key := range unknown {
		if !strings.HasPrefix(key, "group.") && !strings.HasPrefix(key, "timings.") {
			errs = append(errs, fmt.Errorf("setting %s is not known to this version; upgrade meander", key))
		}
	}
	return errors.Join(errs...)
}

// Segment returns the steps [begin, end) that the sample runs, or should have run: all T if it has neither start nor
// stop. Steps[i] of its trajectory is step begin+i.
func (s *Sampling) Segment() (begin, end int64) {
	steps := int64(len(s.Transitions))
	begin, end = s.askedSegment(steps)
	end = max(0, min(end, steps))
	return max(0, min(begin, end)), end
}

// askedSegment returns the steps that start and stop name, even if they are beyond the schedule.
func (s *Sampling) askedSegment(steps int64) (begin, end int64) {
	if s.ScheduledSampling != nil {
		return s.ScheduledSampling.segment()
	}
	end = steps
	if s.Start != nil {
		begin = s.Start.StepIndex
	}
	if s.Stop != nil {
		end = s.Stop.StepIndex
	}
	return begin, end
}

// Texts returns the texts for the text encoders of a network, the prompt first. A network with more encoders gives the
// prompt to the others.
func (s *Sampling) Texts() []string {
	switch {
	case s.Prompt3 != "":
		return []string{s.Prompt, cmp.Or(s.Prompt2, s.Prompt), s.Prompt3}
	case s.Prompt2 != "":
		return []string{s.Prompt, s.Prompt2}
	}
	return []string{s.Prompt}
}

// CFGScale returns the scale of classifier-free guidance in step i, evaluated at a noise level; at most 1: without
// guidance. The boundary is that of timesteps, 1000 sigma in float32, as in diffusers.
func (s *Sampling) CFGScale(i int64, sigma float32) float64 {
	steps := float64(len(s.Transitions))
	switch {
	case float64(i)/steps < s.CFGFrom, s.CFGUntil > 0 && float64(i+1)/steps > s.CFGUntil:
		return 1
	case s.TrueCFGScale > 1 && s.TrueCFGScale2 > 0 && float64(float32(1000*sigma)) < 1000*s.BoundaryRatio:
		return s.TrueCFGScale2
	}
	return s.TrueCFGScale
}

// StepScales returns the scale of classifier-free guidance at the beginning of each of the T steps; 1: without.
func (s *Sampling) StepScales() []float64 {
	scales := make([]float64, min(len(s.Transitions), len(s.Sigmas)))
	for i := range scales {
		scales[i] = max(1, s.CFGScale(int64(i), s.Sigmas[i]))
	}
	return scales
}

// Timestep returns what the network knows the state before step i by, in 0 to T: 1000 * sigma in float32, as
// diffusers has it for a flow, or the network's own, which is 0 after the last step.
func (s *Sampling) Timestep(i int64) float32 {
	switch {
	case len(s.NetworkTimesteps) == 0:
		return 1000 * s.Sigmas[i]
	case i < int64(len(s.NetworkTimesteps)):
		return s.NetworkTimesteps[i]
	}
	return 0
}

// GuidedSteps returns how many of the T steps have classifier-free guidance.
func (s *Sampling) GuidedSteps() (n int64) {
	for _, scale := range s.StepScales() {
		if scale > 1 {
			n++
		}
	}
	return n
}

// Settings are all of a Sampling, as documents for people have it.
type Settings Sampling

// MarshalJSON returns the settings by their names on the wire.
func (s *Settings) MarshalJSON() ([]byte, error) { return json.Marshal(JSON((*Sampling)(s))) }

// KeepEqual clears each setting in which another sample differs.
func (s *Settings) KeepEqual(other *Settings) {
	v, w := reflect.ValueOf(s).Elem(), reflect.ValueOf(other).Elem()
	for _, f := range Fields(v.Type()) {
		if !reflect.DeepEqual(f.In(v).Interface(), f.In(w).Interface()) {
			f.In(v).SetZero()
		}
	}
}

// Extras returns "name value" of each setting that is set and that most samples do without, for people.
func (s *Settings) Extras() (list [][2]string) {
	v := reflect.ValueOf(s).Elem()
	for _, f := range Fields(v.Type()) {
		if x := f.In(v); f.Optional && f.Digest == "" && f.isSet(x) {
			value := fmt.Sprint(x)
			if x.Kind() == reflect.String {
				value = strconv.Quote(value)
			}
			list = append(list, [2]string{f.Name, value})
		}
	}
	return list
}

// StochasticSteps returns the steps of Segment that are not ode, ascending: those with log-probs to train on.
func (s *Sampling) StochasticSteps() []int64 {
	begin, end := s.Segment()
	return s.stochasticSteps(begin, end)
}

// stochasticSteps returns the steps of [begin, end) that are not ode; not nil.
func (s *Sampling) stochasticSteps(begin, end int64) []int64 {
	steps := []int64{}
	for i := begin; i < end; i++ {
		if TransitionNamed(s.Transitions[i]).Stochastic {
			steps = append(steps, i)
		}
	}
	return steps
}

// differences returns an error for each field in which got and want differ. Both are pointers to structs of one type.
func differences(got, want any) (errs []error) {
	g, w := reflect.ValueOf(got).Elem(), reflect.ValueOf(want).Elem()
	fields := Fields(g.Type())
	for i := range fields {
		f := &fields[i]
		a, b := f.In(g), f.In(w)
		switch {
		case sameValue(a, b):
		case a.Kind() == reflect.Pointer:
			errs = append(errs, fmt.Errorf("%s: not that of the request", f.Name))
		default:
			errs = append(errs, fmt.Errorf("%s: %.100q; must be %.100q, as requested", f.Name, fmt.Sprint(a),
				fmt.Sprint(b)))
		}
	}
	return errs
}

// sameValue reports whether two values of one type are equal. An empty list equals an absent one.
func sameValue(a, b reflect.Value) bool {
	empty := a.Kind() == reflect.Slice && a.Len() == 0 && b.Len() == 0
	return empty || reflect.DeepEqual(a.Interface(), b.Interface())
}

// imageFields returns the paths of the fields that are set and that only images have.
func imageFields(e any) []string {
	return setFields(e, func(f *Field) bool { return f.For == ForImage })
}

// setFields returns the paths of those fields that are set. e is a pointer to a struct.
func setFields(e any, those func(*Field) bool) (paths []string) {
	v := reflect.ValueOf(e).Elem()
	fields := Fields(v.Type())
	for i := range fields {
		f := &fields[i]
		switch value := f.In(v); {
		case !those(f) || !f.isSet(value):
		case value.Kind() == reflect.Struct:
			inside := Fields(value.Type())
			for k := range inside {
				if inside[k].isSet(inside[k].In(value)) {
					paths = append(paths, f.Name+"."+inside[k].Name)
				}
			}
		default:
			paths = append(paths, f.Name)
		}
	}
	return paths
}

// isSet reports whether the field, of value v, is set: digests and checks of dependent fields leave
// out those that are not. An empty list counts as set if an absent one means something else; a
// struct if one of its fields is.
func (f *Field) isSet(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice:
		return v.Len() > 0 || f.Absent != "" && !v.IsNil()
	case reflect.Struct:
		fields := Fields(v.Type())
		for i := range fields {
			if fields[i].isSet(fields[i].In(v)) {
				return true
			}
		}
		return false
	}
	return !v.IsZero()
}
