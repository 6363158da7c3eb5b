package reward

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meander-rl/meander/pkg/scorer"
)

// fake is a function whose calls a test sees. It runs in the bubble of synctest, where no
// server can; integration has the tests with real ones.
type fake struct {
	batch int
	call  func(ctx context.Context, in []scorer.Input) []scorer.Result

	mu    sync.Mutex
	sizes []int
}

func (f *fake) Name() string    { return "http:fake" }
func (f *fake) Version() string { return "7" }
func (f *fake) MaxBatch() int   { return f.batch }

func (f *fake) Score(ctx context.Context, in scorer.Input) (float64, error) {
	r := f.ScoreBatch(ctx, []scorer.Input{in})[0]
	return r.Value, r.Err
}

func (f *fake) ScoreBatch(ctx context.Context, in []scorer.Input) []scorer.Result {
	f.mu.Lock()
	f.sizes = append(f.sizes, len(in))
	f.mu.Unlock()
	return f.call(ctx, in)
}

func (f *fake) calls() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.sizes)
}

// each is the result of n samples.
func each(n int, r scorer.Result) []scorer.Result { return slices.Repeat([]scorer.Result{r}, n) }

func ready(context.Context, bool) (scorer.Input, func(), error) {
	return scorer.Input{}, func() {}, nil
}

func openPool(t *testing.T, p *pool) *pool {
	if p.timeout == 0 {
		p.timeout = time.Minute
	}
	p.name, p.metrics = "http:fake", newInstruments(nil)
	p.start(nil)
	t.Cleanup(p.close)
	return p
}

func TestPool_BatchesAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{batch: 4, call: func(_ context.Context, in []scorer.Input) []scorer.Result {
			time.Sleep(time.Second)
			out := make([]scorer.Result, len(in))
			for i := range in {
				out[i].Value = float64(len(in[i].Prompt))
			}
			return out
		}}
		p := openPool(t, &pool{calls: 1, batch: 4, queueLimit: 16, linger: 10 * time.Millisecond})
		var wrong atomic.Int32
		var all sync.WaitGroup
		for i := range 10 {
			all.Go(func() {
				r := p.score(t.Context(), f, func(context.Context, bool) (scorer.Input, func(), error) {
					return scorer.Input{Prompt: fmt.Sprintf("%0*d", i+1, 0)}, func() {}, nil
				})
				if r.Err != nil || r.Value != float64(i+1) || r.version != "7" {
					wrong.Add(1)
				}
			})
		}
		all.Wait()
		if got := f.calls(); !slices.Equal(got, []int{4, 4, 2}) || wrong.Load() > 0 {
			t.Errorf("calls of %v samples, %d with another's score; want 4, 4, 2 and none", got, wrong.Load())
		}
	})
}

// A sample that arrives alone is not kept waiting for longer than the linger.
func TestPool_LingersShortly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{batch: 8, call: func(_ context.Context, in []scorer.Input) []scorer.Result {
			return each(len(in), scorer.Result{Value: 1})
		}}
		p := openPool(t, &pool{calls: 2, batch: 8, queueLimit: 32, linger: 10 * time.Millisecond})
		began := time.Now()
		if r := p.score(t.Context(), f, ready); r.Err != nil || time.Since(began) != 10*time.Millisecond {
			t.Errorf("%+v after %v, want a score after 10 ms", r, time.Since(began))
		}
	})
}

// One who gives up takes nothing from those it would have been scored with.
func TestPool_CancellationIsOfOneSample(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{batch: 2, call: func(ctx context.Context, in []scorer.Input) []scorer.Result {
			select {
			case <-time.After(time.Second):
				return each(len(in), scorer.Result{Value: 1})
			case <-ctx.Done():
				return each(len(in), scorer.Result{Err: ctx.Err()})
			}
		}}
		p := openPool(t, &pool{calls: 1, batch: 2, queueLimit: 16})
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(500*time.Millisecond, cancel)
		var all sync.WaitGroup
		var first, second scored
		all.Go(func() { first = p.score(ctx, f, ready) })
		all.Go(func() { second = p.score(t.Context(), f, ready) })
		all.Wait()
		if !errors.Is(first.Err, context.Canceled) || second.Err != nil || second.Value != 1 {
			t.Errorf("cancelled: %v, the other: %+v; want canceled, and a score", first.Err, second.Result)
		}
	})
}

