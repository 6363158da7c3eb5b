package view

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Group is a group with its samples, best reward first.
type Group struct {
	GroupResult
	Run       schemas.Run    `json:"run"`
	Negative  string         `json:"negative_prompt,omitempty"`
	Lane      schemas.Lane   `json:"lane,omitempty"`
	Tenant    schemas.Tenant `json:"tenant,omitempty"`
	Batch     string         `json:"batch,omitempty"`
	Size      int64          `json:"size"`
	StdLabel  string         `json:"std_label,omitempty"`
	Estimator string         `json:"estimator"`
	Opened    int64          `json:"opened"`
	Closed    int64          `json:"closed,omitempty"`
	Deadline  int64          `json:"deadline,omitempty"`
	Refilled  schemas.UID    `json:"refilled_by,omitempty"`
	// Rewards are the functions with their weights.
	Rewards []weight `json:"rewards"`
	// Fix is what to do about the group.
	Fix     string  `json:"fix,omitempty"`
	Truth   string  `json:"ground_truth,omitempty"`
	Samples []*Line `json:"samples"`
	// Stages are those of the samples, each once, with the first sample that has it; none without stages.
	Stages []*StageLine `json:"stages,omitempty"`
	Total  int          `json:"total"`

	members map[int64]*stored
	result  *schemas.Advantage
}

// weight is a reward function of a prompt.
type weight struct {
	Name   string  `json:"name"`
	Weight float64 `json:"weight"`
}

// Line is one sample of a group.
type Line struct {
	SampleResult
	// Place is its address in the group: 3, or 2.think where that stage stands for it.
	Place  string  `json:"place"`
	Scores []Score `json:"scores"`
	// Fix is what to do about the sample.
	Fix string `json:"fix,omitempty"`
	// Stored says that its trajectory is there, Media which kinds of files it has: pixels of Width and Height, sound.
	Stored bool     `json:"stored"`
	Media  []string `json:"media"`
	Width  int64    `json:"width,omitempty"`
	Height int64    `json:"height,omitempty"`
	// Conditions are the names of the files that the network was given, in the order of the trajectory.
	Conditions []string `json:"conditions,omitempty"`

	Answer string `json:"answer,omitempty"`
	Tokens int64  `json:"tokens,omitempty"`
	Finish string `json:"finish_reason,omitempty"`
	// Parent is the sample whose state this one begins with, at ParentStep, of Steps in all.
	Parent     *int64 `json:"parent,omitempty"`
	Steps      int    `json:"steps,omitempty"`
	ParentStep int64  `json:"parent_step,omitempty"`
}

// maxAnswer is how many bytes of an answer are in a list.
const maxAnswer = 2000

// record returns the record of a group and its result, which is nil while there is none. A pass has results alone.
func (r *Reader) record(
	ctx context.Context, run schemas.Run, uid schemas.UID,
) (*schemas.GroupRecord, *schemas.Advantage, error) {
	g, err := r.bus.Group(ctx, run, uid)
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return nil, nil, err
	}
	var a *schemas.Advantage
	m, lastErr := r.bus.Last(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid))
	if lastErr != nil && !errors.Is(lastErr, bus.ErrNotFound) {
		return nil, nil, lastErr
	}
	if lastErr == nil {
		if a = (&schemas.Advantage{}); bus.Fits(m, a) != nil {
			a = nil // not a result; the true one will replace it
		}
	}
	if g == nil && a == nil {
		return nil, nil, err
	}
	return g, a, nil
}

// stored is what is stored of one sample; each is nil while there is none.
type stored struct {
	member     *schemas.Member
	trajectory *schemas.Trajectory
	reward     *schemas.Reward
	// stages are the trajectories of its stages, in order; none without stages. trajectory is the one that stands for
	// it, nil while others are to come.
	stages []*schemas.Trajectory
}

