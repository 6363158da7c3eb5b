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

// Handler works on one message: it publishes what comes of it, then returns.
//
//   - nil: the message is acked, and the ack confirmed;
//   - a TerminalError: OnGiveUp, dead letter, then the message is terminated; where it is
//     Garbage: dead letter, then the message is deleted, and its subject is free;
//   - an error that is ErrStreamFull: the stream after this one is full, which is no
//     fault of the message. The handler is run again after a pause; the delivery does
//     not count;
//   - any other error: the message is delivered again after a pause that grows with
//     its failures, and given up (code "exhausted") after MaxDeliver of them.
//
// A panic is a TerminalError with the code panic. A handler that settled the message
// itself may return anything.
//
// The context carries a logger (zerolog.Ctx) with the message's subject, sequence and
// delivery, and its trace context. It outlives the shutdown signal by DrainTimeout.
type Handler func(ctx context.Context, m *Message) error

// Consume makes or binds the durable and works on its messages until ctx ends and
// every handler has returned; then it returns nil. It returns an error when the
// durable cannot be made or the bus is closed; lost connections, restarted servers and
// deleted durables it survives.
func (b *Bus) Consume(ctx context.Context, c ConsumerConfig, h Handler) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	d := &durable{bus: b, config: c}
	if err := d.bindPatiently(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	p, err := b.newPuller(c, d.bindPatiently)
	if err != nil {
		return fmt.Errorf("consume %q of %s: %w", c.Durable, c.Stream, closedError(err))
	}
	w := &consumer{
		bus: b, config: c, handler: h, durable: d, puller: p, heartbeats: p.heartbeats,
		failed: map[uint64]int{}, fair: newFairness(c),
		log: b.log.With().Str("consumer", c.Durable).Logger(),
	}
	return w.run(ctx)
}

// consumer is one Consume.
type consumer struct {
	bus        *Bus
	config     ConsumerConfig
	handler    Handler
	durable    *durable
	puller     *puller
	heartbeats *heartbeats
	log        zerolog.Logger

	mu   sync.Mutex
	busy int
	// aside is how many handlers have left their slots for now.
	aside int
	// failed counts the failures of messages here, by stream sequence.
	failed map[uint64]int
	fair   *fairness
}

// maxFailed bounds failed: what fails here may end elsewhere, which nobody says.
const maxFailed = 10_000

func (w *consumer) run(ctx context.Context) error {
	// Handlers and their heartbeats outlive ctx while they drain.
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	live, stopLive := context.WithCancel(context.WithoutCancel(ctx))
	watch, stopWatch := context.WithCancel(ctx)
	var helpers, handlers sync.WaitGroup
	helpers.Go(func() { w.heartbeats.run(live, w.config.AckWait) })
	helpers.Go(func() { w.puller.watch(watch) })
	helpers.Go(func() { w.durable.watch(watch) })
	defer helpers.Wait()
	defer stopLive()
	defer stopWatch()
	closed := w.bus.nc.StatusChanged(nats.CLOSED)
	defer w.bus.nc.RemoveStatusListener(closed)
	if w.bus.nc.IsClosed() { // before anybody listened
		return fmt.Errorf("consume %q of %s: %w", w.config.Durable, w.config.Stream, ErrClosed)
	}

	w.puller.setRoom(w.config.Slots)
	for open := true; open; {
		select {
		case <-ctx.Done():
			open = false
		case <-closed:
			stopWork()
			handlers.Wait()
			return fmt.Errorf("consume %q of %s: %w", w.config.Durable, w.config.Stream, ErrClosed)
		case <-w.puller.ready:
			w.handBackLost()
			w.startAll(work, ctx, &handlers)
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

// handBackLost gives up what is in hand when the pin went elsewhere: the handlers run
// on, but their messages are another client's now.
func (w *consumer) handBackLost() {
	if !w.puller.lostPin() {
		return
	}
	for _, m := range w.heartbeats.all() {
		_ = m.NakWithDelay(handBackDelay)
	}
}

// startAll runs a handler, each in a goroutine of its own, for what waits in the queue
// as far as there are slots.
func (w *consumer) startAll(work, shutdown context.Context, handlers *sync.WaitGroup) {
	for w.free() > 0 {
		m := w.puller.pop()
		if m == nil {
			return
		}
		if away := w.admit(m); away > 0 {
			w.nak(m, away)
			w.account(0) // there is room for another
			continue
		}
		w.account(1)
		handlers.Go(func() {
			defer w.account(-1)
			w.process(w.contextOf(work, shutdown, m), shutdown, m)
		})
	}
}

func (w *consumer) free() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.config.Slots - w.busy
}

// account keeps the room for messages at the free slots.
func (w *consumer) account(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.busy += n
	w.puller.setRoom(max(0, w.config.Slots-w.busy)) // more are busy than there are slots where some came back
	if n < 0 {
		notify(w.puller.ready)
	}
}

func (w *consumer) contextOf(ctx, shutdown context.Context, m *Message) context.Context {
	log := w.log.With().Str("subject", m.Subject).Uint64("stream_seq", m.Seq).Uint64("delivered", m.Delivered).Logger()
	ctx = context.WithValue(context.WithValue(ctx, asideKey{}, w), shutdownKey{}, shutdown)
	return WithTraceparent(log.WithContext(ctx), traceparentOf(m.Header))
}

// shutdownKey is of the context that ends when the consumer of a handler stops.
type shutdownKey struct{}

// pauseForSpace is pause, of a handler until its consumer stops at the longest.
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

type asideKey struct{}

// asidePerSlot bounds the handlers that are aside: what they hold is in memory.
const asidePerSlot = 16

// Aside leaves the slot of the handler that has the context to another message, for as long as it waits for somebody outside,
// until back is called, which does not wait. Of one consumer 16 times as many handlers as it has slots can be aside; more keep
// theirs. The message stays in hand.
func Aside(ctx context.Context) (back func()) {
	w, ok := ctx.Value(asideKey{}).(*consumer)
	if !ok || !w.stepAside(1) {
		return func() {}
	}
	w.account(-1)
	return sync.OnceFunc(func() {
		w.stepAside(-1)
		w.account(1)
	})
}

func (w *consumer) stepAside(n int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n > 0 && w.aside >= asidePerSlot*w.config.Slots {
		return false
	}
	w.aside += n
	return true
}

// process runs the handler and settles the message. shutdown ends before ctx does.
func (w *consumer) process(ctx, shutdown context.Context, m *Message) {
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
		if m.Settled() {
			w.forget(m)
			return
		}
		if err == nil {
			w.succeeded(m)
			w.ack(ctx, m)
			return
		}
		if ctx.Err() != nil {
			log.Info().Err(err).Msg("handed back unfinished")
			w.nak(m, handBackDelay)
			return
		}
		_, terminal := errors.AsType[*TerminalError](err)
		full := errors.Is(err, ErrStreamFull)
		failures, hopeless := 0, false
		if !full {
			failures, hopeless = w.failure(m, time.Since(began), w.bus.outage(err, connection))
		}
		switch {
		case terminal || hopeless || w.config.MaxDeliver > 0 && failures >= w.config.MaxDeliver:
			w.forget(m)
			w.leave(m) // what is left to do is not what fails
			w.giveUp(ctx, shutdown, m, err)
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
			w.nak(m, handBackDelay)
			return
		}
		wait = min(2*wait, retryMax)
	}
}

// admit takes a message in hand, or says for how long it is to be handed back.
func (w *consumer) admit(m *Message) (away time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fair.admit(m, time.Now())
}

func (w *consumer) leave(m *Message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fair.leave(m)
}

// failure counts one more failure of a message in this process, of a try that took so
// long, and says whether its whole family fails. An outage says nothing of the family.
func (w *consumer) failure(m *Message, took time.Duration, outage bool) (n int, hopeless bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failed) >= maxFailed {
		clear(w.failed) // more tries than promised are better than ever more memory
	}
	w.failed[m.Seq]++
	return w.failed[m.Seq], !outage && w.fair.failed(m, took, time.Now())
}

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

