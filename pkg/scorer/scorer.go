// Package scorer holds the reward functions. A reward function (Scorer) gets an Input, a sample with its
// prompt and ground truth, and returns a score. BatchScorers rate several samples in one call,
// GroupScorers compare the samples of a group. Combine adds the weighted scores of a sample to its reward.
// Check, CheckMedium and CheckText refuse a prompt whose reward function could not rate its samples.
//
// The reward service fetches samples and publishes rewards. Functions that run on a server, on workers or
// with a file of weights are in httpscore and natsscore; scorerfile reads their settings.
package scorer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"image"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/models/media"
)

// Input is a sample with all that a scorer may use.
type Input struct {
	// Media is the decoded sample, of a video the frames that the scorer asks for (FramesOf), or its sound; empty
	// for a text.
	// Transparent pixels count as blended over black.
	Media media.Media
	// Step is how many steps of the sample have run, where it is in the middle: Media are its prediction; 0: it has
	// ended. Latents are the prediction itself, in place of Media, for scorers that were asked to see them.
	Step    int64
	Latents *Latents
	// Text is the sample of a language model; nil for media.
	Text *Text
	// Prompt is the text that the sample was made for; in a conversation, the last message before the answer.
	Prompt string
	// GroundTruth is what the sample is compared with, for scorers that compare.
	GroundTruth string
	// Truth is the same as a value of JSON, for scorers outside this process. Nil: it is the text.
	Truth any
	// Metadata is the record that the prompt came with, for scorers outside this process.
	Metadata map[string]any
	// Params are options of the scorer; an unknown one is an error.
	Params map[string]string
	// Conditions are what the network was given besides the prompt, such as an image to edit; for scorers that see them
	// (SeesConditions).
	Conditions []Condition
	// Trace are the headers of its trace context, for scorers outside this process.
	Trace map[string][]string
}

// Latents are states of a network: F32 of shape [S, C], little-endian.
type Latents struct {
	Shape []int64
	Data  []byte
}

// Condition is a file that a network was given: a PNG, of several frames an animated one.
type Condition struct {
	Name string `json:"name" msgpack:"name"`
	// Type is image, mask, video or audio.
	Type string `json:"type" msgpack:"type"`
	File []byte `json:"file" msgpack:"file"`
}

// SeesConditions reports whether a Scorer or a GroupScorer sees the conditions of samples: it has a method
// SeesConditions.
func SeesConditions(s interface{ Name() string }) bool {
	_, sees := s.(interface{ SeesConditions() })
	return sees
}

// Result is the score of one sample.
type Result struct {
	// Value is the score, unless Err says why there is none.
	Value float64
	Err   error
	// Detail is what the scorer saw, for people, such as the text that it read; at most MaxDetail bytes.
	Detail string
	// Exact says, of a function that reads or compares a text, whether the text is the target; nil for others.
	Exact *bool
}

// MaxDetail bounds Result.Detail in bytes.
const MaxDetail = 256

// Scorer is one reward function. It may be called concurrently.
type Scorer interface {
	// Name returns the name that prompts use.
	Name() string
	// Version changes when the same input may get another score.
	Version() string
	// Score rates a sample. Higher is better; it is never NaN or infinite.
	Score(ctx context.Context, in Input) (float64, error)
}

// FramesOf returns the most frames of a video that a Scorer or a GroupScorer sees, as media.Media.Spaced chooses them:
// what its method Frames says, if it has one, else the one in the middle; 0 is that one, too.
func FramesOf(s interface{ Name() string }) int {
	if f, ok := s.(interface{ Frames() int }); ok {
		return f.Frames()
	}
	return 1
}

// Detailer is a Scorer that also returns what it saw (Result.Detail).
type Detailer interface {
	Scorer
	ScoreDetail(ctx context.Context, in Input) Result
}

// BatchScorer is a Scorer that is faster with several samples at once.
type BatchScorer interface {
	Scorer
	// MaxBatch returns the most samples of one call, at least 1.
	MaxBatch() int
	// ScoreBatch returns one result per input, in order.
	ScoreBatch(ctx context.Context, in []Input) []Result
}

