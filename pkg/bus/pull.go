package bus

import (
	"context"
	"encoding/json"
	"errors"
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
	// pullBytes bounds one pull request, pullBytesTotal all of them: the server disconnects a client with more than
	// 64 MiB on the way.
	pullBytes      = 16 << 20
	pullBytesTotal = 48 << 20
	// rebindPause is the pause before a failed call about a consumer is tried again.
	rebindPause = 250 * time.Millisecond
	// returnDelay delays a returned message, so that it does not go to a replica that is about to stop.
	returnDelay = 20 * time.Millisecond
)

// puller asks the server for messages, never for more than handlers are free (NATS ADR-37). The client library cannot
// do that: it counts a message as handled when its callback returns, and prefetches as many again into a buffer,
// where AckWait runs.
type puller struct {
	nc      *nats.Conn
	log     zerolog.Logger
	subject string // of pull requests
	inbox   string // of messages and statuses, up to the request's number
	group   string // priority group; empty: none
	expires time.Duration
	beat    time.Duration
	// rebind creates the durable again when it is gone.
	rebind func(ctx context.Context) error
	sub    *nats.Subscription
	// heartbeats holds messages from their arrival on, also while they wait in the queue.
	heartbeats *heartbeats

	// ready has space for one token; it is there when the queue may have become non-empty.
	ready chan struct{}
	// fault has space for one token; it is there when something is to be repaired.
	fault chan struct{}

	mu        sync.Mutex
	wanted    int // how many messages to have: requested, on the way or in the queue
	requested int // requested and not received
	// requestedBytes is an upper bound of the bytes that may come for the open requests; maxBytes is the bound of one
	// request.
	requestedBytes int
	maxBytes       int
	requests       map[uint64]request
	next           uint64
	queue          []*Message
	pin            string
	pinLost        bool
	broken         bool // no pulls until it is repaired
	stopped        bool
	heard          time.Time // last sign of the server
}

// request is an open pull request: how many messages and bytes it asked for.
type request struct {
	batch, bytes int
	sent         time.Time
}

// pullRequest is the body of a pull request.
type pullRequest struct {
	Expires   time.Duration `json:"expires"`
	Batch     int           `json:"batch"`
	MaxBytes  int           `json:"max_bytes"`
	Heartbeat time.Duration `json:"idle_heartbeat"`
	Group     string        `json:"group,omitempty"`
	PinID     string        `json:"id,omitempty"`
}

// newPuller returns a puller, which asks the server for messages of a durable and queues them; setWanted makes it
// ask. rebind repairs the durable. stop ends it. It fails when the connection is closed.
func (b *Bus) newPuller(c ConsumerConfig, rebind func(context.Context) error) (*puller, error) {
	p := &puller{
		nc: b.nc, log: b.log.With().Str("consumer", c.Name).Logger(),
		subject: "$JS.API.CONSUMER.MSG.NEXT." + c.Stream + "." + c.Name,
		inbox:   b.nc.NewInbox() + ".", group: c.PriorityGroup, expires: pullExpires,
		rebind: rebind, heartbeats: newHeartbeats(), ready: make(chan struct{}, 1), fault: make(chan struct{}, 1),
		requests: map[uint64]request{},
		// A request with fewer bytes than the next message has gets no message.
		maxBytes: max(pullBytes, 2*int(b.nc.MaxPayload())),
	}
	if c.PriorityGroup != "" {
		// The server unpins a client that has not asked for PinnedTTL.
		p.expires = min(p.expires, max(c.PinnedTTL/2, 100*time.Millisecond))
	}
	p.beat = min(p.expires/2, 5*time.Second)
	sub, err := b.nc.Subscribe(p.inbox+"*", p.receive)
	if err != nil {
		return nil, err
	}
	p.sub = sub
	return p, nil
}

// idle reports whether the queue is empty.
func (p *puller) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.queue) == 0
}

// setWanted sets how many messages may be requested, on the way or in the queue, and asks for those that are missing.
func (p *puller) setWanted(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wanted = n
	p.requestMore()
}

// requestMore requests the messages that are missing, once there are enough of them for a request. The caller holds
// the lock.
func (p *puller) requestMore() {
	need := p.wanted - p.requested - len(p.queue)
	if p.requested == 0 {
		p.requestedBytes = 0 // the server does not say when a request has been filled
	} else if need < (p.wanted+1)/2 || p.requestedBytes+p.maxBytes > pullBytesTotal {
		return
	}
	if need < 1 || p.broken || p.stopped {
		return
	}
	p.next++
	body, err := json.Marshal(pullRequest{
		Expires: p.expires, Batch: need, MaxBytes: p.maxBytes, Heartbeat: p.beat, Group: p.group, PinID: p.pin,
	})
	if err == nil {
		err = p.nc.PublishRequest(p.subject, p.inbox+strconv.FormatUint(p.next, 10), body)
	}
	if err != nil {
		p.suspend() // the connection is lost; watch asks again
		return
	}
	now := time.Now()
	for id, r := range p.requests {
		if now.Sub(r.sent) > 2*p.expires {
			delete(p.requests, id) // filled long ago
		}
	}
	p.requests[p.next] = request{batch: need, bytes: p.maxBytes, sent: now}
	p.requested += need
	p.requestedBytes += p.maxBytes
	p.heard = now
}

