package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
)

// advantageBench is one `bench advantage` command.
type advantageBench struct {
	sizes    []int
	rewards  int
	rounds   int
	rate     int
	duration time.Duration
	open     int

	*plane
}

func benchAdvantageCommand() *cobra.Command {
	b := advantageBench{}
	c := &cobra.Command{
		Use:   "advantage",
		Short: "rewards per second through the advantage service, its latency, memory of open groups",
		Long: `advantage starts an embedded server on a store in a temporary folder and measures three
things.

Throughput: rewards are stored first, on their guarded subjects as in production. Then a
bare consumer takes them all, which decodes nothing and acks each, and the service takes
them all: decode, group, estimate, store the advantage of each group, ack. Both fetch
from the same 16 partitions, equally many at once, take turns at going first, and have
the server in the same process. The ratio is that of each round.

Latency: groups come at a moderate rate; the time from the last reward of a group to its
advantage is that between the two times of storage, by the server's clock.

Memory: rewards of groups that all lack their last one. The heap is measured, collected,
while the service holds them (seven times: the median, and the most) and when it has stopped.

The report is Markdown.`,
		Example: `  bench advantage
  bench advantage --n 8 --rewards 100000 --rounds 9
  bench advantage --open-groups 0 --latency 0     # throughput only`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.IntSliceVar(&b.sizes, "n", []int{8, 24}, "samples per group")
	f.IntVar(&b.rewards, "rewards", 96_000, "rewards of each round")
	f.IntVar(&b.rounds, "rounds", 7, "measured rounds of each; the medians are reported")
	f.IntVar(&b.rate, "rate", 100, "groups per second while latency is measured")
	f.DurationVar(&b.duration, "latency", 10*time.Second, "how long latency is measured; 0 for not")
	f.IntVar(&b.open, "open-groups", 100_000, "groups held open while memory is measured; 0 for not")
	return c
}

func (b *advantageBench) check() error {
	err := errors.Join(checkPositive("n", b.sizes, schemas.MaxGroupSize),
		checkPositive("rewards", []int{b.rewards}, 10_000_000),
		checkPositive("rounds", []int{b.rounds}, 10_000), checkPositive("rate", []int{b.rate}, 10_000))
	if b.duration < 0 || b.duration > time.Hour {
		err = errors.Join(err, fmt.Errorf("--latency: %v; must be between 0 and 1h", b.duration))
	}
	if b.open < 0 || b.open > 1_000_000 {
		err = errors.Join(err, fmt.Errorf("--open-groups: %d; must be between 0 and 1000000", b.open))
	}
	for _, n := range b.sizes {
		if n > b.rewards {
			err = errors.Join(err, fmt.Errorf("--rewards: %d; must be one group of %d at least", b.rewards, n))
		}
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

func (b *advantageBench) run(ctx context.Context, out, stderr io.Writer) error {
	if err := b.check(); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n", machine())
	return withPlane(ctx, stderr, func(p *plane) error {
		b.plane = p
		if err := b.throughput(ctx, out); err != nil {
			return err
		}
		if b.duration > 0 {
			if err := b.latency(ctx, out); err != nil {
				return err
			}
		}
		if b.open > 0 {
			return b.memory(ctx, out)
		}
		return nil
	})
}

// benchBegan is when the prompts of the bench came.
var benchBegan = time.Now()

// benchReward is a reward as the reward service stores it after a prompt with defaults.
func benchReward(run schemas.Run, group int, i, n int64) *schemas.Reward {
	value := float64((group*31+int(i)*17)%97) / 97
	now := time.Now().UnixNano()
	uid := schemas.UID(fmt.Sprintf("p%07d", group))
	return &schemas.Reward{
		Run: run, UID: uid, SampleIndex: i, GroupSize: n, Status: schemas.StatusScored, Reward: &value,
		Scores: []schemas.Score{{
			Name: "jpeg_compressibility", Version: "1", Weight: 1, Status: schemas.StatusScored, Value: &value,
			DurationNS: 412_345,
		}},
		TrajectorySeq: uint64(group)*uint64(n) + uint64(i) + 1,
		Trained: schemas.Trained{
			TrainedSteps: 2, ScheduleDigest: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
		},
		Group: schemas.Group{
			Batch: string(uid), PromptSeq: uint64(group + 1), Created: benchBegan.UnixNano() + int64(group),
			Reward: []schemas.RewardSpec{{Name: "jpeg_compressibility", Weight: new(1.0), Required: new(true)}},
			Advantage: schemas.AdvantageSpec{
				Estimator: "flow_grpo", Std: schemas.StdGroup, StdBasis: schemas.BasisSample, Epsilon: new(1e-4),
			},
			GroupPolicy: &schemas.GroupPolicy{
				ZeroStd: schemas.GroupKeep, Failed: schemas.GroupKeep, RefillRounds: new(int64(3)),
				MaxPolicySpan: new(int64(1)),
			},
		},
		Scored: now, SampleStarted: now - 2e9, SampleFinished: now - 1e9,
	}
}

// benchOpening is the record of the group of a reward.
func benchOpening(r *schemas.Reward) *schemas.Opening {
	return &schemas.Opening{
		Run: r.Run, UID: r.UID, GroupSize: r.GroupSize, PromptDigest: r.ScheduleDigest,
		Prompt:         "a blue sign that says \"4071\"",
		NegativePrompt: " ", Lane: "signs", SampleSeed: r.TrajectorySeq, NoiseSeed: r.TrajectorySeq,
		ScheduleDigest: r.ScheduleDigest, Group: r.Group,
	}
}

// benchPublish stores a reward, and before the first of a group the group's record, on both
// of its subjects.
func benchPublish(ctx context.Context, p *bus.Publisher, r *schemas.Reward) error {
	if r.SampleIndex == 0 {
		o := benchOpening(r)
		if _, err := p.Publish(ctx, (*schemas.GroupRecord)(o)); err != nil {
			return err
		}
		if _, err := p.Publish(ctx, o); err != nil {
			return err
		}
	}
	_, err := p.Publish(ctx, r)
	return err
}

// put stores, in the order of samples of many prompts side by side, the records and the
// given samples of groups [first, first+count).
func (b *advantageBench) put(ctx context.Context, run schemas.Run, first, count int, n, samples int64) error {
	p := b.bus.NewPublisher(512, 32<<20)
	defer p.Close()
	const beside = 64 // prompts that are sampled at a time
	for at := first; at < first+count; at += beside {
		for i := range samples {
			for g := at; g < min(at+beside, first+count); g++ {
				if err := benchPublish(ctx, p, benchReward(run, g, i, n)); err != nil {
					return err
				}
			}
		}
	}
	return p.Flush(ctx)
}

// grouped are the streams with rewards and their results.
var grouped = []string{schemas.StreamGroups, schemas.StreamRewards, schemas.StreamAdvantages}

func (b *advantageBench) throughput(ctx context.Context, out io.Writer) error {
	heading(out, "Throughput")
	fmt.Fprintf(out, "%d rewards in each of %d rounds; medians, and the ratio of each round's rates with its "+
		"quartiles.\n\n", b.rewards, b.rounds)
	fmt.Fprint(out, "| n | bare consumer, rewards/s | service, rewards/s | groups/s | ratio | CPU us per reward "+
		"(bare, service; both with the server) | CPU ratio |\n| --- | --- | --- | --- | --- | --- | --- |\n")
	for k, n := range b.sizes {
		groups := b.rewards / n
		rewards := float64(groups * n)
		var bare, served, ratios, bareCPU, servedCPU, ratiosCPU []float64
		for round := -1; round < b.rounds; round++ { // the first warms up
			b.tick(fmt.Sprintf("throughput, n = %d", n),
				(float64(k)+float64(round+1)/float64(b.rounds+1))/float64(len(b.sizes)))
			if err := b.clear(ctx, grouped...); err != nil {
				return err
			}
			if err := b.put(ctx, schemas.Run(fmt.Sprintf("t%d-%d", n, round+1)), 0, groups, int64(n),
				int64(n)); err != nil {
				return err
			}
			engines := []func(context.Context, int, int) (time.Duration, error){b.bare, b.serve}
			var took [2]time.Duration
			var cpu [2]float64
			for k := range engines {
				e := (k + round + 1) % len(engines)
				runtime.GC()
				cpu[e] = -cpuSeconds()
				var err error
				if took[e], err = engines[e](ctx, groups*n, groups); err != nil {
					return err
				}
				cpu[e] += cpuSeconds()
			}
			if round >= 0 {
				bareCPU, servedCPU = append(bareCPU, cpu[0]/rewards*1e6), append(servedCPU, cpu[1]/rewards*1e6)
				ratiosCPU = append(ratiosCPU, cpu[0]/cpu[1])
				bare, served = append(bare, rewards/took[0].Seconds()), append(served, rewards/took[1].Seconds())
				ratios = append(ratios, took[0].Seconds()/took[1].Seconds())
			}
		}
		mid := median(served)
		ratio := median(ratios) // sorts
		fmt.Fprintf(out, "| %d | %.0f | %.0f | %.0f | **%.2f** (%.2f - %.2f) | %.1f, %.1f | %.2f |\n",
			n, median(bare), mid, mid/float64(n), ratio, percentile(ratios, .25), percentile(ratios, .75),
			median(bareCPU), median(servedCPU), median(ratiosCPU))
	}
	return nil
}

// bare takes all rewards with the client library's own consumer of each partition, and
// acks them.
func (b *advantageBench) bare(ctx context.Context, _, _ int) (time.Duration, error) {
	js := b.bus.JetStream()
	began := time.Now()
	for p := range schemas.RewardPartitions {
		name := partitionConsumer("bare", p)
		c, err := js.CreateOrUpdateConsumer(ctx, schemas.StreamRewards, jetstream.ConsumerConfig{
			Durable: name, FilterSubjects: []string{schemas.PartitionFilter(p)},
			AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: advantage.DefaultConfig().MaxHeld,
		})
		if err != nil {
			return 0, fmt.Errorf("bare consumer: %w", err)
		}
		consuming, err := c.Consume(func(m jetstream.Msg) {
			_ = m.Ack() // a lost one comes again
		}, jetstream.PullMaxMessages(advantage.FetchAhead))
		if err != nil {
			return 0, fmt.Errorf("bare consumer: %w", err)
		}
		defer consuming.Stop()
		defer func() { _ = js.DeleteConsumer(context.WithoutCancel(ctx), schemas.StreamRewards, name) }()
	}
	if err := b.acked(ctx, "bare"); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

// serve runs the service until every group has its advantage and every reward is acked.
func (b *advantageBench) serve(ctx context.Context, rewards, groups int) (took time.Duration, err error) {
	began := time.Now()
	err = b.serving(ctx, func(ctx context.Context) error {
		err := b.stored(ctx, groups)
		if err == nil {
			err = b.acked(ctx, "advantage")
		}
		took = time.Since(began)
		return err
	})
	return took, err
}

// serving runs the service beside do.
func (b *advantageBench) serving(ctx context.Context, do func(context.Context) error) error {
	work, stop := context.WithCancel(ctx)
	defer stop()
	g, work := errgroup.WithContext(work)
	g.Go(func() error { return advantage.Run(work, advantage.DefaultConfig(), b.bus, zerolog.Nop()) })
	g.Go(func() error {
		defer stop()
		return do(work)
	})
	return g.Wait()
}

// poll asks again until the answer is yes.
func poll(ctx context.Context, every time.Duration, yes func() (bool, error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if ok, err := yes(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// stored waits until so many advantages are stored.
func (b *advantageBench) stored(ctx context.Context, groups int) error {
	s, err := b.bus.JetStream().Stream(ctx, schemas.StreamAdvantages)
	if err != nil {
		return err
	}
	return poll(ctx, 2*time.Millisecond, func() (bool, error) {
		info, err := s.Info(ctx)
		return err == nil && info.State.Msgs >= uint64(groups), err
	})
}

// acked waits until the consumers of all partitions have nothing left.
func (b *advantageBench) acked(ctx context.Context, name string) error {
	for p := range schemas.RewardPartitions {
		c, err := b.bus.JetStream().Consumer(ctx, schemas.StreamRewards, partitionConsumer(name, p))
		if err != nil {
			return err
		}
		if err := poll(ctx, 2*time.Millisecond, func() (bool, error) {
			info, err := c.Info(ctx)
			return err == nil && info.NumPending == 0 && info.NumAckPending == 0, err
		}); err != nil {
			return err
		}
	}
	return nil
}

func partitionConsumer(name string, partition int) string {
	return fmt.Sprintf("%s-p%02d", name, partition)
}

// latency lets groups of the first size come one after another at the given rate.
func (b *advantageBench) latency(ctx context.Context, out io.Writer) error {
	if err := b.clear(ctx, grouped...); err != nil {
		return err
	}
	n := int64(b.sizes[0])
	groups := max(1, int(b.duration.Seconds()*float64(b.rate)))
	const run = "latency"
	err := b.serving(ctx, func(ctx context.Context) error {
		p := b.bus.NewPublisher(512, 32<<20)
		defer p.Close()
		tick := time.NewTicker(time.Second / time.Duration(b.rate))
		defer tick.Stop()
		for g := range groups {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-tick.C:
			}
			b.tick("latency", float64(g)/float64(groups))
			for i := range n {
				if err := benchPublish(ctx, p, benchReward(run, g, i, n)); err != nil {
					return err
				}
			}
		}
		return b.stored(ctx, groups)
	})
	if err != nil {
		return err
	}
	last := map[schemas.UID]time.Time{}
	for m, err := range b.bus.Read(ctx, schemas.StreamRewards, []string{schemas.RewardFilter(run, "*", "*")},
		bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		if a, _ := schemas.ParseSubject(m.Subject); m.Time.After(last[a.UID]) {
			last[a.UID] = m.Time
		}
	}
	var ms []float64
	for m, err := range b.bus.Read(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")},
		bus.ReadOptions{}) {
		if err != nil {
			return err
		}
		a, _ := schemas.ParseSubject(m.Subject)
		ms = append(ms, m.Time.Sub(last[a.UID]).Seconds()*1e3)
	}
	slices.Sort(ms)
	heading(out, "Latency")
	fmt.Fprintf(out, "From the last reward of a group to its advantage, both stored: %d groups of %d, %d groups/s.\n\n",
		len(ms), n, b.rate)
	fmt.Fprintf(out, "| p50 | p90 | p99 | longest |\n| --- | --- | --- | --- |\n| %.2f ms | %.2f ms | %.2f ms | "+
		"%.2f ms |\n",
		percentile(ms, .5), percentile(ms, .9), percentile(ms, .99), ms[len(ms)-1])
	return nil
}

// percentile of sorted values.
func percentile(sorted []float64, p float64) float64 {
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// memory holds groups open that lack their last reward.
func (b *advantageBench) memory(ctx context.Context, out io.Writer) error {
	if err := b.clear(ctx, grouped...); err != nil {
		return err
	}
	const n, run = 8, "open"
	const step = 1000
	room := int64(b.open)*n*4<<10 + 64<<20 // more than the rewards take, and than the streams have by default
	if err := b.bus.SetLimits(ctx, bus.StreamLimit{Stream: schemas.StreamRewards, MaxBytes: room},
		bus.StreamLimit{Stream: schemas.StreamGroups, MaxBytes: room / 4}); err != nil {
		return err
	}
	for at := 0; at < b.open; at += step {
		b.tick("rewards of open groups", float64(at)/float64(b.open))
		if err := b.put(ctx, run, at, min(step, b.open-at), n, n-1); err != nil {
			return err
		}
	}
	rewards := b.open * (n - 1)
	var took, held, most, busy float64
	began := time.Now()
	err := b.serving(ctx, func(ctx context.Context) error {
		if err := b.inHand(ctx, rewards+b.open); err != nil {
			return err
		}
		took = time.Since(began).Seconds()
		// Let the server's caches pass, then see what waiting costs: messages in hand need
		// heartbeats.
		if err := b.wait(ctx, settleTime); err != nil {
			return err
		}
		cpu := cpuSeconds()
		if err := b.wait(ctx, idleTime); err != nil {
			return err
		}
		busy = (cpuSeconds() - cpu) / idleTime.Seconds()
		// Heartbeats come in bursts, which wait in the server's queues for a moment.
		var readings []float64
		for range 7 {
			if err := b.wait(ctx, 1500*time.Millisecond); err != nil {
				return err
			}
			readings = append(readings, liveHeap())
		}
		held, most = median(readings), slices.Max(readings)
		return nil
	})
	if err != nil {
		return err
	}
	if err := b.wait(ctx, settleTime); err != nil {
		return err
	}
	free := liveHeap()
	held, most = held-free, most-free
	heading(out, "Open groups")
	fmt.Fprintf(out, "%d groups of %d without their last reward, %d rewards in flight after %.1f s: %.0f MiB of "+
		"heap are free when the service has stopped, "+
		"%.0f bytes per reward, %.1f KiB per group; %.0f MiB at most while heartbeats are sent. Waiting takes %.0f "+
		"%% of one core, the server's part included.\n",
		b.open, n, rewards, took, held/(1<<20), held/float64(rewards), held/float64(b.open)/1024, most/(1<<20),
		busy*100)
	return nil
}

const (
	// settleTime is longer than the server caches what was read.
	settleTime = 12 * time.Second
	// idleTime is two rounds of heartbeats.
	idleTime = 20 * time.Second
)

// inHand waits until the service holds so many rewards and records.
func (b *advantageBench) inHand(ctx context.Context, messages int) error {
	js := b.bus.JetStream()
	return poll(ctx, 2*time.Millisecond, func() (bool, error) {
		time.Sleep(100 * time.Millisecond)
		held := 0
		for p := range schemas.RewardPartitions {
			c, err := js.Consumer(ctx, schemas.StreamRewards, partitionConsumer("advantage", p))
			if err != nil {
				return false, err
			}
			held += c.CachedInfo().NumAckPending
		}
		b.tick("open groups taken in", float64(held)/float64(messages))
		return held >= messages, nil
	})
}

// liveHeap is the size of what is reachable.
func liveHeap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers held
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}
