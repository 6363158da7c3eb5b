package recorder_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// studio records attempts of the synthetic model on an event plane.
type studio struct {
	*bustest.Plane
	t       *testing.T
	network *images.Network
	store   *recorder.Store
	policy  *schemas.Policy
	counted []prometheus.Counter // steps, tokens, resumed, steps resumed
}

func newStudio(t *testing.T) *studio {
	t.Helper()
	m, err := families.All().Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x := &studio{Plane: bustest.New(t), t: t, network: &images.Network{Model: m}}
	for range 4 {
		x.counted = append(x.counted, prometheus.NewCounter(prometheus.CounterOpts{Name: "c"}))
	}
	x.policy = x.network.Policy()
	x.store = x.newStore("key")
	return x
}

// newStore is a sampler of the same program with a secret.
func (x *studio) newStore(key string) *recorder.Store {
	publisher := x.Bus.NewPublisher(64, 1<<24)
	x.t.Cleanup(publisher.Close)
	return &recorder.Store{
		Bus: x.Bus, Steps: x.Bus, Publisher: publisher, Sealer: recorder.NewSealer([]byte(key)), Can: x.network.Abilities(), Instance: "s",
		Metrics: recorder.Metrics{Steps: x.counted[0], Tokens: x.counted[1], Resumed: x.counted[2], ResumedSteps: x.counted[3]},
	}
}

// request is one of a sample of four steps, whose states before each but the first can be gone on from.
func (x *studio) request(uid schemas.UID) *schemas.Request {
	x.t.Helper()
	p := &schemas.Prompt{UID: uid, Prompt: "a red fox", GroupSize: new(int64(1)), Seed: new(int64(5))}
	p.NumInferenceSteps, p.Height, p.Width = new(int64(4)), new(int64(64)), new(int64(64))
	p.Rollout.SDEStepIndices = []int64{1, 2}
	requests, err := intake.Resolve("r", p, x.policy, intake.Origin{Seq: 1, Created: time.Now()})
	if err != nil {
		x.t.Fatal(err)
	}
	r := requests[0]
	r.ReturnConditioning, r.ReturnStepIndices, r.CheckpointStepIndices = true, []int64{}, []int64{1, 2, 3}
	return r
}

// attempt makes up to n steps of a request under a token, from what earlier attempts left.
func (x *studio) attempt(s *recorder.Store, r *schemas.Request, token string, p *schemas.Policy,
	n int,
) (*recorder.Recorder, engine.Episode) {
	x.t.Helper()
	record := s.New(r, token, x.network.Backend(), p)
	check := func(err error) {
		x.t.Helper()
		if err != nil {
			x.t.Fatal(err)
		}
	}
	check(record.Begin(nil))
	from, err := record.Resume(x.t.Context())
	check(err)
	e := x.network.Engine(engine.Options{Workers: 1})
	episode, err := e.Start(x.t.Context(), r, from)
	check(err)
	record.Encoded()
	for made := 0; made < n && !episode.Done(); {
		check(e.Step(x.t.Context(), []engine.Episode{episode}))
		steps, err := episode.Take()
		check(err)
		for _, step := range steps {
			check(record.Record(x.t.Context(), step, time.Millisecond))
			made++
		}
	}
	return record, episode
}

func (x *studio) finish(record *recorder.Recorder, e engine.Episode) *schemas.Trajectory {
	x.t.Helper()
	t, err := record.Finish(x.t.Context(), e, recorder.Timing{Started: time.Now(), Denoise: time.Second})
	if err != nil {
		x.t.Fatal(err)
	}
	return t
}

func (x *studio) count(i int) float64 {
	r := prometheus.NewRegistry()
	r.MustRegister(x.counted[i])
	found, err := r.Gather()
	if err != nil {
		x.t.Fatal(err)
	}
	return found[0].GetMetric()[0].GetCounter().GetValue()
}

