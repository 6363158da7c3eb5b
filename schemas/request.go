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
	V int64 `msgpack:"v"`
	Identity
	// BaseDigest names the checkpoint of the lane when the prompt was accepted: samplers of another one put the request
	// back. Empty: any.
	BaseDigest string `msgpack:"base_digest,omitempty" size:"0..MaxName"`
	Sampling
	// Text asks for text; absent: for an image.
	Text *TextRequest `msgpack:"text,omitempty"`
	Outputs
	// ScheduleDigest is the SHA-256 over what must be equal in a group: sigmas, transitions,
	// noise level, solver, kind of log-prob, dtype of latents, guidance scale and size; of text how its tokens are
	// drawn.
	ScheduleDigest string `msgpack:"schedule_digest" form:"digest"`
	// Prune ends the sample in the middle, by its log-probs or by rewards at a step.
	Prune            *Prune `msgpack:"prune,omitempty" for:"image"`
	Priority         int64  `msgpack:"priority" range:"-MaxPriority..MaxPriority"`
	MinPolicyVersion int64  `msgpack:"min_policy_version" range:"0.."`
	// PolicyVersion is the version of the weights that the sample is made with; absent: the newest.
	PolicyVersion *int64 `msgpack:"policy_version,omitempty" range:"0.."`
	// Group is the part of the prompt that the reward and advantage services work by.
	Group Group `msgpack:"group"`
}

// Outputs is what a sample of an image stores besides its image.
type Outputs struct {
	// ReturnStepIndices are the latents to keep, sorted, 0..T.
	ReturnStepIndices []int64 `msgpack:"return_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps" for:"image"`
	// CheckpointStepIndices are states to store besides, sorted, that another attempt can go on from.
	CheckpointStepIndices []int64  `msgpack:"checkpoint_step_indices,omitempty" size:"0..MaxSteps,unique" range:"1..MaxSteps-1" for:"image"`
	Debug                 []string `msgpack:"debug" size:"0..MaxDebug,unique" enum:"DebugTensors" for:"image"`
	// ReturnConditioning stores the encoded texts as well.
	ReturnConditioning bool `msgpack:"return_conditioning,omitempty" for:"image"`
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
	// Credit is what each track of the samples is trained for, resolved: each share names one. Absent: the reward.
	Credit []CreditShare `msgpack:"credit,omitempty" size:"0..MaxRewards*MaxTracks"`
	// Deadline is Unix nanoseconds; 0: none.
	Deadline int64 `msgpack:"deadline" range:"0.."`
	// Tree has the samples as its leaves; absent: they share no steps.
	Tree *Tree `msgpack:"tree,omitempty"`
	// Validation marks a group that is made to measure, not to train on: see Prompt.
	Validation bool     `msgpack:"validation"`
	Metadata   Metadata `msgpack:"metadata,omitempty"`
	// FreeReadSteps lets the steps go once they are read: see Prompt.
	FreeReadSteps bool `msgpack:"free_read_steps,omitempty"`
	// PromptSeq is the MDR_PROMPTS sequence of the prompt.
	PromptSeq uint64 `msgpack:"prompt_seq"`
	// Created is when the prompt was stored, Unix nanoseconds.
	Created int64 `msgpack:"created" range:"0.."`
	// GroupPolicy is the prompt's, resolved; absent: the defaults.
	GroupPolicy *GroupPolicy `msgpack:"group_policy,omitempty"`
	// Rules are the prompt's, resolved; absent: the defaults.
	Rules []RuleSpec `msgpack:"rules,omitempty" size:"0..MaxRewards"`
	// Refill names the group that this one stands in for.
	Refill *Refill `msgpack:"refill,omitempty"`
	// BatchStep and BatchEpoch are where the trainer was, for the metrics of the batch.
	BatchStep  *int64 `msgpack:"batch_step,omitempty" range:"0.."`
	BatchEpoch *int64 `msgpack:"batch_epoch,omitempty" range:"0.."`
	// SourceRun is the run that made the trajectories, where they are scored again under
	// another run; empty: the run itself.
	SourceRun Run `msgpack:"source_run,omitempty" form:"token"`
	// Stages are what the samples are made of, in order, Rounds how often they run at most; absent: one lane makes
	// them, as the stage main.
	Stages []GroupStage `msgpack:"stages,omitempty" size:"0..MaxStages"`
	Rounds int64        `msgpack:"rounds,omitempty" range:"0..MaxRounds"`
}

// GroundTruth returns the ground truth of the first reward function that has one; "" if none has.
func (g *Group) GroundTruth() Truth {
	for _, r := range g.Reward {
		if r.GroundTruth != "" {
			return r.GroundTruth
		}
	}
	return ""
}

// WhyStepsGone says why steps of the group are no longer stored.
func (g *Group) WhyStepsGone() string {
	if g.FreeReadSteps {
		return "freed when all had read them (--free-read-steps)"
	}
	return "removed by age or by hand"
}

// Same reports whether two events carry the same group.
func (g *Group) Same(other *Group) bool {
	if reflect.DeepEqual(g, other) {
		return true // the rule; what is empty in one may be absent in the other
	}
	a, err1 := Encode(&Reward{Group: *g})
	b, err2 := Encode(&Reward{Group: *other})
	return err1 == nil && err2 == nil && bytes.Equal(a, b)
}

// AnsweredBy returns an error for each setting in which a trajectory differs from the request, joined;
// nil if it answers the request. It does not check whether steps and image are stored.
func (e *Request) AnsweredBy(t *Trajectory) error {
	errs := append(differences(&t.Identity, &e.Identity), differences(&t.Sampling, &e.Sampling)...)
	same := func(field string, got, want any) {
		if got != want {
			errs = append(errs, fmt.Errorf("%s: %v; must be %v, as requested", field, got, want))
		}
	}
	same("schedule_digest", t.ScheduleDigest, e.ScheduleDigest)
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

// SameSample returns an error if another request asks for something else, and nil if not. Their
// priorities may differ.
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
