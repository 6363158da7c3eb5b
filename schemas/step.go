package schemas

import (
	"fmt"
	"slices"
)

// Step is one denoising step of one attempt at one sample, published as it
// happens. Only the steps that the sample's Trajectory names count.
type Step struct {
	V                 int64  `msgpack:"v" digest:"-"`
	Run               Run    `msgpack:"run" form:"token" digest:"-"`
	UID               UID    `msgpack:"uid" form:"token"`
	SampleIndex       int64  `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	Stage             Stage  `msgpack:"stage" form:"token"`
	Attempt           string `msgpack:"attempt" form:"token" digest:"-"`
	StepIndex         int64  `msgpack:"step_index" range:"0..MaxSteps-1"`
	NumInferenceSteps int64  `msgpack:"num_inference_steps" range:"1..MaxSteps"`
	// Transition is what ran.
	Transition string  `msgpack:"transition" enum:"SDETypes"`
	NoiseLevel float64 `msgpack:"noise_level" range:"0..MaxNoiseLevel"`
	Sigma      float32 `msgpack:"sigma" range:"(0..MaxSigma]"`
	SigmaNext  float32 `msgpack:"sigma_next" range:"[0..1)"`
	// Timestep is the float32 product 1000 * Sigma: to the bit what diffusers' scheduler has, so that its
	// index_for_timestep finds it. With OwnTimestep it is the network's own, of a model that predicts no velocity.
	Timestep    float32 `msgpack:"timestep" range:"0..1000*MaxSigma"`
	OwnTimestep bool    `msgpack:"own_timestep,omitempty"`
	// StdDevT is the diffusion coefficient g; NoiseStd is the standard deviation of the transition.
	StdDevT  float64 `msgpack:"std_dev_t" range:"0.."`
	NoiseStd float64 `msgpack:"noise_std" range:"0.."`
	// LogProb is in nats, the mean over ElementCount elements; null on an ode step.
	LogProb     *float64 `msgpack:"log_prob"`
	LogProbKind string   `msgpack:"log_prob_kind" enum:"LogProbKinds"`
	// LogProbSum is the sum of which LogProb is the mean; null on an ode step.
	LogProbSum   *float64 `msgpack:"log_prob_sum"`
	ElementCount int64    `msgpack:"element_count" range:"1..MaxTensorBytes"`
	// Tracks are the parts of the state in order, where it has several. LogProbSum is the sum of theirs.
	Tracks []StepTrack `msgpack:"tracks,omitempty" size:"2..MaxTracks"`
	// Latents holds the state before this step when its index was asked for, and on the last
	// step that the sample runs also the one after it. Shape [S, C], packed tokens.
	Latents []IndexedTensor `msgpack:"latents" size:"0..MaxStepLatents"`
	// Checkpoint is the state before this step where it was not asked for and is stored so that
	// another attempt can go on from it. Shape [S, C].
	Checkpoint *Tensor       `msgpack:"checkpoint,omitempty" digest:"-"`
	Debug      []NamedTensor `msgpack:"debug" size:"0..MaxDebug"`
	// ScheduledSampling is there where the step is one of it.
	ScheduledSampling *RolledStep `msgpack:"scheduled_sampling,omitempty"`
	PolicyVersion     int64       `msgpack:"policy_version" range:"0.."`
	WeightsDigest     string      `msgpack:"weights_digest" size:"0..MaxName"`
	ScheduleDigest    string      `msgpack:"schedule_digest" form:"digest"`
	Sampler           string      `msgpack:"sampler" size:"0..MaxName" digest:"-"`
	Backend           string      `msgpack:"backend" size:"0..MaxName" digest:"-"`
	// DeviceNS is this step's share of device time, nanoseconds.
	DeviceNS int64 `msgpack:"device_ns" range:"0.." digest:"-"`
	// Seal is a message authentication code over this step and all before it, by which samplers
	// know the steps that they can go on from. For them alone.
	Seal string `msgpack:"seal,omitempty" form:"sha256?" digest:"-"`

	unknown []string // see Sampling.CheckKnown
}

func (e *Step) noteUnknown(keys []string) { e.unknown = keys }

// CheckKnown is Sampling.CheckKnown for what a step says.
func (e *Step) CheckKnown() error { return checkKnown(e.unknown) }

// Tensors returns the tensors of the step in the order in which they are encoded: Latents, Checkpoint, Debug.
func (e *Step) Tensors() []*Tensor {
	all := make([]*Tensor, 0, len(e.Latents)+1+len(e.Debug))
	for i := range e.Latents {
		all = append(all, &e.Latents[i].Tensor)
	}
	if e.Checkpoint != nil {
		all = append(all, e.Checkpoint)
	}
	for i := range e.Debug {
		all = append(all, &e.Debug[i].Tensor)
	}
	return all
}

// State returns the state with an index, [S, C], if the step has it as latents or as a checkpoint;
// otherwise nil.
func (e *Step) State(index int64) *Tensor {
	for i := range e.Latents {
		if e.Latents[i].Index == index {
			return &e.Latents[i].Tensor
		}
	}
	if index == e.StepIndex {
		return e.Checkpoint
	}
	return nil
}

// Detached returns a copy whose tensors can be replaced.
func (e *Step) Detached() StepEvent {
	c := *e
	c.Latents, c.Debug = slices.Clone(e.Latents), slices.Clone(e.Debug)
	if e.Checkpoint != nil {
		c.Checkpoint = new(*e.Checkpoint)
	}
	return &c
}

// Place returns StepIndex.
func (e *Step) Place() int64 { return e.StepIndex }

// Mark sets which sample the event is of, and what made it.
func (e *Step) Mark(m StepMark) {
	e.Run, e.UID, e.SampleIndex, e.Stage, e.Attempt = m.Run, m.UID, m.SampleIndex, m.Stage, m.Attempt
	e.PolicyVersion, e.WeightsDigest, e.Sampler, e.Backend, e.DeviceNS = m.PolicyVersion, m.WeightsDigest, m.Sampler,
		m.Backend, m.DeviceNS
}

// SealedBy returns the seal.
func (e *Step) SealedBy() string { return e.Seal }

// Sealed sets the seal.
func (e *Step) Sealed(code string) { e.Seal = code }

// Track is one part of a state that has several, such as the video and the sound of a sample. A state stays one flat
// list of elements: its tracks follow one another in it, in the order in which they are listed.
type Track struct {
	Name string `msgpack:"name" form:"token"`
	// Shape is the track's own.
	Shape []int64 `msgpack:"shape" size:"1..MaxTensorDims" range:"1..MaxTensorBytes"`
	// Elements is the product of Shape: how many of the state's elements are of the track.
	Elements int64 `msgpack:"elements" range:"1..MaxTensorBytes"`
}

// StepTrack is a track with its share of a step's log-prob.
type StepTrack struct {
	Track
	// LogProb is LogProbSum / Elements; both are null on an ode step.
	LogProb    *float64 `msgpack:"log_prob"`
	LogProbSum *float64 `msgpack:"log_prob_sum"`
}

// TrackElements returns how many elements each track has; nil: the state has one track.
func TrackElements(tracks []Track) []int {
	var list []int
	for i := range tracks {
		list = append(list, int(tracks[i].Elements))
	}
	return list
}

// Same reports whether two tracks have the same name and shape.
func (t *Track) Same(o *Track) bool {
	return t.Name == o.Name && t.Elements == o.Elements && slices.Equal(t.Shape, o.Shape)
}

func (t *Track) checkRules(f *faults) {
	of := Tensor{Shape: t.Shape}
	if n, ok := of.ElementCount(); ok && n != t.Elements {
		f.add("elements", fmt.Sprint(t.Elements), fmt.Sprintf("must be %d, the product of the shape %v", n, t.Shape))
	}
}

// checkTracks checks that tracks have different names and are together a state of some elements; 0: not known.
func (f *faults) checkTracks(n int, track func(i int) *Track, elements int64) {
	if n == 0 || n > MaxTracks {
		return
	}
	sum := int64(0)
	for i := range n {
		t := track(i)
		sum += t.Elements
		for k := range i {
			if track(k).Name == t.Name {
				f.inItem("tracks", i).add("name", quote(t.Name), "must come at most once")
			}
		}
	}
	if elements > 0 && sum != elements {
		f.add("tracks", fmt.Sprintf("%d elements", sum), fmt.Sprintf("must be %d in all, the state's", elements))
	}
}

// checkTracks checks the tracks of a step: the step's log-prob is their sum.
func (e *Step) checkTracks(f *faults) {
	f.checkTracks(len(e.Tracks), func(i int) *Track { return &e.Tracks[i].Track }, e.ElementCount)
	if len(e.Tracks) == 0 || len(e.Tracks) > MaxTracks {
		return
	}
	stochastic, sum, whole := TransitionNamed(e.Transition).Stochastic, 0.0, true
	for i := range e.Tracks {
		t, g := &e.Tracks[i], f.inItem("tracks", i)
		g.checkPresence("log_prob", t.LogProb, stochastic)
		g.checkPresence("log_prob_sum", t.LogProbSum, stochastic)
		if t.LogProb == nil || t.LogProbSum == nil {
			whole = false
			continue
		}
		sum += *t.LogProbSum
		if mean := *t.LogProbSum / float64(t.Elements); t.Elements > 0 && *t.LogProb != mean {
			g.add("log_prob", formatFloat(*t.LogProb), "must be "+formatFloat(mean)+", log_prob_sum / elements")
		}
	}
	if !whole {
		return
	}
	if e.LogProbSum != nil && *e.LogProbSum != sum {
		f.add("log_prob_sum", formatFloat(*e.LogProbSum),
			"must be "+formatFloat(sum)+", the sum of the tracks in order")
	}
	if mean := sum / float64(e.ElementCount); e.LogProb != nil && e.ElementCount > 0 && *e.LogProb != mean {
		f.add("log_prob", formatFloat(*e.LogProb), "must be "+formatFloat(mean)+", log_prob_sum / element_count")
	}
}
