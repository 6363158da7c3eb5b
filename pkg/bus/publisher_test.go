package bus_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

func TestPublisher(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		p := e.NewPublisher(64, 4<<20)
		defer p.Close()
		const n = 500
		futures := make([]*bus.Future, n)
		for i := range n {
			f, err := p.PublishStep(ctx, step("u1", 0, fmt.Sprintf("a%d", i/10), int64(i%10), 20_000), nil)
			if err != nil {
				t.Fatal(err)
			}
			futures[i] = f
		}
		seen := map[uint64]bool{}
		for i, f := range futures {
			ack, err := f.Wait(ctx)
			if err != nil || ack.Duplicate || ack.Stream != schemas.StreamSteps || seen[ack.Seq] {
				t.Fatalf("step %d: got %+v, %v", i, ack, err)
			}
			seen[ack.Seq] = true
			if i%50 == 0 {
				m, err := e.Get(ctx, ack.Stream, ack.Seq)
				if err != nil {
					t.Fatal(err)
				}
				if digest, err := schemas.PayloadDigest(m.Data); err != nil || digest != ack.Digest {
					t.Errorf("step %d: digest %s is not that of the stored payload: %s, %v", i, ack.Digest, digest, err)
				}
			}
		}
		if s := p.Stats(); s.Pending != 0 || s.PendingBytes != 0 || s.Retried != 0 {
			t.Errorf("got %+v, want nothing pending or retried", s)
		}
	})
}

func TestPublisher_duplicates(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		p := e.NewPublisher(8, 1<<20)
		defer p.Close()
		publish := func(s *schemas.Step) bus.Ack {
			t.Helper()
			f, err := p.PublishStep(ctx, s, nil)
			if err != nil {
				t.Fatal(err)
			}
			ack, err := f.Wait(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return ack
		}
		first := publish(step("u1", 0, "a1", 0, 100))
		same := publish(step("u1", 0, "a1", 0, 100))
		if !same.Duplicate || same.Seq != first.Seq || same.Digest != first.Digest {
			t.Errorf("same again: got %+v, want duplicate of %+v with its digest", same, first)
		}
		other := publish(step("u1", 0, "a1", 0, 101))
		if other.Duplicate || other.Seq <= first.Seq || other.Digest == first.Digest || other.Digest == "" {
			t.Errorf("other content: got %+v, want it in the place of %+v", other, first)
		}
	})
}

func TestPublisher_fullStreamIsBackpressure(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		e.resize(t, schemas.StreamSteps, 50_000, -1)
		p := e.NewPublisher(4, 1<<20)
		defer p.Close()
		var sent atomic.Int64
		var futures []*bus.Future
		var failed error
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range 20 {
				f, err := p.PublishStep(ctx, step(uid(i), 0, "a1", 0, 8_000), nil)
				if err != nil {
					failed = err
					return
				}
				futures = append(futures, f)
				sent.Add(1)
			}
		})
		eventually(t, "the window fills", func() bool { return sent.Load() >= 9 })
		time.Sleep(100 * time.Millisecond)
		if n := sent.Load(); n > 10 {
			t.Fatalf("%d steps accepted while 6 are stored and the window is 4", n)
		}
		e.resize(t, schemas.StreamSteps, 1<<20, -1)
		wg.Wait()
		if failed != nil {
			t.Fatal(failed)
		}
		for i, f := range futures {
			if ack, err := f.Wait(ctx); err != nil || ack.Digest == "" {
				t.Errorf("step %d: got %+v, %v", i, ack, err)
			}
		}
		if n := e.Info(t, schemas.StreamSteps).State.Msgs; n != 20 {
			t.Errorf("%d steps stored, want 20", n)
		}
		if p.Stats().Stalled == 0 {
			t.Error("the stall was not counted")
		}
	})
}

