package integration_test

import (
	"bytes"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/schemas"
)

// A checkpoint that is not shaped like the published ones: its autoencoder halves an image
// twice, so that sizes are multiples of 8, and its schedule has a static shift, under which
// the pipeline of diffusers takes 1, 3/4, 1/2, 1/4. Its prompt is empty.
func TestFamily_OtherShape(t *testing.T) {
	t.Parallel()
	dir := checkpoint.Dir(t, checkpoint.Config{Mult: []int{1, 1, 2}})
	if err := os.WriteFile(filepath.Join(dir, "scheduler", "scheduler_config.json"),
		[]byte(`{"shift": 3.0, "use_dynamic_shifting": false}`), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(c *config) { c.sampler.Model = dir })
	prompt := func(height int64) *schemas.Prompt {
		return &schemas.Prompt{
			UID: "u", GroupSize: new(int64(2)),
			ImageSettings: schemas.ImageSettings{Height: &height, Width: new(int64(40))},
			Reward:        []schemas.RewardSpec{{Name: "jpeg_compressibility"}},
		}
	}
	if _, err := w.client.Publish(t.Context(), "refused", prompt(20)); err == nil ||
		!strings.HasSuffix(err.Error(), `height: 20; must be a multiple of 8 for model "tiny", such as 16 or 24`) {
		t.Errorf("a height of 20: %v; want it refused with the sizes near it", err)
	}
	p := prompt(24)
	p.UID = "v"
	if r, err := w.client.Publish(t.Context(), "r", p); err != nil || !r.Accepted {
		t.Fatalf("a height of 24: %+v, %v", r, err)
	}
	if a := w.advantages(t, "r", 1)["v"]; a == nil || a.Status != schemas.StatusComplete {
		t.Fatalf("advantage %+v", a)
	}
	tr, err := w.client.Trajectory(t.Context(), "r", "v", 1)
	if err != nil {
		t.Fatal(err)
	}
	if want := []float32{1000, 900, 750, 500, 0}; !slices.Equal(tr.Timesteps, want) ||
		!slices.Equal(tr.LatentsShape, []int64{15, 64}) || tr.Prompt != "" {
		t.Errorf("prompt %q, timesteps %v, latents %v; want none, %v and [15 64]", tr.Prompt, tr.Timesteps,
			tr.LatentsShape,
			want)
	}
	data, err := w.client.Medium(t.Context(), tr, schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	if img, err := png.Decode(bytes.NewReader(data)); err != nil || img.Bounds().Dx() != 40 || img.Bounds().Dy() != 24 {
		t.Errorf("image %v, %v; want 40x24", img.Bounds(), err)
	}
}
