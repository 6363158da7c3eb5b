package schemas

import "fmt"

// Advantage is the result of one group, stored exactly once per uid.
type Advantage struct {
	V     int64  `msgpack:"v" digest:"-"`
	Run   Run    `msgpack:"run" form:"token" digest:"-"`
	UID   UID    `msgpack:"uid" form:"token"`
	Batch string `msgpack:"batch" form:"token"`
	// Status is complete: every sample was scored; partial: some failed, or had not come by the deadline, and the
	// others are compared among themselves; failed: no sample was scored, or the estimator refused the rewards; mixed:
	// policy versions too far apart (max_policy_span), or several schedules; stale: policy versions too old
	// (max_policy_lag); filtered: rewards all equal, where the prompt drops such groups; refused: intake took the
	// prompt for none; or cancelled: a control ended it, whatever it had. Only complete and partial have advantages;
	// Error says why a group is failed, mixed, stale, refused or cancelled, and by whom.
	Status    string `msgpack:"status" enum:"GroupStatuses"`
	Error     string `msgpack:"error,omitempty" size:"0..MaxText,cut" digest:"-"`
	GroupSize int64  `msgpack:"group_size" range:"1..MaxGroupSize"`
	// Members are the samples 0 to GroupSize - 1 in order, also the missing ones.
	Members []Member `msgpack:"members" size:"0..MaxGroupSize"`
	// Mean is over the group's own scored rewards, also under a global Scale. Null where there are no advantages,
	// unless filtered.
	Mean *float64 `msgpack:"mean"`
	// Std is what the advantages were divided by, less Epsilon: the spread of all BatchSamples
	// rewards under a global Scale, or where the estimator whitens; else of the group's own. With
	// Scale none it is only reported. Null as Mean is.
	Std *float64 `msgpack:"std"`
	// Scale is group, global or none; StdBasis is sample, expanded or population.
	Scale     string  `msgpack:"scale" enum:"StdScales"`
	StdBasis  string  `msgpack:"std_basis" enum:"StdBases"`
	Estimator string  `msgpack:"estimator" form:"token"`
	Epsilon   float64 `msgpack:"epsilon" range:"0..MaxEpsilon"`
	// TrainedSteps is W: each advantage holds for all W stochastic steps of its sample; of texts 1: for all tokens that
	// it generated.
	TrainedSteps     int64    `msgpack:"trained_steps" range:"0..MaxSteps"`
	ScheduleDigest   string   `msgpack:"schedule_digest" form:"digest?"`
	PolicyVersionMin int64    `msgpack:"policy_version_min" range:"0.."`
	PolicyVersionMax int64    `msgpack:"policy_version_max" range:"0.."`
	Metadata         Metadata `msgpack:"metadata,omitempty" digest:"-"`
	// Opened is when the first sample was scored, Closed when the last one was, Unix
	// nanoseconds; where none was, the prompt was stored, and the deadline (0: none).
	Opened int64 `msgpack:"opened" range:"0.." digest:"-"`
	Closed int64 `msgpack:"closed" range:"0.." digest:"-"`
	// Mode, AdvClipMax, Gamma and Singleton are the estimator's options, where it has them.
	Mode       string   `msgpack:"mode,omitempty" form:"token"`
	AdvClipMax *float64 `msgpack:"adv_clip_max,omitempty" range:"0..MaxAdvClip"`
	Gamma      *float64 `msgpack:"gamma,omitempty" range:"0..1"`
	// BatchSamples is B, how many samples were normalised together; 0: only this group's.
	BatchSamples int64 `msgpack:"batch_samples,omitempty" range:"0..MaxBatchGroups*MaxGroupSize" digest:"-"`
	// Refill names the group that this one stands in for, RefilledBy the one that stands in
	// for this one.
	Refill     *Refill `msgpack:"refill,omitempty" digest:"-"`
	RefilledBy UID     `msgpack:"refilled_by,omitempty" form:"token"`
	// Validation marks a group that was made to measure, not to train on; the prompt said so.
	Validation bool `msgpack:"validation,omitempty" digest:"-"`
	// FreeReadSteps lets the steps go once they are read; the prompt said so.
	FreeReadSteps bool `msgpack:"free_read_steps,omitempty" digest:"-"`
	// SourceRun is the run that made the trajectories, where they were scored again under
	// another run; empty: the run itself.
	SourceRun Run    `msgpack:"source_run,omitempty" form:"token" digest:"-"`
	Singleton string `msgpack:"singleton,omitempty" enum:"Singletons"`
	// BranchScope is what the children of branch points were compared with, of a group that is
	// a tree: siblings, depth or leaves.
	BranchScope string `msgpack:"branch_scope,omitempty" enum:"BranchScopes"`
	// Branches are the branch points of the tree, by step and then by sample, with an advantage
	// for the steps from there to the next ones. The steps before the first are in none: there
	// is nothing to compare them with.
	Branches []BranchGroup `msgpack:"branches,omitempty" size:"0..MaxGroupSize"`
	// Credits are advantages by stage and track: one for each stage that is trained; absent: each holds for the whole
	// sample.
	Credits []Credit `msgpack:"credits,omitempty" size:"1..MaxCredits"`
}

// Credit is the advantages of one stage of the samples, or of one track of it. They are compared among the samples that
// ran the stage: an interaction may have ended others before.
type Credit struct {
	// Stage is the stage, in all its rounds.
	Stage Stage `msgpack:"stage" form:"token"`
	// Track is one of the tracks of the stage's states; absent: all of them.
	Track string `msgpack:"track,omitempty" form:"token" absent:"all tracks"`
	// Every is how many members each sample of the stage leads to.
	Every int64 `msgpack:"every,omitempty" range:"0..MaxGroupSize" absent:"1"`
	// Values are those of the samples 0, Every, 2 Every and so on; null where no member that a sample leads to ran the
	// stage and has an advantage.
	Values []*float64 `msgpack:"values" size:"0..MaxGroupSize"`
}

