// Package results assembles what a run has stored, for commands that show it (meander run, show, rescore) and for Go
// programs: groups with their samples, rewards and advantages, the metrics, a digest of it all, and files of them.
//
// Outcomes follows the prompts while the run goes on. When all have an outcome, Collect makes a [Run] of it; Read
// makes one of whatever is stored so far. A pass is the same run scored again (meander rescore): CollectPass makes a
// [Pass]. A roll is what scheduled sampling did to a sample. A reading is the text that a reward function saw in an
// image. Messages that are not valid events are skipped: services remove them.
//
// Collect calls fillGroup for each group; Write draws sheets of what Collect has made. Unless a comment says more, an
// error is of the server.
package results

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// Run is the outcome of a run. Its JSON is that of meander run --json.
type Run struct {
	Groups  []*Group // in the order of the prompts
	Summary Summary
}

// Group is the outcome of a prompt.
type Group struct {
	GroupResult
	// Group is the uid of the group that replaced the prompt's own; empty if none did.
	Group   schemas.UID `json:"group,omitempty"`
	Members []Member    `json:"members"`
	// Closed is when its last sample was scored, as the advantage event says; zero without a result.
	Closed time.Time `json:"-"`
	// Source is the run that has the samples, where this one is a pass over it; else empty.
	Source schemas.Run `json:"-"`
}

// GroupResult is the result of a group.
type GroupResult struct {
	UID    schemas.UID `json:"uid"`
	Prompt string      `json:"prompt"`
	// Status is the status of the advantage event, or refused, or open while there is no result.
	Status string `json:"status"`
	Error  string `json:"error,omitempty"`
	// Mean and Std are of the rewards; null without any. StdScale says what Std covers: the group, its whole batch
	// (global), or the group but unused by the estimator (none). StdBasis says by what the squares are divided: n-1
	// (sample), n (population), or as the estimator counts.
	Mean     *float64 `json:"mean"`
	Std      *float64 `json:"std"`
	StdScale string   `json:"std_scale,omitempty"`
	StdBasis string   `json:"std_basis,omitempty"`
}

// StdLabel says in words which standard deviation Std is.
func (g *GroupResult) StdLabel() string {
	if g.StdScale == schemas.StdGlobal {
		return g.StdBasis + ", batch"
	}
	return g.StdBasis
}

// SampleResult is the result of a sample.
type SampleResult struct {
	SampleIndex int64    `json:"sample_index"`
	Status      string   `json:"status"`
	Error       string   `json:"error,omitempty"`
	Reward      *float64 `json:"reward"`
	Advantage   *float64 `json:"advantage"`
	// StepAdvantages are set if they differ over the trained steps.
	StepAdvantages []float64 `json:"step_advantages,omitempty"`
}

// Member is one sample of a group.
type Member struct {
	SampleResult
	Scores []Score `json:"scores,omitempty"`
	// LogProbs are in nats, one for each step; null for an ode step. Transitions are the kinds of
	// the steps, Latents the indices of the kept states.
	LogProbs    []*float64 `json:"log_probs"`
	Transitions []string   `json:"transitions"`
	Latents     []int64    `json:"latent_step_indices"`
	Seed        uint64     `json:"sample_seed,string"`
	Digest      string     `json:"content_digest"`
	// Rollout is what a log-prob is recomputed with; nil without a trajectory.
	Rollout *Rollout `json:"rollout,omitempty"`
	// Image is the file that Write made, of a video the frame in the middle; Video is that with all frames.
	Image string `json:"image,omitempty"`
	Video string `json:"video,omitempty"`
	// Text is set if the sample is a text.
	Text *Text `json:"text,omitempty"`
	// Roll is set if the sample is one of scheduled sampling.
	Roll       *Roll `json:"scheduled_sampling,omitempty"`
	trajectory *schemas.Trajectory
}

// Trajectory returns the stored trajectory of the sample, which its caller must not change; nil if there is none.
func (m *Member) Trajectory() *schemas.Trajectory { return m.trajectory }

// Rollout is what a trainer needs, besides the latents, to recompute the log-probs of a sample, and to tell which
// weights made it.
type Rollout struct {
	// Settings are all that decided the rollout, in JSON beside the others.
	Settings *schemas.Settings `json:"-"`
	// CFGScales [T] are the scales of guidance that come of the settings; absent: 1.
	CFGScales []float64 `json:"cfg_scales,omitempty"`
	// StdDevT [T] is the diffusion coefficient of each step, NoiseStd [T] the standard deviation of its
	// transition, as in the step events; 0 for ode steps.
	StdDevT          []float64 `json:"std_dev_t"`
	NoiseStd         []float64 `json:"noise_std"`
	ScheduleDigest   string    `json:"schedule_digest"`
	WeightsDigest    string    `json:"weights_digest"`
	PolicyVersionMin int64     `json:"policy_version_min"`
	PolicyVersionMax int64     `json:"policy_version_max"`
}

