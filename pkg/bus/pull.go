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
	// pullBytes bounds one pull request, pullBytesTotal all of them: a client with more
	// than 64 MiB on the way is cut off by the server.
	pullBytes      = 16 << 20
	pullBytesTotal = 48 << 20
	// rebindPause is the pause before the consumer is looked for again.
	rebindPause = 250 * time.Millisecond
	// handBackDelay keeps a message that was handed back from returning to a replica
	// that is on its way out.
	handBackDelay = 20 * time.Millisecond
)

// puller asks the server for messages, never for more than there is room for
// (NATS ADR-37). The client library's own pulling has no such exact bound: it counts
// a message as taken when its callback returns, and keeps as many again in a buffer,
// where AckWait runs.
type puller struct {
	nc      *nats.Conn
	log     zerolog.Logger
	subject string // of pull requests
	inbox   string // of messages and statuses, up to the request's number
	group   string // priority group; empty: none
	expires time.Duration
	beat    time.Duration
	// rebind makes the durable again when it has gone.
	rebind func(ctx context.Context) error
	sub    *nats.Subscription
	// heartbeats holds messages from their arrival on, those in the queue too.
	heartbeats *heartbeats

	// ready has room for one token; it is there when the queue may have become non-empty.
	ready chan struct{}
	// fault has room for one token; it is there when the watch has something to mend.
	fault chan struct{}

	mu    sync.Mutex
	room  int // messages wanted: asked for, on the way or in the queue
	asked int // asked for and not come
	// askedBytes is an upper bound of what may come for that; maxBytes is asked for at once.
	askedBytes int
	maxBytes   int
	requests   map[uint64]request
	next       uint64
	queue      []*Message
	pin        string
	pinLost    bool
	broken     bool // no pulls until the watch has mended it
	stopped    bool
	heard      time.Time // last sign of the server
}

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

func (b *Bus) newPuller(c ConsumerConfig, rebind func(context.Context) error) (*puller, error) {
	p := &puller{
		nc: b.nc, log: b.log.With().Str("consumer", c.Durable).Logger(),
		subject: "$JS.API.CONSUMER.MSG.NEXT." + c.Stream + "." + c.Durable,
		inbox:   b.nc.NewInbox() + ".", group: c.PriorityGroup, expires: pullExpires,
		rebind: rebind, heartbeats: newHeartbeats(), ready: make(chan struct{}, 1), fault: make(chan struct{}, 1), requests: map[uint64]request{},
		// A request for fewer bytes than the next message has would get none.
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

// idle says whether no message waits in the queue.
func (p *puller) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.queue) == 0
}

// setRoom says how many messages may be asked for, on the way or waiting in the queue.
func (p *puller) setRoom(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room = n
	p.refill()
}

// refill asks for what there is room for, once that is worth a request. Lock held.
func (p *puller) refill() {
	need := p.room - p.asked - len(p.queue)
	if p.asked == 0 {
		p.askedBytes = 0 // the server does not say when a request has been filled
	} else if need < (p.room+1)/2 || p.askedBytes+p.maxBytes > pullBytesTotal {
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
		p.fail() // the connection is away; the watch asks again
		return
	}
	now := time.Now()
	for id, r := range p.requests {
		if now.Sub(r.sent) > 2*p.expires {
			delete(p.requests, id) // filled long ago
		}
	}
	p.requests[p.next] = request{batch: need, bytes: p.maxBytes, sent: now}
	p.asked += need
	p.askedBytes += p.maxBytes
	p.heard = now
}

// fail stops pulling until the watch has looked after it. Lock held.
func (p *puller) fail() {
	p.broken, p.asked = true, 0
	clear(p.requests)
	notify(p.fault)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// receive runs on the subscription's goroutine: messages and statuses in order.
func (p *puller) receive(m *nats.Msg) {
	if strings.HasPrefix(m.Reply, "$JS.ACK.") {
		p.message(m)
		return
	}
	p.status(m)
}

func (p *puller) message(m *nats.Msg) {
	out, err := delivered(p.nc, m)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard = time.Now()
	p.asked = max(0, p.asked-1)
	p.askedBytes = max(0, p.askedBytes-m.Size())
	if p.asked == 0 || p.askedBytes+p.maxBytes <= pullBytesTotal {
		defer p.refill() // what the bytes had held up
	}
	if err != nil {
		p.log.Error().Err(err).Msg("message without metadata skipped")
		return
	}
	if out.Delivered == 1 && len(m.Data) == 0 && m.Header.Get(nats.MsgSize) != "" {
		// Somebody may have set the durable to send headers alone, and a handler would refuse that. The message comes again:
		// from the durable made anew, or, where it is stored so, after AckWait.
		p.fail()
		return
	}
	if pin := m.Header.Get("Nats-Pin-Id"); pin != "" {
		p.pin = pin
	}
	if !p.heartbeats.hold(out) {
		return // whoever has the first delivery goes on
	}
	p.queue = append(p.queue, out)
	notify(p.ready)
}

func (p *puller) status(m *nats.Msg) {
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
		return // of a request that was given up
	}
	delete(p.requests, id)
	// A request that was never served ends with all of its messages outstanding.
	left, bytes := r.batch, r.bytes
	if n, err := strconv.Atoi(m.Header.Get("Nats-Pending-Messages")); err == nil {
		left = n
	}
	if n, err := strconv.Atoi(m.Header.Get("Nats-Pending-Bytes")); err == nil {
		bytes = n
	}
	p.asked = max(0, p.asked-left)
	p.askedBytes = max(0, p.askedBytes-bytes)
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
				p.maxBytes *= 2 // stored when the server took larger messages
			}
			break
		}
		p.log.Debug().Str("status", description).Msg("pull ended")
		p.fail()
		return
	case statusNoServer: // nobody answers: the stream or the consumer is away
		p.fail()
		return
	default:
		p.log.Error().Str("status", code+" "+description).Msg("pull refused")
		p.fail()
		return
	}
	p.refill()
}

// watch mends what receive cannot: a consumer that has gone, a server that has been
// restarted or does not answer. It ends with ctx.
func (p *puller) watch(ctx context.Context) {
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
			p.fail()
			p.mu.Unlock()
		case <-tick.C:
			p.mu.Lock()
			if p.asked > 0 && time.Since(p.heard) > 2*p.beat+time.Second {
				p.fail()
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
				p.refill()
			} else {
				notify(p.fault)
			}
			p.mu.Unlock()
		}
	}
}

// pop takes the next message off the queue; nil when it is empty. Messages that were
// handed back while they waited are skipped.
func (p *puller) pop() *Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) > 0 {
		m := p.queue[0]
		p.queue[0] = nil
		if p.queue = p.queue[1:]; len(p.queue) == 0 {
			p.queue = nil
		}
		if !m.Settled() {
			return m
		}
	}
	return nil
}

// lostPin says, once, that the pin went to another client.
func (p *puller) lostPin() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	lost := p.pinLost
	p.pinLost = false
	return lost
}

// hasPin says whether pin is this client's.
func (p *puller) hasPin(pin string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pin == pin
}

// stop ends the pulls and hands back what came and nobody took. It waits, a second at
// most, for what the server had sent already.
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
		_ = m.NakWithDelay(handBackDelay) // lost, it comes again after AckWait
	}
}
