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
	"github.com/meander-rl/meander/schemas"
)

// pool bounds the calls to one reward function, or to all functions that compute in this process. It has a number of
// calls at once, a queue before them, and a breaker, which stops the calls for a while if the function does not answer.
// Joining never blocks: a sample that finds the queue full is told when to come again. So a slow function delays only
// the samples that need it, and these wait in the stream.
type pool struct {
	name string
	// calls is how many calls are made at once, batch the most samples of one.
	calls, batch int
	// queueLimit is how many samples may wait here; 0: any number, for functions that always answer.
	queueLimit int
	// linger is how long the first sample of a call waits for others.
	linger  time.Duration
	timeout time.Duration
	metrics *instruments
	// stopping ends the waiting of samples that no call has begun for.
	stopping <-chan struct{}

	startCall func([]*job) // in a goroutine of running
	stopCalls context.CancelFunc
	running   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	queue   []*job
	busy    int
	breaker breaker
	timer   *time.Timer // of the linger, nil when none runs
	// pace is the smoothed time of a full call divided by its samples. progress is when a call ended last, or began
	// while no other ran. turn is the latest time at which a sample was told to come again.
	pace     time.Duration
	progress time.Time
	turn     time.Time
}

// job is one sample that waits for its score from one function.
type job struct {
	scorer scorer.Scorer
	load   loader
	queued time.Time
	// patience is until when the call may wait to ask again; zero: as long as it takes.
	patience time.Time
	probe    bool
	done     chan scored // of one
}

// loader makes the input of a function; release ends the use of its image. If wait, it waits for memory; only a call
// that holds no image may do that. Otherwise it returns errNoMemory.
type loader func(ctx context.Context, wait bool) (in scorer.Input, release func(), err error)

// scored is the outcome of one function on one sample.
type scored struct {
	scorer.Result
	version string
	// took is the time of the call.
	took time.Duration
	// members is how many samples of the group the function compared; 0: it rated this one by itself.
	members int64
	// preferences are what it compared them by, where its scores are win rates.
	preferences []schemas.Preference
}

// busyError is the error of a sample that finds the queue full. It should come again after the given time.
type busyError struct{ after time.Duration }

func (e *busyError) Error() string { return "the queue is full" }

// imageError is the error of a sample whose image or text cannot be loaded: no function can score it now.
type imageError struct{ error }

func (e *imageError) Unwrap() error { return e.error }

// errStopping ends the waiting at shutdown.
var errStopping = errors.New("the service stops")

const (
	// firstPace is the assumed time for a sample before the first call; a sample that finds the queue
	// full comes again after shortestTurn to longestTurn.
	firstPace    = 10 * time.Millisecond
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
)

// start prepares a pool for use and returns it. When stopping is closed, samples that no call has begun for stop
// waiting. close ends what start began.
func (p *pool) start(stopping <-chan struct{}) *pool {
	ctx, cancel := context.WithCancel(context.Background())
	p.stopCalls = cancel
	p.startCall = func(jobs []*job) { p.running.Go(func() { p.run(ctx, jobs) }) }
	p.stopping, p.pace = stopping, firstPace
	p.metrics.pool(p.name)
	return p
}

// close ends the calls and waits until they have returned. No caller may still wait for a score.
func (p *pool) close() {
	p.mu.Lock()
	p.queue, p.closed = nil, true
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Unlock()
	p.stopCalls()
	p.running.Wait()
}

// slowCall is after how long without an answer others are told.
const slowCall = 5 * time.Second

// away returns why the last call of a function that others run got no answer, or how long none has come; empty: it
// answers, or is not asked.
func (p *pool) away() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	took := time.Since(p.progress)
	switch {
	case p.breaker.last != nil:
		return p.breaker.last.Error()
	case p.queueLimit > 0 && p.busy > 0 && took > slowCall:
		return fmt.Sprintf("%s has not answered for %v", p.name, took.Round(time.Second))
	}
	return ""
}

// score waits in the queue for a call of the function and returns the sample's score. Result.Err tells what to do: a
// busyError, a breakerError and errors that wrap scorer.ErrUnavailable are temporary. An imageError is about the
// sample, not the function. errStopping and the error of ctx say nothing about either. Every other error is final.
func (p *pool) score(ctx context.Context, s scorer.Scorer, load loader) scored {
	j := &job{scorer: s, load: load, queued: time.Now(), done: make(chan scored, 1)}
	j.patience, _ = scorer.RetryDeadline(ctx) // the call has another context
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
			p.remove(j) // a call that has begun goes on for the other samples in it
			return none(ctx.Err())
		case <-stopping:
			if p.remove(j) {
				return none(errStopping)
			}
			stopping = nil // the call has begun: wait for it
		}
	}
}

