package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// Control asks intake to cancel, pause, resume or prune a run, a group or a sample, and waits until ctx ends for the
// answer. An accepted control holds from then on, across restarts; samplers stop at their next step boundary (see
// AwaitControl). A refusal is a *RefusedError; a control of something that does not exist is refused without being
// stored. Without an answer in time the error is ErrNoAnswer: the control is stored and will still be answered.
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
	} // on other errors intake decides
	answers, err := c.subscribeInbox()
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

// AwaitControl waits, after a cancel or a pause was accepted, until no running sampler works on what the control
// stopped; no steps are stored after that. seq is from the control's receipt. It returns the number of samplers. If
// ctx ends before, the error names the samplers that have not stopped.
func (c *Client) AwaitControl(ctx context.Context, seq uint64) (samplers int, err error) {
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
				late = append(late, fmt.Sprintf("%s (last heard of %v ago)", p.Instance,
					time.Since(time.Unix(0, p.At)).Round(time.Second)))
			}
		}
		if len(late) == 0 {
			return samplers, nil
		}
		t := time.NewTimer(pollEvery)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return samplers,
				fmt.Errorf("%d of %d samplers have not come to a step boundary: %s; one that was killed counts until "+
					"%v after its last word: %w", len(late), samplers, strings.Join(late, ", "), schemas.PresenceTTL,
					ctx.Err())
		}
	}
}

// Status returns the state of a run, from what is stored; ErrNotFound if there is no such run.
func (c *Client) Status(ctx context.Context, run schemas.Run) (*schemas.RunStatus, error) {
	return counters.Status(ctx, c.bus, run)
}