// A finished attempt is a trajectory whose steps, image and texts are stored; samples of one prompt share the texts.
func TestRecorder_Finish(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	var texts []schemas.NamedTensor
	for _, uid := range []schemas.UID{"a", "b"} {
		made := x.finish(x.attempt(x.store, x.request(uid), "t-"+string(uid), x.policy, 4))
		if err := made.Validate(); err != nil || made.StopReason != schemas.StopCompleted || len(made.Steps) != 4 ||
			made.CFGRule == "" {
			t.Fatalf("%v: %+v", err, made)
		}
		var content [][32]byte
		for i := range made.Steps {
			step, err := x.Bus.LoadStepOf(t.Context(), made, i)
			if err != nil {
				t.Fatal(err)
			}
			if step.StepIndex != int64(i) || step.Attempt != "t-"+string(uid) || step.Sampler != "s" ||
				step.DeviceNS != 1e6 || step.Seal == "" {
				t.Errorf("step %d: %+v", i, step)
			}
			digest, err := schemas.ContentDigest(step)
			if err != nil {
				t.Fatal(err)
			}
			content = append(content, digest)
		}
		if want := schemas.StepsDigest(content); made.ContentDigest != want {
			t.Errorf("content digest %s, of the stored steps %s", made.ContentDigest, want)
		}
		if file, err := x.Bus.GetBlob(t.Context(), *made.Media[0].Ref); err != nil ||
			!strings.HasPrefix(string(file), "\x89PNG") {
			t.Errorf("image: %v", err)
		}
		if len(made.Conditioning) == 0 || made.Conditioning[0].Tensor.Ref == nil ||
			made.Conditioning[0].Tensor.Data != nil {
			t.Fatalf("texts: %+v", made.Conditioning)
		}
		if texts != nil && &texts[0] != &made.Conditioning[0] {
			t.Error("the texts of one prompt were stored twice")
		}
		texts = made.Conditioning
	}
	if x.count(0) != 8 || x.count(2) != 0 {
		t.Errorf("%v steps, %v resumed; want 8 and 0", x.count(0), x.count(2))
	}
}

// An attempt goes on from what another of the same request left, to the same bits, and from nothing else.
func TestRecorder_Resume(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	r := x.request("broken")
	unbroken := *r
	unbroken.Run = "whole"
	whole := x.finish(x.attempt(x.store, &unbroken, "w", x.policy, 4))
	first, _ := x.attempt(x.store, r, "first", x.policy, 3)
	first.AwaitStored()
	other := *x.policy
	other.WeightsDigest = strings.Repeat("1", 64)
	seed := x.request("broken")
	seed.NoiseSeed++
	for name, begun := range map[string]func() *recorder.Recorder{
		"another secret":  func() *recorder.Recorder { return x.newStore("yek").New(r, "x", x.network.Backend(), x.policy) },
		"other weights":   func() *recorder.Recorder { return x.store.New(r, "x", x.network.Backend(), &other) },
		"another request": func() *recorder.Recorder { return x.store.New(seed, "x", x.network.Backend(), x.policy) },
		"another device":  func() *recorder.Recorder { return x.store.New(r, "x", "cuda/a", x.policy) },
	} {
		record := begun()
		if err := record.Begin(nil); err != nil {
			t.Fatal(err)
		}
		if from, err := record.Resume(t.Context()); from != nil || err != nil || !record.Fresh() {
			t.Errorf("%s: goes on from %+v, %v", name, from, err)
		}
	}
	if x.count(2) != 0 {
		t.Errorf("%v resumed before the second attempt", x.count(2))
	}
	second, episode := x.attempt(x.store, r, "second", x.policy, 4)
	if second.Next() != 4 || x.count(2) != 1 || x.count(3) != 2 {
		t.Errorf("at step %d, %v resumed with %v steps; want 4, 1 and 2: up to the state before step 2", second.Next(),
			x.count(2), x.count(3))
	}
	made := x.finish(second, episode)
	if names := made.Attempts(); !slices.Equal(names, []string{"first", "second"}) &&
		!slices.Equal(names, []string{"second", "first"}) {
		t.Errorf("attempts %q", names)
	}
	if made.ContentDigest != whole.ContentDigest ||
		made.Medium(schemas.KindImage).Digest != whole.Medium(schemas.KindImage).Digest {
		t.Errorf("content %.8s and image %.8s; without a break %.8s and %.8s", made.ContentDigest,
			made.Medium(schemas.KindImage).Digest, whole.ContentDigest, whole.Medium(schemas.KindImage).Digest)
	}
	for i, p := range second.LogProbs() {
		if (p == nil) != (i == 0 || i == 3) {
			t.Errorf("log-prob of step %d: %v", i, p)
		}
	}
}

