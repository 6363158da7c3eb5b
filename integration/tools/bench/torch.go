package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/remote"
)

// torchBench is one `bench torch` command.
type torchBench struct {
	model, python, echo, device, dtype string
	prompt                             string
	batches                            []int
	runs, steps, rounds, calls         int
	compile                            bool
	bodies                             []torchBody

	dir string
}

// torchBody is a call of rows of square samples, of which so many have one state: they share.
type torchBody struct{ edge, rows, share int }

// torchBodies are 4 B, 64 KiB, 1 MiB and 8 MiB to a worker with a number for each 8 x 8 pixels, and 4 MiB that come
// back as 8, as under guidance.
var torchBodies = []torchBody{{8, 1, 1}, {1024, 1, 1}, {4096, 1, 1}, {4096, 8, 1}, {4096, 8, 2}}

// torchToken is the least that a worker takes at a port.
const torchToken = "a token for this bench alone"

func benchTorchCommand() *cobra.Command {
	b := torchBench{bodies: torchBodies}
	c := &cobra.Command{
		Use:   "torch",
		Short: "workers of --engine torch: what a call costs, and the network beside our own",
		Long: `torch measures workers of PyTorch: what a call costs besides the network, at a socket and at a
port, by a worker that gives latents back; calls of the network, and whole runs of samples without events,
by our own engine where it computes the model, by a worker, and by one with --deterministic. Rounds of all
take turns, so that other work on the machine disturbs them alike. Each computes on one thread of the CPU;
on another device our own engine is left out. --calls 0 or --rounds 0 leaves out one of the two halves. The
report is Markdown.`,
		Example: `  bench torch
  bench torch --device cuda:0 --model ./sd35 --steps 28
  bench torch --device cuda:0 --model ./sd35 --calls 0 --compile`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&b.model, "model", "signs", "folder in the diffusers layout, or the name of a shipped model")
	f.StringVar(&b.python, "python", cmp.Or(os.Getenv("MEANDER_PYTHON"), "python3"),
		"Python that has the worker's packages")
	f.StringVar(&b.echo, "echo", "deploy/bench/torch_echo.py",
		"arguments of Python for the worker that gives latents back")
	f.StringVar(&b.device, "device", "cpu", "device of the workers, such as cuda:0")
	f.StringVar(&b.dtype, "dtype", "auto", "element type of the workers")
	f.StringVar(&b.prompt, "prompt", `a blue sign that says "4071"`, "prompt of all samples")
	f.IntSliceVar(&b.batches, "batch", []int{1, 2, 4, 8}, "rows of a call")
	f.IntVar(&b.runs, "samples", 8, "samples of a run")
	f.IntVar(&b.steps, "steps", 10, "denoising steps of a run")
	f.IntVar(&b.rounds, "rounds", 7, "measured rounds of each engine, of which the medians are reported; 0: none")
	f.IntVar(&b.calls, "calls", 100, "measured calls of each size of body; 0: none")
	f.BoolVar(&b.compile, "compile", false, "a third worker, with --compile: it starts slowly")
	return c
}

func (b *torchBench) run(ctx context.Context, out, stderr io.Writer) (err error) {
	if err := errors.Join(checkPositive("batch", b.batches, 64), checkPositive("samples", []int{b.runs}, 32),
		checkPositive("steps", []int{b.steps}, 1000)); err != nil {
		return usage(err)
	}
	if b.rounds < 0 || b.calls < 0 || b.rounds > 10_000 || b.calls > 100_000 || b.rounds+b.calls == 0 {
		return usage(fmt.Errorf("--rounds, --calls: %d, %d; must be 0 to 10000 and 0 to 100000, and one of them "+
			"positive", b.rounds, b.calls))
	}
	if b.dir, _, err = families.All().Find(b.model); err != nil || b.dir == "" {
		return usage(errors.Join(err, fmt.Errorf("--model: %s; must be a folder in the diffusers layout", b.model)))
	}
	sockets, err := os.MkdirTemp("", "bench-torch")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(sockets)) }()
	fmt.Fprintf(out, "%s\n", machine())
	if b.calls > 0 {
		if err := b.overhead(ctx, out, stderr, sockets); err != nil {
			return err
		}
	}
	if b.rounds == 0 {
		return nil
	}
	return b.network(ctx, out, stderr, sockets)
}

// torchWorker is a worker in a process of its own, and the model that calls it.
type torchWorker struct {
	*remote.Model
	cmd *exec.Cmd
	in  io.Closer
	pid int
}

