package reward

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/scorer"
)

// pool is the way to one reward function, or to all that compute in this process: so many
// calls at once, before them a queue of bounded length, and a breaker. Joining never
// blocks: a sample that finds the queue full is told when to come again, so that a slow
// function holds up nothing but the samples that need it, and these wait in the stream.
type pool struct {
	name string
	// calls is how many calls are made at once, batch the most samples of one.
	calls, batch int
	// queueLimit is how many samples may wait here; 0: any number, for functions that always
	// answer.
	queueLimit int
	// linger is how long the first sample of a call waits for others.
	linger  time.Duration
	timeout time.Duration
	metrics *instruments
	// stopping ends the waiting of samples that no call has begun for.
	stopping <-chan struct{}

	ctx     context.Context // of the calls
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	queue   []*job
	busy    int
	breaker breaker
	timer   *time.Timer // of the linger, nil when none runs
	// pace is the smoothed time that a full call takes for each of its samples, progress when a
	// call ended last, or began while none was under way; turn is the moment up to which
	// samples that were put back have been promised a place.
	pace     time.Duration
	progress time.Time
	turn     time.Time
}

// job is one sample before one function.
type job struct {
	scorer scorer.Scorer
	load   loader
	queued time.Time
	probe  bool
	done   chan scored // of one
}

// loader makes the input of a function; release ends the use of its image. Who holds no
// other may wait for room; else it is errNoRoom.
type loader func(ctx context.Context, wait bool) (in scorer.Input, release func(), err error)

// scored is the outcome of one function on one sample.
type scored struct {
	scorer.Result
	version string
	// took is the time of the call.
	took time.Duration
}

// busyError says that a sample is to come again: those before it keep the function busy.
type busyError struct{ after time.Duration }

func (e *busyError) Error() string { return "every place in the queue is taken" }

// imageError says that there is no input for any function.
type imageError struct{ error }

func (e *imageError) Unwrap() error { return e.error }

// errStopping ends the waiting at shutdown.
var errStopping = errors.New("the service stops")

const (
	// firstPace is what a function is thought to take before it has been called, and
	// longestTurn the longest that a sample stays away before it asks again.
	firstPace    = 10 * time.Millisecond
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
)

func (p *pool) start(stopping <-chan struct{}) *pool {
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.stopping, p.pace = stopping, firstPace
	p.metrics.pool(p.name)
	return p
}

// close ends the calls and waits for them. Nobody may wait for a score any more.
func (p *pool) close() {
	p.cancel()
	p.mu.Lock()
	p.queue = nil
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Unlock()
	p.running.Wait()
}

// score has a sample rated. Errors: busyError, sparedError and others that wrap
// scorer.ErrUnavailable may pass; imageError is the sample's; errStopping and that of
// ctx say nothing about the function; every other is final.
func (p *pool) score(ctx context.Context, s scorer.Scorer, load loader) scored {
	j := &job{scorer: s, load: load, queued: time.Now(), done: make(chan scored, 1)}
	none := func(err error) scored { return scored{Result: scorer.Result{Err: err}, version: s.Version()} }
	if err := p.join(j); err != nil {
		return none(err)
	}
	stopping := p.stopping
	for {
		select {
		case r := <-j.done:
			return r
		case <-ctx.Done():
			p.drop(j) // a call that has begun goes on, for those who share it
			return none(ctx.Err())
		case <-stopping:
			if p.drop(j) {
				return none(errStopping)
			}
			stopping = nil // the call has begun: wait for it
		}
	}
}

func (p *pool) join(j *job) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if j.probe, err = p.breaker.admit(j.queued); err != nil {
		return fmt.Errorf("%s %w", j.scorer.Name(), err)
	}
	if p.queueLimit > 0 && len(p.queue) >= p.queueLimit {
		if j.probe {
			p.breaker.abandon()
		}
		return &busyError{p.nextTurn(j.queued)}
	}
	p.queue = append(p.queue, j)
	p.metrics.waiting.WithLabelValues(p.name).Inc()
	p.dispatch(j.queued)
	return nil
}

