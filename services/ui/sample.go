package ui

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// group is a group with its samples, best reward first.
type group struct {
	Run       schemas.Run  `json:"run"`
	UID       schemas.UID  `json:"uid"`
	Prompt    string       `json:"prompt"`
	Negative  string       `json:"negative_prompt,omitempty"`
	Lane      schemas.Lane `json:"lane,omitempty"`
	Batch     string       `json:"batch,omitempty"`
	Size      int64        `json:"size"`
	Status    string       `json:"status"`
	Error     string       `json:"error,omitempty"`
	Mean      *float64     `json:"mean"`
	Std       *float64     `json:"std"`
	StdLabel  string       `json:"std_label,omitempty"`
	Estimator string       `json:"estimator"`
	Opened    int64        `json:"opened"`
	Closed    int64        `json:"closed,omitempty"`
	Deadline  int64        `json:"deadline,omitempty"`
	Refilled  schemas.UID  `json:"refilled_by,omitempty"`
	// Rewards are the functions with their weights.
	Rewards []weight      `json:"rewards"`
	Truth   string        `json:"ground_truth,omitempty"`
	Samples []*sampleLine `json:"samples"`
	Total   int           `json:"total"`
}

// weight is a reward function of a prompt.
type weight struct {
	Name   string  `json:"name"`
	Weight float64 `json:"weight"`
}

