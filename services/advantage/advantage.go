// Package advantage groups rewards by uid and closes each group exactly once:
// when all its samples are scored or failed, or at its deadline with what it has.
//
// A group is known from its prompt on: intake's record of it comes first, the way that its
// rewards come. State is a local map and nothing else. A record or reward is acked when the
// result it is part of is stored (the group's advantage, or the batch for explicit batches),
// so after a crash the stream delivers every open group again. One worker is active
// per partition; the others are hot standbys.
//
// A worker does not wait for one result to be stored before it takes the next reward.
// It looks whether a group has a result already only for groups that were known before and
// stay open: one that is complete is published, and the server says what was there before.
package advantage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
)

// Summary is what the service does, for help and service discovery.
const Summary = "closes groups of rewards and computes their advantages"

// Config of the advantage service.
type Config struct {
	// GroupTimeout closes groups and batches without a deadline of their own, counted from their first reward.
	GroupTimeout time.Duration `koanf:"group_timeout" help:"a group or batch without a deadline closes this long after its first reward"`
	// MaxHeld bounds the rewards of open groups, and their records, that one partition holds; see
	// deploy/bench/advantage.md for what they take. When it is reached the partition takes no
	// more until a group closes, by its deadline at the latest.
	MaxHeld int `koanf:"max_held" help:"rewards and records of open groups that one of the 16 partitions may hold, about 0.7 KiB each"`
	// AckWait is how long the server waits for a heartbeat before a standby takes over.
	AckWait time.Duration `koanf:"ack_wait" help:"takeover of a partition whose worker died"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// DefaultConfig waits an hour for stragglers.
func DefaultConfig() Config {
	return Config{GroupTimeout: time.Hour, MaxHeld: 100_000, AckWait: 30 * time.Second}
}

// minHeld is the largest group and its record: with less it could never be whole.
const minHeld = schemas.MaxGroupSize + 1

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.GroupTimeout < time.Second {
		errs = append(errs, fmt.Errorf("group_timeout: %v; must be at least 1s", c.GroupTimeout))
	}
	if c.MaxHeld < minHeld {
		errs = append(errs, fmt.Errorf("max_held: %d; must be at least %d, one whole group and its record", c.MaxHeld, minHeld))
	}
	if c.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("ack_wait: %v; must be at least 1s", c.AckWait))
	}
	return errors.Join(errs...)
}

// Run closes groups until ctx ends. Open groups are left to the next worker: their
// rewards are not acked.
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
				cfg: cfg, bus: b, publisher: publisher, log: log.With().Int("partition", p).Logger(), metrics: instruments,
				controls: controls, groups: map[string]*group{}, batches: map[string]*batch{}, records: map[string]*bus.Message{},
			}
			if err := w.run(ctx, p); err != nil {
				return fmt.Errorf("partition %d: %w", p, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// resultWindow and resultBytes bound the results of all partitions that are on their
// way to the server.
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
	// controls are what operators asked of runs, heeded as far as the open groups know of it.
	controls *bus.Controls
	heeded   int
	// deliveries counts what the partition's consumer does.
	deliveries instrument.Deliveries
	sub        *bus.Subscription
	decoder    schemas.GroupDecoder
	reward     schemas.Reward          // that was received last
	opening    schemas.Opening         // that was received last
	taken      []*bus.Message          // that have come, to be received in their order
	records    map[string]*bus.Message // of groups that taken opens, by subject
	groups     map[string]*group       // by run and uid
	batches    map[string]*batch       // explicit batches, by run and batch id
	opened     []*group                // known before, to be looked up should they stay open; oldest first
	unproven   []unproven              // to be compared with their records should they stay open; oldest first
	storing    []storing               // oldest first
	again      bool                    // something that could have closed has not
}

// storing is a result on its way to the server.
type storing struct {
	group  *group
	future *bus.Future
}

// FetchAhead is how many rewards of a partition are asked for at once.
const FetchAhead = 256

const (
	// sweepEvery is how often deadlines are looked at, maxLookups how many open groups are
	// looked up each time.
	sweepEvery = 250 * time.Millisecond
	maxLookups = 64
	// lastMoment is what a shutdown waits for the results on their way.
	lastMoment = 2 * time.Second
)

func (w *worker) run(ctx context.Context, partition int) error {
	consumer := w.cfg.consumer(partition)
	w.deliveries = w.metrics.set.Deliveries(consumer.Stream)
	consumer.OnRelease = w.forget
	sub, err := w.bus.Subscription(ctx, consumer)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before it was up
		}
		return err
	}
	w.sub = sub
	defer sub.Close()
	defer w.forget()
	// A result that is being stored when ctx ends gets a moment to be confirmed.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastMoment, stop) })()
	nextSweep := time.Now().Add(sweepEvery)
	for {
		m, err := w.next(ctx, nextSweep)
		switch {
		case ctx.Err() != nil:
			w.collect(work, work)
			return nil
		case err != nil:
			return err
		case m != nil:
			if err := w.ahead(work, m); err != nil {
				return err
			}
			for len(w.taken) > 0 {
				m, w.taken = w.taken[0], w.taken[1:]
				w.receive(work, m)
				w.collect(work, over)
			}
		}
		w.collect(work, over)
		if now := time.Now(); now.After(nextSweep) {
			w.sweep(work)
			nextSweep = now.Add(sweepEvery)
		}
	}
}

// over is a context that has ended: to look without waiting.
var over = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// next returns the next reward, or nil when it is time for something else: to sweep, or
// to see to a result that has been stored.
func (w *worker) next(ctx context.Context, until time.Time) (*bus.Message, error) {
	if m, err := w.sub.Next(over); !errors.Is(err, context.Canceled) {
		return m, err
	}
	wait, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	if len(w.storing) > 0 {
		select {
		case <-w.storing[0].future.Done():
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

// consumer is the durable of one partition.
func (c Config) consumer(partition int) bus.ConsumerConfig {
	return bus.ConsumerConfig{
		Stream: schemas.StreamRewards, Durable: bus.PartitionConsumer(partition),
		Filters: []string{schemas.PartitionFilter(partition)},
		AckWait: c.AckWait, MaxDeliver: -1, MaxAckPending: c.MaxHeld, Slots: FetchAhead,
		PriorityGroup: "advantage", PinnedTTL: min(c.AckWait, bus.DefaultPinnedTTL),
	}
}

// forget drops the open groups: another worker has the partition now.
func (w *worker) forget() {
	if len(w.groups) > 0 {
		w.log.Info().Int("groups", len(w.groups)).Msg("open groups left to the next worker")
	}
	for _, g := range w.groups {
		w.forgetGroup(g)
	}
	clear(w.batches)
	w.taken = nil
	w.opened, w.unproven = nil, nil
	w.storing = nil // they are stored all the same, and the next worker finds them
}

func (w *worker) forgetGroup(g *group) {
	if w.groups[g.key()] == g {
		delete(w.groups, g.key())
		w.metrics.openGroups.Dec()
		w.metrics.held.Sub(float64(g.held()))
	}
}

// refuse writes a dead letter for what is not the event that its subject is for, and frees
// the subject.
func (w *worker) refuse(ctx context.Context, m *bus.Message, code, reason string) error {
	w.deliveries.Dead(code)
	if err := w.bus.Dead(ctx, "advantage", code, reason, m); err != nil {
		return err
	}
	if err := w.bus.Delete(ctx, m.Stream, m.Seq); err != nil {
		return err
	}
	w.settle(m.Term(reason))
	return nil
}

// part says whether a sample is part of a stored result.
func part(a *schemas.Advantage, index int64) bool {
	for i := range a.Members {
		if a.Members[i].SampleIndex == index {
			return a.Members[i].Status != schemas.StatusMissing
		}
	}
	return false
}

func (w *worker) late(ctx context.Context, m *bus.Message) error {
	w.deliveries.Dead(schemas.CodeLate)
	return w.bus.Dead(ctx, "advantage", schemas.CodeLate, "the group closed without this sample", m)
}

// against lets the result that a worker before has stored stay.
func against(a *schemas.Advantage) bus.PublishOption {
	return bus.Against(func(first *schemas.Advantage) (fault, err error) { return first.Of(a.GroupSize, a.Batch), nil })
}

// close sends the result of a group that is its own batch on its way.
func (w *worker) close(ctx context.Context, g *group) error {
	if g.sent {
		return nil
	}
	if !g.vouched() {
		if err := w.prove(ctx, []*group{g}); err != nil || !g.proven {
			return err
		}
	}
	if err := w.date(ctx, g); err != nil {
		return err
	}
	a := g.outline()
	if counts(a) {
		w.estimate([]*group{g}, []*schemas.Advantage{a})
	}
	if counts(a) {
		return w.send(ctx, g, a)
	}
	return w.drop(ctx, g, a, g.overdue())
}

// date notes which version the group's lane had when its last sample was scored, where that counts. A pass over
// stored trajectories is none of the samplers' doing.
func (w *worker) date(ctx context.Context, g *group) (err error) {
	if policyOf(g.spec).MaxPolicyLag == nil || g.spec.SourceRun != "" || len(g.samples) == 0 {
		return nil
	}
	last := int64(0)
	for i := range g.samples {
		last = max(last, g.samples[i].stored)
	}
	g.served, err = w.bus.PolicyVersionAt(ctx, g.lane, time.Unix(0, last))
	return err
}

// overdue says whether the deadline of the group's prompt has passed: a fresh group would
// come too late.
func (g *group) overdue() bool { return g.spec.Deadline > 0 && time.Now().UnixNano() > g.spec.Deadline }

func (w *worker) estimate(groups []*group, outlines []*schemas.Advantage) {
	began := time.Now()
	estimate(groups, outlines)
	w.metrics.estimate.Observe(time.Since(began).Seconds())
}

// send publishes a group's advantage without waiting; collect sees to what becomes of it.
func (w *worker) send(ctx context.Context, g *group, a *schemas.Advantage) error {
	f, err := w.publisher.Publish(ctx, a, against(a))
	if hopeless(err) {
		a = failure(a, err)
		f, err = w.publisher.Publish(ctx, a, against(a))
	}
	if hopeless(err) {
		return w.bury(ctx, g, a, err)
	}
	if err != nil {
		return fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	g.verdict, g.sent = a, true
	w.storing = append(w.storing, storing{g, f})
	return nil
}

// hopeless says that a result would be refused whenever it is tried. The want of a
// permission can be mended.
func hopeless(err error) bool {
	_, terminal := errors.AsType[*bus.TerminalError](err)
	return terminal && !errors.Is(err, bus.ErrPermission)
}

// bury moves what a group holds to the dead letters, since its result cannot be stored.
func (w *worker) bury(ctx context.Context, g *group, a *schemas.Advantage, cause error) error {
	reason := "the group's result cannot be stored: " + cause.Error()
	held := make([]*bus.Message, 0, len(g.samples)+1)
	for i := range g.samples {
		held = append(held, g.samples[i].message)
	}
	if g.opening != nil {
		held = append(held, g.opening)
	}
	for _, m := range held {
		if m.Settled() { // in a try before this one
			continue
		}
		whole, err := w.bus.Get(ctx, schemas.StreamRewards, m.Seq) // its bytes were let go
		if err == nil {
			w.deliveries.Dead(bus.Code(cause))
			err = w.bus.Dead(ctx, "advantage", bus.Code(cause), reason, whole)
		}
		if err != nil && !errors.Is(err, bus.ErrNotFound) {
			return err
		}
		w.settle(m.Term(bus.Code(cause)))
	}
	w.log.Error().Err(cause).Str("run", string(g.run)).Str("uid", string(g.uid)).Msg("the group's result cannot be stored; its rewards are dead letters")
	g.samples, g.opening = nil, nil
	w.finish(ctx, g, failure(a, cause))
	return nil
}

// failure is a result that has no numbers.
func failure(a *schemas.Advantage, cause error) *schemas.Advantage {
	out := *a
	out.Status, out.Error, out.Mean, out.Std, out.BatchSamples = schemas.StatusFailed, cause.Error(), nil, nil, 0
	out.Members = nil
	for _, m := range a.Members {
		m.Advantage, m.StepAdvantages = nil, nil
		out.Members = append(out.Members, m)
	}
	return &out
}

// collect sees to the results that are stored by now and, until wait ends, waits for the
// others.
func (w *worker) collect(ctx, wait context.Context) {
	for len(w.storing) > 0 && !w.bus.Conn().IsClosed() {
		g := w.storing[0].group
		select {
		case <-w.storing[0].future.Done():
		default:
			select {
			case <-w.storing[0].future.Done():
			case <-wait.Done():
				return
			}
		}
		ack, err := w.storing[0].future.Wait(wait)
		w.storing[0] = storing{}
		w.storing = w.storing[1:]
		g.sent = false
		a := g.verdict
		if err == nil && ack.Duplicate {
			a, err = w.bus.Result(ctx, g.run, g.uid, g.size, g.spec.Batch)
		}
		if hopeless(err) {
			err = w.bury(ctx, g, g.verdict, err)
		} else if err == nil {
			w.finish(ctx, g, a)
		}
		w.tryAgain(string(g.uid), err)
	}
}

// publish stores a group's result and returns what is stored: when another worker was
// first, that is the result.
func (w *worker) publish(ctx context.Context, a *schemas.Advantage) (*schemas.Advantage, error) {
	ack, err := w.bus.Publish(ctx, a, against(a))
	if err != nil {
		return nil, fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	if ack.Duplicate {
		return w.bus.Result(ctx, a.Run, a.UID, a.GroupSize, a.Batch)
	}
	return a, nil
}

// finish takes in the stored result of a group, which ends one that is a batch of its
// own.
func (w *worker) finish(ctx context.Context, g *group, a *schemas.Advantage) {
	g.verdict, g.result = a, a
	w.metrics.groups.WithLabelValues(a.Status).Inc()
	last := int64(0)
	for i := range g.samples {
		last = max(last, g.samples[i].stored)
	}
	if last > 0 {
		w.metrics.latency.Observe(max(0, time.Since(time.Unix(0, last)).Seconds()))
	}
	w.log.Info().Str("run", string(a.Run)).Str("uid", string(a.UID)).Str("status", a.Status).Int("members", len(a.Members)).Msg("group closed")
	if g.spec.BatchGroups == 0 {
		w.forgetGroup(g)
		w.release(ctx, g)
	}
}

// sweep closes what is past its deadline, once everything stored before is here, tries
// again what failed, and looks up groups that are not complete at once.
func (w *worker) sweep(ctx context.Context) {
	if n := w.controls.Changes(); n != w.heeded {
		w.heeded = n
		for _, g := range w.groups {
			w.heed(g)
		}
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
	if !caughtUp.IsZero() || w.again {
		w.again = false
		for _, g := range w.groups {
			if g.ripe(caughtUp) {
				w.tryAgain(string(g.uid), w.ripe(ctx, g))
			}
		}
	}
	w.proveOpen(ctx, now)
	for lookups := 0; len(w.opened) > 0 && lookups < maxLookups; {
		g := w.opened[0]
		w.opened[0] = nil
		w.opened = w.opened[1:]
		if w.groups[g.key()] != g || g.sent {
			continue // it has closed, or is about to
		}
		lookups++
		if err := w.recognise(ctx, g); err != nil {
			w.opened = append(w.opened, g)
			w.tryAgain(string(g.uid), err)
		}
	}
	for _, b := range w.batches {
		w.tryAgain(b.id, w.advance(ctx, b, caughtUp))
	}
}

// ripe closes a group that can close.
func (w *worker) ripe(ctx context.Context, g *group) error {
	if b := w.batchOf(g); b != nil {
		return w.decide(ctx, b, g, false)
	}
	return w.close(ctx, g)
}

// tryAgain notes what failed to close, for the next sweep.
func (w *worker) tryAgain(name string, err error) {
	if err != nil {
		w.again = true
		w.log.Warn().Err(err).Str("name", name).Msg("group or batch not closed, will try again")
	}
}

// release acks the record and the rewards of a group whose result is stored. What is no
// part of it came too late.
func (w *worker) release(ctx context.Context, g *group) {
	if g.opening != nil {
		w.settle(g.opening.AckAsync())
	}
	for i := range g.samples {
		s := &g.samples[i]
		if !part(g.result, s.index) {
			m, err := w.bus.Get(ctx, schemas.StreamRewards, s.message.Seq) // its bytes were let go
			if err == nil {
				err = w.late(ctx, m)
			}
			if err != nil && !errors.Is(err, bus.ErrNotFound) {
				w.retry(s.message, err)
				continue
			}
		}
		w.settle(s.message.AckAsync())
	}
}

func (w *worker) retry(m *bus.Message, err error) {
	w.deliveries.Retried(err)
	w.log.Warn().Err(err).Str("subject", m.Subject).Uint64("delivered", m.Delivered).Msg("not taken, will be redelivered")
	w.settle(m.NakWithDelay(min(time.Duration(m.Delivered)*time.Second, 30*time.Second)))
}

// settle notes a failed ack: the server will redeliver, which is harmless.
func (w *worker) settle(err error) {
	if err != nil && !strings.Contains(err.Error(), "context canceled") {
		w.log.Warn().Err(err).Msg("ack")
	}
}
