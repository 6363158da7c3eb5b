package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
)

// e2eBench is one `bench e2e` command.
type e2eBench struct {
	bin, model, peer string
	batches          []int
	scales           []float64
	groups, n, steps int
	rounds           int

	dir, folder string
	card        model.Card
	runs        int
}

func benchE2ECommand() *cobra.Command {
	b := e2eBench{}
	c := &cobra.Command{
		Use:   "e2e",
		Short: "the whole product beside a plain loop: images, rewards and advantages of groups of samples",
		Long: `e2e measures the product as it is used: 'meander up', which has the server and the four services, and
'meander run', which publishes prompts and waits for the advantages. Every state, log-prob, image, reward and
advantage is stored, in a store in a temporary folder. All processor time of both programs counts, from the start
of 'meander run' until its results are printed.

With --peer a program that does the same without services takes turns with it: same model, prompts, steps, noise
level and reward function; deploy/bench/loop_peer.py is such a program. Both compute on one thread. The report is
Markdown.`,
		Example: `  bench e2e
  bench e2e --peer "python3 deploy/bench/loop_peer.py" --batch 8 --true-cfg-scale 1`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&b.bin, "bin", "bin", "folder of the program meander")
	f.StringVar(&b.model, "model", "signs", "folder in the diffusers layout, or the name of a shipped model")
	f.StringVar(&b.peer, "peer", "", "command line of the plain loop to measure in turns")
	f.IntSliceVar(&b.batches, "batch", []int{1, 8}, "samples of a forward pass")
	f.Float64SliceVar(&b.scales, "true-cfg-scale", []float64{1, 4}, "guidance scales; 1: none")
	f.IntVar(&b.groups, "groups", 8, "prompts of a round")
	f.IntVar(&b.n, "n", 8, "samples of a prompt")
	f.IntVar(&b.steps, "steps", 10, "denoising steps of a sample, all stochastic")
	f.IntVar(&b.rounds, "rounds", 7, "measured rounds of each; the medians are reported")
	return c
}

func (b *e2eBench) check() error {
	err := errors.Join(checkPositive("batch", b.batches, 1024), checkPositive("groups", []int{b.groups}, 10_000),
		checkPositive("n", []int{b.n}, schemas.MaxGroupSize), checkPositive("steps", []int{b.steps}, schemas.MaxSteps),
		checkPositive("rounds", []int{b.rounds}, 10_000))
	for _, scale := range b.scales {
		if !(scale >= 1 && scale <= 100) {
			err = errors.Join(err, fmt.Errorf("--true-cfg-scale: %g; must be between 1 and 100", scale))
		}
	}
	if err != nil {
		return usage(err)
	}
	b.dir, b.card, err = findFolder(b.model)
	return err
}

const (
	e2eNoise  = 0.7 // a of the sde transition
	e2eReward = "jpeg_compressibility"
)

// loopConfig is what does not change between calls of a plain loop, loopCall asks for groups, and loopTime is what
// they took.
type (
	loopConfig struct {
		Model      string  `json:"model"`
		Height     int     `json:"height"`
		Width      int     `json:"width"`
		Steps      int     `json:"steps"`
		NoiseLevel float64 `json:"noise_level"`
		Negative   string  `json:"negative_prompt"`
	}
	loopCall struct {
		Prompts []string `json:"prompts"`
		N       int      `json:"group_size"`
		Batch   int      `json:"batch"`
		Scale   float64  `json:"true_cfg_scale"`
		Seed    int      `json:"seed"`
	}
	loopTime struct {
		Seconds, CPU, Reward float64
		Samples              int
	}
)

func (b *e2eBench) run(ctx context.Context, out, stderr io.Writer) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	var other *peer
	if b.peer != "" {
		other, err = startPeer(ctx, b.peer, loopConfig{
			Model: b.dir, Height: b.card.Height, Width: b.card.Width, Steps: b.steps, NoiseLevel: e2eNoise,
			Negative: b.card.NegativePrompt,
		}, stderr)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, other.close()) }()
	}
	if b.folder, err = os.MkdirTemp("", "meander-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.folder)) }()
	fmt.Fprintf(out, "%s\n", machine())
	heading(out, "End to end")
	fmt.Fprintf(out, "%d prompts x %d samples, %d steps of sde, %s; medians of %d rounds, of a sample. One thread.\n",
		b.groups, b.n, b.steps, e2eReward, b.rounds)
	if other != nil {
		fmt.Fprintf(out, "The plain loop is %s. Ratio: its processor time over ours, the median of rounds side by "+
			"side (smallest - largest); then that of time.\n", other.name)
	}
	fmt.Fprint(out, "\n| batch | guidance | engine | CPU ms | ms | mean reward | ratio | of time |\n"+
		"| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, batch := range b.batches {
		if err := b.batch(ctx, out, batch, other); err != nil {
			return err
		}
	}
	return nil
}

