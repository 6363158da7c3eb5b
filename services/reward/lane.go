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

// lane is the way to one reward function, or to all that compute in this process: so many
// calls at once, before them a line of bounded length, and a breaker. Joining never
// blocks: a sample that finds the line full is told when to come again, so that a slow
// function holds up nothing but the samples that need it, and these wait in the stream.
type lane struct {
	name string
	// calls is how many calls are made at once, batch the most samples of one.
	calls, batch int
	// line is how many samples may wait here; 0: any number, for functions that always
	// answer.
	line int
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
	// pace is the smoothed time that a call takes for each of its samples, progress when a
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

// loader makes the input of a function; release ends the use of its picture. Who holds no
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

func (e *busyError) Error() string { return "every place in the line is taken" }

// pictureError says that there is no input for any function.
type pictureError struct{ error }

func (e *pictureError) Unwrap() error { return e.error }

// errStopping ends the waiting at shutdown.
var errStopping = errors.New("the service stops")

const (
	// firstPace is what a function is thought to take before it has been called, and
	// longestTurn the longest that a sample stays away before it asks again.
	firstPace    = 10 * time.Millisecond
	shortestTurn = 50 * time.Millisecond
	longestTurn  = time.Minute
)

func (l *lane) start(stopping <-chan struct{}) *lane {
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.stopping, l.pace = stopping, firstPace
	l.metrics.lane(l.name)
	return l
}

// close ends the calls and waits for them. Nobody may wait for a score any more.
func (l *lane) close() {
	l.cancel()
	l.mu.Lock()
	l.queue = nil
	if l.timer != nil {
		l.timer.Stop()
	}
	l.mu.Unlock()
	l.running.Wait()
}

// score has a sample rated. Errors: busyError, sparedError and others that wrap
// scorer.ErrUnavailable may pass; pictureError is the sample's; errStopping and that of
// ctx say nothing about the function; every other is final.
func (l *lane) score(ctx context.Context, s scorer.Scorer, load loader) scored {
	j := &job{scorer: s, load: load, queued: time.Now(), done: make(chan scored, 1)}
	none := func(err error) scored { return scored{Result: scorer.Result{Err: err}, version: s.Version()} }
	if err := l.join(j); err != nil {
		return none(err)
	}
	stopping := l.stopping
	for {
		select {
		case r := <-j.done:
			return r
		case <-ctx.Done():
			l.drop(j) // a call that has begun goes on, for those who share it
			return none(ctx.Err())
		case <-stopping:
			if l.drop(j) {
				return none(errStopping)
			}
			stopping = nil // the call has begun: wait for it
		}
	}
}

func (l *lane) join(j *job) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if j.probe, err = l.breaker.admit(j.queued); err != nil {
		return fmt.Errorf("%s %w", j.scorer.Name(), err)
	}
	if l.line > 0 && len(l.queue) >= l.line {
		if j.probe {
			l.breaker.abandon()
		}
		return &busyError{l.nextTurn(j.queued)}
	}
	l.queue = append(l.queue, j)
	l.metrics.waiting.WithLabelValues(l.name).Inc()
	l.dispatch(j.queued)
	return nil
}

// nextTurn promises a place in the line: samples come again one after the other, a little
// faster than the function takes them, for a line that runs empty costs more than one that
// is found full. While no call ends they come more and more rarely. Lock held.
func (l *lane) nextTurn(now time.Time) time.Duration {
	if l.turn.Before(now) {
		l.turn = now
	}
	each := 3 * l.pace / time.Duration(4*l.calls)
	if silent := now.Sub(l.progress); silent > 2*l.pace*time.Duration(l.batch) {
		each = silent
	}
	l.turn = l.turn.Add(each)
	if limit := now.Add(longestTurn); l.turn.After(limit) {
		l.turn = limit
	}
	d := l.turn.Sub(now)
	return max(shortestTurn, d-rand.N(d/8+1))
}

// drop takes a sample out of the line, and says whether it was there.
func (l *lane) drop(j *job) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.queue, j)
	if i < 0 {
		return false
	}
	l.queue = slices.Delete(l.queue, i, i+1)
	l.metrics.waiting.WithLabelValues(l.name).Dec()
	if j.probe {
		l.breaker.abandon()
	}
	return true
}

// dispatch starts the calls that can be. Lock held.
func (l *lane) dispatch(now time.Time) {
	for l.busy < l.calls && len(l.queue) > 0 && l.ctx.Err() == nil {
		n := min(len(l.queue), l.batch)
		if wait := l.queue[0].queued.Add(l.linger).Sub(now); n < l.batch && wait > 0 && !l.queue[0].probe {
			if l.timer == nil {
				l.timer = time.AfterFunc(wait, func() {
					l.mu.Lock()
					defer l.mu.Unlock()
					l.timer = nil
					l.dispatch(time.Now())
				})
			}
			return
		}
		jobs := slices.Clone(l.queue[:n])
		clear(l.queue[:n])
		if l.queue = l.queue[n:]; len(l.queue) == 0 {
			l.queue = nil
		}
		if l.busy == 0 {
			l.progress = now
		}
		l.busy++
		l.metrics.waiting.WithLabelValues(l.name).Sub(float64(n))
		l.running.Go(func() { l.run(jobs) })
	}
}