// MarshalJSON returns the settings and the rest as one object.
func (r *Rollout) MarshalJSON() ([]byte, error) {
	type rest Rollout
	settings, err := json.Marshal(r.Settings)
	if err != nil {
		return nil, err
	}
	more, err := json.Marshal((*rest)(r))
	return append(append(settings[:len(settings)-1], ','), more[1:]...), err
}

// setRollout fills m.Rollout, what a trainer recomputes log-probs with, from the trajectory. It fails for a transition
// or a setting that this version does not know.
func (m *Member) setRollout(t *schemas.Trajectory) error {
	if err := t.CheckKnown(); err != nil {
		return err
	}
	r := &Rollout{
		Settings: (*schemas.Settings)(&t.Sampling), CFGScales: t.CFGScales, ScheduleDigest: t.ScheduleDigest,
		WeightsDigest: t.WeightsDigest, PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax,
	}
	plan := sampling.Plan(&t.Sampling)
	for i := range t.Transitions {
		k, err := plan.StepTransition(i)
		if err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		r.StdDevT, r.NoiseStd = append(r.StdDevT, k.StdDevT), append(r.NoiseStd, k.NoiseStd)
	}
	m.Rollout = r
	return nil
}

// Score is the outcome of one reward function.
type Score struct {
	Name    string   `json:"name"`
	Version string   `json:"version,omitempty"`
	Status  string   `json:"status"`
	Value   *float64 `json:"value"`
	Error   string   `json:"error,omitempty"`
	Detail  string   `json:"detail,omitempty"`
	Exact   *bool    `json:"exact,omitempty"`
	Seconds float64  `json:"seconds"`
}

// Summary counts the results of a run.
type Summary struct {
	Run schemas.Run `json:"run"`
	// State is what became of the run, or running, as in schemas.RunStatus.
	State        string `json:"state"`
	Groups       int    `json:"groups"`
	Complete     int    `json:"complete"`
	Refused      int    `json:"refused"`
	Refills      int    `json:"refills,omitempty"`
	Samples      int    `json:"samples"`
	Trajectories int    `json:"trajectories"`
	StepsStored  int    `json:"steps_stored"`
	// Evaluations counts the evaluations of the model. FlatEvaluations is what as many samples
	// without shared steps would need: more than Evaluations for trees.
	Evaluations     int64 `json:"evaluations"`
	FlatEvaluations int64 `json:"flat_evaluations"`
	// Engines counts the samples by what drew them, servers or sampler, if that is more than one.
	Engines map[string]int `json:"engines,omitempty"`
	Digest  string         `json:"digest"`
	Seconds float64        `json:"seconds"`
	// Metrics have verl's names; those of evaluations begin with val-.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	Out     string             `json:"out,omitempty"`
	Sheet   string             `json:"sheet,omitempty"`
}

// Read returns the outcome of a run so far: all prompts that were accepted, or refused with a uid, sorted by uid;
// those without a result are open. It fails if the server cannot be read.
func Read(ctx context.Context, b *bus.Bus, run schemas.Run) (*Run, error) {
	var prompts []Prompt
	records, err := b.LastMany(ctx, schemas.StreamGroups, []string{schemas.GroupSubject(run, "*")})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	for _, m := range records {
		var g schemas.GroupRecord
		if bus.Fits(m, &g) == nil && g.Group.Refill == nil { // a refill replaces one of these
			prompts = append(prompts, Prompt{UID: g.UID, Text: g.Prompt})
		}
	}
	slices.SortFunc(prompts, func(a, b Prompt) int { return cmp.Compare(a.UID, b.UID) })
	o := NewOutcomes(prompts)
	if err := o.Read(ctx, b, run); err != nil {
		return nil, err
	}
	r, err := Collect(ctx, b, run, o)
	if err != nil {
		return nil, err
	}
	status, err := counters.Status(ctx, b, run)
	if err == nil {
		r.Summary.State = status.State
	} else if !errors.Is(err, bus.ErrNotFound) { // a pass over another run has no prompts
		return nil, err
	}
	return r, nil
}

