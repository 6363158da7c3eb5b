package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/sampler"
	"github.com/meander-rl/meander/services/verify"
)

const (
	signsFolder = "../deploy/models/signs"
	projection  = "transformer_blocks.0.attn.to_q"
)

// loraFile is a LoRA of one projection W [n, k] of rank r, drawn from a seed; value, where it is not 0, is
// the first number of lora_B.
func loraFile(t *testing.T, module string, n, k, r int, seed uint64, value float32) []byte {
	t.Helper()
	draw := rand.New(rand.NewPCG(seed, 1))
	matrix := func(name string, rows, columns int) safetensors.Tensor {
		x := make([]float32, rows*columns)
		for i := range x {
			if seed > 0 {
				x[i] = float32(0.05 * draw.NormFloat64())
			}
		}
		if name == "lora_B" && value != 0 {
			x[0] = value
		}
		m, err := safetensors.FloatTensor("base_model.model."+module+"."+name+".weight", tensor.F32,
			[]int{rows, columns}, x)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	var b bytes.Buffer
	if err := safetensors.Write(&b, []safetensors.Tensor{matrix("lora_A", r, k), matrix("lora_B", n, r)},
		nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func parsedLoRA(t *testing.T, file []byte) *lora.Adapter {
	t.Helper()
	a, err := lora.Parse("test", file, nil)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// signsPlane serves the model signs.
func signsPlane(t *testing.T, replicas int, change ...func(*pipeline.Config)) (*bustest.Plane, *client.Client,
	*schemas.Policy,
) {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Batch, config.Replicas = signsFolder, 2, replicas
	for _, change := range change {
		change(&config)
	}
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	peer := client.New(plane.Bus)
	var p *schemas.Policy
	bustest.Until(t, "the samplers are there", func() (err error) {
		if p, err = peer.Policy(t.Context(), schemas.Lineage{}); err != nil {
			return err
		}
		present, err := peer.Replicas(t.Context(), p)
		if err == nil && len(present) < replicas {
			err = fmt.Errorf("%d of %d samplers are present", len(present), replicas)
		}
		return err
	})
	return plane, peer, p
}

// widthOfSigns is the width of the transformer of signs.
func widthOfSigns(t *testing.T, b *bus.Bus, p *schemas.Policy) int {
	t.Helper()
	data, err := b.GetBlob(t.Context(), *p.Modules)
	if err != nil {
		t.Fatal(err)
	}
	table, err := lora.ParseTable(data)
	if err != nil || table[projection][0] == 0 {
		t.Fatalf("table %v, %v", table, err)
	}
	return table[projection][0]
}

// Weights are pushed while samples are made: none is lost or made twice, and each log-prob is recomputed
// exactly with the version that its step names.
func TestPolicy_PushedWhileSampling(t *testing.T) {
	if raceEnabled {
		t.Skip("the networks take minutes under the race detector")
	}
	t.Parallel()
	for _, rule := range schemas.SwapRules {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			plane, peer, base := signsPlane(t, 2)
			d := widthOfSigns(t, plane.Bus, base)
			ask := func(uid schemas.UID, samples int64) {
				if _, err := peer.Publish(t.Context(), "r1", &schemas.Prompt{
					UID: uid, Prompt: `a sign that says "fox"`, GroupSize: &samples,
					ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(6))},
					Seed:          new(int64(3)),
				}); err != nil {
					t.Fatal(err)
				}
			}
			ask("a", 8)
			bustest.Await(t, plane.Bus, 1, schemas.StreamTrajectories, schemas.TrajectoryFilter("r1", "a"))
			began := time.Now()
			pushed, err := peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, 7, 0)),
				client.Push{Rule: rule})
			if err != nil {
				t.Fatal(err)
			}
			replicas, err := peer.AwaitPolicy(t.Context(), pushed)
			if err != nil || len(replicas) != 2 {
				t.Fatalf("taken over by %+v, %v", replicas, err)
			}
			for _, r := range replicas {
				if r.Answer.State != schemas.AppliedApplied || r.Answer.WeightsDigest != pushed.WeightsDigest ||
					r.Answer.Canary == nil {
					t.Errorf("answered %+v", r.Answer)
				}
			}
			t.Logf("in use everywhere %v after it was pushed", time.Since(began))
			ask("b", 4)
			bustest.Await(t, plane.Bus, 2, schemas.StreamAdvantages, schemas.AdvantageSubject("r1", "*"))
			report, err := verify.Run(t.Context(), plane.Bus, "r1", verify.Options{Model: []string{signsFolder}})
			if err != nil || report.Trajectories != 12 || report.Versions != 1 || report.MaxRatio != 0 ||
				len(report.Mismatches) > 0 || report.Unproven != "" {
				t.Errorf("got %+v, %v", report, err)
			}
			for i := range int64(4) {
				made, err := peer.Trajectory(t.Context(), "r1", "b", i)
				if err != nil || made.PolicyVersionMin != 1 || made.WeightsDigest != pushed.WeightsDigest {
					t.Errorf("sample %d is of version %d, weights %.12s, %v", i, made.PolicyVersionMin,
						made.WeightsDigest, err)
				}
			}
		})
	}
}

