package view

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

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
	// Audio is that of its sound.
	Audio string `json:"audio,omitempty"`
	// Text is set if the sample is a text.
	Text *Text `json:"text,omitempty"`
	// Roll is set if the sample is one of scheduled sampling.
	Roll       *Roll `json:"scheduled_sampling,omitempty"`
	trajectory *schemas.Trajectory
}

// Trajectory returns the stored trajectory of the sample, which its caller must not change; nil if there is none.
func (m *Member) Trajectory() *schemas.Trajectory { return m.trajectory }

// Fix says what to do about the sample, or about reward functions that failed on it; "": nothing.
func (m *Member) Fix() string {
	outcome, t := m.Status, m.trajectory
	if slices.ContainsFunc(m.Scores, func(s Score) bool { return s.Status == schemas.StatusFailed }) {
		outcome = schemas.StatusFailed
	}
	if t == nil || t.StopReason != schemas.StopCompleted {
		return outcomes.FixSample("", outcome, false)
	}
	return outcomes.FixSample(t.Run, outcome, true)
}

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
	// Members is how many samples of the group the function compared; 0: it rated this one by itself.
	Members int64 `json:"members,omitempty"`
}

// MemberOf joins what is stored of one sample: its part of the advantage event, its trajectory and its reward, of which
// the last two may be nil. A trajectory that cannot be read as a rollout gives the member an error.
func MemberOf(m *schemas.Member, t *schemas.Trajectory, reward *schemas.Reward) Member {
	member := Member{SampleResult: SampleResult{
		SampleIndex: m.SampleIndex, Status: m.Status, Reward: m.Reward, Advantage: m.Advantage,
		StepAdvantages: m.StepAdvantages,
	}}
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

// GroupResultOf returns the result of a group from its advantage event.
func GroupResultOf(a *schemas.Advantage, uid schemas.UID, prompt string) GroupResult {
	return GroupResult{
		UID: uid, Prompt: prompt, Status: outcomes.Group(a), Error: a.Error, Mean: a.Mean, Std: a.Std,
		StdScale: a.Scale, StdBasis: a.StdBasis,
	}
}

// CompareRewards orders rewards: larger ones first, missing ones last.
func CompareRewards(a, b *float64) int {
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
			Exact: s.Exact, Members: s.Members,
			Seconds: float64(s.DurationNS) / 1e9,
		})
	}
	return scores
}

// Roll is what scheduled sampling did to a sample: the model stepped a noised latent down to the timestep that is
// trained.
type Roll struct {
	// Timestep is the one that the sample is trained at, Source the one where it began.
	Timestep float64 `json:"timestep"`
	Source   int64   `json:"source"`
	Offset   int64   `json:"offset"`
	// Reason is why it did not roll; empty if it did.
	Reason string `json:"reason,omitempty"`
	// U is the share of noise in the latents.
	U float64 `json:"u"`
	// Drift is |latents - teacher-forced| / |teacher-forced|; null where that is not finite.
	Drift    *float64             `json:"drift"`
	Forwards int64                `json:"forwards"`
	Terms    *schemas.ReflexTerms `json:"reflexflow,omitempty"`
}

// Steps returns how many steps the sample took.
func (r *Roll) Steps() int64 { return max(0, r.Source-int64(r.Timestep)) }

// rollOf returns the roll of a sample; nil for an ordinary sample, and for one that did not complete.
func rollOf(t *schemas.Trajectory) *Roll {
	if t.Rolled == nil || t.ScheduledSampling == nil {
		return nil
	}
	x, r := &t.ScheduledSampling.Roll, t.Rolled
	return &Roll{
		Timestep: r.Timestep, Source: x.Source, Offset: x.Offset, Reason: x.Reason, U: r.U, Drift: r.Drift,
		Forwards: r.Forwards, Terms: r.ReflexFlow,
	}
}