// Collect reads what the run stored for the prompts of o, and computes metrics and digest. The digest covers the
// content of all trajectories and advantages in key order: equal seeds and prompts give an equal digest, however the
// work was packed, timed or repeated. It fails if the server cannot be read.
func Collect(ctx context.Context, b *bus.Bus, run schemas.Run, o *Outcomes) (*Run, error) {
	c := &collection{trajectories: map[Sample]*schemas.Trajectory{}, engines: map[string]int{}}
	for t, err := range Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		c.trajectories[Sample{t.UID, t.SampleIndex}] = t.Trajectory
	}
	// Count step events of all attempts, without their parts.
	steps := 0
	for _, kind := range []string{schemas.KindStep, schemas.KindTokens} {
		stored, err := b.Subjects(ctx, schemas.StreamSteps, schemas.Address{Kind: kind, Run: run}.Filter())
		if err != nil {
			return nil, err
		}
		steps += len(stored)
	}
	var err error
	if c.rewards, err = Rewards(ctx, b, run, "*"); err != nil {
		return nil, err
	}
	r := &Run{Summary: Summary{
		Run: run, Groups: len(o.prompts), Refused: len(o.refused), Refills: len(o.refilled),
		Trajectories: len(c.trajectories), StepsStored: steps,
	}}
	for _, p := range o.prompts {
		g := &Group{GroupResult: GroupResult{UID: p.UID, Prompt: p.Text, Status: outcomes.Open}, Members: []Member{}}
		if a := o.Advantage(p.UID); a != nil {
			if err := c.fillGroup(g, a); err != nil {
				return nil, err
			}
		} else if reason, refused := o.Refused(p.UID); refused {
			g.Status, g.Error = schemas.StatusRefused, reason
		}
		r.Groups = append(r.Groups, g)
		r.Summary.Samples += len(g.Members)
		if g.Status == schemas.StatusComplete {
			r.Summary.Complete++
		}
	}
	if r.Summary.State, err = stateOf(ctx, b, r); err != nil {
		return nil, err
	}
	r.Summary.Metrics = c.metricSums.metrics()
	if c.rolls.samples > 0 {
		plans, err := Plans(ctx, b, run)
		if err != nil {
			return nil, err
		}
		for _, p := range plans {
			c.rolls.probability, c.rolls.plans = c.rolls.probability+p.Probability, c.rolls.plans+1
		}
	}
	c.rolls.metrics(r.Summary.Metrics)
	r.Summary.Evaluations, r.Summary.FlatEvaluations = c.evaluations, c.flatEvaluations
	if len(c.engines) > 1 {
		r.Summary.Engines = c.engines
	}
	r.Summary.Digest = c.digest.String()
	return r, nil
}

// stateOf returns what became of the groups of a run.
func stateOf(ctx context.Context, b *bus.Bus, r *Run) (string, error) {
	h, err := b.ControlsOf(ctx, r.Summary.Run, "")
	if err != nil {
		return "", err
	}
	c := outcomes.Counts{Groups: outcomes.Groups{}}
	for _, g := range r.Groups {
		c.Groups[g.Status]++
	}
	if h.Run != nil {
		c.Control = h.Run.Action
	}
	return c.Run(), nil
}

// collection is what a run stored, and what was gathered from it.
type collection struct {
	trajectories map[Sample]*schemas.Trajectory
	rewards      map[Sample]*schemas.Reward
	metricSums   metricSums
	rolls        rollSums
	digest       digest
	// evaluations are as in the Summary.
	evaluations, flatEvaluations int64
	engines                      map[string]int
}

// fillGroup sets the result of a group and its members from the group's advantage event, and adds them to digest and
// metrics; Collect calls it for each group that has one. A member whose trajectory cannot be read as a rollout has an
// error; fillGroup itself fails only if a content has no digest.
func (c *collection) fillGroup(g *Group, a *schemas.Advantage) error {
	if err := c.digest.add("advantage."+string(a.UID), a); err != nil {
		return err
	}
	g.GroupResult, g.Source = groupResult(a, g.UID, g.Prompt), a.SourceRun
	if a.Closed > 0 {
		g.Closed = time.Unix(0, a.Closed).UTC()
	}
	if a.UID != g.UID {
		g.Group = a.UID
	}
	for _, m := range a.Members {
		sample := Sample{a.UID, m.SampleIndex}
		t, reward := c.trajectories[sample], c.rewards[sample]
		if t != nil && g.Group != "" {
			g.Prompt = t.Prompt // a substitute has another prompt
		}
		if reward != nil {
			c.metricSums.addSample(a, &m, reward)
		}
		member := MemberOf(&m, t, reward)
		if t != nil {
			if err := c.digest.add("trajectory."+sample.String(), t); err != nil {
				return err
			}
			c.countEvaluations(t)
			by := "sampler"
			if d := t.Drawn; d != nil {
				by = d.Engine.String()
			}
			c.engines[by]++
		}
		c.rolls.add(member.Roll)
		g.Members = append(g.Members, member)
	}
	c.metricSums.addValidation(a, c.rewards)
	return nil
}

