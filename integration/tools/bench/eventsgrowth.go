package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// growSteps is the steps of a sample while streams grow, growLatents their KiB.
const growSteps, growLatents = 4, 1

// growth measures what an event costs as a run gets longer: the streams hold so many samples.
func (b *eventsBench) growth(ctx context.Context, out io.Writer) error {
	heading(out, "As a run grows")
	fmt.Fprintf(out, "Samples of %d steps of %d KiB, all of one run, %s. Publishing is that of the last %d samples, "+
		"in its fastest fifth; memory is the "+
		"live heap of the process, with the server, beyond that of the empty stream. Lookups: a step by its "+
		"subject, and the subjects of one sample, as a check of a trajectory asks.\n\n",
		growSteps, growLatents, inProcess, slices.Min(b.grow))
	fmt.Fprint(out, "| samples | steps | steps/s | CPU us per step | memory | bytes per step | step by subject, "+
		"p50, p99 | subjects of a sample, p50, p99 |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	maker := newStepMaker(b.nextRun(), growLatents)
	empty, held := liveHeap(), 0
	for _, n := range b.grow {
		tail := max(1, slices.Min(b.grow)/5)
		var rates, busy []float64
		for held < n {
			b.tick("growth", float64(held)/float64(slices.Max(b.grow)))
			count := min(tail, n-held)
			cpu, began := cpuSeconds(), time.Now()
			if err := b.fill(ctx, maker, held, count); err != nil {
				return err
			}
			if held += count; held > n-5*tail {
				steps := float64(count * growSteps)
				rates, busy = append(rates, steps/time.Since(began).Seconds()), append(busy,
					(cpuSeconds()-cpu)/steps*1e6)
			}
		}
		if err := b.wait(ctx, b.settle); err != nil { // the server's caches pass
			return err
		}
		heap := liveHeap() - empty
		bySubject, bySample, err := b.lookups(ctx, maker, held)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "| %d | %d | %.0f | %.1f | %.0f MiB | %.0f | %.3f, %.3f ms | %.3f, %.3f ms |\n", held,
			held*growSteps, slices.Max(rates), slices.Min(busy),
			heap/(1<<20), heap/float64(held*growSteps), percentile(bySubject, .5), percentile(bySubject,
				.99), percentile(bySample, .5), percentile(bySample, .99))
	}
	return b.clear(ctx, schemas.StreamSteps)
}

// fill stores samples [first, first+count).
func (b *eventsBench) fill(ctx context.Context, maker *stepMaker, first, count int) error {
	p := b.bus.NewPublisher(windowSteps, windowBytes)
	defer p.Close()
	var open []*recorder.Recording // samples whose steps are not awaited yet
	for sample := first; sample < first+count; sample++ {
		r := recorder.NewRecording(b.key, p)
		for index := range growSteps {
			if err := r.Step(ctx, maker.step(sample, index)); err != nil {
				return err
			}
		}
		if open = append(open, r); len(open) < benchBatch && sample+1 < first+count {
			continue
		}
		for _, r := range open {
			if _, err := r.Stored(ctx); err != nil {
				return err
			}
		}
		open = open[:0]
	}
	return nil
}

// lookups are the sorted times, in milliseconds, of looking up steps of samples drawn at random.
func (b *eventsBench) lookups(
	ctx context.Context, maker *stepMaker, samples int,
) (bySubject, bySample []float64, err error) {
	draw := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		e := maker.step(draw.IntN(samples), draw.IntN(growSteps))
		began := time.Now()
		if _, err := b.bus.Last(ctx, schemas.StreamSteps, e.Subject()); err != nil {
			return nil, nil, err
		}
		bySubject = append(bySubject, time.Since(began).Seconds()*1e3)
		filter := schemas.StepsFilter(e.Run, e.UID, strconv.FormatInt(e.SampleIndex, 10), e.Stage)
		began = time.Now()
		subjects, err := b.bus.Subjects(ctx, schemas.StreamSteps, filter)
		if err == nil && len(subjects) != growSteps {
			err = fmt.Errorf("%q has %d steps: %w", filter, len(subjects), bus.ErrNotFound)
		}
		if err != nil {
			return nil, nil, err
		}
		bySample = append(bySample, time.Since(began).Seconds()*1e3)
	}
	slices.Sort(bySubject)
	slices.Sort(bySample)
	return bySubject, bySample, nil
}