// wrong is an adapter that no sampler can use.
type wrong struct {
	file   []byte
	parsed bool // the file alone is fine
	want   string
}

func wrongAdapters(t *testing.T, d int) map[string]wrong {
	t.Helper()
	file := func(module string, k, r int, value float32) []byte { return loraFile(t, module, d, k, r, 7, value) }
	return map[string]wrong{
		"truncated": {file(projection, d, 4, 0)[:4000], false, "truncated"},
		"NaN":       {file(projection, d, 4, float32(math.NaN())), false, "not finite"},
		"DoRA":      {file(projection+".lora_magnitude_vector", d, 4, 0), false, "DoRA changes the norms"},
		"module":    {file("blocks.0.q", d, 4, 0), true, "module blocks.0.q: the transformer has none"},
		"shape":     {file(projection, d+1, 4, 0), true, "module " + projection},
		"nothing":   {loraFile(t, projection, d, d, 4, 0, 0), true, "changes nothing"},
	}
}

// What no sampler could use is refused before it is stored; what is forged all the same is refused by
// the samplers, with the reason, and they go on with what they have.
func TestPolicy_Refused(t *testing.T) {
	sequential(t)
	t.Parallel()
	plane, peer, base := signsPlane(t, 1)
	d := widthOfSigns(t, plane.Bus, base)
	good := loraFile(t, projection, d, d, 4, 7, 0)
	// refused has a policy published, and all samplers refuse it.
	refused := func(name, want string, change func(p *schemas.Policy)) {
		t.Helper()
		current, err := peer.NewestPolicy(t.Context(), schemas.Lineage{})
		if err != nil {
			t.Fatal(err)
		}
		if change != nil {
			forged := *current
			forged.Adapter, forged.WeightsDigest, forged.BaseDigest = &schemas.PolicyAdapter{Scale: 1},
				base.WeightsDigest,
				base.BaseDigest
			change(&forged)
			forged.PolicyVersion, forged.Parent = current.PolicyVersion+1, &current.PolicyVersion
			if err := plane.SetPolicy(t.Context(), &forged, current); err != nil {
				t.Fatal(err)
			}
			current = &forged
		}
		replicas, err := peer.AwaitPolicy(t.Context(), current)
		if err != nil || len(replicas) == 0 {
			t.Fatalf("%s: %+v, %v", name, replicas, err)
		}
		for _, r := range replicas {
			if a := r.Answer; a == nil || a.State != schemas.AppliedRefused || !strings.Contains(a.Error, want) ||
				a.Serving != base.PolicyVersion || a.WeightsDigest != base.WeightsDigest {
				t.Errorf("%s: the sampler says %+v; want %q in it", name, a, want)
			}
		}
	}
	stored := func(data []byte) schemas.Ref {
		t.Helper()
		ref, err := plane.PutBlob(t.Context(), data)
		if err != nil {
			t.Fatal(err)
		}
		return ref
	}
	for name, c := range wrongAdapters(t, d) {
		a, err := lora.Parse("test", c.file, nil)
		if (err == nil) != c.parsed || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
		if _, is := errors.AsType[*client.RefusedError](pushedLoRA(t, peer, a)); c.parsed && !is {
			t.Errorf("%s: not refused", name)
		}
		refused(name, c.want, func(p *schemas.Policy) { p.Adapter.File = stored(c.file) })
	}
	right := lora.WeightsDigest(base.BaseDigest, lora.Weighted{Adapter: parsedLoRA(t, good), Weight: 1})
	refused("another digest of the weights", "weights_digest: "+base.WeightsDigest[:16],
		func(p *schemas.Policy) { p.Adapter.File = stored(good) })
	refused("another checkpoint", "base_digest: 00", func(p *schemas.Policy) {
		p.Adapter.File, p.WeightsDigest, p.BaseDigest = stored(good), right, strings.Repeat("0", 64)
	})
	refused("another size", "adapter.file", func(p *schemas.Policy) {
		p.Adapter.File, p.WeightsDigest = stored(good), right
		p.Adapter.File.Size--
	})
	refused("no such file", "adapter.file", func(p *schemas.Policy) {
		p.Adapter.File = schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("1", 64), Size: 100}
	})
	// What is too little for the weights can only be told by trying.
	if _, err := peer.PushPolicy(t.Context(), parsedLoRA(t, good), client.Push{Scale: 1e-30}); err != nil {
		t.Fatal(err)
	}
	refused("next to nothing", "canary", nil)
	checkFresh(t, peer, base, good)
}

