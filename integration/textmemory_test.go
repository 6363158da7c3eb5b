package integration_test

import (
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/schemas"
)

// A sampler has two vectors of logits of each of its samples in memory, the one that it draws from and the one that is
// on its way to be stored, and publish_window_mib of others: whatever answers come to, it stays below what
// ARCHITECTURE.md says. A soak has longer ones.
func TestMemory_FullLogits(t *testing.T) {
	measuresHeap(t)
	t.Parallel()
	const (
		vocabulary, window, samples = 151936, 16, 8
		// MiB; the last for weights and the program
		ceiling = window + 2*samples*2*4*vocabulary>>20 + 48
	)
	tokens := soak(t, 40, 400)
	c := assemble(t)
	server := []string{"--nats-url", c.Server.ClientURL(), "--health-addr", ""}
	model := babble(t, qwen2test.Random{
		Vocabulary: vocabulary, Width: 8, Layers: 1, Heads: 2, KVHeads: 1, MaxPositions: 512,
	})
	raise := func(name string, args ...string) *harness.Process {
		return harness.Raise(t, &harness.Process{
			Name: name, Path: program(t, name), Dir: t.TempDir(), Env: traceCollections(), Args: append(args, server...),
		})
	}
	raise("meander-intake")
	raise("meander-reward")
	raise("meander-advantage")
	sampler := raise("meander-sampler", "--model", model, "--batch", "8", "--workers", "1", "--publish-window-mib",
		"16")
	n := int64(tokens)
	_, err := c.client.Publish(limited(t), "r", &schemas.Prompt{
		UID: "g", Prompt: "2+2=?", GroupSize: new(int64(samples)), Reward: []schemas.RewardSpec{{Name: "confidence"}},
		Text: &schemas.Text{MaxNewTokens: &n, Logits: &schemas.Logits{Form: schemas.LogitsFull}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if a := advantages(t, c.client, "r", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Fatalf("%s: %s", a.Status, a.Error)
	}
	drawn := int64(0)
	for i := range int64(samples) {
		tr, err := c.client.Trajectory(t.Context(), "r", "g", i)
		if err != nil {
			t.Fatal(err)
		}
		drawn += tr.Text.Generated()
	}
	live := maxLiveMiB(t, sampler)
	t.Logf("%d vectors, %d MiB: %d MiB in use, ceiling %d", drawn, drawn*4*vocabulary>>20, live, ceiling)
	if drawn*4*vocabulary>>20 < 3*(window+32) {
		t.Errorf("only %d vectors; take another seed", drawn)
	}
	if live > ceiling {
		t.Errorf("%d MiB in use; must stay below %d", live, ceiling)
	}
}