// nextTurn promises a place in the queue: samples come again one after the other, a little
// faster than the function takes them, for a queue that runs empty costs more than one that
// is found full. While no call ends they come more and more rarely, but not so rarely that a
// function which was slow once goes without samples. Lock held.
func (p *pool) nextTurn(now time.Time) time.Duration {
	if p.turn.Before(now) {
		p.turn = now
	}
	each := 3 * p.pace / time.Duration(4*p.calls)
	p.turn = p.turn.Add(max(each, now.Sub(p.progress)/64))
	if limit := now.Add(longestTurn); p.turn.After(limit) {
		p.turn = limit
	}
	d := p.turn.Sub(now)
	return max(shortestTurn, d-rand.N(d/8+1))
}

// drop takes a sample out of the queue, and says whether it was there.
func (p *pool) drop(j *job) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.queue, j)
	if i < 0 {
		return false
	}
	p.queue = slices.Delete(p.queue, i, i+1)
	p.metrics.waiting.WithLabelValues(p.name).Dec()
	if j.probe {
		p.breaker.abandon()
	}
	return true
}

// dispatch starts the calls that can be. Lock held.
func (p *pool) dispatch(now time.Time) {
	for p.busy < p.calls && len(p.queue) > 0 && p.ctx.Err() == nil {
		n := min(len(p.queue), p.batch)
		if wait := p.queue[0].queued.Add(p.linger).Sub(now); n < p.batch && wait > 0 && !p.queue[0].probe {
			if p.timer == nil {
				p.timer = time.AfterFunc(wait, func() {
					p.mu.Lock()
					defer p.mu.Unlock()
					p.timer = nil
					p.dispatch(time.Now())
				})
			}
			return
		}
		jobs := slices.Clone(p.queue[:n])
		clear(p.queue[:n])
		if p.queue = p.queue[n:]; len(p.queue) == 0 {
			p.queue = nil
		}
		if p.busy == 0 {
			p.progress = now
		}
		p.busy++
		p.metrics.waiting.WithLabelValues(p.name).Sub(float64(n))
		p.running.Go(func() { p.run(jobs) })
	}
}

// run makes one call. Its time limit is the pool's: one sample that is cancelled must not
// cancel the others.
func (p *pool) run(jobs []*job) {
	inFlight := p.metrics.inFlight.WithLabelValues(p.name)
	inFlight.Add(float64(len(jobs)))
	defer inFlight.Sub(float64(len(jobs)))
	var in []scorer.Input
	asked := jobs[:0]
	probe := false
	for i, j := range jobs {
		x, release, err := j.load(p.ctx, len(asked) == 0)
		if errors.Is(err, errNoRoom) {
			p.putBack(jobs[i:])
			break
		}
		probe = probe || j.probe
		if err != nil {
			j.done <- scored{Result: scorer.Result{Err: &imageError{err}}, version: j.scorer.Version()}
			continue
		}
		defer release()
		in, asked = append(in, x), append(asked, j)
	}
	var results []scorer.Result
	began := time.Now()
	if len(asked) > 0 {
		results = p.rate(asked[0].scorer, in)
	}
	took := time.Since(began)
	away := unanswered(results)
	p.settle(len(asked), away, probe, took)
	for i, j := range asked {
		name := j.scorer.Name()
		p.metrics.seconds.WithLabelValues(name).Observe(took.Seconds())
		j.done <- scored{results[i], j.scorer.Version(), took}
	}
	if len(asked) > 0 && p.batch > 1 {
		p.metrics.batches.WithLabelValues(p.name).Inc()
	}
}

// putBack returns samples to the head of the queue: there is no room for their images
// beside those of the call that they were to be part of.
func (p *pool) putBack(jobs []*job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(slices.Clone(jobs), p.queue...)
	p.metrics.waiting.WithLabelValues(p.name).Add(float64(len(jobs)))
}

