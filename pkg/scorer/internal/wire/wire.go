// Package wire is what scorers that run elsewhere have in common: the sample that goes
// out, and the strict reading of numbers and texts that come back. A reply is somebody
// else's program speaking: every length in it is checked before anything is allocated,
// and what is no finite number is an error that shows it.
package wire

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/scorer"
)

// Version is the number of the protocol, "v" in requests and in replies over NATS.
const Version = 1

// Formats of an image.
const (
	PNG  = "png"
	JPEG = "jpeg"
)

// jpegQuality is high: the reward shall see the image, not the codec.
const jpegQuality = 95

// maxQuote bounds what an error shows of somebody else's text, in bytes.
const maxQuote = 200

// Sample is one image or text and what was asked for, as it is sent.
type Sample struct {
	Prompt      string            `json:"prompt" msgpack:"prompt"`
	GroundTruth string            `json:"ground_truth" msgpack:"ground_truth"`
	Params      map[string]string `json:"params" msgpack:"params"`
	// Image is a file of ImageFormat: base64 in JSON, a byte string in msgpack. Of a text both are absent.
	Image       []byte `json:"image,omitempty" msgpack:"image,omitempty"`
	ImageFormat string `json:"image_format,omitempty" msgpack:"image_format,omitempty"`
	// Text is an answer of a language model, Messages the conversation that it is to, and Trajectory the subject that the sample is
	// stored under, with its log-probs and logits. Of an image all are absent.
	Text       *string          `json:"text,omitempty" msgpack:"text,omitempty"`
	Messages   []scorer.Message `json:"messages,omitempty" msgpack:"messages,omitempty"`
	Trajectory string           `json:"trajectory,omitempty" msgpack:"trajectory,omitempty"`
}

// NewSample encodes a text, or an image in RGB, blended over black where it is not opaque.
func NewSample(in scorer.Input, format string) (Sample, error) {
	params := in.Params
	if params == nil {
		params = map[string]string{} // an empty map, never null: one case less for the other side
	}
	if x := in.Text; x != nil {
		return Sample{Prompt: in.Prompt, GroundTruth: in.GroundTruth, Params: params, Text: &x.Answer, Messages: x.Messages, Trajectory: x.Trajectory}, nil
	}
	if in.Image == nil || in.Image.Rect.Empty() {
		return Sample{}, errors.New("no image")
	}
	opaque := in.Image
	if !opaque.Opaque() {
		opaque = overBlack(opaque)
	}
	var file bytes.Buffer
	var err error
	if format == JPEG {
		err = jpeg.Encode(&file, opaque, &jpeg.Options{Quality: jpegQuality})
	} else {
		err = (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&file, opaque)
	}
	if err != nil {
		return Sample{}, fmt.Errorf("encode image: %w", err)
	}
	return Sample{Prompt: in.Prompt, GroundTruth: in.GroundTruth, Params: params, Image: file.Bytes(), ImageFormat: format}, nil
}

func overBlack(img *image.NRGBA) *image.NRGBA {
	out := image.NewNRGBA(img.Rect)
	for y := img.Rect.Min.Y; y < img.Rect.Max.Y; y++ {
		from, to := img.Pix[img.PixOffset(img.Rect.Min.X, y):], out.Pix[out.PixOffset(img.Rect.Min.X, y):]
		for i := 0; i < 4*img.Rect.Dx(); i += 4 {
			alpha := uint32(from[i+3])
			for c := range 3 {
				to[i+c] = uint8((uint32(from[i+c])*alpha + 127) / 255)
			}
			to[i+3] = 255
		}
	}
	return out
}

// Patience is how long a call may wait: timeout, or less when ctx ends before.
func Patience(ctx context.Context, timeout time.Duration) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(timeout, time.Until(deadline).Round(time.Millisecond))
	}
	return timeout
}

// CheckName refuses an instance of a scorer that no prompt could name.
func CheckName(name string) error {
	ok := name != "" && len(name) <= 64
	for i := range len(name) {
		c := name[i]
		ok = ok && ('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-')
	}
	if !ok {
		return fmt.Errorf("name: %s; must be 1 to 64 letters, digits, _ or -", Quote(name))
	}
	return nil
}

// CheckImage refuses a format of images that does not exist.
func CheckImage(format string) error {
	if format != PNG && format != JPEG {
		return fmt.Errorf("image: %q; must be %s or %s", format, PNG, JPEG)
	}
	return nil
}

// Number is a decoded value as a score: a finite number, or an error that shows what is
// there instead.
func Number(v any) (float64, error) {
	var x float64
	switch v := v.(type) {
	case float64:
		x = v
	case int64:
		x = float64(v)
	case uint64:
		x = float64(v)
	case json.Number:
		var err error
		if x, err = strconv.ParseFloat(v.String(), 64); err != nil {
			return 0, fmt.Errorf("%s: beyond 64-bit floats", Quote(v.String()))
		}
	default:
		return 0, fmt.Errorf("%s; must be a finite number", Show(v))
	}
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return 0, fmt.Errorf("%v; must be a finite number", x)
	}
	return x, nil
}

// Text is an optional text field: absent and null are "".
func Text(m map[string]any, key string) (string, error) {
	switch v := m[key].(type) {
	case nil:
		return "", nil
	case string:
		return v, nil
	default:
		return "", fmt.Errorf("%s: %s; must be a text", key, Show(v))
	}
}

// List is an optional list field with one item per sample: absent, null and the empty
// list are nil.
func List(m map[string]any, key string, samples int) ([]any, error) {
	switch v := m[key].(type) {
	case nil:
		return nil, nil
	case []any:
		if len(v) == 0 {
			return nil, nil
		}
		if len(v) != samples {
			return nil, fmt.Errorf("%s: %d items for %d samples", key, len(v), samples)
		}
		return v, nil
	default:
		return nil, fmt.Errorf("%s: %s; must be a list", key, Show(v))
	}
}

// Detail is text as a scorer.Result carries it: valid, and cut to its limit.
func Detail(text string) string {
	return cut(text, scorer.MaxDetail)
}

// Show describes a decoded value in an error.
func Show(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case string:
		return Quote(v)
	case []byte:
		return fmt.Sprintf("%d bytes", len(v))
	case []any:
		return fmt.Sprintf("a list of %d", len(v))
	case map[string]any:
		return "a map"
	default:
		return cut(fmt.Sprint(v), maxQuote)
	}
}

// Quote is the beginning of somebody else's text in quotes, control characters escaped.
func Quote(text string) string {
	if short := cut(text, maxQuote); len(short) < len(text) {
		return strconv.Quote(short) + "..."
	}
	return strconv.Quote(text)
}

// cut is text as at most limit bytes of whole characters.
func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit]
}
