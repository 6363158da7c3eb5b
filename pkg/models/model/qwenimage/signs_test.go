package qwenimage_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
)

const signs = "../../../../deploy/models/signs"

// TestSigns_paintsLikeTheReference holds the shipped checkpoint against diffusers: the
// same folder, the same noise, 20 Euler steps with guidance 4.
func TestSigns_paintsLikeTheReference(t *testing.T) {
	meta := readMeta(t)
	for name, want := range meta.Signs.SHA256 {
		b, err := os.ReadFile(filepath.Join(signs, name))
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != want {
			t.Fatalf("%s is not the file that the goldens were made from: run make golden", name)
		}
	}
	start := time.Now()
	m, err := qwenimage.Open(signs, qwenimage.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("loaded in %v", time.Since(start))
	defer m.Close()

	g := openGoldens(t, "signs.safetensors")
	n := len(meta.Signs.Prompts)
	cond := append(encodeAll(t, m, meta.Signs.Prompts...), encodeAll(t, m, " ", " ")...)
	x := rows(g.floats("signs.first"), n)
	euler(t, m, x, g.floats("signs.sigmas"), cond, 4, 64, 128, nil)
	within(t, "last latents", flat(x), g.floats("signs.last"), runTolerance)
	compareImages(t, m, x, g, "signs.image", 64, 128)
}

// TestSigns_onTheReferenceDevice runs the shipped checkpoint in float64, with the same
// code of the networks: the CPU is within rounding of it, and so is diffusers.
func TestSigns_onTheReferenceDevice(t *testing.T) {
	meta := readMeta(t)
	g := openGoldens(t, "signs.safetensors")
	n := len(meta.Signs.Prompts)
	type result struct {
		embeds, velocity, last, pixels []float32
	}
	run := func(d tensor.Device) (r result) {
		m, err := qwenimage.Open(signs, qwenimage.Options{Options: model.Options{Device: d}})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		prompt := meta.Signs.Prompts[0]
		cond := encodeAll(t, m, prompt, " ")
		r.embeds = cond[0].Tensors[0].Data
		x := rows(g.floats("signs.first"), n)[:1]
		r.velocity = flat(velocities(t, m, x, []float32{0.7}, cond[:1], 64, 128))
		euler(t, m, x, g.floats("signs.sigmas"), cond, 4, 64, 128, nil)
		r.last = flat(x)
		if r.pixels, err = m.DecodePixels(t.Context(), x[0], media.ImageSize(64, 128)); err != nil {
			t.Fatal(err)
		}
		return r
	}
	c, err := cpu.NewDevice(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, want := run(c), run(reference.Device{})
	within(t, "embeddings", got.embeds, want.embeds, textTolerance)
	within(t, "velocity", got.velocity, want.velocity, velocityTolerance)
	within(t, "last latents", got.last, want.last, runTolerance)
	within(t, "pixels", got.pixels, want.pixels, runTolerance)
	within(t, "last latents of diffusers", rows(g.floats("signs.last"), n)[0], want.last, runTolerance)
}
