package intake

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

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
