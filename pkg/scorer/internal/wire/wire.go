// Package wire is shared by the scorers that run outside this process, httpscore and natsscore. NewSample encodes a
// sample for a request; Decode, Number, Text and List read a reply strictly. A reply comes from a foreign program:
// every length in it is checked before memory is allocated, and a score that is not a finite number is an error that
// shows it.
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
	"io"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/strictmsgpack"
	"github.com/meander-rl/meander/schemas"
)

// Version is the version of the protocol: "v" in requests and in replies over NATS.
const Version = 1

// Formats of an image.
const (
	PNG  = "png"
	JPEG = "jpeg"
)

// jpegQuality is high, so that the codec does not change the score.
const jpegQuality = 95

// maxQuote bounds what an error shows of a reply, in bytes.
const maxQuote = 200

// Sample is one image or text in a request, with what it was made for.
type Sample struct {
	Prompt      string            `json:"prompt" msgpack:"prompt"`
	GroundTruth schemas.Truth     `json:"ground_truth" msgpack:"ground_truth"`
	Params      map[string]string `json:"params" msgpack:"params"`
	Metadata    schemas.Metadata  `json:"metadata" msgpack:"metadata"`
	schemas.ScoreSample
}

// Request returns the request for the sample alone, of the instance name.
func (s *Sample) Request(name string) *schemas.ScoreRequest {
	r := s.asked(name)
	r.ScoreSample = s.ScoreSample
	return r
}

// asked returns a request without what the function sees.
func (s *Sample) asked(name string) *schemas.ScoreRequest {
	return &schemas.ScoreRequest{
		V: Version, Name: name, Prompt: s.Prompt, GroundTruth: s.GroundTruth, Params: s.Params, Metadata: s.Metadata,
	}
}

// NewSample encodes a text, or an image as RGB in a format; transparent pixels are blended over black. Of a video the
// image is the frame in the middle, beside all frames.
func NewSample(in scorer.Input, format string) (s Sample, err error) {
	s.Prompt, s.GroundTruth, s.Params = in.Prompt, schemas.Truth(in.GroundTruth), in.Params
	if in.Params == nil {
		s.Params = map[string]string{} // an empty map, never null: one case less for servers
	}
	if s.Metadata, err = schemas.MetadataFrom(in.Metadata); err != nil {
		return s, err
	}
	if s.Metadata == nil {
		s.Metadata = schemas.Metadata{0x80} // an empty map, too
	}
	if in.Truth != nil {
		if s.GroundTruth, err = schemas.NewTruth(in.Truth); err != nil {
			return s, fmt.Errorf("ground truth: %w", err)
		}
	}
	s.StepIndex = in.Step
	if x := in.Latents; x != nil {
		s.Latents = &schemas.Tensor{DType: "F32", Shape: x.Shape, Data: x.Data}
		return s, nil
	}
	if x := in.Text; x != nil {
		s.Text, s.Trajectory = &x.Answer, x.Trajectory
		for _, m := range x.Messages {
			s.Messages = append(s.Messages, schemas.Message(m))
		}
		return s, nil
	}
	for _, c := range in.Conditions {
		s.Conditions = append(s.Conditions, schemas.ScoreCondition(c))
	}
	if in.Media.Empty() && !in.Media.Sound.Empty() {
		s.Audio, err = media.EncodeWAV(in.Media.Sound)
		return s, err
	}
	middle, err := in.Media.Middle().Image()
	if err != nil {
		return s, err
	}
	s.ImageFormat = format
	if s.Image, err = encodeImage(middle, format); err != nil || len(in.Media.Frames) == 1 {
		return s, err
	}
	s.Frames = make([][]byte, len(in.Media.Frames))
	for i, frame := range in.Media.Frames {
		if s.Frames[i], err = encodeImage(frame, format); err != nil {
			return s, err
		}
	}
	return s, nil
}

// encodeImage returns an image over black as a file.
func encodeImage(img *image.NRGBA, format string) (_ []byte, err error) {
	if !img.Opaque() {
		img = overBlack(img)
	}
	var file bytes.Buffer
	if format == JPEG {
		err = jpeg.Encode(&file, img, &jpeg.Options{Quality: jpegQuality})
	} else {
		err = (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&file, img)
	}
	if err != nil {
		return nil, fmt.Errorf("encode image: %w", err)
	}
	return file.Bytes(), nil
}