// sampleLine is one sample of a group.
type sampleLine struct {
	results.SampleResult
	Scores []results.Score `json:"scores"`
	// Stored says that its trajectory is there; Image and Video that it has pixels, of Width and Height.
	Stored bool   `json:"stored"`
	Image  bool   `json:"image"`
	Video  bool   `json:"video,omitempty"`
	Width  int64  `json:"width,omitempty"`
	Height int64  `json:"height,omitempty"`
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

// uidOf returns the run and the group that a request is about.
func uidOf(r *http.Request) (schemas.Run, schemas.UID, error) {
	run, err := runOf(r)
	if err != nil {
		return "", "", err
	}
	uid := schemas.UID(r.PathValue("uid"))
	if err := schemas.CheckToken("uid", uid); err != nil {
		return "", "", &requestError{http.StatusBadRequest, err.Error()}
	}
	return run, uid, nil
}

// record returns the record of a group and its result, which is nil while there is none. A pass has results alone.
func (s *server) record(
	ctx context.Context,
	run schemas.Run,
	uid schemas.UID,
) (*schemas.GroupRecord, *schemas.Advantage, error) {
	g, err := s.bus.Group(ctx, run, uid)
	if err != nil && !errors.Is(err, bus.ErrNotFound) {
		return nil, nil, err
	}
	var a *schemas.Advantage
	m, lastErr := s.bus.Last(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid))
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

// answerGroup answers with a group and a page of its samples.
func (s *server) answerGroup(r *http.Request) (any, error) {
	run, uid, err := uidOf(r)
	if err != nil {
		return nil, err
	}
	offset, err := number(r, "offset", 0, 0, schemas.MaxGroupSize)
	if err != nil {
		return nil, err
	}
	limit, err := number(r, "limit", 64, 1, maxPage)
	if err != nil {
		return nil, err
	}
	ctx := r.Context()
	record, a, err := s.record(ctx, run, uid)
	if err != nil {
		return nil, err
	}
	x := &group{Run: run, UID: uid, Status: outcomes.Open, Rewards: []weight{}}
	source := run
	if record != nil {
		x.fromRecord(record)
		source = cmp.Or(record.Group.SourceRun, run)
	}
	members := map[int64]*schemas.Member{}
	if a != nil {
		x.fromResult(a)
		source = cmp.Or(a.SourceRun, source)
		for i := range a.Members {
			members[a.Members[i].SampleIndex] = &a.Members[i]
		}
	}
	rewards, err := results.Rewards(ctx, s.bus, run, uid)
	if err != nil {
		return nil, err
	}
	lines := map[int64]*sampleLine{}
	for t, err := range results.Trajectories(ctx, s.bus, source, uid) {
		if err != nil {
			return nil, err
		}
		x.Prompt = cmp.Or(x.Prompt, t.Prompt)
		lines[t.SampleIndex] = lineOf(
			members[t.SampleIndex],
			t.Trajectory,
			rewards[results.Sample{UID: uid, Index: t.SampleIndex}],
		)
	}
	for i := range x.Size {
		if lines[i] == nil {
			lines[i] = lineOf(
				cmp.Or(members[i], &schemas.Member{SampleIndex: i}),
				nil,
				rewards[results.Sample{UID: uid, Index: i}],
			)
		}
	}
	for _, l := range lines {
		x.Samples = append(x.Samples, l)
	}
	slices.SortFunc(x.Samples, compareSamples)
	x.Total = len(x.Samples)
	x.Samples = slices.Clone(x.Samples[min(offset, x.Total):min(offset+limit, x.Total)])
	return x, nil
}

// compareSamples orders samples by falling reward; those without one come last.
func compareSamples(a, b *sampleLine) int {
	switch {
	case a.Reward == nil && b.Reward == nil:
		return cmp.Compare(a.SampleIndex, b.SampleIndex)
	case a.Reward == nil:
		return 1
	case b.Reward == nil:
		return -1
	}
	return cmp.Or(cmp.Compare(*b.Reward, *a.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
}

// fromRecord fills what is known of a group when it opens.
func (x *group) fromRecord(g *schemas.GroupRecord) {
	x.Prompt, x.Negative, x.Lane, x.Size, x.Error = g.Prompt, g.NegativePrompt, g.Lane, g.GroupSize, g.Error
	x.Batch, x.Opened = g.Group.Batch, g.Group.Created/int64(time.Millisecond)
	x.Deadline, x.Truth = g.Group.Deadline/int64(time.Millisecond), g.Group.GroundTruth().Text()
	x.Estimator = g.Group.Advantage.Estimator
	for _, w := range g.Group.Reward {
		x.Rewards = append(x.Rewards, weight{w.Name, *cmp.Or(w.Weight, new(1.0))})
	}
}

// fromResult fills what is known of a group when it has closed.
func (x *group) fromResult(a *schemas.Advantage) {
	x.Status, x.Error, x.Mean, x.Std, x.Size = outcomes.Group(a), cmp.Or(a.Error, x.Error), a.Mean, a.Std, a.GroupSize
	x.StdLabel = (&results.GroupResult{StdScale: a.Scale, StdBasis: a.StdBasis}).StdLabel()
	x.Estimator, x.Batch, x.Closed, x.Refilled = a.Estimator, a.Batch, a.Closed/int64(time.Millisecond), a.RefilledBy
	x.Opened = cmp.Or(x.Opened, a.Opened/int64(time.Millisecond))
}

// lineOf returns what is stored of a sample: its result, trajectory and reward, each nil while there is none.
func lineOf(m *schemas.Member, t *schemas.Trajectory, reward *schemas.Reward) *sampleLine {
	member := memberOf(m, t, reward)
	l := &sampleLine{SampleResult: member.SampleResult, Scores: member.Scores}
	if l.Scores == nil {
		l.Scores = []results.Score{}
	}
	if t == nil {
		return l
	}
	l.Stored, l.Image, l.Video, l.Width, l.Height = true, t.Image != nil, t.Video != nil, t.Width, t.Height
	if member.Text != nil {
		l.Answer, l.Tokens, l.Finish = cut(member.Text.Answer, maxAnswer), member.Text.Tokens, member.Text.FinishReason
	}
	l.Steps = len(t.Transitions)
	if t.Start != nil && t.Start.Branch != nil {
		l.Parent, l.ParentStep = new(t.Start.Branch.SampleIndex), t.Start.StepIndex
	}
	return l
}

// memberOf is results.MemberOf for a sample whose group may be open: its reward is the result so far.
func memberOf(m *schemas.Member, t *schemas.Trajectory, reward *schemas.Reward) results.Member {
	x := schemas.Member{}
	if m != nil {
		x = *m
	}
	stop, rewarded := "", ""
	if t != nil {
		stop, x.SampleIndex = t.StopReason, t.SampleIndex
	}
	if reward != nil {
		rewarded = reward.Status
		if x.Status == "" {
			x.Reward = reward.Reward
		}
	}
	x.Status = outcomes.Sample(x.Status, stop, rewarded)
	return results.MemberOf(&x, t, reward)
}

// sample is one sample, with all that its page shows.
type sample struct {
	Run    schemas.Run `json:"run"`
	UID    schemas.UID `json:"uid"`
	Prompt string      `json:"prompt"`
	results.Member
	Line *sampleLine `json:"line"`
	// Facts are for people: what it is called, and what it is.
	Facts   []fact         `json:"facts"`
	Timings []phase        `json:"timings"`
	Spans   []attempt      `json:"attempts"`
	Tokens  []token        `json:"tokens,omitempty"`
	More    int            `json:"more_tokens,omitempty"`
	States  []int64        `json:"states"`
	Group   map[string]any `json:"group"`
	// LogProbsOf says which log-probs the tokens have.
	LogProbsOf string `json:"log_probs_of,omitempty"`
}

// fact is one line of the table of facts.
type fact struct {
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

// sampleOf returns the trajectory that a request is about.
func (s *server) sampleOf(r *http.Request) (*schemas.Trajectory, error) {
	run, uid, err := uidOf(r)
	if err != nil {
		return nil, err
	}
	index, err := strconv.ParseInt(r.PathValue("sample"), 10, 64)
	if err != nil || index < 0 || index >= schemas.MaxGroupSize {
		return nil, &requestError{http.StatusBadRequest, "that is not the index of a sample"}
	}
	t, err := s.client.Trajectory(r.Context(), run, uid, index)
	if !errors.Is(err, client.ErrNotFound) {
		return t, err
	}
	g, a, recordErr := s.record(r.Context(), run, uid) // a pass: its samples are another run's
	switch {
	case recordErr != nil:
		return nil, recordErr
	case a != nil && a.SourceRun != "":
		return s.client.Trajectory(r.Context(), a.SourceRun, uid, index)
	case g != nil && g.Group.SourceRun != "":
		return s.client.Trajectory(r.Context(), g.Group.SourceRun, uid, index)
	}
	return nil, err
}

// answerSample answers with all that is stored of a sample.
func (s *server) answerSample(r *http.Request) (any, error) {
	t, err := s.sampleOf(r)
	if err != nil {
		return nil, err
	}
	ctx := r.Context()
	run, uid, _ := uidOf(r) // sampleOf has read them
	_, a, err := s.record(ctx, run, uid)
	if err != nil {
		return nil, err
	}
	rewards, err := results.Rewards(ctx, s.bus, run, uid)
	if err != nil {
		return nil, err
	}
	var m *schemas.Member
	if a != nil {
		for i := range a.Members {
			if a.Members[i].SampleIndex == t.SampleIndex {
				m = &a.Members[i]
			}
		}
	}
	reward := rewards[results.Sample{UID: uid, Index: t.SampleIndex}]
	x := &sample{
		Run: run, UID: uid, Prompt: t.Prompt, Member: memberOf(m, t, reward), Line: lineOf(m, t, reward),
		Facts: factsOf(t), Timings: timingsOf(t, reward, a), Spans: spansOf(t), States: s.statesOf(t),
	}
	x.Group = map[string]any{"size": t.GroupSize, "status": outcomes.Open}
	if a != nil {
		x.Group["status"], x.Group["mean"], x.Group["std"] = outcomes.Group(a), a.Mean, a.Std
	}
	if t.Text != nil {
		if err := s.setTokens(ctx, x, t); err != nil {
			return nil, err
		}
	}
	x.Text = dropTensors(x.Text)
	return x, nil
}

// factsOf returns the facts of a sample.
func factsOf(t *schemas.Trajectory) (facts []fact) {
	add := func(name, value string, mono bool) {
		if value != "" {
			facts = append(facts, fact{name, value, mono})
		}
	}
	add("Stopped", t.StopReason, false)
	add("Seed", strconv.FormatUint(t.SampleSeed, 10), true)
	if t.NoiseSeed != t.SampleSeed {
		add("Seed of the first noise", strconv.FormatUint(t.NoiseSeed, 10), true)
	}
	version := fmt.Sprint(t.PolicyVersionMin)
	if t.PolicyVersionMax != t.PolicyVersionMin {
		version = fmt.Sprintf("%d to %d", t.PolicyVersionMin, t.PolicyVersionMax)
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
		add(
			"Temperature",
			fmt.Sprintf("%g, top-k %d, top-p %g, min-p %g", c.Temperature, c.TopK, c.TopP, c.MinP),
			false,
		)
		add("Conversation", x.Conversation, false)
	} else {
		size := fmt.Sprintf("%d × %d", t.Width, t.Height)
		if t.Video != nil {
			size += fmt.Sprintf(", %d frames at %g a second", t.Video.Frames, t.Video.FPS)
		}
		add("Size", size, false)
		add("Steps", fmt.Sprint(len(t.Transitions)), false)
		if begin, end := t.Segment(); t.Timings.DenoiseNS > 0 && end > begin {
			add("Time of a step", fmt.Sprintf("%.3g ms", float64(t.Timings.DenoiseNS)/1e6/float64(end-begin)), false)
		}
		if begin, end := t.Segment(); begin > 0 || end < int64(len(t.Transitions)) {
			add("Part that ran", fmt.Sprintf("steps %d to %d", begin, end-1), false)
		}
		if t.Start != nil && t.Start.Branch != nil {
			add("Parent", fmt.Sprintf("sample %d, at step %d", t.Start.Branch.SampleIndex, t.Start.StepIndex), false)
		}
		add("Solver", t.Solver, false)
		add("Noise level", fmt.Sprintf("%g", t.NoiseLevel), false)
		add("Log-probs", t.LogProbKind, false)
		add("Guidance", fmt.Sprintf("%g", t.TrueCFGScale), false)
		for _, x := range (*schemas.Settings)(&t.Sampling).Extras() {
			add(x[0], x[1], false)
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
	add("with the sampler, not begun", x.Received, x.Started)
	add("encoded", x.Started, x.Started+x.EncodeNS)
	add("denoised", x.Started+x.EncodeNS, x.Started+x.EncodeNS+x.DenoiseNS)
	add("decoded", x.Finished-x.DecodeNS, x.Finished)
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

// statesOf returns the indices of the stored states of an image that can be shown.
func (s *server) statesOf(t *schemas.Trajectory) []int64 {
	if t.Text != nil || t.Video != nil || t.StopReason != schemas.StopCompleted {
		return []int64{}
	}
	if _, _, ok := latentGrid(t); !ok {
		return []int64{}
	}
	return slices.Concat([]int64{}, t.LatentStepIndices)
}

// pngMagic is how a PNG file begins.
var pngMagic = []byte("\x89PNG\r\n\x1a\n")

// media answers with the image or the video of a sample, or with one of its states.
func (s *server) media(w http.ResponseWriter, r *http.Request) {
	ctx, done := context.WithTimeout(r.Context(), readTimeout)
	defer done()
	release, err := s.admit(ctx)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	defer release()
	r = r.WithContext(ctx)
	t, err := s.sampleOf(r)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	kind := r.PathValue("kind")
	tag := strconv.Quote(cmp.Or(t.ContentDigest, "none") + "-" + kind)
	w.Header().Set("ETag", tag)
	w.Header().Set("Cache-Control", "private, max-age=300")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	data, contentType, err := s.pixels(ctx, t, kind)
	if err != nil {
		if errors.Is(err, client.ErrNoImage) {
			err = &requestError{http.StatusNotFound, err.Error()}
		}
		w.Header().Del("ETag")
		w.Header().Set("Cache-Control", "no-cache")
		s.fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", contentType)
	s.write(w, data)
}

// pixels returns the file of an image, a video or a state, and its content type.
func (s *server) pixels(
	ctx context.Context,
	t *schemas.Trajectory,
	kind string,
) (data []byte, contentType string, err error) {
	switch contentType = "image/png"; kind {
	case "image":
		data, err = s.client.Image(ctx, t)
	case "video":
		data, err = s.client.Video(ctx, t)
		contentType = "image/apng"
	default:
		index, numberErr := strconv.ParseInt(kind, 10, 64)
		if numberErr != nil || !slices.Contains(s.statesOf(t), index) {
			return nil, "", &requestError{http.StatusNotFound, "this state is not stored"}
		}
		data, err = s.latentImage(ctx, t, index)
	}
	if err == nil && !bytes.HasPrefix(data, pngMagic) {
		err = &requestError{http.StatusBadGateway, "what is stored as the image is no PNG"}
	}
	return data, contentType, err
}
