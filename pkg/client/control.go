package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Control asks that a run, or one group of it, is cancelled, paused or resumed, and waits until
// ctx ends for intake's answer. From an accepted answer on it holds, whatever is restarted; when
// the samplers have come to the step boundary where they stop is for Obeyed. A refusal is a
// *RefusedError: of what is not there nothing is asked. Silence is ErrNoAnswer, and the control is stored all the same.
func (c *Client) Control(ctx context.Context, ask *schemas.Control) (*schemas.ControlReceipt, error) {
	control := *ask
	if control.At == 0 {
		control.At = time.Now().UnixNano()
	}
	if err := control.Validate(); err != nil {
		return nil, err
	}
	if err := c.bus.Controllable(ctx, &control); errors.Is(err, ErrNotFound) {
		return nil, &RefusedError{Code: schemas.CodeInvalid, Reason: err.Error(), What: "control"}
	} // whatever else keeps this program from looking, intake may say
	answers, err := c.answers()
	if err != nil {
		return nil, err
	}
	defer func() { _ = answers.Unsubscribe() }()
	if _, err := c.bus.Publish(ctx, &control, bus.ReplyTo(answers.Subject)); err != nil {
		return nil, fmt.Errorf("publish control: %w", err)
	}
	m, err := answers.NextMsgWithContext(ctx)
	if err != nil {
		return nil, errors.Join(ErrNoAnswer, err)
	}
	r := &schemas.ControlReceipt{}
	if err := schemas.Decode(m.Data, r); err != nil {
		return nil, fmt.Errorf("read receipt: %w", err)
	}
	if !r.Accepted {
		return r, &RefusedError{Code: r.Code, Reason: r.Error, What: "control"}
	}
	return r, nil
}

// obeyedEvery is how often Obeyed looks.
const obeyedEvery = 50 * time.Millisecond

// Obeyed waits until no sampler that runs works any more on what a control, by the sequence in
// its receipt, has stopped: the steps stored by then are the last. It returns how many samplers
// there are, and an error when ctx ends before.
func (c *Client) Obeyed(ctx context.Context, seq uint64) (samplers int, err error) {
	for {
		present, err := c.bus.Present(ctx)
		if err != nil {
			return 0, err
		}
		var late []string
		samplers = 0
		for _, p := range present {
			if p.Service != schemas.ServiceSampler {
				continue
			}
			samplers++
			if p.Controls < seq {
				late = append(late, fmt.Sprintf("%s (last heard of %v ago)", p.Instance, time.Since(time.Unix(0, p.At)).Round(time.Second)))
			}
		}
		if len(late) == 0 {
			return samplers, nil
		}
		t := time.NewTimer(obeyedEvery)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return samplers, fmt.Errorf("%d of %d samplers have not come to a step boundary: %s; one that was killed counts until %v after its last word: %w",
				len(late), samplers, strings.Join(late, ", "), schemas.PresenceTTL, ctx.Err())
		}
	}
}

// Status says how a run is doing, from what is stored; ErrNotFound when there is no such run.
func (c *Client) Status(ctx context.Context, run schemas.Run) (*schemas.RunStatus, error) {
	return c.bus.RunStatus(ctx, run)
}
