package bus

import (
	"context"
	"errors"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Outcome returns the outcome of a trajectory, reward or result of a group, as its event says it, for those who only
// look. A message that was read without its payload is read again where no header says it; its headers then do. "": it
// is no such event.
func (b *Bus) Outcome(ctx context.Context, m *Message) (string, error) {
	a, _ := schemas.ParseSubject(m.Subject)
	_, unsaid := strconv.ParseUint(m.Header.Get(schemas.HeaderSamples), 10, 32)
	if said := m.Header.Get(schemas.HeaderOutcome); outcomes.IsOutcome(said) &&
		(a.Kind != schemas.KindTrajectory || a.Stage == schemas.StageMain || unsaid == nil) {
		return said, nil
	}
	var e schemas.Keyed
	switch a.Kind {
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
		m.Data = whole.Data
	}
	if Fits(m, e) != nil {
		return "", nil // the true one will replace it
	}
	outcomes.Said(e, func(name, value string) {
		if m.Header == nil {
			m.Header = nats.Header{}
		}
		m.Header.Set(name, value)
	})
	return outcomes.Of(e), nil
}

// Ends returns how many samples end with a trajectory whose Outcome is known.
func (m *Message) Ends() int64 {
	if n, err := strconv.ParseUint(m.Header.Get(schemas.HeaderSamples), 10, 32); err == nil {
		return int64(n)
	}
	return 1
}
