// Package scorer holds the reward functions: an image or a text and what was asked for in, a
// number out. The reward service fetches images and publishes; functions that need a
// network or a file of weights are in the folders below.
package scorer

import (
	"context"
	"errors"
	"fmt"
	"image"
	"maps"
	"slices"
)

// Input is what a scorer may look at.
type Input struct {
	// Image is the decoded sample; nil of a text. Pixels that are not opaque count as blended over
	// black.
	Image *image.NRGBA
	// Text is the sample of a language model; nil of an image.
	Text *Text
	// Prompt is the text the image was made for, or the last message that was answered.
	Prompt string
	// GroundTruth is what the sample is compared with, where a scorer compares.
	GroundTruth string
	// Params are options of the scorer; one it does not know is an error.
	Params map[string]string
}

// Result is the score of one sample.
type Result struct {
	// Value is the score, unless Err says why there is none.
	Value float64
	Err   error
	// Detail is what the scorer saw, for people, such as the text it read; at most MaxDetail
	// bytes.
	Detail string
	// Exact says of a reader whether the text it read is the target, white space and case aside; nil: it
	// reads no text.
	Exact *bool
}

// MaxDetail bounds Result.Detail in bytes.
const MaxDetail = 256

// Scorer is one reward function. It may be called concurrently.
type Scorer interface {
	// Name is the name it is asked for by.
	Name() string
	// Version changes when equal input may give another score.
	Version() string
	// Score rates an image, higher is better, never NaN or infinite.
	Score(ctx context.Context, in Input) (float64, error)
}

// Detailer is a Scorer that can say what it saw.
type Detailer interface {
	Scorer
	ScoreDetail(ctx context.Context, in Input) Result
}

// BatchScorer is a Scorer that does better with several images at once.
type BatchScorer interface {
	Scorer
	// MaxBatch is the most images it takes, at least 1.
	MaxBatch() int
	// ScoreBatch returns one result per input, in order.
	ScoreBatch(ctx context.Context, in []Input) []Result
}

// GroupScorer rates the samples of a group by each other, so it needs all of them.
type GroupScorer interface {
	Name() string
	Version() string
	// ScoreGroup returns one result for each of n samples, in order of sample_index. It asks
	// for them one after the other, and releases each before it asks for the next: all
	// images of a group need not fit in memory. An error is the result of its sample, and
	// the others are rated without it.
	ScoreGroup(ctx context.Context, n int, sample func(i int) (in Input, release func(), err error)) []Result
}

// ErrUnavailable is wrapped by errors that may pass: a program, a server or a worker
// does not answer now.
var ErrUnavailable = errors.New("not available now")

// New returns the scorer of a name; an unknown name is an error that lists them. OCR needs
// a program, and it is an error when that is not there. Diversity is a GroupScorer: see
// NewGroup.
func New(name string) (Scorer, error) {
	switch name {
	case Glyph:
		return newGlyph()
	case JPEGCompressibility:
		return jpegSize{name: name, sign: -1}, nil
	case JPEGIncompressibility:
		return jpegSize{name: name, sign: 1}, nil
	case OCR:
		return NewOCR(OCRConfig{})
	case Synthetic:
		return synthetic{}, nil
	}
	if s := newOfText(name); s != nil {
		return s, nil
	}
	if _, _, err := find(name); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("scorer %q does not rate samples one by one here", name)
}

// NewGroup returns the group scorer of a name; nil for the name of anything else.
func NewGroup(name string) GroupScorer {
	if name == Diversity {
		return diversity{}
	}
	return nil
}

// check refuses input that no scorer without parameters can take.
func check(ctx context.Context, in Input) error {
	if err := checkInput(ctx, in); err != nil {
		return err
	}
	if len(in.Params) > 0 {
		return fmt.Errorf("params: unknown name %q", slices.Sorted(maps.Keys(in.Params))[0])
	}
	return nil
}

// checkInput refuses what no function can rate.
func checkInput(ctx context.Context, in Input) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if in.Image == nil || in.Image.Rect.Empty() {
		return errors.New("no image")
	}
	return nil
}

// luma is the brightness of a pixel over black, 0 to 255*255*1000 (ITU-R BT.601 weights).
func luma(pix []uint8) uint32 {
	return (299*uint32(pix[0]) + 587*uint32(pix[1]) + 114*uint32(pix[2])) * uint32(pix[3])
}

// cut is s as at most MaxDetail bytes, cut between characters.
func cut(s string) string {
	if len(s) <= MaxDetail {
		return s
	}
	end := 0
	for i := range s {
		if i > MaxDetail {
			break
		}
		end = i
	}
	return s[:end]
}
