package bus

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ReadOptions say where a Read starts and whether it ends.
type ReadOptions struct {
	// FromSeq or FromTime is where to start; neither: at the beginning. FromSeq wins.
	FromSeq  uint64
	FromTime time.Time
	// After is where an earlier read was, and wins over both: the read goes on behind it, so
	// that each message is read once. A cursor of another stream is ErrCursor; when messages
	// behind it are gone, so that some may never have been read, that is ErrEvicted.
	After Cursor
	// Live goes on with what is stored later, until the context ends or the loop does.
	// Otherwise the read ends at the last sequence of the stream as of the call.
	Live bool
	// HeadersOnly leaves the payloads out.
	HeadersOnly bool

	lastPerSubject bool
}

const (
	// readAhead bounds the bytes that a read has asked for: beyond 64 MiB the server
	// takes the client for a slow one and cuts it off.
	readAhead = 32 << 20
	// readIdle is the silence after which a read that should end looks whether it has.
	readIdle = time.Second
	// readBeat is how often the server says that it is there while it has nothing to send;
	// two that do not come mean that it does not know of the reader.
	readBeat = 2 * time.Second
	// readLook is how often a silent reader looks whether something is there for it.
	readLook = 5 * time.Second
)

// errStalled: the server that a reader was on is gone.
var errStalled = errors.New("the reader's server does not answer")

// Read yields the stored messages that match the filters (none: all) in stream order,
// each once, and lost connections are made good. It ends with an error when the stream
// cannot be read, and silently when ctx ends. Nothing is acked, and no state is left
// on the server. For rewards, see RewardFilter.
func (b *Bus) Read(ctx context.Context, stream string, filters []string, o ReadOptions) iter.Seq2[*Message, error] {
	return func(yield func(*Message, error) bool) {
		if err := b.read(ctx, stream, filters, o, yield); err != nil && ctx.Err() == nil {
			yield(nil, fmt.Errorf("read %s: %w", stream, err))
		}
	}
}

func (b *Bus) read(ctx context.Context, stream string, filters []string, o ReadOptions, yield func(*Message, error) bool) error {
	if err := b.who.has(stream, filters...); err != nil {
		return err
	}
	var s jetstream.Stream
	err := b.patiently(ctx, func(ctx context.Context) (err error) {
		s, err = b.js.Stream(ctx, stream)
		return err
	})
	if err != nil {
		return err
	}
	last, made := s.CachedInfo().State.LastSeq, s.CachedInfo().Created.UnixNano()
	if o.After != "" {
		if o.FromSeq, err = o.After.next(s.CachedInfo()); err != nil {
			return err
		}
	}
	if !o.Live && (s.CachedInfo().State.Msgs == 0 || o.FromSeq > last) {
		return nil
	}
	r := &reader{bus: b, stream: s, name: stream, filters: filters, last: last, made: made}
	for {
		if err = r.follow(ctx, o, yield); !errors.Is(err, errStalled) {
			return err
		}
		b.log.Warn().Str("stream", stream).Msg("the server that had our reader does not answer, making another")
		if r.some { // else from where the first one was to start
			o.FromSeq, o.FromTime, o.lastPerSubject = r.next.Load(), time.Time{}, false
		}
	}
}

// reader is one Read on its way.
type reader struct {
	bus     *Bus
	stream  jetstream.Stream
	name    string
	filters []string
	// last is the end of a read that is not live; made is when the stream was.
	last uint64
	made int64
	// next is the sequence behind what was yielded, if some was.
	next atomic.Uint64
	some bool
	// waits: for the server, and not for who reads.
	waits, stalled atomic.Bool
}

