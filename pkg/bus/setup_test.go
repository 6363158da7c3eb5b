package bus_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

func TestBus_Setup_idempotent(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	for range 2 {
		e.setup(t)
	}
	// The operator's limits stay.
	e.resize(t, schemas.StreamSteps, 123<<20, -1)
	e.setup(t)
	if got := e.Info(t, schemas.StreamSteps).Config.MaxBytes; got != 123<<20 {
		t.Errorf("max_bytes is %d after another set-up", got)
	}
	if err := e.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	for _, spec := range schemas.Streams() {
		c := e.Info(t, spec.Name).Config
		if guarded := c.MaxMsgsPerSubject == 1 && c.DiscardNewPerSubject &&
			c.Discard == jetstream.DiscardNew; guarded != (spec.Guarded || spec.WorkQueue) || !c.AllowDirect {
			t.Errorf("%s: %+v", spec.Name, c)
		}
	}
}

func TestBus_Setup_repairsAndRefuses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	ctx := t.Context()
	c := e.Info(t, schemas.StreamRewards).Config
	c.AllowDirect = false
	if _, err := e.JetStream().UpdateStream(ctx, c); err != nil {
		t.Fatal(err)
	}
	e.setup(t)
	if !e.Info(t, schemas.StreamRewards).Config.AllowDirect {
		t.Error("direct gets were not put right")
	}
	if err := e.JetStream().DeleteStream(ctx, schemas.StreamSteps); err != nil {
		t.Fatal(err)
	}
	if _, err := e.JetStream().CreateStream(ctx, jetstream.StreamConfig{
		Name: schemas.StreamSteps, Subjects: []string{"mdr.v1.step.>"},
	}); err != nil {
		t.Fatal(err)
	}
	err := e.Setup(ctx)
	if !errors.Is(err, bus.ErrIncompatible) || !strings.Contains(err.Error(), "MDR_STEPS") ||
		!strings.Contains(err.Error(), "discard_new_per_subject is false, must be true") {
		t.Errorf("got %v", err)
	}
}

func TestBus_runs(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		if _, err := e.Run(ctx, "r1"); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
		stored, created, err := e.CreateRun(ctx, "r1", []byte("first"))
		if err != nil || !created || string(stored) != "first" {
			t.Errorf("got %q, %v, %v", stored, created, err)
		}
		stored, created, err = e.CreateRun(ctx, "r1", []byte("second"))
		if err != nil || created || string(stored) != "first" {
			t.Errorf("again: got %q, %v, %v", stored, created, err)
		}
		if _, _, err := e.CreateRun(ctx, "a.b", nil); err == nil {
			t.Error("a run id with a dot was accepted")
		}

		publishRequests(t, e.Bus, 2)
		publishGroup(t, e.Bus, "u1", 0, 2)
		if _, err := e.Publish(ctx, trajectory("u1", 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := e.Publish(ctx, request("r2", "u1", 0)); err != nil {
			t.Fatal(err)
		}
		n, err := e.Purge(ctx, "r1")
		if err != nil || n != 5 {
			t.Errorf("purged %d, %v; want 5", n, err)
		}
		if got := e.waiting(t); got != 1 {
			t.Errorf("%d requests left, want the other run's", got)
		}
		if _, err := e.Run(ctx, "r1"); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("after purge: got %v, want ErrNotFound", err)
		}
		if _, err := e.Purge(ctx, "*"); err == nil {
			t.Error("purge of * was accepted")
		}
	})
}

func TestBus_Stats(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	publishRequests(t, e.Bus, 3)
	hold := make(chan struct{})
	defer close(hold)
	c := sampler()
	consume(t, e.Bus, c, func(ctx context.Context, _ *bus.Message) error {
		select {
		case <-hold:
		case <-ctx.Done():
		}
		return nil
	})
	eventually(t, "in hand", func() bool {
		stats, err := e.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s := stats[slices.IndexFunc(stats, func(s bus.StreamStats) bool { return s.Name == schemas.StreamRequests })]
		return len(stats) == len(schemas.Streams())+5 && s.Messages == 3 && s.Bytes > 0 && !s.Newest.IsZero() &&
			stats[0].Newest.IsZero() && len(s.Consumers) == 1 && s.Consumers[0].Name == "sampler-tiny" &&
			s.Consumers[0].AckPending == 3
	})
}

