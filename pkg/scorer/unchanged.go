package scorer

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/media"
)

// Unchanged rewards edits that leave alone what they must: 1 - mean |x - y| over the pixels where the condition mask
// is black, with x the channels of the sample and y those of the condition image, 0 black to 1 white. It is 1 where
// nothing but the masked part has changed, and 0 where black became white. It needs both conditions, of the sample's
// size, and no model. A mask without black is an error.
const Unchanged = "unchanged"

// Names and types of the conditions that Unchanged sees.
const (
	conditionImage = "image"
	conditionMask  = "mask"
)

type unchanged struct{}

func (unchanged) Name() string { return Unchanged }

func (unchanged) Version() string { return "1" }

func (unchanged) SeesConditions() {}

// Score compares an edited image with the one before. Params are errors.
func (unchanged) Score(ctx context.Context, in Input) (float64, error) {
	after, err := imageOf(ctx, in)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", Unchanged, err)
	}
	size := media.ImageSize(after.Rect.Dy(), after.Rect.Dx())
	before, err := in.condition(conditionImage, size)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", Unchanged, err)
	}
	mask, err := in.condition(conditionMask, size)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", Unchanged, err)
	}
	x, y := media.Of(after).RGB(), before.RGB()
	var sum, n int
	for i, m := range mask.Luma() {
		if m >= 128 {
			continue
		}
		n++
		for c := 3 * i; c < 3*i+3; c++ {
			sum += max(int(x[c])-int(y[c]), int(y[c])-int(x[c]))
		}
	}
	if n == 0 {
		return 0, fmt.Errorf("%s: mask: white alone; must have black, where nothing is to change", Unchanged)
	}
	return 1 - float64(sum)/float64(3*255*n), nil
}

// condition returns the first condition of a type, decoded. One of another size, or none, is an error.
func (in Input) condition(kind string, size media.Size) (media.Media, error) {
	for _, c := range in.Conditions {
		if c.Type != kind {
			continue
		}
		got, err := media.ReadInput(c.File)
		switch {
		case err != nil:
			return media.Media{}, fmt.Errorf("condition %s: %w", c.Name, err)
		case got != size:
			return media.Media{}, fmt.Errorf("condition %s: %v; must have the size of the sample, %v", c.Name, got,
				size)
		}
		return media.Decode(c.File, got)
	}
	return media.Media{}, fmt.Errorf("no condition of type %s; the prompt must have one", kind)
}
