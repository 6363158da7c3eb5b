package engine_test

import (
	"bytes"
	"errors"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// served is a network of which the backend alone is asked.
type served struct{ engine.Network }

func (served) Backend() string { return "vllm-1" }

// Weights of policies lie in a folder under names of their own, also two of one version, until they are removed.
func TestWeightsFolder(t *testing.T) {
	t.Parallel()
	if engine.NewWeightsFolder("", nil, nil) != nil {
		t.Error("a folder without a name")
	}
	f := engine.NewWeightsFolder(t.TempDir(), lora.Table{"layers.0.to_q": {4, 8}}, nil)
	zero := f.Modules.Zero()
	one, err := f.SaveAdapter(zero, "0123456789abcdef")
	other, otherErr := f.SaveAdapter(zero, "0123456789abcdef")
	if err = errors.Join(err, otherErr); err != nil || one == other ||
		!strings.HasPrefix(one, "meander-0123456789ab-") {
		t.Fatalf("%s and %s, %v", one, other, err)
	}
	if a, err := lora.Open(f.Path(one)); err != nil || len(a.Modules()) != 1 {
		t.Errorf("saved: %v", err)
	}
	if err := f.Remove(one); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(f.Path(one)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("removed: %v", err)
	}
	for says, c := range map[string]engine.Change{
		"takes adapters only": {Full: &lora.Full{}}, "adapter: 2; vllm-1 takes one": {Adapters: []lora.Weighted{zero, zero}},
		"changes nothing": {Adapters: []lora.Weighted{zero}},
	} {
		if _, err := f.Fit(served{}, c); !engine.Refused(err) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v; want a refusal with %q", err, says)
		}
	}
	f = nil
	if _, err := f.Fit(served{}, engine.Change{Adapters: []lora.Weighted{zero}}); !engine.Refused(err) {
		t.Errorf("servers that keep their weights: %v", err)
	}
}

// A canary has the digest and the length of what weights give; what is not finite, and a panic, refuses them.
func TestCanary(t *testing.T) {
	t.Parallel()
	c, err := engine.Canary("velocity", func() ([]float32, error) { return []float32{3, 4}, nil })
	if err != nil || c.Norm != 5 || len(c.Digest) != 64 {
		t.Errorf("%+v, %v", c, err)
	}
	_, err = engine.Canary("velocity", func() ([]float32, error) { return []float32{float32(math.NaN())}, nil })
	if !engine.Refused(err) {
		t.Errorf("not finite: %v", err)
	}
	if _, err = engine.Canary("velocity", func() ([]float32,
		error,
	) {
		panic("index out of range")
	}); !engine.Refused(err) {
		t.Errorf("a panic: %v", err)
	}
	if _, err = engine.Canary("v", func() ([]float32, error) { return nil, errors.New("later") }); err == nil ||
		engine.Refused(err) {
		t.Errorf("an error that may pass: %v", err)
	}
}

// Of several servers the log says which is not used, and of each that it is overloaded.
func TestServer_Hooks(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	h := engine.Server{Engine: "vllm=http://a,http://b"}.Hooks(zerolog.New(&log))
	h.Changed("a", errors.New("reset"))
	h.Changed("a", nil)
	h.Overloaded("b", 4, errors.New("429"))
	for _, says := range []string{"is not used", "is used again", "overloaded"} {
		if !strings.Contains(log.String(), says) {
			t.Errorf("%s; want %q", &log, says)
		}
	}
	if h := (engine.Server{Engine: "vllm=http://a"}).Hooks(zerolog.Nop()); h.Changed != nil {
		t.Error("of a single server both are said")
	}
}
