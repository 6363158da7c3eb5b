package intake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// plane is an event plane of a test, with one lane announced.
type plane struct{ *bustest.Plane }

func newPlane(t testing.TB) *plane {
	t.Helper()
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), qwen(), nil); err != nil {
		t.Fatal(err)
	}
	p.sampler(t, qwen().Lane)
	return p
}

// sampler is present until the test ends.
func (p *plane) sampler(t testing.TB, lane schemas.Lane) {
	t.Helper()
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return b.Announce(ctx, func() *schemas.Presence {
			return &schemas.Presence{Service: schemas.ServiceSampler, Instance: "sampler-" + string(lane), Lane: lane}
		}, nil)
	})
}

// serve runs an intake.
func (p *plane) serve(t testing.TB) *bustest.Service {
	t.Helper()
	cfg := DefaultConfig()
	cfg.AckWait, cfg.DrainTimeout = time.Second, 100*time.Millisecond
	return p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
}

// publish stores a prompt and returns the inbox of its receipt.
func (p *plane) publish(t testing.TB, run schemas.Run, prompt *schemas.Prompt) *nats.Subscription {
	t.Helper()
	inbox := p.Conn().NewInbox()
	answers, err := p.Conn().SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answers.Unsubscribe() }) // a connection waits at its end for what no one reads
	data, err := schemas.Encode(prompt)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.PublishPrompt(t.Context(), run, data, nats.Header{schemas.HeaderReply: {inbox}}); err != nil {
		t.Fatal(err)
	}
	return answers
}

func receipt(t testing.TB, answers *nats.Subscription) *schemas.Receipt {
	t.Helper()
	m, err := answers.NextMsg(bustest.Patience)
	if err != nil {
		t.Fatal(err)
	}
	return decoded(t, m.Data)
}

func decoded(t testing.TB, data []byte) *schemas.Receipt {
	t.Helper()
	r := &schemas.Receipt{}
	if err := schemas.Decode(data, r); err != nil {
		t.Fatal(err)
	}
	return r
}

// requests are the stored requests of a run by uid.
func (p *plane) requests(t testing.TB, run schemas.Run) map[schemas.UID][]*schemas.Request {
	t.Helper()
	stored, err := p.LastMany(t.Context(), schemas.StreamRequests,
		[]string{schemas.Prefix + "request." + string(run) + ".>"})
	if err != nil {
		t.Fatal(err)
	}
	out := map[schemas.UID][]*schemas.Request{}
	for _, m := range stored {
		r := &schemas.Request{}
		if err := schemas.DecodeValid(m.Data, r); err != nil {
			t.Fatal(err)
		}
		out[r.UID] = append(out[r.UID], r)
	}
	return out
}

// whole says what is wrong with a group's requests: one of a sample is missing, or they
// are not all of the prompt that has the uid.
func (p *plane) whole(t testing.TB, run schemas.Run, uid schemas.UID, requests []*schemas.Request) error {
	t.Helper()
	m, err := p.Last(t.Context(), schemas.StreamGroups, schemas.GroupSubject(run, uid))
	if err != nil {
		return err
	}
	var g schemas.GroupRecord
	if err := schemas.DecodeValid(m.Data, &g); err != nil {
		return err
	}
	if int64(len(requests)) != g.GroupSize {
		return fmt.Errorf("%d requests; must be %d", len(requests), g.GroupSize)
	}
	for _, r := range requests {
		if r.Prompt != g.Prompt || r.Group.PromptSeq != g.Group.PromptSeq || r.ScheduleDigest != g.ScheduleDigest ||
			r.Group.Deadline != g.Group.Deadline {
			return fmt.Errorf("sample %d is of %q (%d), the uid is that of %q (%d)", r.SampleIndex, r.Prompt,
				r.Group.PromptSeq, g.Prompt, g.Group.PromptSeq)
		}
	}
	return nil
}