// readGroup reads a group; of its samples only what is stored, not yet a line.
func (r *Reader) readGroup(ctx context.Context, run schemas.Run, uid schemas.UID) (*Group, error) {
	record, a, err := r.record(ctx, run, uid)
	if err != nil {
		return nil, err
	}
	x := &Group{
		GroupResult: GroupResult{UID: uid, Status: outcomes.Open}, Run: run, Rewards: []weight{},
		members: map[int64]*stored{}, result: a, Samples: []*Line{},
	}
	source := run
	if record != nil {
		x.fromRecord(record)
		source = cmp.Or(record.Group.SourceRun, run)
	}
	if a != nil {
		x.fromResult(a)
		source = cmp.Or(a.SourceRun, source)
		for i := range a.Members {
			x.of(a.Members[i].SampleIndex).member = &a.Members[i]
		}
	}
	rewards, err := Rewards(ctx, r.bus, run, uid)
	if err != nil {
		return nil, err
	}
	for key, reward := range rewards {
		x.of(key.Index).reward = reward
	}
	made := Made{}
	for t, err := range Trajectories(ctx, r.bus, source, uid) {
		if err != nil {
			return nil, err
		}
		if x.Size = max(x.Size, t.GroupSize); len(t.Group.Stages) == 0 { // else it is a stage's
			x.Prompt = cmp.Or(x.Prompt, t.Prompt)
		}
		made.Add(t.Trajectory)
	}
	for i := range x.Size {
		s := x.of(i)
		of, ended := made.Of(uid, i)
		if ended || s.member != nil || s.reward != nil {
			s.trajectory = Standing(of)
		}
		if len(of) > 0 && len(of[0].Group.Stages) > 0 {
			s.stages = of
		}
	}
	x.Fix = outcomes.FixGroup(run, uid, x.Status, x.Error)
	return x, nil
}

// of returns what is stored of a sample, to be filled.
func (x *Group) of(index int64) *stored {
	if x.members[index] == nil {
		x.members[index] = &stored{}
	}
	return x.members[index]
}

// Group returns a group, and so many of its samples from an offset on.
func (r *Reader) Group(ctx context.Context, run schemas.Run, uid schemas.UID, offset, limit int) (*Group, error) {
	x, err := r.readGroup(ctx, run, uid)
	if err != nil {
		return nil, err
	}
	x.list(offset, limit)
	return x, nil
}

// Trajectory returns the trajectory of a sample that a Reader found; nil: there was none.
func (x *Group) Trajectory(index int64) *schemas.Trajectory { return x.of(index).trajectory }

// Result returns the result of the group; nil: it is open.
func (x *Group) Result() *schemas.Advantage { return x.result }

// Members returns what is stored of each sample of the group, by index.
func (x *Group) Members() (members []Member) {
	for _, i := range slices.Sorted(maps.Keys(x.members)) {
		members = append(members, x.members[i].join(i))
	}
	return members
}

