package advantage

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// batch is an explicit batch: groups normalised or reported together. All its
// rewards stay unacked until the Batch event is stored, so a crash loses nothing.
type batch struct {
	run, id  string
	expected int64
	deadline time.Time
	// global: advantages need the whole batch; else each group closes on its own.
	global bool
	groups map[string]*group // by uid
}

// batchOf returns the explicit batch of a reward, nil when it has none.
func (w *worker) batchOf(r *schemas.Reward, opened time.Time) *batch {
	if r.Group.BatchGroups == 0 {
		return nil
	}
	key := r.Run + "." + r.Group.Batch
	b, ok := w.batches[key]
	if !ok {
		b = &batch{
			run: r.Run, id: r.Group.Batch, expected: r.Group.BatchGroups, deadline: deadline(r, opened, w.cfg.GroupTimeout),
			global: r.Group.Advantage.Std == schemas.StdGlobal, groups: map[string]*group{},
		}
		w.batches[key] = b
	}
	if d := deadline(r, opened, w.cfg.GroupTimeout); d.After(b.deadline) {
		b.deadline = d
	}
	return b
}

// advanceBatch stores the advantages that are due and, when every group has one,
// the Batch event. expired closes what is missing at the batch's deadline.
func (w *worker) advanceBatch(ctx context.Context, b *batch, expired bool) error {
	uids := slices.Sorted(maps.Keys(b.groups))
	groups := make([]*group, len(uids))
	due := int64(0)
	for i, uid := range uids {
		g := b.groups[uid]
		groups[i] = g
		ready := g.settled() || expired || time.Now().After(g.deadline)
		if ready {
			due++
		}
		if !ready || b.global || g.result != nil {
			continue
		}
		a, err := results([]*group{g})
		if err != nil {
			return err
		}
		if _, err := w.publish(ctx, g, a[0]); err != nil {
			return err
		}
	}
	if !expired && (due < b.expected || due < int64(len(groups))) {
		return nil
	}
	advantages, err := results(groups)
	if err != nil {
		return err
	}
	for i, g := range groups {
		if advantages[i], err = w.publish(ctx, g, advantages[i]); err != nil {
			return err
		}
	}
	if _, err := w.bus.Publish(ctx, summary(b, uids, advantages)); err != nil {
		return fmt.Errorf("publish batch %s: %w", b.id, err)
	}
	w.log.Info().Str("run", b.run).Str("batch", b.id).Int("groups", len(groups)).Bool("expired", expired).Msg("batch closed")
	delete(w.batches, b.run+"."+b.id)
	for _, g := range groups {
		delete(w.groups, g.run+"."+g.uid)
		w.release(g)
	}
	return nil
}

// summary is the Batch event, with the metrics that verl names.
func summary(b *batch, uids []string, advantages []*schemas.Advantage) *schemas.Batch {
	var rewards, adv, stds []float64
	zero := 0
	e := &schemas.Batch{Run: b.run, Batch: b.id, Groups: int64(len(advantages)), UIDs: uids}
	for _, a := range advantages {
		var own []float64
		for _, m := range a.Members {
			if m.Reward != nil {
				own = append(own, *m.Reward)
			}
			if m.Advantage != nil {
				adv = append(adv, *m.Advantage)
			}
		}
		if len(own) > 0 {
			if slices.Min(own) == slices.Max(own) {
				zero++
			}
			_, s := moments(own)
			stds = append(stds, s)
		}
		rewards = append(rewards, own...)
		e.StdBasis, e.Closed = schemas.BasisPopulation, max(e.Closed, a.Closed)
	}
	e.Samples = int64(len(rewards))
	if len(rewards) == 0 {
		return e
	}
	mean, std := moments(rewards)
	stdMean, _ := moments(stds)
	e.Mean, e.Std = &mean, &std
	metrics := map[string]float64{
		"critic/rewards/mean": mean, "critic/rewards/max": slices.Max(rewards), "critic/rewards/min": slices.Min(rewards),
		"critic/rewards/zero_std_ratio": float64(zero) / float64(len(stds)), "critic/rewards/std_mean": stdMean,
		"critic/rewards/group_size": float64(len(rewards)) / float64(len(advantages)),
	}
	if len(adv) > 0 {
		advMean, _ := moments(adv)
		metrics["critic/advantages/mean"], metrics["critic/advantages/max"], metrics["critic/advantages/min"] = advMean, slices.Max(adv), slices.Min(adv)
	}
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		e.Metrics = append(e.Metrics, schemas.Metric{Name: name, Value: metrics[name]})
	}
	return e
}

// moments returns mean and population standard deviation.
func moments(x []float64) (mean, std float64) {
	for _, v := range x {
		mean += v
	}
	mean /= float64(len(x))
	for _, v := range x {
		std += (v - mean) * (v - mean)
	}
	return mean, math.Sqrt(std / float64(len(x)))
}
