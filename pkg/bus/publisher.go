package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

const (
	// ackTimeout is how long a publish waits for its ack before it is sent again.
	ackTimeout = 5 * time.Second
	// retriers is how many unconfirmed messages are sent again at once: after an outage that is a whole window.
	retriers = 16
	// maxLent is the size up to which the memory of a payload is kept for the next one.
	maxLent = 2 << 20
)

// Publisher publishes without waiting for each ack, within a window. It is for step
// events: publishing must not hold up the denoising loop. Safe for concurrent use.
//
// Acks arrive in any order. A message that is not confirmed (an outage, a full stream) is sent again with the same id.
// So a full stream fills the window, and then Publish blocks: that is the backpressure.
type Publisher struct {
	b      *Bus
	window *window
	inbox  string // of acks, up to the token
	sub    *nats.Subscription
	ctx    context.Context // of the retries: messages outlive the calls that publish them
	cancel context.CancelFunc
	retry  chan struct{} // holds a token for each retry at work
	work   sync.WaitGroup
	closed atomic.Bool
	next   atomic.Uint64

	mu      sync.Mutex
	waiting map[uint64]*Future // by the token of the reply subject; nil after Close

	stalled    atomic.Int64 // nanoseconds
	retried    atomic.Uint64
	duplicates atomic.Uint64
}

// PublisherStats are counters of a Publisher.
type PublisherStats struct {
	// Pending and PendingBytes wait for their ack.
	Pending      int64
	PendingBytes int64
	// Stalled is how long all callers together have waited for space in the window.
	Stalled time.Duration
	// Retried messages were sent more than once. Duplicates had been stored before.
	Retried    uint64
	Duplicates uint64
}

