package bus

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Ack says where a published event is.
type Ack struct {
	Stream string
	// Seq is the event's sequence in Stream. For a duplicate it is the one stored
	// first; 0 when that has been removed since.
	Seq uint64
	// Duplicate means that the subject or the message id was stored before, and the earlier message stays. That is
	// success.
	Duplicate bool
	// Digest is the payload digest of a stored step, as trajectories name it
	// (schemas.PayloadDigest). Only PublishStep fills it in, and not when the stored payload
	// is not the one given.
	Digest string
	// First is the message that was stored first, if the publish has read it: always for a guarded stream.
	First *Message
}

// PublishOption changes one Publish.
type PublishOption func(*publishOptions)

type publishOptions struct {
	wait  bool
	inbox string
	// against is the check given with Against. check is the whole check: it returns what is wrong with the message
	// that is already on the subject; nil: no check.
	against func(stored schemas.Keyed) (fault, err error)
	check   func(*Message) (fault, err error)
}

// WaitForSpace makes a publish wait while the stream is full, instead of returning ErrStreamFull, until the context
// ends. In a handler, the wait also ends when its consumer stops.
func WaitForSpace() PublishOption { return func(o *publishOptions) { o.wait = true } }

// ReplyTo names the inbox for the answer, when a service answers the event.
func ReplyTo(inbox string) PublishOption { return func(o *publishOptions) { o.inbox = inbox } }

const (
	// retryMin and retryMax bound the pause before a publish is tried again.
	retryMin = 50 * time.Millisecond
	retryMax = 2 * time.Second
)

// Publish stores e under its subject and returns when the server has confirmed it or
// refused it as a duplicate. After an error that can pass it tries again with the same
// message id until ctx ends. A full stream is ErrStreamFull at once, unless
// WaitForSpace is given. An event that cannot be encoded, is larger than the server's
// payload limit (ErrTooLarge) or may not be published (ErrPermission) is terminal.
//
// When the stream keeps one event on a subject, an invalid e is refused. A stored event counts as a duplicate only when
// it is valid for that subject and passes the check of Against. Any other stored message is displaced.
func (b *Bus) Publish(ctx context.Context, e schemas.Keyed, opts ...PublishOption) (Ack, error) {
	m, err := encode(ctx, e)
	if err != nil {
		return Ack{}, err
	}
	o := options(e, opts)
	if o.inbox != "" {
		m.Header.Set(schemas.HeaderReply, o.inbox)
	}
	return b.publish(ctx, m, o)
}

// options combines the options of a publish with the check of what is stored already for e; e is nil for a message
// that is no event.
func options(e schemas.Keyed, opts []PublishOption) publishOptions {
	var o publishOptions
	for _, opt := range opts {
		opt(&o)
	}
	if e != nil {
		o.checkEvents(e)
	}
	return o
}

// PublishPrompt stores the encoded prompt of a run. It does not decode the prompt: intake decides what is acceptable.
// Without a Nats-Msg-Id in header, the prompt gets a random one, so that it is stored once, however often the publish
// is tried.
func (b *Bus) PublishPrompt(
	ctx context.Context, run schemas.Run, prompt []byte, header nats.Header, opts ...PublishOption,
) (Ack, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return Ack{}, Terminal(schemas.CodeInvalid, err)
	}
	h := nats.Header{
		schemas.HeaderType: {schemas.TypePrompt}, schemas.HeaderContentType: {schemas.ContentType},
		jetstream.MsgIDHeader: {"prompt." + string(run) + "." + randomToken()},
	}
	maps.Copy(h, header)
	tracing.Add(ctx, h)
	return b.publish(ctx, &nats.Msg{Subject: schemas.PromptSubject(run), Data: prompt, Header: h}, options(nil, opts))
}

// PublishRaw stores data as it is: for replays. It uses the header as given, and id as the message id. With an empty
// id, a publish that is tried again may be stored twice.
func (b *Bus) PublishRaw(
	ctx context.Context, subject string, data []byte, header nats.Header, id string, opts ...PublishOption,
) (Ack, error) {
	h := nats.Header{}
	maps.Copy(h, header)
	if id != "" {
		h[jetstream.MsgIDHeader] = []string{id}
	}
	return b.publish(ctx, &nats.Msg{Subject: subject, Data: data, Header: h}, options(nil, opts))
}

// encode makes the message of an event. For a subject that keeps one event it refuses an invalid event, which would
// be displaced.
func encode(ctx context.Context, e schemas.Keyed) (*nats.Msg, error) {
	return encodeTo(ctx, e, schemas.Encode)
}

// encodeTo is encode with another encoder (how), which may bring its own memory.
func encodeTo(ctx context.Context, e schemas.Keyed, how func(schemas.Event) ([]byte, error)) (*nats.Msg, error) {
	subject := e.Subject()
	_, one := onePerSubject(subject)
	data, err := how(e)
	if err == nil && one {
		err = schemas.Legal(e).Validate()
	}
	if err != nil {
		code := schemas.CodeInvalid
		if errors.Is(err, schemas.ErrTooLarge) {
			code = schemas.CodeTooLarge
		}
		return nil, Terminal(code, err)
	}
	h := header(ctx, subject, e.Type(), schemas.ContentType)
	outcomes.Said(e, func(name, value string) { h[name] = []string{value} })
	if !one {
		// Many events share the subject: the content tells them apart.
		h[jetstream.MsgIDHeader] = []string{schemas.MessageID(subject) + "." + digestOf(data)[:16]}
	}
	return &nats.Msg{Subject: subject, Data: data, Header: h}, nil
}

