// Package advantage groups rewards by uid and closes each group exactly once:
// when all its samples are scored or failed, or at its deadline with what it has.
//
// State is a local map and nothing else. A reward is acked when the result it is
// part of is stored (the group's advantage, or the batch for explicit batches), so
// after a crash the stream delivers every open group again. One worker is active
// per partition; the others are hot standbys.
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
)

// Config of the advantage service.
type Config struct {
	// GroupTimeout closes groups and batches without a deadline of their own, counted from their first reward.
	GroupTimeout time.Duration `koanf:"group_timeout" help:"a group or batch without a deadline closes this long after its first reward"`
	// MaxHeld bounds the rewards of open groups that one partition holds, of about 1 KiB each.
	// When it is reached the partition takes no more until a group closes, by its deadline at
	// the latest.
	MaxHeld int `koanf:"max_held" help:"rewards of open groups that one of the 16 partitions may hold, about 1 KiB each"`
	// AckWait is how long the server waits for a sign of life before a standby takes over.
	AckWait time.Duration `koanf:"ack_wait" help:"takeover of a partition whose worker died"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// DefaultConfig waits an hour for stragglers. Holding MaxHeld rewards takes about
// 1 KiB each.
func DefaultConfig() Config {
	return Config{GroupTimeout: time.Hour, MaxHeld: 100_000, AckWait: 30 * time.Second}
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.GroupTimeout < time.Second {
		errs = append(errs, fmt.Errorf("group_timeout: %v; must be at least 1s", c.GroupTimeout))
	}
	if c.MaxHeld < schemas.MaxGroupSize {
		errs = append(errs, fmt.Errorf("max_held: %d; must be at least %d, one whole group", c.MaxHeld, schemas.MaxGroupSize))
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
	g, ctx := errgroup.WithContext(ctx)
	for p := range schemas.RewardPartitions {
		g.Go(func() error {
			w := &worker{
				cfg: cfg, bus: b, log: log.With().Int("partition", p).Logger(), metrics: instruments,
				groups: map[string]*group{}, batches: map[string]*batch{},
			}
			if err := w.run(ctx, p); err != nil {
				return fmt.Errorf("partition %d: %w", p, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// worker owns one partition; all of its state belongs to one goroutine.
type worker struct {
	cfg     Config
	bus     *bus.Bus
	log     zerolog.Logger
	metrics *instruments
	sub     *bus.Subscription
	groups  map[string]*group // by run and uid
	batches map[string]*batch // explicit batches, by run and batch id
}

// sweep is how often deadlines are looked at, lastMoment what a shutdown waits for the
// result in hand.
const (
	sweep      = 250 * time.Millisecond
	lastMoment = 2 * time.Second
)

func (w *worker) run(ctx context.Context, partition int) error {
	consumer := w.cfg.consumer(partition)
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
	nextSweep := time.Now().Add(sweep)
	for {
		wait, cancel := context.WithDeadline(ctx, nextSweep)
		m, err := sub.Next(wait)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			w.receive(work, m)
		case !errors.Is(err, context.DeadlineExceeded):
			return err
		}
		if now := time.Now(); now.After(nextSweep) {
			w.expire(work, now)
			nextSweep = now.Add(sweep)
		}
	}
}

// consumer is the durable of one partition.
func (c Config) consumer(partition int) bus.ConsumerConfig {
	return bus.ConsumerConfig{
		Stream: schemas.StreamRewards, Durable: fmt.Sprintf("advantage-p%02d", partition),
		Filters: []string{fmt.Sprintf("%sreward.%d.>", schemas.Prefix, partition)},
		AckWait: c.AckWait, MaxDeliver: -1, MaxAckPending: c.MaxHeld, Slots: 512,
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
}

func (w *worker) forgetGroup(g *group) {
	key := g.run + "." + g.uid
	if w.groups[key] == g {
		delete(w.groups, key)
		w.metrics.openGroups.Dec()
		w.metrics.held.Sub(float64(len(g.samples)))
	}
}

// receive takes one reward; whatever goes wrong is retried by redelivery.
func (w *worker) receive(ctx context.Context, m *bus.Message) {
	delivery := "first"
	if m.Delivered > 1 {
		delivery = "again"
	}
	w.metrics.rewards.WithLabelValues(delivery).Inc()
	var r schemas.Reward
	if err := schemas.DecodeValid(m.Data, &r); err != nil {
		w.metrics.dead.WithLabelValues(schemas.CodeDecode).Inc()
		if err := w.bus.Dead(ctx, "advantage", schemas.CodeDecode, err.Error(), m); err != nil {
			w.retry(m, err)
			return
		}
		w.settle(m.Term(err.Error()))
		return
	}
	if err := w.add(ctx, m, &r); err != nil {
		w.retry(m, err)
	}
}

func (w *worker) add(ctx context.Context, m *bus.Message, r *schemas.Reward) error {
	key := r.Run + "." + r.UID
	g, open := w.groups[key]
	if !open {
		done, err := w.closed(ctx, m, r)
		if err != nil || done {
			return err
		}
		g = newGroup(r)
		w.groups[key] = g
		w.metrics.openGroups.Inc()
	}
	before := len(g.samples)
	g.add(r, m, w.cfg.GroupTimeout)
	w.metrics.held.Add(float64(len(g.samples) - before))
	if b := w.batchOf(g); b != nil {
		b.groups[g.uid] = g
		if !g.settled() {
			return nil
		}
		return w.advanceBatch(ctx, b, time.Now(), false)
	}
	if g.settled() {
		return w.close(ctx, g)
	}
	return nil
}

// closed says whether the result that r belongs to is stored already, and settles m if
// so.
func (w *worker) closed(ctx context.Context, m *bus.Message, r *schemas.Reward) (bool, error) {
	over, err := w.batchClosed(ctx, r)
	if err != nil || r.Group.BatchGroups > 0 && !over {
		return false, err // a group of an open batch is needed again
	}
	a, err := w.stored(ctx, r.Run, r.UID)
	switch {
	case errors.Is(err, bus.ErrNotFound) && !over:
		return false, nil
	case errors.Is(err, bus.ErrNotFound):
		g := newGroup(r)
		g.add(r, nil, w.cfg.GroupTimeout)
		if err := w.tooLate(ctx, g); err != nil {
			return false, err
		}
		a = g.result
	case err != nil:
		return false, err
	}
	if a.RefilledBy != "" && m.Delivered > 1 {
		// Whoever stored it may have died before it asked.
		if err := w.askAgain(ctx, r.Run, r.Group.PromptSeq, a); err != nil {
			return false, err
		}
	}
	if !part(a, r.SampleIndex) {
		if err := w.late(ctx, m); err != nil {
			return false, err
		}
	}
	w.settle(m.AckAsync())
	return true, nil
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
	w.metrics.dead.WithLabelValues(schemas.CodeLate).Inc()
	return w.bus.Dead(ctx, "advantage", schemas.CodeLate, "the group closed without this sample", m)
}

func (w *worker) stored(ctx context.Context, run, uid string) (*schemas.Advantage, error) {
	m, err := w.bus.Last(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid))
	if err != nil {
		return nil, fmt.Errorf("look up advantage of %s: %w", uid, err)
	}
	var a schemas.Advantage
	if err := schemas.Decode(m.Data, &a); err != nil {
		return nil, fmt.Errorf("stored advantage %s: %w", m.Subject, err)
	}
	return &a, nil
}

// close stores the result of a group that is its own batch and acks its rewards.
func (w *worker) close(ctx context.Context, g *group) error {
	a := g.outline()
	if counts(a) {
		began := time.Now()
		estimate([]*group{g}, []*schemas.Advantage{a})
		w.metrics.estimate.Observe(time.Since(began).Seconds())
	}
	if counts(a) {
		if err := w.store(ctx, g, a); err != nil {
			return err
		}
	} else if _, err := w.drop(ctx, g, a); err != nil {
		return err
	}
	w.forgetGroup(g)
	w.release(ctx, g)
	return nil
}

// store publishes a group's advantage once; when another worker was first, the stored
// one is the result.
func (w *worker) store(ctx context.Context, g *group, a *schemas.Advantage) error {
	if g.result != nil {
		return nil
	}
	ack, err := w.bus.Publish(ctx, a)
	if err != nil {
		return fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	if ack.Duplicate {
		if a, err = w.stored(ctx, a.Run, a.UID); err != nil {
			return err
		}
	}
	g.result = a
	w.metrics.groups.WithLabelValues(a.Status).Inc()
	var last time.Time
	for _, s := range g.samples {
		if s.stored.After(last) {
			last = s.stored
		}
	}
	if !last.IsZero() {
		w.metrics.latency.Observe(max(0, time.Since(last).Seconds()))
	}
	w.log.Info().Str("run", a.Run).Str("uid", a.UID).Str("status", a.Status).Int("members", len(a.Members)).Msg("group closed")
	return nil
}

// expire closes what is past its deadline, once everything stored before is here.
func (w *worker) expire(ctx context.Context, now time.Time) {
	overdue := false
	for _, g := range w.groups {
		overdue = overdue || now.After(g.deadline)
	}
	caughtUp := false
	if overdue {
		var err error
		if caughtUp, err = w.sub.CaughtUp(); err != nil {
			w.log.Debug().Err(err).Msg("deadlines wait: the consumer does not say what it has")
		}
	}
	for _, g := range w.groups {
		if g.spec.BatchGroups == 0 && g.ripe(now, caughtUp) {
			if err := w.close(ctx, g); err != nil {
				w.log.Warn().Err(err).Str("uid", g.uid).Msg("close group, will try again")
			}
		}
	}
	for _, b := range w.batches {
		if err := w.advanceBatch(ctx, b, now, caughtUp); err != nil {
			w.log.Warn().Err(err).Str("batch", b.id).Msg("close batch, will try again")
		}
	}
}

// release acks the rewards of a group whose result is stored. What is no part of it
// came too late.
func (w *worker) release(ctx context.Context, g *group) {
	for _, s := range g.samples {
		if s.message == nil {
			continue
		}
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
	w.log.Warn().Err(err).Str("subject", m.Subject).Uint64("delivered", m.Delivered).Msg("reward not taken, will be redelivered")
	w.settle(m.NakWithDelay(min(time.Duration(m.Delivered)*time.Second, 30*time.Second)))
}

// settle notes a failed ack: the server will redeliver, which is harmless.
func (w *worker) settle(err error) {
	if err != nil && !strings.Contains(err.Error(), "context canceled") {
		w.log.Warn().Err(err).Msg("ack")
	}
}
