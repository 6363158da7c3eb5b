// Package results assembles what a run has stored: groups with their samples, rewards and
// advantages, the metrics, a digest of it all, and files of them.
package results

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/schemas"
)

// Run is what a run came to. Its JSON is that of meander run --json.
type Run struct {
	Groups  []*Group // in the order of the prompts
	Summary Summary
}

// Group is what became of a prompt.
type Group struct {
	GroupResult
	// Group is the uid of the group that stood in for the prompt's own, where one did.
	Group   schemas.UID `json:"group,omitempty"`
	Members []Member    `json:"members"`
}

// GroupResult is the result of a group.
type GroupResult struct {
	UID    schemas.UID `json:"uid"`
	Prompt string      `json:"prompt"`
	// Status is that of the advantage event, refused, or open where there is no result yet.
	Status string `json:"status"`
	Error  string `json:"error,omitempty"`
	// Mean and Std are of the rewards; null without any. Std is what the estimator takes: StdScale says whether of the group,
	// of its whole batch (global), or for information (none), StdBasis whether that of a sample, n-1, or of the population, n.
	Mean     *float64 `json:"mean"`
	Std      *float64 `json:"std"`
	StdScale string   `json:"std_scale,omitempty"`
	StdBasis string   `json:"std_basis,omitempty"`
}

// StdLabel says of what Std is the standard deviation, and how, for people.
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
	// StepAdvantages are there when they differ over the trained steps.
	StepAdvantages []float64 `json:"step_advantages,omitempty"`
}

// Member is one sample of a group.
type Member struct {
	SampleResult
	Scores []Score `json:"scores,omitempty"`
	// LogProbs are in nats, one a step, null where a step is ode; Transitions are the steps'
	// kinds, Latents the indices of the states kept.
	LogProbs    []*float64 `json:"log_probs"`
	Transitions []string   `json:"transitions"`
	Latents     []int64    `json:"latent_step_indices"`
	Seed        uint64     `json:"sample_seed,string"`
	Digest      string     `json:"content_digest"`
	// What a log-prob is recomputed with: nil where there is no trajectory.
	Rollout *Rollout `json:"rollout,omitempty"`
	Image   string   `json:"image,omitempty"`
	// Text is there where the sample is one.
	Text *Text `json:"text,omitempty"`
	// Roll is there where the sample is one of scheduled sampling.
	Roll       *Roll `json:"scheduled_sampling,omitempty"`
	trajectory *schemas.Trajectory
}

// Rollout is what a trainer needs besides the latents to recompute the log-probs of a sample, and to tell the
// weights apart that made it.
type Rollout struct {
	// Sigmas [T+1] decrease to 0.
	Sigmas     []float32 `json:"sigmas"`
	NoiseLevel float64   `json:"noise_level"`
	// StdDevT and NoiseStd [T] are those of the step events: the diffusion coefficient, and the standard
	// deviation of the transition; 0 on ode steps.
	StdDevT          []float64 `json:"std_dev_t"`
	NoiseStd         []float64 `json:"noise_std"`
	LogProbKind      string    `json:"log_prob_kind"`
	TrueCFGScale     float64   `json:"true_cfg_scale"`
	ScheduleDigest   string    `json:"schedule_digest"`
	WeightsDigest    string    `json:"weights_digest"`
	PolicyVersionMin int64     `json:"policy_version_min"`
	PolicyVersionMax int64     `json:"policy_version_max"`
}