func prompt(uid schemas.UID, text string, change func(*schemas.Prompt)) *schemas.Prompt {
	p := &schemas.Prompt{UID: uid, Prompt: text, GroupSize: new(int64(4))}
	if change != nil {
		change(p)
	}
	return p
}

// Two prompts of one uid, back to back, at several intakes: one of them has the group, the
// other is told by name.
func TestClaim_TwoPrompts(t *testing.T) {
	const uids = 60
	p := newPlane(t)
	answers := map[schemas.UID][]*nats.Subscription{}
	for i := range uids {
		uid := schemas.UID(fmt.Sprintf("u%d", i))
		answers[uid] = []*nats.Subscription{
			p.publish(t, "r", prompt(uid, "a red fox", nil)),
			p.publish(t, "r", prompt(uid, "a blue fox",
				func(p *schemas.Prompt) { p.NumInferenceSteps = new(int64(4)) })),
		}
	}
	for range 3 {
		p.serve(t)
	}
	for uid, pair := range answers {
		accepted := 0
		for _, a := range pair {
			switch r := receipt(t, a); {
			case r.Accepted:
				accepted++
			case r.Code != schemas.CodeUIDConflict ||
				!strings.Contains(r.Error, string(`uid: "`+uid+`" is already used in run "r" by another prompt`)) ||
				!strings.Contains(r.Error, "which differs in prompt, schedule;"):
				t.Errorf("%s: %s %s", uid, r.Code, r.Error)
			}
		}
		if accepted != 1 {
			t.Errorf("%s: %d of 2 prompts accepted", uid, accepted)
		}
	}
	for uid, rs := range p.requests(t, "r") {
		if err := p.whole(t, "r", uid, rs); err != nil {
			t.Errorf("%s: %v", uid, err)
		}
	}
}

// Intakes that are killed anywhere between the claim and the last request leave no group
// mixed and none unfinished.
func TestClaim_Kills(t *testing.T) {
	const uids = 40
	p := newPlane(t)
	for i := range uids {
		uid := schemas.UID(fmt.Sprintf("u%d", i))
		p.publish(t, "r", prompt(uid, "a red fox", nil))
		p.publish(t, "r", prompt(uid, "a blue fox", nil))
	}
	// Killed after the claim, before the first request.
	dead := p.Connect(t)
	sub, err := dead.Subscription(t.Context(),
		bus.ConsumerConfig{Durable: schemas.PromptsDurable(), AckWait: time.Second, Slots: 4})
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		m, err := sub.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var prompt schemas.Prompt
		if err := schemas.Decode(m.Data, &prompt); err != nil {
			t.Fatal(err)
		}
		rs, err := Resolve("r", &prompt, qwen(), Origin{Seq: m.Seq, Created: m.Time, Reward: DefaultConfig().Reward})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := (&service{bus: dead}).claim(t.Context(),
			&asked{requests: rs, policies: []*schemas.Policy{qwen()}}); err != nil &&
			bus.Code(err) != schemas.CodeUIDConflict {
			t.Fatal(err)
		}
	}
	dead.Conn().Close()
	// Killed after a claim, wherever its requests are then, again and again.
	killed, n := p.serve(t), 0
	for _, err := range p.Read(t.Context(), schemas.StreamGroups, []string{schemas.GroupSubject("r", "*")},
		bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n%5 == 0 {
			killed.Kill()
			killed = p.serve(t)
		}
		if n == 30 {
			break
		}
	}
	bustest.Until(t, "all groups whole", func() error {
		all := p.requests(t, "r")
		var faults []error
		for _, uid := range slices.Sorted(maps.Keys(all)) {
			if err := p.whole(t, "r", uid, all[uid]); err != nil {
				faults = append(faults, fmt.Errorf("%s: %w", uid, err))
			}
		}
		if len(all) == uids && faults == nil {
			return nil
		}
		return fmt.Errorf("%d of %d groups: %w", len(all), uids, errors.Join(faults...))
	})
}

