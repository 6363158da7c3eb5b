package model_test

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/model"
)

const signs = "../../deploy/models/signs"

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
	m, err := model.OpenQwenImage(signs, model.QwenImageOptions{})
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
	comparePictures(t, m, x, g, "signs.image", 64, 128)
}
