package intake

import (
	"context"
	"errors"
	"fmt"
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
	// Whatever else opens the group is not its record.
	its := bus.Against(func(*schemas.Opening) (fault, err error) {
		return errors.New("group: not that of the group's record"), nil
	})
	if _, err := s.bus.Publish(ctx, (*schemas.Opening)(first), its, bus.WaitForSpace()); err != nil {
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
	first, err := s.bus.Group(ctx, record.Run, record.UID)
	switch {
	case tooLate && errors.Is(err, bus.ErrNotFound):
		return nil, late(record.Group.Deadline, "the prompt was taken up later")
	case err != nil:
		return nil, err
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

// missing are the requests of a group known before that have no result yet. What is
// stored and does not answer a request is none: the sampler takes its place.
func (s *service) missing(ctx context.Context, requests []*schemas.Request) ([]*schemas.Request, error) {
	first := requests[0]
	switch _, err := s.bus.Result(ctx, first.Run, first.UID, first.GroupSize, first.Group.Batch); {
	case err == nil:
		return nil, nil
	case !errors.Is(err, bus.ErrNotFound):
		return nil, err
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamTrajectories, []string{schemas.TrajectoryFilter(first.Run, first.UID)})
	if err != nil {
		return nil, fmt.Errorf("look up stored trajectories of %s: %w", first.UID, err)
	}
	made := make(map[int64]*schemas.Trajectory, len(stored))
	for _, m := range stored {
		if t := (&schemas.Trajectory{}); bus.Fits(m, t) == nil {
			made[t.SampleIndex] = t
		}
	}
	var missing []*schemas.Request
	for _, r := range requests {
		if t := made[r.SampleIndex]; t != nil {
			fault, err := s.bus.Answers(ctx, t, r)
			if err != nil {
				return nil, err
			}
			if fault == nil {
				continue
			}
		}
		missing = append(missing, r)
	}
	return missing, nil
}