// list lists samples of a group.
func (x *Group) list(offset, limit int) {
	for i, s := range x.members {
		x.Samples = append(x.Samples, s.line(i))
	}
	slices.SortFunc(x.Samples, func(a, b *Line) int {
		return cmp.Or(CompareRewards(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
	})
	x.Total = len(x.Samples)
	x.Samples = slices.Clone(x.Samples[min(offset, x.Total):min(offset+limit, x.Total)])
	var shown []int64
	for _, l := range x.Samples {
		shown = append(shown, l.SampleIndex)
	}
	x.Stages = x.StagesOf(shown...)
}

// StagesOf returns the stages of samples, each once, by sample and in the order in which they ran.
func (x *Group) StagesOf(samples ...int64) (list []*StageLine) {
	seen := map[*schemas.Trajectory]bool{}
	for _, i := range slices.Sorted(slices.Values(samples)) {
		for _, t := range x.of(i).stages {
			if !seen[t] {
				seen[t], list = true, append(list, StageOf(t, x.result))
			}
		}
	}
	return list
}

// Whole returns a group, its best samples, at most most, and all that is stored of each that has a trajectory.
func (r *Reader) Whole(
	ctx context.Context, run schemas.Run, uid schemas.UID, most int,
) (x *Group, samples []*Sample, err error) {
	if x, err = r.readGroup(ctx, run, uid); err != nil {
		return nil, nil, err
	}
	x.list(0, most)
	var shown []*schemas.Trajectory
	for _, l := range x.Samples {
		if t := x.members[l.SampleIndex].trajectory; t != nil && len(x.Stages) == 0 {
			shown = append(shown, t)
		}
	}
	for _, l := range x.Stages {
		shown = append(shown, l.trajectory)
	}
	for _, t := range shown {
		full, err := r.sample(ctx, x, t)
		if err != nil {
			return nil, nil, err
		}
		samples = append(samples, full)
	}
	return x, samples, nil
}

// Sample returns all that is stored of a sample: of its named stage, or of the one that stands for it.
func (r *Reader) Sample(
	ctx context.Context, run schemas.Run, uid schemas.UID, index int64, stage schemas.Stage,
) (*Sample, error) {
	g, err := r.readGroup(ctx, run, uid)
	if err != nil {
		return nil, err
	}
	t := g.of(index).trajectory
	if stage != "" {
		t = nil
		for _, of := range g.of(index).stages {
			if of.Stage == stage {
				t = of
			}
		}
	}
	if t != nil {
		return r.sample(ctx, g, t)
	}
	return nil, bus.ErrNotFound
}

// sample returns a sample of a group, or a stage: that of one sample with the sample's result, that of several without.
func (r *Reader) sample(ctx context.Context, g *Group, t *schemas.Trajectory) (*Sample, error) {
	s := *g.of(t.SampleIndex)
	from, to := stages.Leaves(&t.Group, t.Place())
	if to-from > 1 {
		s.member, s.reward = nil, nil
	}
	timings := timingsOf(t, s.reward, g.result)
	if t != s.trajectory {
		timings = timingsOf(t, nil, nil) // the reward came after other stages
	}
	s.trajectory = t
	x := &Sample{
		Run: g.Run, UID: g.UID, Prompt: t.Prompt, Member: s.join(t.SampleIndex), Line: s.line(t.SampleIndex),
		Facts: FactsOf(t), Timings: timings, Spans: spansOf(t), States: StatesOf(t), Coloured: IsGrid(t),
		Group: GroupOf{Size: t.GroupSize, Status: g.Status, Mean: g.Mean, Std: g.Std},
	}
	if len(t.Group.Stages) > 0 {
		var shown []int64
		for i := from; i < to; i++ {
			x.Samples, shown = append(x.Samples, g.of(i).line(i)), append(shown, i)
		}
		x.Stages = g.StagesOf(shown...)
	}
	if t.Text != nil {
		if err := r.setTokens(ctx, x, t); err != nil {
			return nil, err
		}
	}
	x.Text = dropTensors(x.Text)
	return x, nil
}

// Trajectory returns the trajectory of a sample: of its named stage, by the first sample that has it, or the one that
// stands for it; of a pass, that of the run which it scored again.
func (r *Reader) Trajectory(
	ctx context.Context, run schemas.Run, uid schemas.UID, index int64, stage schemas.Stage,
) (*schemas.Trajectory, error) {
	read := func(run schemas.Run) (*schemas.Trajectory, error) {
		if stage != "" {
			return r.client.Stage(ctx, run, uid, index, stage)
		}
		return Ended(ctx, r.bus, run, uid, index)
	}
	t, err := read(run)
	if !errors.Is(err, client.ErrNotFound) {
		return t, err
	}
	g, a, recordErr := r.record(ctx, run, uid)
	switch {
	case recordErr != nil:
		return nil, recordErr
	case a != nil && a.SourceRun != "":
		return read(a.SourceRun)
	case g != nil && g.Group.SourceRun != "":
		return read(g.Group.SourceRun)
	}
	return nil, err
}

// fromRecord fills what is known of a group when it opens.
func (x *Group) fromRecord(g *schemas.GroupRecord) {
	x.Prompt, x.Negative, x.Lane, x.Tenant = g.Prompt, g.NegativePrompt, g.Lane, g.Tenant
	x.Size, x.Error = g.GroupSize, g.Error
	x.Batch, x.Opened = g.Group.Batch, g.Group.Created/int64(time.Millisecond)
	x.Deadline, x.Truth = g.Group.Deadline/int64(time.Millisecond), g.Group.GroundTruth().Text()
	x.Estimator = g.Group.Advantage.Estimator
	for _, w := range g.Group.Reward {
		x.Rewards = append(x.Rewards, weight{w.Name, *cmp.Or(w.Weight, new(1.0))})
	}
}

// fromResult fills what is known of a group when it has closed.
func (x *Group) fromResult(a *schemas.Advantage) {
	before := x.Error
	x.GroupResult, x.Size = GroupResultOf(a, x.UID, x.Prompt), a.GroupSize
	x.Error, x.StdLabel = cmp.Or(x.Error, before), x.GroupResult.StdLabel()
	x.Estimator, x.Batch, x.Closed, x.Refilled = a.Estimator, a.Batch, a.Closed/int64(time.Millisecond), a.RefilledBy
	x.Opened = cmp.Or(x.Opened, a.Opened/int64(time.Millisecond))
}

// line returns a sample in short.
func (s *stored) line(index int64) *Line {
	member, t := s.join(index), s.trajectory
	l := &Line{
		SampleResult: member.SampleResult, Place: strconv.FormatInt(index, 10), Scores: member.Scores,
		Fix: member.Fix(), Media: []string{},
	}
	if l.Scores == nil {
		l.Scores = []Score{}
	}
	if t == nil {
		return l
	}
	l.Place = t.Place().String()
	l.Stored, l.Media, l.Width, l.Height = true, append(l.Media, t.MediaKinds()...), t.Width, t.Height
	for _, c := range t.Conditions {
		l.Conditions = append(l.Conditions, c.Name)
	}
	if member.Text != nil {
		l.Answer, l.Tokens, l.Finish = cut(member.Text.Answer, maxAnswer), member.Text.Tokens, member.Text.FinishReason
	}
	l.Steps = len(t.Transitions)
	if t.Start != nil && t.Start.Branch != nil {
		l.Parent, l.ParentStep = new(t.Start.Branch.SampleIndex), t.Start.StepIndex
	}
	return l
}

// join is MemberOf for a sample whose group may be open: its reward is the result so far.
func (s *stored) join(index int64) Member {
	x := schemas.Member{SampleIndex: index}
	if s.member != nil {
		x = *s.member
	}
	stop, rewarded := "", ""
	if s.trajectory != nil {
		stop = s.trajectory.StopReason
	}
	if s.reward != nil {
		rewarded = s.reward.Status
		if x.Status == "" {
			x.Reward = s.reward.Reward
		}
	}
	x.Status = outcomes.Sample(x.Status, stop, rewarded)
	return MemberOf(&x, s.trajectory, s.reward)
}

// Sample is one sample, with all that is stored of it.
type Sample struct {
	Run    schemas.Run `json:"run"`
	UID    schemas.UID `json:"uid"`
	Prompt string      `json:"prompt"`
	Member
	Line *Line `json:"line"`
	// Facts are for people: what it is called, and what it is.
	Facts   []Fact    `json:"facts"`
	Timings []phase   `json:"timings"`
	Spans   []attempt `json:"attempts"`
	Tokens  []token   `json:"tokens,omitempty"`
	More    int       `json:"more_tokens,omitempty"`
	States  []int64   `json:"states"`
	// Coloured says that StateImage draws the states: they are those of an image, whose tokens are a grid.
	Coloured bool    `json:"coloured"`
	Group    GroupOf `json:"group"`
	// Stages lead to it, and from it to Samples, of which it is one or that share it; none without stages.
	Stages  []*StageLine `json:"stages,omitempty"`
	Samples []*Line      `json:"samples,omitempty"`
	// LogProbsOf says which log-probs the tokens have.
	LogProbsOf string `json:"log_probs_of,omitempty"`
}

// GroupOf is what a sample says of its group.
type GroupOf struct {
	Size   int64    `json:"size"`
	Status string   `json:"status"`
	Mean   *float64 `json:"mean"`
	Std    *float64 `json:"std"`
}

// Fact is one line of a table of facts.
type Fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Mono says that the value is a name or a digest.
	Mono bool `json:"mono,omitempty"`
}

// phase is a part of the time that a sample took.
type phase struct {
	Name    string  `json:"name"`
	Begin   float64 `json:"begin"` // seconds after the first
	Seconds float64 `json:"seconds"`
}

// attempt is the steps that one delivery of the request made.
type attempt struct {
	Attempt string `json:"attempt"`
	First   int    `json:"first"`
	Last    int    `json:"last"`
}

// shownElsewhere are the settings that curves, tables and other facts show.
var shownElsewhere = []string{"sigmas", "transitions", "height", "width", "latents_dtype"}

// FactsOf returns the facts of a sample, or of a stage of it.
func FactsOf(t *schemas.Trajectory) (facts []Fact) {
	add := func(name, value string, mono bool) {
		if value != "" {
			facts = append(facts, Fact{name, value, mono})
		}
	}
	add("Stopped", t.StopReason, false)
	if x := t.Text; x != nil && x.SaidBy != "" { // no weights, and no seed
		add("Said by", x.SaidBy, true)
		add("Conversation", x.Conversation, false)
		add("Schedule", t.ScheduleDigest, true)
		return facts
	}
	add("Seed", strconv.FormatUint(t.SampleSeed, 10), true)
	if t.NoiseSeed != t.SampleSeed {
		add("Seed of the first noise", strconv.FormatUint(t.NoiseSeed, 10), true)
	}
	version := fmt.Sprint(t.PolicyVersionMin)
	if t.PolicyVersionMax != t.PolicyVersionMin {
		version = fmt.Sprintf("%d to %d", t.PolicyVersionMin, t.PolicyVersionMax)
	}
	if t.Tenant != "" {
		version += " of " + string(t.Tenant)
	}
	add("Policy version", version, false)
	add("Weights", t.WeightsDigest, true)
	add("Sampler", t.Sampler, true)
	add("Computed on", t.Backend, true)
	if d := t.Drawn; d != nil {
		add("Drawn by", d.Engine.String(), true)
		if d.Resumed > 0 {
			add("Answers gone on with", fmt.Sprint(d.Resumed), false)
		}
	} else {
		add("Drawn by", "the sampler", false)
	}
	if x := t.Text; x != nil {
		c := x.Settings
		add("Temperature", fmt.Sprintf("%g, top-k %d, top-p %g, min-p %g", c.Temperature, c.TopK, c.TopP, c.MinP),
			false)
		add("Conversation", x.Conversation, false)
	} else {
		size := fmt.Sprintf("%d × %d", t.Width, t.Height)
		if v := t.Medium(schemas.KindVideo); v != nil {
			size += fmt.Sprintf(", %d frames at %g a second", v.Frames, v.FPS)
		}
		add("Size", size, false)
		if s := t.Medium(schemas.KindAudio); s != nil {
			length := float64(s.Samples) / float64(s.Rate)
			add("Sound", fmt.Sprintf("%.3g s, %d channels at %d Hz", length, s.Channels, s.Rate), false)
		}
		add("Steps", fmt.Sprint(len(t.Transitions)), false)
		add("Noise level", fmt.Sprint(t.NoiseLevel), false)
		if t.Group.FreeReadSteps {
			add("States", "go when all have read them", false)
		}
		if begin, end := t.Segment(); t.Timings.DenoiseNS > 0 && end > begin {
			add("Time of a step", fmt.Sprintf("%.3g ms", float64(t.Timings.DenoiseNS)/1e6/float64(end-begin)), false)
		}
		if begin, end := t.Segment(); begin > 0 || end < int64(len(t.Transitions)) {
			add("Part that ran", fmt.Sprintf("steps %d to %d", begin, end-1), false)
		}
		if t.Start != nil && t.Start.Branch != nil {
			add("Parent", fmt.Sprintf("sample %d, at step %d", t.Start.Branch.SampleIndex, t.Start.StepIndex), false)
		}
		for _, x := range (*schemas.Settings)(&t.Sampling).Extras() {
			if !slices.Contains(shownElsewhere, x[0]) {
				add(capital(strings.ReplaceAll(x[0], "_", " ")), strings.Trim(x[1], `"`), false)
			}
		}
		add("Latents", fmt.Sprintf("%v %s", t.LatentsShape, t.LatentsDType), true)
		add("Negative prompt", t.NegativePrompt, false)
	}
	add("Schedule", t.ScheduleDigest, true)
	add("Content", t.ContentDigest, true)
	return facts
}

// timingsOf returns the parts of a sample's time, from when its request was received to when its group closed.
func timingsOf(t *schemas.Trajectory, reward *schemas.Reward, a *schemas.Advantage) (phases []phase) {
	x := t.Timings
	if x.Received == 0 {
		return nil
	}
	seconds := func(ns int64) float64 { return float64(ns) / 1e9 }
	add := func(name string, begin, end int64) {
		if begin > 0 && end >= begin {
			phases = append(phases, phase{name, seconds(begin - x.Received), seconds(end - begin)})
		}
	}
	if t.Text != nil && t.Text.SaidBy != "" {
		add("answered", x.Received, x.Finished)
	} else {
		add("with the sampler, not begun", x.Received, x.Started)
		add("encoded", x.Started, x.Started+x.EncodeNS)
		add("denoised", x.Started+x.EncodeNS, x.Started+x.EncodeNS+x.DenoiseNS)
		add("decoded", x.Finished-x.DecodeNS, x.Finished)
	}
	if t.Text != nil && len(phases) > 2 {
		phases[2].Name = "generated"
	}
	if reward != nil {
		add("waited and scored", x.Finished, reward.Scored)
		if a != nil {
			add("waited for its group", reward.Scored, a.Closed)
		}
	}
	return phases
}

// spansOf returns which steps were made by which attempt.
func spansOf(t *schemas.Trajectory) (spans []attempt) {
	begin, _ := t.Segment()
	for i := range t.Steps {
		step := int(begin) + i
		if name := t.StepAttempt(i); len(spans) == 0 || spans[len(spans)-1].Attempt != name {
			spans = append(spans, attempt{name, step, step})
		}
		spans[len(spans)-1].Last = step
	}
	return spans
}

// StatesOf returns the indices of the stored states of an image or a video.
func StatesOf(t *schemas.Trajectory) []int64 {
	if t.Text != nil || t.StopReason != schemas.StopCompleted {
		return []int64{}
	}
	return slices.Concat([]int64{}, t.LatentStepIndices)
}
