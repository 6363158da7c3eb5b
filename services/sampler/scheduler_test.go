package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// script is an engine that notes who is stepped with whom.
type script struct {
	calls []string // names of the episodes of each Step
	// before runs at the beginning of each Step.
	before func(call int) error
}

func (*script) Backend() string { return "" }

func (*script) Start(context.Context, *schemas.Request, *schemas.SegmentStart) (engine.Episode, error) {
	return nil, errors.New("not scripted")
}

func (s *script) Step(_ context.Context, episodes []engine.Episode) error {
	var names []string
	for _, e := range episodes {
		names = append(names, e.(*actor).name)
	}
	s.calls = append(s.calls, strings.Join(names, " "))
	time.Sleep(time.Second) // of the test's clock: others come and go meanwhile
	if s.before != nil {
		if err := s.before(len(s.calls)); err != nil {
			return err
		}
	}
	for _, e := range episodes {
		a := e.(*actor)
		a.evaluations++
		a.taken = false
	}
	return nil
}

// actor is an episode of so many steps.
type actor struct {
	name, bucket string
	steps        int
	perStep      int // evaluations
	fault        error
	asksAt       int // evaluations after which it stands still until it is told something; 0: never

	evaluations int
	taken       bool
	told        bool
}

func (a *actor) Asks() *schemas.InteractRequest {
	if a.asksAt == 0 || a.told || a.evaluations != a.asksAt {
		return nil
	}
	return &schemas.InteractRequest{}
}

func (*actor) Rest() {}

func (a *actor) Told(context.Context, *schemas.InteractReply) error {
	a.told = true
	return nil
}

func (a *actor) Bucket() any { return a.bucket }

func (a *actor) Take() ([]schemas.StepEvent, error) {
	if a.fault != nil {
		return nil, a.fault
	}
	if a.taken || a.evaluations%a.perStep != 0 {
		return nil, nil
	}
	a.taken = true
	return []schemas.StepEvent{&schemas.Step{StepIndex: int64(a.evaluations/a.perStep) - 1}}, nil
}

func (a *actor) Done() bool { return a.evaluations == a.steps*a.perStep }

func (a *actor) Finish(context.Context, *schemas.Trajectory) (engine.Images, error) {
	return engine.Images{}, errors.New("not scripted")
}

// stage runs a scheduler inside a test's own time.
type stage struct {
	t     *testing.T
	queue *queue
	stop  context.CancelFunc
	ended chan struct{}
	// engine makes all attempts.
	engine engine.Engine
}

func newStage(t *testing.T, e engine.Engine, batch int) *stage {
	ctx, stop := context.WithCancel(t.Context())
	s := &stage{t: t, queue: newQueue(), stop: stop, ended: make(chan struct{}), engine: e}
	go func() {
		defer close(s.ended)
		(&scheduler{batch: batch, queue: s.queue, metrics: newInstruments(nil, "", "")}).run(ctx)
	}()
	return s
}

func (s *stage) close() {
	s.stop()
	<-s.ended
}

// onStage runs a test on a stage of its own, whose engine is e.
func onStage(t *testing.T, batch int, test func(t *testing.T, s *stage, e *script)) {
	synctest.Test(t, func(t *testing.T) {
		e := &script{}
		s := newStage(t, e, batch)
		defer s.close()
		test(t, s, e)
	})
}

// cast is an attempt of one evaluation a step, with what it recorded.
func cast(name, bucket string, steps int) (*attempt, *[]string) {
	var recorded []string
	return &attempt{
		expired: func() error { return nil }, episode: &actor{name: name, bucket: bucket, steps: steps, perStep: 1}, done: make(chan struct{}),
		recordStep: func(step schemas.StepEvent, device time.Duration) error {
			recorded = append(recorded, fmt.Sprintf("%d in %v", step.Place(), device))
			return nil
		},
	}, &recorded
}

func (s *stage) enter(attempts ...*attempt) {
	for _, a := range attempts {
		a.engine = s.engine
		s.queue.push(a)
		synctest.Wait()
	}
}

func wantCalls(t *testing.T, e *script, want ...string) {
	t.Helper()
	if !slices.Equal(e.calls, want) {
		t.Errorf("steps %q, want %q", e.calls, want)
	}
}

// What waits is taken by priority, and in its order where that is equal.
func TestScheduler_PriorityOrdersWhatWaits(t *testing.T) {
	onStage(t, 1, func(t *testing.T, s *stage, e *script) {
		first, _ := cast("first", "a", 1)
		low, _ := cast("low", "a", 1)
		second, _ := cast("second", "a", 1)
		urgent, _ := cast("urgent", "a", 1)
		urgent.priority, low.priority = 1, -1
		s.enter(first, low, second, urgent)
		<-low.done
		wantCalls(t, e, "first", "urgent", "second", "low")
	})
}

