package integration_test

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// transformer is that of signs, changed, in so many files.
func transformer(t *testing.T, shards int,
	change func(list []safetensors.Tensor) []safetensors.Tensor,
) (files [][]byte) {
	t.Helper()
	a, err := safetensors.Open(signsFolder + "/transformer/diffusion_pytorch_model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var list []safetensors.Tensor
	for _, name := range a.Names() {
		info, _ := a.Info(name)
		data, err := a.Bytes(name)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, safetensors.Tensor{
			Name: name, DType: info.DType, Shape: info.Shape, Data: bytes.Clone(data),
		})
	}
	list = change(list)
	for part := range slices.Chunk(list, (len(list)+shards-1)/shards) {
		var b bytes.Buffer
		if err := safetensors.Write(&b, part, nil); err != nil {
			t.Fatal(err)
		}
		files = append(files, b.Bytes())
	}
	return files
}

// set gives the first elements of a tensor other values.
func set(t *testing.T, name string, values ...float32) func([]safetensors.Tensor) []safetensors.Tensor {
	return func(list []safetensors.Tensor) []safetensors.Tensor {
		t.Helper()
		i := slices.IndexFunc(list, func(x safetensors.Tensor) bool { return x.Name == name })
		if i < 0 {
			t.Fatalf("no tensor %s", name)
		}
		copy(list[i].Data, list[i].DType.AppendFloats(nil, values))
		return list
	}
}

// fullPlane serves signs with one sampler.
type fullPlane struct {
	*bustest.Plane
	peer *client.Client
	base *schemas.Policy
	made int
}

func newFullPlane(t *testing.T, change ...func(*pipeline.Config)) *fullPlane {
	t.Helper()
	plane, peer, base := signsPlane(t, 1, change...)
	return &fullPlane{Plane: plane, peer: peer, base: base}
}

// weight is a tensor of the transformer.
const weight = projection + ".weight"

func (f *fullPlane) push(t *testing.T, files ...[]byte) (*schemas.Policy, error) {
	t.Helper()
	full, err := lora.ParseFull(files...)
	if err != nil {
		t.Fatal(err)
	}
	return f.peer.PushWeights(t.Context(), full, client.Push{})
}

// taken is the sampler's answer.
func (f *fullPlane) taken(t *testing.T, p *schemas.Policy) *schemas.Applied {
	t.Helper()
	replicas, err := f.peer.AwaitPolicy(t.Context(), p)
	if err != nil || len(replicas) != 1 || replicas[0].Answer == nil {
		t.Fatalf("version %d: %+v, %v", p.PolicyVersion, replicas, err)
	}
	return replicas[0].Answer
}

// sample makes one with a version.
func (f *fullPlane) sample(t *testing.T, uid schemas.UID, p *schemas.Policy) {
	t.Helper()
	if _, err := f.peer.Publish(t.Context(), "r", &schemas.Prompt{
		UID: uid, Prompt: `a sign that says "FOX"`, GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(3))},
		Routing:       schemas.Routing{MinPolicyVersion: &p.PolicyVersion},
	}); err != nil {
		t.Fatal(err)
	}
	f.made++
	bustest.Await(t, f.Bus, f.made, schemas.StreamTrajectories, schemas.TrajectoryFilter("r", "*"))
	tr, err := f.peer.Trajectory(t.Context(), "r", uid, 0)
	if err != nil || tr.WeightsDigest != p.WeightsDigest {
		t.Fatalf("%s: weights %.12s, %v; want %.12s", uid, tr.WeightsDigest, err, p.WeightsDigest)
	}
}

