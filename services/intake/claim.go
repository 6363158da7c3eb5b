package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

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
	first, err := s.first(ctx, record)
	if err != nil {
		return nil, err
	}
	if first != record {
		if err := sameGroup(first, record); err != nil {
			return nil, err
		}
	}
	if _, err := s.bus.Publish(ctx, (*schemas.Opening)(first), bus.WaitForSpace()); err != nil {
		return nil, fmt.Errorf("open group %s: %w", first.UID, err)
	}
	switch {
	case first == record:
		return requests, nil
	case over(first):
		return nil, nil // it closes with what there is
	}
	for _, r := range requests {
		r.Group = first.Group
	}
	return s.missing(ctx, requests)
}

// first stores a record, unless the uid has one, and returns the one that is stored. A
// prompt that comes after its deadline gets no group.
func (s *service) first(ctx context.Context, record *schemas.GroupRecord) (*schemas.GroupRecord, error) {
	tooLate := over(record)
	if !tooLate {
		ack, err := s.bus.Publish(ctx, record, bus.WaitForSpace())
		switch {
		case err != nil:
			return nil, fmt.Errorf("claim uid %s: %w", record.UID, err)
		case !ack.Duplicate:
			return record, nil
		}
	}
	first := &schemas.GroupRecord{}
	_, err := s.bus.Claimed(ctx, schemas.StreamGroups, record.Subject(), first, nil)
	switch {
	case tooLate && errors.Is(err, bus.ErrNotFound):
		return nil, late(record.Group.Deadline, "the prompt was taken up later")
	case err != nil:
		return nil, fmt.Errorf("look up who has uid %s: %w", record.UID, err)
	}
	return first, nil
}

// late is the refusal of a prompt whose deadline has passed.
func late(deadline int64, why string) error {
	return bus.Terminal(schemas.CodeLate, fmt.Errorf("deadline: %s; is over: %s", time.Unix(0, deadline).UTC().Format(time.RFC3339Nano), why))
}

// over says whether the deadline of a group has passed.
func over(r *schemas.GroupRecord) bool {
	return r.Error == "" && r.Group.Deadline > 0 && time.Now().UnixNano() > r.Group.Deadline
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
	names := first.Differences(mine)
	switch {
	case names == nil:
	case first.Group.PromptSeq == mine.Group.PromptSeq:
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf(
			"%s: changed since the uid was claimed; the defaults of the model or of intake are others now: publish it under another uid", strings.Join(names, ", ")))
	default:
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
