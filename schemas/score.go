package schemas

import (
	"fmt"
	"slices"
)

// ScoreRequest is one sample, or a whole group, for a worker of the reward function nats:NAME: a core NATS
// request on ScoreSubject(NAME), which the queue group NAME hands to one worker. It is
// not stored. A server of http:NAME gets the same map for a group, as JSON or msgpack.
type ScoreRequest struct {
	V int64 `json:"v" msgpack:"v"`
	// Name is the instance, NAME of nats:NAME.
	Name   string `json:"name" msgpack:"name" form:"token"`
	Prompt string `json:"prompt" msgpack:"prompt" size:"0..MaxPromptBytes"`
	// GroundTruth is what the sample is compared with, a text or any value of JSON; empty: nothing was named.
	GroundTruth Truth `json:"ground_truth" msgpack:"ground_truth" size:"0..MaxPromptBytes"`
	// Params are the prompt's for this function, handed on unread.
	Params map[string]string `json:"params" msgpack:"params"`
	// Metadata is the prompt's: the record that it came with.
	Metadata Metadata `json:"metadata,omitempty" msgpack:"metadata,omitempty"`
	// ScoreSample is what the function sees of the sample; of a group it is empty.
	ScoreSample
	// GroupSize is how many samples the prompt asked for, where the function rates whole groups (RewardSpec.GroupMin).
	GroupSize int64 `json:"group_size,omitempty" msgpack:"group_size,omitempty" range:"0..MaxGroupSize"`
	// Members are the samples that the function is asked about, by sample_index.
	Members []ScoreMember `json:"members,omitempty" msgpack:"members,omitempty" size:"0..MaxGroupSize"`
	// Missing are the other samples of the group, which the function does not see.
	Missing []ScoreMissing `json:"missing" msgpack:"missing,omitempty" size:"0..MaxGroupSize"`
}

// ScoreSample is what a reward function sees of a sample.
type ScoreSample struct {
	// Image is a file of ImageFormat, png or jpeg: RGB, 8 bits a channel. Of a text both are empty.
	Image       []byte `json:"image,omitempty" msgpack:"image"`
	ImageFormat string `json:"image_format,omitempty" msgpack:"image_format" enum:"ScoreImageFormats?"`
	// Frames are files of ImageFormat, in order: the frames of a video, where the function's settings ask for several.
	// Image is the one in the middle.
	Frames [][]byte `json:"frames,omitempty" msgpack:"frames,omitempty" size:"0..MaxFrames"`
	// Conditions are the files that the network was given besides the prompt, as they are stored, sorted by name.
	Conditions []ScoreCondition `json:"conditions,omitempty" msgpack:"conditions,omitempty" size:"0..MaxConditioning"`
	// Audio is a WAV file of 32-bit floats, where the function judges a sound: Image is empty then.
	Audio []byte `json:"audio,omitempty" msgpack:"audio,omitempty"`
	// Text is an answer of a language model, Messages the conversation that it is to. Of an image both are absent.
	Text     *string   `json:"text,omitempty" msgpack:"text,omitempty" size:"0..MaxAnswerBytes"`
	Messages []Message `json:"messages,omitempty" msgpack:"messages,omitempty" size:"0..MaxMessages"`
	// StepIndex is there where the sample is in the middle (RewardSpec.AtSteps): so many steps have run, and the files
	// are its prediction. Latents, F32 [S, C], are there in place of files where RewardSpec.Latent asks for them.
	StepIndex int64   `json:"step_index,omitempty" msgpack:"step_index,omitempty" range:"0..MaxSteps-1"`
	Latents   *Tensor `json:"latents,omitempty" msgpack:"latents,omitempty"`
	// Trajectory is the subject in MDR_TRAJECTORIES of a sample of text: its events have log-probs and logits.
	Trajectory string `json:"trajectory,omitempty" msgpack:"trajectory,omitempty" size:"0..MaxSubject"`
}

// ScoreMember is a sample of a group that a function rates.
type ScoreMember struct {
	SampleIndex int64 `json:"sample_index" msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	ScoreSample
	// Ref is a blob with this map, where the request would not fit into a message; the map here has nothing else then.
	Ref *Ref `json:"ref,omitempty" msgpack:"ref,omitempty"`
}

// ScoreMissing is a sample of a group that a function does not see.
type ScoreMissing struct {
	SampleIndex int64 `json:"sample_index" msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Why says what became of it: it failed, was pruned, or did not come in time.
	Why string `json:"why" msgpack:"why" size:"1..MaxText,cut"`
}

// ScoreCondition is a Condition of a sample, such as the image that it edits, with its file.
type ScoreCondition struct {
	// Name is the input of the network.
	Name string `json:"name" msgpack:"name" form:"token"`
	// Type is the input's.
	Type string `json:"type" msgpack:"type" enum:"ConditionTypes"`
	// File is a PNG, of a video an animated one.
	File []byte `json:"file" msgpack:"file"`
}

