// Package advantage groups rewards by uid and closes each group exactly once: when all its samples are scored or
// failed, or at its deadline with the rewards that it has. To close a group means to compute the advantages of its
// samples and to publish them as its result, one Advantage event. An explicit batch is the groups of a run whose
// prompts name the same batch id; it closes after its groups, with a Batch event.
//
// Intake's record of a group opens it: a copy of the record comes in the same stream as the rewards. The stream has
// several partitions by batch. In each partition one worker of all processes is active, and the others stand by.
//
// All state is in memory. A record or reward is acknowledged when the result that it is part of is stored, so after a
// crash the stream delivers every open group again. A worker does not wait until a result is stored before it handles
// the next reward: it publishes the result, and the server refuses a second one of the same group. Only for groups that
// another worker may have closed, and that would stay open here, it looks for a stored result itself.
//
// A group is sent while its result is being stored, confirmed when it was compared with intake's record, and decided
// when it has an outcome that its batch waits for. A sweep is what a worker does from time to time without a message:
// deadlines, controls, and what failed before. To displace a message means to move it to the dead letters, because it
// is not the true event of its subject. A refill is a new group in place of one that does not count. An outline is a
// result without advantages; a scale is what groups share that are normalised together.
//
// A worker's run calls handleMessage for each message, which calls handleOpening or handleReward, and these
// closeIfComplete; and it calls sweep and collectResults. Unless a comment says more, an error is of the server, and
// the message is delivered again, or the next sweep tries again.
package advantage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Summary is what the service does, for help and service discovery.
const Summary = "closes groups of rewards and computes their advantages"