// A step too large for one message is read as it was.
func TestPublisher_parts(t *testing.T) {
	for name, size := range map[string]int{"just over one message": 1 << 20, "big latents": 4<<20 + 12345} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, e *env) {
				ctx := t.Context()
				p := e.NewPublisher(4, 1<<20) // smaller than the step
				defer p.Close()
				in := step("u1", 0, "a1", 3, size)
				mean := bytes.Repeat([]byte{1, 2, 3, 4}, 1000)
				in.Debug = []schemas.NamedTensor{{
					Name: "mean", Tensor: schemas.Tensor{DType: "U8", Shape: []int64{4000}, Data: mean},
				}}
				want := bytes.Clone(in.Latents[0].Tensor.Data)
				f, err := p.PublishStep(ctx, in, nil)
				if err != nil {
					t.Fatal(err)
				}
				ack, err := f.Wait(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if in.Latents[0].Tensor.Parts != nil || !bytes.Equal(in.Latents[0].Tensor.Data, want) {
					t.Error("the caller's step was modified")
				}
				parts := (size + schemas.MaxPartBytes - 1) / schemas.MaxPartBytes
				if n := e.Info(t, schemas.StreamSteps).State.Msgs; n != uint64(parts)+1 || ack.Seq != n {
					t.Errorf("%d messages stored, the step is %d; want %d parts and the step last", n, ack.Seq, parts)
				}
				out, err := e.LoadStepRef(ctx, schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest})
				if err != nil {
					t.Fatal(err)
				}
				if got := out.Latents[0].Tensor; !bytes.Equal(got.Data, want) || got.Parts != nil {
					t.Error("latents are not what was published")
				}
				if !bytes.Equal(out.Debug[0].Tensor.Data, mean) {
					t.Error("the small tensor is not what was published")
				}

				wrong := schemas.StepRef{Seq: ack.Seq, Digest: hex.EncodeToString(make([]byte, 32))}
				if _, err := e.LoadStepRef(ctx, wrong); !errors.Is(err, bus.ErrCorrupt) {
					t.Errorf("wrong digest: got %v, want ErrCorrupt", err)
				}
				if err := e.Delete(ctx, schemas.StreamSteps, 1); err != nil {
					t.Fatal(err)
				}
				if _, err := e.LoadStepRef(ctx, schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest}); !errors.Is(err,
					bus.ErrNotFound) {
					t.Errorf("a part is missing: got %v, want ErrNotFound", err)
				}
			})
		})
	}
}

// Splitting and joining is the identity, whatever the sizes and the limit.
func TestSplitParts_joinParts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(5<<10, 64<<10).Draw(t, "limit")
		in := &schemas.Step{}
		sizes := rapid.SliceOfN(rapid.IntRange(0, 100_000), 0, 4).Draw(t, "sizes")
		for i, n := range sizes {
			data := bytes.Repeat([]byte{byte(i + 1), 7, byte(n)}, n/3+1)[:n]
			in.Latents = append(in.Latents, schemas.IndexedTensor{
				Index: int64(i), Tensor: schemas.Tensor{DType: "U8", Shape: []int64{int64(n)}, Data: data},
			})
		}
		out := in.Detached().(*schemas.Step)
		sums, err := schemas.SumTensors(in)
		if err != nil {
			t.Fatal(err)
		}
		parts := bus.SplitParts(out, sums, limit)
		inline := 0
		for i, l := range out.Latents {
			inline += len(l.Tensor.Data)
			if in.Latents[i].Tensor.Parts != nil || len(in.Latents[i].Tensor.Data) != sizes[i] {
				t.Fatal("the original was modified")
			}
		}
		if inline > limit {
			t.Fatalf("%d bytes are left in the step, limit %d", inline, limit)
		}
		for i, p := range parts {
			if len(p) == 0 || len(p) > limit || len(p) > schemas.MaxPartBytes {
				t.Fatalf("part %d has %d bytes, limit %d", i, len(p), limit)
			}
		}
		data, err := schemas.Encode(out)
		if err != nil {
			t.Fatal(err)
		}
		if len(parts) > 0 && len(data) > limit {
			t.Fatalf("encodes to %d bytes, limit %d", len(data), limit)
		}
		used := 0
		err = bus.JoinParts(out, func(k int64) ([]byte, error) { used++; return parts[k], nil })
		if err != nil {
			t.Fatal(err)
		}
		if used != len(parts) {
			t.Fatalf("%d of %d parts used", used, len(parts))
		}
		for i := range in.Latents {
			if !bytes.Equal(out.Latents[i].Tensor.Data, in.Latents[i].Tensor.Data) {
				t.Fatalf("tensor %d differs", i)
			}
		}
	})
}