// Joining never blocks: a full queue says when to come again, and samples that do come
// again are spread over the time that the function needs for them.
func TestPool_FullQueueGivesTurns(t *testing.T) {
	const n = 200
	for _, c := range []struct {
		name         string
		calls, batch int
		call         func(before int) time.Duration
		most         time.Duration
	}{
		// Two at a time take 10 s at best.
		{"steady", 2, 1, func(int) time.Duration { return 100 * time.Millisecond }, 15 * time.Second},
		// Samples put back during the slow first calls come again soon once calls are fast: 9.1 s at best.
		{"slow at first", 1, 16, func(before int) time.Duration {
			if before < 3 {
				return 3 * time.Second
			}
			return 10 * time.Millisecond
		}, 20 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fake{batch: c.batch}
				f.call = func(_ context.Context, in []scorer.Input) []scorer.Result {
					time.Sleep(c.call(len(f.calls()) - 1))
					return each(len(in), scorer.Result{Value: 1})
				}
				p := openPool(t, &pool{calls: c.calls, batch: c.batch, queueLimit: 2 * c.calls * c.batch})
				var all sync.WaitGroup
				var asked atomic.Int32
				began := time.Now()
				for range n {
					all.Go(func() {
						for {
							asked.Add(1)
							r := p.score(t.Context(), f, ready)
							busy, full := errors.AsType[*busyError](r.Err)
							if !full {
								return
							}
							if busy.after <= 0 || busy.after > longestTurn {
								t.Errorf("come again after %v", busy.after)
							}
							time.Sleep(busy.after)
						}
					})
				}
				all.Wait()
				if took := time.Since(began); took > c.most || asked.Load() > 6*n {
					t.Errorf("%d samples took %v and asked %d times; want at most %v and %d", n, took, asked.Load(),
						c.most, 6*n)
				}
			})
		})
	}
}

func TestPool_BreakerSparesAndReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		down.Store(true)
		f := &fake{batch: 1, call: func(context.Context, []scorer.Input) []scorer.Result {
			if down.Load() {
				return each(1, scorer.Result{Err: fmt.Errorf("no worker is there: %w", scorer.ErrUnavailable)})
			}
			return each(1, scorer.Result{Value: 1})
		}}
		p := openPool(t, &pool{calls: 2, batch: 1, queueLimit: 16})
		for range 100 {
			if r := p.score(t.Context(), f, ready); !errors.Is(r.Err, scorer.ErrUnavailable) {
				t.Fatalf("got %+v, want an error that may pass", r.Result)
			}
		}
		if n := len(f.calls()); n != breakerLimit {
			t.Errorf("%d calls of 100, want %d", n, breakerLimit)
		}
		// While it is down, one sample after each pause goes to see, and pauses get longer.
		for range 60 {
			time.Sleep(time.Second)
			for range 10 {
				p.score(t.Context(), f, ready)
			}
		}
		if n := len(f.calls()); n < breakerLimit+4 || n > breakerLimit+10 {
			t.Errorf("%d calls in a minute of being away, want %d to %d", n, breakerLimit+4, breakerLimit+10)
		}
		down.Store(false)
		time.Sleep(breakerLongest)
		for i := range 5 {
			if r := p.score(t.Context(), f, ready); r.Err != nil {
				t.Errorf("sample %d after it came back: %v", i, r.Err)
			}
		}
	})
}