// join puts a job into the pool's queue and starts calls. The error is a breakerError or a busyError: the sample comes
// again later.
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
	p.metrics.Waiting.WithLabelValues(p.name).Inc()
	p.dispatch(j.queued)
	return nil
}

// nextTurn returns after which time a sample that found the queue full should come again. Samples come one after the
// other, a little faster than the function rates them, since an empty queue costs more than a full one. While no call
// ends they come less and less often, up to longestTurn. The caller holds the lock.
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

// remove removes a job from the queue and reports whether it was there.
func (p *pool) remove(j *job) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.queue, j)
	if i < 0 {
		return false
	}
	p.queue = slices.Delete(p.queue, i, i+1)
	p.metrics.Waiting.WithLabelValues(p.name).Dec()
	if j.probe {
		p.breaker.abandon()
	}
	return true
}

// dispatch starts calls while one is free and samples wait. A call that is not full waits for the linger time first.
// The caller holds the lock.
func (p *pool) dispatch(now time.Time) {
	for p.busy < p.calls && len(p.queue) > 0 && !p.closed {
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
		p.metrics.Waiting.WithLabelValues(p.name).Sub(float64(n))
		p.startCall(jobs)
	}
}

// run is one call of the pool's function: it loads the inputs of some jobs, calls the function for all of them, and
// delivers the scores. Jobs for whose images there is no memory return to the queue. ctx is the pool's: a sample that
// is cancelled must not cancel the others.
func (p *pool) run(ctx context.Context, jobs []*job) {
	inFlight := p.metrics.InFlight.WithLabelValues(p.name)
	inFlight.Add(float64(len(jobs)))
	defer inFlight.Sub(float64(len(jobs)))
	var in []scorer.Input
	asked := jobs[:0]
	probe := false
	for i, j := range jobs {
		x, release, err := j.load(ctx, len(asked) == 0)
		if errors.Is(err, errNoMemory) {
			p.requeue(jobs[i:])
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
		results = p.rate(withPatience(ctx, asked), asked[0].scorer, in)
	}
	took := time.Since(began)
	away := unanswered(results)
	p.endCall(len(asked), away, probe, took)
	for i, j := range asked {
		name := j.scorer.Name()
		p.metrics.Seconds.WithLabelValues(name).Observe(took.Seconds())
		j.done <- scored{Result: results[i], version: j.scorer.Version(), took: took}
	}
	if len(asked) > 0 && p.batch > 1 {
		p.metrics.Batches.WithLabelValues(p.name).Inc()
	}
}

// withPatience returns the context of a call, which waits no longer than the first of its samples allows.
func withPatience(ctx context.Context, jobs []*job) context.Context {
	var first time.Time
	for _, j := range jobs {
		if !j.patience.IsZero() && (first.IsZero() || j.patience.Before(first)) {
			first = j.patience
		}
	}
	if first.IsZero() {
		return ctx
	}
	return scorer.WithRetryDeadline(ctx, first)
}

// requeue returns jobs to the head of the queue.
func (p *pool) requeue(jobs []*job) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queue = append(slices.Clone(jobs), p.queue...)
	p.metrics.Waiting.WithLabelValues(p.name).Add(float64(len(jobs)))
}

// unanswered returns the error of a call in which the function answered for no sample (scorer.ErrUnavailable for all);
// nil if it answered for any.
func unanswered(results []scorer.Result) (away error) {
	for _, r := range results {
		if !errors.Is(r.Err, scorer.ErrUnavailable) {
			return nil
		}
		away = r.Err
	}
	return away
}