// unanswered is why no sample of a call got an answer; nil when one did.
func unanswered(results []scorer.Result) (away error) {
	for _, r := range results {
		if !errors.Is(r.Err, scorer.ErrUnavailable) {
			return nil
		}
		away = r.Err
	}
	return away
}

// settle ends a call: the breaker learns from it, and the next begins.
func (p *pool) settle(samples int, away error, probe bool, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.busy--
	p.progress = now
	switch {
	case samples == 0 || p.ctx.Err() != nil:
		if probe {
			p.breaker.abandon()
		}
	case p.queueLimit > 0:
		was := p.breaker.open()
		if p.breaker.saw(away, probe, now) {
			for _, j := range p.queue {
				j.done <- scored{Result: scorer.Result{Err: fmt.Errorf("%s %w", j.scorer.Name(), &sparedError{p.breaker.until.Sub(now), away})}, version: j.scorer.Version()}
			}
			p.metrics.waiting.WithLabelValues(p.name).Sub(float64(len(p.queue)))
			p.queue = nil
		}
		switch gauge := p.metrics.breaker.WithLabelValues(p.name); {
		case p.breaker.open() && !was:
			gauge.Inc()
		case was && !p.breaker.open():
			gauge.Dec()
		}
	}
	if samples > 0 {
		p.pace += (took/time.Duration(p.batch) - p.pace) / 8
	}
	p.dispatch(now)
}

// rate has samples scored in one call. Where that gives none of them a score, or some of them one that is no number,
// these are scored again, each alone: no sample is judged by what another does to its call.
func (p *pool) rate(s scorer.Scorer, in []scorer.Input) []scorer.Result {
	results := p.call(s, in)
	failed, none := make([]bool, len(in)), true
	for i, r := range results {
		failed[i] = r.Err != nil && !errors.Is(r.Err, scorer.ErrUnavailable)
		none = none && failed[i]
	}
	for i, r := range results {
		if failed[i] && (none || !number(r.Value)) && len(in) > 1 && p.ctx.Err() == nil {
			results[i] = p.call(s, in[i:i+1])[0]
		}
	}
	return results
}

func number(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// call runs the function, for as long as a call may take; a panic is its failure, not the service's.
func (p *pool) call(s scorer.Scorer, in []scorer.Input) []scorer.Result {
	ctx, cancel := context.WithTimeout(p.ctx, p.timeout)
	defer cancel()
	results := ask(ctx, s, in)
	for i := range results {
		r := &results[i]
		if errors.Is(r.Err, context.DeadlineExceeded) && !errors.Is(r.Err, scorer.ErrUnavailable) && ctx.Err() != nil {
			r.Err = fmt.Errorf("%s: no score within %v: %w", s.Name(), p.timeout, scorer.ErrUnavailable)
		}
		if r.Err == nil && !number(r.Value) {
			r.Err = fmt.Errorf("score is %v", r.Value)
		}
	}
	return results
}

func ask(ctx context.Context, s scorer.Scorer, in []scorer.Input) (results []scorer.Result) {
	fail := func(err error) []scorer.Result {
		results := make([]scorer.Result, len(in))
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	defer func() {
		if p := recover(); p != nil {
			results = fail(fmt.Errorf("%s panicked: %v", s.Name(), p))
		}
	}()
	switch s := s.(type) {
	case scorer.BatchScorer:
		if results = s.ScoreBatch(ctx, in); len(results) != len(in) {
			return fail(fmt.Errorf("%s returned %d results for %d images", s.Name(), len(results), len(in)))
		}
	case scorer.Detailer: // pools have batches of one unless the function takes more
		results = []scorer.Result{s.ScoreDetail(ctx, in[0])}
	default:
		value, err := s.Score(ctx, in[0])
		results = []scorer.Result{{Value: value, Err: err}}
	}
	return results
}