// A function that hangs costs one sample at a time once the breaker is open, and its
// time limit is an error that may pass.
func TestPool_Hangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{batch: 1, call: func(ctx context.Context, _ []scorer.Input) []scorer.Result {
			<-ctx.Done()
			return each(1, scorer.Result{Err: ctx.Err()})
		}}
		p := openPool(t, &pool{calls: breakerLimit, batch: 1, queueLimit: 16, timeout: 10 * time.Second})
		began := time.Now()
		var all sync.WaitGroup
		for range breakerLimit + 16 {
			all.Go(func() {
				if r := p.score(t.Context(), f, ready); !errors.Is(r.Err, scorer.ErrUnavailable) {
					t.Errorf("got %+v, want an error that may pass", r.Result)
				}
			})
		}
		all.Wait()
		// Those in the queue hear of it with the call that opens the breaker, not after a time
		// limit of their own. Until then each call that ends makes room for another.
		if took, n := time.Since(began), len(f.calls()); took > 20*time.Second || n >= 2*breakerLimit {
			t.Errorf("%v and %d calls, want at most 20s and %d", took, n, 2*breakerLimit-1)
		}
	})
}

func TestPool_NoNumberNoPanic(t *testing.T) {
	for name, call := range map[string]func(context.Context, []scorer.Input) []scorer.Result{
		"NaN": func(context.Context, []scorer.Input) []scorer.Result {
			return each(1, scorer.Result{Value: math.NaN()})
		},
		"Inf": func(context.Context, []scorer.Input) []scorer.Result {
			return each(1, scorer.Result{Value: math.Inf(-1)})
		},
		"huge": func(context.Context, []scorer.Input) []scorer.Result {
			return each(1, scorer.Result{Value: 1e31})
		},
		"panic":    func(context.Context, []scorer.Input) []scorer.Result { panic("no") },
		"too few":  func(context.Context, []scorer.Input) []scorer.Result { return nil },
		"too many": func(context.Context, []scorer.Input) []scorer.Result { return each(2, scorer.Result{Value: 1}) },
	} {
		p := openPool(t, &pool{calls: 1, batch: 1, queueLimit: 16})
		if r := p.score(t.Context(), &fake{batch: 1, call: call}, ready); r.Err == nil ||
			errors.Is(r.Err, scorer.ErrUnavailable) {
			t.Errorf("%s: %+v, want a final error", name, r.Result)
		}
	}
}

// An image that cannot be loaded says nothing about the function.
func TestPool_BadImage(t *testing.T) {
	p := openPool(t, &pool{calls: 1, batch: 1, queueLimit: 16})
	f := &fake{batch: 1, call: func(context.Context, []scorer.Input) []scorer.Result {
		return each(1, scorer.Result{Value: 1})
	}}
	gone := errors.New("gone")
	for range 2 * breakerLimit {
		r := p.score(t.Context(), f, func(context.Context, bool) (scorer.Input, func(), error) {
			return scorer.Input{}, nil, gone
		})
		if _, ok := errors.AsType[*imageError](r.Err); !ok || !errors.Is(r.Err, gone) {
			t.Fatalf("got %v, want the image's error", r.Err)
		}
	}
	if r := p.score(t.Context(), f, ready); r.Err != nil || len(f.calls()) != 1 {
		t.Errorf("then %+v in %d calls, want a score in one", r.Result, len(f.calls()))
	}
}

// At shutdown what waits is handed back at once, and what is being scored is not.
func TestPool_Stopping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stop := make(chan struct{})
		f := &fake{batch: 1, call: func(context.Context, []scorer.Input) []scorer.Result {
			time.Sleep(time.Second)
			return each(1, scorer.Result{Value: 1})
		}}
		p := openPool(t, &pool{calls: 1, batch: 1, queueLimit: 16})
		p.stopping = stop
		var all sync.WaitGroup
		var scores, handed atomic.Int32
		for range 5 {
			all.Go(func() {
				switch r := p.score(t.Context(), f, ready); {
				case r.Err == nil:
					scores.Add(1)
				case errors.Is(r.Err, errStopping):
					handed.Add(1)
				}
			})
		}
		time.AfterFunc(100*time.Millisecond, func() { close(stop) })
		all.Wait()
		if scores.Load() != 1 || handed.Load() != 4 {
			t.Errorf("%d scored, %d handed back; want 1, 4", scores.Load(), handed.Load())
		}
	})
}

