package intake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A group may get its result while requests of it wait: it closed at its deadline while its run was paused, or
// before a sampler started. Its samples are of no use any more, so intake removes the requests as soon as the result
// is stored. A sampler skips those that it received before.

// followAgain is the pause before intake follows results once more after an error.
const followAgain = time.Second

// removeClosedRequests removes, until ctx ends, the requests of groups that have their result, so that no sampler
// makes samples that do not count. A read that fails begins again.
func (s *service) removeClosedRequests(ctx context.Context) error {
	return regularly(ctx, followAgain, zerolog.DebugLevel, "results not followed, trying again", s.followResults)
}

// followResults removes the requests of groups that have their result already, then follows new results until ctx
// ends or a read fails; removeClosedRequests then begins again.
func (s *service) followResults(ctx context.Context) error {
	info, err := s.bus.StreamInfo(ctx, schemas.StreamAdvantages)
	if err != nil {
		return err
	}
	// First the results that were stored before, then those that come.
	for _, kind := range []string{schemas.KindRequest, schemas.KindParked} {
		if err := s.dropClosedRequests(ctx, kind, "*"); err != nil {
			return err
		}
	}
	results := []string{schemas.Address{Kind: schemas.KindAdvantage}.Filter()}
	for m, err := range s.bus.Read(ctx, schemas.StreamAdvantages, results,
		bus.ReadOptions{FromSeq: info.State.LastSeq + 1, Live: true}) {
		if err != nil {
			return err
		}
		a := &schemas.Advantage{}
		if bus.Fits(m, a) != nil || !lacksSample(a) {
			continue
		}
		if err := s.dropGroupRequests(ctx, a.Run, a.UID); err != nil {
			return err
		}
	}
	return nil
}

// lacksSample reports whether a group closed without the trajectory of some sample, so that requests may be left.
func lacksSample(a *schemas.Advantage) bool {
	for i := range a.Members {
		if a.Members[i].TrajectorySeq == 0 {
			return true
		}
	}
	return int64(len(a.Members)) < a.GroupSize
}

// requestStream returns the stream of requests of a kind: waiting or parked.
func requestStream(kind string) string {
	if kind == schemas.KindParked {
		return schemas.StreamParked
	}
	return schemas.StreamRequests
}

// dropClosedRequests removes the requests of one kind (KindRequest or KindParked) whose groups have their result. It
// does so for one run, or for all runs with "*". An error is of the server.
func (s *service) dropClosedRequests(ctx context.Context, kind string, run schemas.Run) error {
	waiting, err := s.bus.Subjects(ctx, requestStream(kind), schemas.Address{Kind: kind, Run: run}.Filter())
	if err != nil || len(waiting) == 0 {
		return err
	}
	results, err := s.bus.Subjects(ctx, schemas.StreamAdvantages,
		schemas.Address{Kind: schemas.KindAdvantage, Run: run}.Filter())
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, subject := range slices.Sorted(maps.Keys(waiting)) {
		of, _ := schemas.ParseSubject(subject)
		result := schemas.AdvantageSubject(of.Run, of.UID)
		if results[result] == 0 || seen[result] {
			continue
		}
		seen[result] = true
		if err := s.dropGroupRequests(ctx, of.Run, of.UID); err != nil {
			return err
		}
	}
	return nil
}

// dropGroupRequests removes the requests of a group if the group has its result; otherwise it does nothing. An error
// is of the server.
func (s *service) dropGroupRequests(ctx context.Context, run schemas.Run, uid schemas.UID) error {
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
	n, err := s.removeRequests(ctx, run, uid)
	if n > 0 {
		s.metrics.Dropped.Add(float64(n))
		zerolog.Ctx(ctx).Info().Str("run", string(run)).Str("uid", string(uid)).Int64("requests", n).
			Msg("requests removed: " + describeResult(a))
	}
	return err
}

// describeResult returns a sentence for logs and receipts: the group has its result, and which.
func describeResult(a *schemas.Advantage) string {
	return fmt.Sprintf("group %s has its result, %s", a.UID, a.Status)
}
