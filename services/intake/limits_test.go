package intake

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

// finish stores the result of a group of which no sample was made: it then takes no space.
func (p *plane) finish(t testing.TB, run schemas.Run, uid schemas.UID, batch string, size int64) {
	t.Helper()
	a := &schemas.Advantage{
		Run: run, UID: uid, Batch: batch, Status: schemas.StatusPartial, GroupSize: size,
		Estimator: "flow_grpo", Scale: "group", StdBasis: "sample", Error: "deadline", Epsilon: 1e-4,
	}
	for i := range size {
		a.Members = append(a.Members, schemas.Member{SampleIndex: i, Status: schemas.StatusMissing})
	}
	if _, err := p.Publish(t.Context(), a); err != nil {
		t.Fatal(err)
	}
}

// A group that no stream could ever hold is refused with what to do, and one that fits is not.
func TestRoom_GroupsThatNeverFit(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	if err := p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 4 << 20},
		bus.StreamLimit{Stream: schemas.StreamRewards, MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	p.serve(t)
	notes, err := schemas.MetadataFrom(map[string]any{"notes": strings.Repeat("n", 4000)})
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		prompt schemas.Prompt
		say    []string // nothing: it is accepted
	}{
		// 11 states of 256 KiB are 2.75 MiB a sample.
		{
			schemas.Prompt{GroupSize: new(int64(2))},
			[]string{
				"group_size: 2; its steps take about 5.", "MDR_STEPS may hold 4.0 MiB",
				"meander streams limit --max-steps-bytes 6MiB'", "return_step_indices",
			},
		},
		{schemas.Prompt{GroupSize: new(int64(1))}, nil},
		{schemas.Prompt{GroupSize: new(int64(8)), ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{ReturnStepIndices: []int64{10}}}}, nil},
		{schemas.Prompt{
			GroupSize:     new(int64(256)),
			ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{ReturnStepIndices: []int64{}}},
			Metadata:      notes,
		}, []string{
			"group_size: 256; its rewards take about 1.", "MDR_REWARDS may hold 1.0 MiB", "--max-rewards-bytes",
		}},
	} {
		c.prompt.Prompt, c.prompt.UID = "a fox", schemas.UID(fmt.Sprintf("u%d", i))
		r := receipt(t, p.publish(t, "r", &c.prompt))
		if r.Accepted != (c.say == nil) {
			t.Errorf("prompt %d: %+v", i, r)
		}
		if r.Accepted {
			p.finish(t, "r", r.UID, string(r.UID), r.Samples)
		}
		for _, say := range c.say {
			if r.Code != schemas.CodeInvalid || !strings.Contains(r.Error, say) {
				t.Errorf("prompt %d: %s, %q; must say %q", i, r.Code, r.Error, say)
			}
		}
	}
}

// A batch whose groups cannot be there at once is refused at its first group, with a limit that is enough.
func TestRoom_BatchesThatNeverFit(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	limit := func(mib int64) {
		t.Helper()
		if err := p.SetLimits(t.Context(),
			bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: mib << 20}); err != nil {
			t.Fatal(err)
		}
	}
	limit(8)
	p.serve(t)
	ask := func(id string, side, groups int64) *schemas.Receipt {
		t.Helper()
		return receipt(t, p.publish(t, "r", prompt(schemas.UID(fmt.Sprintf("%s-%d", id, side)), "a fox",
			func(p *schemas.Prompt) {
				p.GroupSize, p.Height, p.Width = new(int64(2)), &side, &side
				p.Batch = &schemas.BatchSpec{ID: id, Groups: groups}
			})))
	}
	says := func(r *schemas.Receipt, say ...string) {
		t.Helper()
		for _, text := range say {
			if r.Accepted || r.Code != schemas.CodeInvalid || !strings.Contains(r.Error, text) {
				t.Errorf("%+v; must say %q", r, text)
			}
		}
	}
	// 11 states of 256 KiB are 2.75 MiB a sample, those of half the side a quarter.
	says(ask("large", 512, 2), "batch.groups: 2; its steps, 5.", " a group, take about 1", "MDR_STEPS may hold 8.0 MiB",
		"so that the batch could never end", "meander streams limit --max-steps-bytes 12MiB'")
	for side, batch := range map[int64]schemas.BatchSpec{512: {ID: "one", Groups: 1}, 256: {ID: "small", Groups: 4}} {
		r := ask(batch.ID, side, batch.Groups)
		if !r.Accepted {
			t.Errorf("a batch that fits: %+v", r)
		}
		p.finish(t, "r", r.UID, batch.ID, 2)
	}
	says(ask("small", 512, 4), "batch.groups: 4; its steps, 5.") // a later group that is larger
	limit(12)
	if r := ask("enough", 512, 2); !r.Accepted {
		t.Errorf("with the limit that it asked for: %+v", r)
	}
}

