package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler"
)

// swarmBench is one `bench swarm` command.
type swarmBench struct {
	samplers  []int
	groups    int
	n         int
	steps     int
	transport string

	*plane
	announced atomic.Int64
}

func benchSwarmCommand() *cobra.Command {
	b := swarmBench{}
	c := &cobra.Command{
		Use:   "swarm",
		Short: "many virtual samplers on one server: samples per second, memory, what got lost",
		Long: `swarm starts an embedded server, intake, and so many samplers of the synthetic model: each is the
whole service with a connection, a presence and a room for steps of its own, and takes one
sample at a time. They share a lane and take the samples of the same prompts. What they compute is next to nothing:
what is seen is what the server and the services' talk with it cost.

Every sample must be stored once, with no dead letter; else that is the error. The report is Markdown.`,
		Example: `  bench swarm
  bench swarm --samplers 1,64,1024 --groups 2000
  bench swarm --samplers 256 --transport TCP`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.IntSliceVar(&b.samplers, "samplers", []int{16, 128, 1024}, "samplers on the server, one row for each")
	f.IntVar(&b.groups, "groups", 512, "prompts of each row")
	f.IntVar(&b.n, "n", 8, "samples of a prompt")
	f.IntVar(&b.steps, "steps", 3, "denoising steps of a sample")
	f.StringVar(&b.transport, "transport", inProcess, "how samplers reach the server: "+inProcess+" or "+loopback)
	return c
}

func (b *swarmBench) check() error {
	err := errors.Join(checkPositive("samplers", b.samplers, 8192), checkPositive("groups", []int{b.groups}, 1_000_000),
		checkPositive("n", []int{b.n}, schemas.MaxGroupSize), checkPositive("steps", []int{b.steps}, schemas.MaxSteps))
	if b.transport != inProcess && b.transport != loopback {
		err = errors.Join(err, fmt.Errorf("--transport: %q; must be %s or %s", b.transport, inProcess, loopback))
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

func (b *swarmBench) run(ctx context.Context, out, stderr io.Writer) error {
	if err := b.check(); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n", machine())
	heading(out, "Virtual samplers")
	fmt.Fprintf(out, "%d samples of %d steps of the synthetic model, %s. Bytes per sampler: live heap beyond that "+
		"without samplers, with both ends of its connection.\n\n", b.groups*b.n, b.steps, b.transport)
	fmt.Fprint(out, "| samplers | until all serve | samples/s | steps/s | CPU ms per sample | goroutines | heap | "+
		"bytes per sampler | redelivered |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, samplers := range b.samplers {
		if err := withPlane(ctx, stderr, func(p *plane) error {
			b.plane = p
			return b.row(ctx, out, samplers)
		}); err != nil {
			return err
		}
	}
	return nil
}

const (
	// starters is how many samplers start at a time: what each computes then, it would compute on a machine of its own.
	starters = 4
	// swarmPoll is how often is looked how far they are.
	swarmPoll = 50 * time.Millisecond
)

// row measures so many samplers.
func (b *swarmBench) row(ctx context.Context, out io.Writer, samplers int) (err error) {
	work, stop := context.WithCancel(ctx)
	defer stop()
	g, work := errgroup.WithContext(work)
	g.Go(func() error { return intake.Run(work, intake.DefaultConfig(), b.bus, zerolog.Nop()) })
	empty, began := liveHeap(), time.Now()
	b.announced.Store(0)
	var buses []*bus.Bus
	defer func() {
		for _, c := range buses {
			err = errors.Join(err, c.Close())
		}
	}()
	cfg := sampler.DefaultConfig()
	cfg.Model, cfg.Batch, cfg.Workers, cfg.PublishWindowMiB = "synthetic", 1, 1, 1
	starting := make(chan struct{}, starters)
	cfg.Announced = func() {
		b.announced.Add(1)
		<-starting
	}
	for range samplers {
		select {
		case starting <- struct{}{}:
		case <-work.Done():
			return g.Wait()
		}
		c, err := b.connect(ctx, b.transport)
		if err != nil {
			return err
		}
		buses = append(buses, c)
		g.Go(func() error {
			if err := sampler.Run(work, cfg, c, zerolog.Nop()); err != nil {
				return fmt.Errorf("sampler: %w", err)
			}
			return nil
		})
	}
	g.Go(func() error {
		defer stop()
		if err := poll(work, swarmPoll, func() (bool, error) { return b.serving(work, samplers) }); err != nil {
			return fmt.Errorf("samplers start: %w", err)
		}
		up, heap := time.Since(began), liveHeap()-empty
		cpu, began := cpuSeconds(), time.Now()
		if err := b.samples(work); err != nil {
			return fmt.Errorf("samples: %w", err)
		}
		took, goroutines := time.Since(began).Seconds(), runtime.NumGoroutine()
		samples := float64(b.groups * b.n)
		redelivered, err := b.accounts(work)
		fmt.Fprintf(out, "| %d | %.1f s | %.0f | %.0f | %.2f | %d | %.0f MiB | %.0f KiB | %d |\n", samplers,
			up.Seconds(), samples/took, samples*float64(b.steps)/took,
			(cpuSeconds()-cpu)/samples*1e3, goroutines, heap/(1<<20), heap/float64(samplers)/1024, redelivered)
		return err
	})
	return g.Wait()
}

// serving says whether all samplers are there.
func (b *swarmBench) serving(ctx context.Context, samplers int) (bool, error) {
	b.tick(fmt.Sprintf("%d samplers start", samplers), float64(b.announced.Load())/float64(samplers))
	if b.announced.Load() < int64(samplers) {
		return false, nil
	}
	present, err := b.bus.Present(ctx)
	return len(present) >= samplers, err
}

// samples has the prompts made into trajectories.
func (b *swarmBench) samples(ctx context.Context) error {
	for i := range b.groups {
		data, err := schemas.Encode(&schemas.Prompt{
			Prompt: "a red fox", UID: schemas.UID(fmt.Sprintf("g%06d", i)), GroupSize: new(int64(b.n)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(b.steps))},
		})
		if err == nil {
			_, err = b.bus.PublishPrompt(ctx, "swarm", data, nil, bus.WaitForSpace())
		}
		if err != nil {
			return err
		}
	}
	samples := uint64(b.groups * b.n)
	return poll(ctx, swarmPoll, func() (bool, error) {
		info, err := b.bus.StreamInfo(ctx, schemas.StreamTrajectories)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			return false, nil // it is busy: asked again
		}
		if err != nil {
			return false, err
		}
		b.tick("samples", float64(info.State.Msgs)/float64(samples))
		switch m, err := b.bus.Newest(ctx, schemas.StreamDead); {
		case err == nil:
			letter := &schemas.Dead{}
			return false, errors.Join(errors.New("a dead letter"), schemas.Decode(m.Data, letter),
				fmt.Errorf("%s: %s", letter.Service, letter.Reason))
		case !errors.Is(err, bus.ErrNotFound):
			return false, err
		}
		return info.State.Msgs >= samples, nil
	})
}

// accounts says how many requests came more than once, and what is not as it should be.
func (b *swarmBench) accounts(ctx context.Context) (redelivered int, err error) {
	if n := b.server.SlowConsumers(); n > 0 {
		return 0, fmt.Errorf("the server cut off %d connections that did not read fast enough", n)
	}
	info, err := b.bus.StreamInfo(ctx, schemas.StreamSteps)
	if err != nil {
		return 0, err
	}
	if want := uint64(b.groups * b.n * b.steps); info.State.Msgs < want {
		return 0, fmt.Errorf("%d steps are stored; must be %d", info.State.Msgs, want)
	}
	stats, err := b.bus.Stats(ctx)
	if err != nil {
		return 0, err
	}
	for _, s := range stats {
		for _, c := range s.Consumers {
			if s.Name == schemas.StreamRequests {
				redelivered += c.Redelivered
			}
		}
	}
	return redelivered, nil
}