// The same prompt once more is no fault; one that differs in anything that is made, or in
// how it is judged, is told in what.
func TestClaim_Again(t *testing.T) {
	p := newPlane(t)
	p.serve(t)
	text := `a blue sign that says "4071"`
	first := func(change func(*schemas.Prompt)) *schemas.Prompt {
		return prompt("u", text, func(p *schemas.Prompt) {
			p.Deadline = new(time.Now().Add(time.Hour).UnixNano())
			p.Reward = []schemas.RewardSpec{{Name: "synthetic"}}
			if change != nil {
				change(p)
			}
		})
	}
	if r := receipt(t, p.publish(t, "r", first(nil))); !r.Accepted {
		t.Fatal(r.Error)
	}
	for _, c := range []struct {
		differs string
		change  func(*schemas.Prompt)
	}{
		{"", nil},
		{"", func(p *schemas.Prompt) { p.Priority = new(int64(3)) }},
		{"", func(p *schemas.Prompt) { p.Deadline = new(time.Now().Add(2 * time.Hour).UnixNano()) }},
		{"", func(p *schemas.Prompt) {
			p.GroupSize, p.Height, p.TrueCFGScale = new(int64(4)), new(int64(512)), new(4.0)
		}}, // the defaults, said
		{"prompt", func(p *schemas.Prompt) { p.Prompt += "!" }},
		{"negative_prompt", func(p *schemas.Prompt) { p.NegativePrompt = new("blurry") }},
		{"group_size", func(p *schemas.Prompt) { p.GroupSize = new(int64(5)) }},
		{"seed", func(p *schemas.Prompt) { p.Seed = new(int64(7)) }},
		{"initial_noise", func(p *schemas.Prompt) { p.InitialNoise = schemas.NoiseShared }},
		{"schedule", func(p *schemas.Prompt) { p.NumInferenceSteps = new(int64(9)) }},
		{"reward", func(p *schemas.Prompt) { p.Reward = []schemas.RewardSpec{{Name: "glyph"}} }},
		{"reward", func(p *schemas.Prompt) { p.Reward[0].Weight = new(2.0) }},
		{"advantage", func(p *schemas.Prompt) { p.Advantage.Estimator = "grpo" }},
		{"batch", func(p *schemas.Prompt) { p.Batch = &schemas.BatchSpec{ID: "b", Groups: 2} }},
		{"group_policy", func(p *schemas.Prompt) { p.GroupPolicy = &schemas.GroupPolicy{ZeroStd: schemas.GroupDrop} }},
		{"schedule, validation", func(p *schemas.Prompt) { p.Validation = true }},
		{
			"negative_prompt (absent or empty), rollout, start, stop, scheduled_sampling, messages or text",
			func(p *schemas.Prompt) { p.Rollout.Debug = []string{"noise"} },
		},
		{
			"negative_prompt (absent or empty), rollout, start, stop, scheduled_sampling, messages or text",
			func(p *schemas.Prompt) { p.Stop = &schemas.Stop{StepIndex: new(int64(3))} },
		},
		{"prompt, advantage", func(p *schemas.Prompt) { p.Prompt, p.Advantage.Std = "a green fox", schemas.StdNone }},
	} {
		r := receipt(t, p.publish(t, "r", first(c.change)))
		switch {
		case c.differs == "" && !r.Accepted:
			t.Errorf("the same prompt again: %s", r.Error)
		case c.differs != "" && (r.Code != schemas.CodeUIDConflict ||
			!strings.Contains(r.Error, "which differs in "+c.differs+";")):
			t.Errorf("another %s: %q %s", c.differs, r.Code, r.Error)
		}
	}
	if err := p.whole(t, "r", "u", p.requests(t, "r")["u"]); err != nil {
		t.Error(err)
	}
	if r := receipt(t, p.publish(t, "another", first(func(p *schemas.Prompt) { p.Prompt = "x" }))); !r.Accepted {
		t.Errorf("the uid in another run: %s", r.Error)
	}
}
