// Package model is what every text-to-image flow-matching network has in common: text to
// conditioning, conditioning and noisy latents to a velocity, latents to an image. It
// knows no schedule, no solver and no message; the sampler service joins a Model with
// those through a velocity function.
//
// The networks themselves are families, one package each below this one. A Registry lists
// those that a program can open, by the _class_name of a folder's model_index.json; the
// families of this project are in pkg/model/families. What the rest of the pipeline must
// know about a model, and differs from one to the next, is in its Card.
//
// Conventions, the same for every family: latents are packed tokens [S, C] in row-major
// order, S = (height/P)*(width/P) with P the edge of a token in pixels, C the channels of
// a token. The forward process is x = (1-sigma)*x0 + sigma*eps, and the velocity estimates
// eps - x0.
package model

import (
	"context"
	"errors"
	"fmt"
	"image"
	"strings"

	"github.com/meander-rl/meander/pkg/lora"
)

// Card is what the rest of the pipeline must know about a model.
type Card struct {
	// Name tells this model from others, Family the architecture.
	Name, Family string
	// WeightsDigest is the SHA-256 of the weights in hex: equal digests, equal velocities
	// on one build.
	WeightsDigest string
	// SchedulerConfig is the model's scheduler_config.json, as diffusers writes it.
	SchedulerConfig []byte
	// LatentChannels is C, the channels of a packed token, such as 64.
	LatentChannels int
	// PixelsPerToken is the edge of the square that a token covers, such as 16.
	PixelsPerToken int
	// Height, Width (pixels) and NumInferenceSteps are defaults for prompts that name none.
	Height, Width, NumInferenceSteps int
	// TrueCFGScale is the default guidance scale; guidance is active above 1.
	TrueCFGScale float64
	// Reward names the reward functions of prompts that name none; empty: no preference.
	Reward []string
	// MaxPixels bounds height*width.
	MaxPixels int
	// MaxPromptTokens bounds the tokens of a prompt, in the family's own count.
	MaxPromptTokens int
	// NegativePrompt is what guidance leads away from where a prompt does not say.
	NegativePrompt string
	// CFGRule is how the velocities of a prompt and of its negative are combined.
	CFGRule string
	// Conditioning names the tensors of an encoded prompt, in order, as diffusers names
	// them.
	Conditioning []string
	// ConditioningBytes bounds what these tensors of one prompt take, at four bytes an element;
	// ConditioningTokenBytes is what a token takes of it.
	ConditioningBytes, ConditioningTokenBytes int64
	// Prediction is what Velocity gives: empty for the velocity of a flow model, else epsilon or
	// v_prediction, as diffusers' prediction_type. Such a model is variance-preserving,
	// x = (x0 + sigma*eps)/sqrt(1+sigma^2), for sigma of any size from 0.
	Prediction string
	// Backend names what computes, e.g. cpu/avx512.
	Backend string
}

// CFGRescaled keeps the norm of the prompt's own velocity, token by token; CFGPlain does
// not.
const (
	CFGRescaled = "rescaled"
	CFGPlain    = "plain"
)

// Predictions of variance-preserving models.
const (
	PredictsEpsilon = "epsilon"
	PredictsV       = "v_prediction"
)

// Tokens returns S, the packed tokens of an image of height x width pixels. Sizes must
// be positive multiples of PixelsPerToken with at most MaxPixels pixels.
func (c Card) Tokens(height, width int) (int, error) {
	edge := c.PixelsPerToken
	switch {
	case edge <= 0:
		return 0, fmt.Errorf("pixels_per_token: %d; must be more than 0", edge)
	case height <= 0 || width <= 0:
		return 0, fmt.Errorf("height x width: %d x %d; must be positive", height, width)
	case height%edge != 0 || width%edge != 0:
		return 0, fmt.Errorf("height x width: %d x %d; must be multiples of %d", height, width, edge)
	case height > c.MaxPixels/width: // height*width may not fit an int
		return 0, fmt.Errorf("height x width: %d x %d; must be at most %d pixels", height, width, c.MaxPixels)
	}
	return (height / edge) * (width / edge), nil
}