// Steps are sent beside the loop: what is wrong with one is the error of the next, and of Stored where it is the last.
func TestRecording_NotLegal(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	steps := x.storedSteps(3)
	steps[1].NoiseStd = math.NaN()
	for _, last := range []bool{false, true} {
		record := x.store.New(x.request("again"), "t", x.network.Backend(), x.policy)
		if err := record.Begin(nil); err != nil {
			t.Fatal(err)
		}
		var errs []error
		for i, step := range steps {
			if i == 2 && last {
				break
			}
			errs = append(errs, record.Record(t.Context(), step, 0))
		}
		_, err := record.Stored(t.Context())
		errs = append(errs, err)
		for i, err := range errs {
			bad := i >= 2
			_, terminal := errors.AsType[*bus.TerminalError](err)
			if terminal != bad || (err != nil) != bad || bad && !strings.Contains(err.Error(), "noise_std") {
				t.Errorf("%d of %d: %v", i, len(errs), err)
			}
		}
	}
}

// storedSteps returns the first steps of a finished sample.
func (x *studio) storedSteps(n int) []*schemas.Step {
	x.t.Helper()
	made := x.finish(x.attempt(x.store, x.request("made"), "t", x.policy, 4))
	var steps []*schemas.Step
	for i := range n {
		step, err := x.Bus.LoadStepOf(x.t.Context(), made, i)
		if err != nil {
			x.t.Fatal(err)
		}
		step.UID, step.Checkpoint = "again", nil
		step.Latents = []schemas.IndexedTensor{{Index: step.StepIndex, Tensor: schemas.Tensor{
			DType: "U8", Shape: []int64{32 << 10, 1}, Data: make([]byte, 32<<10), // too large to be sent at once
		}}}
		steps = append(steps, step)
	}
	return steps
}

// Where a context has ended, a step is still published if there is space, and the one before was handed over.
func TestRecording_EndedContext(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	steps := x.storedSteps(3)
	ended, stop := context.WithCancel(t.Context())
	stop()
	for round := range 50 {
		record := recorder.NewRecording([]byte("key"), x.store.Publisher)
		for _, step := range steps {
			step.Attempt = fmt.Sprintf("a%d", round)
			if err := record.Step(ended, step); err != nil {
				t.Fatal(err)
			}
		}
		if refs, err := record.Stored(t.Context()); err != nil || len(refs) != len(steps) {
			t.Fatalf("%d of %d are stored, %v", len(refs), len(steps), err)
		}
	}
}

