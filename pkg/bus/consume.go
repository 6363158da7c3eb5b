package bus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Handler works on one message: it publishes its results, then returns.
//
//   - nil: the message is acked, and the ack confirmed;
//   - a TerminalError: OnGiveUp runs, a dead letter is written, then the message is terminated. For Garbage there is
//     no OnGiveUp: a dead letter is written, then the message is deleted, and its subject is free;
//   - an error that is ErrStreamFull: the next stream is full, which is no fault of the message. The handler runs again
//     after a pause; this does not count as a failure;
//   - any other error: the message is delivered again after a pause that grows with its failures. After MaxDeliver
//     failures it is given up (code "exhausted").
//
// A panic counts as a TerminalError with the code panic. When the handler has acknowledged the message itself, its
// result does not matter.
//
// The context carries a logger (zerolog.Ctx) with the message's subject, sequence and
// delivery, and its trace context. It ends DrainTimeout after the context of Consume.
type Handler func(ctx context.Context, m *Message) error

// Consume creates the durable, or uses the one that is there, and calls h for its messages until ctx ends and every
// handler has returned; then it returns nil. It returns an error when the durable cannot be made or the bus is
// closed. It survives lost connections, restarted servers and deleted durables.
func (b *Bus) Consume(ctx context.Context, c ConsumerConfig, h Handler) error {
	p, err := b.newPuller(ctx, c)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer p.end()
	w := &consumer{puller: p, handler: h, shutdown: ctx, fair: newFairness(p.config)}
	return w.run()
}

// consumer is the state of one call of Consume. shutdown ends when it is to stop.
type consumer struct {
	*puller
	handler  Handler
	shutdown context.Context
	fair     *fairness

	slots sync.Mutex
	// busy is how many handlers occupy a slot, outOfSlot how many have left theirs for now (LeaveSlot).
	busy, outOfSlot int
}

// run starts handlers until shutdown ends or the connection is closed. Then it stops pulling and waits for the
// handlers, whose context it ends after DrainTimeout. It returns ErrClosed when the connection was closed, else nil.
func (w *consumer) run() error {
	// Handlers and their heartbeats outlive shutdown while they drain.
	work, stopWork := context.WithCancel(context.WithoutCancel(w.shutdown))
	defer stopWork()
	var handlers sync.WaitGroup
	w.setWanted(w.config.Slots)
	for w.shutdown.Err() == nil {
		if w.bus.nc.IsClosed() {
			stopWork()
			handlers.Wait()
			return w.errClosed()
		}
		select {
		case <-w.shutdown.Done():
		case <-w.closed:
		case <-w.ready:
			w.returnAfterLostPin() // the handlers run on
			w.startHandlers(work, &handlers)
		}
	}
	w.stop()
	late := time.AfterFunc(w.config.DrainTimeout, func() {
		w.log.Warn().Dur("drain_timeout", w.config.DrainTimeout).Msg("handlers still at work are cancelled")
		stopWork()
	})
	defer late.Stop()
	handlers.Wait()
	return nil
}

// startHandlers takes messages from the queue while slots are free, and runs a handler for each in its own goroutine.
// Messages that fairness does not admit, because those like it fail, go back to the server.
func (w *consumer) startHandlers(work context.Context, handlers *sync.WaitGroup) {
	for m := w.takeMessage(); m != nil; m = w.takeMessage() {
		if away := w.fair.admit(m, time.Now()); away > 0 {
			w.nak(m, away)
			w.addBusyHandlers(-1)
			continue
		}
		handlers.Go(func() {
			defer w.addBusyHandlers(-1)
			log := w.log.With().Str("subject", m.Subject).Uint64("stream_seq", m.Seq).Uint64("delivered", m.Delivered)
			ctx := context.WithValue(log.Logger().WithContext(work), consumerKey{}, w)
			t, _ := tracing.Of(m.Header)
			w.handleMessage(tracing.With(ctx, t), m)
		})
	}
}

// takeMessage takes the next message from the queue and a slot for its handler; nil: there is none of either.
func (w *consumer) takeMessage() *Message {
	w.slots.Lock()
	defer w.slots.Unlock()
	if w.busy >= w.config.Slots {
		return nil
	}
	m := w.pop()
	if m != nil {
		w.busy++
	}
	return m
}

// addBusyHandlers adds n to the busy handlers, and has the puller ask for as many messages as slots are free.
func (w *consumer) addBusyHandlers(n int) {
	w.slots.Lock()
	defer w.slots.Unlock()
	w.busy += n
	// when handlers came back to their slots, more may be busy than there are slots
	w.setWanted(max(0, w.config.Slots-w.busy))
	if n < 0 {
		notify(w.ready)
	}
}

