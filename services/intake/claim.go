package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// claim makes the uid that of this prompt, before anything is asked for, and returns the
// requests that have no result yet. The guard of the group's subject decides between
// prompts of one uid, however many intakes there are: whoever comes later is told whose
// it is, or, being the same prompt once more, goes on where the first one stopped. The
// facts of the group are those of the first.
func (s *service) claim(ctx context.Context, requests []*schemas.Request) ([]*schemas.Request, error) {
	record, err := requests[0].Record()
	if err != nil {
		return nil, bus.Terminal(schemas.CodeTooLarge, err)
	}
	ack, err := s.bus.Publish(ctx, record, bus.WaitForSpace())
	if err != nil {
		return nil, fmt.Errorf("claim uid %s: %w", record.UID, err)
	}
	if !ack.Duplicate {
		return requests, nil
	}
	first := &schemas.GroupRecord{}
	if _, err := s.bus.Claimed(ctx, schemas.StreamGroups, record.Subject(), first, nil); err != nil {
		return nil, fmt.Errorf("look up who has uid %s: %w", record.UID, err)
	}
	if err := sameGroup(first, record); err != nil {
		return nil, err
	}
	for _, r := range requests {
		r.Group = first.Group
	}
	return s.missing(ctx, requests)
}

// sameGroup says in what a prompt differs from the one that has the uid.
func sameGroup(first, mine *schemas.GroupRecord) error {
	if first.Error != "" {
		if first.Group.PromptSeq == mine.Group.PromptSeq {
			return bus.Terminal(schemas.CodeInvalid, errors.New(first.Error))
		}
		return bus.Terminal(schemas.CodeUIDConflict, fmt.Errorf(
			"uid: %q of run %q has its result, a refusal (%s); choose another uid or another run", mine.UID, mine.Run, first.Error))
	}
	if names := first.Differences(mine); names != nil {
		return bus.Terminal(schemas.CodeUIDConflict, fmt.Errorf(
			"uid: %q is already used in run %q by another prompt (number %d, %q), which differs in %s; choose another uid or another run",
			mine.UID, mine.Run, first.Group.PromptSeq, first.Prompt, strings.Join(names, ", ")))
	}
	return nil
}

// missing are the requests of a group known before that have no result yet.
func (s *service) missing(ctx context.Context, requests []*schemas.Request) ([]*schemas.Request, error) {
	run, uid := requests[0].Run, requests[0].UID
	_, err := s.bus.Last(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid))
	switch {
	case err == nil:
		return nil, nil
	case !errors.Is(err, bus.ErrNotFound):
		return nil, fmt.Errorf("look up advantage of %s: %w", uid, err)
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamTrajectories, []string{schemas.Prefix + "trajectory." + run + "." + uid + ".*"})
	if err != nil {
		return nil, fmt.Errorf("look up stored trajectories of %s: %w", uid, err)
	}
	done := make(map[string]bool, len(stored))
	for _, m := range stored {
		done[m.Subject] = true
	}
	return slices.DeleteFunc(slices.Clone(requests), func(r *schemas.Request) bool {
		return done[schemas.TrajectorySubject(run, uid, r.SampleIndex)]
	}), nil
}
