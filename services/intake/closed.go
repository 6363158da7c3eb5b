package intake

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A group may have its result while requests of it wait: it closed at its deadline while its run
// was paused, or before a sampler came. Nobody waits for those samples any more, so intake
// removes the requests as soon as the result is stored. What a sampler has got by then, the
// sampler lets be.

// closeAgain is the pause before results are followed once more.
const closeAgain = time.Second

// closings removes, until ctx ends, what groups with a result still ask for.
func (s *service) closings(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := s.followResults(ctx); err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).Debug().Err(err).Msg("results not followed, trying again")
		}
		t := time.NewTimer(closeAgain)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	return nil
}

func (s *service) followResults(ctx context.Context) error {
	info, err := s.bus.StreamInfo(ctx, schemas.StreamAdvantages)
	if err != nil {
		return err
	}
	// Those that were stored while nobody looked, then those that come.
	for _, kind := range []string{schemas.KindRequest, schemas.KindParked} {
		if err := s.dropClosed(ctx, kind, "*"); err != nil {
			return err
		}
	}
	results := []string{schemas.Address{Kind: schemas.KindAdvantage}.Filter()}
	for m, err := range s.bus.Read(ctx, schemas.StreamAdvantages, results, bus.ReadOptions{FromSeq: info.State.LastSeq + 1, Live: true}) {
		if err != nil {
			return err
		}
		a := &schemas.Advantage{}
		if bus.Fits(m, a) != nil || !lacks(a) {
			continue
		}
		if err := s.dropOf(ctx, a.Run, a.UID); err != nil {
			return err
		}
	}
	return nil
}

// lacks says whether a group closed without the trajectory of some sample.
func lacks(a *schemas.Advantage) bool {
	for i := range a.Members {
		if a.Members[i].TrajectorySeq == 0 {
			return true
		}
	}
	return int64(len(a.Members)) < a.GroupSize
}

// dropClosed removes the requests of a kind that are for groups of a run, or with "*" of any,
// that have their result.
func (s *service) dropClosed(ctx context.Context, kind string, run schemas.Run) error {
	stream := schemas.StreamRequests
	if kind == schemas.KindParked {
		stream = schemas.StreamParked
	}
	waiting, err := s.bus.Subjects(ctx, stream, schemas.Address{Kind: kind, Run: run}.Filter())
	if err != nil || len(waiting) == 0 {
		return err
	}
	results, err := s.bus.Subjects(ctx, schemas.StreamAdvantages, schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter())
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for subject := range waiting {
		of, _ := schemas.ParseSubject(subject)
		result := schemas.AdvantageSubject(of.Run, of.UID)
		if results[result] == 0 || seen[result] {
			continue
		}
		seen[result] = true
		if err := s.dropOf(ctx, of.Run, of.UID); err != nil {
			return err
		}
	}
	return nil
}

// dropOf removes what a group asks for, if it has its result, and says why.
func (s *service) dropOf(ctx context.Context, run schemas.Run, uid schemas.UID) error {
	record, err := s.bus.Group(ctx, run, uid)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	a, err := s.bus.Result(ctx, run, uid, record.GroupSize, record.Group.Batch)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	n, err := s.sweep(ctx, run, uid)
	if n > 0 {
		s.metrics.dropped.Add(float64(n))
		zerolog.Ctx(ctx).Info().Str("run", string(run)).Str("uid", string(uid)).Int64("requests", n).Msg("requests removed: " + closedAs(a))
	}
	return err
}

// closedAs says that a group has its result.
func closedAs(a *schemas.Advantage) string {
	return fmt.Sprintf("group %s has its result, %s", a.UID, a.Status)
}
