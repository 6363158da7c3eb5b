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

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Config of the advantage service.
type Config struct {
	// GroupTimeout closes groups and batches without a deadline of their own, counted from their first reward.
	GroupTimeout time.Duration `koanf:"group_timeout" help:"a group or batch without a deadline closes this long after its first reward"`
	// MaxHeld bounds the rewards of open groups that one partition holds.
	MaxHeld int `koanf:"max_held" help:"rewards of open groups that one of the 16 partitions may hold"`
	// AckWait is how long the server waits for a sign of life before a standby takes over.
	AckWait time.Duration `koanf:"ack_wait" help:"takeover of a partition whose worker died"`
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
	g, ctx := errgroup.WithContext(ctx)
	for p := range schemas.RewardPartitions {
		g.Go(func() error {
			w := &worker{cfg: cfg, bus: b, log: log.With().Int("partition", p).Logger(), groups: map[string]*group{}, batches: map[string]*batch{}}
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
	sub, err := w.bus.Subscription(ctx, bus.ConsumerConfig{
		Stream: schemas.StreamRewards, Durable: fmt.Sprintf("advantage-p%02d", partition),
		Filters: []string{fmt.Sprintf("%sreward.%d.>", schemas.Prefix, partition)},
		AckWait: w.cfg.AckWait, MaxDeliver: -1, MaxAckPending: w.cfg.MaxHeld, Slots: 512,
		PriorityGroup: "advantage", PinnedTTL: min(w.cfg.AckWait, bus.DefaultPinnedTTL),
		OnRelease: w.forget,
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before it was up
		}
		return err
	}
	defer sub.Close()
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

// forget drops the open groups: another worker has the partition now.
func (w *worker) forget() {
	w.log.Info().Int("groups", len(w.groups)).Msg("another worker has the partition now")
	clear(w.groups)
	clear(w.batches)
}

// receive takes one reward; whatever goes wrong is retried by redelivery.
func (w *worker) receive(ctx context.Context, m *bus.Message) {
	var r schemas.Reward
	if err := schemas.DecodeValid(m.Data, &r); err != nil {
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
		closed, late, err := w.closed(ctx, r)
		if err != nil {
			return err
		}
		if late {
			if err := w.bus.Dead(ctx, "advantage", schemas.CodeLate, "the group closed without this sample", m); err != nil {
				return err
			}
		}
		if closed || late {
			w.settle(m.AckAsync())
			return nil
		}
		g = newGroup(r, m.Time, w.cfg.GroupTimeout)
		w.groups[key] = g
	}
	g.add(r, m)
	if b := w.batchOf(r, m.Time); b != nil {
		b.groups[r.UID] = g
		return w.advanceBatch(ctx, b, false)
	}
	if g.settled() {
		return w.close(ctx, key, g)
	}
	return nil
}

// closed says whether the result that r belongs to is stored already, and whether
// r came too late to be part of it.
func (w *worker) closed(ctx context.Context, r *schemas.Reward) (closed, late bool, err error) {
	if r.Group.BatchGroups > 0 {
		m, err := w.bus.Last(ctx, schemas.StreamAdvantages, schemas.BatchSubject(r.Run, r.Group.Batch))
		if errors.Is(err, bus.ErrNotFound) {
			return false, false, nil
		}
		if err != nil {
			return false, false, fmt.Errorf("look up batch %s: %w", r.Group.Batch, err)
		}
		var b schemas.Batch
		if err := schemas.Decode(m.Data, &b); err != nil {
			return false, false, fmt.Errorf("stored batch %s: %w", m.Subject, err)
		}
	}
	a, err := w.stored(ctx, r.Run, r.UID)
	if errors.Is(err, bus.ErrNotFound) {
		// The batch closed and this group was no part of it, or nothing has closed yet.
		return false, r.Group.BatchGroups > 0, nil
	}
	if err != nil {
		return false, false, err
	}
	for _, member := range a.Members {
		if member.SampleIndex == r.SampleIndex {
			return true, member.Status == schemas.StatusMissing, nil
		}
	}
	return true, true, nil
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
func (w *worker) close(ctx context.Context, key string, g *group) error {
	a, err := results([]*group{g})
	if err != nil {
		return err
	}
	if _, err := w.publish(ctx, g, a[0]); err != nil {
		return err
	}
	delete(w.groups, key)
	w.release(g)
	return nil
}

// publish stores a group's advantage once; when another worker was first, the
// stored one is the result.
func (w *worker) publish(ctx context.Context, g *group, a *schemas.Advantage) (*schemas.Advantage, error) {
	if g.result != nil {
		return g.result, nil
	}
	ack, err := w.bus.Publish(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("publish advantage of %s: %w", a.UID, err)
	}
	if ack.Duplicate {
		if a, err = w.stored(ctx, a.Run, a.UID); err != nil {
			return nil, err
		}
	}
	g.result = a
	w.log.Info().Str("run", a.Run).Str("uid", a.UID).Str("status", a.Status).Int("members", len(a.Members)).Msg("group closed")
	return a, nil
}

// expire closes what is past its deadline.
func (w *worker) expire(ctx context.Context, now time.Time) {
	for key, g := range w.groups {
		if g.batchGroups == 0 && now.After(g.deadline) {
			if err := w.close(ctx, key, g); err != nil {
				w.log.Warn().Err(err).Str("uid", g.uid).Msg("close at deadline, will try again")
			}
		}
	}
	for _, b := range w.batches {
		if err := w.advanceBatch(ctx, b, now.After(b.deadline)); err != nil {
			w.log.Warn().Err(err).Str("batch", b.id).Msg("close batch, will try again")
		}
	}
}

func (w *worker) release(g *group) {
	for _, m := range g.held {
		w.settle(m.AckAsync())
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
