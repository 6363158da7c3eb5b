package reward

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// handleVerdict handles one message of a verdict: it completes the verdict's sample if the trajectory is stored.
// Otherwise the handler of the trajectory will find the verdict. A verdict that comes after the reward, or that no
// sample needs, is a dead letter; after other errors it is delivered again.
func (s *service) handleVerdict(ctx context.Context, m *bus.Message) error {
	var v schemas.Verdict
	if err := bus.Fits(m, &v); err != nil {
		return s.countDead(bus.Garbage(schemas.CodeDecode, err))
	}
	t, seq, err := s.trajectoryOf(ctx, &v)
	if err != nil || t == nil {
		return err
	}
	switch r, err := s.stored(ctx, t, seq); {
	case err == nil && !used(r, &v):
		return s.countDead(bus.Terminal(schemas.CodeLate,
			errors.New("the sample has its reward already, without this verdict")))
	case err == nil:
		s.metrics.Verdicts.WithLabelValues("used").Inc()
		return nil
	case !errors.Is(err, bus.ErrNotFound):
		return err
	}
	p, err := s.advance(ctx, t, seq)
	if _, terminal := errors.AsType[*bus.TerminalError](err); terminal || err == nil && p.completedByOther {
		p, err = delay{}, nil // left to the sample's own handler, or to that of the event it waits for
	}
	if err != nil {
		return err
	}
	if p.after == 0 {
		s.metrics.Verdicts.WithLabelValues("used").Inc()
	}
	return putBack(ctx, m, p)
}

// countDead counts a verdict that becomes a dead letter, and returns err. A verdict that is not valid frees its subject
// for another; one that came too late keeps it, as a pass may score the sample again.
func (s *service) countDead(err error) error {
	s.metrics.Verdicts.WithLabelValues("dead").Inc()
	return err
}

// trajectoryOf returns the trajectory that a verdict is for, and its sequence; nil if it is not stored yet. The error
// is terminal if no reward function of the group is this verdict's, or if the group has closed.
func (s *service) trajectoryOf(ctx context.Context, v *schemas.Verdict) (*schemas.Trajectory, uint64, error) {
	read := func(subject string) (*schemas.Trajectory, uint64, error) {
		t := &schemas.Trajectory{}
		m, err := s.bus.StoredEvent(ctx, schemas.StreamTrajectories, subject, t,
			func() (fault, err error) { return s.check(ctx, t) })
		if errors.Is(err, bus.ErrNotFound) {
			return nil, 0, nil
		}
		if err != nil {
			return nil, 0, fmt.Errorf("look up trajectory: %w", err)
		}
		return t, m.Seq, nil
	}
	own := schemas.TrajectorySubject(v.Run, v.UID, v.SampleIndex, schemas.StageMain)
	t, seq, err := read(own)
	if err != nil {
		return nil, 0, err
	}
	known := t
	if known == nil { // any other sample tells the same about the group
		if known, _, err = read(schemas.TrajectoryFilter(v.Run, v.UID)); err != nil {
			return nil, 0, err
		}
		if known != nil && len(known.Group.Stages) > 0 {
			if t, seq, err = s.standsFor(ctx, known, v.SampleIndex); err != nil {
				return nil, 0, err
			}
		}
	}
	switch {
	case known == nil:
	case v.SampleIndex >= known.GroupSize:
		return nil, 0, s.countDead(bus.Garbage(schemas.CodeInvalid,
			fmt.Errorf("sample_index: %d; group %s has %d samples", v.SampleIndex, v.UID, known.GroupSize)))
	case !slices.ContainsFunc(known.Group.Reward,
		func(r schemas.RewardSpec) bool { return scorer.VerdictName(r.Name) == v.Name }):
		return nil, 0, s.countDead(bus.Garbage(schemas.CodeInvalid,
			fmt.Errorf("name: %q; group %s waits for no such verdict", v.Name, v.UID)))
	}
	if t != nil {
		return t, seq, nil
	}
	var a schemas.Advantage
	switch _, err := s.bus.StoredEvent(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(v.Run, v.UID), &a,
		nil); {
	case err == nil:
		return nil, 0, s.countDead(bus.Terminal(schemas.CodeLate, fmt.Errorf("group %s has closed", v.UID)))
	case !errors.Is(err, bus.ErrNotFound):
		return nil, 0, fmt.Errorf("look up advantage: %w", err)
	}
	s.metrics.Verdicts.WithLabelValues("kept").Inc()
	return nil, 0, nil
}

// used reports whether a verdict is one of the scores of a reward.
func used(r *schemas.Reward, v *schemas.Verdict) bool {
	return slices.ContainsFunc(r.Scores, func(s schemas.Score) bool {
		if scorer.VerdictName(s.Name) != v.Name {
			return false
		}
		if v.Value == nil {
			return s.Value == nil && s.Error == v.Error
		}
		return s.Value != nil && *s.Value == *v.Value
	})
}
