package intake

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// based is the policy of a lane with a checkpoint.
func based(base string, version int64) *schemas.Policy {
	p := qwen()
	p.BaseDigest, p.WeightsDigest, p.PolicyVersion = base, base, version
	return p
}

const oneBase, otherBase = "1111111111111111111", "2222222222222222222"

// A prompt is for the checkpoint that it names, and its uid for the one that took it: another one of the same lane is
// refused, with both.
func TestModel_OtherCheckpoint(t *testing.T) {
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), based(oneBase, 3), nil); err != nil {
		t.Fatal(err)
	}
	p.sampler(t, "q")
	p.serve(t)
	refused := func(uid schemas.UID, base, want string) {
		t.Helper()
		r := receipt(t, p.publish(t, "r", prompt(uid, "a fox", func(p *schemas.Prompt) { p.BaseDigest = base })))
		if r.Accepted || !strings.Contains(r.Error, want) {
			t.Errorf("%s: %+v; want %q", uid, r, want)
		}
	}
	for _, base := range []string{"", oneBase, oneBase} {
		if r := receipt(t, p.publish(t, "r", prompt("u1", "a fox",
			func(p *schemas.Prompt) { p.BaseDigest = base }))); !r.Accepted {
			t.Fatalf("of checkpoint %q: %+v", base, r)
		}
	}
	refused("u2", otherBase,
		"base_digest: 2222222222222222; must be the checkpoint that lane \"q\" serves, 1111111111111111")
	for _, r := range p.requests(t, "r")["u1"] {
		if r.BaseDigest != oneBase {
			t.Errorf("sample %d is asked of checkpoint %q", r.SampleIndex, r.BaseDigest)
		}
	}
	// Weights that were pushed are no other checkpoint.
	pushed := based(oneBase, 4)
	pushed.WeightsDigest, pushed.Adapter = "adapted", &schemas.PolicyAdapter{
		Scale: 1,
		File:  schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("a", 64), Size: 1},
	}
	if err := p.SetPolicy(t.Context(), pushed, based(oneBase, 3)); err != nil {
		t.Fatal(err)
	}
	if r := receipt(t, p.publish(t, "r", prompt("u1", "a fox", nil))); !r.Accepted {
		t.Fatalf("with weights that were pushed: %+v", r)
	}
	if err := p.SetPolicy(t.Context(), based(otherBase, 5), pushed); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "intake sees the other checkpoint", func() error {
		r := receipt(t, p.publish(t, "r", prompt("u1", "a fox", nil)))
		if r.Accepted {
			return context.DeadlineExceeded
		}
		const want = "differs in the checkpoint of the model (1111111111111111, not 2222222222222222)"
		if !strings.Contains(r.Error, want) {
			t.Fatalf("the same prompt with another checkpoint: %+v; want %q", r, want)
		}
		return nil
	})
}

// The intake of a run takes prompts that name the run's model and checkpoint. It leaves others as they are, for as long
// as it takes, until one that serves them comes.
func TestModel_OfARun(t *testing.T) {
	p := &plane{bustest.New(t)}
	if err := p.SetPolicy(t.Context(), based(oneBase, 0), nil); err != nil {
		t.Fatal(err)
	}
	p.sampler(t, "q")
	elsewhere := based(oneBase, 0)
	elsewhere.Lane = "elsewhere" // that has no sampler now
	if err := p.SetPolicy(t.Context(), elsewhere, nil); err != nil {
		t.Fatal(err)
	}
	own := DefaultConfig()
	own.Own, own.Models, own.Hold, own.AckWait = []schemas.Run{"r"}, []schemas.Lane{"q"}, time.Second, time.Second
	notes := make(chan func() []string, 1)
	own.Note = func(say func() []string) { notes <- say }
	running := p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, own, b, zerolog.Nop()) })
	of := func(lane schemas.Lane, base string) func(*schemas.Prompt) {
		return func(p *schemas.Prompt) { p.Model, p.BaseDigest = lane, base }
	}
	left := map[schemas.UID]func(*schemas.Prompt){
		"unnamed": of("", ""), "lane": of("elsewhere", ""),
		"checkpoint": of("q", otherBase),
	}
	answers := map[schemas.UID]*nats.Subscription{}
	for uid, change := range left {
		answers[uid] = p.publish(t, "left", prompt(uid, "a fox", change))
		if r := receipt(t, answers[uid]); !strings.HasPrefix(r.Waiting, "left for another pipeline: ") {
			t.Errorf("%s: %+v; want that it is left", uid, r)
		}
	}
	if r := receipt(t, p.publish(t, "r", prompt("mine", "a fox", of("q", oneBase)))); !r.Accepted {
		t.Errorf("a prompt of the run: %+v", r)
	}
	for uid, lane := range map[schemas.UID]schemas.Lane{"known": "elsewhere", "unknown": "nowhere"} {
		r := receipt(t, p.publish(t, "r", prompt(uid, "a fox", of(lane, ""))))
		if r.Accepted || !strings.Contains(r.Error, "is not served here; must be ") {
			t.Errorf("a prompt of the run for the model %q: %+v", lane, r)
		}
	}
	if said := strings.Join((<-notes)(), "\n"); !strings.Contains(said,
		`left for another pipeline: model: "elsewhere"; this one serves "q"`) {
		t.Errorf("the notes are %q", said)
	}
	bustest.Redelivers(t, p.Bus, 2*own.Hold) // for longer than others are held
	running.Stop()
	if m, err := p.LastMany(t.Context(), schemas.StreamDead, []string{schemas.Prefix + "dead.>"}); err != nil ||
		len(m) != 2 {
		t.Errorf("%d dead letters, %v; want those of the run's own prompts alone", len(m), err)
	}
	p.serve(t)
	if r := receipt(t, answers["unnamed"]); !r.Accepted {
		t.Errorf("a prompt that names no model, at an intake of any: %+v", r)
	}
}

