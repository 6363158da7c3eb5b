package images

import (
	"context"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// Given evaluates a model at the stored states of a sample. One goroutine at a time may use it.
type Given struct {
	Velocities *Velocities
	Sampling   *schemas.Sampling
	// Conditionings are the encoded prompt and, under guidance, the encoded negative prompt (Encode).
	Conditionings []*model.Conditioning
}

// Velocity returns the output [S, C] of the model, with guidance, at a point. The error is the model's, or of ctx.
func (g Given) Velocity(ctx context.Context, at Point) ([]float32, error) {
	var negative *model.Conditioning
	if len(g.Conditionings) == 2 {
		negative = g.Conditionings[1]
	}
	at.Dst = make([]float32, len(at.X))
	row := RowOf(g.Sampling, g.Conditionings[0], negative, at)
	faults, err := g.Velocities.Eval(ctx, []GuidedRow{row}, sampling.SizeOf(g.Sampling))
	if err == nil {
		err = faults[0]
	}
	return row.Dst, err
}

// CheckLatents refuses a sample whose latents do not have the shape that a model of this card would make.
func CheckLatents(c model.Card, t *schemas.Trajectory) error {
	tokens, err := c.Tokens(sampling.SizeOf(&t.Sampling))
	if err != nil {
		return err
	}
	if want := []int64{int64(tokens), int64(c.LatentChannels)}; !slices.Equal(t.LatentsShape, want) {
		return fmt.Errorf("latents_shape: %v; the model has %v", t.LatentsShape, want)
	}
	tracks, err := Tracks(&c, tokens)
	same := func(a, b schemas.Track) bool { return a.Same(&b) }
	if err == nil && !slices.EqualFunc(t.Tracks, tracks, same) {
		return fmt.Errorf("tracks: %v; the model has %v", t.Tracks, tracks)
	}
	return err
}

// Tracks returns the parts of a state of some tokens; nil: it has one. The model's card has them for one size: a state
// of another size is an error.
func Tracks(c *model.Card, tokens int) ([]schemas.Track, error) {
	if c.Pipeline == nil || len(c.Pipeline.Tracks) < 2 {
		return nil, nil
	}
	var tracks []schemas.Track
	sum := 0
	for _, t := range c.Pipeline.Tracks {
		track := schemas.Track{Name: t.Name, Elements: int64(t.Elements)}
		for _, d := range t.Shape {
			track.Shape = append(track.Shape, int64(d))
		}
		if err := schemas.CheckFields(&track); err != nil {
			return nil, fmt.Errorf("pipeline.tracks: %w", err)
		}
		tracks = append(tracks, track)
		sum += t.Elements
	}
	if n := tokens * c.LatentChannels; sum != n {
		return nil, fmt.Errorf("height, width and frames: a state of %d elements; must be the default size of %s, "+
			"whose tracks have %d in all", n, c.Pipeline.Class, sum)
	}
	return tracks, nil
}
