package reward

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A server may lose rewards, or someone may purge them, after the trajectories were acknowledged: no consumer has them
// then. The reward service scores such samples again while their groups are open.

// lookEvery is how often the service looks whether rewards were removed. Samples that the consumer may have, such as
// those that wait for people, are looked at again after that, then after twice that, and so on up to lookMost.
const (
	lookEvery = 2 * time.Second
	lookMost  = time.Minute
)

// scoreLost looks regularly for rewards of open groups that are gone, until ctx ends. It reads groups only if something
// was removed from the stream of rewards since the last look, or the last look did not tell.
func (s *service) scoreLost(ctx context.Context) error {
	var last, messages uint64
	look := true // something may have been removed before this process began
	pause, next := lookEvery, time.Now()
	for {
		info, err := s.bus.StreamInfo(ctx, schemas.StreamRewards)
		if err == nil {
			state := info.State
			if state.Msgs != messages+state.LastSeq-last {
				look, pause, next = true, lookEvery, time.Now()
			}
			last, messages = state.LastSeq, state.Msgs
			if look && !time.Now().Before(next) {
				look, err = s.scoreOpen(ctx)
				next, pause = time.Now().Add(pause), min(2*pause, lookMost)
			}
		}
		if err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).Warn().Err(err).Msg("lost rewards not looked for, trying again")
		}
		if bus.Pause(ctx, lookEvery) != nil {
			return nil
		}
	}
}

// scoreOpen scores the samples of open groups that have no reward although their trajectories were acknowledged, and
// reports whether it must look again. An error is of the server.
func (s *service) scoreOpen(ctx context.Context) (again bool, err error) {
	open, err := s.bus.OpenGroups(ctx, "*")
	if err != nil || len(open) == 0 {
		return err != nil, err
	}
	d := schemas.TrajectoriesDurable()
	consumer, err := s.bus.JetStream().Consumer(ctx, d.Stream, d.Name)
	if err != nil {
		return true, fmt.Errorf("consumer %s: %w", d.Name, err)
	}
	info := consumer.CachedInfo()
	for _, g := range open {
		if !g.AsksForSamples() || s.controls.Of(g.Run, g.UID).Cancelled() != nil {
			continue
		}
		rewards, err := s.bus.Subjects(ctx, schemas.StreamRewards, schemas.Address{
			Kind: schemas.KindReward, Run: g.Run, Batch: g.Group.Batch, UID: g.UID,
		}.Filter())
		if err != nil {
			return true, err
		}
		if int64(len(rewards)) >= g.GroupSize {
			continue
		}
		filters := []string{schemas.TrajectoryFilter(g.Run, g.UID)}
		for m, err := range s.bus.Read(ctx, d.Stream, filters, bus.ReadOptions{}) {
			if err != nil {
				return true, err
			}
			waits, err := s.scoreAgain(ctx, m, info.AckFloor.Stream)
			if err != nil {
				return true, err
			}
			again = again || waits
		}
	}
	return again, ctx.Err()
}

// scoreAgain scores a sample whose reward is gone, and reports whether it waits for something. acknowledged is the
// sequence up to which all trajectories are; the consumer has later ones. An error is of the server.
func (s *service) scoreAgain(ctx context.Context, m *bus.Message, acknowledged uint64) (waits bool, err error) {
	var t schemas.Trajectory
	if bus.Fits(m, &t) != nil {
		return false, nil // it is a dead letter
	}
	complete := s.goOn
	if len(t.Group.Stages) == 0 {
		complete = s.advance
		if _, err := s.stored(ctx, &t, m.Seq); !errors.Is(err, bus.ErrNotFound) {
			return false, err
		}
	}
	if m.Seq > acknowledged {
		return true, nil
	}
	if fault, err := s.check(ctx, &t); err != nil || fault != nil {
		return false, err
	}
	zerolog.Ctx(ctx).Warn().Str("run", string(t.Run)).Str("uid", string(t.UID)).
		Int64("sample_index", t.SampleIndex).Msg("scored again: its reward was lost")
	p, err := complete(ctx, &t, m.Seq)
	return p.after > 0, err
}