// While there is no place for more requests of paused runs, their prompts are refused, and those
// of other runs are not kept waiting.
func TestRoom_PausedRunsKeepNoOtherOut(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	if err := p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamParked, MaxBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	p.serve(t)
	if r := receipt(t, p.publish(t, "paused", &schemas.Prompt{Prompt: "a fox", UID: "first"})); !r.Accepted {
		t.Fatalf("%+v", r)
	}
	if _, mine, err := p.PutControl(t.Context(),
		&schemas.Control{Run: "paused", Action: schemas.ControlPause, At: 1, Seq: 1}); err != nil || !mine {
		t.Fatal(mine, err)
	}
	var answers []*nats.Subscription
	side := int64(64)
	for i := range maxHeld + 40 { // more than intake has in hand
		answers = append(answers, p.publish(t, "paused",
			prompt(schemas.UID(fmt.Sprintf("u%d", i)), "a fox", func(p *schemas.Prompt) {
				p.GroupSize, p.Height, p.Width = new(int64(32)), &side, &side // steps that do not fill their stream
			})))
	}
	if r := receipt(t, p.publish(t, "other", &schemas.Prompt{Prompt: "a fox"})); !r.Accepted {
		t.Errorf("the other run: %+v", r)
	}
	accepted, refused := 0, 0
	for _, a := range answers {
		switch r := receipt(t, a); {
		case r.Accepted:
			accepted++
		case r.Code == schemas.CodeExhausted &&
			strings.Contains(r.Error, "run paused is paused, and MDR_PARKED has no space") &&
			strings.Contains(r.Error, "--max-parked-bytes"):
			refused++
		default:
			t.Fatalf("%+v", r)
		}
	}
	if accepted == 0 || refused == 0 {
		t.Errorf("%d accepted, %d refused", accepted, refused)
	}
	parked := bustest.Await(t, p.Bus, accepted*32, schemas.StreamParked,
		schemas.Address{Kind: schemas.KindParked, Run: "paused"}.Filter())
	if len(parked) != accepted*32 {
		t.Errorf("%d requests are parked, of %d groups", len(parked), accepted)
	}
}

// The requests of a group that has its result go when it has, from the queue and from beside it,
// also when intake did not run then; those of other groups stay.
func TestClosed_RequestsGo(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	intake := p.serve(t)
	size, lane := new(int64(4)), qwen().Lane
	result := func(run schemas.Run, uid schemas.UID) { p.finish(t, run, uid, string(uid), 4) }
	left := func(want int, run schemas.Run) {
		t.Helper()
		bustest.Until(t, fmt.Sprintf("%d requests of run %s", want, run), func() error {
			s, err := counters.Status(t.Context(), p.Bus, run)
			if err == nil && s.Waiting+s.Parked != int64(want) {
				err = fmt.Errorf("%+v", s)
			}
			return err
		})
	}
	for _, run := range []schemas.Run{"queued", "paused"} {
		for _, uid := range []schemas.UID{"one", "two", "stays"} {
			if r := receipt(t, p.publish(t, run,
				&schemas.Prompt{
					Prompt: "a fox", UID: uid, GroupSize: size, Routing: schemas.Routing{Model: lane},
				})); !r.Accepted {
				t.Fatalf("%+v", r)
			}
			if run == "paused" && uid == "one" {
				if _, mine, err := p.PutControl(t.Context(),
					&schemas.Control{Run: run, Action: schemas.ControlPause, At: 1, Seq: 1}); err != nil || !mine {
					t.Fatal(mine, err)
				}
			}
		}
		left(12, run)
		result(run, "one")
		left(8, run)
	}
	intake.Kill()
	result("queued", "two")
	result("paused", "two")
	p.serve(t)
	left(4, "queued")
	left(4, "paused")
}
