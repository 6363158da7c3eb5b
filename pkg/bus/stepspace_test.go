package bus_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// room is one of a sampler, which runs for the length of the test.
func room(t *testing.T, p *bustest.Plane, name string, disk func() (int64, error)) *bus.StepSpace {
	t.Helper()
	var r *bus.StepSpace
	made := make(chan struct{})
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		r = b.NewStepSpace(func() *schemas.Presence {
			return &schemas.Presence{Service: schemas.ServiceSampler, Instance: name, Lane: "tiny"}
		}, nil, disk)
		close(made)
		return r.Run(ctx)
	})
	bustest.Receive(t, "the room", made)
	return r
}

// limited has a stream of steps of so many bytes.
func limited(t *testing.T, bytes int64) *bustest.Plane {
	t.Helper()
	p := bustest.New(t)
	if err := p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: bytes}); err != nil {
		t.Fatal(err)
	}
	return p
}

// Whatever samplers take and store at once, what is stored and what may be stored yet fit
// together; no publish is refused, and every sample gets space in the end.
func TestRoom_NeverOvercommits(t *testing.T) {
	t.Parallel()
	const limit, samplers, takers, samples, steps = 256 << 10, 3, 6, 6, 4
	p := limited(t, limit)
	var held atomic.Int64
	var work sync.WaitGroup
	ctx, moved := bustest.WhileItMoves(t)
	for i := range samplers {
		r := room(t, p, fmt.Sprintf("s%d", i), nil)
		for k := range takers {
			dice := rand.New(rand.NewPCG(uint64(i), uint64(k)))
			work.Go(func() {
				for n := range samples {
					size := 1<<10 + dice.IntN(20<<10)
					plan := int64(steps * (size + 300))
					claim, err := r.Reserve(ctx, plan)
					if err != nil {
						t.Errorf("take: %v", err)
						return
					}
					before := held.Add(plan)
					info, err := p.StreamInfo(ctx, schemas.StreamSteps)
					if err != nil {
						t.Error(err)
					} else if before > limit {
						t.Errorf("%d bytes are granted at once, of %d; %d are stored", before, limit, info.State.Bytes)
					}
					group := schemas.UID(fmt.Sprintf("u%d-%d-%d", i, k, n))
					for step := range steps {
						if _, err := p.PublishRaw(ctx, schemas.StepSubject("r1", group, 0, schemas.StageMain, "a",
							int64(step)), make([]byte, size), nil, ""); err != nil {
							t.Errorf("a step that has room: %v", err)
						}
					}
					held.Add(-plan)
					claim.Release()
					// A reader frees it, at some time.
					if _, err := p.PurgeSubject(ctx, schemas.StreamSteps,
						schemas.StepsFilter("r1", group, "0", "*")); err != nil {
						t.Error(err)
					}
					moved()
				}
			})
		}
	}
	work.Wait()
}

