package reward

import (
	"context"
	"image"
	"maps"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/scorer"
)

// Probed is what a reward function made of a small image.
type Probed struct {
	Name string
	// Configured says that it stands in the file of scorers: somebody wants it.
	Configured bool
	// Err is why there is no score; nil: there is one.
	Err error
}

// Probe asks each function that a service with these settings has for the score of a small grey image, or of
// a short text where it rates texts, until ctx ends. nc is for functions whose workers are on NATS; nil: they
// fail. The error is one of the settings, or of the file of scorers.
func Probe(ctx context.Context, cfg Config, nc *nats.Conn) ([]Probed, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c, err := openCatalog(cfg, nc, newInstruments(nil), nil, zerolog.Nop())
	if err != nil {
		return nil, err
	}
	defer c.close()
	in := scorer.Input{Image: image.NewNRGBA(image.Rect(0, 0, 128, 64)), Prompt: `a grey sign that says "A"`, GroundTruth: "A"}
	for i := range in.Image.Pix {
		in.Image.Pix[i] = 128 | uint8(i%4/3*127) // opaque
	}
	names := slices.Sorted(maps.Keys(c.entries))
	out := make([]Probed, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		out[i] = Probed{Name: name, Configured: !slices.Contains(scorer.Names(), name)}
		of := in
		if scorer.OfText(name) {
			of = sum()
		}
		all.Go(func() { _, out[i].Err = c.entries[name].scorer.Score(ctx, of) })
	}
	all.Wait()
	for _, name := range slices.Sorted(maps.Keys(c.missing)) {
		out = append(out, Probed{Name: name, Err: c.missing[name]})
	}
	return out, nil
}

// sum is the answer of a language model, of one token, with all that functions of texts look at.
func sum() scorer.Input {
	score := 1.0
	return scorer.Input{Prompt: "2+2=?", GroundTruth: "4", Text: &scorer.Text{
		Messages: []scorer.Message{{Role: "user", Content: "2+2=?"}}, Answer: "4", TurnScores: []*float64{&score},
		Entropies: []float32{0.5}, TopLogProbs: []float32{-0.2}, LogProbs: []float32{-0.2}, Vocabulary: 64,
		TopLogits: func(_ context.Context, k int) (logits [][]float32, lse []float32, err error) {
			return [][]float32{make([]float32, k)}, []float32{5}, nil // of which each has the probability exp(-5)
		},
	}}
}
