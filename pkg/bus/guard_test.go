package bus_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

func TestBus_Publish_displacesGarbage(t *testing.T) {
	scored := func(value float64) *schemas.Reward {
		r := reward("u1", 0)
		r.Status, r.Error, r.Reward = schemas.StatusScored, "", &value
		return r
	}
	for name, test := range map[string]struct {
		event schemas.Keyed
		first []byte
	}{
		"request of bytes":                  {request("r1", "u1", 0), []byte("rubbish")},
		"trajectory of nothing":             {trajectory("u1", 0), nil},
		"trajectory of another sample":      {trajectory("u1", 0), bustest.Encode(t, trajectory("u1", 1))},
		"trajectory of another kind":        {trajectory("u1", 0), bustest.Encode(t, reward("u1", 0))},
		"reward that is not a number":       {scored(1), bustest.Encode(t, scored(math.NaN()))},
		"reward of an endless group":        {scored(1), bustest.Encode(t, func() *schemas.Reward { r := scored(1); r.GroupSize = 1 << 40; return r }())},
		"verdict that is not a number":      {verdict(0.5), bustest.Encode(t, verdict(math.Inf(1)))},
		"advantage of bytes":                {advantage("u1"), bytes.Repeat([]byte{0xc1}, 1000)},
		"advantage of another group":        {advantage("u1"), bustest.Encode(t, advantage("u2"))},
		"batch that is no map":              {&schemas.Batch{Run: "r1", Batch: "b1", StdBasis: "sample"}, []byte{0x90}},
		"trajectory larger than its letter": {trajectory("u1", 0), make([]byte, 1_040_000)},
	} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, func(t *testing.T, e *env) {
				first := e.Forge(t, test.event.Subject(), test.first)
				ack, err := e.Publish(t.Context(), test.event)
				if err != nil || ack.Duplicate || ack.Seq <= first.Seq {
					t.Fatalf("got %+v, %v; want stored after %d", ack, err, first.Seq)
				}
				m, err := e.Get(t.Context(), ack.Stream, ack.Seq)
				if err != nil || !bytes.Equal(m.Data, bustest.Encode(t, test.event)) {
					t.Errorf("stored %.40q, %v; want the event", m.Data, err)
				}
				if _, err := e.Get(t.Context(), first.Stream, first.Seq); !errors.Is(err, bus.ErrNotFound) {
					t.Errorf("what came first: %v; want it gone", err)
				}
				if again, err := e.Publish(t.Context(), test.event); err != nil || !again.Duplicate ||
					again.Seq != ack.Seq {
					t.Errorf("again: got %+v, %v; want duplicate of %d", again, err, ack.Seq)
				}
				letters := bustest.Dead(t, e.Bus, 0)
				if len(letters) != 1 {
					t.Fatalf("%d dead letters, want 1", len(letters))
				}
				d := letters[0]
				data, err := e.DeadData(t.Context(), d)
				if err != nil || !bytes.Equal(data, test.first) || d.Code != schemas.CodeDisplaced ||
					d.StreamSeq != first.Seq || d.OriginalSubject != m.Subject || d.Reason == "" {
					t.Errorf("letter %s %q of %s %d with %.40q, %v; want all of what came first", d.Code, d.Reason,
						d.OriginalSubject, d.StreamSeq, data, err)
				}
			})
		})
	}
}

func verdict(value float64) *schemas.Verdict {
	return &schemas.Verdict{Run: "r1", UID: "u1", Name: "external", Value: &value}
}

func advantage(uid schemas.UID) *schemas.Advantage {
	return &schemas.Advantage{
		Run: "r1", UID: uid, Batch: string(uid), Status: "failed", Error: "none came", GroupSize: 8, Members: []schemas.Member{},
		Scale: "group", StdBasis: "sample", Estimator: "flow_grpo",
	}
}

