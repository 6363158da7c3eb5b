package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
)

const (
	// pullExpires is how long the server keeps a pull request that it cannot fill.
	pullExpires = 30 * time.Second
	// pullBytes bounds what one pull request brings: the server disconnects a client with more than 64 MiB on the way.
	pullBytes = 48 << 20
	// rebindPause is the pause before a failed call about a consumer is tried again.
	rebindPause = 250 * time.Millisecond
	// returnDelay delays a returned message, so that it does not go to a replica that is about to stop.
	returnDelay = 20 * time.Millisecond
	notReady    = "consumer not ready"
)

// puller asks the server for messages of a durable, for Consume and Subscription, and never for more than are wanted
// (NATS ADR-37). The client library cannot do that: it counts a message as handled when its callback returns, and
// prefetches as many again into a buffer, where AckWait runs.
//
// One request is open at a time. While there are messages, the next request asks for all that became free meanwhile;
// while there are none, one is enough to learn of the first.
type puller struct {
	bus        *Bus
	config     ConsumerConfig
	log        zerolog.Logger
	durable    *durable
	heartbeats *heartbeats // has messages from their arrival on, also while they are in the queue

	subject       string // of pull requests
	inbox         string // of messages and statuses, up to the request's number
	expires, beat time.Duration
	sub           *nats.Subscription
	closed        chan nats.Status // receives when the connection is closed

	helpers             sync.WaitGroup
	stopPulls, stopBeat context.CancelFunc

	// ready has space for one token; it is there when the queue may have become non-empty. fault has one when
	// something is to be repaired.
	ready, fault chan struct{}

	mu      sync.Mutex
	wanted  int    // how many messages to have: on the way or in the queue
	left    int    // how many the open request may still bring; 0: none is open
	request uint64 // its number
	queue   []*Message
	pin     string
	pinLost bool
	broken  bool // no pulls until it is repaired
	stopped bool
	heard   time.Time // last sign of the server
}

type pullRequest struct {
	Expires   time.Duration `json:"expires"`
	Batch     int           `json:"batch"`
	MaxBytes  int           `json:"max_bytes"`
	Heartbeat time.Duration `json:"idle_heartbeat"`
	Group     string        `json:"group,omitempty"`
	PinID     string        `json:"id,omitempty"`
}

// newPuller creates the durable, or uses the one that is there, and returns its puller; setWanted makes it ask. stop
// ends the requests, and end the heartbeats of messages that are still worked on.
func (b *Bus) newPuller(ctx context.Context, c ConsumerConfig) (*puller, error) {
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	d := &durable{bus: b, config: c}
	if err := b.retryUntilReady(ctx, c.Stream, notReady, d.createOrUpdate); err != nil {
		return nil, err
	}
	p := &puller{
		bus: b, config: c, durable: d, log: b.log.With().Str("consumer", c.Name).Logger(), heartbeats: newHeartbeats(),
		subject: b.api + "CONSUMER.MSG.NEXT." + c.Stream + "." + c.Name, inbox: b.nc.NewInbox() + ".",
		expires: pullExpires, ready: make(chan struct{}, 1), fault: make(chan struct{}, 1),
		closed: b.nc.StatusChanged(nats.CLOSED),
	}
	if c.PriorityGroup != "" { // the server unpins a client that has not asked for PinnedTTL
		p.expires = min(p.expires, max(c.PinnedTTL/2, 100*time.Millisecond))
	}
	p.beat = min(p.expires/2, 5*time.Second)
	if p.sub, err = b.nc.Subscribe(p.inbox+"*", p.receive); err != nil {
		b.nc.RemoveStatusListener(p.closed)
		return nil, fmt.Errorf("consume %q of %s: %w", c.Name, c.Stream, closedError(err))
	}
	beating, stopBeat := context.WithCancel(context.WithoutCancel(ctx))
	pulling, stopPulls := context.WithCancel(beating)
	p.stopBeat, p.stopPulls = stopBeat, stopPulls
	p.helpers.Go(func() { p.heartbeats.run(beating, c.AckWait) })
	p.helpers.Go(func() { p.repair(pulling) })
	p.helpers.Go(func() { d.checkRegularly(pulling, p.check) })
	return p, nil
}

func (p *puller) errClosed() error {
	return fmt.Errorf("consume %q of %s: %w", p.config.Name, p.config.Stream, ErrClosed)
}