// start starts a worker by these arguments of Python, and opens the model at it.
func (b *torchBench) start(ctx context.Context, stderr io.Writer, args ...string) (w *torchWorker, err error) {
	w = &torchWorker{cmd: exec.CommandContext(ctx, b.python, append(args, "--model", b.dir, "--exit-with-stdin")...)}
	log := &strings.Builder{}
	w.cmd.Stderr = log
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := w.cmd.StdoutPipe()
	if err == nil {
		err = w.cmd.Start()
	}
	if err != nil {
		return nil, usage(fmt.Errorf("--python: %w", err))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.end())
			fmt.Fprint(stderr, log)
		}
	}()
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	var ready struct {
		Address string
		PID     int
	}
	if err = errors.Join(err, json.Unmarshal(line, &ready)); err != nil {
		return w, fmt.Errorf("start worker: %w", err)
	}
	w.pid = ready.PID
	address := ready.Address
	if strings.HasPrefix(address, "/") {
		address = "unix:" + address
	}
	w.Model, err = remote.Open(ctx, b.dir, remote.Config{
		Address: address, Token: torchToken, PromptCacheBytes: -1,
	}, nil)
	return w, err
}

// end ends the worker.
func (w *torchWorker) end() error {
	var err error
	if w.Model != nil {
		err = w.Close()
	}
	err = errors.Join(err, w.in.Close())
	if wrong := w.cmd.Wait(); wrong != nil {
		err = errors.Join(err, fmt.Errorf("worker: %w", wrong))
	}
	return err
}

// overhead measures calls of a worker that computes nothing.
func (b *torchBench) overhead(ctx context.Context, out, stderr io.Writer, sockets string) (err error) {
	token := filepath.Join(sockets, "token")
	if err := os.WriteFile(token, []byte(torchToken), 0o600); err != nil {
		return err
	}
	var workers []*torchWorker
	defer func() {
		for _, w := range workers {
			err = errors.Join(err, w.end())
		}
	}()
	for _, at := range [][]string{
		{"--socket", filepath.Join(sockets, "echo")}, {"--listen", "127.0.0.1:0", "--token-file", token},
	} {
		w, err := b.start(ctx, stderr, append(strings.Fields(b.echo), at...)...)
		if err != nil {
			return err
		}
		workers = append(workers, w)
	}
	heading(out, "A call there and back")
	fmt.Fprintf(out, "A worker whose network gives the latents back: from Velocity until its results are there. "+
		"Medians of %d calls (the fastest), 20 ms apart; socket and port take turns.\n\n", b.calls)
	fmt.Fprint(out, "| body there | back | rows | socket us | share of a step of 100 ms | port us | port to socket |\n"+
		"| --- | --- | --- | --- | --- | --- | --- |\n")
	for _, body := range b.bodies {
		var engines []func() (float64, error)
		var size int
		for _, w := range workers {
			square := media.ImageSize(body.edge, body.edge)
			call, bytes, err := velocityCall(ctx, w.Model, b.prompt, square, body.rows, body.share)
			if err != nil {
				return err
			}
			size = bytes
			engines = append(engines, func() (float64, error) {
				began := time.Now()
				err := call()
				return time.Since(began).Seconds(), err
			})
		}
		times, err := takeTurns(ctx, b.calls, engines)
		if err != nil {
			return err
		}
		ratio := median(sideBySide(times[1], times[0]))
		const step = 0.1 // s
		fmt.Fprintf(out, "| %s | %s | %d | %s | **%.2f %%** | %s | %.2f |\n", bytesOf(size/body.share), bytesOf(size),
			body.rows, microseconds(times[0]), median(times[0])/step*100, microseconds(times[1]), ratio)
	}
	return nil
}

// microseconds writes the median of seconds, and the least.
func microseconds(seconds []float64) string {
	return fmt.Sprintf("%.0f (%.0f)", median(seconds)*1e6, slices.Min(seconds)*1e6)
}

// bytesOf writes a power of two.
func bytesOf(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%g MiB", mib(n))
	case n >= 1<<10:
		return fmt.Sprintf("%g KiB", mib(n<<10))
	}
	return fmt.Sprintf("%d B", n)
}

// velocityCall returns a call of the network for so many rows, of which share have one state, and the bytes of their
// results.
func velocityCall(ctx context.Context, m model.Model, prompt string, size model.Size, rows, share int,
) (call func() error, bytes int, err error) {
	card := m.Card()
	tokens, err := card.Tokens(size)
	if err != nil {
		return nil, 0, err
	}
	conds, err := m.Encode(ctx, []string{prompt})
	if err != nil {
		return nil, 0, err
	}
	list, n := make([]model.Row, rows), tokens*card.LatentChannels
	for i := range list {
		list[i] = model.Row{
			X: make([]float32, n), Dst: make([]float32, n), Sigma: 0.5, Conditioning: conds[0],
			Guidance: float32(card.Guidance),
		}
		for k := range list[i].X {
			list[i].X[k] = float32((k+i)%17-8) / 8
		}
		list[i].X = list[i/share*share].X
	}
	return func() error { return m.Velocity(ctx, list, size) }, 4 * rows * n, nil
}

// sideBySide divides each round of a by that of b.
func sideBySide(a, b []float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = a[i] / b[i]
	}
	return out
}