// Validate joins by field what is wrong in a card, but for the digest and the backend,
// which are known once the model is open.
func (c Card) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.Name != "" && c.Name == NameOf(c.Name), "name: %q; must be letters, digits, _ and -", c.Name)
	check(c.Family != "", "family: %q; must not be empty", c.Family)
	check(c.LatentChannels > 0, "latent_channels: %d; must be more than 0", c.LatentChannels)
	check(c.NumInferenceSteps > 0, "num_inference_steps: %d; must be more than 0", c.NumInferenceSteps)
	check(c.TrueCFGScale > 0, "true_cfg_scale: %g; must be more than 0", c.TrueCFGScale)
	check(c.MaxPromptTokens > 0, "max_prompt_tokens: %d; must be more than 0", c.MaxPromptTokens)
	check(c.CFGRule == CFGRescaled || c.CFGRule == CFGPlain, "cfg_rule: %q; must be %s or %s", c.CFGRule, CFGRescaled, CFGPlain)
	check(c.Prediction == "" || c.Prediction == PredictsEpsilon || c.Prediction == PredictsV, "prediction: %q; must be empty, %s or %s", c.Prediction, PredictsEpsilon, PredictsV)
	check(len(c.Conditioning) > 0, "conditioning: none; must name the tensors of an encoded prompt")
	check(c.ConditioningTokenBytes > 0, "conditioning_token_bytes: %d; must be more than 0", c.ConditioningTokenBytes)
	check(c.ConditioningBytes > 0, "conditioning_bytes: %d; must be more than 0", c.ConditioningBytes)
	if _, err := c.Tokens(c.Height, c.Width); err != nil {
		errs = append(errs, fmt.Errorf("default %w", err))
	}
	return errors.Join(errs...)
}

// CheckRows checks what all families ask of the arguments of Velocity and returns S. What
// a conditioning's tensors hold is the family's to check, their shapes too.
func (c Card) CheckRows(dst, x [][]float32, sigma []float32, cond []*Conditioning, height, width int) (tokens int, err error) {
	if tokens, err = c.Tokens(height, width); err != nil {
		return 0, err
	}
	if len(dst) != len(x) || len(sigma) != len(x) || len(cond) != len(x) {
		return 0, fmt.Errorf("velocity of %d rows: %d results, %d sigmas, %d conditionings; must be as many of each", len(x), len(dst), len(sigma), len(cond))
	}
	size := tokens * c.LatentChannels
	for i := range x {
		switch {
		case len(x[i]) != size || len(dst[i]) != size:
			return 0, fmt.Errorf("velocity row %d: latents of %d and result of %d elements; must be %d", i, len(x[i]), len(dst[i]), size)
		case c.Prediction != "" && !(sigma[i] >= 0 && sigma[i]-sigma[i] == 0):
			return 0, fmt.Errorf("velocity row %d: sigma: %g; must be a finite number of at least 0", i, sigma[i])
		case c.Prediction == "" && !(sigma[i] >= 0 && sigma[i] <= MaxSigma):
			return 0, fmt.Errorf("velocity row %d: sigma: %g; must be 0 to 1", i, sigma[i])
		}
		if err := cond[i].fits(c.Conditioning); err != nil {
			return 0, fmt.Errorf("velocity row %d: conditioning: %w", i, err)
		}
	}
	return tokens, nil
}

// Conditioning is an encoded prompt. It is immutable: rows of a batch may share one.
type Conditioning struct {
	// Prompt is the text it was made from.
	Prompt string
	// Tensors is all that a velocity depends on, one for each name of Card.Conditioning, in
	// that order.
	Tensors []Tensor
	// Cut is how many tokens of the prompt were dropped (EncodeTruncated).
	Cut int
}

