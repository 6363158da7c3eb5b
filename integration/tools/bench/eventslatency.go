package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// latencies measures steps that come one after another.
func (b *eventsBench) latencies(ctx context.Context, out io.Writer) error {
	heading(out, "From step to subscriber")
	fmt.Fprintf(out, "From handing a step over, before its digest, to its arrival at a subscriber, %d steps/s. "+
		"Loop: what handing one over takes of the sampler's loop.\n\n", b.rate)
	fmt.Fprint(out, "| step | connections | steps | p50 | p90 | p99 | longest | loop, p50 | loop, p99 |\n| --- | "+
		"--- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, kib := range b.sizes {
		for _, transport := range b.transports {
			arrival, loop, err := b.latencyOf(ctx, kib, transport)
			if err != nil {
				return err
			}
			slices.Sort(arrival)
			slices.Sort(loop)
			fmt.Fprintf(out, "| %d KiB | %s | %d | %.2f ms | %.2f ms | %.2f ms | %.2f ms | %.3f ms | %.3f ms |\n", kib,
				transport, len(arrival),
				percentile(arrival, .5), percentile(arrival, .9), percentile(arrival,
					.99), arrival[len(arrival)-1], percentile(loop, .5), percentile(loop, .99))
		}
	}
	return nil
}

// latencyOf is, in milliseconds, what steps took to arrive, and to be handed over.
func (b *eventsBench) latencyOf(ctx context.Context, kib int, transport string) (arrival, loop []float64, err error) {
	from, err := b.connect(ctx, transport)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	to, err := b.connect(ctx, transport)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	maker := newStepMaker(b.nextRun(), kib)
	n := max(benchBatch, int(b.latency.Seconds()*float64(b.rate)))
	sent := make([]time.Time, n+1)
	steps := map[string]int{}
	for k := range sent {
		steps[maker.step(place(k)).Subject()] = k
	}
	began := make(chan struct{})
	g, serving := errgroup.WithContext(ctx)
	g.Go(func() error {
		filter := schemas.Address{Kind: schemas.KindStep, Run: maker.run}.Filter()
		for m, err := range to.Read(serving, schemas.StreamSteps, []string{filter}, bus.ReadOptions{Live: true}) {
			if err != nil {
				return err
			}
			k := steps[m.Subject]
			if k == 0 { // tells that the subscriber is there
				close(began)
				continue
			}
			if arrival = append(arrival, time.Since(sent[k]).Seconds()*1e3); len(arrival) == n {
				return nil
			}
		}
		return serving.Err()
	})
	g.Go(func() error {
		p := from.NewPublisher(windowSteps, windowBytes)
		defer p.Close()
		r := recorder.NewRecording(b.key, p)
		tick := time.NewTicker(time.Second / time.Duration(b.rate))
		defer tick.Stop()
		for k := range sent {
			b.tick("latency", float64(k)/float64(n))
			step := maker.step(place(k))
			sent[k] = time.Now()
			if err := r.Step(serving, step); err != nil {
				return err
			}
			if k > 0 {
				loop = append(loop, time.Since(sent[k]).Seconds()*1e3)
			}
			if k == 0 {
				select {
				case <-serving.Done():
				case <-began:
				}
			}
			select {
			case <-serving.Done():
				return serving.Err()
			case <-tick.C:
			}
		}
		_, err := r.Stored(serving)
		return err
	})
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	return arrival, loop, b.clear(ctx, schemas.StreamSteps)
}
