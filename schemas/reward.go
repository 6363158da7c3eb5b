package schemas

import (
	"cmp"
	"fmt"
	"slices"
)

// Reward is the score of one sample. A failure is a state, never a number.
type Reward struct {
	V           int64 `msgpack:"v" digest:"-"`
	Run         Run   `msgpack:"run" form:"token" digest:"-"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	GroupSize   int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	// Status is scored; failed: the sample could not be made, or a required score failed; or
	// pruned: it was ended in the middle.
	Status string `msgpack:"status" enum:"RewardStatuses"`
	// Error says why there is no reward, when failed or pruned.
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut" digest:"-"`
	// Reward is the weighted sum of the scores; null unless scored.
	Reward *float64 `msgpack:"reward" range:"-MaxScore..MaxScore"`
	Scores []Score  `msgpack:"scores" size:"0..MaxRewards"`
	// TrajectorySeq is the MDR_TRAJECTORIES sequence of the sample.
	TrajectorySeq uint64 `msgpack:"trajectory_seq" digest:"-"`
	Trained
	Group Group `msgpack:"group" digest:"-"`
	// Scored is when the last of its scores was there, Unix nanoseconds.
	Scored int64 `msgpack:"scored" range:"0.." digest:"-"`
	// SampleStarted and SampleFinished are copied from the trajectory, Unix nanoseconds.
	SampleStarted  int64 `msgpack:"sample_started,omitempty" range:"0.." digest:"-"`
	SampleFinished int64 `msgpack:"sample_finished,omitempty" range:"0.." digest:"-"`
	// Stages are those that ran for the sample, in order. TrajectorySeq and what follows it are of the last of them
	// that a lane made. Absent without stages.
	Stages []StageScored `msgpack:"stages,omitempty" size:"0..MaxStages*MaxRounds"`
}

// Trained is what the rules of a group need to know of a trajectory.
type Trained struct {
	// TrainedSteps is W, the number of stochastic steps.
	TrainedSteps int64 `msgpack:"trained_steps" range:"0..MaxSteps"`
	// Tokens is how many tokens a text generated, over all its turns; absent of images.
	Tokens           *int64 `msgpack:"tokens,omitempty" range:"0..MaxTokens"`
	ScheduleDigest   string `msgpack:"schedule_digest" form:"digest?"`
	PolicyVersionMin int64  `msgpack:"policy_version_min" range:"0.."`
	PolicyVersionMax int64  `msgpack:"policy_version_max" range:"0.."`
}

// Score is the outcome of one reward function.
type Score struct {
	// Name is the reward function's, as the prompt wrote it.
	Name string `msgpack:"name" form:"reward_name"`
	// Stage is the one that it judged, of a later round think-2; absent without stages, and where none could be.
	Stage   Stage   `msgpack:"stage,omitempty" form:"token"`
	Version string  `msgpack:"version" size:"0..MaxName"`
	Weight  float64 `msgpack:"weight" range:"-MaxWeight..MaxWeight"`
	// Status is scored or failed; a failed optional score is not part of the sum.
	Status string `msgpack:"status" enum:"RewardStatuses"`
	// Value is the score before its weight; null when failed.
	Value *float64 `msgpack:"value" range:"-MaxScore..MaxScore"`
	Error string   `msgpack:"error,omitempty" size:"0..MaxText,cut" digest:"-"`
	// DurationNS is the wall time of the call in nanoseconds.
	DurationNS int64 `msgpack:"duration_ns" range:"0.." digest:"-"`
	// Detail is what the function saw, for people: the text that was read.
	Detail string `msgpack:"detail,omitempty" size:"0..MaxDetail,cut" digest:"-"`
	// Members is how many samples of the group the function compared: the score depends on all of them. Absent: it
	// rated this one by itself.
	Members int64 `msgpack:"members,omitempty" range:"0..MaxGroupSize" digest:"-"`
	// Exact says of a function that recognizes the text in images whether it found the target and
	// nothing else, white space and case aside; absent: another function, or it failed.
	Exact *bool `msgpack:"exact,omitempty" digest:"-"`
}

