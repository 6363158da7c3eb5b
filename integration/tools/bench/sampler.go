package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
)

// samplerBench is one `bench sampler` command.
type samplerBench struct {
	model            string
	batches, threads []int
	steps            int
	scale            float64
	prompt, negative string
	rounds           int
	round            time.Duration
	profile          time.Duration
	peer             string

	dir  string
	card model.Card // without what only the weights tell
}

func (b *samplerBench) check() error {
	err := errors.Join(checkPositive("batch", b.batches, 1024), checkPositive("threads", b.threads, 1024),
		checkPositive("steps", []int{b.steps}, 1000), checkPositive("rounds", []int{b.rounds}, 10000))
	if !(b.scale > 1) {
		err = errors.Join(err, fmt.Errorf("--true-cfg-scale: %g; must be above 1, guidance is part of what is measured",
			b.scale))
	}
	if err != nil {
		return usage(err)
	}
	b.dir, b.card, err = findFolder(b.model)
	b.negative = cmp.Or(b.negative, b.card.NegativePrompt)
	return err
}

func (b *samplerBench) open(threads int) (model.Model, error) {
	return families.All().Open(b.dir, model.Options{Threads: threads, PromptCacheBytes: -1})
}

func (b *samplerBench) run(ctx context.Context, out, stderr io.Writer) error {
	if err := b.check(); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s\n", machine())
	if err := b.memory(ctx, out); err != nil {
		return err
	}
	if err := b.speed(ctx, out, stderr); err != nil {
		return err
	}
	if b.profile > 0 {
		if err := b.shares(ctx, out); err != nil {
			return err
		}
	}
	heading(out, "Matrix products")
	g := gemmBench{
		batches: b.batches, prompt: b.prompt, negative: b.negative, round: min(b.round, 300*time.Millisecond),
	}
	return g.run(ctx, b.dir, out)
}

// memory measures loading and the peak of resident memory around one batch. It comes
// first, since a peak never goes down.
func (b *samplerBench) memory(ctx context.Context, out io.Writer) error {
	before, known := residentBytes()
	threads, batch := slices.Max(b.threads), slices.Max(b.batches)
	began := time.Now()
	m, err := b.open(threads)
	if err != nil {
		return err
	}
	first := time.Since(began)
	loaded, _ := residentBytes()
	err = b.paintOnce(ctx, m, threads, batch)
	weights, working := m.MemoryBytes()
	if err = errors.Join(err, m.Close()); err != nil {
		return err
	}
	painted, _ := residentBytes()

	var again []float64
	for range 9 {
		began := time.Now()
		m, err := b.open(threads)
		if err != nil {
			return err
		}
		again = append(again, time.Since(began).Seconds())
		if err := m.Close(); err != nil {
			return err
		}
	}
	debug.FreeOSMemory()
	heading(out, "Loading and memory")
	fmt.Fprintf(out, "- load: %.0f ms the first time in the process, %.0f ms median of 9 more\n", first.Seconds()*1e3,
		median(again)*1e3)
	fmt.Fprintf(out, "- weights %.1f MiB, activations and caches of a batch of %d on %d threads %.1f MiB\n",
		mib(weights), batch, threads, mib(working))
	if known {
		fmt.Fprintf(out, "- peak resident memory: %.1f MiB before loading, %.1f MiB after, %.1f MiB after the "+
			"batch: %.1f MiB for the model, %.2f times weights and activations\n",
			mib(before), mib(loaded), mib(painted), mib(painted-before),
			float64(painted-before)/float64(weights+working))
	}
	return nil
}

func (b *samplerBench) paintOnce(ctx context.Context, m model.Model, threads, batch int) error {
	p, err := newPainter(m, b, threads)
	if err != nil {
		return err
	}
	_, err = p.paint(ctx, batch)
	return err
}

func mib(n int) float64 { return float64(n) / (1 << 20) }

