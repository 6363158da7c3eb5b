package reward

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Some functions need more than the sample: a verdict from outside, or the whole group.
// Nothing of that is kept here. A sample that lacks something is put back until its
// deadline, and whatever comes wakes those it completes: a verdict its sample, the last
// trajectory of a group all samples of it. No wake-up is lost, because everything is
// stored before anybody looks: of two handlers, for what was stored first and for what
// was stored last, the latter finds both.

// needs says what a sample waits for besides its picture.
func needs(t *schemas.Trajectory) (outside, group bool) {
	for _, spec := range t.Group.Reward {
		kind, _, err := scorer.SplitName(spec.Name)
		outside = outside || err == nil && kind == scorer.External
		group = group || scorer.NewGroup(spec.Name) != nil
	}
	return outside, group
}

// longestWait is after what time a waiting sample is looked at again.
const longestWait = 10 * time.Minute

// attempt scores a sample if all it needs is there, or if it is time to give up what is
// not; a group as a whole when it is complete. A positive wait says when to come again.
func (s *service) attempt(ctx context.Context, t *schemas.Trajectory, seq uint64) (wait time.Duration, err error) {
	outside, group := needs(t)
	x := sample{t, seq, nil}
	if !outside && !group || t.StopReason != schemas.StopCompleted && !group {
		return s.finish(ctx, x)
	}
	switch stored, err := s.stored(ctx, t); {
	case err != nil:
		return 0, err
	case stored:
		return 0, nil
	}
	samples := []sample{x}
	left := time.Until(s.giveUp(t))
	if group {
		complete, all, err := s.group(ctx, t)
		switch {
		case err != nil:
			return 0, err
		case !complete && left > 0:
			return min(left, longestWait), nil
		}
		samples = all
	}
	for _, x := range samples {
		waits := false
		if outside && x.StopReason == schemas.StopCompleted {
			if waits, err = s.verdicts(ctx, &x, left <= 0); err != nil {
				return 0, err
			}
		}
		if waits {
			if x.SampleIndex == t.SampleIndex {
				wait = max(wait, min(left, longestWait))
			}
			continue // its verdict wakes it
		}
		later, err := s.finish(ctx, x)
		if err != nil {
			return 0, err
		}
		if later > 0 && (wait == 0 || later < wait) {
			wait = later
		}
	}
	return wait, nil
}

// giveUp is when a sample is scored with what there is: a little before its group
// closes, so that it closes with the reasons.
func (s *service) giveUp(t *schemas.Trajectory) time.Time {
	if t.Group.Deadline == 0 {
		return time.Unix(0, t.Timings.Finished).Add(s.cfg.GroupWait)
	}
	deadline := time.Unix(0, t.Group.Deadline)
	return deadline.Add(-min(2*time.Second, deadline.Sub(time.Unix(0, t.Group.Created))/10))
}

// stored says whether the sample has its reward.
func (s *service) stored(ctx context.Context, t *schemas.Trajectory) (bool, error) {
	subject := fmt.Sprintf("%sreward.%d.%s.%s.%s.%d", schemas.Prefix, bus.Partition(t.Group.Batch), t.Run, t.Group.Batch, t.UID, t.SampleIndex)
	switch _, err := s.bus.Last(ctx, schemas.StreamRewards, subject); {
	case errors.Is(err, bus.ErrNotFound):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up reward: %w", err)
	}
	return true, nil
}

// source is the run whose trajectories are scored.
func source(t *schemas.Trajectory) string {
	if t.Group.SourceRun != "" {
		return t.Group.SourceRun
	}
	return t.Run
}

// verdicts puts the verdicts of a sample into x. Those that did not come are failures
// when it is time to give up; before, the sample waits.
func (s *service) verdicts(ctx context.Context, x *sample, over bool) (waits bool, err error) {
	given := map[string]scored{}
	for name, r := range x.given {
		given[name] = r
	}
	for _, spec := range x.Group.Reward {
		kind, instance, err := scorer.SplitName(spec.Name)
		if err != nil || kind != scorer.External {
			continue
		}
		if instance == "" {
			instance = scorer.External
		}
		m, err := s.bus.Last(ctx, schemas.StreamVerdicts, schemas.VerdictSubject(source(x.Trajectory), x.UID, x.SampleIndex, instance))
		switch {
		case errors.Is(err, bus.ErrNotFound) && !over:
			return true, nil
		case errors.Is(err, bus.ErrNotFound):
			given[spec.Name] = scored{Result: scorer.Result{Err: errors.New("no verdict came in time")}, version: verdictVersion}
			continue
		case err != nil:
			return false, fmt.Errorf("look up verdict: %w", err)
		}
		var v schemas.Verdict
		r := scored{version: verdictVersion}
		switch err := schemas.DecodeValid(m.Data, &v); {
		case err != nil:
			r.Err = fmt.Errorf("verdict: %w", err)
		case v.Value == nil:
			r.Err = errors.New(v.Error)
		default:
			r.Value, r.Detail = *v.Value, clip(v.Comment)
		}
		given[spec.Name] = r
	}
	x.given = given
	return false, nil
}

const verdictVersion = "1"