func TestBus_Publish_against(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		forged := reward("u1", 0)
		forged.GroupSize = 2
		e.Forge(t, forged.Subject(), bustest.Encode(t, forged))
		sameSize := bus.Against(func(stored *schemas.Reward) (fault, err error) {
			if stored.GroupSize != schemas.MaxGroupSize {
				return fmt.Errorf("group_size: %d; must be %d", stored.GroupSize, schemas.MaxGroupSize), nil
			}
			return nil, nil
		})
		// Who does not know better leaves it.
		ack, err := e.Publish(t.Context(), reward("u1", 0))
		if err != nil || !ack.Duplicate || ack.First == nil || !bytes.Equal(ack.First.Data, bustest.Encode(t, forged)) {
			t.Errorf("without a check: got %+v, %v; want duplicate", ack, err)
		}
		ack, err = e.Publish(t.Context(), reward("u1", 0), sameSize)
		if err != nil || ack.Duplicate {
			t.Errorf("got %+v, %v; want stored", ack, err)
		}
		other := reward("u1", 0)
		other.Error = "second"
		if again, err := e.Publish(t.Context(), other, sameSize); err != nil || !again.Duplicate ||
			again.Seq != ack.Seq {
			t.Errorf("second: got %+v, %v; want duplicate of %d", again, err, ack.Seq)
		}
		if d := bustest.Dead(t, e.Bus, 0); len(d) != 1 || d[0].Reason != "group_size: 2; must be 1024" {
			t.Errorf("letters: %+v", d)
		}
	})
}

// The server takes whatever has a message id that it has seen for stored.
func TestBus_Publish_idOfSomebodyElse(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		want := trajectory("u1", 0)
		if _, err := e.PublishRaw(t.Context(), trajectory("u2", 0).Subject(), nil, nil,
			schemas.MessageID(want.Subject())); err != nil {
			t.Fatal(err)
		}
		ack, err := e.Publish(t.Context(), want)
		if err != nil || ack.Duplicate {
			t.Fatalf("got %+v, %v; want stored", ack, err)
		}
		if m, err := e.Last(t.Context(), ack.Stream, want.Subject()); err != nil ||
			!bytes.Equal(m.Data, bustest.Encode(t, want)) {
			t.Errorf("stored %v, %v; want the event", m, err)
		}
	})
}

// Of many who displace at once, one is stored, and what it has stored stays.
func TestBus_Publish_displacesOnce(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		e.Forge(t, trajectory("u1", 0).Subject(), []byte("rubbish"))
		const n = 8
		acks := make([]bus.Ack, n)
		var all sync.WaitGroup
		for i := range n {
			b := e.Connect(t)
			all.Go(func() {
				v := trajectory("u1", 0)
				v.Error = fmt.Sprint("writer ", i)
				var err error
				if acks[i], err = b.Publish(t.Context(), v); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		stored := 0
		for _, a := range acks {
			if !a.Duplicate {
				stored++
			}
			if a.Seq != acks[0].Seq {
				t.Errorf("sequences %d and %d; want one", a.Seq, acks[0].Seq)
			}
		}
		if d := bustest.Dead(t, e.Bus, 0); stored != 1 || len(d) != 1 {
			t.Errorf("%d stored, %d letters; want one of each", stored, len(d))
		}
	})
}

func TestBus_Publish_refusesInvalid(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		_, err := e.Publish(t.Context(), verdict(math.NaN()))
		if terminal, ok := errors.AsType[*bus.TerminalError](err); !ok || terminal.Code != schemas.CodeInvalid {
			t.Errorf("got %v; want a terminal error", err)
		}
		if ack, err := e.Publish(t.Context(), verdict(1)); err != nil || ack.Duplicate {
			t.Errorf("got %+v, %v; want stored", ack, err)
		}
	})
}

// A step's attempt is its writer's alone, so that nothing else may be on its subject, nor
// on those of its parts.
func TestPublisher_PublishStep_displaces(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		p := e.NewPublisher(8, 8<<20)
		defer p.Close()
		small, large := step("u1", 0, "a1", 0, 100), step("u1", 0, "a1", 1, 3_000_000)
		forged := step("u1", 0, "a1", 0, 100)
		forged.NoiseLevel = 0.5
		e.Forge(t, small.Subject(), bustest.Encode(t, forged))
		e.Forge(t, large.Subject(), []byte("rubbish"))
		e.Forge(t, schemas.PartSubject(large.Subject(), 2), []byte("rubbish"))
		for _, s := range []*schemas.Step{small, large} {
			f, err := p.PublishStep(t.Context(), s, nil)
			if err != nil {
				t.Fatal(err)
			}
			ack, err := f.Wait(t.Context())
			if err != nil || ack.Duplicate || ack.Digest == "" {
				t.Fatalf("step %d: got %+v, %v; want stored", s.StepIndex, ack, err)
			}
			got, err := e.LoadStepRef(t.Context(), schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest})
			if err != nil || !bytes.Equal(got.Latents[0].Tensor.Data, s.Latents[0].Tensor.Data) || got.NoiseLevel != 0 {
				t.Errorf("step %d: %v; want what was published", s.StepIndex, err)
			}
		}
		if d := bustest.Dead(t, e.Bus, 0); len(d) != 3 {
			t.Errorf("%d letters, want 3", len(d))
		}
	})
}