// speed measures every combination of threads and batch, in turns with the peer.
func (b *samplerBench) speed(ctx context.Context, out, stderr io.Writer) (err error) {
	var other *peer
	if b.peer != "" {
		other, err = startPeer(ctx, b.peer, peerConfig{
			Model: b.dir, Height: b.card.Height, Width: b.card.Width, Steps: b.steps, Scale: b.scale, Prompt: b.prompt,
			Negative: b.negative,
		}, stderr)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, other.close()) }()
	}
	heading(out, "Speed")
	fmt.Fprintf(out, "%d steps, true_cfg_scale %g, encode + denoise + decode; medians of %d rounds of at least %v "+
		"each.\n", b.steps, b.scale, b.rounds, b.round)
	if other != nil {
		fmt.Fprintf(out, "The other engine is %s. Ratio: its time over ours, the median of rounds side by side "+
			"(smallest - largest); "+
			"then that of the fastest rounds, and that of processor time.\n", other.name)
	}
	fmt.Fprint(out, "\n| threads | batch | engine | images/s | ms per step | encode ms | denoise ms | decode ms | "+
		"CPU ms per image | ratio | fastest | CPU |\n")
	fmt.Fprint(out, "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	procs := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(procs)
	for _, threads := range b.threads {
		runtime.GOMAXPROCS(threads) // the garbage collector keeps to it too
		m, err := b.open(threads)
		if err != nil {
			return err
		}
		for _, batch := range b.batches {
			if err = b.compare(ctx, out, m, other, threads, batch); err != nil {
				break
			}
		}
		if err = errors.Join(err, m.Close()); err != nil {
			return err
		}
	}
	return nil
}

// compare measures one combination.
func (b *samplerBench) compare(
	ctx context.Context, out io.Writer, m model.Model, other *peer, threads, batch int,
) error {
	p, err := newPainter(m, b, threads)
	if err != nil {
		return err
	}
	engines := []func() (timing, error){
		func() (timing, error) { return p.paintFor(ctx, batch, b.round) },
	}
	if other != nil {
		engines = append(engines, func() (timing, error) {
			return other.paintFor(peerCall{Batch: batch, Threads: threads, Seconds: b.round.Seconds()})
		})
	}
	rounds, err := takeTurns(ctx, b.rounds, engines)
	if err != nil {
		return err
	}
	ratio := "| | "
	if other != nil {
		ratio = ratios(rounds[0], rounds[1])
	}
	b.row(out, threads, batch, "meander", rounds[0], ratio)
	if other != nil {
		b.row(out, threads, batch, other.name, rounds[1], "| | ")
	}
	return nil
}

// ratios are the last three cells of a row.
func ratios(ours, theirs []timing) string {
	var pairs []float64
	for i := range ours {
		pairs = append(pairs, theirs[i].total()/ours[i].total())
	}
	fastest := slices.Min(values(theirs, timing.total)) / slices.Min(values(ours, timing.total))
	cpu := func(t timing) float64 { return t.CPU }
	mid := median(pairs) // sorts
	return fmt.Sprintf("**%.1f** (%.1f - %.1f) | %.1f | %.1f", mid, pairs[0], pairs[len(pairs)-1], fastest,
		median(values(theirs, cpu))/median(values(ours, cpu)))
}

func values(rounds []timing, f func(timing) float64) []float64 {
	v := make([]float64, len(rounds))
	for i, t := range rounds {
		v[i] = f(t)
	}
	return v
}

func (b *samplerBench) row(out io.Writer, threads, batch int, engine string, rounds []timing, ratio string) {
	of := func(f func(timing) float64) float64 { return median(values(rounds, f)) }
	denoise := of(func(t timing) float64 { return t.Denoise })
	fmt.Fprintf(out, "| %d | %d | %s | %.2f | %.2f | %.2f | %.1f | %.1f | %.1f | %s |\n", threads, batch, engine,
		float64(batch)/of(timing.total), denoise/float64(b.steps)*1e3,
		of(func(t timing) float64 { return t.Encode })*1e3, denoise*1e3,
		of(func(t timing) float64 { return t.Decode })*1e3,
		of(func(t timing) float64 { return t.CPU })/float64(batch)*1e3, ratio)
}

// shares profiles each batch size on one thread.
func (b *samplerBench) shares(ctx context.Context, out io.Writer) error {
	m, err := b.open(1)
	if err != nil {
		return err
	}
	err = func() error {
		heading(out, "Share of time per operation")
		for _, batch := range b.batches {
			p, err := newPainter(m, b, 1)
			if err != nil {
				return err
			}
			if _, err := p.paint(ctx, batch); err != nil { // the first fills the caches
				return err
			}
			var buf bytes.Buffer
			if err := pprof.StartCPUProfile(&buf); err != nil {
				return fmt.Errorf("profile: %w", err)
			}
			_, err = p.paintFor(ctx, batch, b.profile)
			pprof.StopCPUProfile()
			if err != nil {
				return err
			}
			if err := printShares(out, buf.Bytes(), batch); err != nil {
				return err
			}
		}
		return nil
	}()
	return errors.Join(err, m.Close())
}
