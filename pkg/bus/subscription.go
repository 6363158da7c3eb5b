package bus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Subscription is a durable consumer whose messages the caller acknowledges, at any later time. Heartbeats keep them
// until then, so a caller may hold many messages for long: up to MaxAckPending.
//
// With a PriorityGroup one client is active (it has the pin) and the others stand by. A client that loses the pin
// returns the messages that it holds, and Next calls OnRelease.
type Subscription struct {
	*puller
	once func() error
}

// infoLag is how old the server's numbers of a consumer may be.
const infoLag = 100 * time.Millisecond

// Subscription creates the durable, or uses the one that is there, and returns a subscription that takes its
// messages. Close it before the bus. It fails when the durable cannot be made.
func (b *Bus) Subscription(ctx context.Context, c ConsumerConfig) (*Subscription, error) {
	p, err := b.newPuller(ctx, c)
	if err != nil {
		return nil, err
	}
	s := &Subscription{puller: p}
	s.once = sync.OnceValue(s.close)
	p.setWanted(p.config.Slots)
	return s, nil
}

// Next returns the next message, or the error of ctx when that ends first, or
// ErrClosed. Only one goroutine may call it.
func (s *Subscription) Next(ctx context.Context) (*Message, error) {
	for {
		if s.returnAfterLostPin() && s.config.OnRelease != nil {
			s.config.OnRelease()
		}
		m := s.pop()
		s.setWanted(s.config.Slots) // also when all queued messages had been returned
		if m != nil {
			return m, nil
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.closed:
			return nil, s.errClosed()
		}
	}
}

// Held returns the number of messages that this client has and has not acknowledged, those in the queue included.
func (s *Subscription) Held() int {
	s.heartbeats.mu.Lock()
	defer s.heartbeats.mu.Unlock()
	return len(s.heartbeats.messages)
}

// CaughtUp returns a time of the server's clock up to which the caller holds every stored message that is not
// acknowledged: none waits to be delivered, is on its way, or is with another client. It returns the zero time when
// there is no such time yet. When the caller holds MaxAckPending messages, no more can come, and that counts as
// caught up.
func (s *Subscription) CaughtUp() (time.Time, error) {
	info, err := s.info()
	if err != nil {
		return time.Time{}, fmt.Errorf("consumer %q of %s: %w", s.config.Name, s.config.Stream, err)
	}
	held := s.Held()
	mayHold := s.config.MaxAckPending < 0 || held < s.config.MaxAckPending
	if !s.isIdle() || info.NumAckPending > held || info.NumPending > 0 && mayHold {
		return time.Time{}, nil
	}
	return info.TimeStamp.Add(-infoLag), nil
}

// Close ends the subscription and returns the messages that are not acknowledged, so that another client gets them at
// once. Later calls do nothing.
func (s *Subscription) Close() error { return s.once() }

// close stops pulling, returns all messages to the server, and gives the pin to another client; Close calls it once.
func (s *Subscription) close() error {
	pin := s.serverPin() // read it before we stop listening for our pulls
	s.stop()
	s.end()
	s.heartbeats.returnAll()
	if s.bus.nc.IsClosed() || !s.bus.nc.IsConnected() {
		return nil
	}
	// Let another client take over at once, not after PinnedTTL. The server notices that nothing listens for our
	// pulls only when it is asked about the consumer. Until then it may have pinned one of them: so a new pin is
	// ours, or, rarely, that of another client, which then gets a new one.
	if now := s.serverPin(); now != "" && (now != pin || s.hasPin(now)) {
		s.unpin()
	}
	// A server that is too busy to confirm it in time gets it all the same.
	if err := s.bus.nc.FlushTimeout(time.Second); !errors.Is(err, nats.ErrTimeout) {
		return err
	}
	return nil
}

// serverPin returns the pin that the server has given out; "" when there is none, or the server does not answer.
func (s *Subscription) serverPin() string {
	if s.config.PriorityGroup == "" {
		return ""
	}
	info, err := s.info()
	if err != nil {
		return ""
	}
	return pinOf(info)
}

// info asks the server for the state of the consumer.
func (s *Subscription) info() (*jetstream.ConsumerInfo, error) {
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	c, err := s.bus.js.Consumer(ctx, s.config.Stream, s.config.Name)
	if err != nil {
		return nil, err
	}
	return c.CachedInfo(), nil
}

// unpin asks the server to pin another client. A failure is only logged: PinnedTTL does the same later.
func (s *Subscription) unpin() {
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	stream, err := s.bus.js.Stream(ctx, s.config.Stream)
	if err == nil {
		err = stream.UnpinConsumer(ctx, s.config.Name, s.config.PriorityGroup)
	}
	if err != nil { // PinnedTTL does the same later
		s.bus.log.Debug().Err(err).Str("consumer", s.config.Name).Msg("not unpinned")
	}
}
