package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

const (
	loopBatch   = 8
	loopThreads = 2
	loopSteps   = 10
)

// overhead measures what the steps of a real model cost the loop that makes them: batches of samples with all their
// steps recorded and batches with none take turns.
func (b *eventsBench) overhead(ctx context.Context, out io.Writer) (err error) {
	settings := samplerBench{
		model: b.model, steps: loopSteps, scale: 4, prompt: `a green sign that says "EXIT"`, batches: []int{loopBatch},
		threads: []int{loopThreads}, rounds: 1,
	}
	if err := settings.check(); err != nil {
		return err
	}
	m, err := settings.open(loopThreads)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	p, err := newPainter(m, &settings, loopThreads)
	if err != nil {
		return err
	}
	conds, err := m.Encode(ctx, []string{p.prompt, p.negative})
	if err != nil {
		return err
	}
	heading(out, "In a sampler's loop")
	fmt.Fprintf(out, "The model %s, batches of %d samples of %d steps on %d threads, all latents stored in float16, "+
		"the server in the same process. With and without events take turns; medians of the rounds.\n\n",
		settings.card.Name, loopBatch, loopSteps, loopThreads)
	fmt.Fprint(out, "| latents, KiB | rounds | ms per step without events | with | of it handing over | handing "+
		"over, share of the loop | more time | more processor time |\n| --- | --- | --- | --- | --- | --- | --- | "+
		"--- |\n")
	var took, cpu [2][]float64
	var handed, shares, more, moreCPU []float64
	kib := 0.0
	for began, round := time.Now(), -1; round < 3 || time.Since(began) < b.loop; round++ { // the first warms up
		b.tick("loop", min(1, time.Since(began).Seconds()/b.loop.Seconds()))
		var t, c [2]float64
		var handing time.Duration
		for k := range 2 {
			e := (k + round + 1) % 2
			var l *loopRecorder
			p.onStep = nil
			if e == 1 {
				l = b.newLoopRecorder()
				p.onStep = l.record
			}
			cpuBefore, before := cpuSeconds(), time.Now()
			_, err := p.denoise(ctx, loopBatch, conds[0], conds[1])
			t[e] = time.Since(before).Seconds()
			if l != nil {
				err = errors.Join(err, l.stored(ctx))
				handing, kib = l.handing, l.kib
			}
			if c[e] = cpuSeconds() - cpuBefore; err != nil {
				return err
			}
		}
		if round < 0 {
			continue
		}
		for e := range 2 {
			took[e], cpu[e] = append(took[e], t[e]/loopSteps*1e3), append(cpu[e], c[e])
		}
		handed, shares = append(handed, handing.Seconds()/loopSteps*1e3), append(shares, handing.Seconds()/t[1])
		more, moreCPU = append(more, t[1]/t[0]-1), append(moreCPU, c[1]/c[0]-1)
	}
	fmt.Fprintf(out, "| %.1f | %d | %.2f | %.2f | %.3f | **%.2f %%** | %.1f %% | %.1f %% |\n",
		kib, len(more), median(took[0]), median(took[1]), median(handed), 100*median(shares), 100*median(more),
		100*median(moreCPU))
	return b.clear(ctx, schemas.StreamSteps)
}

// loopRecorder makes the steps of one batch into events, as a sampler does.
type loopRecorder struct {
	maker   *stepMaker
	batch   [loopBatch]*recorder.Recording
	close   func()
	handing time.Duration // that the loop was held up
	kib     float64
}

func (b *eventsBench) newLoopRecorder() *loopRecorder {
	p := b.bus.NewPublisher(windowSteps, windowBytes)
	l := &loopRecorder{maker: newStepMaker(b.nextRun(), 1), close: p.Close}
	for i := range l.batch {
		l.batch[i] = recorder.NewRecording(b.key, p)
	}
	return l
}

func (l *loopRecorder) record(ctx context.Context, sample int, s *flow.Step, card model.Card) error {
	began := time.Now()
	e := l.maker.step(sample, s.Index)
	x := tensor.F16.AppendFloats(nil, s.X)
	e.Latents[0].Tensor.Data, e.Latents[0].Tensor.Shape = x, []int64{
		int64(len(s.X) / card.LatentChannels), int64(card.LatentChannels),
	}
	err := l.batch[sample].Step(ctx, e)
	l.handing += time.Since(began)
	l.kib = float64(len(x)) / 1024
	return err
}

// stored waits until all steps are.
func (l *loopRecorder) stored(ctx context.Context) error {
	defer l.close()
	for _, r := range l.batch {
		if _, err := r.Stored(ctx); err != nil {
			return err
		}
	}
	return nil
}