// header returns the headers of an event: its type, the content type, the message id and the trace context.
func header(ctx context.Context, subject, typ, content string) nats.Header {
	values := [...]string{typ, content, schemas.MessageID(subject)} // one allocation for the three
	h := nats.Header{
		schemas.HeaderType: values[0:1:1], schemas.HeaderContentType: values[1:2:2],
		jetstream.MsgIDHeader: values[2:3:3],
	}
	tracing.Add(ctx, h)
	return h
}

// publish sends m until it is stored, refused, or ctx ends; all publishes end here. It displaces a wrong message on
// the subject. Its errors are those of Publish.
func (b *Bus) publish(ctx context.Context, m *nats.Msg, o publishOptions) (Ack, error) {
	began := time.Now()
	wait := retryMin
	for displacements := 0; ; {
		ack, err := b.publishOnce(ctx, m)
		b.recordPublish(m, ack, err, began)
		if err == nil && ack.Duplicate && o.check != nil {
			var first *Message
			if first, err = b.resolveDuplicate(ctx, m, ack.First, o.check); first != nil {
				ack.Seq, ack.First = first.Seq, first
				return ack, nil
			}
			if displacements++; err == nil && displacements < maxDisplaced {
				continue
			}
			if err == nil {
				return Ack{}, publishError(m.Subject, fmt.Errorf("the subject was taken %d times by what it is not for",
					displacements))
			}
		}
		if err == nil {
			return ack, nil
		}
		rest := Pause
		switch {
		case errors.Is(err, ErrStreamFull):
			if !o.wait {
				return Ack{}, publishError(m.Subject, err)
			}
			rest = pauseForSpace
		case classOf(err) == classFatal:
			return Ack{}, publishError(m.Subject, err)
		}
		if ctx.Err() != nil || b.nc.IsClosed() {
			return Ack{}, publishError(m.Subject, errors.Join(err, ctx.Err()))
		}
		if b.waitLog.allow(logEvery) {
			b.log.Warn().Err(err).Str("subject", m.Subject).Dur("waited", time.Since(began)).
				Msg("publish not confirmed, trying again")
		}
		if pauseErr := rest(ctx, wait); pauseErr != nil {
			return Ack{}, publishError(m.Subject, errors.Join(err, pauseErr))
		}
		wait = min(2*wait, retryMax)
	}
}

// recordPublish notes for Faults whether a stream stored the message: a stream that refuses, or does not answer, is a
// fault.
func (b *Bus) recordPublish(m *nats.Msg, ack Ack, err error, began time.Time) {
	switch {
	case err == nil && !ack.Duplicate:
		b.faultLog.noteStored(ack.Stream, m.Size())
	case err == nil, !b.nc.IsConnected(), errors.Is(err, errLinkLost), classOf(err) == classFatal,
		errors.Is(err, context.Canceled):
	default:
		b.faultLog.noteFailure(streamStoring(m.Subject), m.Size(), began, err)
	}
}

// publishOnce is one try of publish. It returns a duplicate, and no error, when the subject is taken.
func (b *Bus) publishOnce(ctx context.Context, m *nats.Msg) (Ack, error) {
	b.addCloudEvent(m)
	sent := *m
	sent.Subject = b.writeSubject(m.Subject)
	resp, err := b.request(ctx, &sent)
	if err != nil {
		return Ack{}, err
	}
	ack, err := readAck(resp)
	if err != nil {
		return b.resolveRefusal(ctx, m, err)
	}
	return ack, nil
}

type pubAck struct {
	Error     *jetstream.APIError `json:"error"`
	Stream    string              `json:"stream"`
	Seq       uint64              `json:"seq"`
	Duplicate bool                `json:"duplicate"`
}

// readAck decodes the server's answer to a publish. An error is the server's refusal, or means that no stream
// has answered or that the answer cannot be read.
func readAck(resp *nats.Msg) (Ack, error) {
	if len(resp.Data) == 0 && resp.Header.Get(headerStatus) == statusNoResponders {
		return Ack{}, jetstream.ErrNoStreamResponse
	}
	var a pubAck
	if err := json.Unmarshal(resp.Data, &a); err != nil {
		return Ack{}, fmt.Errorf("%w: %w", jetstream.ErrInvalidJSAck, err)
	}
	if a.Error != nil {
		return Ack{}, a.Error
	}
	if a.Stream == "" {
		return Ack{}, jetstream.ErrInvalidJSAck
	}
	return Ack{Stream: a.Stream, Seq: a.Seq, Duplicate: a.Duplicate}, nil
}

// resolveRefusal finds out what a refusal means. The server has one code for a taken subject and for a full stream,
// so resolveRefusal reads the stream: when the subject has a message, it returns a duplicate, else ErrStreamFull.
// Other errors it returns as they are.
func (b *Bus) resolveRefusal(ctx context.Context, m *nats.Msg, cause error) (Ack, error) {
	v := classOf(cause)
	if v == classFull {
		return Ack{}, fmt.Errorf("%w: %w", ErrStreamFull, cause)
	}
	if v != classRefused {
		return Ack{}, cause
	}
	if _, one := onePerSubject(m.Subject); !one {
		return Ack{}, fullStream(m.Subject, cause)
	}
	first, err := b.storedOn(ctx, m.Subject)
	if err == nil && first == nil {
		err = fullStream(m.Subject, cause)
	}
	if err != nil {
		return Ack{}, err
	}
	return Ack{Stream: first.Stream, Seq: first.Seq, Duplicate: true, First: first}, nil
}

func fullStream(subject string, cause error) error {
	limit := cause.Error()
	if api, ok := errors.AsType[*jetstream.APIError](cause); ok {
		limit = api.Description
	}
	return fmt.Errorf("%w: %s: %s", ErrStreamFull, cmp.Or(streamStoring(subject), subject), limit)
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func randomToken() string { return strings.ToLower(rand.Text()[:16]) }