type consumerKey struct{}

// pauseForSpace is pause for a publish that waits for space: in a handler, the pause also ends when its consumer
// stops.
func pauseForSpace(ctx context.Context, d time.Duration) error {
	w, ok := ctx.Value(consumerKey{}).(*consumer)
	if !ok {
		return Pause(ctx, d)
	}
	until, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(w.shutdown, stop)()
	return Pause(until, d)
}

// asidePerSlot bounds the handlers that have left their slots, since what they hold is in memory.
const asidePerSlot = 16

// LeaveSlot gives the slot of the handler with this context to another message while the handler waits for a peer
// outside. back takes a slot again, without waiting for a free one. When 16 handlers per slot have left already,
// LeaveSlot does nothing. The message stays in flight.
func LeaveSlot(ctx context.Context) (back func()) {
	w, ok := ctx.Value(consumerKey{}).(*consumer)
	if !ok || !w.countAside(1) {
		return func() {}
	}
	w.addBusyHandlers(-1)
	return sync.OnceFunc(func() {
		w.countAside(-1)
		w.addBusyHandlers(1)
	})
}

// countAside adds n to the handlers that have left their slots. It returns false, and adds nothing, when there are too
// many.
func (w *consumer) countAside(n int) bool {
	w.slots.Lock()
	defer w.slots.Unlock()
	if n > 0 && w.outOfSlot >= asidePerSlot*w.config.Slots {
		return false
	}
	w.outOfSlot += n
	return true
}

// handleMessage runs the handler until its result decides about the message, and acknowledges the message
// accordingly. While the next stream is full it runs the handler again.
func (w *consumer) handleMessage(ctx context.Context, m *Message) {
	defer w.heartbeats.release(m)
	defer w.fair.leave(m)
	log := zerolog.Ctx(ctx)
	for wait := retryMin; ; wait = min(2*wait, retryMax) {
		began, connection := time.Now(), w.bus.nc.Stats().Reconnects
		err := w.call(ctx, m)
		if m.Acknowledged() {
			w.fair.forget(m)
			return
		}
		if err == nil {
			w.fair.succeeded(m)
			w.ack(ctx, m)
			return
		}
		if ctx.Err() != nil {
			log.Info().Err(err).Msg("returned unfinished")
			w.nak(m, returnDelay)
			return
		}
		if !errors.Is(err, ErrStreamFull) {
			_, terminal := errors.AsType[*TerminalError](err)
			failures, hopeless := w.fair.noteFailure(m, time.Since(began), time.Now(), w.bus.wasOutage(err, connection))
			if terminal || hopeless || w.config.MaxDeliver > 0 && failures >= w.config.MaxDeliver {
				w.fair.forget(m)
				w.fair.leave(m) // the work that failed is over
				w.deadLetter(ctx, m, err)
				return
			}
			d := w.config.backoff(failures)
			log.Warn().Err(err).Dur("delay", d).Msg("will be tried again")
			w.nak(m, d)
			return
		}
		if w.bus.waitLog.allow(logEvery) {
			log.Warn().Err(err).Msg("waiting for space")
		}
		if Pause(w.shutdown, wait) != nil {
			w.nak(m, returnDelay)
			return
		}
	}
}

// call runs the handler, unless the message was delivered too often; a panic becomes a terminal error.
func (w *consumer) call(ctx context.Context, m *Message) (err error) {
	if w.config.spent(m) {
		return Terminal(schemas.CodeExhausted, errExhausted)
	}
	defer func() {
		if p := recover(); p != nil {
			err = Terminal(schemas.CodePanic, fmt.Errorf("handler panicked: %v\n%s", p, debug.Stack()))
		}
	}()
	return w.handler(ctx, m)
}