// BranchGroup is the children of one branch point of a tree.
type BranchGroup struct {
	// StepIndex is the first step that they took each for itself.
	StepIndex int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
	// Mean is over the children's rewards, Std is the divisor of their advantages, less epsilon. As in the group both
	// cover all that the children were compared with. Null without any reward; Std also where they have the mean of
	// their leaves' advantages.
	Mean *float64 `msgpack:"mean"`
	Std  *float64 `msgpack:"std"`
	// Children are in the order of their samples. The first is the sample that came there.
	Children []BranchChild `msgpack:"children" size:"2..MaxGroupSize"`
}

// BranchChild is the steps of one sample from a branch point to the next one, or to its end.
type BranchChild struct {
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Leaves is how many scored samples have these steps on their path.
	Leaves int64 `msgpack:"leaves" range:"0..MaxGroupSize"`
	// Reward is the mean of their rewards, Advantage belongs to the steps; null without one.
	Reward    *float64 `msgpack:"reward"`
	Advantage *float64 `msgpack:"advantage"`
}

// Member is one sample of a group.
type Member struct {
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Reward and Advantage are null unless Status is scored.
	Reward    *float64 `msgpack:"reward"`
	Advantage *float64 `msgpack:"advantage"`
	// Status is scored; failed: the sample could not be made, or a required score failed;
	// pruned: it was ended in the middle, Error says why; cancelled: it was not scored when a control ended the group;
	// or missing: it had not come when the group closed.
	Status string `msgpack:"status" enum:"MemberStatuses"`
	// TrajectorySeq is the MDR_TRAJECTORIES sequence; 0 when missing.
	TrajectorySeq uint64 `msgpack:"trajectory_seq" digest:"-"`
	// Tokens is how many tokens a text generated, over all its turns; absent of images. What was given has no
	// advantage.
	Tokens *int64 `msgpack:"tokens,omitempty" range:"0..MaxTokens" digest:"-"`
	// StepAdvantages [W] are there when they differ over the trained steps, of a text [Tokens] when they differ over
	// its tokens; Advantage is then their mean.
	StepAdvantages []float64 `msgpack:"step_advantages,omitempty" size:"0..MaxTokens"`
	// Error says why the sample was pruned.
	Error string `msgpack:"error,omitempty" size:"0..MaxText" digest:"-"`
	// Stages are the stages that ran for the sample, in order; absent without stages.
	Stages []StageResult `msgpack:"stages,omitempty" size:"0..MaxStages*MaxRounds"`
}

// Of returns an error if a stored result is not that of a group with the given size and batch, and
// nil if it is.
func (e *Advantage) Of(size int64, batch string) error {
	if e.GroupSize != size || int64(len(e.Members)) != size || e.Batch != batch {
		return fmt.Errorf("group_size, members and batch: %d, %d items and %s; must be %d, as many and %s", e.GroupSize,
			len(e.Members), e.Batch, size, batch)
	}
	return nil
}

// Batch says that all groups of an explicit batch have closed.
type Batch struct {
	V     int64  `msgpack:"v" digest:"-"`
	Run   Run    `msgpack:"run" form:"token" digest:"-"`
	Batch string `msgpack:"batch" form:"token"`
	// Groups is how many groups count.
	Groups int64 `msgpack:"groups" range:"0..MaxBatchGroups"`
	// UIDs of the groups that count, sorted.
	UIDs []UID `msgpack:"uids" size:"0..MaxBatchGroups,unique" form:"token"`
	// Samples is the number of scored samples.
	Samples int64 `msgpack:"samples" range:"0..MaxBatchGroups*MaxGroupSize"`
	// Mean and Std are over all scored rewards of the groups that count; null when there are none.
	Mean     *float64 `msgpack:"mean"`
	Std      *float64 `msgpack:"std"`
	StdBasis string   `msgpack:"std_basis" enum:"StdBases"`
	// Metrics are named as verl names them, sorted by name.
	Metrics []Metric `msgpack:"metrics" size:"0..MaxMetrics" digest:"-"`
	Closed  int64    `msgpack:"closed" range:"0.." digest:"-"`
	// Status is complete: every place of the batch has a group that counts; short: some have
	// none; or partial: closed at the deadline. Absent in batches without places to fill.
	Status string `msgpack:"status,omitempty" enum:"BatchStatuses"`
	// Expected is the number of places, Refills how many groups were asked for in place of
	// others, Dropped the uids of the groups that do not count, sorted.
	Expected int64 `msgpack:"expected,omitempty" range:"0..MaxBatchGroups"`
	Refills  int64 `msgpack:"refills,omitempty" range:"0..MaxBatchGroups*MaxRefillRounds"`
	Dropped  []UID `msgpack:"dropped,omitempty" size:"0..MaxListItems,unique" form:"token"`
	// Step and Epoch are where the trainer was, as the prompts said.
	Step  *int64 `msgpack:"step,omitempty" range:"0.." digest:"-"`
	Epoch *int64 `msgpack:"epoch,omitempty" range:"0.." digest:"-"`
}

// Metric is one number with its name.
type Metric struct {
	// Name is verl's, such as critic/rewards/mean, and Value finite.
	Name  string  `msgpack:"name" size:"1..MaxName"`
	Value float64 `msgpack:"value"`
}
