package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// tokensBench is one `bench tokens` command.
type tokensBench struct {
	model            string
	batches, threads []int
	tokens, rounds   int
	round            time.Duration
	peer, dtype      string
	width, layers    int
	events           time.Duration
}

// tokensModel is a model that is measured.
type tokensModel struct{ name, dir string }

// tokensConfig and tokensCall are what the peer is asked.
type tokensConfig struct {
	Model  string  `json:"model"`
	DType  string  `json:"dtype"`
	Prompt []int32 `json:"prompt"`
	Tokens int     `json:"tokens"`
}

type tokensCall struct {
	Way     string  `json:"way"`
	Batch   int     `json:"batch"`
	Threads int     `json:"threads"`
	Seconds float64 `json:"seconds"`
}

// tokensTime is the mean of calls.
type tokensTime struct {
	Seconds float64 `json:"seconds"`
	CPU     float64 `json:"cpu"`
}

func benchTokensCommand() *cobra.Command {
	b := tokensBench{}
	c := &cobra.Command{
		Use:   "tokens",
		Short: "tokens per second of language models",
		Long: `tokens measures what a sampler does for a batch of answers: read the prompt, then draw so many
tokens for each at temperature 1, whatever they are. It takes a shipped model, and one of random
weights that is too large for the caches of a processor.

With --peer it measures another engine beside it, in two ways: its generate, and a bare loop over
its network with a cache. Rounds of all take turns, so that other work on the machine disturbs them
alike; the peer computes in float32, as ours does, unless --peer-dtype says otherwise. Neither stores
events.

At last batches of which each token is an event with its 20 largest logits, published to an embedded
server, and batches without events take turns: what the loop that draws waits for. The report is
Markdown.`,
		Example: `  bench tokens
  bench tokens --peer "python3 deploy/bench/transformers_peer.py"
  bench tokens --width 0 --batch 1,8,64`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return b.run(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&b.model, "model", "sums", "folder of a language model, or the name of a shipped one")
	f.IntSliceVar(&b.batches, "batch", []int{1, 8}, "answers at a time")
	f.IntSliceVar(&b.threads, "threads", []int{1}, "threads of each engine")
	f.IntVar(&b.tokens, "tokens", 64, "tokens of an answer")
	f.IntVar(&b.rounds, "rounds", 7, "measured rounds of each engine; the medians are reported")
	f.DurationVar(&b.round, "round", 300*time.Millisecond, "a round repeats its call for at least this long")
	f.StringVar(&b.peer, "peer", "", "command line of another engine to measure in turns")
	f.StringVar(&b.dtype, "peer-dtype", "float32", "what the peer computes in: float32 or bfloat16")
	f.IntVar(&b.width, "width", 1024, "width of the random model, a multiple of 64; 0 for none")
	f.IntVar(&b.layers, "layers", 6, "layers of the random model")
	f.DurationVar(&b.events, "events", 15*time.Second,
		"how long each batch is measured with and without events; 0 for not")
	return c
}

func (b *tokensBench) check() error {
	err := errors.Join(checkPositive("batch", b.batches, 1024), checkPositive("threads", b.threads, 1024),
		checkPositive("tokens", []int{b.tokens}, 400),
		checkPositive("rounds", []int{b.rounds}, 10000), checkPositive("layers", []int{b.layers}, 1024))
	if b.width < 0 || b.width%64 != 0 || b.width > 1<<14 {
		err = errors.Join(err, fmt.Errorf("--width: %d; must be a multiple of 64, at most %d", b.width, 1<<14))
	}
	if b.events < 0 || b.events > time.Hour {
		err = errors.Join(err, fmt.Errorf("--events: %v; must be between 0 and 1h", b.events))
	}
	if b.dtype != "float32" && b.dtype != "bfloat16" {
		err = errors.Join(err, fmt.Errorf("--peer-dtype: %q; must be float32 or bfloat16", b.dtype))
	}
	if err != nil {
		return usage(err)
	}
	return nil
}

func (b *tokensBench) run(ctx context.Context, out, stderr io.Writer) (err error) {
	if err := b.check(); err != nil {
		return err
	}
	dir, _, err := families.All().Find(b.model)
	if err != nil {
		return usage(err)
	}
	models := []tokensModel{{b.model, dir}}
	if b.width > 0 {
		wide, remove, wrong := b.random()
		if wrong != nil {
			return wrong
		}
		defer func() { err = errors.Join(err, remove()) }()
		models = append(models, wide)
	}
	fmt.Fprintf(out, "%s\n", machine())
	for _, m := range models {
		if err := b.measure(ctx, out, stderr, m); err != nil {
			return err
		}
	}
	if b.events == 0 {
		return nil
	}
	return withPlane(ctx, stderr, func(p *plane) error { return b.overhead(ctx, out, p, models) })
}

// random writes the model of random weights.
func (b *tokensBench) random() (m tokensModel, remove func() error, err error) {
	dir, err := os.MkdirTemp("", "bench-tokens")
	if err != nil {
		return m, nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	r := qwen2test.Random{
		Width: b.width, Layers: b.layers, Intermediate: b.width * 11 / 4, Heads: b.width / 64,
		KVHeads:    max(1, b.width/256),
		Vocabulary: 8192, DType: tensor.BF16,
	}
	if r.Heads%r.KVHeads != 0 {
		r.KVHeads = r.Heads
	}
	m = tokensModel{fmt.Sprintf("random weights, width %d, %d layers", b.width, b.layers), filepath.Join(dir, "random")}
	if err := r.Write(m.dir); err != nil {
		return m, nil, errors.Join(err, remove())
	}
	return m, remove, nil
}

// measure is the table of one model.
func (b *tokensBench) measure(ctx context.Context, out, stderr io.Writer, of tokensModel) (err error) {
	m, err := families.All().Open(of.dir, lm.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		return err
	}
	prompt, err := tokensPrompt(m)
	weights, _ := m.MemoryBytes()
	if err = errors.Join(err, m.Close()); err != nil {
		return err
	}
	var other *peer
	if b.peer != "" {
		if other, err = startPeer(ctx, b.peer,
			tokensConfig{Model: of.dir, DType: b.dtype, Prompt: prompt, Tokens: b.tokens}, stderr); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, other.close()) }()
	}
	heading(out, of.name)
	fmt.Fprintf(out, "Prompts of %d tokens, read once for all answers of a batch, answers of %d, temperature 1; "+
		"weights %.1f MiB in memory. Medians of %d rounds of at least %v each.\n",
		len(prompt), b.tokens, mib(weights), b.rounds, b.round)
	if other != nil {
		fmt.Fprintf(out, "The other engine is %s, in %s. Ratio: its time over ours, the median of rounds side by "+
			"side (smallest - largest), then that of processor time.\n", other.name, b.dtype)
	}
	fmt.Fprint(out, "\n| threads | batch | engine | tokens/s | ms per step | ratio | CPU |\n| --- | --- | --- | --- "+
		"| --- | --- | --- |\n")
	procs := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(procs)
	for _, threads := range b.threads {
		runtime.GOMAXPROCS(threads) // the garbage collector keeps to it too
		for _, batch := range b.batches {
			if err := b.compare(ctx, out, of.dir, prompt, other, threads, batch); err != nil {
				return err
			}
		}
	}
	return nil
}

