package advantage

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// planRefill sets a.RefilledBy, the uid of a new group that replaces g, if g's rules ask for that; a is the result of
// g, which does not count. It gives up if no rounds are left, if the prompt is no longer stored, or if tooLate: a new
// group would miss the deadline. requestRefill asks for the new group after a is stored.
func (w *worker) planRefill(ctx context.Context, g *group, a *schemas.Advantage, tooLate bool) error {
	policy := policyOf(g.spec)
	wanted := a.Status == schemas.StatusFiltered && policy.ZeroStd == schemas.GroupRefill ||
		slices.Contains([]string{schemas.StatusFailed, schemas.StatusMixed, schemas.StatusStale}, a.Status) &&
			policy.Failed == schemas.GroupRefill
	if !wanted || g.spec.SourceRun != "" {
		return nil
	}
	round := int64(0)
	if g.spec.Refill != nil {
		round = g.spec.Refill.Round
	}
	giveUp := func(reason, why string) error {
		w.metrics.gaveUp(reason)
		w.log.Warn().Str("run", string(g.run)).Str("uid", string(g.uid)).Int64("rounds", round).
			Str("status", a.Status).Msg(why)
		return nil
	}
	if tooLate {
		return giveUp("deadline", "there is no time left to refill the group")
	}
	if round >= *policy.RefillRounds {
		return giveUp("rounds", "no rounds are left to refill the group")
	}
	switch _, err := w.bus.Get(ctx, schemas.StreamPrompts, g.spec.PromptSeq); {
	case errors.Is(err, bus.ErrNotFound):
		return giveUp("prompt", "the prompt is no longer stored, the group cannot be refilled")
	case err != nil:
		return fmt.Errorf("look up the prompt of %s: %w", g.uid, err)
	}
	a.RefilledBy = refillUID(g.root(), round+1)
	return nil
}

// refillUID returns the uid of the group of a round: root, the uid of the first one (round 0), and the round. A long
// root is cut, and gets a part of its hash.
func refillUID(root schemas.UID, round int64) schemas.UID {
	if round == 0 {
		return root
	}
	suffix := "-r" + strconv.FormatInt(round, 10)
	if len(root)+len(suffix) <= schemas.MaxToken {
		return root + schemas.UID(suffix)
	}
	sum := sha256.Sum256([]byte(root))
	suffix = "-" + hex.EncodeToString(sum[:4]) + suffix
	return root[:schemas.MaxToken-len(suffix)] + schemas.UID(suffix)
}

// requestRefill publishes the prompt of the group that replaces the one of result a, with the uid a.RefilledBy. To do
// so twice is harmless: the message id is the same, and intake recognises the uid. A prompt that is no longer stored,
// or cannot be stored again, is no error: its place in the batch stays empty.
func (w *worker) requestRefill(ctx context.Context, run schemas.Run, promptSeq uint64, a *schemas.Advantage) error {
	m, err := w.bus.Get(ctx, schemas.StreamPrompts, promptSeq)
	if errors.Is(err, bus.ErrNotFound) {
		return nil // it was deleted just now; its place in the batch stays empty until the deadline
	}
	if err != nil {
		return fmt.Errorf("read the prompt of %s: %w", a.UID, err)
	}
	var p schemas.Prompt
	if err := schemas.Decode(m.Data, &p); err != nil {
		return fmt.Errorf("stored prompt %d: %w", promptSeq, err)
	}
	root, round := a.UID, int64(1)
	if a.Refill != nil {
		root, round = a.Refill.Root, a.Refill.Round+1
	}
	p.Substitute(round)
	p.UID, p.Refill = a.RefilledBy, &schemas.Refill{Root: root, Round: round}
	data, err := schemas.Encode(&p)
	if err != nil {
		return fmt.Errorf("encode the prompt of %s: %w", p.UID, err)
	}
	header := nats.Header{jetstream.MsgIDHeader: {"prompt." + string(run) + "." + string(p.UID)}}
	_, err = w.bus.PublishPrompt(ctx, run, data, header, bus.WaitForSpace())
	if permanent(err) { // its place in the batch stays empty until the deadline
		w.metrics.gaveUp("prompt")
		w.log.Error().Err(err).Str("run", string(run)).Str("uid", string(p.UID)).
			Msg("the fresh group cannot be asked for")
		return w.bus.Dead(ctx, "advantage", bus.Code(err),
			fmt.Sprintf("cannot be asked for again as %s: %v", p.UID, err), m)
	}
	if err != nil {
		return fmt.Errorf("ask for group %s: %w", p.UID, err)
	}
	w.metrics.Refilled.Inc()
	w.log.Info().Str("run", string(run)).Str("uid", string(a.UID)).Str("status", a.Status).
		Str("refilled_by", string(p.UID)).Int64("round", round).Msg("asked for a fresh group")
	return nil
}