// A prompt is held from when there is an intake to hold it.
func TestModel_HeldByAnIntake(t *testing.T) {
	p := &plane{bustest.New(t)}
	answers := p.publish(t, "r", prompt("u", "a fox", func(p *schemas.Prompt) { p.Model = "q" }))
	cfg := DefaultConfig()
	cfg.Models, cfg.Hold = []schemas.Lane{"q"}, time.Second
	time.Sleep(cfg.Hold + cfg.Hold/10) // it is older than prompts are held
	began := time.Now()
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
	r := receipt(t, answers)
	if r.Waiting != "" {
		r = receipt(t, answers)
	}
	_, until, _ := strings.Cut(r.Error, `model: the sampler of "q" is not up yet; waited until `)
	if end, err := time.Parse(time.RFC3339, until); err != nil ||
		end.Before(began.Add(cfg.Hold).Truncate(time.Second)) {
		t.Errorf("%+v; want that it waited for %v from %v", r, cfg.Hold, began.UTC())
	}
}

// A prompt waits for a version until a sampler serves it. Where all of them have refused it, the prompt says so, and
// goes
// on with the next.
func TestModel_RefusedVersion(t *testing.T) {
	p := &plane{bustest.New(t)}
	base := based(oneBase, 0)
	if err := p.SetPolicy(t.Context(), base, nil); err != nil {
		t.Fatal(err)
	}
	var serves atomic.Int64
	changed := make(chan struct{}, 1)
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return b.Announce(ctx, func() *schemas.Presence {
			return &schemas.Presence{
				Service: schemas.ServiceSampler, Instance: "sampler-1", Lane: "q",
				PolicyVersion: new(serves.Load()), WeightsDigest: oneBase,
			}
		}, changed)
	})
	notes := make(chan func() []string, 1)
	cfg := DefaultConfig()
	cfg.Note = func(say func() []string) { notes <- say }
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
	pushed := based(otherBase, 1) // of a checkpoint that no one has
	pushed.Adapter = &schemas.PolicyAdapter{Scale: 1, File: schemas.Ref{
		Bucket: schemas.BlobBucket,
		Digest: strings.Repeat("a", 64), Size: 1,
	}}
	if err := p.SetPolicy(t.Context(), pushed, base); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Publish(t.Context(), &schemas.Applied{
		Tenant: schemas.TenantMain,
		Lane:   "q", Instance: "sampler-1", PolicyVersion: 1, State: schemas.AppliedRefused, Error: "adapter: of zeros",
		WeightsDigest: oneBase,
	}); err != nil {
		t.Fatal(err)
	}
	if r := receipt(t, p.publish(t, "r", prompt("now", "a fox", nil))); !r.Accepted {
		t.Fatalf("a prompt for any version: %+v", r)
	}
	if r := p.requests(t, "r")["now"][0]; r.BaseDigest != oneBase {
		t.Errorf("asked of checkpoint %q; want that of the version in use", r.BaseDigest)
	}
	waits := p.publish(t, "r", prompt("then", "a fox", func(p *schemas.Prompt) { p.MinPolicyVersion = new(int64(1)) }))
	const want = `min_policy_version: 1; refused by the samplers of lane "q" (adapter: of zeros); push the next`
	if r := receipt(t, waits); !strings.Contains(r.Waiting, want) {
		t.Fatalf("held with %+v; want %q", r, want)
	}
	if said := strings.Join((<-notes)(), "\n"); !strings.Contains(said, "1 prompts wait: "+want) {
		t.Errorf("the notes are %q", said)
	}
	if err := p.SetPolicy(t.Context(), based(oneBase, 2), pushed); err != nil {
		t.Fatal(err)
	}
	serves.Store(2)
	changed <- struct{}{}
	if r := receipt(t, waits); !r.Accepted {
		t.Errorf("with the next version: %+v", r)
	}
}
