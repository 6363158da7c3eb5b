package bus

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

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
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	d := &durable{bus: b, config: c}
	if err := d.createWhenReady(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	p, err := b.newPuller(c, d.createWhenReady)
	if err != nil {
		return fmt.Errorf("consume %q of %s: %w", c.Name, c.Stream, closedError(err))
	}
	w := &consumer{
		bus: b, config: c, handler: h, durable: d, puller: p, heartbeats: p.heartbeats,
		failed: map[uint64]int{}, fair: newFairness(c),
		log: b.log.With().Str("consumer", c.Name).Logger(),
	}
	return w.run(ctx)
}

// consumer is the state of one call of Consume.
type consumer struct {
	bus        *Bus
	config     ConsumerConfig
	handler    Handler
	durable    *durable
	puller     *puller
	heartbeats *heartbeats
	log        zerolog.Logger

	mu sync.Mutex
	// busy is how many handlers occupy a slot.
	busy int
	// outOfSlot is how many handlers have left their slots for now (LeaveSlot).
	outOfSlot int
	// failed counts the failures of messages in this process, by stream sequence.
	failed map[uint64]int
	fair   *fairness
}

// maxFailed bounds failed: a message that failed here may be finished by another process, and this one does not learn
// of it.
const maxFailed = 10_000

// run starts handlers for Consume until ctx ends or the connection is closed. Then it stops pulling and waits for the
// handlers, whose context it ends after DrainTimeout. It returns ErrClosed when the connection was closed, else nil.
func (w *consumer) run(ctx context.Context) error {
	// Handlers and their heartbeats outlive ctx while they drain.
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	live, stopLive := context.WithCancel(context.WithoutCancel(ctx))
	watch, stopWatch := context.WithCancel(ctx)
	var helpers, handlers sync.WaitGroup
	helpers.Go(func() { w.heartbeats.run(live, w.config.AckWait) })
	helpers.Go(func() { w.puller.repair(watch) })
	helpers.Go(func() { w.durable.checkRegularly(watch) })
	defer helpers.Wait()
	defer stopLive()
	defer stopWatch()
	closed := w.bus.nc.StatusChanged(nats.CLOSED)
	defer w.bus.nc.RemoveStatusListener(closed)
	if w.bus.nc.IsClosed() { // before we listened
		return fmt.Errorf("consume %q of %s: %w", w.config.Name, w.config.Stream, ErrClosed)
	}

	w.puller.setWanted(w.config.Slots)
	for open := true; open; {
		select {
		case <-ctx.Done():
			open = false
		case <-closed:
			stopWork()
			handlers.Wait()
			return fmt.Errorf("consume %q of %s: %w", w.config.Name, w.config.Stream, ErrClosed)
		case <-w.puller.ready:
			w.returnAfterLostPin()
			w.startHandlers(work, ctx, &handlers)
		}
	}
	stopWatch()
	w.puller.stop()
	finished := make(chan struct{})
	go func() {
		handlers.Wait()
		close(finished)
	}()
	t := time.NewTimer(w.config.DrainTimeout)
	defer t.Stop()
	select {
	case <-finished:
	case <-t.C:
		w.log.Warn().Dur("drain_timeout", w.config.DrainTimeout).Msg("handlers still at work are cancelled")
		stopWork()
		<-finished
	}
	return nil
}

// returnAfterLostPin returns all messages to the server when another client has got the pin: the messages are for
// that client now. The handlers run on.
func (w *consumer) returnAfterLostPin() {
	if w.puller.lostPin() {
		w.heartbeats.returnAll()
	}
}

// startHandlers takes messages from the queue while slots are free, and runs a handler for each in its own goroutine.
// Messages that fairness does not admit, because those like it fail, go back to the server.
func (w *consumer) startHandlers(work, shutdown context.Context, handlers *sync.WaitGroup) {
	for m := w.takeMessage(); m != nil; m = w.takeMessage() {
		if away := w.admit(m); away > 0 {
			w.nak(m, away)
			w.addBusyHandlers(-1)
			continue
		}
		handlers.Go(func() {
			defer w.addBusyHandlers(-1)
			w.handleMessage(w.contextOf(work, shutdown, m), shutdown, m)
		})
	}
}

// takeMessage takes the next message from the queue and a slot for its handler; nil: there is none of either.
func (w *consumer) takeMessage() *Message {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy >= w.config.Slots {
		return nil
	}
	m := w.puller.pop()
	if m != nil {
		w.busy++
	}
	return m
}

// addBusyHandlers adds n to the busy handlers, and has the puller ask for as many messages as slots are free.
func (w *consumer) addBusyHandlers(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy += n
	// when handlers came back to their slots, more may be busy than there are slots
	w.puller.setWanted(max(0, w.config.Slots-w.busy))
	if n < 0 {
		notify(w.puller.ready)
	}
}

// contextOf returns the context of a handler: with the logger and trace context of its message, the consumer (for
// LeaveSlot), and the context that ends at shutdown.
func (w *consumer) contextOf(ctx, shutdown context.Context, m *Message) context.Context {
	log := w.log.With().Str("subject", m.Subject).Uint64("stream_seq", m.Seq).Uint64("delivered", m.Delivered).Logger()
	ctx = context.WithValue(context.WithValue(ctx, asideKey{}, w), shutdownKey{}, shutdown)
	return WithTrace(log.WithContext(ctx), TraceOf(m.Header))
}