// Attempts of one bucket are stepped in one call, of whichever engine they are.
func TestScheduler_OneCallOfSeveralEngines(t *testing.T) {
	onStage(t, 2, func(t *testing.T, s *stage, e *script) {
		first, _ := cast("first", "a", 3)
		second, _ := cast("second", "a", 3)
		other := &script{}
		s.enter(first)
		s.engine = other
		s.enter(second)
		<-second.done
		wantCalls(t, e, "first", "first second", "first second")
		wantCalls(t, other, "second")
	})
}

// An attempt that waits leaves the queue when its request is not its own any more, and the scheduler never sees it.
func TestAttempt_LeavesTheQueue(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	a, _ := cast("a", "a", 1)
	a.service, a.worker = &service{metrics: newInstruments(nil, "", "")}, &worker{queue: newQueue()}
	stop()
	if err := a.runSteps(ctx); !errors.Is(err, context.Canceled) || a.worker.queue.pop() != nil {
		t.Errorf("%v; want the end of the context, and an empty queue", err)
	}
}

// Two devices that are lost at once are both the last: neither waits for the other to be told.
func TestWorkers_LostAtOnce(t *testing.T) {
	t.Parallel()
	s := &service{
		metrics: newInstruments(nil, "", ""), ended: make(chan error, 1),
		workers: []*worker{{id: "cuda:0"}, {id: "cuda:1"}},
	}
	if w, leave, err := s.chooseWorker(); err != nil || w.id != "cuda:0" {
		t.Errorf("%v, %v", w, err)
	} else if other, _, _ := s.chooseWorker(); other.id != "cuda:1" {
		t.Errorf("two attempts on %s", other.id)
	} else {
		leave()
	}
	for _, w := range s.workers {
		s.workers[0].lost.Store(w != s.workers[0])
		s.workers[1].lost.Store(w != s.workers[1])
		s.onDeviceLost(t.Context(), w, errors.New("another error"))
		s.onDeviceLost(t.Context(), w, tensor.ErrDeviceLost)
	}
	if err := <-s.ended; !errors.Is(err, tensor.ErrDeviceLost) {
		t.Error(err)
	}
	if _, _, err := s.chooseWorker(); !errors.Is(err, tensor.ErrDeviceLost) {
		t.Errorf("a worker without a device: %v", err)
	}
}

// Samples join and leave at boundaries: none waits for the others to end.
func TestScheduler_JoinAndLeave(t *testing.T) {
	onStage(t, 2, func(t *testing.T, s *stage, e *script) {
		long, recorded := cast("long", "a", 4)
		short, _ := cast("short", "a", 2)
		third, _ := cast("third", "a", 1)
		s.enter(long, short, third) // the third waits for a place
		<-long.done
		<-short.done
		<-third.done
		wantCalls(t, e, "long", "long short", "long short", "long third")
		if got := strings.Join(*recorded, ", "); got != "0 in 1s, 1 in 500ms, 2 in 500ms, 3 in 500ms" {
			t.Errorf("recorded %s", got)
		}
		if long.err != nil || short.err != nil || third.err != nil {
			t.Error(long.err, short.err, third.err)
		}
	})
}

// A step of several evaluations is recorded once, with the time of all of them.
func TestScheduler_StepsOfSeveralEvaluations(t *testing.T) {
	onStage(t, 1, func(t *testing.T, s *stage, e *script) {
		a, recorded := cast("heun", "a", 2)
		a.episode.(*actor).perStep = 2
		s.enter(a)
		<-a.done
		if got := strings.Join(*recorded, ", "); got != "0 in 2s, 1 in 2s" || len(e.calls) != 4 {
			t.Errorf("recorded %s in %d calls", got, len(e.calls))
		}
	})
}

// Buckets take turns, the one that has waited longest first; priority decides among those
// that have waited equally.
func TestScheduler_Buckets(t *testing.T) {
	onStage(t, 4, func(t *testing.T, s *stage, e *script) {
		first, _ := cast("first", "a", 1)
		s.enter(first) // holds the scheduler while the others come
		a1, _ := cast("a1", "a", 2)
		a2, _ := cast("a2", "a", 2)
		b, _ := cast("b", "b", 2)
		c, _ := cast("c", "c", 1)
		c.priority = 1
		s.enter(a1, b, a2, c)
		for _, a := range []*attempt{a1, a2, b, c} {
			<-a.done
		}
		wantCalls(t, e, "first", "c", "a1 a2", "b", "a1 a2", "b")
	})
}