// GroupScorer compares the samples of a group with each other, so it needs all of them.
type GroupScorer interface {
	Name() string
	Version() string
	// ScoreGroup returns one result for each member, in their order. It fetches samples one by one and releases each
	// before the next: a whole group need not fit in memory. A sample that cannot be fetched has that error as its
	// result; the others are rated without it. With a method Frames it sees as many frames of a video.
	ScoreGroup(ctx context.Context, g Group) []Result
}

// Group is the samples of one prompt for a GroupScorer.
type Group struct {
	// Size is how many samples the prompt asked for. Members are the indexes of those that are rated, ascending, and
	// Missing the others.
	Size    int64
	Members []int64
	Missing []Missing
	// Sample returns what the function sees of the member at place i of Members; release ends its use. An error that
	// wraps ErrUnavailable ends the call: it is that of all members.
	Sample func(ctx context.Context, i int) (in Input, release func(), err error)
	// Store keeps what a message has no room for, and returns its SHA-256 in hex; nil: there is no store.
	Store func(ctx context.Context, data []byte) (digest string, err error)
	// Compared is told the preferences that the scores are the win rates of (WinRates), if they are; nil: nobody asks.
	Compared func(preferences []Preference)
}

// Missing is a sample of a group that a GroupScorer does not see, and why.
type Missing struct {
	Index int64  `json:"sample_index" msgpack:"sample_index"`
	Why   string `json:"why" msgpack:"why"`
}

// Preference is a comparison of two members of a group, by their places: P is how sure the judge is that A is better.
type Preference struct {
	A, B int
	P    float64
}

// WinRates returns the scores of n members that a judge compared two by two. With p(i, j) the preference for i over j,
// and p(j, i) = 1 - p(i, j), the score of i is the mean of p(i, j) over all comparisons that name i, added up in their
// order. A member that none names has no score.
func WinRates(n int, preferences []Preference) []Result {
	out, times := make([]Result, n), make([]int, n)
	for _, x := range preferences {
		out[x.A].Value += x.P
		out[x.B].Value += 1 - x.P
		times[x.A]++
		times[x.B]++
	}
	for i, k := range times {
		if k == 0 {
			out[i].Err = errors.New("no preference names it")
			continue
		}
		out[i].Detail = fmt.Sprintf("won %.4g of %d", out[i].Value, k)
		out[i].Value /= float64(k)
	}
	return out
}

// ErrUnavailable is wrapped by temporary errors: a program, a server or a worker does not answer now,
// and a retry may help. All other errors of a score are final.
var ErrUnavailable = errors.New("not available now")

// retryDeadlineKey is the key of WithRetryDeadline in a context.
type retryDeadlineKey struct{}

// WithRetryDeadline says until when a call may wait before it asks again a function that did not answer. A call that
// has begun then may take longer: ctx bounds that.
func WithRetryDeadline(ctx context.Context, until time.Time) context.Context {
	return context.WithValue(ctx, retryDeadlineKey{}, until)
}

// RetryDeadline returns the time of WithRetryDeadline; false: none was set.
func RetryDeadline(ctx context.Context) (until time.Time, ok bool) {
	until, ok = ctx.Value(retryDeadlineKey{}).(time.Time)
	return until, ok
}

// New returns the scorer of a name; an unknown name is an error that lists the names. OCR is an error if its
// program is missing. Diversity is a GroupScorer: see NewGroup.
func New(name string) (Scorer, error) {
	switch name {
	case Glyph:
		return newGlyph()
	case JPEGCompressibility:
		return jpegSize{name: name, sign: -1}, nil
	case JPEGIncompressibility:
		return jpegSize{name: name, sign: 1}, nil
	case Motion:
		return motion{}, nil
	case Loudness:
		return sound{name, scoreLoudness}, nil
	case OCR:
		return NewOCR(OCRConfig{})
	case Silence:
		return sound{name, scoreSilence}, nil
	case Synthetic:
		return synthetic{}, nil
	case Unchanged:
		return unchanged{}, nil
	}
	if s := newTextScorer(name); s != nil {
		return s, nil
	}
	if _, _, err := findKind(name); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("scorer %q does not rate samples one by one here", name)
}