func (m *Member) takeRollout(t *schemas.Trajectory) error {
	r := &Rollout{
		Sigmas: t.Sigmas, NoiseLevel: t.NoiseLevel, LogProbKind: t.LogProbKind, TrueCFGScale: t.TrueCFGScale, ScheduleDigest: t.ScheduleDigest,
		WeightsDigest: t.WeightsDigest, PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax,
	}
	for i, transition := range t.Transitions {
		k, err := flow.NewKernel(flow.Transition(transition), t.NoiseLevel, t.Sigmas, i)
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

// Summary counts what a run came to.
type Summary struct {
	Run          schemas.Run `json:"run"`
	Groups       int         `json:"groups"`
	Complete     int         `json:"complete"`
	Refused      int         `json:"refused"`
	Refills      int         `json:"refills,omitempty"`
	Samples      int         `json:"samples"`
	Trajectories int         `json:"trajectories"`
	StepsStored  int         `json:"steps_stored"`
	// Evaluations are those of the model that the trajectories stand for, FlatEvaluations those
	// of as many samples that share no steps: more where they are of trees.
	Evaluations     int64   `json:"evaluations"`
	FlatEvaluations int64   `json:"flat_evaluations"`
	Digest          string  `json:"digest"`
	Seconds         float64 `json:"seconds"`
	// Metrics are named as verl names them; those of evaluations begin with val-.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	Out     string             `json:"out,omitempty"`
	Sheet   string             `json:"sheet,omitempty"`
}

// StatusOpen is a group without a result.
const StatusOpen = "open"

// Read is what a run has come to so far: of every prompt that was accepted or refused with a
// uid, in the order of the uids.
func Read(ctx context.Context, b *bus.Bus, run schemas.Run) (*Run, error) {
	var prompts []Prompt
	records, err := b.LastMany(ctx, schemas.StreamGroups, []string{schemas.GroupSubject(run, "*")})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	for _, m := range records {
		var g schemas.GroupRecord
		if bus.Fits(m, &g) == nil && g.Group.Refill == nil { // else it stands in for one of these
			prompts = append(prompts, Prompt{UID: g.UID, Text: g.Prompt})
		}
	}
	slices.SortFunc(prompts, func(a, b Prompt) int { return cmp.Compare(a.UID, b.UID) })
	o := NewOutcomes(prompts)
	if err := o.Read(ctx, b, run); err != nil {
		return nil, err
	}
	return Collect(ctx, b, run, o)
}

// Collect reads what the run stored of the prompts of o. The digest is over the content of all
// trajectories and advantages in key order: equal for equal seeds and prompts, however the
// work was packed, timed or repeated.
func Collect(ctx context.Context, b *bus.Bus, run schemas.Run, o *Outcomes) (*Run, error) {
	c := &collection{trajectories: map[Sample]*schemas.Trajectory{}}
	for t, err := range Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		c.trajectories[Sample{t.UID, t.SampleIndex}] = t.Trajectory
	}
	// Step events, not their parts, of all attempts.
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
		Run: run, Groups: len(o.prompts), Refused: len(o.refused), Refills: len(o.refilled), Trajectories: len(c.trajectories), StepsStored: steps,
	}}
	for _, p := range o.prompts {
		g := &Group{GroupResult: GroupResult{UID: p.UID, Prompt: p.Text, Status: StatusOpen}, Members: []Member{}}
		if a := o.Advantage(p.UID); a != nil {
			if err := c.fill(g, a); err != nil {
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
	r.Summary.Metrics = c.measured.metrics()
	if c.rolling.samples > 0 {
		plans, err := Plans(ctx, b, run)
		if err != nil {
			return nil, err
		}
		for _, p := range plans {
			c.rolling.probability, c.rolling.plans = c.rolling.probability+p.Probability, c.rolling.plans+1
		}
	}
	c.rolling.metrics(r.Summary.Metrics)
	r.Summary.Evaluations, r.Summary.FlatEvaluations = c.evaluations, c.flatEvaluations
	r.Summary.Digest = c.digest.String()
	return r, nil
}

// collection is what a run stored, and what was found of it.
type collection struct {
	trajectories map[Sample]*schemas.Trajectory
	rewards      map[Sample]*schemas.Reward
	measured     measures
	rolling      rolling
	digest       digest
	// evaluations are as in the Summary.
	evaluations, flatEvaluations int64
}

// fill gives a group its result.
func (c *collection) fill(g *Group, a *schemas.Advantage) error {
	if err := c.digest.add("advantage."+string(a.UID), a); err != nil {
		return err
	}
	g.GroupResult = groupResult(a, g.UID, g.Prompt)
	if a.UID != g.UID {
		g.Group = a.UID
	}
	for _, m := range a.Members {
		sample := Sample{a.UID, m.SampleIndex}
		if t := c.trajectories[sample]; t != nil && g.Group != "" {
			g.Prompt = t.Prompt // another's, where a substitute stood in
		}
		member := Member{SampleResult: sampleResult(&m)}
		if reward := c.rewards[sample]; reward != nil {
			member.Error, member.Scores = reward.Error, scoresOf(reward)
			c.measured.sample(a, &m, reward)
		}
		if t := c.trajectories[sample]; t != nil {
			if err := c.digest.add("trajectory."+sample.String(), t); err != nil {
				return err
			}
			c.evaluated(t)
			member.trajectory, member.LogProbs, member.Seed = t, t.LogProbs, t.SampleSeed
			member.Error = cmp.Or(t.Error, member.Error)
			if t.Text != nil {
				member.Text = TextOf(t)
			} else if err := member.takeRollout(t); err != nil {
				member.Error = cmp.Or(member.Error, err.Error())
			}
			member.Roll = rollOf(t)
			c.rolling.take(member.Roll)
			member.Transitions, member.Latents, member.Digest = t.Transitions, t.LatentStepIndices, t.ContentDigest
		}
		g.Members = append(g.Members, member)
	}
	c.measured.group(a, c.rewards)
	return nil
}

// evaluated counts what the model was asked for a sample, and for one that shares no steps.
func (c *collection) evaluated(t *schemas.Trajectory) {
	if t.StopReason != schemas.StopCompleted {
		return
	}
	if t.Text != nil { // a token an evaluation
		c.evaluations += t.Text.Generated()
		c.flatEvaluations += t.Text.Generated()
		return
	}
	each := int64(1)
	if t.TrueCFGScale > 1 {
		each = 2
	}
	begin, end := t.Segment()
	own := each * flow.Evaluations(flow.Solver(t.Solver), t.Transitions[begin:end])
	c.evaluations += own
	c.flatEvaluations += own
	if t.Group.Tree != nil {
		c.flatEvaluations += each * flow.Evaluations(flow.Solver(t.Solver), t.Transitions[:begin])
	}
}

func groupResult(a *schemas.Advantage, uid schemas.UID, prompt string) GroupResult {
	return GroupResult{UID: uid, Prompt: prompt, Status: a.Status, Error: a.Error, Mean: a.Mean, Std: a.Std, StdScale: a.Scale, StdBasis: a.StdBasis}
}

func sampleResult(m *schemas.Member) SampleResult {
	return SampleResult{SampleIndex: m.SampleIndex, Status: m.Status, Reward: m.Reward, Advantage: m.Advantage, StepAdvantages: m.StepAdvantages}
}

// Best are the members by falling reward, those without one last.
func (g *Group) Best() []Member {
	members := slices.Clone(g.Members)
	slices.SortStableFunc(members, func(a, b Member) int {
		return cmp.Or(compareDown(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
	})
	return members
}

// compareDown puts larger values first and missing ones last.
func compareDown(a, b *float64) int {
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

// mostRead is how much of what was read fits a column or a caption.
const mostRead = 14

// Read is what a reward function read in the image, in quotes, cut to a caption's length;
// empty: none said.
func (m *Member) Read() string { return readIn(m.Scores) }

// ReadBy is what the reward function of that name read, as Read has it.
func (m *Member) ReadBy(name string) string {
	for i, s := range m.Scores {
		if s.Name == name {
			return readIn(m.Scores[i : i+1])
		}
	}
	return ""
}

func readIn(scores []Score) string {
	for _, s := range scores {
		if s.Detail != "" {
			text := s.Detail
			if utf8.RuneCountInString(text) > mostRead {
				text = string([]rune(text)[:mostRead-1]) + "…"
			}
			return fmt.Sprintf("%q", text)
		}
	}
	return ""
}

func scoresOf(r *schemas.Reward) (scores []Score) {
	for _, s := range r.Scores {
		scores = append(scores, Score{
			Name: s.Name, Version: s.Version, Status: s.Status, Value: s.Value, Error: s.Error, Detail: s.Detail, Exact: s.Exact,
			Seconds: float64(s.DurationNS) / 1e9,
		})
	}
	return scores
}