// deadLetter calls OnGiveUp, writes the dead letter, and takes the message off the stream, in this order, so that
// after a crash all of it happens again and nothing is lost. It repeats a part that fails for as long as the process
// runs, since a redelivery would not know the cause.
func (w *consumer) deadLetter(ctx context.Context, m *Message, cause error) {
	log := zerolog.Ctx(ctx)
	log.Error().Err(cause).Str("code", Code(cause)).Msg("given up")
	terminal, _ := errors.AsType[*TerminalError](cause)
	garbage := terminal != nil && terminal.Garbage
	reason := cause.Error()
	for try := 1; ; try++ {
		var err error
		if !garbage {
			err = w.callGiveUpHook(ctx, m, cause)
		}
		if failed, ok := errors.AsType[*TerminalError](err); ok {
			// It would fail each time; so only the letter says it.
			log.Error().Err(err).Msg("the stages after cannot be told")
			reason, err = cause.Error()+"; the stages after were not told: "+failed.Error(), nil
		}
		if err == nil {
			err = w.bus.Dead(ctx, w.config.Service, Code(cause), reason, m)
		}
		if err == nil && garbage {
			err = w.bus.Delete(ctx, m.Stream, m.Seq)
		}
		if err == nil {
			break
		}
		log.Warn().Err(err).Msg("dead letter not written, trying again")
		if ctx.Err() != nil || Pause(w.shutdown, w.config.backoff(try)) != nil {
			w.nak(m, returnDelay)
			return
		}
	}
	if err := m.Term(Code(cause)); err != nil && !errors.Is(err, ErrAcknowledged) {
		log.Warn().Err(err).Msg("not terminated, will come again")
	}
}

// callGiveUpHook calls OnGiveUp of the configuration, if there is one, before the dead letter is written. After an
// error the caller tries again, unless that is a TerminalError, which the letter then names. A panic is only logged:
// it would come each time, and the letter would never be written.
func (w *consumer) callGiveUpHook(ctx context.Context, m *Message, cause error) (err error) {
	if w.config.OnGiveUp == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			zerolog.Ctx(ctx).Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("give-up hook panicked")
			err = nil
		}
	}()
	if err := w.config.OnGiveUp(ctx, m, cause); err != nil {
		return fmt.Errorf("give-up hook: %w", err)
	}
	return nil
}

// ack acknowledges a message and waits for the confirmation, in at most three tries. When all fail, the message comes
// again, which an idempotent handler tolerates.
func (w *consumer) ack(ctx context.Context, m *Message) {
	ctx = context.WithoutCancel(ctx)
	var err error
	for range 3 {
		if err = m.Ack(ctx); err == nil || errors.Is(err, ErrAcknowledged) {
			return
		}
		_ = Pause(ctx, retryMin)
	}
	zerolog.Ctx(ctx).Warn().Err(err).Msg("ack not confirmed, may come again")
}

func (w *consumer) nak(m *Message, d time.Duration) {
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, ErrAcknowledged) {
		w.log.Debug().Err(err).Uint64("stream_seq", m.Seq).Msg("not returned, comes again after the ack wait")
	}
}

// RedeliverAll makes the server deliver again, at once, all messages that the contract's durables have in flight, and
// returns how many there were. A process that replaces a dead one calls it; otherwise they come after AckWait. A
// client that is alive goes on with its messages, so some work may be done twice.
//
// It sends a negative acknowledgement for each delivery (NATS ADR-15), so the deliveries count: a message that kills
// its process is still given up.
func (b *Bus) RedeliverAll(ctx context.Context) (int, error) {
	redelivered := 0
	err := b.retryWhileAway(ctx, func(ctx context.Context) error {
		redelivered = 0
		for _, spec := range schemas.Streams() {
			s, err := b.js.Stream(ctx, spec.Name)
			if err != nil {
				return fmt.Errorf("redeliver work of %s: %w", spec.Name, err)
			}
			consumers, err := b.consumersOf(ctx, s)
			if err != nil {
				return fmt.Errorf("redeliver work of %s: %w", spec.Name, err)
			}
			for _, c := range consumers {
				if c.Config.Durable == "" || c.NumAckPending == 0 {
					continue
				}
				for seq := c.AckFloor.Stream + 1; seq <= c.Delivered.Stream; seq++ {
					// $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>;
					// the server ignores messages that are not in flight.
					subject := fmt.Sprintf("$JS.ACK.%s.%s.1.%d.%d.%d.0", spec.Name, c.Name, seq, c.Delivered.Consumer,
						time.Now().UnixNano())
					if err := b.nc.Publish(subject, []byte(ackNak)); err != nil {
						return fmt.Errorf("redeliver work of %s: %w", c.Name, err)
					}
				}
				redelivered += c.NumAckPending
			}
		}
		ctx, stop := context.WithTimeout(ctx, apiTimeout)
		defer stop()
		return b.nc.FlushWithContext(ctx)
	})
	return redelivered, err
}

const (
	// shortestTurn and longestTurn bound how long a message stays away that was returned in favour of others. Between
	// them it is as long as the others have worked already: they may work for hours.
	// leastPace is the least time that a try counts for, with its acknowledgement.
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
	leastPace    = 5 * time.Millisecond
	// maxFailed bounds what is kept of failures: a message that failed here may be finished by another process, and
	// this one does not learn of it.
	maxFailed = 10_000
)