func clip(s string) string {
	for i := range s {
		if i > schemas.MaxDetail-4 {
			return s[:i]
		}
	}
	return s
}

// group reads all trajectories of a sample's group that are there, with the scores of
// the functions that rate the group as a whole.
func (s *service) group(ctx context.Context, t *schemas.Trajectory) (complete bool, samples []sample, err error) {
	stored, err := s.bus.LastMany(ctx, schemas.StreamTrajectories, []string{schemas.Prefix + "trajectory." + source(t) + "." + t.UID + ".*"})
	if err != nil {
		return false, nil, fmt.Errorf("look up the group: %w", err)
	}
	for _, m := range stored {
		other := &schemas.Trajectory{}
		if err := schemas.DecodeValid(m.Data, other); err != nil {
			continue // it is a dead letter of its own
		}
		other.Run, other.Group = t.Run, t.Group
		samples = append(samples, sample{other, m.Seq, map[string]scored{}})
	}
	slices.SortFunc(samples, func(a, b sample) int { return cmp.Compare(a.SampleIndex, b.SampleIndex) })
	complete = int64(len(samples)) >= t.GroupSize
	if !complete && time.Now().Before(s.giveUp(t)) {
		return false, nil, nil
	}
	for _, spec := range t.Group.Reward {
		if g := scorer.NewGroup(spec.Name); g != nil {
			if err := s.scoreGroup(ctx, g, spec, samples); err != nil {
				return false, nil, err
			}
		}
	}
	return complete, samples, nil
}

// scoreGroup lets one function rate the samples of a group that have a picture.
func (s *service) scoreGroup(ctx context.Context, g scorer.GroupScorer, spec schemas.RewardSpec, samples []sample) error {
	began := time.Now()
	var in []scorer.Input
	var at []int // in[k] is of samples[at[k]]
	for i, x := range samples {
		if x.StopReason != schemas.StopCompleted {
			continue
		}
		picture, err := s.picture(ctx, x.Image)
		if errors.Is(err, bus.ErrNotFound) {
			x.given[spec.Name] = scored{Result: scorer.Result{Err: fmt.Errorf("picture is no longer stored: %w", err)}, version: g.Version()}
			continue
		}
		if err != nil {
			return fmt.Errorf("load picture of sample %d: %w", x.SampleIndex, err)
		}
		in, at = append(in, scorer.Input{Image: picture, Prompt: x.Prompt, GroundTruth: spec.GroundTruth, Params: spec.Params}), append(at, i)
	}
	if len(in) == 0 {
		return nil
	}
	for k, r := range g.ScoreGroup(ctx, in) {
		samples[at[k]].given[spec.Name] = scored{Result: r, version: g.Version(), took: time.Since(began) / time.Duration(len(in))}
	}
	return nil
}

// verdict wakes the sample that a verdict is for, if its trajectory is there.
func (s *service) verdict(ctx context.Context, m *bus.Message) error {
	var v schemas.Verdict
	if err := schemas.DecodeValid(m.Data, &v); err != nil {
		return bus.Terminal(schemas.CodeDecode, err)
	}
	stored, err := s.bus.Last(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(v.Run, v.UID, v.SampleIndex))
	if errors.Is(err, bus.ErrNotFound) {
		return nil // the trajectory's handler will find the verdict
	}
	if err != nil {
		return fmt.Errorf("look up trajectory: %w", err)
	}
	var t schemas.Trajectory
	if err := schemas.DecodeValid(stored.Data, &t); err != nil {
		return nil // it is a dead letter of its own
	}
	if !slices.ContainsFunc(t.Group.Reward, func(r schemas.RewardSpec) bool {
		return r.Name == scorer.External+":"+v.Name || r.Name == v.Name && v.Name == scorer.External
	}) {
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("name: %q; the prompt asks for no such reward from outside", v.Name))
	}
	switch done, err := s.stored(ctx, &t); {
	case err != nil:
		return err
	case done:
		return s.lateVerdict(ctx, &t, &v)
	}
	return s.settle(ctx, m, func() (time.Duration, error) {
		wait, err := s.attempt(ctx, &t, stored.Seq)
		if wait >= time.Minute {
			wait = 0 // it waits for others, who will wake it
		}
		return wait, err
	})
}

// lateVerdict refuses a verdict that is no part of the stored reward.
func (s *service) lateVerdict(ctx context.Context, t *schemas.Trajectory, v *schemas.Verdict) error {
	subject := fmt.Sprintf("%sreward.%d.%s.%s.%s.%d", schemas.Prefix, bus.Partition(t.Group.Batch), t.Run, t.Group.Batch, t.UID, t.SampleIndex)
	m, err := s.bus.Last(ctx, schemas.StreamRewards, subject)
	if err != nil {
		return fmt.Errorf("look up reward: %w", err)
	}
	var r schemas.Reward
	if err := schemas.Decode(m.Data, &r); err != nil {
		return fmt.Errorf("stored reward %s: %w", m.Subject, err)
	}
	for _, score := range r.Scores {
		if (score.Name == scorer.External+":"+v.Name || score.Name == v.Name) && (score.Value != nil) == (v.Value != nil) {
			return nil
		}
	}
	return bus.Terminal(schemas.CodeLate, errors.New("the sample was scored without this verdict"))
}