// endCall records the outcome of a call and starts the next. away is the error of unanswered. If it makes the breaker
// open, all jobs in the queue get a breakerError, so that their samples come again later.
func (p *pool) endCall(samples int, away error, probe bool, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.busy--
	p.progress = now
	switch {
	case samples == 0 || p.closed:
		if probe {
			p.breaker.abandon()
		}
	case p.queueLimit > 0:
		was := p.breaker.open()
		if p.breaker.record(away, probe, now) {
			for _, j := range p.queue {
				j.done <- scored{Result: scorer.Result{
					Err: fmt.Errorf("%s %w", j.scorer.Name(), &breakerError{p.breaker.until.Sub(now), away}),
				}, version: j.scorer.Version()}
			}
			p.metrics.Waiting.WithLabelValues(p.name).Sub(float64(len(p.queue)))
			p.queue = nil
		}
		switch gauge := p.metrics.Breaker.WithLabelValues(p.name); {
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

// rate scores samples in one call. A sample whose score is not a number is scored again alone; so is every sample if
// none got a score. No sample may fail because of another one in its call.
func (p *pool) rate(ctx context.Context, s scorer.Scorer, in []scorer.Input) []scorer.Result {
	results := p.call(ctx, s, in)
	failed, none := make([]bool, len(in)), true
	for i, r := range results {
		failed[i] = r.Err != nil && !errors.Is(r.Err, scorer.ErrUnavailable)
		none = none && failed[i]
	}
	for i, r := range results {
		if failed[i] && (none || faultOf(r.Value) != nil) && len(in) > 1 && ctx.Err() == nil {
			results[i] = p.call(ctx, s, in[i:i+1])[0]
		}
	}
	return results
}

// faultOf returns what is wrong with a score or a reward: events hold only finite numbers up to a limit.
func faultOf(v float64) error {
	if math.Abs(v) <= schemas.MaxScore {
		return nil
	}
	return fmt.Errorf("%v; must be between %g and %g", v, -schemas.MaxScore, schemas.MaxScore)
}

// call runs the function once, within the pool's timeout. It turns a timeout into a temporary error, and a score that
// no event can hold into an error of that sample.
func (p *pool) call(ctx context.Context, s scorer.Scorer, in []scorer.Input) []scorer.Result {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	results := callScorer(ctx, s, in)
	for i := range results {
		r := &results[i]
		if errors.Is(r.Err, context.DeadlineExceeded) && !errors.Is(r.Err, scorer.ErrUnavailable) && ctx.Err() != nil {
			r.Err = fmt.Errorf("%s: no score within %v: %w", s.Name(), p.timeout, scorer.ErrUnavailable)
		}
		if err := faultOf(r.Value); r.Err == nil && err != nil {
			r.Err = fmt.Errorf("score is %w", err)
		}
	}
	return results
}

// callScorer calls the method of the function that gives the most: scores for many samples, details, or one score. A
// panic becomes the error of all samples, so it does not end the service.
func callScorer(ctx context.Context, s scorer.Scorer, in []scorer.Input) (results []scorer.Result) {
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

// breaker stops the calls to a function that does not answer. After breakerLimit failed calls in a row it opens: it
// admits no sample for a while, then one as a probe, and waits longer each time a probe fails. A call that gets an
// answer closes it. The lock of its pool guards it.
type breaker struct {
	failures int // in a row
	probes   int // in a row that failed
	probing  bool
	until    time.Time
	last     error
}

const (
	breakerLimit   = 3
	breakerFirst   = time.Second
	breakerLongest = 15 * time.Second
)

// breakerError is the error of a sample that gets no call, because the calls before it failed with err.
type breakerError struct {
	// after is when it makes sense to come again.
	after time.Duration
	err   error
}

func (e *breakerError) Error() string {
	return fmt.Sprintf("is not called for a while, because of: %v", e.err)
}

func (e *breakerError) Unwrap() error { return e.err }

func (b *breaker) open() bool { return b.failures >= breakerLimit }

// admit reports whether a sample may join the pool's queue: err is a breakerError if the function does not answer at
// present. probe: this sample is the probe, so its outcome must be given to record, or abandon called.
func (b *breaker) admit(now time.Time) (probe bool, err error) {
	if !b.open() {
		return false, nil
	}
	if b.probing || now.Before(b.until) {
		return false, &breakerError{max(b.until.Sub(now), breakerFirst), b.last}
	}
	b.probing = true
	return true, nil
}

// abandon ends a probe without an outcome.
func (b *breaker) abandon() { b.probing = false }

// record counts the outcome of a call: err is why it got no answer, nil if it got one. It reports whether the breaker
// opened with this call.
func (b *breaker) record(err error, probe bool, now time.Time) (opened bool) {
	if err == nil {
		*b = breaker{}
		return false
	}
	b.last = err
	switch {
	case probe:
		b.probing = false
		b.probes++
	case b.open():
		return false // a call from before
	}
	b.failures++
	if b.open() {
		b.until = now.Add(min(breakerFirst<<min(b.probes, 8), breakerLongest))
	}
	return b.open()
}
