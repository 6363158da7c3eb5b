package bus

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// ReadOptions say where a Read starts and whether it ends.
type ReadOptions struct {
	// FromSeq or FromTime is where to start; neither: at the beginning. FromSeq wins.
	FromSeq  uint64
	FromTime time.Time
	// After is the position of an earlier read, and wins over both: the read continues behind it, so that each
	// message is read once. The error is ErrCursor for a cursor of another stream, and ErrEvicted when messages
	// behind it are gone, some of which may never have been read.
	After Cursor
	// Live continues with messages that are stored later, until the context or the loop ends. Otherwise the read ends
	// at the last sequence that the stream had at the call.
	Live bool
	// HeadersOnly leaves the payloads out.
	HeadersOnly bool

	lastPerSubject bool
}

const (
	// readAhead bounds the bytes that a read has asked for: the server takes a client with more than 64 MiB for a
	// slow one and disconnects it.
	readAhead = 32 << 20
	// readIdle is the silence after which a read that is not live checks whether it has everything.
	readIdle = time.Second
	// readHeartbeat is how often the server says that it is there while it has nothing to send. When two of these do
	// not come, it has lost the reader.
	readHeartbeat = 2 * time.Second
	// readLook is how often a silent reader checks whether there is a message for it.
	readLook = 5 * time.Second
)

var errStalled = errors.New("the reader's server does not answer")

// Read yields the stored messages that match the filters (none: all) in stream order, each once, and continues after
// a lost connection. It ends with an error when the stream cannot be read, and when ctx ends before all is read; a live
// read, which has no other end, without one. It acks nothing and leaves no state on the server. For rewards, see
// RewardFilter.
func (b *Bus) Read(ctx context.Context, stream string, filters []string, o ReadOptions) iter.Seq2[*Message, error] {
	return func(yield func(*Message, error) bool) {
		stopped := false
		err := b.read(ctx, stream, filters, o, func(m *Message, err error) bool {
			stopped = !yield(m, err)
			return !stopped
		})
		if ctx.Err() != nil {
			if err = nil; !o.Live {
				err = context.Cause(ctx)
			}
		}
		if err != nil && !stopped {
			yield(nil, fmt.Errorf("read %s: %w", stream, err))
		}
	}
}

// read is Read with a callback. It makes another reader when the server of the first one is gone. It ends with the
// error of a reader, or when yield returns false.
func (b *Bus) read(
	ctx context.Context, stream string, filters []string, o ReadOptions, yield func(*Message, error) bool,
) error {
	s, info, err := b.streamNow(ctx, stream)
	if err != nil {
		return err
	}
	last, made := info.State.LastSeq, info.Created.UnixNano()
	if o.After != "" {
		if o.FromSeq, err = o.After.nextSequence(info); err != nil {
			return err
		}
	}
	if !o.Live && (info.State.Msgs == 0 || o.FromSeq > last) {
		return nil
	}
	r := &reader{bus: b, stream: s, name: stream, filters: filters, last: last, made: made}
	for {
		if err = r.readWithConsumer(ctx, o, yield); !errors.Is(err, errStalled) {
			return err
		}
		b.log.Warn().Str("stream", stream).Msg("the server that had our reader does not answer, making another")
		if r.yielded { // otherwise it starts where the first one did
			o.FromSeq, o.FromTime, o.lastPerSubject = r.next.Load(), time.Time{}, false
		}
	}
}

type reader struct {
	bus     *Bus
	stream  jetstream.Stream
	name    string
	filters []string
	// last is the sequence at which a read that is not live ends; made is when the stream was created.
	last uint64
	made int64
	// next is the sequence behind the last message that was yielded; yielded says whether there was one.
	next    atomic.Uint64
	yielded bool
	// waits is true while the read waits for the server, and false while its caller works. stalled is set when watch
	// ends the read.
	waits, stalled atomic.Bool
}