// NewPublisher returns a Publisher whose window, the messages that are not confirmed yet, holds that many messages
// and bytes (at least one of each). Close it before its bus.
func (b *Bus) NewPublisher(window, bytes int) *Publisher {
	p := &Publisher{
		b: b, window: newWindow(window, bytes), inbox: b.nc.NewInbox() + ".", retry: make(chan struct{}, retriers),
		waiting: map[uint64]*Future{},
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	// If this fails, sub stays nil, and every message takes the confirmed path, which reports the failure.
	if sub, err := b.nc.Subscribe(p.inbox+"*", p.handleAck); err == nil {
		_ = sub.SetPendingLimits(-1, -1) // the window bounds the acks
		p.sub = sub
	}
	p.work.Go(p.resendLate)
	return p
}

// Future is the outcome of one publish.
type Future struct {
	msg    *nats.Msg // nil once it is resolved
	lent   *[]byte   // memory of the payload, nil where it belongs to the caller
	digest string    // payload digest of a step
	o      publishOptions
	size   int64
	sent   time.Time

	done chan struct{}
	ack  Ack
	err  error
}

// Done is closed when the outcome is known.
func (f *Future) Done() <-chan struct{} { return f.done }

// Wait returns the outcome of a message that a Publisher sent, or the error of ctx when that ends first. Ack.Digest
// is the payload digest of a step; it is empty when another payload was stored on the subject before.
func (f *Future) Wait(ctx context.Context) (Ack, error) {
	select {
	case <-f.done:
		return f.ack, f.err
	default:
	}
	select {
	case <-f.done:
		return f.ack, f.err
	case <-ctx.Done():
		return Ack{}, ctx.Err()
	}
}

// Publish sends an event and returns as soon as the window has space. ctx bounds that wait, not the delivery. A full
// stream is always waited for; the other options are those of Bus.Publish.
func (p *Publisher) Publish(ctx context.Context, e schemas.Keyed, opts ...PublishOption) (*Future, error) {
	f, err := encodeFuture(ctx, e, options(e, opts), schemas.AppendEncode)
	if err != nil {
		return nil, err
	}
	return p.start(ctx, f)
}

// payloads is memory for encoded events, used again for later ones: so a large step is neither copied nor left to the
// garbage collector.
var payloads = sync.Pool{New: func() any { return new([]byte) }}

// encodeFuture encodes an event into memory that is used again, and returns its future, which is not in the window
// yet. An event that cannot be encoded is a terminal error.
func encodeFuture(
	ctx context.Context, e schemas.Keyed, o publishOptions, how func(dst []byte, e schemas.Event) ([]byte, error),
) (*Future, error) {
	lent := payloads.Get().(*[]byte)
	m, err := encodeTo(ctx, e, func(e schemas.Event) ([]byte, error) { return how((*lent)[:0], e) })
	if err != nil {
		payloads.Put(lent)
		return nil, err
	}
	*lent = m.Data
	return &Future{msg: m, lent: lent, o: o}, nil
}

// PublishStep is Publish for a step, or tokens, of any size. sums are the digests of its tensors; nil: they are
// computed. When the event is too large for one message, its tensors travel as parts (SplitParts), and the step is
// sent after all parts are stored, so that a reader that sees the step can load it. e is not modified.
//
// The subject of a step names its attempt, which has one writer: so any other payload on it is displaced.
func (p *Publisher) PublishStep(ctx context.Context, e schemas.StepEvent, sums *schemas.TensorSums) (*Future, error) {
	if sums == nil {
		var err error
		if sums, err = schemas.SumTensors(e); err != nil {
			return nil, publishError(e.Subject(), err)
		}
	}
	limit := p.b.MaxInline()
	if InlineSize(e) > limit-overhead(e) {
		return p.publishParts(ctx, e, sums, limit)
	}
	f, err := encodeStepFuture(ctx, e, sums)
	if err != nil {
		return nil, err
	}
	return p.start(ctx, f)
}

// encodeStepFuture is encodeFuture for a step; the future also gets the payload digest.
func encodeStepFuture(ctx context.Context, e schemas.StepEvent, sums *schemas.TensorSums) (*Future, error) {
	var digest string
	f, err := encodeFuture(ctx, e, oneWriter, func(dst []byte, _ schemas.Event) (data []byte, err error) {
		data, digest, err = schemas.AppendStep(dst, e, sums)
		return data, err
	})
	if err == nil {
		f.digest = digest
	}
	return f, err
}

var oneWriter = publishOptions{check: func(*Message) (fault, err error) { return errOther, nil }}

// publishParts sends the parts of a large step, and in the background the step itself once all parts are stored. When
// a part fails, the step's future gets that error.
func (p *Publisher) publishParts(
	ctx context.Context, e schemas.StepEvent, sums *schemas.TensorSums, limit int,
) (*Future, error) {
	step := e.Detached()
	parts := SplitParts(step, sums, limit)
	f, err := encodeStepFuture(ctx, step, sums)
	if err != nil {
		return nil, err
	}
	if len(parts) == 0 {
		return p.start(ctx, f)
	}
	futures := make([]*Future, len(parts))
	for i, part := range parts {
		subject := schemas.PartSubject(f.msg.Subject, int64(i))
		m := &nats.Msg{Subject: subject, Data: part, Header: header(ctx, subject, partType, "application/octet-stream")}
		futures[i], err = p.start(ctx, &Future{msg: m, o: oneWriter})
		if err != nil {
			return nil, err
		}
	}
	if err := p.waitForWindow(ctx, f); err != nil {
		return nil, err
	}
	p.work.Go(func() {
		for i, part := range futures {
			select {
			case <-part.done:
			case <-p.ctx.Done():
				p.setOutcome(f, Ack{}, publishError(f.msg.Subject, ErrClosed))
				return
			}
			if part.err != nil {
				p.setOutcome(f, Ack{}, fmt.Errorf("part %d: %w", i, part.err))
				return
			}
		}
		p.send(f)
	})
	return f, nil
}

func (p *Publisher) start(ctx context.Context, f *Future) (*Future, error) {
	if err := p.waitForWindow(ctx, f); err != nil {
		return nil, err
	}
	p.send(f)
	return f, nil
}

// waitForWindow waits for space in the window of unconfirmed messages, and takes it. It refuses a message that is
// larger than the server allows, and fails when the publisher is closed or ctx ends.
func (p *Publisher) waitForWindow(ctx context.Context, f *Future) error {
	m := f.msg
	if p.closed.Load() {
		return publishError(m.Subject, ErrClosed)
	}
	if limit := p.b.nc.MaxPayload(); int64(m.Size()) > limit {
		return publishError(m.Subject, fmt.Errorf("%w: %d bytes with headers, the server takes %d", nats.ErrMaxPayload,
			m.Size(), limit))
	}
	f.o.wait, f.size, f.done = true, int64(len(m.Data)), make(chan struct{})
	began := time.Now()
	waited, err := p.window.reserve(ctx, f.size)
	if waited {
		p.stalled.Add(int64(time.Since(began)))
	}
	if err != nil {
		return publishError(m.Subject, err)
	}
	return nil
}

// send publishes a message once, with its own reply subject, on which handleAck gets the answer. When that fails, the
// confirmed path sends it again.
func (p *Publisher) send(f *Future) {
	id := p.next.Add(1)
	f.sent = time.Now()
	p.mu.Lock()
	open := p.waiting != nil
	if open {
		p.waiting[id] = f
	}
	p.mu.Unlock()
	if !open {
		p.setOutcome(f, Ack{}, publishError(f.msg.Subject, ErrClosed))
		return
	}
	err := ErrClosed
	if p.sub != nil {
		p.b.addCloudEvent(f.msg)
		sent := *f.msg
		sent.Reply = p.inbox + strconv.FormatUint(id, 36)
		err = p.b.nc.PublishMsg(&sent)
	}
	if err != nil && p.removeWaiting(id) != nil {
		p.retryConfirmed(f)
	}
}

func (p *Publisher) removeWaiting(id uint64) *Future {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.waiting[id]
	delete(p.waiting, id)
	return f
}

// handleAck handles the server's answers to messages of the window, one after another: the future gets its outcome,
// or the message takes the confirmed path.
func (p *Publisher) handleAck(m *nats.Msg) {
	id, err := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 36, 64)
	if err != nil {
		return
	}
	f := p.removeWaiting(id)
	if f == nil {
		return // a late answer to what was sent again
	}
	ack, ok := parsePlainAck(m.Data)
	if !ok {
		if ack, err = readAck(m); err != nil || ack.Duplicate {
			p.retryConfirmed(f) // the confirmed path finds out what it means
			return
		}
	}
	ack.Digest = f.digest
	p.b.faultLog.noteStored(ack.Stream, f.msg.Size())
	p.setOutcome(f, ack, nil)
}

