// Package scorer holds the reward functions: a picture and what was asked for in, a
// number out. They are pure; the reward service fetches pictures and publishes.
package scorer

import (
	"context"
	"errors"
	"fmt"
	"image"
	"maps"
	"slices"
	"strings"
)

// Input is what a scorer may look at.
type Input struct {
	// Image is the decoded sample. Pixels that are not opaque count as blended over
	// black.
	Image *image.NRGBA
	// Prompt is the text the picture was made for.
	Prompt string
	// GroundTruth is what the picture is compared with, where a scorer compares.
	GroundTruth string
	// Params are options of the scorer; one it does not know is an error.
	Params map[string]string
}

// Scorer is one reward function. It may be called concurrently.
type Scorer interface {
	// Name is the name it is asked for by.
	Name() string
	// Version changes when equal input may give another score.
	Version() string
	// Score rates a picture, higher is better, never NaN or infinite.
	Score(ctx context.Context, in Input) (float64, error)
}

// Names lists the scorers, sorted.
func Names() []string {
	return []string{JPEGCompressibility, JPEGIncompressibility, Synthetic}
}

// New returns the scorer of a name; an unknown name is an error that lists them.
func New(name string) (Scorer, error) {
	switch name {
	case JPEGCompressibility:
		return jpegSize{name: name, sign: -1}, nil
	case JPEGIncompressibility:
		return jpegSize{name: name, sign: 1}, nil
	case Synthetic:
		return synthetic{}, nil
	}
	return nil, fmt.Errorf("scorer %q: want one of %s", name, strings.Join(Names(), ", "))
}

// check refuses input that no scorer without parameters can take.
func check(ctx context.Context, in Input) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if in.Image == nil || in.Image.Rect.Empty() {
		return errors.New("no picture")
	}
	if len(in.Params) > 0 {
		return fmt.Errorf("params: unknown name %q", slices.Sorted(maps.Keys(in.Params))[0])
	}
	return nil
}