// readWithConsumer reads with one consumer of the server, until the read or the consumer ends. It returns nil at the
// end of the read, and errStalled when the consumer's server is gone.
func (r *reader) readWithConsumer(ctx context.Context, o ReadOptions, yield func(*Message, error) bool) error {
	var c jetstream.Consumer
	err := r.bus.retryWhileAway(ctx, func(ctx context.Context) (err error) {
		c, err = r.stream.OrderedConsumer(ctx, o.natsConfig(r.filters))
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer stop()
		// If this fails, the server removes the consumer after a while.
		_ = r.stream.DeleteConsumer(ctx, c.CachedInfo().Name)
	}()
	if o.FromSeq == 0 && !o.FromTime.IsZero() {
		r.next.Store(c.CachedInfo().Delivered.Stream + 1)
	} else {
		r.next.Store(o.FromSeq)
	}
	// In a cluster, the reader may be on a server that does not have everything yet.
	complete := func() (bool, error) {
		lags, err := r.bus.leaderHas(ctx, r.name, r.filters, r.next.Load(), r.last)
		return !lags, err
	}
	if !o.Live && c.CachedInfo().NumPending == 0 {
		if done, err := complete(); done || err != nil {
			return err
		}
	}
	ahead := 256
	if !o.HeadersOnly {
		ahead = max(1, min(ahead, readAhead/max(1, int(r.bus.nc.MaxPayload()))))
	}
	it, err := c.Messages(jetstream.PullMaxMessages(ahead), jetstream.PullHeartbeat(readHeartbeat))
	if err != nil {
		return err
	}
	defer it.Stop()
	// The library's retries ignore the context, and a consumer that it has just created again ignores Stop. So
	// ending the read takes both.
	var watcher sync.WaitGroup
	defer watcher.Wait()
	reading, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(reading, it.Stop)()
	watcher.Go(func() { r.detectStall(reading, stop) })
	for {
		r.waits.Store(true)
		m, err := r.bus.nextMessage(reading, it, c, o.Live)
		r.waits.Store(false)
		if err != nil {
			if r.stalled.Swap(false) {
				return errStalled
			}
			return err
		}
		if m != nil {
			if !o.Live && m.Seq > r.last {
				return nil
			}
			m.made, r.yielded = r.made, true
			r.next.Store(m.Seq + 1)
			if !yield(m, nil) || !o.Live && m.Seq == r.last {
				return nil
			}
		}
		if m == nil || !o.Live && m.pending == 0 {
			if done, err := complete(); done || err != nil {
				return err
			}
		}
	}
}

// detectStall calls end, beside a read, when the stream's leader has a message for the reader that does not come for
// a while. A cluster may put a reader on a server that goes away, and does not say so; the library asks for the same
// server until that is back.
func (r *reader) detectStall(ctx context.Context, end func()) {
	for before, misses := uint64(0), 0; Pause(ctx, readLook) == nil; {
		next := r.next.Load()
		if next != before || !r.waits.Load() {
			before, misses = next, 0
			continue
		}
		lags, err := r.bus.leaderHas(ctx, r.name, r.filters, next, math.MaxUint64)
		if err != nil || !lags || r.next.Load() != next {
			misses = 0
			continue
		}
		if misses++; misses == 2 {
			r.stalled.Store(true)
			end()
			return
		}
	}
}

// nextMessage waits for the next message of a read. It returns nil, without an error, when nothing is left: the
// messages that were pending at the start have been deleted meanwhile.
func (b *Bus) nextMessage(
	ctx context.Context, it jetstream.MessagesContext, c jetstream.Consumer, live bool,
) (*Message, error) {
	for {
		// One call without a time limit: each call starts to count missing heartbeats again, and only when some are
		// missing does the library create the consumer again.
		wait, stop := context.WithCancel(ctx)
		var idle sync.WaitGroup
		if !live {
			idle.Go(func() { endWhenIdle(wait, c, stop) })
		}
		raw, err := it.Next(jetstream.NextContext(wait))
		ended := wait.Err() != nil
		stop()
		idle.Wait()
		switch {
		case err == nil:
			m, err := parseDelivery(b.nc, &nats.Msg{
				Subject: raw.Subject(), Reply: raw.Reply(), Data: raw.Data(),
				Header: raw.Headers(),
			})
			if err != nil {
				return nil, err
			}
			m.reply, m.Delivered = "", 0
			return m, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, jetstream.ErrNoHeartbeat):
			continue // the library creates the consumer again
		case ended:
			return nil, nil
		default:
			return nil, err
		}
	}
}