// fairness keeps failing messages from taking the slots of the others. A family of messages (ConsumerConfig.Families)
// is suspect from a failure on until one of its messages succeeds. Of an innermost suspect family, one message is
// tried at a time, and all suspects together get half of the slots. The others go back to the server, which delivers
// them again one after the other. One that has come often is let in all the same: the server stops delivering it at
// its limit, and without a word.
type fairness struct {
	config ConsumerConfig

	mu sync.Mutex
	// failed counts the failures of messages in this process, by stream sequence.
	failed map[uint64]int
	// working are the messages that handlers work on.
	working  map[*Message]try
	suspects map[string]*suspect
	// pace is the smoothed duration of a failing try.
	pace time.Duration
}

// try is a handler's work on a message: since when, and the message's families.
type try struct {
	since    time.Time
	families []string
}

type suspect struct {
	since time.Time // when its first failure was
	turn  time.Time // when the last of the returned messages may come again
}

func newFairness(c ConsumerConfig) *fairness {
	return &fairness{
		config: c, failed: map[uint64]int{}, working: map[*Message]try{}, suspects: map[string]*suspect{},
		pace: leastPace,
	}
}

func (f *fairness) innermostSuspect(families []string) string {
	for i := len(families) - 1; i >= 0; i-- {
		if f.suspects[families[i]] != nil {
			return families[i]
		}
	}
	return ""
}

// admit lets a message in and returns 0, or returns for how long the message must go back to the server: messages of
// its family have failed, and those that are at work fill the slots for suspects.
func (f *fairness) admit(m *Message, now time.Time) (away time.Duration) {
	if f.config.Families == nil {
		return 0
	}
	families := f.config.Families(m)
	f.mu.Lock()
	defer f.mu.Unlock()
	if name := f.innermostSuspect(families); name != "" {
		all, same, last := 0, 0, time.Time{} // last is when the last of them began
		for _, other := range f.working {
			switch f.innermostSuspect(other.families) {
			case "":
				continue
			case name:
				same++
			}
			all++
			if other.since.After(last) {
				last = other.since
			}
		}
		inner := name == families[len(families)-1]
		if (all >= max(1, f.config.Slots/2) || inner && same > 0) && !f.config.cameOften(m) {
			return max(shortestTurn, min(now.Sub(last), longestTurn), f.suspects[name].nextTurn(now, f.pace))
		}
	}
	f.working[m] = try{now, families}
	return 0
}

// nextTurn returns for how long a message of the suspect family goes back to the server: each one comes a pace after
// the one before.
func (s *suspect) nextTurn(now time.Time, pace time.Duration) time.Duration {
	if s.turn.Before(now) {
		s.turn = now
	}
	s.turn = s.turn.Add(pace)
	if limit := now.Add(longestTurn); s.turn.After(limit) {
		s.turn = limit
	}
	d := s.turn.Sub(now)
	return d - rand.N(d/8+1)
}

func (f *fairness) leave(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.working, m)
}

func (f *fairness) forget(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.failed, m.Seq)
}

func (f *fairness) succeeded(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.failed, m.Seq)
	for _, name := range f.working[m].families {
		delete(f.suspects, name)
	}
}

// noteFailure counts one more failure of a message in this process, after a try that lasted took, and makes its
// families suspect. An outage of the server says nothing about them. It returns how many failures there were. hopeless
// means that the innermost family has failed for as long as all tries of one message take. Then the first failure of
// each of its messages is the last; otherwise a family of a thousand messages would be tried thousands of times.
func (f *fairness) noteFailure(m *Message, took time.Duration, now time.Time, outage bool) (n int, hopeless bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.failed) >= maxFailed {
		clear(f.failed) // a few more tries are better than memory that grows without end
	}
	f.failed[m.Seq]++
	n = f.failed[m.Seq]
	families := f.working[m].families
	if outage || len(families) == 0 {
		return n, false
	}
	f.pace += (max(took, leastPace) - f.pace) / 8
	if len(f.suspects) >= maxFailed {
		clear(f.suspects)
	}
	for _, name := range families {
		if f.suspects[name] == nil {
			f.suspects[name] = &suspect{since: now}
		}
	}
	first := f.suspects[families[len(families)-1]].since
	return n, f.config.MaxDeliver > 0 && now.Sub(first) > f.config.retrySpan()
}