func TestBus_policies(t *testing.T) {
	eachTransport(t, func(t *testing.T, e *env) {
		ctx := t.Context()
		policy := func(lane schemas.Lane, version int64) *schemas.Policy {
			return &schemas.Policy{
				Tenant: schemas.TenantMain,
				Lane:   lane, Model: "tiny", Family: "qwen-image", PolicyVersion: version, WeightsDigest: strings.Repeat("0", 64),
				LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 64, NumInferenceSteps: 10, TrueCFGScale: 4, MaxPixels: 1 << 20, Announced: 1,
			}
		}
		if got, err := e.Policies(ctx); err != nil || len(got) != 0 {
			t.Errorf("got %v, %v; want none", got, err)
		}
		for _, p := range []struct{ next, after *schemas.Policy }{
			{policy("tiny", 1), nil}, {policy("big", 7), nil}, {policy("tiny", 2), policy("tiny", 1)},
		} {
			if err := e.SetPolicy(ctx, p.next, p.after); err != nil {
				t.Fatal(err)
			}
		}
		other := policy("tiny", 2)
		other.WeightsDigest = strings.Repeat("1", 64)
		for name, p := range map[string]struct{ next, after *schemas.Policy }{
			"follows an older one": {policy("tiny", 3), policy("tiny", 1)}, "is no first": {policy("tiny", 3), nil},
			"goes back": {policy("tiny", 1), policy("tiny", 2)}, "has the version of others": {other, policy("tiny", 2)},
		} {
			if err := e.SetPolicy(ctx, p.next, p.after); !errors.Is(err, bus.ErrBehind) {
				t.Errorf("%s: got %v, want ErrBehind", name, err)
			}
		}
		got, err := e.Policies(ctx)
		if err != nil || len(got) != 2 || got[0].Lane != "big" || got[1].PolicyVersion != 2 {
			t.Errorf("got %+v, %v", got, err)
		}
		if n := e.Info(t, schemas.StreamPolicies).State.Msgs; n != 3 {
			t.Errorf("history has %d, want 3", n)
		}
		history, err := e.PolicyHistory(ctx, schemas.Lane("tiny").Of(""))
		current, currentErr := e.Policy(ctx, schemas.Lane("tiny").Of(""))
		if err != nil || currentErr != nil || len(history) != 2 ||
			history[0].PolicyVersion != 1 || current.PolicyVersion != 2 {
			t.Errorf("got %+v, %v, %+v, %v", history, err, current, currentErr)
		}
		if _, err := e.Policy(ctx, schemas.Lane("none").Of("")); !errors.Is(err, bus.ErrNotFound) {
			t.Errorf("got %v, want ErrNotFound", err)
		}
		testLostPolicies(t, e)
	})
}

// testLostPolicies has strangers spoil the bucket of current policies. The history still has those of all lanes, and
// who follows a lane puts its policy back.
func testLostPolicies(t *testing.T, e *env) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	followed, seen := make(chan struct{}), make(chan int64, 16)
	defer func() { cancel(); <-followed }()
	go func() {
		defer close(followed)
		_ = e.FollowPolicy(ctx, "tiny", func(p *schemas.Policy) { seen <- p.PolicyVersion },
			func(schemas.Tenant) { seen <- -1 })
	}()
	next := func() int64 {
		select {
		case v := <-seen:
			return v
		case <-time.After(bustest.Patience):
			t.Fatal("no policy comes")
			return 0
		}
	}
	next()
	kv, err := e.JetStream().KeyValue(ctx, schemas.PolicyBucket)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func() error{
		"removed": func() error { return kv.Delete(ctx, "tiny.main") },
		"garbage": func() error { _, err := kv.Put(ctx, "tiny.main", []byte("garbage")); return err },
	} {
		if err := spoil(); err != nil {
			t.Fatal(name, err)
		}
		if v := next(); v != 2 {
			t.Errorf("%s: version %d comes back; want 2", name, v)
		}
	}
	stream, err := e.JetStream().Stream(ctx, schemas.StreamPolicyBucket)
	if err == nil {
		err = stream.Purge(ctx)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, err := e.Policies(ctx); err != nil || len(got) != 2 || got[1].PolicyVersion != 2 {
		t.Errorf("without the bucket's entries: %+v, %v", got, err)
	}
}

func TestConnect_refuses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "tcp", func(o *natsd.Options) { o.Token = "secret" })
	for name, c := range map[string]bus.Config{
		"nothing":       {},
		"both":          {URL: "nats://127.0.0.1:1", InProcess: e.Server.InProcess()},
		"token twice":   {URL: "nats://127.0.0.1:1", Token: "x", CredsFile: "y"},
		"half a key":    {URL: "nats://127.0.0.1:1", CertFile: "x"},
		"no such creds": {URL: e.Server.ClientURL(), CredsFile: "does-not-exist"},
		"wrong token":   {URL: e.Server.ClientURL(), Token: "guess"},
		"nobody there":  {URL: "nats://127.0.0.1:1", ConnectTimeout: 200 * time.Millisecond},
	} {
		if c.ConnectTimeout == 0 {
			c.ConnectTimeout = -1 // it would try for ever, if it tried again
		}
		ctx, cancel := context.WithTimeout(t.Context(), bustest.Patience)
		b, err := bus.Connect(ctx, c, zerolog.Nop())
		if err == nil {
			t.Errorf("%s: connected", name)
			_ = b.Close()
		}
		if ctx.Err() != nil {
			t.Errorf("%s: still tries after %v", name, bustest.Patience)
		}
		cancel()
	}
}

