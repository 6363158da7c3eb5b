package integration_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler"
)

// A prompt that refers to a blob which is not there is refused before any sample is asked
// for; requests of which it is gone later fail at once, each for good, and hold up none
// of the others.
func TestLane_MissingLatents(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.config.sampler.Batch, c.config.sampler.Workers = 4, 1
	c.config.intake.Models = []schemas.Lane{"synthetic"}
	c.up(t, "sampler") // announces the model
	c.services(t, schemas.ServiceSampler, 1)
	c.serving["sampler"].Stop()
	c.standIn(t, "synthetic")
	c.up(t, "intake", "reward", "advantage")

	shape := []int64{128, 1, 64} // more than a sampler has in hand
	ref, err := c.PutBlob(t.Context(), make([]byte, 4*shape[0]*shape[1]*shape[2]))
	if err != nil {
		t.Fatal(err)
	}
	none := ref
	none.Digest = strings.Repeat("ab", 32)
	prompt := func(uid schemas.UID, ref schemas.Ref) *schemas.Prompt {
		return &schemas.Prompt{
			UID: uid, Prompt: "a red fox", GroupSize: new(shape[0]),
			ImageSettings: schemas.ImageSettings{
				Height: new(int64(16)), Width: new(int64(16)),
				Start: &schemas.Start{Latents: &schemas.Tensor{DType: "F32", Shape: shape, Ref: &ref}},
			},
		}
	}
	receipt, err := c.client.Publish(t.Context(), "r", prompt("none", none))
	if err == nil || receipt == nil || receipt.Code != schemas.CodeInvalid ||
		!strings.Contains(receipt.Error, "start.latents.ref: ") ||
		!strings.Contains(receipt.Error, "not found; must be a blob that was stored before the prompt") {
		t.Fatalf("receipt %+v, %v", receipt, err)
	}
	if _, err := c.client.Publish(t.Context(), "r", prompt("gone", ref)); err != nil {
		t.Fatal(err)
	}
	blobs, err := c.JetStream().ObjectStore(t.Context(), schemas.BlobBucket)
	if err != nil {
		t.Fatal(err)
	}
	if err := blobs.Delete(t.Context(), ref.Digest); err != nil {
		t.Fatal(err)
	}
	const good = 4
	for i := range good {
		if _, err := c.client.Publish(t.Context(), "r",
			oneImage(schemas.UID(fmt.Sprintf("good%d", i)), "")); err != nil {
			t.Fatal(err)
		}
	}
	c.up(t, "sampler")
	for uid, a := range c.advantages(t, "r", 2+good) {
		want := map[string]string{"none": schemas.StatusRefused, "gone": schemas.StatusFailed}[string(uid)]
		if strings.HasPrefix(string(uid), "good") {
			want = schemas.StatusComplete
		}
		if a.Status != want {
			t.Errorf("group %s is %s, want %s", uid, a.Status, want)
		}
	}
	for _, d := range bustest.Dead(t, c.Bus, 1+int(shape[0])) {
		if d.Code != schemas.CodeInvalid || !strings.HasPrefix(d.Reason, "start.latents.ref: ") {
			t.Fatalf("dead letter of %s: %s: %s", d.OriginalSubject, d.Code, d.Reason)
		}
	}
}

// A prompt that is too long for the model is no matter of trying again; cut when it says
// so, which its trajectories tell.
func TestLane_LongPrompt(t *testing.T) {
	t.Parallel()
	w := start(t, func(c *config) {
		c.sampler.Model = filepath.Join("..", "pkg", "models", "model", "qwenimage", "testdata", "golden", "full")
	})
	prompt := &schemas.Prompt{
		UID: "long", Prompt: strings.Repeat("a red fox, ", 200), GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{
			Height:            new(int64(16)),
			Width:             new(int64(16)),
			NumInferenceSteps: new(int64(2)), TrueCFGScale: new(1.0),
		},
	}
	if _, err := w.client.Publish(t.Context(), "r", prompt); err != nil {
		t.Fatal(err)
	}
	for _, d := range bustest.Dead(t, w.Bus, 2) {
		if d.Code != schemas.CodeInvalid || d.Deliveries > 2 ||
			!strings.Contains(d.Reason, "tokens; must be at most 512; shorten it, or set truncate_prompt") {
			t.Errorf("dead letter: %s after %d deliveries: %s", d.Code, d.Deliveries, d.Reason)
		}
	}
	prompt.UID, prompt.TruncatePrompt = "cut", true
	if _, err := w.client.Publish(t.Context(), "r", prompt); err != nil {
		t.Fatal(err)
	}
	for uid, a := range w.advantages(t, "r", 2) {
		if complete := a.Status == schemas.StatusComplete; complete != (uid == "cut") {
			t.Errorf("group %s is %s: %s", uid, a.Status, a.Error)
		}
	}
	tr, err := w.client.Trajectory(t.Context(), "r", "cut", 0)
	if err != nil || !tr.TruncatePrompt || tr.TruncatedTokens < 100 || tr.Prompt != prompt.Prompt {
		t.Errorf("trajectory %+v, %v", tr, err)
	}
}

// Requests are for the checkpoint that their lane had. A sampler of another one with the same name leaves them, and
// says
// so.
func TestLane_OtherCheckpoint(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	cfg, notes := sampler.DefaultConfig(), make(chan func() []string, 1)
	cfg.Model, cfg.Note = "synthetic", func(say func() []string) { notes <- say }
	p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return sampler.Run(ctx, cfg, b, zerolog.Nop()) })
	say := bustest.Receive(t, "the sampler is up", notes)
	mine, err := p.Policy(t.Context(), schemas.Lane("synthetic").Of(""))
	if err != nil {
		t.Fatal(err)
	}
	another := *mine
	another.BaseDigest = "another"
	for uid, policy := range map[schemas.UID]*schemas.Policy{"other": &another, "mine": mine} {
		prompt := &schemas.Prompt{
			UID: uid, Prompt: "a fox", GroupSize: new(int64(1)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(2))},
		}
		requests, err := intake.Resolve("r", prompt, policy, intake.Origin{
			Seq: 1, Created: time.Now(), Reward: []string{"synthetic"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Publish(t.Context(), requests[0]); err != nil {
			t.Fatal(err)
		}
	}
	want := fmt.Sprintf(`requests of lane "synthetic" wait for a sampler of the checkpoint another; this one has %.16s`,
		mine.BaseDigest)
	bustest.Until(t, "the sampler says what waits, and has made its own", func() error {
		if said := say(); len(said) != 1 || said[0] != want {
			return fmt.Errorf("the notes are %q; want %q", said, want)
		}
		_, err := p.Last(t.Context(), schemas.StreamTrajectories,
			schemas.TrajectorySubject("r", "mine", 0, schemas.StageMain))
		return err
	})
	if _, err := p.Last(t.Context(), schemas.StreamTrajectories, schemas.TrajectorySubject("r", "other",
		0, schemas.StageMain)); !errors.Is(err, bus.ErrNotFound) {
		t.Errorf("a sample of another checkpoint: %v", err)
	}
}