// A step that waits for space in the window is given up with its attempt, and is not stored later.
func TestRecording_NoSpace(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	steps := x.storedSteps(2)
	full := int64(x.Info(t, schemas.StreamSteps).State.Msgs)
	x.Change(t, schemas.StreamSteps, func(c *jetstream.StreamConfig) { c.MaxMsgs = full })
	publisher := x.Bus.NewPublisher(1, 1<<24)
	defer publisher.Close()
	first := recorder.NewRecording([]byte("key"), publisher)
	steps[0].Attempt = "first"
	if err := first.Step(t.Context(), steps[0]); err != nil {
		t.Fatal(err)
	}
	bustest.Until(t, "the first step takes the window", func() error {
		if n := publisher.Stats().Pending; n != 1 {
			return fmt.Errorf("%d steps are pending", n)
		}
		return nil
	})
	ended, stop := context.WithCancel(t.Context())
	stop()
	for name, leave := range map[string]func(r *recorder.Recording) error{
		"closed":      func(r *recorder.Recording) error { r.Close(); _, err := r.Stored(t.Context()); return err },
		"next-step":   func(r *recorder.Recording) error { return r.Step(ended, steps[0]) },
		"not-awaited": func(r *recorder.Recording) error { _, err := r.Stored(ended); return err },
	} {
		r, step := recorder.NewRecording([]byte("key"), publisher), *steps[1]
		step.Attempt = name
		if err := r.Step(t.Context(), &step); err != nil {
			t.Fatal(err)
		}
		if err := leave(r); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	x.Change(t, schemas.StreamSteps, func(c *jetstream.StreamConfig) { c.MaxMsgs = -1 })
	if _, err := first.Stored(t.Context()); err != nil {
		t.Error(err)
	}
	if err := publisher.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	if n := int64(x.Info(t, schemas.StreamSteps).State.Msgs); n != full+1 {
		t.Errorf("%d steps are stored, want %d and the first", n, full)
	}
}

// A panic is an error of the sample, not the end of the sampler.
func TestRecording_Panic(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	r := recorder.NewRecording([]byte("key"), nil)
	if err := r.Step(t.Context(), x.storedSteps(1)[0]); err != nil {
		t.Fatal(err)
	}
	_, err := r.Stored(t.Context())
	if e, ok := errors.AsType[*bus.TerminalError](err); !ok || e.Code != schemas.CodePanic {
		t.Errorf("got %v, want a panic as a terminal error", err)
	}
}

// An attempt that begins again has no steps, and is one of the newest weights alone.
func TestRecorder_Undo(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	r := x.request("u")
	record, _ := x.attempt(x.store, r, "old", x.policy, 2)
	if err := record.Undo(t.Context()); err != nil {
		t.Fatal(err)
	}
	left, err := x.Bus.Subjects(t.Context(), schemas.StreamSteps, schemas.AttemptFilter("r", "u", 0, schemas.StageMain,
		"old"))
	if err != nil || len(left) != 0 {
		t.Errorf("%v left, %v", left, err)
	}
	newer := *x.policy
	newer.PolicyVersion = 3
	again := x.store.New(r, "new", x.network.Backend(), x.policy)
	again.SetPolicy(&newer)
	if p := again.Failed(errors.New("x")); p.PolicyVersionMin != 0 || p.PolicyVersionMax != 3 {
		t.Errorf("versions %d to %d; want 0 to 3", p.PolicyVersionMin, p.PolicyVersionMax)
	}
	again.Restart(&newer)
	if p := again.Failed(errors.New("x")); p.PolicyVersionMin != 3 || p.PolicyVersionMax != 3 {
		t.Errorf("versions %d to %d; want 3", p.PolicyVersionMin, p.PolicyVersionMax)
	}
}

// A pruned sample has its steps and no image, a failed one its reason.
func TestRecorder_Ends(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	record, _ := x.attempt(x.store, x.request("p"), "t", x.policy, 2)
	p, err := record.Pruned(t.Context(), "too unlikely", recorder.Timing{})
	if err != nil || p.StopReason != schemas.StopPruned || p.Error != "too unlikely" || len(p.Steps) != 2 ||
		len(p.Media) > 0 || p.Validate() != nil {
		t.Errorf("%v, %v: %+v", err, p.Validate(), p)
	}
	f := record.Failed(errors.New("no weights"))
	if f.StopReason != schemas.StopFailed || f.Error != "no weights" || len(f.Steps) != 0 || f.Validate() != nil {
		t.Errorf("%v: %+v", f.Validate(), f)
	}
}

// text is the episode of a text that has ended.
type text struct {
	engine.Episode
	ids []byte
}

func (e *text) Finish(_ context.Context, t *schemas.Trajectory) (engine.Images, error) {
	t.Text.IDs = &schemas.Tensor{DType: "I32", Shape: []int64{int64(len(e.ids) / 4)}, Data: e.ids}
	t.Text.Mask = &schemas.Tensor{DType: "U8", Shape: []int64{1}, Data: []byte{1}}
	return engine.Images{}, nil
}

// Large tensors of a text go to the object store, small ones stay; a fault of the interaction is the end of its
// conversation.
func TestRecorder_Text(t *testing.T) {
	t.Parallel()
	x := newStudio(t)
	r := &schemas.Request{Identity: schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "text", GroupSize: 1}}
	r.Text = &schemas.TextRequest{}
	record := x.store.New(r, "t", "cpu", x.policy)
	made := x.finish(record, &text{ids: make([]byte, 1<<16)})
	if ids := made.Text.IDs; ids.Data != nil || ids.Ref == nil || ids.Ref.Size != 1<<16 {
		t.Errorf("ids: %d bytes inline, %+v", len(ids.Data), ids.Ref)
	}
	if mask := made.Text.Mask; mask.Ref != nil || len(mask.Data) != 1 {
		t.Errorf("mask: %+v", mask)
	}
	if data, err := x.Bus.GetBlob(t.Context(), *made.Text.IDs.Ref); err != nil || len(data) != 1<<16 {
		t.Errorf("%d bytes stored, %v", len(data), err)
	}
	cause := bus.Terminal(schemas.CodeFailed, &interaction.Fault{
		State: schemas.ConversationTimeout, Err: errors.New("no reply"),
	})
	if f := record.Failed(cause); f.Text.Conversation != schemas.ConversationTimeout {
		t.Errorf("conversation %q", f.Text.Conversation)
	}
}
