package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
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
		m, err := safetensors.FloatTensor("base_model.model."+module+"."+name+".weight", tensor.F32, []int{rows, columns}, x)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	var b bytes.Buffer
	if err := safetensors.Write(&b, []safetensors.Tensor{matrix("lora_A", r, k), matrix("lora_B", n, r)}, nil); err != nil {
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
func signsPlane(t *testing.T, replicas int) (*bustest.Plane, *client.Client, *schemas.Policy) {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	config.Sampler.Model, config.Sampler.Batch, config.Replicas = signsFolder, 2, replicas
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, config, zerolog.Nop()) })
	peer := client.New(plane.Bus)
	var p *schemas.Policy
	bustest.Until(t, "the samplers are there", func() (err error) {
		if p, err = peer.Policy(t.Context(), ""); err != nil {
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
					UID: uid, Prompt: `a sign that says "fox"`, GroupSize: &samples, NumInferenceSteps: new(int64(6)), Seed: new(int64(3)),
				}); err != nil {
					t.Fatal(err)
				}
			}
			ask("a", 8)
			bustest.Await(t, plane.Bus, 1, schemas.StreamTrajectories, schemas.TrajectoryFilter("r1", "a"))
			began := time.Now()
			pushed, err := peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, 7, 0)), client.Push{Rule: rule})
			if err != nil {
				t.Fatal(err)
			}
			replicas, err := peer.Taken(t.Context(), pushed)
			if err != nil || len(replicas) != 2 {
				t.Fatalf("taken over by %+v, %v", replicas, err)
			}
			for _, r := range replicas {
				if r.Answer.State != schemas.AppliedApplied || r.Answer.WeightsDigest != pushed.WeightsDigest || r.Answer.Canary == nil {
					t.Errorf("answered %+v", r.Answer)
				}
			}
			t.Logf("in use everywhere %v after it was pushed", time.Since(began))
			ask("b", 4)
			bustest.Await(t, plane.Bus, 2, schemas.StreamAdvantages, schemas.AdvantageSubject("r1", "*"))
			report, err := verify.Run(t.Context(), plane.Bus, "r1", verify.Options{Model: signsFolder})
			if err != nil || report.Trajectories != 12 || report.Versions != 1 || report.MaxRatio != 0 || len(report.Mismatches) > 0 || report.Unproven != "" {
				t.Errorf("got %+v, %v", report, err)
			}
			for i := range int64(4) {
				made, err := peer.Trajectory(t.Context(), "r1", "b", i)
				if err != nil || made.PolicyVersionMin != 1 || made.WeightsDigest != pushed.WeightsDigest {
					t.Errorf("sample %d is of version %d, weights %.12s, %v", i, made.PolicyVersionMin, made.WeightsDigest, err)
				}
			}
		})
	}
}

// What no sampler could use is refused before it is stored; what is forged all the same is refused by
// the samplers, with the reason, and they go on with what they have.
func TestPolicy_Refused(t *testing.T) {
	if raceEnabled {
		t.Skip("nothing is concurrent that is not so without")
	}
	t.Parallel()
	plane, peer, base := signsPlane(t, 1)
	d := widthOfSigns(t, plane.Bus, base)
	for name, c := range map[string]struct {
		file   []byte
		parsed bool // the file alone is fine
		want   string
	}{
		"truncated": {loraFile(t, projection, d, d, 4, 7, 0)[:4000], false, "truncated"},
		"NaN":       {loraFile(t, projection, d, d, 4, 7, float32(math.NaN())), false, "not finite"},
		"rank":      {loraFile(t, projection, d, d, d+1, 7, 0), false, "rank"},
		"module":    {loraFile(t, "blocks.0.q", d, d, 4, 7, 0), true, "module blocks.0.q: the transformer has none"},
		"shape":     {loraFile(t, projection, d, d+1, 4, 7, 0), true, "module " + projection},
		"nothing":   {loraFile(t, projection, d, d, 4, 0, 0), true, "canary"},
	} {
		a, err := lora.Parse("test", c.file, nil)
		if (err == nil) != c.parsed || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q in it", name, err, c.want)
		}
		if _, refused := errors.AsType[*client.RefusedError](pushedLoRA(t, peer, a)); c.parsed && name != "nothing" && !refused {
			t.Errorf("%s: not refused", name)
		}
		current, err := peer.Policy(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		if name != "nothing" { // which can only be told by trying
			forged := *current
			ref, err := plane.PutBlob(t.Context(), c.file)
			if err != nil {
				t.Fatal(err)
			}
			forged.Adapter, forged.WeightsDigest = &schemas.PolicyAdapter{File: ref, Scale: 1}, ref.Digest
			forged.PolicyVersion, forged.Parent = current.PolicyVersion+1, &current.PolicyVersion
			if err := plane.SetPolicy(t.Context(), &forged, current); err != nil {
				t.Fatal(err)
			}
			current = &forged
		}
		replicas, err := peer.Taken(t.Context(), current)
		if err != nil || len(replicas) != 1 || replicas[0].Answer == nil {
			t.Fatalf("%s: %+v, %v", name, replicas, err)
		}
		if a := replicas[0].Answer; a.State != schemas.AppliedRefused || !strings.Contains(a.Error, c.want) || a.Serving != base.PolicyVersion || a.WeightsDigest != base.WeightsDigest {
			t.Errorf("%s: the sampler says %+v; want %q in it", name, a, c.want)
		}
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
