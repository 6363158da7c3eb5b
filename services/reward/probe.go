package reward

import (
	"context"
	"errors"
	"image"
	"maps"
	"slices"
	"sync"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

// Probed is the outcome of trying a reward function.
type Probed struct {
	Name string
	// Configured says that the scorers file names it.
	Configured bool
	// Err is why there is no score; nil: there is one.
	Err error
}

// Probe tries each reward function that a service with these settings has, on a small grey image or, if it rates only
// videos or texts, on three such frames or a short text. ctx bounds the wait for servers and workers; functions of this
// program, which only a busy machine slows down, have local. nc is for functions whose workers are on
// NATS; with nil these fail. The error is a fault in the settings or in the scorers file.
func Probe(ctx, local context.Context, cfg Config, nc *nats.Conn) ([]Probed, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	c, err := openCatalog(cfg, nc, newInstruments(nil), nil, zerolog.Nop())
	if err != nil {
		return nil, err
	}
	defer c.close()
	grey := image.NewNRGBA(image.Rect(0, 0, 128, 64))
	for i := range grey.Pix {
		grey.Pix[i] = 128 | uint8(i%4/3*127) // opaque
	}
	file, err := media.EncodePNG(grey)
	black, err2 := media.EncodePNG(image.NewNRGBA(grey.Rect))
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	in := scorer.Input{
		Media: media.Of(grey), Prompt: `a grey sign that says "A"`, GroundTruth: "A",
		Conditions: []scorer.Condition{
			{Name: "image", Type: "image", File: file},
			{Name: "mask", Type: "mask", File: black},
		},
	}
	names := slices.Sorted(maps.Keys(c.entries))
	out := make([]Probed, len(names))
	var all sync.WaitGroup
	for i, name := range names {
		out[i] = Probed{Name: name, Configured: !slices.Contains(scorer.Names(), name)}
		of := in
		switch {
		case scorer.OfText(name):
			of = textInput()
		case scorer.CheckMedium(name, scorer.MediumImage) != nil:
			of.Media = media.Media{
				Frames: []*image.NRGBA{grey, grey, grey},
				Sound:  media.Sound{Values: []float32{0.5, -0.5}, Channels: 1, Rate: 2},
			}
		}
		within := local
		if out[i].Configured {
			within = ctx
		}
		all.Go(func() { _, out[i].Err = c.entries[name].scorer.Score(within, of) })
	}
	all.Wait()
	for _, name := range slices.Sorted(maps.Keys(c.missing)) {
		out = append(out, Probed{Name: name, Err: c.missing[name]})
	}
	return out, nil
}

// textInput returns what Probe tries functions of texts on: an answer of a language model of one token, with
// everything that such functions look at.
func textInput() scorer.Input {
	score := 1.0
	return scorer.Input{Prompt: "2+2=?", GroundTruth: "4", Text: &scorer.Text{
		Messages: []scorer.Message{{Role: "user", Content: "2+2=?"}}, Answer: "4", TurnScores: []*float64{&score},
		Entropies: []float32{0.5}, TopLogProbs: []float32{-0.2}, LogProbs: []float32{-0.2}, Vocabulary: 64,
		TopLogits: func(_ context.Context, k int) (logits [][]float32, lse []float32, err error) {
			return [][]float32{make([]float32, k)}, []float32{5}, nil // each token has the probability exp(-5)
		},
	}}
}