// Config of the advantage service. The help of its fields says what they are.
type Config struct {
	GroupTimeout time.Duration `key:"group_timeout" range:"1s.." help:"a group or batch without a deadline closes this long after its first reward"`
	// MaxHeld bounds memory, see deploy/bench/advantage.md. When it is reached, the partition receives no more until a
	// group closes, by its deadline at the latest. With less than a whole group, that could never be complete.
	MaxHeld int           `key:"max_held" range:"MaxGroupSize+1.." help:"rewards and records of open groups that one of the 16 partitions may hold, about 0.7 KiB each; at least a whole group and its record"`
	AckWait time.Duration `key:"ack_wait" range:"1s.." help:"takeover of a partition whose worker died"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `key:"-"`
}

// DefaultConfig returns settings with which a group waits an hour for its last rewards.
func DefaultConfig() Config {
	return Config{GroupTimeout: time.Hour, MaxHeld: 100_000, AckWait: 30 * time.Second}
}

// Validate checks the settings of the service. It returns all faults joined, each with its field name.
func (c Config) Validate() error { return schemas.CheckFields(&c) }

// Run closes groups until ctx ends, with one worker for each partition. It leaves open groups to the next worker:
// their rewards are not acknowledged. It fails if the settings are not valid or the server cannot be used.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("advantage config: %w", err)
	}
	instruments := newInstruments(cfg.Metrics)
	publisher := b.NewPublisher(resultWindow, resultBytes)
	defer publisher.Close()
	controls, err := b.Controls(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before it was up
		}
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return controls.Follow(ctx) })
	for p := range schemas.RewardPartitions {
		g.Go(func() error {
			w := &worker{
				cfg: cfg, bus: b, publisher: publisher, metrics: instruments, controls: controls,
				controlsChanged: controls.Changed(),
				log:             log.With().Int("partition", p).Logger(),
				groups:          map[string]*group{}, batches: map[string]*batch{}, records: map[string]*bus.Message{},
			}
			if err := w.run(ctx, p); err != nil {
				return fmt.Errorf("partition %d: %w", p, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// resultWindow and resultBytes bound the results of all partitions that are being published.
const (
	resultWindow = 1024
	resultBytes  = 32 << 20
)

// worker owns one partition; all of its state belongs to one goroutine.
type worker struct {
	cfg       Config
	bus       *bus.Bus
	publisher *bus.Publisher
	log       zerolog.Logger
	metrics   *instruments
	// controls are what operators asked of runs; controlsChanged is closed when open groups do not know the newest.
	controls        *bus.Controls
	controlsChanged <-chan struct{}
	// deliveries counts what the partition's consumer does.
	deliveries   instrument.Deliveries
	work         *instrument.Work
	sub          *bus.Subscription
	decoder      schemas.GroupDecoder
	reward       schemas.Reward          // the last one that was decoded
	opening      schemas.Opening         // the last one that was decoded
	received     []*bus.Message          // to be handled in this order
	records      map[string]*bus.Message // intake's records of groups that open now, by subject
	groups       map[string]*group       // by run and uid
	batches      map[string]*batch       // explicit batches, by run and batch id
	lookUps      []*group                // open groups that may have a stored result; oldest first
	unconfirmed  []unconfirmed           // groups not compared with their records yet; oldest first
	publishing   []publishing            // results that are being stored; oldest first
	retryClosing bool                    // closing a group or batch failed, or a control ended one
}

type publishing struct {
	group  *group
	future *bus.Future
}

// FetchAhead is how many rewards of a partition a worker asks for at once.
const FetchAhead = 256

const (
	// sweepEvery is how often a worker checks deadlines, maxLookups how many open groups it
	// looks up each time.
	sweepEvery = 250 * time.Millisecond
	maxLookups = 64
	// lastMoment is how long a shutdown waits for results that are being published.
	lastMoment = 2 * time.Second
)

// run handles the messages of a partition until ctx ends, and sweeps every sweepEvery. While another worker has the
// partition it gets no messages. When ctx ends it waits up to lastMoment for results that are being published. An
// error is of the subscription; errors about a message are retried.
func (w *worker) run(ctx context.Context, partition int) error {
	consumer := w.cfg.consumer(partition)
	w.deliveries = w.metrics.set.Deliveries(consumer.Stream)
	w.work = w.metrics.set.Work("rewards", schemas.KindPrefix(schemas.KindReward)+">", schemas.ServiceAdvantage)
	consumer.OnRelease = w.dropAll
	sub, err := w.bus.Subscription(ctx, consumer)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before it was up
		}
		return err
	}
	w.sub = sub
	defer sub.Close()
	defer w.dropAll()
	// A result that is being stored when ctx ends gets a moment to be confirmed.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastMoment, stop) })()
	nextSweep := time.Now().Add(sweepEvery)
	for {
		m, err := w.nextMessage(ctx, nextSweep)
		switch {
		case ctx.Err() != nil:
			w.collectResults(work, work)
			return nil
		case err != nil:
			return err
		case m != nil:
			if err := w.readAhead(work, m); err != nil {
				return err
			}
			for len(w.received) > 0 {
				m, w.received = w.received[0], w.received[1:]
				w.handleMessage(work, m)
				w.collectResults(work, noWait)
			}
		}
		w.collectResults(work, noWait)
		if now := time.Now(); now.After(nextSweep) {
			w.sweep(work)
			nextSweep = now.Add(sweepEvery)
		}
	}
}

var noWait = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// nextMessage waits for the next message. It returns nil when it is time to sweep (until), or when the oldest result
// that is being published is stored. The error is that of the subscription, or of ctx.
func (w *worker) nextMessage(ctx context.Context, until time.Time) (*bus.Message, error) {
	if m, err := w.sub.Next(noWait); !errors.Is(err, context.Canceled) {
		return m, err
	}
	wait, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	if len(w.publishing) > 0 {
		select {
		case <-w.publishing[0].future.Done():
		case <-wait.Done():
		}
		return nil, nil
	}
	m, err := w.sub.Next(wait)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, nil
	}
	return m, err
}

func (c Config) consumer(partition int) bus.ConsumerConfig {
	return bus.ConsumerConfig{
		Durable: schemas.RewardsDurable(partition),
		AckWait: c.AckWait, MaxDeliver: -1, MaxAckPending: c.MaxHeld, Slots: FetchAhead,
		PriorityGroup: "advantage", PinnedTTL: min(c.AckWait, bus.DefaultPinnedTTL),
	}
}

// dropAll forgets all groups without acknowledging anything: another worker has the partition now, or this one ends.
func (w *worker) dropAll() {
	if len(w.groups) > 0 {
		w.log.Info().Int("groups", len(w.groups)).Msg("open groups left to the next worker")
	}
	for _, g := range w.groups {
		w.removeGroup(g)
	}
	clear(w.batches)
	w.received = nil
	w.lookUps, w.unconfirmed = nil, nil
	w.publishing = nil // the server stores them anyway, and the next worker finds them
}

func (w *worker) removeGroup(g *group) {
	if w.groups[g.key()] == g {
		delete(w.groups, g.key())
		w.metrics.OpenGroups.Dec()
		w.metrics.Held.Sub(float64(g.held()))
	}
}

// deadLetter writes a dead letter for a message that is not a valid event of its subject, and deletes the message, so
// that the true event can be stored. After an error the server delivers the message again.
func (w *worker) deadLetter(ctx context.Context, m *bus.Message, code, reason string) error {
	w.deliveries.Dead(code)
	if err := w.bus.Dead(ctx, "advantage", code, reason, m); err != nil {
		return err
	}
	if err := w.bus.Delete(ctx, m.Stream, m.Seq); err != nil {
		return err
	}
	w.logAck(m.Term(reason))
	return nil
}

func isMember(a *schemas.Advantage, index int64) bool {
	return slices.ContainsFunc(a.Members, func(m schemas.Member) bool {
		return m.SampleIndex == index && m.Status != schemas.StatusMissing
	})
}

func (w *worker) deadLetterLate(ctx context.Context, m *bus.Message) error {
	w.deliveries.Dead(schemas.CodeLate)
	return w.bus.Dead(ctx, "advantage", schemas.CodeLate, "the group closed without this sample", m)
}

// keepFirst makes a publish succeed if another worker has stored a result of the same group: that one stays.
func keepFirst(a *schemas.Advantage) bus.PublishOption {
	return bus.Against(func(first *schemas.Advantage) (fault, err error) { return first.Of(a.GroupSize, a.Batch), nil })
}

// closeGroup computes and publishes the result of a group that is in no explicit batch, once it is complete or
// overdue. A group that is not the one of intake's record is dropped. After an error a sweep tries again.
func (w *worker) closeGroup(ctx context.Context, g *group) error {
	if g.sent {
		return nil
	}
	if g.needsConfirmation() {
		if err := w.confirmGroups(ctx, []*group{g}); err != nil || !g.confirmed {
			return err
		}
	}
	if err := w.setStale(ctx, g); err != nil {
		return err
	}
	a := g.outline()
	w.estimate([]*group{g}, []*schemas.Advantage{a}) // which may fail
	if counts(a) {
		return w.publishResult(ctx, g, a)
	}
	return w.publishUncounted(ctx, g, a, g.overdue())
}

// overdue reports whether the deadline of the group's prompt has passed, so that a new group in its place would come
// too late.
func (g *group) overdue() bool { return g.spec.Deadline > 0 && time.Now().UnixNano() > g.spec.Deadline }

func (w *worker) estimate(groups []*group, outlines []*schemas.Advantage) {
	if !slices.ContainsFunc(outlines, counts) {
		return
	}
	began := time.Now()
	estimate(groups, outlines)
	w.metrics.Estimate.Observe(time.Since(began).Seconds())
}

// publishResult publishes a group's result without waiting; collectResults handles the outcome. If the result cannot
// be stored, it publishes a failed one instead; if that cannot be stored either, the group's messages become dead
// letters. The error is a temporary one.
func (w *worker) publishResult(ctx context.Context, g *group, a *schemas.Advantage) error {
	ctx = tracing.With(ctx, g.trace)
	f, err := w.publisher.Publish(ctx, a, keepFirst(a))
	if permanent(err) {
		a = failedResult(a, err)
		f, err = w.publisher.Publish(ctx, a, keepFirst(a))
	}
	if permanent(err) {
		return w.deadLetterGroup(ctx, g, a, err)
	}
	if err != nil {
		return fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	g.outcome, g.sent = a, true
	w.publishing = append(w.publishing, publishing{g, f})
	return nil
}

// permanent reports whether another try to publish would fail too. A missing permission is not permanent, as it can
// still be given.
func permanent(err error) bool {
	_, terminal := errors.AsType[*bus.TerminalError](err)
	return terminal && !errors.Is(err, bus.ErrPermission)
}

// deadLetterGroup writes dead letters for all messages of a group whose result cannot be stored, and ends the group.
// After an error, of the server, the caller tries again.
func (w *worker) deadLetterGroup(ctx context.Context, g *group, a *schemas.Advantage, cause error) error {
	reason := "the group's result cannot be stored: " + cause.Error()
	for _, m := range g.messages() {
		if m.Acknowledged() { // by an earlier try
			continue
		}
		whole, err := w.bus.Get(ctx, schemas.StreamRewards, m.Seq) // see dropBytes
		if err == nil {
			w.deliveries.Dead(bus.Code(cause))
			err = w.bus.Dead(ctx, "advantage", bus.Code(cause), reason, whole)
		}
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
		w.logAck(m.Term(bus.Code(cause)))
	}
	w.log.Error().Err(cause).Str("run", string(g.run)).Str("uid", string(g.uid)).
		Msg("the group's result cannot be stored; its rewards are dead letters")
	g.samples, g.opening = nil, nil
	w.setResult(ctx, g, failedResult(a, cause))
	return nil
}

// messages returns the messages that wait for the group's result.
func (g *group) messages() []*bus.Message {
	out := make([]*bus.Message, 0, len(g.samples)+1)
	for i := range g.samples {
		out = append(out, g.samples[i].message)
	}
	if g.opening != nil {
		out = append(out, g.opening)
	}
	return out
}

// failedResult returns a copy of a result with the status failed, the cause and no advantages.
func failedResult(a *schemas.Advantage, cause error) *schemas.Advantage {
	out := *a
	out.Status, out.Error, out.Mean, out.Std, out.BatchSamples = schemas.StatusFailed, cause.Error(), nil, nil, 0
	out.Members = nil
	for _, m := range a.Members {
		m.Advantage, m.StepAdvantages = nil, nil
		out.Members = append(out.Members, m)
	}
	return &out
}

// collectResults handles the outcomes of results that were published, oldest first. Until wait ends it waits for
// those that are not stored yet. If another worker had stored a result first, that one counts. Groups whose result
// failed are tried again.
func (w *worker) collectResults(ctx, wait context.Context) {
	for len(w.publishing) > 0 && !w.bus.Conn().IsClosed() {
		g, future := w.publishing[0].group, w.publishing[0].future
		ack, err := future.Wait(wait)
		select {
		case <-future.Done():
		default:
			return
		}
		w.publishing[0] = publishing{}
		w.publishing = w.publishing[1:]
		g.sent = false
		a := g.outcome
		if err == nil && ack.Duplicate {
			a, err = w.bus.Result(ctx, g.run, g.uid, g.size, g.spec.Batch)
		}
		if permanent(err) {
			err = w.deadLetterGroup(ctx, g, g.outcome, err)
		} else if err == nil {
			w.setResult(ctx, g, a)
		}
		w.retryOnError(string(g.uid), err)
	}
}

// publishAndWait stores a group's result and waits for that. It returns the result that is stored: that of another
// worker if it was first.
func (w *worker) publishAndWait(ctx context.Context, a *schemas.Advantage) (*schemas.Advantage, error) {
	ack, err := w.bus.Publish(ctx, a, keepFirst(a))
	if err != nil {
		return nil, fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	if ack.Duplicate {
		return w.bus.Result(ctx, a.Run, a.UID, a.GroupSize, a.Batch)
	}
	return a, nil
}

// setResult sets the stored result of a group. A group in no explicit batch ends with it: its messages are
// acknowledged.
func (w *worker) setResult(ctx context.Context, g *group, a *schemas.Advantage) {
	g.outcome, g.result = a, a
	w.metrics.group(g.of.Lane, a)
	last := int64(0)
	for i := range g.samples {
		last = max(last, g.samples[i].stored)
	}
	if last > 0 {
		w.metrics.Latency.Observe(max(0, time.Since(time.Unix(0, last)).Seconds()))
	}
	w.log.Info().Str("run", string(a.Run)).Str("uid", string(a.UID)).Str("status", a.Status).
		Int("members", len(a.Members)).Msg("group closed")
	if g.spec.BatchGroups == 0 {
		w.removeGroup(g)
		w.acknowledge(ctx, g)
	}
}

// sweep does what needs no message, every sweepEvery: it applies controls, retries what failed to close, confirms
// groups, and looks for stored results of open groups. It also closes groups and batches whose deadline has passed,
// as soon as everything that was stored before the deadline has been received. What fails is tried again at the next
// sweep.
func (w *worker) sweep(ctx context.Context) {
	select {
	case <-w.controlsChanged:
		w.controlsChanged = w.controls.Changed() // before they are read
		for _, g := range w.groups {
			w.applyControl(g)
		}
	default:
	}
	now := time.Now()
	overdue := false
	for _, g := range w.groups {
		overdue = overdue || !g.deadline.IsZero() && now.After(g.deadline)
	}
	var caughtUp time.Time
	if overdue {
		var err error
		if caughtUp, err = w.sub.CaughtUp(); err != nil {
			w.log.Debug().Err(err).Msg("deadlines wait: the consumer does not say what it has")
		}
	}
	if !caughtUp.IsZero() || w.retryClosing {
		w.retryClosing = false
		for _, g := range oldestFirst(w.groups) {
			if g.readyToClose(caughtUp) && w.groups[g.key()] == g {
				w.retryOnError(string(g.uid), w.closeReady(ctx, g))
			}
		}
	}
	w.confirmOpen(ctx, now)
	for lookups := 0; len(w.lookUps) > 0 && lookups < maxLookups; {
		g := w.lookUps[0]
		w.lookUps[0] = nil
		w.lookUps = w.lookUps[1:]
		if w.groups[g.key()] != g || g.sent {
			continue // it has closed, or is about to
		}
		lookups++
		if err := w.closeIfStored(ctx, g); err != nil {
			w.lookUps = append(w.lookUps, g)
			w.retryOnError(string(g.uid), err)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(w.batches)) {
		b := w.batches[key]
		w.retryOnError(b.id, w.closeBatchIfReady(ctx, b, caughtUp))
	}
}

// oldestFirst returns groups in the order in which they opened, those of one time by key.
func oldestFirst[K comparable](groups map[K]*group) []*group {
	return slices.SortedFunc(maps.Values(groups), func(x, y *group) int {
		return cmp.Or(x.opened.Compare(y.opened), cmp.Compare(x.key(), y.key()))
	})
}

func (w *worker) closeReady(ctx context.Context, g *group) error {
	if b := w.batchOf(g); b != nil {
		return w.decideOutcome(ctx, b, g, false)
	}
	return w.closeGroup(ctx, g)
}

func (w *worker) retryOnError(name string, err error) {
	if err != nil {
		w.retryClosing = true
		w.log.Warn().Err(err).Str("name", name).Msg("group or batch not closed, will try again")
	}
}

// acknowledge acknowledges the record and the rewards of a group whose result is stored. A reward that the result
// does not count came too late: it becomes a dead letter.
func (w *worker) acknowledge(ctx context.Context, g *group) {
	if g.opening != nil {
		w.logAck(g.opening.AckAsync())
	}
	for i := range g.samples {
		s := &g.samples[i]
		if !isMember(g.result, s.index) {
			m, err := w.bus.Get(ctx, schemas.StreamRewards, s.message.Seq) // see dropBytes
			if err == nil {
				err = w.deadLetterLate(ctx, m)
			}
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				w.retry(s.message, err)
				continue
			}
		}
		w.logAck(s.message.AckAsync())
	}
}

// retry asks the server to deliver a message again later, after a failure.
func (w *worker) retry(m *bus.Message, err error) {
	w.deliveries.Retried(err)
	w.log.Warn().Err(err).Str("subject", m.Subject).Uint64("delivered", m.Delivered).
		Msg("not handled, the server delivers it again")
	w.logAck(m.NakWithDelay(min(time.Duration(m.Delivered)*time.Second, 30*time.Second)))
}

func (w *worker) logAck(err error) {
	if err != nil {
		w.log.Warn().Err(err).Msg("ack")
	}
}