// run makes one call. Its time limit is the lane's: one sample that is cancelled must not
// cancel the others.
func (l *lane) run(jobs []*job) {
	inFlight := l.metrics.inFlight.WithLabelValues(l.name)
	inFlight.Add(float64(len(jobs)))
	defer inFlight.Sub(float64(len(jobs)))
	var in []scorer.Input
	asked := jobs[:0]
	probe := false
	for i, j := range jobs {
		x, release, err := j.load(l.ctx, len(asked) == 0)
		if errors.Is(err, errNoRoom) {
			l.putBack(jobs[i:])
			break
		}
		probe = probe || j.probe
		if err != nil {
			j.done <- scored{Result: scorer.Result{Err: &pictureError{err}}, version: j.scorer.Version()}
			continue
		}
		defer release()
		in, asked = append(in, x), append(asked, j)
	}
	ctx, cancel := context.WithTimeout(l.ctx, l.timeout)
	defer cancel()
	var results []scorer.Result
	began := time.Now()
	if len(asked) > 0 {
		results = l.call(ctx, asked[0].scorer, in)
	}
	took := time.Since(began)
	away := l.unanswered(ctx, asked, results)
	l.settle(len(asked), away, probe, took)
	for i, j := range asked {
		name := j.scorer.Name()
		l.metrics.seconds.WithLabelValues(name).Observe(took.Seconds())
		j.done <- scored{results[i], j.scorer.Version(), took}
	}
	if len(asked) > 0 && l.batch > 1 {
		l.metrics.batches.WithLabelValues(l.name).Inc()
	}
}

// putBack returns samples to the head of the line: there is no room for their pictures
// beside those of the call that they were to be part of.
func (l *lane) putBack(jobs []*job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(slices.Clone(jobs), l.queue...)
	l.metrics.waiting.WithLabelValues(l.name).Add(float64(len(jobs)))
}

// unanswered is why no sample of a call got an answer; nil when one did. It names what a
// time limit means.
func (l *lane) unanswered(ctx context.Context, asked []*job, results []scorer.Result) (away error) {
	for i := range results {
		r := &results[i]
		if errors.Is(r.Err, context.DeadlineExceeded) && !errors.Is(r.Err, scorer.ErrUnavailable) && ctx.Err() != nil {
			r.Err = fmt.Errorf("%s: no score within %v: %w", asked[i].scorer.Name(), l.timeout, scorer.ErrUnavailable)
		}
		if r.Err == nil && (math.IsNaN(r.Value) || math.IsInf(r.Value, 0)) {
			r.Err = fmt.Errorf("score is %v", r.Value)
		}
	}
	for _, r := range results {
		if !errors.Is(r.Err, scorer.ErrUnavailable) {
			return nil
		}
		away = r.Err
	}
	return away
}

// settle ends a call: the breaker learns from it, and the next begins.
func (l *lane) settle(samples int, away error, probe bool, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.busy--
	l.progress = now
	switch {
	case samples == 0 || l.ctx.Err() != nil:
		if probe {
			l.breaker.abandon()
		}
	case l.line > 0:
		was := l.breaker.open()
		if l.breaker.saw(away, probe, now) {
			for _, j := range l.queue {
				j.done <- scored{Result: scorer.Result{Err: fmt.Errorf("%s %w", j.scorer.Name(), &sparedError{l.breaker.until.Sub(now), away})}, version: j.scorer.Version()}
			}
			l.metrics.waiting.WithLabelValues(l.name).Sub(float64(len(l.queue)))
			l.queue = nil
		}
		switch gauge := l.metrics.breaker.WithLabelValues(l.name); {
		case l.breaker.open() && !was:
			gauge.Inc()
		case was && !l.breaker.open():
			gauge.Dec()
		}
	}
	if samples > 0 {
		l.pace += (took/time.Duration(samples) - l.pace) / 8
	}
	l.dispatch(now)
}

// call runs the function; a panic is its failure, not the service's.
func (l *lane) call(ctx context.Context, s scorer.Scorer, in []scorer.Input) (results []scorer.Result) {
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
			return fail(fmt.Errorf("%s returned %d results for %d pictures", s.Name(), len(results), len(in)))
		}
	case scorer.Detailer: // lanes have batches of one unless the function takes more
		results = []scorer.Result{s.ScoreDetail(ctx, in[0])}
	default:
		value, err := s.Score(ctx, in[0])
		results = []scorer.Result{{Value: value, Err: err}}
	}
	return results
}
