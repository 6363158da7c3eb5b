package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// ErrUnseen says why a state has no prediction now.
var ErrUnseen = errors.New("no prediction")

// Seen returns what the network takes a stored state of a sample for, as a PNG that a sampler of the lane makes: the
// sample that it would end with. The error is ErrUnseen where no sampler can say it.
func (c *Client) Seen(ctx context.Context, t *schemas.Trajectory, index int64) ([]byte, error) {
	question, err := json.Marshal(schemas.Seen{Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, Step: index})
	if err != nil {
		return nil, err
	}
	m, err := c.ask(ctx, schemas.SeenSubject(t.Lane), question)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return nil, fmt.Errorf("%w: no sampler serves the lane %s now", ErrUnseen, t.Lane)
	case err != nil && ctx.Err() == nil:
		return nil, fmt.Errorf("%w: the sampler of the lane %s: %w", ErrUnseen, t.Lane, err)
	case err != nil:
		return nil, err
	}
	if why := m.Header.Get(schemas.HeaderSeenError); why != "" {
		return nil, fmt.Errorf("%w: %s", ErrUnseen, why)
	}
	return m.Data, nil
}
