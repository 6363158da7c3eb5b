package intake

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// refuse gives the group of a refused prompt its result, and tells the client that asked,
// before the prompt goes to the dead letters: whoever waits for the uid, or for the batch,
// must not wait for ever.
func (s *service) refuse(ctx context.Context, m *bus.Message, cause error) error {
	r := &schemas.Receipt{Run: runOf(m.Subject), Code: bus.Code(cause), Error: cause.Error()}
	var p schemas.Prompt
	if schemas.Decode(m.Data, &p) == nil {
		r.UID = p.GroupUID(m.Seq)
		if err := s.giveUp(ctx, refused(&p, m, cause)); err != nil {
			return err
		}
	}
	return s.reply(m, r)
}

// refused is the record of the group that a refused prompt does not get, with what can be
// used of the prompt.
func refused(p *schemas.Prompt, m *bus.Message, cause error) *schemas.GroupRecord {
	def, uid := estimator.DefaultConfig(), p.GroupUID(m.Seq)
	given := *p
	schemas.SetDefaults(&given)
	r := &schemas.GroupRecord{
		Run: runOf(m.Subject), UID: uid, GroupSize: *given.GroupSize, Error: cause.Error(),
		Group: schemas.Group{
			Batch: string(uid), PromptSeq: m.Seq, Created: m.Time.UnixNano(), Deadline: max(0, value(p.Deadline, 0)),
			Advantage: schemas.AdvantageSpec{Estimator: def.Name, Std: def.Std, StdBasis: def.StdBasis, Epsilon: &def.Epsilon},
			Metadata:  p.Metadata, Validation: p.Validation,
		},
	}
	if r.GroupSize < 1 || r.GroupSize > schemas.MaxGroupSize {
		r.GroupSize = 1
	}
	if b := p.Batch; b != nil {
		alone := r.Group
		r.Group.Batch, r.Group.BatchGroups, r.Group.BatchStep, r.Group.BatchEpoch, r.Group.Refill = b.ID, b.Groups, b.Step, b.Epoch, p.Refill
		if r.Validate() != nil {
			r.Group = alone // it names no batch that could wait
		}
	}
	return r
}

// giveUp stores the record of a refused prompt and opens its group, which closes at once.
// A uid that another prompt has is left alone. A prompt that was accepted and cannot go on
// gives up the samples that have no reward.
func (s *service) giveUp(ctx context.Context, r *schemas.GroupRecord) error {
	if r.Validate() != nil {
		return nil // it names no uid that somebody could wait for
	}
	ack, err := s.bus.Publish(ctx, r, bus.WaitForSpace())
	if err != nil {
		return fmt.Errorf("store the refusal of %s: %w", r.UID, err)
	}
	if ack.Duplicate {
		first := &schemas.GroupRecord{}
		if _, err := s.bus.Claimed(ctx, schemas.StreamGroups, r.Subject(), first, nil); err != nil {
			return fmt.Errorf("look up who has uid %s: %w", r.UID, err)
		}
		if first.Group.PromptSeq != r.Group.PromptSeq {
			return nil
		}
		if first.Error == "" {
			return s.abandon(ctx, first, r.Error)
		}
		r = first
	}
	if _, err := s.bus.Publish(ctx, (*schemas.Opening)(r), bus.WaitForSpace()); err != nil {
		return fmt.Errorf("store the refusal of %s: %w", r.UID, err)
	}
	return nil
}

// abandon fails what a group lacks: no sample of it may have been asked for.
func (s *service) abandon(ctx context.Context, g *schemas.GroupRecord, reason string) error {
	if _, err := s.bus.Publish(ctx, (*schemas.Opening)(g), bus.WaitForSpace()); err != nil {
		return fmt.Errorf("open group %s: %w", g.UID, err)
	}
	if _, err := s.sweep(ctx, g.Run, g.UID); err != nil { // those that were asked for by then
		return err
	}
	if over(g) {
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
