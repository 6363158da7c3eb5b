package schemas

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
)

// Request asks for one sample. Intake resolved everything: a sampler needs no
// defaults, and every sample of a group carries the same lists.
type Request struct {
	V           int64 `msgpack:"v"`
	Run         Run   `msgpack:"run" form:"token"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	GroupSize   int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	Lane        Lane  `msgpack:"lane" form:"token"`
	// BaseDigest names the checkpoint of the lane when the prompt was accepted: samplers of another one put the request
	// back. Empty: any.
	BaseDigest string `msgpack:"base_digest,omitempty" size:"0..MaxName"`
	// SampleSeed keys the noise of this sample (see noise.md). It is the bits of an unsigned 64-bit number.
	SampleSeed uint64 `msgpack:"sample_seed"`
	// NoiseSeed keys x_T alone: SampleSeed, or the group's when the initial noise is shared.
	NoiseSeed uint64 `msgpack:"noise_seed"`
	// StepSeeds take over from SampleSeed at some steps: of one leaf of a tree that is made alone.
	StepSeeds []StepSeed `msgpack:"step_seeds,omitempty" size:"0..MaxBranches"`
	// Start is where the sample begins; absent: at step 0, with drawn noise. NoiseSeed is
	// unused where it is there.
	Start *SegmentStart `msgpack:"start,omitempty"`
	// Stop is where it ends; absent: at T.
	Stop *SegmentStop `msgpack:"stop,omitempty"`
	// ScheduledSampling is what the sample rolls; absent: it is an ordinary one.
	ScheduledSampling *ScheduledSample `msgpack:"scheduled_sampling,omitempty"`
	Prompt            string           `msgpack:"prompt" size:"0..MaxPromptBytes"`
	NegativePrompt    string           `msgpack:"negative_prompt" size:"0..MaxPromptBytes"`
	// TruncatePrompt cuts texts that are too long for the model, where others fail.
	TruncatePrompt bool `msgpack:"truncate_prompt,omitempty"`
	// Text asks for text; absent: for an image. What is an image's, from Height to LatentsDType, is empty beside it.
	Text   *TextRequest `msgpack:"text,omitempty"`
	Height int64        `msgpack:"height" range:"0..MaxSide"`
	Width  int64        `msgpack:"width" range:"0..MaxSide"`
	// TrueCFGScale > 1 means two model evaluations per point.
	TrueCFGScale float64 `msgpack:"true_cfg_scale" range:"0..MaxCFGScale"`
	// Sigmas are post-shift, length T+1, strictly decreasing, the last is 0: the whole schedule,
	// whatever part of it runs.
	Sigmas []float32 `msgpack:"sigmas" size:"0..MaxSteps+1" range:"0..MaxSigma"`
	// Transitions are what each of the T steps runs: sde, cps, dance_sde or ode.
	Transitions []string `msgpack:"transitions" size:"0..MaxSteps" enum:"SDETypes"`
	NoiseLevel  float64  `msgpack:"noise_level" range:"0..MaxNoiseLevel"`
	LogProbKind string   `msgpack:"log_prob_kind" enum:"LogProbKinds?"`
	Solver      string   `msgpack:"solver" enum:"Solvers?"`
	// ReturnStepIndices are the latents to keep, sorted, 0..T.
	ReturnStepIndices []int64 `msgpack:"return_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps"`
	// CheckpointStepIndices are states to store besides, sorted, that another attempt can go on from.
	CheckpointStepIndices []int64  `msgpack:"checkpoint_step_indices,omitempty" size:"0..MaxSteps,unique" range:"1..MaxSteps-1"`
	Debug                 []string `msgpack:"debug" size:"0..MaxDebug,unique" enum:"DebugTensors"`
	LatentsDType          string   `msgpack:"latents_dtype" enum:"LatentsDTypes?"`
	// ReturnConditioning stores the encoded texts as well.
	ReturnConditioning bool `msgpack:"return_conditioning,omitempty"`
	// ScheduleDigest is the SHA-256 over what must be equal in a group: sigmas, transitions,
	// noise level, solver, kind of log-prob, dtype of latents, guidance scale and size; of text how its tokens are drawn.
	ScheduleDigest string `msgpack:"schedule_digest" form:"digest"`
	// Prune ends the sample in the middle where its log-probs are out of bounds.
	Prune            *Prune `msgpack:"prune,omitempty"`
	Priority         int64  `msgpack:"priority" range:"-MaxPriority..MaxPriority"`
	MinPolicyVersion int64  `msgpack:"min_policy_version" range:"0.."`
	// Group is the part of the prompt that the reward and advantage services work by.
	Group Group `msgpack:"group"`
}

// Group is what the reward and advantage services need to know of a sample's
// group; it travels with every event so that no service has to look it up.
type Group struct {
	// Batch is the batch id; a group without a batch is a batch of one, named by its uid.
	Batch string `msgpack:"batch" form:"token"`
	// BatchGroups is how many groups the batch has; 0: no explicit batch.
	BatchGroups int64         `msgpack:"batch_groups" range:"0..MaxBatchGroups"`
	Reward      []RewardSpec  `msgpack:"reward" size:"0..MaxRewards"`
	Advantage   AdvantageSpec `msgpack:"advantage"`
	// Deadline is Unix nanoseconds; 0: none.
	Deadline int64 `msgpack:"deadline" range:"0.."`
	// Tree is that of which the samples are the leaves; absent: they share no steps.
	Tree *Tree `msgpack:"tree,omitempty"`
	// Validation marks a group that is made to measure, not to train on: see Prompt.
	Validation bool     `msgpack:"validation"`
	Metadata   Metadata `msgpack:"metadata,omitempty"`
	// PromptSeq is the MDR_PROMPTS sequence of the prompt.
	PromptSeq uint64 `msgpack:"prompt_seq"`
	// Created is when the prompt was stored, Unix nanoseconds.
	Created int64 `msgpack:"created" range:"0.."`
	// GroupPolicy is the prompt's, resolved; absent: the defaults.
	GroupPolicy *GroupPolicy `msgpack:"group_policy,omitempty"`
	// Refill names the group that this one stands in for.
	Refill *Refill `msgpack:"refill,omitempty"`
	// BatchStep and BatchEpoch are where the trainer was, for the metrics of the batch.
	BatchStep  *int64 `msgpack:"batch_step,omitempty" range:"0.."`
	BatchEpoch *int64 `msgpack:"batch_epoch,omitempty" range:"0.."`
	// SourceRun is the run that made the trajectories, where they are scored again under
	// another run; empty: the run itself.
	SourceRun Run `msgpack:"source_run,omitempty" form:"token"`
}

// GroundTruth is that of the first reward function that has one.
func (g *Group) GroundTruth() string {
	for _, r := range g.Reward {
		if r.GroundTruth != "" {
			return r.GroundTruth
		}
	}
	return ""
}

// Same says whether two events carry the same group.
func (g *Group) Same(other *Group) bool {
	if reflect.DeepEqual(g, other) {
		return true // the rule; what is empty in one may be absent in the other
	}
	a, err1 := Encode(&Reward{Group: *g})
	b, err2 := Encode(&Reward{Group: *other})
	return err1 == nil && err2 == nil && bytes.Equal(a, b)
}

// AnsweredBy joins what a trajectory has otherwise than the request says. Whether its
// steps are stored, and its image, is not in it.
func (e *Request) AnsweredBy(t *Trajectory) error {
	var errs []error
	same := func(field string, got, want any) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s: %.100q; must be %.100q, as requested", field, fmt.Sprint(got), fmt.Sprint(want)))
		}
	}
	same("run", t.Run, e.Run)
	same("uid", t.UID, e.UID)
	same("sample_index", t.SampleIndex, e.SampleIndex)
	same("group_size", t.GroupSize, e.GroupSize)
	same("lane", t.Lane, e.Lane)
	same("prompt", t.Prompt, e.Prompt)
	same("negative_prompt", t.NegativePrompt, e.NegativePrompt)
	same("height", t.Height, e.Height)
	same("width", t.Width, e.Width)
	same("true_cfg_scale", t.TrueCFGScale, e.TrueCFGScale)
	same("sample_seed", t.SampleSeed, e.SampleSeed)
	same("noise_seed", t.NoiseSeed, e.NoiseSeed)
	same("step_seeds", fmt.Sprint(t.StepSeeds), fmt.Sprint(e.StepSeeds))
	same("schedule_digest", t.ScheduleDigest, e.ScheduleDigest)
	if field, ok := e.sameSegment(t); !ok {
		errs = append(errs, fmt.Errorf("%s: not that of the request", field))
	}
	if (e.Text == nil) != (t.Text == nil) || e.Text != nil && !reflect.DeepEqual(e.Text, &t.Text.Settings) {
		errs = append(errs, errors.New("text: not that of the request"))
	}
	if begin, end := e.Segment(); t.StopReason == StopCompleted && e.Text == nil {
		same("steps", int64(len(t.Steps)), end-begin)
		same("conditioning", len(t.Conditioning) > 0, e.ReturnConditioning)
	}
	if !t.Group.Same(&e.Group) {
		errs = append(errs, errors.New("group: not that of the request"))
	}
	return errors.Join(errs...)
}

// SameSample says that another request asks for something else; nil when it does not.
// Their priorities may differ.
func (e *Request) SameSample(other *Request) error {
	c := *other
	c.Priority = e.Priority
	if c.BaseDigest == "" { // of before requests were held to a checkpoint
		c.BaseDigest = e.BaseDigest
	}
	a, err1 := Encode(e)
	b, err2 := Encode(&c)
	if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
		return errors.New("request: not that of the prompt which has the uid")
	}
	return nil
}