// shutdownKey is the key, in the context of a handler, of the context that ends when its consumer stops.
type shutdownKey struct{}

// pauseForSpace is pause for a publish that waits for space: in a handler, the pause also ends when its consumer
// stops.
func pauseForSpace(ctx context.Context, d time.Duration) error {
	shutdown, ok := ctx.Value(shutdownKey{}).(context.Context)
	if !ok {
		return pause(ctx, d)
	}
	until, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(shutdown, stop)()
	return pause(until, d)
}

// asideKey is the key of the consumer in the context of its handlers.
type asideKey struct{}

// asidePerSlot bounds the handlers that have left their slots, since what they hold is in memory.
const asidePerSlot = 16

// LeaveSlot gives the slot of the handler with this context to another message while the handler waits for a peer
// outside. back takes a slot again, without waiting for a free one. When 16 handlers per slot have left already,
// LeaveSlot does nothing. The message stays in flight.
func LeaveSlot(ctx context.Context) (back func()) {
	w, ok := ctx.Value(asideKey{}).(*consumer)
	if !ok || !w.countAside(1) {
		return func() {}
	}
	w.addBusyHandlers(-1)
	return sync.OnceFunc(func() {
		w.countAside(-1)
		w.addBusyHandlers(1)
	})
}

// countAside adds n to the handlers that have left their slots (LeaveSlot). It returns false, and adds nothing, when
// there are too many.
func (w *consumer) countAside(n int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n > 0 && w.outOfSlot >= asidePerSlot*w.config.Slots {
		return false
	}
	w.outOfSlot += n
	return true
}

// handleMessage runs the handler until its result decides about the message, and acknowledges the message
// accordingly. While the next stream is full it runs the handler again. shutdown ends before ctx does.
func (w *consumer) handleMessage(ctx, shutdown context.Context, m *Message) {
	defer w.heartbeats.release(m)
	defer w.leave(m)
	log := zerolog.Ctx(ctx)
	wait := retryMin
	for {
		began, connection := time.Now(), w.bus.nc.Stats().Reconnects
		var err error
		if w.config.spent(m) {
			err = Terminal(schemas.CodeExhausted, errExhausted)
		} else {
			err = w.call(ctx, m)
		}
		if m.Acknowledged() {
			w.forget(m)
			return
		}
		if err == nil {
			w.succeeded(m)
			w.ack(ctx, m)
			return
		}
		if ctx.Err() != nil {
			log.Info().Err(err).Msg("returned unfinished")
			w.nak(m, returnDelay)
			return
		}
		_, terminal := errors.AsType[*TerminalError](err)
		full := errors.Is(err, ErrStreamFull)
		failures, hopeless := 0, false
		if !full {
			failures, hopeless = w.countFailure(m, time.Since(began), w.bus.wasOutage(err, connection))
		}
		switch {
		case terminal || hopeless || w.config.MaxDeliver > 0 && failures >= w.config.MaxDeliver:
			w.forget(m)
			w.leave(m) // the work that failed is over
			w.deadLetter(ctx, shutdown, m, err)
			return
		case !full:
			d := w.config.backoff(failures)
			log.Warn().Err(err).Dur("delay", d).Msg("will be tried again")
			w.nak(m, d)
			return
		}
		if w.bus.waitLog.allow() {
			log.Warn().Err(err).Msg("waiting for space")
		}
		if pause(shutdown, wait) != nil {
			w.nak(m, returnDelay)
			return
		}
		wait = min(2*wait, retryMax)
	}
}

// admit lets a message in and returns 0, or returns for how long the message must go back to the server (see
// fairness).
func (w *consumer) admit(m *Message) (away time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fair.admit(m, time.Now())
}

// leave tells fairness that no handler works on the message any more.
func (w *consumer) leave(m *Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fair.leave(m)
}

// countFailure counts one more failure of a message in this process, after a try that lasted took, and returns how
// many there were. hopeless means that all messages of its family fail. An outage of the server says nothing about
// the family.
func (w *consumer) countFailure(m *Message, took time.Duration, outage bool) (n int, hopeless bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failed) >= maxFailed {
		clear(w.failed) // a few more tries are better than memory that grows without end
	}
	w.failed[m.Seq]++
	return w.failed[m.Seq], !outage && w.fair.noteFailure(m, took, time.Now())
}

// succeeded forgets the failures of a message and clears its families.
func (w *consumer) succeeded(m *Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.failed, m.Seq)
	w.fair.succeeded(m)
}

func (w *consumer) forget(m *Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.failed, m.Seq)
}

// call runs the handler; a panic becomes a terminal error.
func (w *consumer) call(ctx context.Context, m *Message) (err error) {
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
func (w *consumer) deadLetter(ctx, shutdown context.Context, m *Message, cause error) {
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
		if ctx.Err() != nil || pause(shutdown, w.config.backoff(try)) != nil {
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
		_ = pause(ctx, retryMin)
	}
	zerolog.Ctx(ctx).Warn().Err(err).Msg("ack not confirmed, may come again")
}

// nak returns a message to the server, which delivers it again after d. If that is lost, it does so after AckWait.
func (w *consumer) nak(m *Message, d time.Duration) {
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, ErrAcknowledged) {
		w.log.Debug().Err(err).Uint64("stream_seq", m.Seq).Msg("not returned, comes again after the ack wait")
	}
}