// parsePlainAck decodes the usual ack, {"stream":"<name>","seq":<n>}, without the cost of a JSON decoder; false for any
// other answer.
func parsePlainAck(data []byte) (Ack, bool) {
	s := string(data)
	s, ok1 := strings.CutPrefix(s, `{"stream":"`)
	stream, s, ok2 := strings.Cut(s, `"`)
	s = strings.TrimLeft(s, ", ")
	s, ok3 := strings.CutPrefix(s, `"seq":`)
	s, ok4 := strings.CutSuffix(strings.TrimSpace(s), "}")
	seq, err := strconv.ParseUint(strings.TrimSpace(s), 10, 64)
	return Ack{Stream: stream, Seq: seq}, ok1 && ok2 && ok3 && ok4 && err == nil && stream != ""
}

// retryConfirmed has a message sent again on the confirmed path, Bus.publish, which finds out what became of it. It
// does not wait for that.
func (p *Publisher) retryConfirmed(f *Future) {
	p.retried.Add(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting == nil {
		p.setOutcome(f, Ack{}, publishError(f.msg.Subject, ErrClosed))
		return
	}
	p.work.Go(func() {
		p.retry <- struct{}{}
		defer func() { <-p.retry }()
		ack, err := p.b.publish(p.ctx, f.msg, f.o)
		switch {
		case err != nil && p.ctx.Err() != nil:
			err = publishError(f.msg.Subject, errors.Join(ErrClosed, err))
		case err == nil && ack.Duplicate:
			p.duplicates.Add(1)
			if bytes.Equal(ack.First.Data, f.msg.Data) {
				ack.Digest = f.digest
			}
		case err == nil:
			ack.Digest = f.digest
		}
		p.setOutcome(f, ack, err)
	})
}

// resendLate sends messages again that the server has not answered, in the background: after ackTimeout, or at once
// when the connection was replaced, because answers on the old one are lost.
func (p *Publisher) resendLate() {
	tick := time.NewTicker(ackTimeout / 4)
	defer tick.Stop()
	lost := p.b.nc.StatusChanged(nats.CONNECTED)
	defer p.b.nc.RemoveStatusListener(lost)
	for {
		limit := time.Now().Add(-ackTimeout)
		select {
		case <-tick.C:
		case <-lost:
			limit = time.Now() // a new connection: every answer of the old one is lost
		case <-p.ctx.Done():
			return
		}
		var late []*Future
		p.mu.Lock()
		for id, f := range p.waiting {
			if f.sent.Before(limit) {
				delete(p.waiting, id)
				late = append(late, f)
			}
		}
		p.mu.Unlock()
		for _, f := range late {
			p.retryConfirmed(f)
		}
	}
}

// setOutcome gives a future its outcome, and frees its memory and its space in the window.
func (p *Publisher) setOutcome(f *Future, ack Ack, err error) {
	f.ack, f.err = ack, err
	if f.lent != nil && cap(*f.lent) <= maxLent {
		payloads.Put(f.lent) // no later try reads it
	}
	f.msg, f.lent = nil, nil
	p.window.release(f.size)
	close(f.done)
}

// Flush waits until everything published so far has an outcome, which may be an error. Its own error is that of ctx.
func (p *Publisher) Flush(ctx context.Context) error {
	for {
		if msgs, _ := p.window.load(); msgs == 0 {
			return nil
		}
		if err := Pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// Stats returns the counters.
func (p *Publisher) Stats() PublisherStats {
	msgs, bytes := p.window.load()
	return PublisherStats{
		Pending: msgs, PendingBytes: bytes, Stalled: time.Duration(p.stalled.Load()),
		Retried: p.retried.Load(), Duplicates: p.duplicates.Load(),
	}
}

// Close ends the publisher. Futures that are not resolved get ErrClosed; whether those
// messages were stored is not known. Flush first, or wait for the futures.
func (p *Publisher) Close() {
	if p.closed.Swap(true) {
		return
	}
	p.cancel()
	if p.sub != nil {
		_ = p.sub.Unsubscribe() // fails only on a closed connection
	}
	p.mu.Lock()
	rest := p.waiting
	p.waiting = nil
	p.mu.Unlock()
	for _, f := range rest {
		p.setOutcome(f, Ack{}, publishError(f.msg.Subject, ErrClosed))
	}
	p.work.Wait()
}

// window bounds the messages that a Publisher has sent and that are not confirmed, by count and by bytes. A full
// window opens again when a quarter of it is free, not at every ack: otherwise each ack would wake the waiting
// callers.
type window struct {
	maxMsgs, maxBytes int64

	mu          sync.Mutex
	msgs, bytes int64
	waiting     int
	open        chan struct{} // closed and replaced when there is space again
}

func newWindow(msgs, bytes int) *window {
	return &window{maxMsgs: int64(max(1, msgs)), maxBytes: int64(max(1, bytes)), open: make(chan struct{})}
}

// reserve takes space for a message of n bytes in a publisher's window, and reports whether it had to wait. A message
// larger than the window enters when the window is empty. The error is that of ctx.
func (w *window) reserve(ctx context.Context, n int64) (waited bool, err error) {
	for {
		w.mu.Lock()
		if w.msgs < w.maxMsgs && (w.bytes+n <= w.maxBytes || w.msgs == 0) {
			w.msgs++
			w.bytes += n
			w.mu.Unlock()
			return waited, nil
		}
		open := w.open
		w.waiting++
		w.mu.Unlock()
		waited = true
		select {
		case <-open:
		case <-ctx.Done():
			err = ctx.Err()
		}
		w.mu.Lock()
		w.waiting--
		w.mu.Unlock()
		if err != nil {
			return waited, err
		}
	}
}

// release gives the space of a message in the window back, and wakes publishers that wait.
func (w *window) release(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.msgs--
	w.bytes -= n
	if w.waiting > 0 && w.msgs <= w.maxMsgs*3/4 && (w.bytes <= w.maxBytes*3/4 || w.msgs == 0) {
		close(w.open)
		w.open = make(chan struct{})
	}
}

func (w *window) load() (msgs, bytes int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.msgs, w.bytes
}