// endWhenIdle calls end, for a read that is not live, when the consumer has nothing left in two checks, readIdle
// apart: after the first, messages may still be on their way.
func endWhenIdle(ctx context.Context, c jetstream.Consumer, end func()) {
	for nothing := 0; nothing < 2; {
		if Pause(ctx, readIdle) != nil {
			return
		}
		if info, err := c.Info(ctx); err == nil && info.NumPending == 0 {
			nothing++
		} else {
			nothing = 0
		}
	}
	end()
}

// natsConfig returns the options of a read in the form of the client library.
func (o ReadOptions) natsConfig(filters []string) jetstream.OrderedConsumerConfig {
	c := jetstream.OrderedConsumerConfig{
		FilterSubjects: filters, HeadersOnly: o.HeadersOnly,
		DeliverPolicy: jetstream.DeliverAllPolicy,
	}
	switch {
	case o.lastPerSubject:
		c.DeliverPolicy = jetstream.DeliverLastPerSubjectPolicy
	case o.FromSeq > 0:
		c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverByStartSequencePolicy, o.FromSeq
	case !o.FromTime.IsZero():
		c.DeliverPolicy, c.OptStartTime = jetstream.DeliverByStartTimePolicy, &o.FromTime
	}
	return c
}

// Cursor is a position in a stream: behind a message that was read, or, empty, before all messages. A client stores
// it as text and gives it back later. It has the sequence, and the time at which the stream was created, because a
// stream that is created again counts from 1.
type Cursor string

// Cursor returns the position of a message that Read yielded; a read with it in ReadOptions.After begins with the
// next message. It returns "" for any other message.
func (m *Message) Cursor() Cursor {
	if m.made == 0 {
		return ""
	}
	return Cursor(strconv.FormatUint(m.Seq, 10) + "@" + strconv.FormatInt(m.made, 10))
}

// nextSequence returns the first sequence after a cursor in its stream, where a reader goes on; 1 for an empty
// cursor. It returns ErrCursor when the cursor is not valid or belongs to another stream, and ErrEvicted when
// messages behind it are gone.
func (c Cursor) nextSequence(s *jetstream.StreamInfo) (uint64, error) {
	if c == "" {
		return 1, nil
	}
	at, made, _ := strings.Cut(string(c), "@")
	seq, errSeq := strconv.ParseUint(at, 10, 64)
	created, errMade := strconv.ParseInt(made, 10, 64)
	switch {
	case errSeq != nil || errMade != nil || seq == 0:
		return 0, fmt.Errorf("%w: %.64q; must be the Cursor of a message that was read", ErrCursor, string(c))
	case created != s.Created.UnixNano() || seq > s.State.LastSeq:
		return 0, fmt.Errorf("%w: %q is of another stream than this one, which was made at %v; start with an empty "+
			"cursor", ErrCursor, string(c), s.Created.UTC())
	case seq+1 < s.State.FirstSeq:
		return 0, fmt.Errorf("%w: %d to %d are gone; what is left begins with an empty cursor", ErrEvicted, seq+1,
			s.State.FirstSeq-1)
	}
	return seq + 1, nil
}

// lastPerSubject is lastManyFrom by readers, one for each filter, where one request is not enough.
func (b *Bus) lastPerSubject(ctx context.Context, stream string, filters []string, from uint64) ([]*Message, error) {
	last := map[string]*Message{}
	for _, filter := range filters {
		o := ReadOptions{lastPerSubject: from == 0, FromSeq: from}
		for m, err := range b.Read(ctx, stream, []string{filter}, o) {
			if err != nil {
				return nil, err
			}
			last[m.Subject] = m
		}
	}
	return slices.SortedFunc(maps.Values(last), func(a, b *Message) int { return cmp.Compare(a.Seq, b.Seq) }), nil
}

