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

// claim reserves the uid for this prompt before any sample is requested, and returns the requests that have no result
// yet. It stores the group's record on a subject that keeps one message only, so the first prompt of a uid wins,
// however many intakes run. Another prompt with the same uid is refused with the differences (a terminal error). The
// same prompt, delivered again, goes on where the first delivery stopped, with the group as it was recorded.
func (s *service) claim(ctx context.Context, a *asked) ([]*schemas.Request, error) {
	requests := a.requests
	record, err := a.claims()
	if err != nil {
		return nil, err
	}
	first, err := s.storeRecord(ctx, record)
	if err != nil {
		return nil, err
	}
	if first != record {
		if err := checkSameGroup(first, record); err != nil {
			return nil, err
		}
	}
	// The opening is the copy of the record in the stream of rewards. Any other there is displaced.
	its := bus.Against(func(*schemas.Opening) (fault, err error) {
		return errors.New("group: not that of the group's record"), nil
	})
	if _, err := s.bus.Publish(ctx, opening(first), its, bus.WaitForSpace()); err != nil {
		return nil, fmt.Errorf("open group %s: %w", first.UID, err)
	}
	switch {
	case first == record:
		return requests, nil
	case deadlinePassed(first):
		return nil, nil // it closes with what there is
	}
	for _, r := range requests {
		r.Group = first.Group
	}
	return s.requestsWithoutResult(ctx, requests)
}

// storeRecord stores the record of a group and returns it, or the record that the uid has already. A prompt that comes
// after its deadline gets no group: that is a terminal error.
func (s *service) storeRecord(ctx context.Context, record *schemas.GroupRecord) (*schemas.GroupRecord, error) {
	expired := deadlinePassed(record)
	if !expired {
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
	case expired && errors.Is(err, bus.ErrNotFound):
		return nil, tooLate(record.Group.Deadline, "the prompt was taken up later")
	case err != nil:
		return nil, err
	}
	return first, nil
}

// tooLate returns the terminal error of a prompt whose deadline has passed.
func tooLate(deadline int64, why string) error {
	return bus.Terminal(schemas.CodeLate,
		fmt.Errorf("deadline: %s; is over: %s", time.Unix(0, deadline).UTC().Format(time.RFC3339Nano), why))
}

// deadlinePassed reports whether the deadline of a group has passed; false for a refused prompt.
func deadlinePassed(r *schemas.GroupRecord) bool {
	return r.Error == "" && r.Group.Deadline > 0 && time.Now().UnixNano() > r.Group.Deadline
}

// checkSameGroup returns nil if both records are of the same prompt with the same settings. Otherwise it returns a
// terminal error that names the differences. first is stored, mine is this prompt's.
func checkSameGroup(first, mine *schemas.GroupRecord) error {
	if first.Error != "" {
		if first.Group.PromptSeq == mine.Group.PromptSeq {
			return bus.Terminal(schemas.CodeInvalid, errors.New(first.Error))
		}
		return bus.Terminal(schemas.CodeUIDConflict, fmt.Errorf(
			"uid: %q of run %q has its result, a refusal (%s); choose another uid or another run",
			mine.UID, mine.Run, first.Error))
	}
	names := first.Differences(mine)
	switch {
	case names == nil:
	case first.Group.PromptSeq == mine.Group.PromptSeq:
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf(
			"%s: changed since the uid was claimed; the defaults of the model or of intake are others now: publish "+
				"it under another uid", strings.Join(names, ", ")))
	default:
		return bus.Terminal(schemas.CodeUIDConflict, fmt.Errorf(
			"uid: %q is already used in run %q by another prompt (number %d, %q), which differs in %s; choose "+
				"another uid or another run",
			mine.UID, mine.Run, first.Group.PromptSeq, first.Prompt, strings.Join(names, ", ")))
	}
	return nil
}

// requestsWithoutResult returns the requests of a claimed group whose samples are not made yet; none if the group has
// its result. claim calls it for a prompt that is delivered again. A stored trajectory that does not match its
// request counts as missing: the sampler will replace it.
func (s *service) requestsWithoutResult(ctx context.Context, requests []*schemas.Request) ([]*schemas.Request, error) {
	first := requests[0]
	switch _, err := s.bus.Result(ctx, first.Run, first.UID, first.GroupSize, first.Group.Batch); {
	case err == nil:
		return nil, nil
	case !errors.Is(err, bus.ErrNotFound):
		return nil, err
	}
	made, err := s.bus.Made(ctx, first.Run, first.UID)
	if err != nil {
		return nil, err
	}
	var missing []*schemas.Request
	for _, r := range requests {
		if t, ok := made[r.Place()]; ok {
			fault, err := s.bus.Answers(ctx, t.Trajectory, r)
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