// MemberOf joins what is stored of one sample: its part of the advantage event, its trajectory and its reward, of which
// the last two may be nil. A trajectory that cannot be read as a rollout gives the member an error.
func MemberOf(m *schemas.Member, t *schemas.Trajectory, reward *schemas.Reward) Member {
	member := Member{SampleResult: sampleResult(m)}
	if reward != nil {
		member.Error, member.Scores = reward.Error, scoresOf(reward)
	}
	if t == nil {
		return member
	}
	member.trajectory, member.LogProbs, member.Seed = t, t.LogProbs, t.SampleSeed
	member.Error = cmp.Or(t.Error, member.Error)
	if t.Text != nil {
		member.Text = TextOf(t)
	} else if err := member.setRollout(t); err != nil {
		member.Error = cmp.Or(member.Error, err.Error())
	}
	member.Roll = rollOf(t)
	member.Transitions, member.Latents, member.Digest = t.Transitions, t.LatentStepIndices, t.ContentDigest
	return member
}

// countEvaluations adds a completed sample to the two counts of model evaluations: those that it took, and those that
// it would have taken if samples of a tree shared no steps.
func (c *collection) countEvaluations(t *schemas.Trajectory) {
	if t.StopReason != schemas.StopCompleted {
		return
	}
	if t.Text != nil { // one evaluation for each token
		c.evaluations += t.Text.Generated()
		c.flatEvaluations += t.Text.Generated()
		return
	}
	begin, end := t.Segment()
	own := sampling.Evaluations(&t.Sampling, begin, end)
	c.evaluations += own
	c.flatEvaluations += own
	if t.Group.Tree != nil {
		c.flatEvaluations += sampling.Evaluations(&t.Sampling, 0, begin)
	}
}

// groupResult returns the result of a group from its advantage event.
func groupResult(a *schemas.Advantage, uid schemas.UID, prompt string) GroupResult {
	return GroupResult{
		UID: uid, Prompt: prompt, Status: outcomes.Group(a), Error: a.Error, Mean: a.Mean, Std: a.Std,
		StdScale: a.Scale, StdBasis: a.StdBasis,
	}
}

// sampleResult returns the result of a sample from its part of the advantage event.
func sampleResult(m *schemas.Member) SampleResult {
	return SampleResult{
		SampleIndex: m.SampleIndex, Status: m.Status, Reward: m.Reward, Advantage: m.Advantage,
		StepAdvantages: m.StepAdvantages,
	}
}

// Best returns the members by falling reward; members without a reward come last.
func (g *Group) Best() []Member {
	members := slices.Clone(g.Members)
	slices.SortStableFunc(members, func(a, b Member) int {
		return cmp.Or(compareDescending(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
	})
	return members
}

// compareDescending orders rewards for Best: larger values first, missing ones last.
func compareDescending(a, b *float64) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return cmp.Compare(*b, *a)
}

// maxReading is how many characters of a reading fit into a column or a caption.
const maxReading = 14

// Read returns what a reward function read in the image, quoted and cut to a caption's length; "" if none read
// anything.
func (m *Member) Read() string { return shortReading(m.Scores) }

// ReadBy returns what the reward function of that name read, in the form of Read.
func (m *Member) ReadBy(name string) string {
	for i, s := range m.Scores {
		if s.Name == name {
			return shortReading(m.Scores[i : i+1])
		}
	}
	return ""
}

// shortReading returns the first reading among the scores, quoted and cut to the width of a caption; "" if there is
// none.
func shortReading(scores []Score) string {
	for _, s := range scores {
		if s.Detail != "" {
			text := s.Detail
			if utf8.RuneCountInString(text) > maxReading {
				text = string([]rune(text)[:maxReading-1]) + "…"
			}
			return fmt.Sprintf("%q", text)
		}
	}
	return ""
}

// scoresOf returns the outcomes of the reward functions of a sample, in the order of the reward event.
func scoresOf(r *schemas.Reward) (scores []Score) {
	for _, s := range r.Scores {
		scores = append(scores, Score{
			Name: s.Name, Version: s.Version, Status: s.Status, Value: s.Value, Error: s.Error, Detail: s.Detail,
			Exact:   s.Exact,
			Seconds: float64(s.DurationNS) / 1e9,
		})
	}
	return scores
}
