package bus

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Outcome returns the outcome of a trajectory, reward or result of a group, as its event says it, for those who only
// look. A message that was read without its payload is read again where no header says it. "": it is no such event.
func (b *Bus) Outcome(ctx context.Context, m *Message) (string, error) {
	if said := m.Header.Get(schemas.HeaderOutcome); outcomes.IsOutcome(said) {
		return said, nil
	}
	var e schemas.Keyed
	switch a, _ := schemas.ParseSubject(m.Subject); a.Kind {
	case schemas.KindTrajectory:
		e = &schemas.Trajectory{}
	case schemas.KindReward:
		e = &schemas.Reward{}
	case schemas.KindAdvantage:
		e = &schemas.Advantage{}
	default:
		return "", nil
	}
	if len(m.Data) == 0 {
		whole, err := b.Get(ctx, m.Stream, m.Seq)
		if errors.Is(err, ErrNotFound) {
			return "", nil // it was removed meanwhile
		}
		if err != nil {
			return "", err
		}
		m = whole
	}
	if Fits(m, e) != nil {
		return "", nil // the true one will replace it
	}
	return outcomes.Of(e), nil
}

// Outcomes yields what became of the samples and groups of a run, or of all ("*"), that the events of one kind say:
// trajectory, reward or advantage.
func (b *Bus) Outcomes(
	ctx context.Context, kind string, run schemas.Run, each func(a schemas.Address, outcome string),
) error {
	stream := map[string]string{
		schemas.KindTrajectory: schemas.StreamTrajectories, schemas.KindReward: schemas.StreamRewards,
		schemas.KindAdvantage: schemas.StreamAdvantages,
	}[kind]
	filters := []string{schemas.Address{Kind: kind, Run: run}.Filter()}
	for m, err := range b.Read(ctx, stream, filters, ReadOptions{HeadersOnly: true}) {
		var outcome string
		if err == nil {
			outcome, err = b.Outcome(ctx, m)
		}
		if err != nil {
			return fmt.Errorf("outcomes of run %s: %w", run, err)
		}
		a, _ := schemas.ParseSubject(m.Subject)
		each(a, outcome)
	}
	return ctx.Err()
}
