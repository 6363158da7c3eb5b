// Package client publishes prompts and reads what the pipeline makes of them. With
// package schemas it is all that a Go program needs; any other language needs a
// NATS client and a msgpack decoder.
package client

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// ErrNoAnswer means that no intake answered in time. The prompt is stored and will
// be taken up when one runs.
var ErrNoAnswer = errors.New("no intake answered in time; the prompt is stored")

// RefusedError is intake's refusal of a prompt. The prompt is in the dead letters.
type RefusedError struct {
	// Code is the class of the reason, one of the schemas.Code constants.
	Code   string
	Reason string
}

func (e *RefusedError) Error() string { return "prompt refused (" + e.Code + "): " + e.Reason }

// HeldError says that a prompt is neither accepted nor refused yet: it is stored, and goes
// on once there is what it waits for.
type HeldError struct{ Reason string }

func (e *HeldError) Error() string { return "prompt held: " + e.Reason }

// Client is a connection to a pipeline. Its methods may be called concurrently.
type Client struct {
	bus *bus.Bus
	// own says that Close closes the bus.
	own bool
}

// Connect dials the NATS server at url. It fails when no pipeline was ever set up
// there.
func Connect(ctx context.Context, url string) (*Client, error) {
	b, err := bus.Connect(ctx, bus.Config{URL: url, Name: "meander-client"}, zerolog.Nop())
	if err != nil {
		return nil, err
	}
	if err := b.Ready(ctx); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return &Client{bus: b, own: true}, nil
}

// New uses a bus that is connected already, and leaves it open.
func New(b *bus.Bus) *Client { return &Client{bus: b} }

// Close ends the connection that Connect made.
func (c *Client) Close() error {
	if !c.own {
		return nil
	}
	return c.bus.Close()
}

// Publish stores a prompt and waits until ctx ends for intake's answer. A refusal is
// a *RefusedError; silence is ErrNoAnswer, and the prompt is stored all the same, as it is
// with a *HeldError: intake waits for somebody to serve it.
func (c *Client) Publish(ctx context.Context, run string, p *schemas.Prompt) (*schemas.Receipt, error) {
	data, err := schemas.Encode(p)
	if err != nil {
		return nil, fmt.Errorf("encode prompt: %w", err)
	}
	return c.PublishEncoded(ctx, run, data)
}

// PublishEncoded is Publish for a prompt that is msgpack already.
func (c *Client) PublishEncoded(ctx context.Context, run string, prompt []byte) (*schemas.Receipt, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	inbox := c.bus.Conn().NewInbox()
	answers, err := c.bus.Conn().SubscribeSync(inbox)
	if err != nil {
		return nil, fmt.Errorf("subscribe to the answer: %w", err)
	}
	defer func() { _ = answers.Unsubscribe() }()
	if _, err := c.bus.PublishPrompt(ctx, run, prompt, nats.Header{schemas.HeaderReply: {inbox}}); err != nil {
		return nil, fmt.Errorf("publish prompt: %w", err)
	}
	var held *schemas.Receipt
	for {
		m, err := answers.NextMsgWithContext(ctx)
		if err != nil && held != nil {
			return held, &HeldError{Reason: held.Waiting}
		}
		if err != nil {
			return nil, errors.Join(ErrNoAnswer, err)
		}
		r := &schemas.Receipt{}
		if err := schemas.Decode(m.Data, r); err != nil {
			return nil, fmt.Errorf("read receipt: %w", err)
		}
		switch {
		case r.Waiting != "":
			held = r // another receipt says what became of it
		case !r.Accepted:
			return r, &RefusedError{Code: r.Code, Reason: r.Error}
		default:
			return r, nil
		}
	}
}

// Advantages yields the results of a run's groups as they close, those stored
// before the call first, until ctx ends.
func (c *Client) Advantages(ctx context.Context, run string) iter.Seq2[*schemas.Advantage, error] {
	return read[schemas.Advantage](ctx, c.bus, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"))
}

// Trajectories yields the trajectories of a run as they are stored, those stored
// before the call first, until ctx ends.
func (c *Client) Trajectories(ctx context.Context, run string) iter.Seq2[*schemas.Trajectory, error] {
	return read[schemas.Trajectory](ctx, c.bus, schemas.StreamTrajectories, schemas.Prefix+"trajectory."+run+".*.*")
}

// read decodes a live stream. What is not the event that its subject is for is left out:
// the services take it off the stream, and its true event comes.
func read[T any, E interface {
	*T
	schemas.Keyed
}](ctx context.Context, b *bus.Bus, stream, filter string) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		for m, err := range b.Read(ctx, stream, []string{filter}, bus.ReadOptions{Live: true}) {
			var e T
			if err == nil && bus.Fits(m, E(&e)) != nil {
				continue
			}
			if ctx.Err() != nil || !yield(&e, err) || err != nil {
				return
			}
		}
	}
}

// ErrJudged means that the sample has a verdict of that name, another one: the first counts.
var ErrJudged = errors.New("the sample has a verdict already")

// Verdict stores the reward that a person or a batch job gives a sample which waits for
// external, or external:NAME. Storing the same value twice is no error. A malformed
// verdict is refused, and one that is there already does not count.
func (c *Client) Verdict(ctx context.Context, v *schemas.Verdict) error {
	ack, err := c.bus.Publish(ctx, v)
	if err != nil || !ack.Duplicate {
		return err
	}
	var first schemas.Verdict
	if err := schemas.Decode(ack.First.Data, &first); err != nil {
		return fmt.Errorf("verdict that was there before: %w", err)
	}
	switch {
	case first.Value == nil && v.Value == nil, first.Value != nil && v.Value != nil && *first.Value == *v.Value:
		return nil
	case first.Value == nil:
		return fmt.Errorf("%w: none will come, %s", ErrJudged, first.Error)
	}
	return fmt.Errorf("%w: %v", ErrJudged, *first.Value)
}

// Trajectory returns one stored trajectory, or bus.ErrNotFound.
func (c *Client) Trajectory(ctx context.Context, run, uid string, sample int64) (*schemas.Trajectory, error) {
	m, err := c.bus.Last(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(run, uid, sample))
	if err != nil {
		return nil, fmt.Errorf("trajectory %s %d of run %s: %w", uid, sample, run, err)
	}
	var t schemas.Trajectory
	return &t, bus.Fits(m, &t)
}

// Steps returns the step events of a trajectory in order, with their latents, checked
// against the digests that it names.
func (c *Client) Steps(ctx context.Context, t *schemas.Trajectory) ([]*schemas.Step, error) {
	steps := make([]*schemas.Step, len(t.Steps))
	for i, ref := range t.Steps {
		var err error
		if steps[i], err = c.bus.LoadStepRef(ctx, ref); err != nil {
			return nil, fmt.Errorf("step %d: %w", i, err)
		}
	}
	return steps, nil
}

// Image returns the bytes of a trajectory's picture (PNG).
func (c *Client) Image(ctx context.Context, t *schemas.Trajectory) ([]byte, error) {
	switch {
	case t.Image == nil:
		return nil, fmt.Errorf("trajectory %s %d has no picture: it %s", t.UID, t.SampleIndex, t.StopReason)
	case t.Image.Ref == nil:
		return t.Image.Data, nil
	}
	return c.bus.GetBlob(ctx, *t.Image.Ref)
}
