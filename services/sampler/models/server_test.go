package models

import (
	"context"
	"errors"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// A server of images gets the model that is named, with its URL; a dial that fails closes the model.
func TestServerKind_Image(t *testing.T) {
	known, refusal := Registry{Images: families.All()}, errors.New("another model")
	kind := serverKind{
		image: func(_ context.Context, s engine.Server, m model.Model, _ zerolog.Logger) (engine.Network, error) {
			if s.URL != "http://host" {
				return nil, refusal
			}
			return &images.Network{Model: m}, nil
		},
	}
	dial := func(url, model string) (engine.Network, error) {
		return kind.dial(t.Context(), engine.Server{URL: url}, known, model, zerolog.Nop())
	}
	n, err := dial("http://host", "synthetic")
	if err != nil || n.Policy().Family != "synthetic" {
		t.Fatalf("%v, %v", n, err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if n, err := dial("http://other", "synthetic"); n != nil || !errors.Is(err, refusal) {
		t.Errorf("%v, %v; want %v", n, err, refusal)
	}
	if n, err := dial("http://host", "none"); n != nil || !errors.Is(err, model.ErrUnknown) {
		t.Errorf("%v, %v; want %v", n, err, model.ErrUnknown)
	}
}
