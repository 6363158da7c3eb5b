package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// updateBench is one `bench update` command.
type updateBench struct {
	bin, reader, dtype     string
	groups, n, steps, size int
	batch, micro           int

	*plane
}

func benchUpdateCommand() *cobra.Command {
	b := updateBench{}
	c := &cobra.Command{
		Use:   "update",
		Short: "one update of real sizes through all services to a trainer: MB/s, processor time, memory of each",
		Long: `update makes one update as a trainer has it, from the prompts until every state was read: intake, a sampler
of the synthetic network, reward and advantage services as programs of their own, the server in the process of
the bench, and the trainer, which reads micro-batches and computes nothing. An image of 1024 x 1024 has states
of [16, 128, 128]. The store is in a temporary folder (TMPDIR): 64 samples of 10 steps take 0.8 GB in F32.

The report is Markdown.`,
		Example: `  bench update
  bench update --groups 64 --n 24 --dtype BF16    # a whole update of Flow-GRPO: 8.9 GB in TMPDIR`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := b.check(); err != nil {
				return err
			}
			return withPlane(c.Context(), c.ErrOrStderr(), func(p *plane) error {
				b.plane = p
				return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
			})
		},
	}
	f := c.Flags()
	f.StringVar(&b.bin, "bin", "bin", "folder of the programs of the services")
	f.StringVar(&b.reader, "reader", "python3 deploy/bench/update_reader.py", "command line of the trainer")
	f.StringVar(&b.dtype, "dtype", "F32", "latents_dtype: F32, F16, BF16")
	f.IntVar(&b.groups, "groups", 8, "prompts of the update")
	f.IntVar(&b.n, "n", 8, "samples of a prompt")
	f.IntVar(&b.steps, "steps", 10, "denoising steps of a sample, all stochastic")
	f.IntVar(&b.size, "size", 1024, "height and width, in pixels, a multiple of 16")
	f.IntVar(&b.batch, "batch", 4, "samples of a micro-batch of the sampler")
	f.IntVar(&b.micro, "micro", 4, "samples of a micro-batch of the trainer")
	return c
}

func (b *updateBench) check() error {
	err := errors.Join(checkPositive("groups", []int{b.groups}, 10_000),
		checkPositive("n", []int{b.n}, schemas.MaxGroupSize), checkPositive("steps", []int{b.steps}, schemas.MaxSteps),
		checkPositive("size", []int{b.size}, 8192), checkPositive("batch", []int{b.batch}, 1024),
		checkPositive("micro", []int{b.micro}, 1024))
	if b.size%updatePixels != 0 {
		err = errors.Join(err, fmt.Errorf("--size: %d; must be a multiple of %d", b.size, updatePixels))
	}
	if !slices.Contains([]string{"F32", "F16", "BF16"}, b.dtype) {
		err = errors.Join(err, fmt.Errorf("--dtype: %q; must be F32, F16 or BF16", b.dtype))
	}
	return usage(err)
}

const (
	updateRun, updateBatch = "bench", "b0"
	// What a token of the synthetic network is of.
	updatePixels, updateChannels = 16, 64
)

// stateBytes is the size of one stored state.
func (b *updateBench) stateBytes() int {
	size := 2
	if b.dtype == "F32" {
		size = 4
	}
	tokens := b.size / updatePixels
	return tokens * tokens * updateChannels * size
}

// updateRead is what the trainer answers.
type updateRead struct {
	Samples, Steps int
	Seconds, CPU   float64
}

func (b *updateBench) run(ctx context.Context, out, stderr io.Writer) (err error) {
	fmt.Fprintf(out, "%s\n", machine())
	url := b.server.ClientURL()
	services := map[string]*measured{}
	for _, name := range []string{"intake", "reward", "advantage", "sampler"} {
		args := []string{"--nats-url", url, "--health-addr", ""}
		if name == "sampler" {
			args = append(args, "--model", "synthetic", "--workers", "1", "--batch", fmt.Sprint(b.batch))
		}
		m := newMeasured(ctx, b.bin, "meander-"+name, args...)
		if err := m.start(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.stop()) }()
		services[name] = m
	}
	trainer, err := startPeer(ctx, b.reader, map[string]any{
		"nats": url, "run": updateRun, "batch": updateBatch, "groups": b.groups, "group_size": b.n, "steps": b.steps,
		"size": b.size, "dtype": b.dtype, "micro": b.micro,
	}, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trainer.close()) }()
	var published, read updateRead
	server, began := cpuSeconds(), time.Now()
	if err := trainer.ask(map[string]string{"do": "publish"}, &published); err != nil {
		return err
	}
	if err := b.closed(ctx); err != nil {
		return err
	}
	sampled, samplingServer := time.Since(began).Seconds(), cpuSeconds()-server
	before := processCPU(trainer.cmd.Process.Pid)
	server = cpuSeconds()
	if err := trainer.ask(map[string]string{"do": "read"}, &read); err != nil {
		return err
	}
	samples := b.groups * b.n
	if read.Samples != samples || read.Steps != samples*b.steps {
		return fmt.Errorf("the trainer read %d samples, %d steps; must be %d, %d", read.Samples, read.Steps, samples,
			samples*b.steps)
	}
	mb := float64(samples*(b.steps+1)*b.stateBytes()) / 1e6
	heading(out, "One update")
	fmt.Fprintf(out, "%d prompts x %d samples of %d x %d pixels, %d steps: %.0f MB of states of %s, %s each. The "+
		"trainer is %s, in micro-batches of %d.\n\n", b.groups, b.n, b.size, b.size, b.steps, mb, b.dtype,
		bytesOf(b.stateBytes()), trainer.name, b.micro)
	fmt.Fprintf(out, "- from the prompts to the last advantage: %.1f s, %.0f MB/s\n- the trainer reads: %.1f s, %.0f "+
		"MB/s, %.0f MB a second of its processor time\n\n", sampled, mb/sampled, read.Seconds, mb/read.Seconds,
		mb/read.CPU)
	fmt.Fprint(out, "| process | CPU s a sample | MB a CPU second | peak memory, MB |\n| --- | --- | --- | --- |\n")
	row := func(name string, cpu float64, peak int) {
		fmt.Fprintf(out, "| %s | %.4f | %.0f | %s |\n", name, cpu/float64(samples), mb/cpu, inMB(peak))
	}
	for _, name := range []string{"sampler", "intake", "reward", "advantage"} {
		m := services[name]
		m.look()
		row(name, m.cpu(), m.peak)
	}
	peak, _ := residentBytes()
	row("server, while samples are made", samplingServer, peak)
	row("server, while they are read", cpuSeconds()-server, peak)
	row("trainer", processCPU(trainer.cmd.Process.Pid)-before, memoryOf(trainer.cmd.Process.Pid, "VmHWM"))
	return nil
}

// closed waits until the batch is closed.
func (b *updateBench) closed(ctx context.Context) error {
	subject := schemas.Address{Kind: schemas.KindBatch, Run: updateRun, Batch: updateBatch}.Filter()
	return poll(ctx, 20*time.Millisecond, func() (bool, error) {
		_, err := b.bus.Last(ctx, schemas.StreamAdvantages, subject)
		if errors.Is(err, bus.ErrNotFound) {
			return false, nil
		}
		return err == nil, err
	})
}