func TestBus_Consume_freesTheSubjectOfGarbage(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		want := trajectory("u1", 0)
		first := e.Forge(t, want.Subject(), []byte("rubbish"))
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		taken := make(chan *bus.Message, 1)
		done := make(chan error, 1)
		go func() {
			done <- e.Consume(ctx, bus.ConsumerConfig{
				Durable: schemas.TrajectoriesDurable(),
				OnGiveUp: func(context.Context, *bus.Message, error) error {
					t.Error("the stages after are told that nothing will come")
					return nil
				},
			}, func(_ context.Context, m *bus.Message) error {
				var v schemas.Trajectory
				if err := bus.Fits(m, &v); err != nil {
					return bus.Garbage(schemas.CodeDecode, err)
				}
				taken <- m
				return nil
			})
		}()
		eventually(t, "garbage is deleted", func() bool {
			_, err := e.Get(ctx, first.Stream, first.Seq)
			return errors.Is(err, bus.ErrNotFound)
		})
		if _, err := e.Publish(ctx, want); err != nil {
			t.Fatal(err)
		}
		if m := bustest.Receive(t, "the trajectory", taken); m.Seq <= first.Seq {
			t.Errorf("got message %d, want one after %d", m.Seq, first.Seq)
		}
		stop()
		if err := bustest.Receive(t, "the end of the consumer", done); err != nil {
			t.Error(err)
		}
		if d := bustest.Dead(t, e.Bus, 0); len(d) != 1 || d[0].Code != schemas.CodeDecode || d[0].Service != "reward" ||
			string(d[0].Data) != "rubbish" {
			t.Errorf("letters: %+v; want what was deleted", d)
		}
	})
}

// A look at what a subject holds leaves it there.
func TestBus_StoredEvent(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		var v schemas.Reward
		stored := schemas.RewardFilter("r1", "u1", "u1")
		look := func(check func() (fault, err error)) (*bus.Message, error) {
			return e.StoredEvent(ctx, schemas.StreamRewards, stored, &v, check)
		}
		if _, err := look(nil); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("nothing there: %v", err)
		}
		e.Forge(t, reward("u1", 0).Subject(), []byte("rubbish"))
		if _, err := look(nil); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("garbage: %v; want ErrNotFound", err)
		}
		for name, look := range map[string]func() error{
			"Group":  func() error { _, err := e.Group(ctx, "r1", "u1"); return err },
			"Result": func() error { _, err := e.Result(ctx, "r1", "u1", 1, "u1"); return err },
		} {
			stream, subject := schemas.StreamGroups, schemas.GroupSubject("r1", "u1")
			if name == "Result" {
				stream, subject = schemas.StreamAdvantages, schemas.AdvantageSubject("r1", "u1")
			}
			e.Forge(t, subject, []byte("rubbish"))
			if err := look(); !errors.Is(err, bus.ErrNotFound) {
				t.Errorf("%s of garbage: %v; want ErrNotFound", name, err)
			}
			if m, err := e.Last(ctx, stream, subject); err != nil || string(m.Data) != "rubbish" {
				t.Errorf("%s has changed what is stored: %v", name, err)
			}
		}
		if letters := bustest.Dead(t, e.Bus, 0); len(letters) != 0 {
			t.Errorf("looks wrote dead letters: %+v", letters)
		}
		ack, err := e.Publish(ctx, reward("u1", 0))
		if err != nil || ack.Duplicate {
			t.Fatalf("got %+v, %v; want stored", ack, err)
		}
		if m, err := look(func() (fault, err error) { return nil, nil }); err != nil || m.Seq != ack.Seq ||
			v.Error != "out of paint" {
			t.Errorf("got %v, %v with %+v; want what was published", m, err, v)
		}
		if _, err := look(func() (fault, err error) { return errors.New("not mine"), nil }); !errors.Is(err,
			bus.ErrNotFound) {
			t.Errorf("refused by the check: %v; want ErrNotFound", err)
		}
		if _, err := e.Get(ctx, ack.Stream, ack.Seq); err != nil {
			t.Errorf("refused by the check: %v; want it there", err)
		}
	})
}
