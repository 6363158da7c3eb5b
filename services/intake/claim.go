package intake

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
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
			asked := *r
			_, err := s.bus.BranchOff(ctx, &asked)
			if err != nil {
				return nil, err
			}
			fault, err := s.bus.Answers(ctx, t.Trajectory, &asked)
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

// refuse stores the result of a refused prompt's group and replies to its client. The bus calls it before the prompt
// becomes a dead letter, so that no client waits for ever for the uid or the batch. cause is the reason.
func (s *service) refuse(ctx context.Context, m *bus.Message, cause error) error {
	r := &schemas.Receipt{Run: runOf(m.Subject), Code: bus.Code(cause), Error: cause.Error()}
	var p schemas.Prompt
	if schemas.Decode(m.Data, &p) == nil {
		r.UID = p.GroupUID(m.Seq)
		if err := s.storeRefusal(ctx, refusalRecord(&p, m, cause)); err != nil {
			return err
		}
	}
	return s.sendReceipt(m, r)
}

// refusalRecord returns the record for the group of a refused prompt, with the parts of the prompt that are valid. It
// is not valid if run or uid is no token.
func refusalRecord(p *schemas.Prompt, m *bus.Message, cause error) *schemas.GroupRecord {
	def, uid := estimator.DefaultConfig(), p.GroupUID(m.Seq)
	given := *p
	schemas.SetDefaults(&given)
	r := &schemas.GroupRecord{
		Run: runOf(m.Subject), UID: uid, GroupSize: *given.GroupSize, Error: cause.Error(),
		Group: schemas.Group{
			Batch: string(uid), PromptSeq: m.Seq, Created: m.Time.UnixNano(), Deadline: max(0, valueOr(p.Deadline, 0)),
			Advantage: schemas.AdvantageSpec{
				Estimator: def.Name, Std: def.Std, StdBasis: def.StdBasis, Epsilon: &def.Epsilon,
			},
			Metadata: p.Metadata, Validation: p.Validation,
		},
	}
	if r.GroupSize < 1 || r.GroupSize > schemas.MaxGroupSize {
		r.GroupSize = 1
	}
	if b := p.Batch; b != nil {
		alone := r.Group
		r.Group.Batch, r.Group.BatchGroups, r.Group.Refill = b.ID, b.Groups, p.Refill
		r.Group.BatchStep, r.Group.BatchEpoch = b.Step, b.Epoch
		if r.Validate() != nil {
			r.Group = alone // its batch is not valid, so no client waits for that
		}
	}
	return r
}

// storeRefusal stores the record of a refused prompt and opens its group, which then closes at once with the reason.
// If another prompt has the uid, it does nothing. If this prompt was accepted before and cannot go on, it publishes a
// failed reward for each sample without one, so that the group closes too. An error is of the server.
func (s *service) storeRefusal(ctx context.Context, r *schemas.GroupRecord) error {
	if r.Validate() != nil {
		return nil // the prompt names no uid that a client could wait for
	}
	ack, err := s.bus.Publish(ctx, r, bus.WaitForSpace())
	if err != nil {
		return fmt.Errorf("store the refusal of %s: %w", r.UID, err)
	}
	if ack.Duplicate {
		first := &schemas.GroupRecord{}
		if _, err := s.bus.StoredEvent(ctx, schemas.StreamGroups, r.Subject(), first, nil); err != nil {
			return fmt.Errorf("look up the prompt that has uid %s: %w", r.UID, err)
		}
		if first.Group.PromptSeq != r.Group.PromptSeq {
			return nil
		}
		if first.Error == "" {
			return s.failMissingSamples(ctx, first, r.Error)
		}
		r = first
	}
	if _, err := s.bus.Publish(ctx, opening(r), bus.WaitForSpace()); err != nil {
		return fmt.Errorf("store the refusal of %s: %w", r.UID, err)
	}
	return nil
}

// failMissingSamples publishes a failed reward for each sample of a group that cannot go on, and removes its
// requests: some may never have been published. Rewards that are stored already stay.
func (s *service) failMissingSamples(ctx context.Context, g *schemas.GroupRecord, reason string) error {
	if _, err := s.bus.Publish(ctx, opening(g), bus.WaitForSpace()); err != nil {
		return fmt.Errorf("open group %s: %w", g.UID, err)
	}
	if _, err := s.removeRequests(ctx, g.Run, g.UID); err != nil { // those that were published
		return err
	}
	if deadlinePassed(g) {
		return nil // it closes with what there is
	}
	for i := range g.GroupSize {
		_, err := s.bus.Publish(ctx, &schemas.Reward{
			Run: g.Run, UID: g.UID, SampleIndex: i, GroupSize: g.GroupSize, Status: schemas.StatusFailed,
			Error: "prompt given up: " + reason, Scores: []schemas.Score{}, Group: g.Group, Scored: g.Group.Created,
		}, bus.WaitForSpace())
		if err != nil {
			return fmt.Errorf("give up sample %d of %s: %w", i, g.UID, err)
		}
	}
	return nil
}