// suspend stops pulling until repair has mended the durable. The caller holds the lock.
func (p *puller) suspend() {
	p.broken, p.requested = true, 0
	clear(p.requests)
	notify(p.fault)
}

// notify puts a token into c if there is none.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// receive handles all that comes on the subscription, messages and statuses, in order.
func (p *puller) receive(m *nats.Msg) {
	if strings.HasPrefix(m.Reply, "$JS.ACK.") {
		p.queueMessage(m)
		return
	}
	p.handleStatus(m)
}

// queueMessage adds a delivered message to the queue, unless another delivery of it is at work, and asks for more.
func (p *puller) queueMessage(m *nats.Msg) {
	out, err := parseDelivery(p.nc, m)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = time.Now()
	p.requested = max(0, p.requested-1)
	p.requestedBytes = max(0, p.requestedBytes-m.Size())
	if p.requested == 0 || p.requestedBytes+p.maxBytes <= pullBytesTotal {
		defer p.requestMore() // requests that waited for free bytes
	}
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
	if !p.heartbeats.add(out) {
		return // the handler of the first delivery goes on
	}
	p.queue = append(p.queue, out)
	notify(p.ready)
}

// handleStatus handles the server's status for a pull request: the request has ended, so what it still had open is
// subtracted, and more is requested. A status that means trouble suspends the puller until repair has asked again.
func (p *puller) handleStatus(m *nats.Msg) {
	code, description := m.Header.Get(headerStatus), m.Header.Get(headerDescription)
	id, _ := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 10, 64)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = time.Now()
	if code == "100" {
		return // heartbeat
	}
	r, known := p.requests[id]
	if !known {
		return // the request was given up
	}
	delete(p.requests, id)
	// Without these headers no message of the request has come.
	left, bytes := r.batch, r.bytes
	if n, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages")); err == nil {
		left = n
	}
	if n, err := strconv.Atoi(m.Header.Get("Nats-Pending-Bytes")); err == nil {
		bytes = n
	}
	p.requested = max(0, p.requested-left)
	p.requestedBytes = max(0, p.requestedBytes-bytes)
	switch code {
	case "404", "408":
	case "423": // another client has been pinned, or none
		p.pinLost = p.pinLost || p.pin != ""
		p.pin = ""
		notify(p.ready)
	case "409":
		if description == "Batch Completed" {
			break
		}
		if strings.HasPrefix(description, "Message Size") {
			if left == r.batch && p.maxBytes < pullBytesTotal {
				p.maxBytes *= 2 // the message was stored when the server allowed larger ones
			}
			break
		}
		p.log.Debug().Str("status", description).Msg("pull ended")
		p.suspend()
		return
	case statusNoResponders: // no answer: the stream or the consumer is away
		p.suspend()
		return
	default:
		p.log.Error().Str("status", code+" "+description).Msg("pull refused")
		p.suspend()
		return
	}
	p.requestMore()
}

// repair repairs, in the background until ctx ends, what receiving messages cannot: a durable that is gone, a server
// that was restarted or does not answer.
func (p *puller) repair(ctx context.Context) {
	connected := p.nc.StatusChanged(nats.CONNECTED)
	defer p.nc.RemoveStatusListener(connected)
	tick := time.NewTicker(p.beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-connected: // the server has forgotten our requests
			p.mu.Lock()
			p.suspend()
			p.mu.Unlock()
		case <-tick.C:
			p.mu.Lock()
			if p.requested > 0 && time.Since(p.heard) > 2*p.beat+time.Second {
				p.suspend()
			}
			p.mu.Unlock()
		case <-p.fault:
			if pause(ctx, rebindPause) != nil {
				return
			}
			err := p.rebind(ctx)
			p.mu.Lock()
			if err == nil {
				p.broken = false
				p.requestMore()
			} else {
				notify(p.fault)
			}
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
			return m
		}
	}
	return nil
}

// lostPin reports whether another client has got the pin since the last call.
func (p *puller) lostPin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	lost := p.pinLost
	p.pinLost = false
	return lost
}

// hasPin reports whether pin is the one of this client.
func (p *puller) hasPin(pin string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pin == pin
}

// stop ends the pulls and returns the messages that no handler has got to the server. It waits up to a second for
// messages that the server has sent already.
func (p *puller) stop() {
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