func TestJoinParts_hostile(t *testing.T) {
	t.Parallel()
	fetched := 0
	part := func(int64) ([]byte, error) { fetched++; return make([]byte, 1000), nil }
	for name, p := range map[string]schemas.Parts{
		"no parts":          {First: 0, Count: 0, Size: 10},
		"negative first":    {First: -1, Count: 1, Size: 10},
		"too many":          {First: 0, Count: schemas.MaxParts + 1, Size: 10},
		"overflow":          {First: 1 << 62, Count: 1 << 62, Size: 10},
		"huge":              {First: 0, Count: 1, Size: 1 << 60},
		"negative size":     {First: 0, Count: 1, Size: -1},
		"more than parts":   {First: 0, Count: 1, Size: schemas.MaxPartBytes + 1},
		"too much arrives":  {First: 0, Count: 2, Size: 1500},
		"too little":        {First: 0, Count: 2, Size: 3000},
		"wrong digest":      {First: 0, Count: 1, Size: 1000, Digest: "00"},
		"missing digest":    {First: 0, Count: 1, Size: 1000},
		"upper-case digest": {First: 0, Count: 1, Size: 1000, Digest: "541B3E9DAA09B20BF85FA273E5CBD3E80185AA4EC298E765DB87742B70138A53"},
	} {
		fetched = 0
		s := &schemas.Step{
			Stage:   schemas.StageMain,
			Latents: []schemas.IndexedTensor{{Tensor: schemas.Tensor{DType: "U8", Parts: &p}}},
		}
		if err := bus.JoinParts(s, part); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if fetched > 2 {
			t.Errorf("%s: %d parts fetched", name, fetched)
		}
	}
}

// The server goes away in the middle of a stream of publishes and comes back:
// everything is stored once.
func TestPublisher_serverRestart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "tcp")
	e.setup(t)
	e.Options.Listen = e.Server.ClientURL()[len("nats://"):] // the same port again
	ctx := t.Context()
	p := e.NewPublisher(32, 4<<20)
	defer p.Close()
	const n = 600
	half := make(chan struct{})
	var futures []*bus.Future
	var failed error
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range n {
			if i == n/3 {
				close(half)
			}
			f, err := p.PublishStep(ctx, step(uid(i), 0, "a1", 0, 2_000), nil)
			if err != nil {
				failed = err
				return
			}
			futures = append(futures, f)
		}
	})
	var trajectories atomic.Int64
	wg.Go(func() {
		for i := range 50 {
			if _, err := e.Publish(ctx, trajectory(uid(i), 0)); err != nil {
				t.Errorf("trajectory %d: %v", i, err)
				return
			}
			trajectories.Add(1)
			time.Sleep(2 * time.Millisecond)
		}
	})
	bustest.Receive(t, "a third of the steps", half)
	if err := e.Server.Close(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	e.Start(t)
	wg.Wait()
	if failed != nil {
		t.Fatal(failed)
	}
	seen := map[uint64]bool{}
	for i, f := range futures {
		ack, err := f.Wait(ctx)
		if err != nil || ack.Digest == "" || seen[ack.Seq] {
			t.Errorf("step %d: got %+v, %v", i, ack, err)
		}
		seen[ack.Seq] = true
	}
	if got := e.Info(t, schemas.StreamSteps).State; got.Msgs != n || got.NumSubjects != n {
		t.Errorf("%d steps on %d subjects stored, want %d", got.Msgs, got.NumSubjects, n)
	}
	if got := e.Info(t, schemas.StreamTrajectories).State.Msgs; got != 50 {
		t.Errorf("%d trajectories stored, want 50", got)
	}
}

func TestPublisher_Close(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	e.resize(t, schemas.StreamSteps, 10_000, -1)
	p := e.NewPublisher(8, 1<<20)
	var futures []*bus.Future
	for i := range 8 {
		f, err := p.PublishStep(t.Context(), step(uid(i), 0, "a1", 0, 4_000), nil)
		if err != nil {
			t.Fatal(err)
		}
		futures = append(futures, f)
	}
	eventually(t, "two of eight are stored", func() bool { return p.Stats().Pending == 6 })
	for i := range 2 {
		if _, err := p.PublishStep(t.Context(), step(uid(8+i), 0, "a1", 0, 4_000), nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := p.PublishStep(ctx, step("u10", 0, "a1", 0, 4_000), nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("publish with a full window: got %v, want the context's error", err)
	}
	p.Close()
	p.Close()
	failures := 0
	for _, f := range futures {
		if _, err := f.Wait(t.Context()); err != nil {
			failures++
		}
	}
	if failures != 6 {
		t.Errorf("%d futures failed, want 6: 2 of 8 fit", failures)
	}
	if _, err := p.PublishStep(t.Context(), step("u11", 0, "a1", 0, 10), nil); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("publish after close: got %v, want ErrClosed", err)
	}
}