// RatesGroup reports whether a function of a prompt rates whole groups: it always does, or least, the fewest samples
// that it is asked about, says so.
func RatesGroup(name string, least int64) bool { return least > 0 || NewGroup(name) != nil }

// CheckGroup refuses a least number of samples to rate for a function that rates them one by one, and one that no group
// of size samples reaches.
func CheckGroup(name string, least, size int64) error {
	k, _, err := findKind(name)
	switch {
	case err != nil || least == 0:
		return nil // Check reports an unknown name
	case !k.free:
		return fmt.Errorf("group_min: %d; must be absent: it is for functions of one's own, http:NAME and nats:NAME, "+
			"and not for %s", least, name)
	case least > size:
		return fmt.Errorf("group_min: %d; must be at most group_size, %d", least, size)
	}
	return nil
}

// NewGroup returns the group scorer of a name; nil if the name is not that of a group scorer.
func NewGroup(name string) GroupScorer {
	if name == Diversity {
		return diversity{}
	}
	return nil
}

// imageOf returns the image for a scorer without params: params are an error.
func imageOf(ctx context.Context, in Input) (*image.NRGBA, error) {
	img, err := in.image(ctx)
	return img, cmp.Or(err, in.noParams())
}

// noParams returns an error if there are params, for scorers without.
func (in Input) noParams() error {
	if len(in.Params) == 0 {
		return nil
	}
	return fmt.Errorf("params: unknown name %q", slices.Sorted(maps.Keys(in.Params))[0])
}

// image returns the sample as an image. Texts, videos and a done ctx are errors.
func (in Input) image(ctx context.Context) (*image.NRGBA, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return in.Media.Image()
}

// luma returns the brightness of a pixel over black, 0 to 255*255*1000 (ITU-R BT.601 weights).
func luma(pix []uint8) uint32 {
	return (299*uint32(pix[0]) + 587*uint32(pix[1]) + 114*uint32(pix[2])) * uint32(pix[3])
}

// truncate cuts s to at most MaxDetail bytes, between characters.
func truncate(s string) string {
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

// Part is the result of one scorer with its weight in the reward.
type Part struct {
	Name   string
	Weight float64
	// Required: if this part fails, the sample fails.
	Required bool
	// Value is the score, unless Err says why there is none.
	Value float64
	Err   error
}

// Combine returns the reward of a sample: the sum (not the mean) of Weight*Value over the parts with a value, in
// order. Weights must be finite, and the total over all parts positive.
//
// A value that is NaN or infinite is a failure: Combine sets the Err of that part. Failed parts that are not
// required are left out of the sum; the caller finds them by their Err. A failed part that is required is an error,
// and so is a sum without parts; all such faults are joined.
func Combine(parts []Part) (reward float64, err error) {
	var total float64
	var faults []error
	for _, p := range parts {
		if math.IsNaN(p.Weight) || math.IsInf(p.Weight, 0) {
			faults = append(faults, fmt.Errorf("weight of %s: %v; must be a finite number", p.Name, p.Weight))
		}
		total += p.Weight
	}
	if len(faults) == 0 && !(total > 0) {
		faults = append(faults, fmt.Errorf("weights: total %v; must be more than 0", total))
	}
	scored := 0
	for i := range parts {
		p := &parts[i]
		if p.Err == nil && (math.IsNaN(p.Value) || math.IsInf(p.Value, 0)) {
			p.Err = fmt.Errorf("score is %v", p.Value)
		}
		switch {
		case p.Err == nil:
			scored++
			reward += float64(p.Weight * p.Value)
		case p.Required:
			faults = append(faults, fmt.Errorf("required score %s: %w", p.Name, p.Err))
		}
	}
	if len(faults) > 0 {
		return 0, errors.Join(faults...)
	}
	if scored == 0 {
		return 0, errors.New("no score succeeded")
	}
	if math.IsNaN(reward) || math.IsInf(reward, 0) {
		return 0, fmt.Errorf("weighted sum is %v", reward)
	}
	return reward, nil
}