// checkFresh pushes an adapter as training begins with it: it is the checkpoint where that is served, and a fault
// behind good, which changes something.
func checkFresh(t *testing.T, peer *client.Client, base *schemas.Policy, good []byte) {
	t.Helper()
	fresh := parsedLoRA(t, good)
	clear(fresh.Product(projection).B)
	p, err := peer.PushPolicy(t.Context(), fresh, client.Push{})
	if err != nil || p.WeightsDigest != base.BaseDigest || p.Adapter != nil {
		t.Fatalf("a fresh adapter: %+v, %v; want the checkpoint", p, err)
	}
	if p, err = peer.PushPolicy(t.Context(), parsedLoRA(t, good), client.Push{}); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.AwaitPolicy(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if _, is := errors.AsType[*client.RefusedError](pushedLoRA(t, peer, fresh)); !is {
		t.Error("an adapter that changes nothing is not refused behind one that did")
	}
}

// A sampler does not start with an adapter of its own that it cannot use. One that starts on a lane whose
// newest version cannot be used, takes the one before, and says so.
func TestPolicy_RefusedAtStart(t *testing.T) {
	sequential(t)
	t.Parallel()
	plane, peer, base := signsPlane(t, 1)
	d := widthOfSigns(t, plane.Bus, base)
	c := sampler.DefaultConfig()
	c.Model, c.Device = signsFolder, "cpu"
	for name, w := range wrongAdapters(t, d) {
		c.Adapter = filepath.Join(t.TempDir(), "adapter.safetensors")
		if err := os.WriteFile(c.Adapter, w.file, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := sampler.Run(t.Context(), c, plane.Bus, zerolog.Nop()); err == nil ||
			!strings.Contains(err.Error(), w.want) {
			t.Errorf("%s: %v; want %q in it", name, err, w.want)
		}
	}
	good := loraFile(t, projection, d, d, 4, 7, 0)
	if err := os.WriteFile(c.Adapter, good, 0o600); err != nil {
		t.Fatal(err)
	}
	c.AdapterScale = 0
	err := sampler.Run(t.Context(), c, plane.Bus, zerolog.Nop())
	if err == nil || !strings.Contains(err.Error(), "changes nothing") {
		t.Errorf("scale 0: %v; want it refused as a push of it is", err)
	}
	c.AdapterScale = 1
	if now, err := peer.Policy(t.Context(), schemas.Lineage{}); err != nil || now.PolicyVersion != base.PolicyVersion {
		t.Errorf("version %d, %v; want that of before", now.PolicyVersion, err)
	}
	pushed, err := peer.PushPolicy(t.Context(), parsedLoRA(t, good), client.Push{})
	if err != nil {
		t.Fatal(err)
	}
	gone := *pushed
	gone.Adapter = &schemas.PolicyAdapter{Scale: 1, File: schemas.Ref{
		Bucket: schemas.BlobBucket, Digest: strings.Repeat("1", 64), Size: 100,
	}}
	gone.WeightsDigest, gone.PolicyVersion, gone.Parent = "gone", pushed.PolicyVersion+1, &pushed.PolicyVersion
	if _, err := peer.AwaitPolicy(t.Context(), pushed); err != nil {
		t.Fatal(err)
	}
	if err := plane.SetPolicy(t.Context(), &gone, pushed); err != nil {
		t.Fatal(err)
	}
	c.Adapter = ""
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, c, b, zerolog.Nop()) })
	bustest.Until(t, "both have answered", func() error {
		replicas, err := peer.AwaitPolicy(t.Context(), &gone)
		if err == nil && len(replicas) < 2 {
			err = fmt.Errorf("%d samplers", len(replicas))
		}
		for _, r := range replicas {
			if r.Answer.State != schemas.AppliedRefused || r.Answer.Serving != pushed.PolicyVersion ||
				r.Answer.WeightsDigest != pushed.WeightsDigest {
				t.Errorf("answered %+v; want that it goes on with version %d", r.Answer, pushed.PolicyVersion)
			}
		}
		return err
	})
}