// Who waits first is served first, however much it needs, and what can never fit keeps
// no one out until it can.
func TestRoom_InTurn(t *testing.T) {
	t.Parallel()
	p := limited(t, 1<<20)
	one, two := room(t, p, "s1", nil), room(t, p, "s2", nil)
	ctx, moved := bustest.WhileItMoves(t)
	first, err := one.Reserve(ctx, 600<<10)
	if err != nil {
		t.Fatal(err)
	}
	moved()
	got := make(chan string, 3)
	take := func(r *bus.StepSpace, name string, bytes int64) {
		go func() {
			if c, err := r.Reserve(ctx, bytes); err == nil {
				got <- name
				c.Release()
			}
		}()
	}
	waits := func(n int64) {
		bustest.Until(t, "those that wait", func() error {
			stats, err := p.Stats(t.Context())
			if err != nil {
				return err
			}
			for _, s := range stats {
				if s.Name == schemas.StreamSteps && s.Waiting != n {
					return fmt.Errorf("%d wait", s.Waiting)
				}
			}
			return nil
		})
	}
	take(two, "too large", 2<<20)
	waits(1)
	take(two, "large", 900<<10)
	waits(2)
	take(one, "small", 200<<10)
	waits(3)
	bustest.Until(t, "a fault that says so", func() error {
		faults, err := p.Faults(t.Context())
		if err == nil && (len(faults) != 1 || !faults[0].Full() || faults[0].Waiting != 3 ||
			faults[0].Held != 600<<10) {
			err = fmt.Errorf("faults %+v", faults)
		}
		return err
	})
	first.Release()
	granted := func() string { return bustest.Receive(t, "a grant", got) }
	if a, b := granted(), granted(); a != "large" || b != "small" {
		t.Errorf("served %s, then %s", a, b)
	}
	if err := p.SetLimits(ctx, bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	if a := granted(); a != "too large" {
		t.Errorf("served %s", a)
	}
}

// A stream is full when what waits does not fit, not when it is slow to be granted.
func TestRoom_SlowIsNotFull(t *testing.T) {
	t.Parallel()
	for need, want := range map[int64]string{1000: bus.StateOK, 2 << 20: bus.StateFull} {
		p := limited(t, 1<<20)
		entry := p.Announcement(func() *schemas.Presence {
			return &schemas.Presence{
				Service: schemas.ServiceSampler, Instance: "s1", Lane: "tiny",
				Room: &schemas.Room{Waiting: 1, Need: need, Wants: need, Turn: 1, Since: time.Now().Add(-time.Minute).UnixNano()},
			}
		}, nil)
		p.Serve(t, func(ctx context.Context, _ *bus.Bus) error { return entry.Run(ctx) })
		bustest.Until(t, "the one that waits", func() error {
			stats, err := p.Stats(t.Context())
			i := slices.IndexFunc(stats,
				func(s bus.StreamStats) bool { return s.Name == schemas.StreamSteps && s.Waiting == 1 })
			if err == nil && (i < 0 || stats[i].State != want) {
				err = fmt.Errorf("%d bytes wanted: %+v, want %s", need, stats, want)
			}
			return err
		})
	}
}

// Where there is ample space, what is little is granted without asking the others, who know of it all the same: what is
// much waits for it.
func TestRoom_Ample(t *testing.T) {
	const limit = 4 << 30
	p := limited(t, limit)
	one, two := room(t, p, "s1", nil), room(t, p, "s2", nil)
	ctx, moved := bustest.WhileItMoves(t)
	var little []*bus.Reservation
	for range 3 {
		c, err := one.Reserve(ctx, 100<<10)
		if err != nil {
			t.Fatal(err)
		}
		little = append(little, c)
		present, err := p.Present(ctx)
		if i := slices.IndexFunc(present, func(p *schemas.Presence) bool { return p.Instance == "s1" }); err != nil ||
			i < 0 || present[i].Room == nil || present[i].Room.Held < int64(len(little))*100<<10 {
			t.Fatalf("%d samples have begun: the entry says %+v, %v", len(little), present, err)
		}
		moved()
	}
	got := make(chan error, 1)
	go func() {
		c, err := two.Reserve(ctx, limit-200<<10)
		if err == nil {
			c.Release()
		}
		got <- err
	}()
	bustest.Until(t, "the one that wants nearly all waits", func() error {
		if s := two.Stats(); s.Waiting != 1 || s.Held != 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	for _, c := range little {
		select {
		case err := <-got:
			t.Fatalf("granted beside others: %v", err)
		default:
		}
		c.Release()
	}
	if err := bustest.Receive(t, "the grant of nearly all", got); err != nil {
		t.Fatal(err)
	}
}

// A sampler does not begin what the disk has no room for.
func TestRoom_OfTheDisk(t *testing.T) {
	t.Parallel()
	p := limited(t, 1<<20)
	var free atomic.Int64
	r := room(t, p, "s1", func() (int64, error) { return free.Load(), nil })
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	if _, err := r.Reserve(ctx, 1000); err == nil {
		t.Fatal("room on a full disk")
	}
	free.Store(1 << 30)
	ctx, _ = bustest.WhileItMoves(t)
	c, err := r.Reserve(ctx, 1000)
	if err != nil {
		t.Fatal(err)
	}
	c.Release()
}

// What a trajectory names stays, of whichever attempt; other steps of its sample go, with
// their parts. Of a sample without a trajectory all goes, once it is in the way.
func TestSweep(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	store := func(uid schemas.UID, attempt string, parts bool, steps ...int64) {
		for _, step := range steps {
			subject := schemas.StepSubject("r1", uid, 0, schemas.StageMain, attempt, step)
			subjects := []string{subject}
			if parts {
				subjects = append(subjects, schemas.PartSubject(subject, 0))
			}
			for _, s := range subjects {
				if _, err := p.PublishRaw(t.Context(), s, []byte("x"), nil, ""); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	store("u1", "a", true, 0, 1, 2) // its steps 0 and 1 are named
	store("u1", "b", true, 1, 2)    // step 2 is
	store("u1", "c", false, 0, 1, 2)
	store("u2", "a", true, 0)
	tr := trajectory("u1", 0)
	tr.Attempt = "b"
	tr.Steps = []schemas.StepRef{{Seq: 1, Attempt: "a"}, {Seq: 2, Attempt: "a"}, {Seq: 3}}
	n, err := p.SweepSample(t.Context(), tr)
	if err != nil || n != 7 {
		t.Errorf("%d messages removed (%v), want 7", n, err)
	}
	left := func(want int) {
		t.Helper()
		got, err := p.Subjects(t.Context(), schemas.StreamSteps, ">")
		if err != nil || len(got) != want {
			t.Errorf("left are %v (%v), want %d", got, err, want)
		}
	}
	left(8)
	if err := p.SweepDead(t.Context()); err != nil {
		t.Fatal(err)
	}
	left(0)
}
