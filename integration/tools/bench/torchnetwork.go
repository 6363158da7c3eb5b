package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
)

// torchEngine is one of the engines that are compared.
type torchEngine struct {
	name  string
	model model.Model
	cpu   func() float64 // of all its processes, in seconds
}

// deterministicWorker stands behind the worker that it is compared with.
const deterministicWorker = "worker, deterministic"

// torchTime is the mean of calls, in seconds.
type torchTime struct{ wall, cpu float64 }

// torchRound is how long a round repeats its call at least.
const torchRound = 200 * time.Millisecond

// network compares the engines by calls and by runs.
func (b *torchBench) network(ctx context.Context, out, stderr io.Writer, sockets string) (err error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // each worker has one thread, too
	var engines []torchEngine
	heading(out, "Engines")
	if b.device == "cpu" {
		own, err := families.All().Open(b.dir, model.Options{Threads: 1, PromptCacheBytes: -1})
		if err != nil {
			fmt.Fprintf(out, "- without our own engine: %v\n", err)
		} else {
			defer func() { err = errors.Join(err, own.Close()) }()
			engines = append(engines, torchEngine{"meander", own, cpuSeconds})
		}
	}
	ways := [][]string{{"worker"}, {deterministicWorker, "--deterministic"}}
	if b.compile {
		ways = append(ways, []string{"worker, compiled", "--compile"})
	}
	for i, way := range ways {
		w, err := b.start(ctx, stderr, append([]string{
			"-m", "meander.torch", "--socket", filepath.Join(sockets, fmt.Sprint("worker-", i)),
			"--device", b.device, "--dtype", b.dtype, "--threads", "1",
		}, way[1:]...)...)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.end()) }()
		cpu := func() float64 { return cpuSeconds() + processCPU(w.pid) }
		engines = append(engines, torchEngine{way[0], w.Model, cpu})
	}
	for _, e := range engines {
		fmt.Fprintf(out, "- %s: %s\n", e.name, e.model.Card().Backend)
	}
	if err := b.velocities(ctx, out, engines); err != nil {
		return err
	}
	return b.samples(ctx, out, engines)
}

// velocities compares calls of the network. All sizes take turns, too: their ratios are those of rounds side by side.
func (b *torchBench) velocities(ctx context.Context, out io.Writer, engines []torchEngine) error {
	heading(out, "A call of the network")
	fmt.Fprintf(out,
		"Rows of one prompt at the default size. Medians of %d rounds of at least %v each. Ratio, CPU: time and "+
			"processor time, of Go and Python together, to those of %s. One by one: %s of the deterministic worker "+
			"to that of the other. Scaling: rows per %s to those of the same engine with %d. Of rounds side by side "+
			"the median (smallest - largest).\n\n",
		b.rounds, torchRound, engines[0].name, b.unit(), b.unit(), b.batches[0])
	fmt.Fprint(out, "| rows | engine | ms | ratio | CPU | one by one | scaling |\n"+
		"| --- | --- | --- | --- | --- | --- | --- |\n")
	var calls []func() (torchTime, error)
	for _, rows := range b.batches {
		for _, e := range engines {
			call, _, err := velocityCall(ctx, e.model, b.prompt, e.model.Card().Size, rows, 1)
			if err != nil {
				return err
			}
			calls = append(calls, func() (torchTime, error) { return e.repeat(torchRound, call) })
		}
	}
	rounds, err := takeTurns(ctx, b.rounds, calls)
	if err != nil {
		return err
	}
	for k, rows := range b.batches {
		of := rounds[k*len(engines):]
		for i, e := range engines {
			wall, _ := secondsOf(of[i])
			used := b.used(of[i])
			faster := median(sideBySide(b.used(rounds[i]), used)) * float64(rows) / float64(b.batches[0])
			oneByOne := ""
			if e.name == deterministicWorker {
				oneByOne = fmt.Sprintf("%.2f", median(sideBySide(used, b.used(of[i-1]))))
			}
			fmt.Fprintf(out, "| %d | %s | %.2f | %s | %s | %.2f |\n", rows, e.name, median(wall)*1e3,
				compareTorch(of, i), oneByOne, faster)
		}
	}
	return nil
}

// unit names what used returns: other work on the machine lengthens processor time less, but a GPU uses none.
func (b *torchBench) unit() string {
	if b.device == "cpu" {
		return "processor time"
	}
	return "time"
}

// used returns the seconds of rounds that sizes and ways of the same engine are compared by.
func (b *torchBench) used(rounds []torchTime) []float64 {
	wall, cpu := secondsOf(rounds)
	if b.device == "cpu" && cpu[0] > 0 {
		return cpu
	}
	return wall
}

// samples compares runs of samples.
func (b *torchBench) samples(ctx context.Context, out io.Writer, engines []torchEngine) error {
	card := engines[0].model.Card()
	heading(out, "A run")
	fmt.Fprintf(out, "%d samples of one prompt in one batch, %d steps, guidance %g: encode, denoise, decode, without "+
		"events. Medians of %d rounds of at least %v each; ratios as above.\n\n",
		b.runs, b.steps, card.TrueCFGScale, b.rounds, 2*torchRound)
	fmt.Fprint(out,
		"| engine | s | CPU s | steps per CPU second | ratio | CPU |\n| --- | --- | --- | --- | --- | --- |\n")
	var calls []func() (torchTime, error)
	for _, e := range engines {
		p, err := newPainter(e.model, &samplerBench{
			prompt: b.prompt, negative: card.NegativePrompt, steps: b.steps, scale: card.TrueCFGScale,
		}, 1)
		if err != nil {
			return err
		}
		calls = append(calls, func() (torchTime, error) {
			return e.repeat(2*torchRound, func() error {
				_, err := p.paint(ctx, b.runs)
				return err
			})
		})
	}
	rounds, err := takeTurns(ctx, b.rounds, calls)
	if err != nil {
		return err
	}
	for i, e := range engines {
		wall, cpu := secondsOf(rounds[i])
		fmt.Fprintf(out, "| %s | %.2f | %.2f | %.0f | %s |\n", e.name, median(wall), median(cpu),
			float64(b.runs*b.steps)/median(cpu), compareTorch(rounds, i))
	}
	return nil
}

// repeat makes calls for at least so long, one at least.
func (e torchEngine) repeat(least time.Duration, call func() error) (torchTime, error) {
	began, cpu := time.Now(), e.cpu()
	for n := 1.0; ; n++ {
		if err := call(); err != nil {
			return torchTime{}, fmt.Errorf("%s: %w", e.name, err)
		}
		if since := time.Since(began); since >= least {
			return torchTime{since.Seconds() / n, (e.cpu() - cpu) / n}, nil
		}
	}
}

// secondsOf splits times.
func secondsOf(times []torchTime) (wall, cpu []float64) {
	for _, t := range times {
		wall, cpu = append(wall, t.wall), append(cpu, t.cpu)
	}
	return wall, cpu
}

// compareTorch writes the ratios of an engine's rounds to those of the first.
func compareTorch(rounds [][]torchTime, i int) string {
	if i == 0 {
		return "| "
	}
	wall, cpu := secondsOf(rounds[i])
	firstWall, firstCPU := secondsOf(rounds[0])
	pairs := sideBySide(wall, firstWall)
	return fmt.Sprintf("**%.2f** (%.2f - %.2f) | %.2f", median(pairs), slices.Min(pairs), slices.Max(pairs),
		median(sideBySide(cpu, firstCPU)))
}