// overBlack returns a copy of an image blended over black.
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

// Patience returns how long a call may wait: timeout, or less if ctx ends before.
func Patience(ctx context.Context, timeout time.Duration) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(timeout, time.Until(deadline).Round(time.Millisecond))
	}
	return timeout
}

// CheckName refuses a name of a scorer that no prompt could name: it must be 1 to 64 ASCII letters, digits, _ or -.
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

// Number returns a decoded value as a score. If it is not a finite number, the error shows it.
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

// Text returns an optional text field; "" if it is absent or null.
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

// List returns an optional list field with one item per sample, of any length where samples is negative; nil if it is
// absent, null or empty.
func List(m map[string]any, key string, samples int) ([]any, error) {
	switch v := m[key].(type) {
	case nil:
		return nil, nil
	case []any:
		if len(v) == 0 {
			return nil, nil
		}
		if samples >= 0 && len(v) != samples {
			return nil, fmt.Errorf("%s: %d items for %d samples", key, len(v), samples)
		}
		return v, nil
	default:
		return nil, fmt.Errorf("%s: %s; must be a list", key, Show(v))
	}
}

// Detail cuts a text to the limit of Result.Detail, between characters.
func Detail(text string) string {
	return truncate(text, scorer.MaxDetail)
}

// Show returns a short description of a decoded value for an error.
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
		return truncate(fmt.Sprint(v), maxQuote)
	}
}

// Quote returns the beginning of a foreign text in quotes, with control characters escaped.
func Quote(text string) string {
	if short := truncate(text, maxQuote); len(short) < len(text) {
		return strconv.Quote(short) + "..."
	}
	return strconv.Quote(text)
}

// truncate cuts text to at most limit bytes, between characters.
func truncate(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	for limit > 0 && !utf8.RuneStart(text[limit]) {
		limit--
	}
	return text[:limit]
}

// Formats of requests and replies.
const (
	FormatJSON    = "json"
	FormatMsgpack = "msgpack"
)

// Decode reads a reply: one map, which must fill the whole body. Values are nil, bool, string, []byte, []any,
// map[string]any, float64, int64, uint64 or json.Number.
//
// Python's json writes the words NaN, Infinity and -Infinity, which are not JSON. They are read as texts, so that
// such a score fails only its own sample.
func Decode(format string, body []byte) (map[string]any, error) {
	if format == FormatMsgpack {
		return decodeMsgpack(body)
	}
	m, err := decodeJSON(body)
	if err != nil {
		if again, changed := quoteWords(body); changed {
			if m, err := decodeJSON(again); err == nil {
				return m, nil
			}
		}
	}
	return m, err
}

// decodeJSON reads one JSON map and nothing after it.
func decodeJSON(body []byte) (map[string]any, error) {
	if err := errors.Join(checkNesting(body), strictjson.Check(body)); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errors.New("null, not a map")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("bytes after the map")
	}
	return m, nil
}

// checkNesting refuses a body that nests too deep, before the recursive decoder of the library reads it.
func checkNesting(body []byte) error {
	depth, inText := 0, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			if depth++; depth > strictmsgpack.MaxDepth {
				return fmt.Errorf("more than %d levels", strictmsgpack.MaxDepth)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

// quoteWords puts the words NaN, Infinity and -Infinity outside of texts in quotes, and reports whether there were any.
func quoteWords(body []byte) ([]byte, bool) {
	words := [][]byte{[]byte("NaN"), []byte("-Infinity"), []byte("Infinity")}
	var out []byte
	from, inText := 0, false
	for i := 0; i < len(body); i++ {
		if body[i] == '"' {
			inText = !inText
		}
		if inText {
			if body[i] == '\\' {
				i++
			}
			continue
		}
		for _, w := range words {
			if bytes.HasPrefix(body[i:], w) {
				out = append(append(append(append(out, body[from:i]...), '"'), w...), '"')
				i += len(w) - 1
				from = i + 1
				break
			}
		}
	}
	return append(out, body[min(from, len(body)):]...), from > 0
}

// decodeMsgpack reads one msgpack map and nothing after it.
func decodeMsgpack(body []byte) (map[string]any, error) {
	v, err := strictmsgpack.Decode(body)
	m, ok := v.(map[string]any)
	if !ok && (err == nil || v != nil) {
		err = fmt.Errorf("%s, not a map", Show(v))
	}
	return m, err
}