// A request that another sampler has now is dropped at the next boundary; the others go on.
func TestScheduler_LostRequest(t *testing.T) {
	onStage(t, 2, func(t *testing.T, s *stage, e *script) {
		ctx, lose := context.WithCancel(context.Background())
		lost, recorded := cast("lost", "a", 3)
		lost.expired = ctx.Err
		kept, _ := cast("kept", "a", 3)
		s.enter(lost, kept)
		lose()
		<-lost.done
		<-kept.done
		if !errors.Is(lost.err, context.Canceled) || kept.err != nil || len(*recorded) != 1 {
			t.Errorf("lost: %v after %q; kept: %v", lost.err, *recorded, kept.err)
		}
	})
}

// What is wrong with one episode ends that one, what is wrong with a call ends its batch.
func TestScheduler_Faults(t *testing.T) {
	onStage(t, 2, func(t *testing.T, s *stage, e *script) {
		fault := errors.New("fault")
		bad, _ := cast("bad", "a", 3)
		bad.episode.(*actor).fault = fault
		good, _ := cast("good", "a", 3)
		s.enter(bad, good)
		<-bad.done
		<-good.done
		if !errors.Is(bad.err, fault) || good.err != nil {
			t.Errorf("bad: %v, good: %v", bad.err, good.err)
		}

		full := errors.New("full")
		unstored, _ := cast("unstored", "a", 3)
		unstored.recordStep = func(schemas.StepEvent, time.Duration) error { return full }
		s.enter(unstored)
		<-unstored.done
		if !errors.Is(unstored.err, full) {
			t.Errorf("unstored: %v", unstored.err)
		}

		beside, _ := cast("beside", "a", 3)
		broken, _ := cast("broken", "a", 3)
		broken.recordStep = func(schemas.StepEvent, time.Duration) error { panic("no such step") }
		s.enter(beside, broken)
		<-broken.done
		<-beside.done
		if bus.Code(broken.err) != schemas.CodePanic || beside.err != nil {
			t.Errorf("broken: %v, beside it: %v", broken.err, beside.err)
		}

		calls := len(e.calls)
		e.before = func(call int) error {
			switch call - calls {
			case 1:
				return fault
			case 2:
				panic("index out of range")
			}
			return nil
		}
		failed, _ := cast("failed", "a", 1)
		s.enter(failed)
		<-failed.done
		panicked, _ := cast("panicked", "a", 1)
		s.enter(panicked)
		<-panicked.done
		after, _ := cast("after", "a", 1)
		s.enter(after)
		<-after.done
		if !errors.Is(failed.err, fault) || after.err != nil {
			t.Errorf("failed: %v, after: %v", failed.err, after.err)
		}
		if bus.Code(panicked.err) != schemas.CodePanic ||
			!strings.Contains(panicked.err.Error(), "index out of range") {
			t.Errorf("panicked: %v", panicked.err)
		}
	})
}

// What is in flight when the scheduler ends is told so.
func TestScheduler_End(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStage(t, &script{}, 2)
		a, _ := cast("a", "a", 100)
		s.enter(a)
		s.close()
		<-a.done
		if !errors.Is(a.err, context.Canceled) {
			t.Errorf("a: %v", a.err)
		}
	})
}

// A sample that is told something while others of its step are still recorded rejoins once it has left: it is stepped
// once at a time.
func TestScheduler_RejoinsOnce(t *testing.T) {
	onStage(t, 4, func(t *testing.T, s *stage, e *script) {
		talks, _ := cast("talks", "a", 4)
		talks.engine, talks.episode.(*actor).asksAt = e, 2 // the other is in that step too
		other, _ := cast("other", "a", 3)
		other.recordStep = func(schemas.StepEvent, time.Duration) error {
			time.Sleep(time.Second) // the talker's interaction is quicker
			return nil
		}
		talks.service, talks.worker = &service{metrics: newInstruments(nil, "", "")}, &worker{queue: s.queue}
		over := make(chan error)
		go func() {
			for {
				err := talks.runSteps(t.Context())
				if err != nil || engine.Asks(talks.episode) == nil {
					over <- err
					return
				}
				_ = talks.episode.(engine.Talker).Told(t.Context(), nil)
			}
		}()
		synctest.Wait()
		s.enter(other)
		if err := <-over; err != nil {
			t.Fatal(err)
		}
		<-other.done
		for _, call := range e.calls {
			if strings.Count(call, "talks") > 1 {
				t.Errorf("steps %q: the sample that talks is in one of them twice", e.calls)
			}
		}
		if n := talks.episode.(*actor).evaluations; n != 4 {
			t.Errorf("%d evaluations of the sample that talks, want 4", n)
		}
	})
}