// What one sample does to its call, fails that one: the others are scored without it.
func TestPool_PoisonFailsAlone(t *testing.T) {
	refused := errors.New("status 400")
	for name, bad := range map[string]func(in []scorer.Input, results []scorer.Result, at int) []scorer.Result{
		"panic": func([]scorer.Input, []scorer.Result, int) []scorer.Result { panic("index out of range") },
		"short": func([]scorer.Input, []scorer.Result, int) []scorer.Result { return nil },
		"failed": func(in []scorer.Input, _ []scorer.Result, _ int) []scorer.Result {
			return each(len(in), scorer.Result{Err: refused})
		},
		"no numbers": func(in []scorer.Input, _ []scorer.Result, _ int) []scorer.Result {
			return each(len(in), scorer.Result{Value: math.NaN()})
		},
		"no number": func(_ []scorer.Input, results []scorer.Result, at int) []scorer.Result {
			results[at].Value = math.Inf(1)
			return results
		},
		"a fault of its own": func(_ []scorer.Input, results []scorer.Result, at int) []scorer.Result {
			results[at].Err = refused
			return results
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := &fake{batch: 4, call: func(_ context.Context, in []scorer.Input) []scorer.Result {
				results := make([]scorer.Result, len(in))
				for i := range in {
					results[i].Value = float64(len(in[i].Prompt))
				}
				if at := slices.IndexFunc(in, func(in scorer.Input) bool { return in.Prompt == "poison" }); at >= 0 {
					return bad(in, results, at)
				}
				return results
			}}
			p := openPool(t, &pool{calls: 1, batch: 4, queueLimit: 16, linger: time.Minute})
			var all sync.WaitGroup
			for _, prompt := range []string{"a", "poison", "abc", "abcd"} {
				all.Go(func() {
					r := p.score(t.Context(), f, func(context.Context, bool) (scorer.Input, func(), error) {
						return scorer.Input{Prompt: prompt}, func() {}, nil
					})
					switch want := float64(len(prompt)); {
					case prompt == "poison" && r.Err == nil:
						t.Errorf("%s: the poison has a score", name)
					case prompt != "poison" && (r.Err != nil || r.Value != want):
						t.Errorf("%s: %v, %v; want a score of %v", name, r.Value, r.Err, want)
					}
				})
			}
			all.Wait()
			if n := len(f.calls()); name == "a fault of its own" && n != 1 {
				t.Errorf("%s: %d calls, want one: the function has judged it", name, n)
			}
		})
	}
}

// Without an answer no sample fails, and none is scored again alone.
func TestPool_AwayIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{batch: 2, call: func(_ context.Context, in []scorer.Input) []scorer.Result {
			return each(len(in), scorer.Result{Err: scorer.ErrUnavailable})
		}}
		p := openPool(t, &pool{calls: 1, batch: 2, queueLimit: 16, linger: time.Minute})
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() { p.score(t.Context(), f, ready) })
		}
		all.Wait()
		if got := f.calls(); !slices.Equal(got, []int{2}) {
			t.Errorf("calls of %v samples, want one of 2", got)
		}
	})
}

// A call has the patience of its least patient sample: no other sample may keep that one waiting.
func TestPool_Patience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got time.Time
		f := &fake{batch: 3, call: func(ctx context.Context, in []scorer.Input) []scorer.Result {
			got, _ = scorer.RetryDeadline(ctx)
			return each(len(in), scorer.Result{Value: 1})
		}}
		p := openPool(t, &pool{calls: 1, batch: 3, queueLimit: 16, linger: time.Minute})
		began := time.Now()
		var all sync.WaitGroup
		all.Go(func() { p.score(t.Context(), f, ready) })
		for _, left := range []time.Duration{time.Hour, 3 * time.Second} {
			all.Go(func() { p.score(scorer.WithRetryDeadline(t.Context(), began.Add(left)), f, ready) })
		}
		all.Wait()
		if !got.Equal(began.Add(3 * time.Second)) {
			t.Errorf("patience until %v, want 3 s after %v", got, began)
		}
	})
}