// A whole transformer is a version like any other: taken over by the samplers, in one file or in shards, proved by
// verify, gone back to.
func TestPolicy_FullWeights(t *testing.T) {
	sequential(t)
	t.Parallel()
	f := newFullPlane(t)
	one, err := f.push(t, transformer(t, 1, set(t, weight, 0.25, -0.5, 0.75))...)
	if err != nil {
		t.Fatal(err)
	}
	first := f.taken(t, one)
	if first.State != schemas.AppliedApplied || one.Adapter != nil || len(one.Weights) != 1 ||
		one.BaseDigest != f.base.BaseDigest {
		t.Fatalf("%+v of %+v", first, one)
	}
	f.sample(t, "one", one)
	shards, err := f.push(t, transformer(t, 3, set(t, weight, 0.5))...)
	if err != nil || len(shards.Weights) != 3 || f.taken(t, shards).State != schemas.AppliedApplied {
		t.Fatalf("%+v, %v", shards, err)
	}
	f.sample(t, "shards", shards)
	d := widthOfSigns(t, f.Bus, f.base)
	adapter, err := f.peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, 7, 0)), client.Push{})
	if err != nil || adapter.Weights != nil || f.taken(t, adapter).State != schemas.AppliedApplied {
		t.Fatalf("an adapter of the checkpoint: %+v, %v", adapter, err)
	}
	back, err := f.peer.RollbackPolicy(t.Context(), one.PolicyVersion, client.Push{})
	if err != nil || back.WeightsDigest != one.WeightsDigest || back.Adapter != nil {
		t.Fatalf("%+v, %v", back, err)
	}
	if a := f.taken(t, back); a.State != schemas.AppliedApplied || *a.Canary != *first.Canary {
		t.Errorf("gone back to: %+v, canary %+v; want %+v", a, a.Canary, first.Canary)
	}
	f.sample(t, "back", back)
	report, err := verify.Run(t.Context(), f.Bus, "r", verify.Options{Model: []string{signsFolder}})
	if err != nil || report.Trajectories != f.made || report.Versions != 2 || report.MaxRatio != 0 ||
		len(report.Mismatches) > 0 || report.Unproven != "" {
		t.Errorf("verify: %+v, %v", report, err)
	}
}

// What does not fit is refused by name before it is stored, and by samplers all the same.
func TestPolicy_FullWeightsRefused(t *testing.T) {
	sequential(t)
	t.Parallel()
	f := newFullPlane(t)
	d := widthOfSigns(t, f.Bus, f.base)
	whole := func(list []safetensors.Tensor) []safetensors.Tensor { return list }
	for name, c := range map[string]struct {
		files [][]byte
		want  string
	}{
		"missing": {
			transformer(t, 1, func(list []safetensors.Tensor) []safetensors.Tensor { return list[1:] }),
			"1 tensors missing",
		},
		"unexpected": {transformer(t, 1, func(list []safetensors.Tensor) []safetensors.Tensor {
			return append(list, safetensors.Tensor{
				Name: "zzz", DType: tensor.F32, Shape: []int{1}, Data: make([]byte, 4),
			})
		}), "1 tensors unexpected: zzz"},
		"shape": {transformer(t, 1, func(list []safetensors.Tensor) []safetensors.Tensor {
			list[0].Shape = append([]int{1}, list[0].Shape...)
			return list
		}), "1 tensors of another shape"},
		"NaN":     {transformer(t, 1, set(t, weight, float32(math.NaN()))), "1 tensors not finite: " + weight},
		"adapter": {[][]byte{loraFile(t, projection, d, d, 4, 7, 0)}, "tensors missing"},
		"a shard": {transformer(t, 2, whole)[:1], "tensors missing"},
	} {
		p, err := f.push(t, c.files...)
		if _, refused := errors.AsType[*client.RefusedError](err); !refused || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %q in it", name, p, err, c.want)
		}
		current, err := f.peer.NewestPolicy(t.Context(), schemas.Lineage{})
		if err != nil {
			t.Fatal(err)
		}
		forged := *current
		forged.Weights, forged.Adapter, forged.WeightsDigest, forged.Rollback = nil, nil, "forged "+name, nil
		for _, file := range c.files {
			ref, err := f.PutBlob(t.Context(), file)
			if err != nil {
				t.Fatal(err)
			}
			forged.Weights = append(forged.Weights, schemas.FileOfBlob(ref))
		}
		forged.PolicyVersion, forged.Parent = current.PolicyVersion+1, &current.PolicyVersion
		if err := f.SetPolicy(t.Context(), &forged, current); err != nil {
			t.Fatal(err)
		}
		if a := f.taken(t, &forged); a.State != schemas.AppliedRefused || !strings.Contains(a.Error, c.want) {
			t.Errorf("%s: the sampler says %+v; want %q in it", name, a, c.want)
		}
	}
}