func (p *puller) isIdle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.queue) == 0
}

func (p *puller) setWanted(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = n
	p.requestMore()
}

// requestMore asks for the messages that are missing, if no request is open and they are enough for one. The caller
// holds the lock.
func (p *puller) requestMore() {
	need := p.wanted - len(p.queue)
	if p.left > 0 || need < max(1, (p.wanted+1)/2) || p.broken || p.stopped {
		return
	}
	p.request++
	body, err := json.Marshal(pullRequest{
		Expires: p.expires, Batch: need, MaxBytes: max(pullBytes, 2*int(p.bus.nc.MaxPayload())), Heartbeat: p.beat,
		Group: p.config.PriorityGroup, PinID: p.pin,
	})
	if err == nil {
		err = p.bus.nc.PublishRequest(p.subject, p.inbox+strconv.FormatUint(p.request, 10), body)
	}
	if err != nil {
		p.suspend() // the connection is lost
		return
	}
	p.left, p.heard = need, time.Now()
}

// suspend stops pulling until repair has mended the durable. The caller holds the lock.
func (p *puller) suspend() {
	p.broken, p.left = true, 0
	notify(p.fault)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// receive handles all that comes on the subscription, messages and statuses, in order.
func (p *puller) receive(m *nats.Msg) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = time.Now()
	if strings.HasPrefix(m.Reply, "$JS.ACK.") {
		p.queueMessage(m)
	} else {
		p.handleStatus(m)
	}
}

// queueMessage adds a delivered message to the queue, unless another delivery of it is at work. The caller holds the
// lock.
func (p *puller) queueMessage(m *nats.Msg) {
	if p.left > 0 {
		p.left--
	}
	out, err := parseDelivery(p.bus.nc, m)
	if err != nil {
		p.log.Error().Err(err).Msg("message without metadata skipped")
		return
	}
	if out.Delivered == 1 && len(m.Data) == 0 && m.Header.Get(nats.MsgSize) != "" {
		// The durable may have been set to send headers only, and a handler would refuse the message. repair mends the
		// durable, and the message comes again; if it really is stored empty, it comes after AckWait.
		p.suspend()
		return
	}
	if pin := m.Header.Get("Nats-Pin-Id"); pin != "" {
		p.pin = pin
	}
	if p.heartbeats.add(out) {
		p.queue = append(p.queue, out)
		notify(p.ready)
	}
	p.requestMore()
}

// handleStatus handles the server's status for a pull request: the request has ended, and the next one is sent. A
// status that means trouble suspends the puller until repair has asked again. The caller holds the lock.
func (p *puller) handleStatus(m *nats.Msg) {
	code, description := m.Header.Get(headerStatus), m.Header.Get(headerDescription)
	id, _ := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 10, 64)
	if code == "100" || id != p.request || p.broken { // a heartbeat, or of a request that was given up
		return
	}
	p.left = 0
	switch code {
	case "404", "408":
	case "423": // another client has been pinned, or none
		p.losePin()
	case "409":
		if description != "Batch Completed" && !strings.HasPrefix(description, "Message Size") {
			p.log.Debug().Str("status", description).Msg("pull ended")
			p.suspend()
		}
	case statusNoResponders: // no answer: the stream or the consumer is away
		p.suspend()
	default:
		p.log.Error().Str("status", code+" "+description).Msg("pull refused")
		p.suspend()
	}
	p.requestMore()
}

// losePin notes that another client has been pinned, or none. The caller holds the lock.
func (p *puller) losePin() {
	p.pinLost = p.pinLost || p.pin != ""
	p.pin = ""
	notify(p.ready)
}

// check checks the durable, and whether this client still has the pin (NATS ADR-42). The server says that it has not
// only when there is a message to deliver, or when another client is pinned. Two clients that both lost their pin, as
// in a change of leader, would else keep their parts of a group until the next message comes.
func (p *puller) check(ctx context.Context) error {
	p.mu.Lock()
	pin := p.pin
	p.mu.Unlock()
	err := p.durable.createOrUpdate(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && pin == p.pin && pin != p.durable.pinned() {
		p.losePin()
	}
	return err
}

// repair repairs, in the background until ctx ends, what receiving messages cannot: a durable that is gone, a server
// that was restarted or does not answer.
func (p *puller) repair(ctx context.Context) {
	connected := p.bus.nc.StatusChanged(nats.CONNECTED)
	defer p.bus.nc.RemoveStatusListener(connected)
	tick := time.NewTicker(p.beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-connected: // the server has forgotten our request
			p.mu.Lock()
			p.suspend()
			p.mu.Unlock()
		case <-tick.C:
			p.mu.Lock()
			if p.left > 0 && time.Since(p.heard) > 2*p.beat+time.Second {
				p.suspend()
			}
			p.mu.Unlock()
		case <-p.fault:
			if Pause(ctx, rebindPause) != nil {
				return
			}
			err := p.bus.retryUntilReady(ctx, p.config.Stream, notReady, p.check)
			p.mu.Lock()
			if p.broken = err != nil; p.broken {
				notify(p.fault)
			}
			p.requestMore()
			p.mu.Unlock()
		}
	}
}