func tokensPrompt(m lm.Model) ([]int32, error) {
	return m.Prompt([]lm.Message{{Role: "user", Content: "347+58=?"}})
}

// compare measures one combination.
func (b *tokensBench) compare(
	ctx context.Context, out io.Writer, dir string, prompt []int32, other *peer, threads, batch int,
) (err error) {
	m, err := families.All().Open(dir, lm.Options{Options: model.Options{Threads: threads}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	names := []string{"meander"}
	engines := []func() (tokensTime, error){func() (tokensTime, error) { return b.answerFor(ctx, m, prompt, batch) }}
	if other != nil {
		for _, way := range []string{"generate", "loop"} {
			names = append(names, other.name+", "+way)
			engines = append(engines, func() (t tokensTime, err error) {
				err = other.ask(tokensCall{Way: way, Batch: batch, Threads: threads, Seconds: b.round.Seconds()}, &t)
				if err == nil && !(t.Seconds > 0) {
					err = fmt.Errorf("answer %.80q of the peer: no time", other.out.Text())
				}
				return t, err
			})
		}
	}
	rounds, err := takeTurns(ctx, b.rounds, engines)
	if err != nil {
		return err
	}
	for e, times := range rounds {
		var seconds, cpu, pairs, ourCPU []float64
		for i, t := range times {
			seconds, cpu = append(seconds, t.Seconds), append(cpu, t.CPU)
			pairs, ourCPU = append(pairs, t.Seconds/rounds[0][i].Seconds), append(ourCPU, rounds[0][i].CPU)
		}
		ratio := "| "
		if e > 0 {
			ratio = fmt.Sprintf("**%.1f** (%.1f - %.1f) | %.1f", median(pairs), slices.Min(pairs), slices.Max(pairs),
				median(cpu)/median(ourCPU))
		}
		s := median(seconds)
		fmt.Fprintf(out, "| %d | %d | %s | %.0f | %.2f | %s |\n", threads, batch, names[e], float64(batch*b.tokens)/s,
			s/float64(b.tokens)*1e3, ratio)
	}
	return nil
}

// answerFor repeats answers for a round.
func (b *tokensBench) answerFor(ctx context.Context, m lm.Model, prompt []int32, batch int) (tokensTime, error) {
	began, cpu, calls := time.Now(), cpuSeconds(), 0
	for calls == 0 || time.Since(began) < b.round {
		if err := b.answer(ctx, m, prompt, batch, nil); err != nil {
			return tokensTime{}, err
		}
		calls++
	}
	n := float64(calls)
	return tokensTime{Seconds: time.Since(began).Seconds() / n, CPU: (cpuSeconds() - cpu) / n}, nil
}

// answer draws the tokens of a batch; take, unless nil, gets each.
func (b *tokensBench) answer(
	ctx context.Context, m lm.Model, prompt []int32, batch int,
	onToken func(ctx context.Context, answer, step int, d *decoding.Distribution, id int32, logits []float32) error,
) error {
	root := m.NewSequence() // the prompt is read once
	rows, ids := make([]lm.Row, batch), make([]int32, batch)
	logits := make([]float32, m.Card().Vocabulary)
	err := m.Forward(ctx, []lm.Row{{Sequence: root, IDs: prompt, Logits: logits}})
	for i := range rows {
		rows[i] = lm.Row{Sequence: root.Fork(), IDs: ids[i : i+1], Logits: slices.Clone(logits)}
		defer rows[i].Sequence.Close()
	}
	root.Close()
	if err != nil {
		return err
	}
	var d decoding.Distribution
	for step := range b.tokens {
		if step > 0 {
			if err := m.Forward(ctx, rows); err != nil {
				return err
			}
		}
		for i := range rows {
			if err := d.Reset(rows[i].Logits, decoding.Params{Temperature: 1}); err != nil {
				return err
			}
			ids[i] = d.Draw(uint64(i), uint32(rows[i].Sequence.Len()))
			if onToken == nil {
				continue
			}
			if err := onToken(ctx, i, step, &d, ids[i], rows[i].Logits); err != nil {
				return err
			}
		}
	}
	return nil
}
