package reward

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/scorer"
)

// lane is the way to one reward function: so many calls at once, and a breaker that
// spares one which does not answer.
type lane struct {
	scorer scorer.Scorer
	// calls has a token for each call under way; that of functions in this process is shared
	// by all of them.
	calls chan struct{}
	// line has a token for each sample that is called or waits to be; nil: all may wait.
	line    chan struct{}
	breaker breaker
	batches *batcher // nil: one sample at a time
	timeout time.Duration
	metrics *instruments
}

// errLineFull says that a sample is to be put back: those before it keep the function
// busy.
var errLineFull = errors.New("the line is full")

// enter takes a place in the line, and leave gives it back. Entering never waits.
func (l *lane) enter() bool {
	if l.line == nil {
		return true
	}
	select {
	case l.line <- struct{}{}:
		return true
	default:
		return false
	}
}

func (l *lane) leave() {
	if l.line != nil {
		<-l.line
	}
}

// score calls the function with a time limit; a panic is its failure, not the service's.
func (l *lane) score(ctx context.Context, in scorer.Input) scorer.Result {
	name := l.scorer.Name()
	if err := l.breaker.allow(time.Now()); err != nil {
		return scorer.Result{Err: fmt.Errorf("%s: %w", name, err)}
	}
	l.metrics.inFlight.WithLabelValues(name).Inc()
	defer l.metrics.inFlight.WithLabelValues(name).Dec()
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	began := time.Now()
	var r scorer.Result
	if l.batches != nil {
		r = l.batches.score(ctx, in)
	} else {
		r = l.call(ctx, in)
	}
	if errors.Is(r.Err, context.DeadlineExceeded) && ctx.Err() != nil {
		r.Err = fmt.Errorf("%s gave no score in %v: %w", name, l.timeout, scorer.ErrUnavailable)
	}
	l.breaker.saw(r.Err, time.Now())
	l.metrics.seconds.WithLabelValues(name).Observe(time.Since(began).Seconds())
	return r
}

// call waits for its turn and runs the function on one sample.
func (l *lane) call(ctx context.Context, in scorer.Input) (r scorer.Result) {
	select {
	case l.calls <- struct{}{}:
		defer func() { <-l.calls }()
	case <-ctx.Done():
		return scorer.Result{Err: ctx.Err()}
	}
	defer func() {
		if p := recover(); p != nil {
			r = scorer.Result{Err: fmt.Errorf("scorer %s panicked: %v", l.scorer.Name(), p)}
		}
	}()
	if d, ok := l.scorer.(scorer.Detailer); ok {
		return d.ScoreDetail(ctx, in)
	}
	value, err := l.scorer.Score(ctx, in)
	return scorer.Result{Value: value, Err: err}
}

// breaker spares a function that does not answer: after breakerFaults failures in a row
// it lets nothing through for a while, then one call to see.
type breaker struct {
	mu     sync.Mutex
	faults int
	until  time.Time
	last   error
}

const (
	breakerFaults   = 5
	breakerFirst    = time.Second
	breakerLongest  = 15 * time.Second
	breakerDoubling = 8 // faults beyond which the pause no longer grows
)

func (b *breaker) allow(now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.faults < breakerFaults {
		return nil
	}
	if now.Before(b.until) {
		return fmt.Errorf("it failed %d times in a row, and is left alone for a while: %w", b.faults, b.last)
	}
	b.until = now.Add(breakerLongest) // one goes to see; the others wait for what it finds
	return nil
}

func (b *breaker) saw(err error, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !errors.Is(err, scorer.ErrUnavailable) {
		if !errors.Is(err, context.Canceled) {
			b.faults = 0
		}
		return
	}
	b.faults++
	b.last = err
	if b.faults >= breakerFaults {
		b.until = now.Add(min(breakerFirst<<min(b.faults-breakerFaults, breakerDoubling), breakerLongest))
	}
}

// batcher gathers samples of several requests for a function that does better with many.
type batcher struct {
	lane   *lane
	scorer scorer.BatchScorer
	queue  chan job
	stop   chan struct{}
	ended  sync.WaitGroup
}

type job struct {
	in   scorer.Input
	done chan scorer.Result // of one
}

// linger is how long the first sample of a batch waits for others.
const linger = 10 * time.Millisecond

func newBatcher(l *lane, s scorer.BatchScorer) *batcher {
	b := &batcher{lane: l, scorer: s, queue: make(chan job), stop: make(chan struct{})}
	b.ended.Go(b.run)
	return b
}

func (b *batcher) close() {
	close(b.stop)
	b.ended.Wait()
}

func (b *batcher) score(ctx context.Context, in scorer.Input) scorer.Result {
	j := job{in, make(chan scorer.Result, 1)}
	select {
	case b.queue <- j:
	case <-ctx.Done():
		return scorer.Result{Err: ctx.Err()}
	case <-b.stop:
		return scorer.Result{Err: context.Canceled}
	}
	select {
	case r := <-j.done:
		return r
	case <-ctx.Done(): // the batch goes on without it
		return scorer.Result{Err: ctx.Err()}
	}
}

func (b *batcher) run() {
	for {
		// A call first, then the samples: while all calls are under way the batch grows.
		select {
		case b.lane.calls <- struct{}{}:
		case <-b.stop:
			return
		}
		var jobs []job
		select {
		case j := <-b.queue:
			jobs = append(jobs, j)
		case <-b.stop:
			return
		}
		wait := time.NewTimer(linger)
		for more := true; more && len(jobs) < b.scorer.MaxBatch(); {
			select {
			case j := <-b.queue:
				jobs = append(jobs, j)
			case <-wait.C:
				more = false
			}
		}
		wait.Stop()
		b.ended.Go(func() {
			defer func() { <-b.lane.calls }()
			b.call(jobs)
		})
	}
}

// call scores a batch. Its time limit is its own: one impatient sample must not cancel
// the others.
func (b *batcher) call(jobs []job) {
	ctx, cancel := context.WithTimeout(context.Background(), b.lane.timeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() {})()
	in := make([]scorer.Input, len(jobs))
	for i, j := range jobs {
		in[i] = j.in
	}
	results, err := b.guarded(ctx, in)
	for i, j := range jobs {
		if err != nil {
			j.done <- scorer.Result{Err: err}
			continue
		}
		j.done <- results[i]
	}
}

func (b *batcher) guarded(ctx context.Context, in []scorer.Input) (results []scorer.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("scorer %s panicked: %v", b.scorer.Name(), p)
		}
	}()
	stopped := make(chan struct{})
	defer close(stopped)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // a shutdown ends the call
		select {
		case <-b.stop:
			cancel()
		case <-stopped:
		}
	}()
	results = b.scorer.ScoreBatch(ctx, in)
	if len(results) != len(in) {
		return nil, fmt.Errorf("scorer %s returned %d results for %d pictures", b.scorer.Name(), len(results), len(in))
	}
	return results, nil
}