// batch measures all guidance scales with one pipeline.
func (b *e2eBench) batch(ctx context.Context, out io.Writer, batch int, other *peer) (err error) {
	up := b.program(ctx, "up", "--model", b.dir, "--threads", "1", "--batch", fmt.Sprint(batch), "--listen",
		"127.0.0.1:0")
	if err := up.start(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, up.stop()) }()
	for _, scale := range b.scales {
		engines := []func() (loopTime, error){
			func() (loopTime, error) { return b.product(ctx, up, batch, scale) },
		}
		if other != nil {
			engines = append(engines, func() (t loopTime, err error) {
				if err = other.ask(b.call(batch, scale), &t); err == nil && !(t.CPU > 0 && t.Samples == b.groups*b.n) {
					err = fmt.Errorf("answer %.80q of the peer: no time, or not of %d samples", other.out.Text(),
						b.groups*b.n)
				}
				return t, err
			})
		}
		rounds, err := takeTurns(ctx, b.rounds, engines)
		if err != nil {
			return err
		}
		ratio := "| "
		if other != nil {
			cpu := func(t loopTime) float64 { return t.CPU }
			pairs := sideBySide(each(rounds[1], cpu), each(rounds[0], cpu))
			wall := func(t loopTime) float64 { return t.Seconds }
			mid := median(pairs) // sorts
			ratio = fmt.Sprintf("**%.2f** (%.2f - %.2f) | %.2f", mid, pairs[0], pairs[len(pairs)-1],
				median(sideBySide(each(rounds[1], wall), each(rounds[0], wall))))
			b.row(out, batch, scale, "plain loop", rounds[1], "| ")
		}
		b.row(out, batch, scale, "meander", rounds[0], ratio)
	}
	return nil
}

// each is one number of each round.
func each[T any](rounds []T, f func(T) float64) []float64 {
	out := make([]float64, len(rounds))
	for i, r := range rounds {
		out[i] = f(r)
	}
	return out
}

func (b *e2eBench) row(out io.Writer, batch int, scale float64, engine string, rounds []loopTime, ratio string) {
	of := func(f func(loopTime) float64) float64 { return median(each(rounds, f)) }
	guidance, samples := "none", float64(b.groups*b.n)
	if scale > 1 {
		guidance = fmt.Sprint(scale)
	}
	fmt.Fprintf(out, "| %d | %s | %s | %.1f | %.1f | %.2f | %s |\n", batch, guidance, engine,
		of(func(t loopTime) float64 { return t.CPU })/samples*1e3,
		of(func(t loopTime) float64 { return t.Seconds })/samples*1e3,
		of(func(t loopTime) float64 { return t.Reward }), ratio)
}

// program is meander on the store of the bench, on one thread.
func (b *e2eBench) program(ctx context.Context, command string, args ...string) *measured {
	m := newMeasured(ctx, b.bin, "meander", append([]string{command, "--store", filepath.Join(b.folder, "store")},
		args...)...)
	m.Env = append(os.Environ(), "GOMAXPROCS=1")
	return m
}

// call asks for the groups of the next round.
func (b *e2eBench) call(batch int, scale float64) loopCall {
	b.runs++
	call := loopCall{N: b.n, Batch: batch, Scale: scale, Seed: b.runs}
	for i := range b.groups {
		call.Prompts = append(call.Prompts, fmt.Sprintf(`a blue sign that says "%d"`, 4071+i))
	}
	return call
}

// product has the pipeline make one round.
func (b *e2eBench) product(ctx context.Context, up *measured, batch int, scale float64) (loopTime, error) {
	call := b.call(batch, scale)
	run := b.program(ctx, "run", append([]string{
		"--run", fmt.Sprintf("r%d", call.Seed), "--seed", fmt.Sprint(call.Seed), "--group-size", fmt.Sprint(call.N),
		"--steps", fmt.Sprint(b.steps), "--sde-type", "sde", "--noise-level", fmt.Sprint(e2eNoise),
		"--true-cfg-scale", fmt.Sprint(scale), "--reward", e2eReward, "--out", "-", "--json",
	}, call.Prompts...)...)
	run.Stderr = &bytes.Buffer{}
	before, began := up.cpu(), time.Now()
	err := run.start()
	if err == nil {
		err = run.finish()
	}
	t := loopTime{Seconds: time.Since(began).Seconds(), CPU: up.cpu() - before}
	if err != nil {
		return t, fmt.Errorf("%w\n%s\n%s", err, run.Stderr, &up.out)
	}
	t.CPU += run.cpu()
	var groups float64
	for line := range strings.Lines(run.out.String()) {
		var group struct {
			Mean    *float64
			Members []struct{ Advantage *float64 }
		}
		if err := json.Unmarshal([]byte(line), &group); err != nil {
			return t, fmt.Errorf("output of meander run: %w", err)
		}
		if group.Mean != nil {
			groups++
			t.Reward += *group.Mean
			t.Samples += len(group.Members)
		}
	}
	if t.Samples != b.groups*b.n {
		return t, fmt.Errorf("meander run: results of %d samples; must be of %d", t.Samples, b.groups*b.n)
	}
	t.Reward /= groups
	return t, nil
}
