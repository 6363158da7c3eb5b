package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Publish stores a prompt and waits until ctx ends for intake's answer. A refusal is a *RefusedError. Without an
// answer in time the error is ErrNoAnswer; a prompt that waits for a sampler is a *HeldError. In both cases the
// prompt is stored and will be handled. A prompt that could not be stored is ErrFull, ErrTooLarge, ErrPermission or
// ErrClosed.
func (c *Client) Publish(ctx context.Context, run schemas.Run, p *schemas.Prompt) (*schemas.Receipt, error) {
	data, err := schemas.Encode(p)
	if err != nil {
		return nil, fmt.Errorf("encode prompt: %w", err)
	}
	return c.PublishEncoded(ctx, run, data)
}

// PublishEncoded is Publish for a prompt that is msgpack already: it publishes and waits until ctx ends for intake's
// receipt. *RefusedError: intake refused it. *HeldError: it is stored and waits for room. ErrNoAnswer: no receipt
// came in time; the prompt is stored and will still be handled.
func (c *Client) PublishEncoded(ctx context.Context, run schemas.Run, prompt []byte) (*schemas.Receipt, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	if n, most := len(prompt), c.bus.MaxInline(); n > most {
		return nil, fmt.Errorf("publish prompt: %w: %d bytes; must be at most %d: shorten it, or raise the server's "+
			"max_payload", bus.ErrTooLarge, n, most)
	}
	answers, err := c.subscribeInbox()
	if err != nil {
		return nil, err
	}
	defer func() { _ = answers.Unsubscribe() }()
	if _, err := c.bus.PublishPrompt(ctx, run, prompt,
		nats.Header{schemas.HeaderReply: {answers.Subject}}); err != nil {
		return nil, fmt.Errorf("publish prompt: %w", err)
	}
	var held *schemas.Receipt
	for {
		m, err := answers.NextMsgWithContext(ctx)
		if err != nil && held != nil {
			return held, outcome(held)
		}
		if err != nil {
			return nil, errors.Join(ErrNoAnswer, err)
		}
		r := &schemas.Receipt{}
		if err := schemas.Decode(m.Data, r); err != nil {
			return nil, fmt.Errorf("read receipt: %w", err)
		}
		if r.Waiting == "" {
			return r, outcome(r)
		}
		held = r // a later receipt says whether it is accepted
	}
}

// ask makes a request of a service, which nothing stores; it carries the trace context of ctx.
func (c *Client) ask(ctx context.Context, subject string, data []byte) (*nats.Msg, error) {
	m := &nats.Msg{Subject: subject, Header: tracing.Header(ctx), Data: data}
	return c.bus.Conn().RequestMsgWithContext(ctx, m)
}

// Try returns the receipt that intake would give a prompt now, and does nothing else: nothing is stored, no uid is
// taken. A refusal is a *RefusedError; a prompt that would wait is a *HeldError. ErrNoAnswer: no intake runs.
func (c *Client) Try(ctx context.Context, run schemas.Run, p *schemas.Prompt) (*schemas.Receipt, error) {
	data, err := schemas.Encode(p)
	if err != nil {
		return nil, fmt.Errorf("encode prompt: %w", err)
	}
	return c.TryEncoded(ctx, run, data)
}

// TryEncoded is Try for a prompt that is msgpack already.
func (c *Client) TryEncoded(ctx context.Context, run schemas.Run, prompt []byte) (*schemas.Receipt, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	m, err := c.ask(ctx, schemas.DrySubject(run), prompt)
	if err != nil {
		return nil, errors.Join(ErrNoAnswer, err)
	}
	r := &schemas.Receipt{}
	if err := schemas.Decode(m.Data, r); err != nil {
		return nil, fmt.Errorf("read receipt: %w", err)
	}
	return r, outcome(r)
}

// outcome returns the error that a receipt is: *HeldError, *RefusedError, or nil.
func outcome(r *schemas.Receipt) error {
	switch {
	case r.Waiting != "":
		return &HeldError{Reason: r.Waiting}
	case !r.Accepted:
		return &RefusedError{Code: r.Code, Reason: r.Error, What: "prompt"}
	}
	return nil
}

// subscribeInbox subscribes to a new inbox, for the answers to one published message.
func (c *Client) subscribeInbox() (*nats.Subscription, error) {
	s, err := c.bus.Conn().SubscribeSync(c.bus.Conn().NewInbox())
	if err != nil {
		return nil, fmt.Errorf("subscribe to the answer: %w", err)
	}
	return s, nil
}

// Verdict stores a reward that a person or a batch job gives to a sample whose reward functions include external or
// external:NAME. Storing the same value twice is no error; a different value is ErrJudged. A malformed verdict is
// refused; a malformed one in the stream does not count.
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

// Optional is a value of type T where zero says something of its own, as of a seed or a temperature: nil is not given.
// It takes any value, and Event refuses one of another type; an integer is a float64, too.
type Optional[T any] = any

// Ask publishes a prompt and waits until ctx ends for intake's answer: see Publish.
func (c *Client) Ask(ctx context.Context, run schemas.Run, p Prompt) (*schemas.Receipt, error) {
	e, err := p.Event()
	if err != nil {
		return nil, err
	}
	return c.Publish(ctx, run, e)
}

// Event returns the prompt as it is published. A number that is zero is not given, unless its field is Optional.
func (p Prompt) Event() (*schemas.Prompt, error) {
	e := &schemas.Prompt{}
	return e, fill(reflect.ValueOf(e).Elem(), reflect.ValueOf(p), "")
}

// fill gives the struct of an event the values of a literal. path names it in errors.
func fill(to, from reflect.Value, path string) error {
	if to.Type() == from.Type() {
		to.Set(from)
		return nil
	}
	switch from.Kind() {
	case reflect.Struct:
		for _, f := range schemas.Fields(to.Type()) {
			if v := from.FieldByName(f.GoName); v.IsValid() && !v.IsZero() {
				if err := fill(f.In(to), v, path+f.Name+"."); err != nil {
					return err
				}
			}
		}
		return nil
	case reflect.Slice:
		to.Set(reflect.MakeSlice(to.Type(), from.Len(), from.Len()))
		for i := range from.Len() {
			if err := fill(to.Index(i), from.Index(i), fmt.Sprintf("%s[%d].", path[:len(path)-1], i)); err != nil {
				return err
			}
		}
		return nil
	case reflect.Pointer:
		to.Set(reflect.New(to.Type().Elem()))
		return fill(to.Elem(), from.Elem(), path)
	}
	for from.Kind() == reflect.Interface || from.Kind() == reflect.Pointer {
		from = from.Elem() // of an Optional, which may be given as the event has it
	}
	want := to.Type().Elem()
	v := reflect.New(want)
	if !from.IsValid() || !from.CanConvert(want) || want.Kind() == reflect.String && from.Kind() != reflect.String ||
		want.Kind() == reflect.Int64 && !from.CanInt() {
		return fmt.Errorf("%s: %v; must be of type %v", path[:len(path)-1], from, want)
	}
	v.Elem().Set(from.Convert(want))
	to.Set(v)
	return nil
}

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
