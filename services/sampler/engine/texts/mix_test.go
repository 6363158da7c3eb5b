package texts

import (
	"bytes"
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/enginetest"
)

// twoVersions are engines of a checkpoint with and without a LoRA, with a cache each.
func twoVersions(t *testing.T, cacheBytes int) []*tokenEngine {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "babble")
	if err := (qwen2test.Random{Seed: 3}).Write(dir); err != nil {
		t.Fatal(err)
	}
	m, err := families.All().Open(dir, lm.Options{Options: model.Options{Threads: 1}, CacheBytes: cacheBytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	const module, rank = "model.layers.0.mlp.down_proj", 2
	shape := m.(lora.Adaptable[lm.Model]).Modules()[module]
	var tensors []safetensors.Tensor
	for name, shape := range map[string][]int{"lora_A": {rank, shape[1]}, "lora_B": {shape[0], rank}} {
		x := make([]float32, shape[0]*shape[1])
		for i := range x {
			x[i] = float32(i%7-3) / 4
		}
		f, err := safetensors.FloatTensor(module+"."+name+".weight", tensor.F32, shape, x)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, f)
	}
	var file bytes.Buffer
	if err := safetensors.Write(&file, tensors, nil); err != nil {
		t.Fatal(err)
	}
	a, err := lora.Parse("test", file.Bytes(), nil)
	if err != nil {
		t.Fatal(err)
	}
	n, err := m.(lora.Adaptable[lm.Model]).Adapted(lora.Weighted{Adapter: a, Weight: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	return []*tokenEngine{newTokenEngine(m, false), newTokenEngine(n, false)}
}

// answers has samples answer, those of several engines in one call, and returns their tokens and faults.
func answers(t *testing.T, of ...*tokenEngine) (ids [][]int32, faults []error) {
	t.Helper()
	var episodes []engine.Episode
	for i, e := range of {
		req := &schemas.Request{Identity: schemas.Identity{
			Stage: schemas.StageMain, Run: "r", UID: "g", SampleIndex: int64(i),
		}, Sampling: schemas.Sampling{SampleSeed: uint64(i)}, Text: &schemas.TextRequest{
			Messages: []schemas.Message{{Role: "user", Content: "2+2=?"}}, MaxNewTokens: 100, Temperature: 1, TopP: 1,
			TokensPerEvent: 1, Vocabulary: int64(e.card.Vocabulary),
		}}
		req.ScheduleDigest = req.ComputeScheduleDigest()
		p, err := e.Start(t.Context(), req, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.(*tokenEpisode).Close() }()
		if len(episodes) > 0 && p.Bucket() != episodes[0].Bucket() {
			t.Errorf("sample %d is of another bucket", i)
		}
		episodes = append(episodes, p)
	}
	_, faults = enginetest.StepAll(t, of[0], episodes)
	for _, p := range episodes {
		ids = append(ids, p.(*tokenEpisode).ids)
	}
	return ids, faults
}

// Answers of two versions in one call are those of each alone. A full cache ends the youngest of its version, and no
// sample of the other.
func TestTokenEngine_MixesVersions(t *testing.T) {
	t.Parallel()
	e := twoVersions(t, 0)
	var want [][]int32
	for i := range 6 {
		each := slices.Repeat([]*tokenEngine{e[i%2]}, 6)
		ids, _ := answers(t, each...)
		want = append(want, ids[i])
	}
	got, faults := answers(t, e[0], e[1], e[0], e[1], e[0], e[1])
	if !slices.EqualFunc(got, want, slices.Equal) || errors.Join(faults...) != nil {
		t.Errorf("%v: %v\nwant %v", faults, got, want)
	}
	few := twoVersions(t, 1<<16)
	t.Logf("the cache has room for %d tokens; an answer has %d", few[0].card.CacheTokens, len(want[0]))
	of := []*tokenEngine{few[0], few[1], few[1], few[1], few[1], few[1]}
	for i := range of {
		ids, _ := answers(t, slices.Repeat([]*tokenEngine{e[min(i, 1)]}, i+1)...)
		want[i] = ids[i]
	}
	got, faults = answers(t, of...)
	full := 0
	for i, err := range faults {
		switch {
		case errors.Is(err, lm.ErrFull) && i > 1:
			full++
		case err != nil || !slices.Equal(got[i], want[i]):
			t.Errorf("sample %d: %v: %v, want %v", i, err, got[i], want[i])
		}
	}
	if full == 0 {
		t.Error("no cache was full, so this proves nothing")
	}
}
