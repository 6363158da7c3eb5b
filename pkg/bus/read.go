package bus

import (
	"context"
	"errors"
	"fmt"
	"iter"
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
)

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
	var c jetstream.Consumer
	err = b.patiently(ctx, func(ctx context.Context) (err error) {
		c, err = s.OrderedConsumer(ctx, o.native(filters))
		return err
	})
	if err != nil {
		return err
	}
	defer func() {
		ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer stop()
		// What stays behind on a failure goes by itself after a while.
		_ = s.DeleteConsumer(ctx, c.CachedInfo().Name)
	}()
	next := o.FromSeq
	if next == 0 && !o.FromTime.IsZero() {
		next = c.CachedInfo().Delivered.Stream + 1
	}
	// Of a cluster, the reader may be on a server that does not have everything yet.
	all := func() (bool, error) {
		lags, err := b.unseen(ctx, stream, filters, next, last)
		return !lags, err
	}
	if !o.Live && c.CachedInfo().NumPending == 0 {
		if done, err := all(); done || err != nil {
			return err
		}
	}
	ahead := max(1, min(256, readAhead/max(1, int(b.nc.MaxPayload()))))
	it, err := c.Messages(jetstream.PullMaxMessages(ahead), jetstream.PullHeartbeat(readBeat))
	if err != nil {
		return err
	}
	defer it.Stop()
	for {
		m, err := b.nextOf(ctx, it, c, o.Live)
		if err != nil {
			return err
		}
		if m != nil {
			if !o.Live && m.Seq > last {
				return nil
			}
			m.made, next = made, m.Seq+1
			if !yield(m, nil) || !o.Live && m.Seq == last {
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
