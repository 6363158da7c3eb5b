package integration_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
	"github.com/meander-rl/meander/schemas"
)

// poisoned is a model that panics at some prompts, and at decoding images of one width. At poisonVelocity it does so
// from the first call on that has a sample of another prompt as well.
type poisoned struct {
	model.Model
	company atomic.Bool
	ready   sync.WaitGroup // until all samples have begun
}

const (
	poisonEncode   = "a poison to encode"
	poisonVelocity = "a poison to denoise"
	poisonWidth    = 96
)

func (m *poisoned) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	if strings.HasPrefix(prompts[0], "a ") {
		m.ready.Done()
	}
	if prompts[0] == poisonEncode {
		panic("no such token")
	}
	return m.Model.Encode(ctx, prompts)
}

func (m *poisoned) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	of := func(prompt string) bool {
		return slices.ContainsFunc(rows, func(r model.Row) bool { return r.Conditioning.Prompt == prompt })
	}
	if of("a red fox") || of(poisonVelocity) {
		m.ready.Wait()
	}
	if of(poisonVelocity) && (m.company.Load() || of("a red fox")) {
		m.company.Store(true)
		panic("no such kernel")
	}
	return m.Model.Velocity(ctx, rows, size)
}

func (m *poisoned) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	if size.Width == poisonWidth {
		panic("no such size")
	}
	return m.Model.Decode(ctx, latents, size)
}

// Prompts at which the model panics fail, and take no sample of others with them: those have the digests of a run
// without poison.
func TestPoison(t *testing.T) {
	sequential(t)
	t.Parallel()
	bad := &poisoned{Model: synthetic.New()}
	family := synthetic.Family()
	family.Open = func(string, model.Options) (model.Model, error) { return bad, nil }
	w := start(t, func(c *config) { c.sampler.Models, c.sampler.Workers = []model.Family{family}, 1 })
	publish := func(run schemas.Run, prompts ...string) {
		for _, text := range prompts {
			p := &schemas.Prompt{
				UID: schemas.UID(strings.ReplaceAll(text, " ", "-")), Prompt: text, GroupSize: new(int64(2)),
				ImageSettings: schemas.ImageSettings{Height: new(int64(64)), Width: new(int64(64))},
				Seed:          new(int64(7)),
			}
			if text == "a poison to decode" {
				p.Width = new(int64(poisonWidth))
			}
			if r, err := w.client.Publish(t.Context(), run, p); err != nil || !r.Accepted {
				t.Fatalf("receipt %+v, %v", r, err)
			}
		}
	}
	bad.ready.Add(2)
	publish("calm", "a red fox")
	want := w.advantages(t, "calm", 1)["a-red-fox"]
	bad.ready.Add(8)
	publish("mixed", poisonVelocity, poisonEncode, "a poison to decode", "a red fox")
	got := w.advantages(t, "mixed", 4)
	if !bad.company.Load() {
		t.Error("the poison was never in one batch with the other prompt")
	}
	for uid, a := range got {
		status := schemas.StatusFailed
		if uid == "a-red-fox" {
			status = want.Status
		}
		if a.Status != status {
			t.Errorf("%s: %s, %s; want %s", uid, a.Status, a.Error, status)
		}
	}
	for i := range int64(2) {
		calm, err := w.client.Trajectory(t.Context(), "calm", "a-red-fox", i)
		if err != nil {
			t.Fatal(err)
		}
		mixed, err := w.client.Trajectory(t.Context(), "mixed", "a-red-fox", i)
		if err != nil {
			t.Fatal(err)
		}
		if mixed.StopReason != schemas.StopCompleted || mixed.ContentDigest != calm.ContentDigest ||
			mixed.Medium(schemas.KindImage).Digest != calm.Medium(schemas.KindImage).Digest {
			t.Errorf("sample %d: %s %s; its digests are not those of the run without poison", i, mixed.StopReason,
				mixed.Error)
		}
		for _, uid := range []schemas.UID{"a-poison-to-denoise", "a-poison-to-encode", "a-poison-to-decode"} {
			failed, err := w.client.Trajectory(t.Context(), "mixed", uid, i)
			if err != nil || failed.StopReason != schemas.StopFailed || !strings.Contains(failed.Error, "no such") {
				t.Errorf("%s: %+v, %v; want it failed by the panic", uid, failed, err)
			}
		}
	}
}