// giveUp tells the stages after, writes the dead letter, and takes the message off
// the stream, in this order: a crash in between repeats, and loses nothing. What fails
// of it is tried again here, for as long as the process runs: a redelivery would have
// forgotten the cause.
func (w *consumer) giveUp(ctx, shutdown context.Context, m *Message, cause error) {
	log := zerolog.Ctx(ctx)
	log.Error().Err(cause).Str("code", Code(cause)).Msg("given up")
	terminal, _ := errors.AsType[*TerminalError](cause)
	garbage := terminal != nil && terminal.Garbage
	reason := cause.Error()
	for try := 1; ; try++ {
		var err error
		if !garbage {
			err = w.onGiveUp(ctx, m, cause)
		}
		if failed, ok := errors.AsType[*TerminalError](err); ok {
			// It would fail for ever; the letter is what is left to say it.
			log.Error().Err(err).Msg("the stages after cannot be told")
			reason, err = cause.Error()+"; the stages after were not told: "+failed.Error(), nil
		}
		if err == nil {
			err = w.bus.Dead(ctx, w.config.Stage, Code(cause), reason, m)
		}
		if err == nil && garbage {
			err = w.bus.Delete(ctx, m.Stream, m.Seq)
		}
		if err == nil {
			break
		}
		log.Warn().Err(err).Msg("dead letter not written, trying again")
		if ctx.Err() != nil || pause(shutdown, w.config.backoff(try)) != nil {
			w.nak(m, handBackDelay)
			return
		}
	}
	if err := m.Term(Code(cause)); err != nil && !errors.Is(err, ErrSettled) {
		log.Warn().Err(err).Msg("not terminated, will come again")
	}
}

func (w *consumer) onGiveUp(ctx context.Context, m *Message, cause error) (err error) {
	if w.config.OnGiveUp == nil {
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			// The dead letter must not depend on a hook that panics.
			zerolog.Ctx(ctx).Error().Interface("panic", p).Bytes("stack", debug.Stack()).Msg("give-up hook panicked")
			err = nil
		}
	}()
	if err := w.config.OnGiveUp(ctx, m, cause); err != nil {
		return fmt.Errorf("give-up hook: %w", err)
	}
	return nil
}

// ack confirms the ack; when that fails the message comes again, and its handler is
// idempotent.
func (w *consumer) ack(ctx context.Context, m *Message) {
	ctx = context.WithoutCancel(ctx)
	var err error
	for range 3 {
		if err = m.Ack(ctx); err == nil || errors.Is(err, ErrSettled) {
			return
		}
		_ = pause(ctx, retryMin)
	}
	zerolog.Ctx(ctx).Warn().Err(err).Msg("ack not confirmed, may come again")
}

func (w *consumer) nak(m *Message, d time.Duration) {
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, ErrSettled) {
		w.log.Debug().Err(err).Uint64("stream_seq", m.Seq).Msg("not handed back, comes again after the ack wait")
	}
}