// Replay publishes the original of a dead letter again, from the letter or from the object store, and removes the
// letter once the original is stored. seq is the letter's sequence in MDR_DEAD. It returns the original's position
// and subject.
//
// A refused event of a guarded stream is still on its subject, and its consumer has finished it. Replay deletes it
// first, so that the new one is delivered. When the subject holds another event by now, Replay returns an error and
// leaves the event and the letter alone.
func (b *Bus) Replay(ctx context.Context, seq uint64) (Ack, string, error) {
	letter, err := b.Get(ctx, schemas.StreamDead, seq)
	if err != nil {
		return Ack{}, "", fmt.Errorf("replay: %w", err)
	}
	d := &schemas.Dead{}
	if err := schemas.Decode(letter.Data, d); err != nil {
		return Ack{}, "", fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	subject := schemas.PublishedSubject(d.OriginalSubject)
	spec, ok := schemas.StreamOf(subject)
	if !ok || spec.Name == schemas.StreamAdvisories {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: subject: %q; no stream takes events on it", seq, subject)
	}
	data, err := b.DeadData(ctx, d)
	if err != nil {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	ack, err := b.storeOriginal(ctx, spec, subject, d, data, fmt.Sprintf("replay.%d.%d", seq, d.At))
	if err != nil {
		return Ack{}, subject, fmt.Errorf("replay: letter %d: %w", seq, err)
	}
	if err := b.Delete(ctx, schemas.StreamDead, seq); err != nil {
		return ack, subject, fmt.Errorf("replay: letter %d is stored again as %s %d, but stays: %w", seq, ack.Stream,
			ack.Seq, err)
	}
	return ack, subject, nil
}

// storeOriginal publishes the original of a dead letter on its subject, for Replay. When the subject keeps one event,
// it deletes the refused one first. It fails when the subject holds another event by now.
func (b *Bus) storeOriginal(
	ctx context.Context, spec schemas.StreamSpec, subject string, d *schemas.Dead, data []byte, id string,
) (Ack, error) {
	unique := spec.Guarded || spec.WorkQueue
	if unique {
		there, err := b.sameOn(ctx, subject, data)
		switch {
		case err != nil:
			return Ack{}, err
		case there == nil:
		case there.Seq != d.StreamSeq: // a replay that was cut off before it removed the letter
			return Ack{Stream: spec.Name, Seq: there.Seq, Duplicate: true}, nil
		default:
			if err := b.Delete(ctx, spec.Name, there.Seq); err != nil {
				return Ack{}, err
			}
		}
	}
	header := nats.Header{}
	for _, h := range d.Headers {
		if !strings.HasPrefix(h.Name, "Nats-") && h.Name != schemas.HeaderReply && h.Name != HeaderRef {
			header.Add(h.Name, h.Value)
		}
	}
	ack, err := b.PublishRaw(ctx, subject, data, header, id)
	if err == nil && ack.Duplicate && unique {
		// It was stored by an earlier replay, or by another client just now.
		there, err := b.sameOn(ctx, subject, data)
		if err != nil {
			return Ack{}, err
		}
		if there == nil {
			return Ack{}, fmt.Errorf("stored and removed again within %v; try later", schemas.DedupWindow)
		}
	}
	return ack, err
}

// sameOn returns the message on a subject that keeps one; nil when there is none, and an error when its bytes are not
// data.
func (b *Bus) sameOn(ctx context.Context, subject string, data []byte) (*Message, error) {
	m, err := b.storedOn(ctx, subject)
	if m != nil && !bytes.Equal(m.Data, data) {
		return nil, fmt.Errorf("%q holds another event by now, sequence %d of %s; only one can be there", subject,
			m.Seq, m.Stream)
	}
	return m, err
}