// follow reads with one consumer of the server, until the read ends or the consumer does.
func (r *reader) follow(ctx context.Context, o ReadOptions, yield func(*Message, error) bool) error {
	var c jetstream.Consumer
	err := r.bus.patiently(ctx, func(ctx context.Context) (err error) {
		c, err = r.stream.OrderedConsumer(ctx, o.native(r.filters))
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer stop()
		// What stays behind on a failure goes by itself after a while.
		_ = r.stream.DeleteConsumer(ctx, c.CachedInfo().Name)
	}()
	if o.FromSeq == 0 && !o.FromTime.IsZero() {
		r.next.Store(c.CachedInfo().Delivered.Stream + 1)
	} else {
		r.next.Store(o.FromSeq)
	}
	// Of a cluster, the reader may be on a server that does not have everything yet.
	all := func() (bool, error) {
		lags, err := r.bus.unseen(ctx, r.name, r.filters, r.next.Load(), r.last)
		return !lags, err
	}
	if !o.Live && c.CachedInfo().NumPending == 0 {
		if done, err := all(); done || err != nil {
			return err
		}
	}
	ahead := max(1, min(256, readAhead/max(1, int(r.bus.nc.MaxPayload()))))
	it, err := c.Messages(jetstream.PullMaxMessages(ahead), jetstream.PullHeartbeat(readBeat))
	if err != nil {
		return err
	}
	defer it.Stop()
	// What the library tries again and again does not look at a context, and a consumer that it
	// has just made again not at Stop: to end it takes both.
	reading, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(reading, it.Stop)()
	go r.watch(reading, stop)
	for {
		r.waits.Store(true)
		m, err := r.bus.nextOf(reading, it, c, o.Live)
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
			m.made, r.some = r.made, true
			r.next.Store(m.Seq + 1)
			if !yield(m, nil) || !o.Live && m.Seq == r.last {
				return nil
			}
		}
		if m == nil || !o.Live && m.pending == 0 {
			if done, err := all(); done || err != nil {
				return err
			}
		}
	}
}

// watch calls end when the stream's leader has had something for it for a while that does
// not come. A cluster may put a reader on a server that is no more, and then says nothing; the
// library asks for the same one until that server is back.
func (r *reader) watch(ctx context.Context, end func()) {
	for before, misses := uint64(0), 0; pause(ctx, readLook) == nil; {
		next := r.next.Load()
		if next != before || !r.waits.Load() {
			before, misses = next, 0
			continue
		}
		lags, err := r.bus.unseen(ctx, r.name, r.filters, next, math.MaxUint64)
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

// nextOf waits for the next message. Nil means that there is none any more: what was
// pending at the start has been deleted meanwhile.
func (b *Bus) nextOf(ctx context.Context, it jetstream.MessagesContext, c jetstream.Consumer, live bool) (*Message, error) {
	for {
		// One call for as long as it takes: each begins to listen for heartbeats anew, and
		// without them the library makes the consumer again.
		wait, stop := context.WithCancel(ctx)
		if !live {
			go endIdle(wait, c, stop)
		}
		raw, err := it.Next(jetstream.NextContext(wait))
		ended := wait.Err() != nil
		stop()
		switch {
		case err == nil:
			m, err := delivered(b.nc, &nats.Msg{Subject: raw.Subject(), Reply: raw.Reply(), Data: raw.Data(), Header: raw.Headers()})
			if err != nil {
				return nil, err
			}
			m.reply, m.Delivered = "", 0
			return m, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, jetstream.ErrNoHeartbeat):
			continue // the library makes the consumer again
		case ended:
			return nil, nil
		default:
			return nil, err
		}
	}
}

// endIdle calls end when the consumer has nothing left after a silence, and still has
// nothing after another: what it had then was on its way.
func endIdle(ctx context.Context, c jetstream.Consumer, end func()) {
	for nothing := 0; nothing < 2; {
		if pause(ctx, readIdle) != nil {
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

func (o ReadOptions) native(filters []string) jetstream.OrderedConsumerConfig {
	c := jetstream.OrderedConsumerConfig{FilterSubjects: filters, HeadersOnly: o.HeadersOnly, DeliverPolicy: jetstream.DeliverAllPolicy}
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