// Tensor is a named part of a conditioning, row-major. Masks are 0 and 1.
type Tensor struct {
	Name  string
	Shape []int
	Data  []float32
}

// fits checks names and sizes; c may be nil.
func (c *Conditioning) fits(names []string) error {
	if c == nil {
		return errors.New("none")
	}
	if len(c.Tensors) != len(names) {
		return fmt.Errorf("%d tensors; must be %s", len(c.Tensors), strings.Join(names, ", "))
	}
	for i, t := range c.Tensors {
		if t.Name != names[i] {
			return fmt.Errorf("tensor %d: %q; must be %s", i, t.Name, names[i])
		}
		n := 1
		for _, d := range t.Shape {
			n *= d
		}
		if n != len(t.Data) {
			return fmt.Errorf("%s: %v in %d elements", t.Name, t.Shape, len(t.Data))
		}
	}
	return nil
}

// ErrPrompt is wrapped by the errors of a prompt that the model cannot take, however often
// it is tried.
var ErrPrompt = errors.New("prompt that the model cannot take")

// ErrLatents is wrapped by the error of latents that decode to no image, however often
// that is tried.
var ErrLatents = errors.New("latents that are no image")

// MaxSigma is the largest sigma that a velocity is asked for: 1, and what the roundings of a
// schedule may add to it. Package flow makes such schedules.
const MaxSigma = 1 + 1.0/(1<<19)

// Model is a network ready to sample. All methods are safe for concurrent use, except
// that Close must come last.
type Model interface {
	// Card describes the model; it never changes.
	Card() Card
	// Encode turns prompts into conditionings, in order. A prompt of more than
	// MaxPromptTokens is an ErrPrompt.
	Encode(ctx context.Context, prompts []string) ([]*Conditioning, error)
	// EncodeTruncated is Encode, but for prompts that are too long: it drops the tokens
	// beyond MaxPromptTokens.
	EncodeTruncated(ctx context.Context, prompts []string) ([]*Conditioning, error)
	// Velocity evaluates rows independently: it sets dst[i] [S, C] to the velocity at
	// latents x[i] [S, C], sigma[i] in [0, 1] or a rounding above, under cond[i]. The bits of a row do not
	// depend on the rows beside it. dst[i] must not overlap any x. All rows are images
	// of height x width pixels. On an error dst holds no result.
	Velocity(ctx context.Context, dst, x [][]float32, sigma []float32, cond []*Conditioning, height, width int) error
	// Decode turns latents [S, C] into an image of height x width pixels.
	Decode(ctx context.Context, latents []float32, height, width int) (*image.NRGBA, error)
	// EncodeImage turns an image, of a size that the card allows, into the latents [S, C] that
	// Decode makes it of, about: what training adds noise to. Transparency is ignored.
	EncodeImage(ctx context.Context, img *image.NRGBA) ([]float32, error)
	// MemoryBytes returns the memory of the weights, and that of everything kept between
	// calls besides.
	MemoryBytes() (weights, working int)
	// Close frees what the model holds.
	Close() error
}

// Adaptable is a model that LoRAs can be added to while it is in use.
type Adaptable interface {
	Model
	// BaseDigest names the checkpoint, without adapters.
	BaseDigest() string
	// Modules is what adapters can change.
	Modules() lora.Table
	// Adapted returns the checkpoint plus the adapters, whatever adapters the model has. No files
	// are read, and what no adapter changes is shared. Both models stay usable, and each must be
	// closed. No adapters give the checkpoint again. An adapter that does not fit is an error.
	Adapted(adapters ...lora.Weighted) (Model, error)
	// Tensors are those of the network that is trained, which Replaced must be given.
	Tensors() lora.Shapes
	// Replaced returns the checkpoint with another such network, whatever the model has: it is read as far as needed before
	// Replaced returns, and everything else is shared. Both models stay usable, and each must be closed. digest names the
	// weights. Tensors that do not fit are an error.
	Replaced(weights *lora.Full, digest string) (Model, error)
}