// Verdict is a score from outside: from a person, or from a batch job that takes hours.
// That client publishes it, and the reward service adds it to the scores of the sample.
type Verdict struct {
	V           int64 `msgpack:"v"`
	Run         Run   `msgpack:"run" form:"token"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Name is the instance of the reward function external:NAME, or external.
	Name string `msgpack:"name" form:"token"`
	// Value is the score; null: there will be none, and Error says why.
	Value *float64 `msgpack:"value" range:"-MaxScore..MaxScore"`
	Error string   `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	// Comment and Author are for people.
	Comment string `msgpack:"comment,omitempty" size:"0..MaxText"`
	Author  string `msgpack:"author,omitempty" size:"0..MaxName"`
	// At is when it was given, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// StepReward is what reward functions say in the middle of a sample: of its prediction, the sample that it would end
// with if the velocity of the step before held until sigma 0. It is stored once, and the sample goes on, or ends, when
// it is.
type StepReward struct {
	V           int64 `msgpack:"v"`
	Run         Run   `msgpack:"run" form:"token"`
	UID         UID   `msgpack:"uid" form:"token"`
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	GroupSize   int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	// StepIndex is the boundary at which the sample was judged: the steps before it have run.
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1"`
	// Status is scored, or failed: Error says why. Reward is the weighted sum of the scores; null unless scored.
	Status string   `msgpack:"status" enum:"RewardStatuses"`
	Error  string   `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	Reward *float64 `msgpack:"reward" range:"-MaxScore..MaxScore"`
	Scores []Score  `msgpack:"scores" size:"0..MaxRewards"`
	// Media are the decoded prediction; none where all functions see Latents, the prediction itself, F32 [S, C].
	Media   []Medium `msgpack:"media,omitempty" size:"0..MaxMedia"`
	Latents *Tensor  `msgpack:"latents,omitempty"`
	// ContentDigest is that of the steps that have run, as of a trajectory that ends with them.
	ContentDigest string `msgpack:"content_digest" form:"digest"`
	// WeightsDigest is that of the weights that took them.
	WeightsDigest string `msgpack:"weights_digest,omitempty" size:"0..MaxName" absent:"of several versions, or not known"`
	// Scored is when the last of its scores was there, Unix nanoseconds.
	Scored int64 `msgpack:"scored" range:"0.."`
}

// Selection says which samples of a group end at a step, or go on from others, by the rule of its prompt for the
// rewards of steps. It is stored once, before any of them ends or goes on.
type Selection struct {
	V         int64 `msgpack:"v"`
	Run       Run   `msgpack:"run" form:"token"`
	UID       UID   `msgpack:"uid" form:"token"`
	GroupSize int64 `msgpack:"group_size" range:"1..MaxGroupSize"`
	StepIndex int64 `msgpack:"step_index" range:"1..MaxSteps-1"`
	// Rule is that of the prompt: Rule.Select gives what becomes of the members.
	Rule Prune `msgpack:"rule"`
	// Members are the samples with a reward at the step. Others go on: they came too late, or have ended before.
	Members []SelectedMember `msgpack:"members" size:"0..MaxGroupSize"`
	// SavedEvaluations are those of the network that the ended samples do not take.
	SavedEvaluations int64 `msgpack:"saved_evaluations" range:"0.."`
	// At is when it was decided, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// SelectedMember is a sample of a Selection.
type SelectedMember struct {
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Reward is that of the step; null: its functions failed, and the sample goes on.
	Reward *float64 `msgpack:"reward" range:"-MaxScore..MaxScore"`
	// Stopped says why the sample ends; absent: it goes on.
	Stopped string `msgpack:"stopped,omitempty" size:"0..MaxText,cut"`
	// Parent is the sample whose state at the step it goes on from; absent: its own.
	Parent *int64 `msgpack:"parent,omitempty" range:"0..MaxGroupSize-1"`
}

// StepQuestion asks the reward service about a sample that is in the middle (core NATS, StepScoreSubject). It is not
// stored; the answer is, as a StepReward and a Selection.
type StepQuestion struct {
	// StepIndex is the boundary that the sample has come to. Waited is how long it has waited there, nanoseconds.
	StepIndex int64 `json:"step_index"`
	Waited    int64 `json:"waited"`
	// Prune is the rule that decides there; nil: the sample goes on in any case. Saves is how many evaluations of the
	// network the sample does not take if it ends.
	Prune *Prune `json:"prune,omitempty"`
	Saves int64  `json:"saves,omitempty"`
	// Sample is the sample as a trajectory that stops there, encoded; its media are the prediction. Latents is the
	// prediction itself, where a function asks for it.
	Sample  []byte  `json:"sample"`
	Latents *Tensor `json:"latents,omitempty"`
}

// StepAnswer is the answer to a StepQuestion.
type StepAnswer struct {
	// Decided says that the sample goes on or, if Stopped says why, ends. Else it asks again.
	Decided bool   `json:"decided"`
	Stopped string `json:"stopped,omitempty"`
	// Refused says why there never will be an answer: the sample fails.
	Refused string `json:"refused,omitempty"`
}

// StepScoreSubject returns the subject on which the reward service answers questions about samples in the middle
// (core NATS, queue group reward).
func StepScoreSubject() string { return Prefix + "step_score" }

// StepRewardSubject returns the subject of what reward functions said of a sample at a step.
func StepRewardSubject(run Run, uid UID, sample, step int64) string {
	return Prefix + KindStepReward + "." + string(run) + "." + string(uid) + "." + itoa(sample) + "." + itoa(step)
}

// SelectionSubject returns the subject of which samples of a group end at a step.
func SelectionSubject(run Run, uid UID, step int64) string {
	return Prefix + KindSelection + "." + string(run) + "." + string(uid) + "." + itoa(step)
}

func (*StepReward) Type() string { return TypeStepReward }
func (*Selection) Type() string  { return TypeSelection }

func (e *StepReward) Subject() string {
	return StepRewardSubject(e.Run, e.UID, e.SampleIndex, e.StepIndex)
}
func (e *Selection) Subject() string { return SelectionSubject(e.Run, e.UID, e.StepIndex) }

func (e *StepReward) Validate() error { return CheckFields(e) }
func (e *Selection) Validate() error  { return CheckFields(e) }

func (e *StepReward) checkRules(f *faults) {
	f.checkSampleIndex(e.SampleIndex, e.GroupSize)
	if scored := e.Status == StatusScored; scored == (e.Reward == nil) {
		f.add("reward", nullOr(e.Reward), "must be there exactly if scored")
	} else if !scored {
		f.requireText("error", e.Error)
	}
}

// checkRules checks that members come once, in order, and that none ends without a reward, or goes on from one that
// does not go on itself.
func (e *Selection) checkRules(f *faults) {
	last := int64(-1)
	for i := range e.Members {
		m, g := &e.Members[i], f.inItem("members", i)
		if m.SampleIndex <= last || m.SampleIndex >= e.GroupSize {
			g.add("sample_index", itoa(m.SampleIndex), "must be above the one before, and below group_size")
		}
		if last = m.SampleIndex; m.Stopped != "" && m.Reward == nil {
			g.add("stopped", quote(m.Stopped), "must be absent without a reward")
		}
		if m.Parent == nil {
			continue
		}
		if of := e.Of(*m.Parent); m.Stopped != "" || of.Reward == nil || of.Stopped != "" || of.Parent != nil {
			g.add("parent", itoa(*m.Parent), "must be a member with a reward that goes on, of one that does not end")
		}
	}
}

// Stopped returns why a sample ends; "": it goes on.
func (e *Selection) Stopped(sample int64) string { return e.Of(sample).Stopped }

// Of returns what is said of a sample; of one that is no member, that it goes on.
func (e *Selection) Of(sample int64) SelectedMember {
	for _, m := range e.Members {
		if m.SampleIndex == sample {
			return m
		}
	}
	return SelectedMember{SampleIndex: sample}
}

// String says what becomes of the sample.
func (m SelectedMember) String() string {
	if m.Parent != nil {
		return "goes on from #" + itoa(*m.Parent)
	}
	return cmp.Or(m.Stopped, "goes on")
}

// FollowedBy reports whether a sample began where the selection says; one that did not complete may have ended before.
func (e *Selection) FollowedBy(t *Trajectory) bool {
	at, parent := t.Sibling(), e.Of(t.SampleIndex).Parent
	if at == nil || parent == nil {
		return at == nil && (parent == nil || t.StopReason != StopCompleted)
	}
	return at.SampleIndex == *parent && at.StepIndex == e.StepIndex
}

// Follow has a request begin where the selection says.
func (r *Request) Follow(e *Selection) {
	if parent := e.Of(r.SampleIndex).Parent; parent != nil {
		r.BranchOff(&Branch{Run: r.Run, UID: r.UID, SampleIndex: *parent, StepIndex: e.StepIndex})
	}
}

// JudgedAt reports whether the function judges samples at a step, too.
func (r *RewardSpec) JudgedAt(step int64) bool { return slices.Contains(r.AtSteps, step) }

// JudgedSteps returns the steps at which functions of the group judge its samples, ascending.
func (g *Group) JudgedSteps() (steps []int64) {
	for i := range g.Reward {
		steps = append(steps, g.Reward[i].AtSteps...)
	}
	slices.Sort(steps)
	return slices.Compact(steps)
}

// CheckJudgedSteps refuses steps at which no sample is in the middle: it runs the steps [begin, end).
func (g *Group) CheckJudgedSteps(begin, end int64) error {
	for i := range g.Reward {
		for _, k := range g.Reward[i].AtSteps {
			if k <= begin || k >= end {
				return fmt.Errorf("reward[%d].at_steps: %d; must be above %d, where the samples begin, and below %d, "+
					"where they end", i, k, begin, end)
			}
		}
	}
	return nil
}