// pop removes the next message from the queue and returns it; nil when the queue is empty. It skips messages that
// were returned to the server while they waited. One message fewer is wanted then: with any time between the two,
// another one would be requested in the place of a message whose handler is about to start, and wait behind it.
func (p *puller) pop() *Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) > 0 {
		m := p.queue[0]
		p.queue[0] = nil
		if p.queue = p.queue[1:]; len(p.queue) == 0 {
			p.queue = nil
		}
		if !m.Acknowledged() {
			p.wanted = max(0, p.wanted-1)
			p.requestMore()
			return m
		}
	}
	return nil
}

// returnAfterLostPin returns all messages to the server when another client has got the pin since the last call, and
// reports whether it has: the messages are for that client now.
func (p *puller) returnAfterLostPin() bool {
	p.mu.Lock()
	lost := p.pinLost
	p.pinLost = false
	p.mu.Unlock()
	if lost {
		p.heartbeats.returnAll()
	}
	return lost
}

func (p *puller) hasPin(pin string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pin == pin
}

// stop ends the pulls and returns the messages that no handler has got to the server. It waits up to a second for
// messages that the server has sent already.
func (p *puller) stop() {
	p.stopPulls()
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	gone := make(chan struct{})
	p.sub.SetClosedHandler(func(string) { close(gone) })
	if err := p.sub.Drain(); err == nil {
		select {
		case <-gone:
		case <-time.After(time.Second):
		}
	} else if !errors.Is(err, nats.ErrConnectionClosed) {
		_ = p.sub.Unsubscribe() // reconnecting: the server has forgotten us anyway
	}
	for m := p.pop(); m != nil; m = p.pop() {
		_ = m.NakWithDelay(returnDelay) // if this is lost, it comes again after AckWait
	}
}

func (p *puller) end() {
	p.stopBeat()
	p.helpers.Wait()
	p.bus.nc.RemoveStatusListener(p.closed)
}

// heartbeats tell the server that messages are still worked on: one goroutine for all
// messages in flight, every third of AckWait.
type heartbeats struct {
	mu       sync.Mutex
	messages map[uint64]*Message // by stream sequence
}

func newHeartbeats() *heartbeats { return &heartbeats{messages: map[uint64]*Message{}} }

// add adds a message to those that get heartbeats, and returns true. It returns false when a delivery of the message
// is there already (it came again because heartbeats were lost): the first handler goes on, and the server accepts an
// ack of any delivery.
func (h *heartbeats) add(m *Message) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.messages[m.Seq]; ok {
		return false
	}
	h.messages[m.Seq] = m
	m.heartbeats = h
	return true
}

func (h *heartbeats) release(m *Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.messages[m.Seq] == m {
		delete(h.messages, m.Seq)
	}
}

// all returns the messages that get heartbeats: those that were delivered and are not acknowledged.
func (h *heartbeats) all() []*Message {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*Message, 0, len(h.messages))
	for _, m := range h.messages {
		out = append(out, m)
	}
	return out
}

// returnAll returns all held messages to the server. One whose return is lost comes again after AckWait.
func (h *heartbeats) returnAll() {
	for _, m := range h.all() {
		_ = m.NakWithDelay(returnDelay)
	}
}

// run sends heartbeats for all messages, every third of ackWait, until ctx ends.
func (h *heartbeats) run(ctx context.Context, ackWait time.Duration) {
	tick := time.NewTicker(max(ackWait/3, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, m := range h.all() {
				if !m.Acknowledged() {
					_ = m.InProgress() // a lost heartbeat means a redelivery, which is harmless
				}
			}
		case <-ctx.Done():
			return
		}
	}
}