// ScoreReply is a worker's answer, at most MaxScoreReply bytes; to a group it has Scores or Preferences, in at most
// MaxGroupReply bytes.
type ScoreReply struct {
	V int64 `msgpack:"v"`
	// Score is there unless Error is: a finite number.
	Score *float64 `msgpack:"score,omitempty"`
	// Detail may describe what the function saw.
	Detail string `msgpack:"detail,omitempty" size:"0..MaxScoreReply"`
	// Error says why there is no score; with Retry it may pass, and the sample is asked for
	// again.
	Error string `msgpack:"error,omitempty" size:"0..MaxScoreReply"`
	Retry bool   `msgpack:"retry,omitempty"`
	// Scores are those of the members of a group, in any order: one for each.
	Scores []MemberScore `msgpack:"scores,omitempty" size:"0..MaxGroupSize"`
	// Preferences compare members two by two, instead of Scores. The score of a member is then its win rate: the mean,
	// over the comparisons that name it, of how sure the judge is that it is the better one.
	Preferences []Preference `msgpack:"preferences,omitempty" size:"0..MaxPreferences"`
}

// MemberScore is the score of one member of a group.
type MemberScore struct {
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Score is there unless Error is: a finite number.
	Score *float64 `msgpack:"score,omitempty"`
	// Detail may describe what the function saw.
	Detail string `msgpack:"detail,omitempty" size:"0..MaxScoreReply"`
	Error  string `msgpack:"error,omitempty" size:"0..MaxScoreReply"`
}

// Preference is one comparison of two members of a group.
type Preference struct {
	// A and B are sample indexes.
	A int64 `msgpack:"a" range:"0..MaxGroupSize-1"`
	B int64 `msgpack:"b" range:"0..MaxGroupSize-1"`
	// P is how sure the judge is that A is better than B: 0 to 1, half if neither is.
	P float64 `msgpack:"p" range:"0..1"`
}

// Rating is what a reward function outside this process said of a whole group. It is stored before any reward that it
// is part of, once: however often the group is looked at again, all its samples have scores of one answer.
type Rating struct {
	V   int64 `msgpack:"v"`
	Run Run   `msgpack:"run" form:"token"`
	UID UID   `msgpack:"uid" form:"token"`
	// Function is the place of the reward function in the group's list, from 0; Name and Version are the function's.
	Function int64  `msgpack:"function" range:"0..MaxRewards-1"`
	Name     string `msgpack:"name" form:"reward_name"`
	Version  string `msgpack:"version" size:"0..MaxName"`
	// GroupSize is how many samples the prompt asked for, Members those that the function was asked about.
	GroupSize int64         `msgpack:"group_size" range:"1..MaxGroupSize"`
	Members   []RatedMember `msgpack:"members" size:"1..MaxGroupSize"`
	// Preferences are what it said where it compared members two by two: their values are win rates by these.
	Preferences []Preference `msgpack:"preferences,omitempty" size:"0..MaxPreferences"`
	// DurationNS is the wall time of the call in nanoseconds.
	DurationNS int64 `msgpack:"duration_ns" range:"0.."`
	// At is when it was answered, Unix nanoseconds.
	At int64 `msgpack:"at" range:"0.."`
}

// RatedMember is what a Rating says of one sample.
type RatedMember struct {
	// SampleIndex is the sample; where several come of one trajectory of a stage, the first: its value is theirs, too.
	SampleIndex int64 `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	// Stage is the one that was rated, of a later round paint-2; absent without stages.
	Stage Stage `msgpack:"stage,omitempty" form:"token"`
	// TrajectorySeq is the MDR_TRAJECTORIES sequence of the sample that was rated.
	TrajectorySeq uint64 `msgpack:"trajectory_seq"`
	// Value is the score before its weight; null: Error says why there is none.
	Value *float64 `msgpack:"value" range:"-MaxScore..MaxScore"`
	Error string   `msgpack:"error,omitempty" size:"0..MaxText,cut"`
	// Detail is what the function said of the sample, for people.
	Detail string `msgpack:"detail,omitempty" size:"0..MaxDetail,cut"`
}

// checkRules checks that members come once, in order, and have a value or say why not.
func (e *Rating) checkRules(f *faults) {
	last := int64(-1)
	for i := range e.Members {
		m, g := &e.Members[i], f.inItem("members", i)
		if m.SampleIndex <= last || m.SampleIndex >= e.GroupSize {
			g.add("sample_index", itoa(m.SampleIndex), "must be above the one before, and below group_size")
		}
		last = m.SampleIndex
		if m.Value == nil {
			g.requireText("error", m.Error)
		}
	}
	for i, p := range e.Preferences {
		for _, of := range []int64{p.A, p.B} {
			if !slices.ContainsFunc(e.Members, func(m RatedMember) bool { return m.SampleIndex == of }) || p.A == p.B {
				f.inItem("preferences", i).add("a, b", fmt.Sprint(p.A, p.B), "must be two members")
				break
			}
		}
	}
}

func (e *ScoreRequest) checkRules(f *faults) {
	if e.GroupSize == 0 && e.Text == nil && e.Audio == nil && e.Latents == nil {
		f.requireOneOf("image_format", e.ImageFormat, ScoreImageFormats)
	}
}

func (e *ScoreReply) checkRules(f *faults) {
	if e.Score == nil && e.Scores == nil && e.Preferences == nil {
		f.requireText("error", e.Error)
	}
}
