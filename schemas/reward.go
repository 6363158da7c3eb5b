package schemas

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