// The stream of steps and the object store follow the server's storage, as NewLimits says before there is a server.
func TestBus_Setup_followsStorage(t *testing.T) {
	t.Parallel()
	const gib = 1 << 30
	for storage, want := range map[int64]struct{ steps, blobs [2]int64 }{
		200 * gib: {[2]int64{80 * gib, 97 * gib}, [2]int64{32 * gib, 32 * gib}},
		45 * gib:  {[2]int64{18 * gib, 19 * gib}, [2]int64{10 * gib, 15 * gib}},
		26 * gib:  {[2]int64{8 * gib, 10 * gib}, [2]int64{8 * gib, 9 * gib}},
		12 * gib:  {[2]int64{4 * gib, 4 * gib}, [2]int64{4 * gib, 4 * gib}},
	} {
		p := bustest.New(t, func(o *natsd.Options) { o.MaxFileStore = storage })
		steps, blobs := p.Info(t, schemas.StreamSteps).Config.MaxBytes,
			p.Info(t, schemas.StreamBlobBucket).Config.MaxBytes
		if steps < want.steps[0] || steps > want.steps[1] || blobs < want.blobs[0] || blobs > want.blobs[1] {
			t.Errorf("of %d bytes the steps have %d and the object store %d; want %d", storage, steps, blobs, want)
		}
		if told := bus.NewLimits(storage)[schemas.StreamSteps]; told != steps {
			t.Errorf("of %d bytes the steps have %d; said before %d", storage, steps, told)
		}
	}
}

// A store of an older version, whose limit was the same on every disk, is widened once. What an operator sets stays.
func TestBus_Setup_widensOldLimit(t *testing.T) {
	t.Parallel()
	const gib = 1 << 30
	p := bustest.New(t, func(o *natsd.Options) { o.MaxFileStore = 100 * gib })
	old := p.Info(t, schemas.StreamSteps).Config
	old.MaxBytes, old.Metadata = 8*gib, nil
	if _, err := p.JetStream().UpdateStream(t.Context(), old); err != nil {
		t.Fatal(err)
	}
	set := func(want func(bytes int64) bool) {
		t.Helper()
		if err := p.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := p.Info(t, schemas.StreamSteps).Config.MaxBytes; !want(got) {
			t.Errorf("the steps have %d", got)
		}
	}
	set(func(bytes int64) bool { return bytes > 30*gib })
	if err := p.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 8 * gib}); err != nil {
		t.Fatal(err)
	}
	set(func(bytes int64) bool { return bytes == 8*gib })
}

// Streams, buckets and durables say what they are, in which release and whose. A release that says it otherwise brings
// them up to date: a consumer keeps its place, and the keys of operators stay.
func TestBus_Setup_describes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "in-process")
	e.setup(t)
	c := bus.ConsumerConfig{Durable: schemas.PromptsDurable()}
	take := func(prompt string) {
		t.Helper()
		if _, err := e.JetStream().Publish(t.Context(), schemas.PromptSubject("r"), []byte(prompt)); err != nil {
			t.Fatal(err)
		}
		came := make(chan string, 8)
		stop := consume(t, e.Bus, c, func(_ context.Context, m *bus.Message) error {
			came <- string(m.Data)
			return nil
		})
		if got := bustest.Receive(t, prompt, came); got != prompt {
			t.Errorf("got %q, want %q: it begins anew", got, prompt)
		}
		eventually(t, "acknowledged", func() bool {
			have, err := e.JetStream().Consumer(t.Context(), c.Stream, c.Name)
			return err == nil && have.CachedInfo().NumAckPending == 0
		})
		stop()
	}
	take("first")
	for range 2 { // the second time as after another release
		for _, name := range schemas.StreamNames() {
			s := e.Info(t, name).Config
			if s.Description == "" || s.Metadata["meander.version"] != schemas.Release {
				t.Errorf("%s: %q, %v", name, s.Description, s.Metadata)
			}
			s.Description, s.Metadata = "old", map[string]string{"meander.version": "0.0.1", "team": "night"}
			if _, err := e.JetStream().UpdateStream(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		e.setup(t)
	}
	if of := e.Info(t, schemas.StreamRewards).Config.Metadata; of["team"] != "night" ||
		of["meander.owner"] != "reward" || of["meander.schema"] != "group/1, reward/1" {
		t.Errorf("%v", of)
	}
	find := func() *jetstream.ConsumerInfo {
		t.Helper()
		have, err := e.JetStream().Consumer(t.Context(), c.Stream, c.Name)
		if err != nil {
			t.Fatal(err)
		}
		return have.CachedInfo()
	}
	made := find()
	old := made.Config
	old.Description, old.Metadata = "", map[string]string{"team": "night"}
	if _, err := e.JetStream().UpdateConsumer(t.Context(), c.Stream, old); err != nil {
		t.Fatal(err)
	}
	take("second")
	now := find()
	if m := now.Config.Metadata; now.Config.Description != made.Config.Description || m["team"] != "night" ||
		m["meander.owner"] != "intake" || m["meander.schema"] != "prompt/1" {
		t.Errorf("%q, %v", now.Config.Description, m)
	}
	if !now.Created.Equal(made.Created) || e.Changed() != nil {
		t.Errorf("made %v, now %v, %v", made.Created, now.Created, e.Changed())
	}
}