// A version that every sampler has refused is never what the lane serves, not by a restart and not by a rollback, and a
// prompt that waits for it says so. The checkpoint can always be gone back to.
func TestPolicy_RefusedIsNeverCurrent(t *testing.T) {
	sequential(t)
	t.Parallel()
	plane, peer, base := signsPlane(t, 1)
	d := widthOfSigns(t, plane.Bus, base)
	refused, err := peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, 7, 3e38)),
		client.Push{})
	if err != nil {
		t.Fatal(err)
	}
	answered := func(p *schemas.Policy, samplers int, state string, serving int64) {
		t.Helper()
		bustest.Until(t, "the samplers have answered", func() error {
			replicas, err := peer.AwaitPolicy(t.Context(), p)
			if err == nil && len(replicas) < samplers {
				err = fmt.Errorf("%d samplers", len(replicas))
			}
			for _, r := range replicas {
				if a := r.Answer; a == nil || a.State != state || a.Serving != serving {
					t.Fatalf("version %d: answered %+v; want %s, and version %d in use", p.PolicyVersion, a, state,
						serving)
				}
			}
			return err
		})
	}
	answered(refused, 1, schemas.AppliedRefused, base.PolicyVersion)
	if now, err := peer.Policy(t.Context(), schemas.Lineage{}); err != nil || now.PolicyVersion != base.PolicyVersion {
		t.Errorf("the lane serves version %d, %v; want %d", now.PolicyVersion, err, base.PolicyVersion)
	}
	_, err = peer.RollbackPolicy(t.Context(), refused.PolicyVersion, client.Push{})
	if _, is := errors.AsType[*client.RefusedError](err); !is || !strings.Contains(err.Error(),
		"version: 1; was refused by the samplers (canary: ") {
		t.Errorf("back to a version that was refused: %v", err)
	}
	waits := &schemas.Prompt{
		UID: "u", Prompt: "a red fox", GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(1))},
		Routing:       schemas.Routing{MinPolicyVersion: new(int64(1))},
	}
	bustest.Until(t, "intake has said what a prompt waits for", func() error {
		wait, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		_, err := peer.Publish(wait, "r", waits)
		if held, is := errors.AsType[*client.HeldError](err); is && !strings.Contains(held.Reason,
			"min_policy_version: 1; refused by the samplers") {
			t.Fatalf("a prompt for a version that was refused: %v", err)
		} else if !is {
			return fmt.Errorf("a prompt for a version that was refused: %w", err)
		}
		return nil
	})
	c := sampler.DefaultConfig()
	c.Model, c.Device = signsFolder, "cpu"
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, c, b, zerolog.Nop()) })
	answered(refused, 2, schemas.AppliedRefused, base.PolicyVersion)
	back, err := peer.RollbackPolicy(t.Context(), base.PolicyVersion, client.Push{})
	if err != nil {
		t.Fatal(err)
	}
	answered(back, 2, schemas.AppliedApplied, back.PolicyVersion)
	if _, err := peer.Publish(t.Context(), "r", waits); err != nil {
		t.Errorf("with a later version: %v", err)
	}
}

// pushedLoRA pushes an adapter where there is one.
func pushedLoRA(t *testing.T, peer *client.Client, a *lora.Adapter) error {
	if a == nil {
		return nil
	}
	_, err := peer.PushPolicy(t.Context(), a, client.Push{})
	return err
}

// A sample that was ready when weights came, and waits for its turn, begins with them; the one whose turn it is ends on
// those that it began with.
func TestPolicy_WaitingForItsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Serve(t, defaults().run("intake"))
	c := resumeCase{name: "turn"}
	first, second := c.prompt(3), c.prompt(4)
	b := &brake{
		after: map[string]int{first.Prompt: 3}, taken: map[string]int{}, release: make(chan struct{}),
		goesOn: true, decodes: true,
	}
	cfg := resumeConfig(b, 1)
	counted := prometheus.NewRegistry()
	cfg.Metrics = counted
	w.sampler(t, cfg)
	publish(t, w, "r", first)
	b.holds(t, w, 1, 3)
	publish(t, w, "r", second)
	bustest.Until(t, "the second waits for its turn", func() error {
		if n := counter(t, counted, "joining_samples"); n != 1 {
			return fmt.Errorf("%g do", n)
		}
		return nil
	})
	base, err := w.client.Policy(t.Context(), schemas.Lineage{})
	if err != nil {
		t.Fatal(err)
	}
	next := *base
	next.PolicyVersion, next.Parent = base.PolicyVersion+1, &base.PolicyVersion
	if err := w.SetPolicy(t.Context(), &next, base); err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.AwaitPolicy(t.Context(), &next); err != nil {
		t.Fatal(err)
	}
	close(b.release)
	made := trajectories(t, w, "r", 2)
	for uid, want := range map[schemas.UID]int64{first.UID: base.PolicyVersion, second.UID: next.PolicyVersion} {
		tr := made[uid]
		steps, err := w.client.Steps(t.Context(), tr)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			if tr.PolicyVersionMin != want || tr.PolicyVersionMax != want || s.PolicyVersion != want {
				t.Fatalf("%s: versions %d to %d, step %d of %d; want %d", uid, tr.PolicyVersionMin, tr.PolicyVersionMax,
					s.StepIndex, s.PolicyVersion, want)
			}
		}
	}
}
