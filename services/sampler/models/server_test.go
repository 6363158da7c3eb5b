package models

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// A server of images gets the card and the class of the model that is named, whose weights need not be there.
func TestServerKind_Image(t *testing.T) {
	known, refusal := Registry{Images: families.All()}, errors.New("another model")
	kind := serverKind{
		image: func(_ context.Context, s engine.Server, of images.ServedModel, _ zerolog.Logger) (engine.Network, error) {
			if s.Engine != "http://host" || of.Class != "QwenImagePipeline" || of.Card.LatentChannels != 64 {
				return nil, refusal
			}
			return &images.Served{}, nil
		},
	}
	dial := func(url, model string) (engine.Network, error) {
		return kind.dial(t.Context(), engine.Server{Engine: url}, known, model, zerolog.Nop())
	}
	const signs = "../../../deploy/models/signs"
	without := t.TempDir()
	if err := os.CopyFS(without, os.DirFS(signs)); err != nil {
		t.Fatal(err)
	}
	weights, err := filepath.Glob(filepath.Join(without, "*", "*.safetensors"))
	if err != nil || len(weights) == 0 {
		t.Fatal(err)
	}
	for _, file := range weights {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
	for _, folder := range []string{signs, without} {
		if n, err := dial("http://host", folder); n == nil || err != nil {
			t.Errorf("%s: %v", folder, err)
		}
	}
	for _, c := range []struct{ url, model, says string }{
		{"http://other", signs, refusal.Error()}, {"http://host", "none", "no such model"}, {
			"http://host",
			"synthetic", "no pipeline",
		},
	} {
		if n, err := dial(c.url, c.model); n != nil || err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s of %s: %v, %v; want %q", c.model, c.url, n, err, c.says)
		}
	}
}
