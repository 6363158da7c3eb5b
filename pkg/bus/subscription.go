package bus

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Subscription is a durable consumer whose messages are settled by the caller, at any
// later time. The server is told that they are in hand until then, so a caller may
// hold many for long: as many as MaxAckPending.
//
// With a PriorityGroup one client is active and the others stand by. A client that
// loses the pin hands back what it holds, and Next calls OnRelease.
type Subscription struct {
	bus        *Bus
	config     ConsumerConfig
	puller     *puller
	heartbeats *heartbeats
	helpers    sync.WaitGroup
	stop       context.CancelFunc
	closed     chan nats.Status
	once       func() error
}

// infoLag is how far the server's books of a consumer may be behind what is stored.
const infoLag = 100 * time.Millisecond

// Subscription makes or binds the durable. It is to be closed before the bus.
func (b *Bus) Subscription(ctx context.Context, c ConsumerConfig) (*Subscription, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	d := &durable{bus: b, config: c}
	if err := d.bindPatiently(ctx); err != nil {
		return nil, err
	}
	p, err := b.newPuller(c, d.bindPatiently)
	if err != nil {
		return nil, fmt.Errorf("subscribe to %q of %s: %w", c.Durable, c.Stream, err)
	}
	live, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &Subscription{bus: b, config: c, puller: p, heartbeats: p.heartbeats, stop: stop, closed: b.nc.StatusChanged(nats.CLOSED)}
	s.once = sync.OnceValue(s.close)
	s.helpers.Go(func() { s.heartbeats.run(live, c.AckWait) })
	s.helpers.Go(func() { p.watch(live) })
	s.helpers.Go(func() { d.watch(live) })
	p.setRoom(c.Slots)
	return s, nil
}

// Next returns the next message, or the error of ctx when that ends first, or
// ErrClosed. Only one goroutine may call it.
func (s *Subscription) Next(ctx context.Context) (*Message, error) {
	for {
		if s.puller.lostPin() {
			s.handBack()
			if s.config.OnRelease != nil {
				s.config.OnRelease()
			}
		}
		m := s.puller.pop()
		s.puller.setRoom(s.config.Slots) // also when all that waited had been handed back
		if m != nil {
			return m, nil
		}
		select {
		case <-s.puller.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.closed:
			return nil, fmt.Errorf("subscription %q of %s: %w", s.config.Durable, s.config.Stream, ErrClosed)
		}
	}
}

// Held is the number of messages that were returned, or fetched ahead, and not settled.
func (s *Subscription) Held() int {
	s.heartbeats.mu.Lock()
	defer s.heartbeats.mu.Unlock()
	return len(s.heartbeats.held)
}

// CaughtUp returns a time, by the server's clock, up to which everything that is stored
// and not settled is in the hands of the caller: nothing of it waits to be delivered, is
// on its way, or is with another client. The zero time: there is no such time yet. When
// as many are held as may be, nothing more can come, and that counts, too.
func (s *Subscription) CaughtUp() (time.Time, error) {
	m, err := s.api("INFO", nil)
	if err != nil {
		return time.Time{}, fmt.Errorf("consumer %q of %s: %w", s.config.Durable, s.config.Stream, err)
	}
	var info jetstream.ConsumerInfo
	if err := json.Unmarshal(m.Data, &info); err != nil {
		return time.Time{}, fmt.Errorf("consumer %q of %s: %w", s.config.Durable, s.config.Stream, err)
	}
	held := s.Held()
	if !s.puller.idle() || info.NumAckPending > held || info.NumPending > 0 && (s.config.MaxAckPending < 0 || held < s.config.MaxAckPending) {
		return time.Time{}, nil
	}
	return info.TimeStamp.Add(-infoLag), nil
}

func (s *Subscription) handBack() {
	for _, m := range s.heartbeats.all() {
		_ = m.NakWithDelay(handBackDelay) // lost, it comes again after AckWait
	}
}

// Close ends the subscription and hands back what is not settled, so that another
// client gets it at once. Later calls do nothing.
func (s *Subscription) Close() error { return s.once() }

func (s *Subscription) close() error {
	pin := s.serverPin() // before our pulls lose their listener
	s.puller.stop()
	s.stop()
	s.helpers.Wait()
	s.bus.nc.RemoveStatusListener(s.closed)
	s.handBack()
	if s.bus.nc.IsClosed() || !s.bus.nc.IsConnected() {
		return nil
	}
	// Another client is to take over at once, and not after PinnedTTL. The server notices
	// only when it is asked about the consumer that nobody listens for our pulls any more.
	// Until then it may have pinned one of them: a pin that is new is ours, or, rarely,
	// that of another client, which then gets a new one.
	if now := s.serverPin(); now != "" && (now != pin || s.puller.hasPin(now)) {
		s.unpin()
	}
	return s.bus.nc.FlushTimeout(time.Second)
}

// serverPin is the pin that the server has given out; empty: none, or it does not say.
func (s *Subscription) serverPin() string {
	if s.config.PriorityGroup == "" {
		return ""
	}
	var info jetstream.ConsumerInfo
	if m, err := s.api("INFO", nil); err != nil || json.Unmarshal(m.Data, &info) != nil {
		return ""
	}
	for _, g := range info.PriorityGroups {
		if g.Group == s.config.PriorityGroup {
			return g.PinnedClientID
		}
	}
	return ""
}

func (s *Subscription) unpin() {
	if _, err := s.api("UNPIN", []byte(`{"group":"`+s.config.PriorityGroup+`"}`)); err != nil {
		s.bus.log.Debug().Err(err).Str("consumer", s.config.Durable).Msg("not unpinned")
	}
}

func (s *Subscription) api(verb string, body []byte) (*nats.Msg, error) {
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	return s.bus.nc.RequestWithContext(ctx, "$JS.API.CONSUMER."+verb+"."+s.config.Stream+"."+s.config.Durable, body)
}
