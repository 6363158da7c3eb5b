// Package model defines what flow-matching networks that make images or videos from text have in
// common. A Model turns text into a Conditioning (the encoded prompt), a conditioning and noisy
// latents into a velocity, and latents into media. It knows no schedule, no solver and no message; the
// sampler service joins a Model with those.
//
// A Family is an architecture, one package each below this one. A Registry lists the families that a
// program can open and finds the family of a folder by the _class_name in its model_index.json; those
// of this project are in pkg/models/model/families. The Card of a model holds all that the rest of the
// pipeline must know about it.
//
// Conventions, the same for every family: latents are packed tokens [S, C] in row-major
// order, for an image S = (height/P)*(width/P) with P the edge of a token in pixels, C the
// channels of a token. A video of F frames has (1 + (F-1)/T) times as many, frame by frame, with T the frames that a
// token covers after the first, which covers one. The forward process is x = (1-sigma)*x0 + sigma*eps, and the velocity
// estimates eps - x0.
package model

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Size and Media are the types of package media.
type (
	Size  = media.Size
	Media = media.Media
)

// Card is what the rest of the pipeline must know about a model. The names of msgpack are those of the protocol of
// workers, which say what has one.
type Card struct {
	// Name is the name of the model in events, Family its architecture.
	Name   string `json:"name" msgpack:"-"`
	Family string `json:"family" msgpack:"family"`
	// Source is its name and commit on the Hugging Face Hub, ORG/NAME@COMMIT; empty: its folder is not in the cache.
	Source string `json:"source,omitempty" msgpack:"-"`
	// WeightsDigest is the SHA-256 of the weights in hex. Equal digests give equal velocities
	// with the same build.
	WeightsDigest string `json:"-" msgpack:"-"`
	// SchedulerConfig is the model's scheduler_config.json, as diffusers writes it.
	SchedulerConfig json.RawMessage `json:"scheduler_config" msgpack:"-"`
	// Grid names the sigmas before the scheduler shifts them: GridLinspace (also empty), GridTorch, GridScheduler or
	// GridUniFlow; or GridPipeline: Pipeline lists them, shifted.
	Grid string `json:"grid" msgpack:"grid"`
	// Mu says how the shift of a scheduler with use_dynamic_shifting is found: MuLinear (also empty), MuNone, MuFlux2,
	// or MuConstant with ConstantMu.
	Mu         string  `json:"mu" msgpack:"mu"`
	ConstantMu float64 `json:"mu_constant" msgpack:"mu_constant"`
	// Told are the schedules that the library of a worker makes of the same files; none: there is no other.
	Told []Told `json:"told,omitempty" msgpack:"told"`
	// LatentChannels is C, the number of channels of a packed token, such as 64.
	LatentChannels int `json:"latent_channels" msgpack:"-"`
	// PixelsPerToken is the edge of the square that a token covers, such as 16.
	PixelsPerToken int `json:"pixels_per_token" msgpack:"-"`
	// FramesPerToken is how many frames of a video a token covers, such as 4; the first token of a square covers one.
	// MaxFrames bounds the frames; 0 or 1: the model makes images. FPS is how many are shown in a second.
	FramesPerToken int     `json:"frames_per_token" msgpack:"-"`
	MaxFrames      int     `json:"max_frames" msgpack:"max_frames"`
	FPS            float64 `json:"fps" msgpack:"fps"`
	// Size and NumInferenceSteps are defaults for prompts that name none.
	Size              `msgpack:"-"`
	NumInferenceSteps int `json:"num_inference_steps" msgpack:"steps"`
	// TrueCFGScale is the default guidance scale; guidance is active above 1.
	TrueCFGScale float64 `json:"true_cfg_scale" msgpack:"true_cfg_scale"`
	// BoundaryRatio is the sigma below which a second network of the model computes; 0: it has one network.
	BoundaryRatio float64 `json:"boundary_ratio" msgpack:"boundary_ratio"`
	// Reward names the reward functions of prompts that name none; empty: no preference.
	Reward []string `json:"reward" msgpack:"-"`
	// Guidance is the default of Row.Guidance for a guidance-distilled network; 0: the network has no such input.
	Guidance float64 `json:"guidance" msgpack:"guidance"`
	// IndependentRows says that the bits of a row of Velocity do not depend on the rows beside it.
	IndependentRows bool `json:"independent_rows" msgpack:"-"`
	// LatentsDType is the type of the states of prompts that name none: BF16 where the network rounds them to it before
	// it computes, so that nothing which it reads is lost. Empty: F32.
	LatentsDType tensor.DType `json:"latents_dtype,omitempty" msgpack:"-"`
	// Tolerance is how far a sample that is computed again may differ from the stored one: |ratio-1| of a
	// log-prob, relative distance of latents. 0: the same build, model and backend give the same bits.
	Tolerance float64 `json:"tolerance" msgpack:"-"`
	// MaxPixels bounds height*width, of each frame.
	MaxPixels int `json:"max_pixels" msgpack:"max_pixels"`
	// MaxPromptTokens bounds the tokens of a prompt, as the family counts them.
	MaxPromptTokens int `json:"max_prompt_tokens" msgpack:"max_prompt_tokens"`
	// Prompts is how many texts a prompt may have, for as many text encoders: 1 (also 0) to MaxTexts.
	Prompts int `json:"prompts" msgpack:"prompts"`
	// NegativePrompt is the default negative prompt: guidance leads away from it.
	NegativePrompt string `json:"negative_prompt" msgpack:"negative_prompt"`
	// CFGRule says how the velocities of a prompt and of its negative prompt are combined: CFGRescaled, CFGPlain,
	// CFGPlainClamped, or CFGInside with a Pipeline.
	CFGRule string `json:"cfg_rule" msgpack:"cfg_rule"`
	// Conditioning names the tensors of an encoded prompt, in order, as diffusers names
	// them.
	Conditioning []string `json:"conditioning" msgpack:"-"`
	// Masks names the mask of each tensor of Conditioning, by the tensor's name; a tensor that it leaves out has none.
	// Events get a mask of ones where a named one is no tensor itself. nil: the mask of X_embeds [L, D] is
	// X_embeds_mask.
	Masks map[string]string `json:"masks" msgpack:"-"`
	// ConditioningBytes bounds the size of these tensors for one prompt, at four bytes per element;
	// ConditioningTokenBytes is the size for one token.
	ConditioningBytes      int64 `json:"conditioning_bytes" msgpack:"conditioning_bytes"`
	ConditioningTokenBytes int64 `json:"conditioning_token_bytes" msgpack:"conditioning_token_bytes"`
	// Prediction is what Velocity returns: empty for the velocity of a flow model, else epsilon or
	// v_prediction, as in diffusers' prediction_type. A model with one is variance-preserving,
	// x = (x0 + sigma*eps)/sqrt(1+sigma^2), for sigma of any size from 0.
	Prediction string `json:"prediction" msgpack:"-"`
	// Backend names what computes, e.g. cpu/avx512.
	Backend string `json:"backend" msgpack:"-"`
	// Pipeline is what there is to say of a model that computes with a whole pipeline; nil: with its network alone.
	Pipeline *Pipeline `json:"pipeline,omitempty" msgpack:"pipeline"`
}

// Values of Card.CFGRule. CFGRescaled keeps the norm of the prompt's own velocity, token by
// token (flow.Guide); CFGPlain does not (flow.GuidePlain); CFGPlainClamped shortens what is longer, of the whole sample
// (flow.GuideClamped).
const (
	CFGRescaled     = "rescaled"
	CFGPlain        = "plain"
	CFGPlainClamped = "plain_clamped"
)

// Told is a schedule as another library makes it, to be compared bit by bit: sigmas [T+1] of Steps at the default size;
// without sigmas, Why it makes none.
type Told struct {
	Steps  int       `json:"steps" msgpack:"steps"`
	Sigmas []float64 `json:"sigmas" msgpack:"sigmas"`
	Why    string    `json:"why,omitempty" msgpack:"why"`
}

// Values of Card.Grid and Card.Mu; flow.Grid and flow.MuRule define the same values.
const (
	GridLinspace  = "linspace"
	GridTorch     = "linspace_torch"
	GridScheduler = "scheduler"
	GridUniFlow   = "uni_flow"
	GridDiffusion = "diffusion"
	GridPipeline  = "pipeline"

	MuLinear   = "linear"
	MuNone     = "none"
	MuFlux2    = "flux2"
	MuConstant = "constant"
)

// Predictions of variance-preserving models.
const (
	PredictsEpsilon = "epsilon"
	PredictsV       = "v_prediction"
)

// Tokens returns S, the packed tokens of a sample of that size. Its height and width must be positive multiples of
// PixelsPerToken, with at most MaxPixels pixels, and its frames those that media.CheckFrames accepts; other sizes are
// errors.
func (c Card) Tokens(size Size) (int, error) {
	edge, height, width := c.PixelsPerToken, size.Height, size.Width
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
	if err := media.CheckFrames(size.Frames, c.FramesPerToken, c.MaxFrames); err != nil {
		return 0, err
	}
	return (1 + (size.Frames-1)/max(c.FramesPerToken, 1)) * (height / edge) * (width / edge), nil
}

// Validate joins all faults of a card; each names its field. It does not check digest and backend, which are known
// only once the model is open.
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
	check(c.BoundaryRatio >= 0 && c.BoundaryRatio < 1,
		"boundary_ratio: %g; must be between 0 and 1, or 0 for one network", c.BoundaryRatio)
	check(c.MaxPromptTokens > 0, "max_prompt_tokens: %d; must be more than 0", c.MaxPromptTokens)
	check(c.CFGRule == CFGInside && c.Pipeline != nil ||
		c.Pipeline == nil && oneOf(c.CFGRule, CFGRescaled, CFGPlain, CFGPlainClamped),
		"cfg_rule: %q; must be %s, %s or %s, or %s with a pipeline", c.CFGRule, CFGRescaled, CFGPlain, CFGPlainClamped,
		CFGInside)
	check(oneOf(c.Grid, "", GridLinspace, GridTorch, GridScheduler, GridUniFlow, GridDiffusion, GridPipeline),
		"grid: %q; must be %s, %s, %s, %s, %s or %s", c.Grid, GridLinspace, GridTorch, GridScheduler, GridUniFlow,
		GridDiffusion, GridPipeline)
	check(oneOf(c.Mu, "", MuLinear, MuNone, MuFlux2, MuConstant), "mu: %q; must be %s, %s, %s or %s", c.Mu, MuLinear,
		MuNone, MuFlux2, MuConstant)
	check(c.ConstantMu == 0 || c.Mu == MuConstant && c.ConstantMu-c.ConstantMu == 0,
		"mu_constant: %g; must be finite with mu constant, else 0", c.ConstantMu)
	check(c.FramesPerToken >= 0, "frames_per_token: %d; must be 0 or more", c.FramesPerToken)
	check((c.MaxFrames > 1) == (c.FPS > 0), "fps: %g; must be above 0 where max_frames is above 1, else 0", c.FPS)
	check(c.Prompts >= 0 && c.Prompts <= MaxTexts, "prompts: %d; must be 1 to %d", c.Prompts, MaxTexts)
	check(c.Prediction == "" || c.Prediction == PredictsEpsilon || c.Prediction == PredictsV,
		"prediction: %q; must be empty, %s or %s", c.Prediction, PredictsEpsilon, PredictsV)
	check(c.IndependentRows || c.Tolerance > 0, "tolerance: %g; must be more than 0 where rows are not independent",
		c.Tolerance)
	for _, name := range slices.Sorted(maps.Keys(c.Masks)) {
		check(slices.Contains(c.Conditioning, name) && c.Masks[name] != name,
			"masks: %q: %q; must be a tensor of %s and its mask", name, c.Masks[name],
			strings.Join(c.Conditioning, ", "))
	}
	if c.Pipeline != nil {
		errs = append(errs, c.Pipeline.validate())
		check(len(c.Conditioning) == 0, "conditioning: %d tensors; must be none of a pipeline", len(c.Conditioning))
	} else {
		check(len(c.Conditioning) > 0, "conditioning: none; must name the tensors of an encoded prompt")
		check(c.ConditioningTokenBytes > 0, "conditioning_token_bytes: %d; must be more than 0",
			c.ConditioningTokenBytes)
		check(c.ConditioningBytes > 0, "conditioning_bytes: %d; must be more than 0", c.ConditioningBytes)
	}
	if _, err := c.Tokens(c.Size); err != nil {
		errs = append(errs, fmt.Errorf("default %w", err))
	}
	return errors.Join(errs...)
}

// MaskOf returns the name of the mask of a tensor of an encoded prompt; "" if it has none.
func (c Card) MaskOf(t Tensor) string {
	if c.Masks != nil {
		return c.Masks[t.Name]
	}
	if strings.HasSuffix(t.Name, "_embeds") && len(t.Shape) == 2 {
		return t.Name + "_mask"
	}
	return ""
}

// oneOf reports whether a text is among some.
func oneOf(text string, among ...string) bool { return slices.Contains(among, text) }

// Row is one evaluation of the network. Latents and result are [S, C].
type Row struct {
	// X are the latents; Velocity only reads them.
	X []float32
	// Sigma is their noise level, 0 to MaxSigma; without a bound if the card has a Prediction.
	Sigma float32
	// Conditioning is the encoded prompt.
	Conditioning *Conditioning
	// Guidance is the guidance input of a guidance-distilled network, the card's by default; 0 if the card
	// has none. It is not the scale of classifier-free guidance, which combines two rows; but of a Pipeline the
	// scale of this row, where it is not that of the recipe, else 0.
	Guidance float32
	// Dst receives the velocity. It must not overlap the X of any row.
	Dst []float32
	// Of is the model that evaluates the row, of the lora.Mixer.Mix of the one that is called; nil: that one.
	Of Model
}

// CheckRows checks what all families require of the arguments of Velocity and returns S. Each family itself checks
// shapes and contents of the conditioning's tensors.
func (c Card) CheckRows(rows []Row, size Size) (tokens int, err error) {
	if tokens, err = c.Tokens(size); err != nil {
		return 0, err
	}
	elements := tokens * c.LatentChannels
	for i, r := range rows {
		switch {
		case len(r.X) != elements || len(r.Dst) != elements:
			return 0, fmt.Errorf("velocity row %d: latents of %d and result of %d elements; must be %d", i, len(r.X),
				len(r.Dst), elements)
		case r.Of != nil && r.Of.Card().WeightsDigest != c.WeightsDigest:
			return 0, fmt.Errorf("velocity row %d: of other weights; must be of those of the call", i)
		case c.Prediction != "" && !(r.Sigma >= 0 && r.Sigma-r.Sigma == 0):
			return 0, fmt.Errorf("velocity row %d: sigma: %g; must be a finite number of at least 0", i, r.Sigma)
		case c.Prediction == "" && !(r.Sigma >= 0 && r.Sigma <= MaxSigma):
			return 0, fmt.Errorf("velocity row %d: sigma: %g; must be 0 to 1", i, r.Sigma)
		case c.Guidance == 0 && r.Guidance != 0 && (c.Pipeline == nil || c.Pipeline.Guidance == ""):
			return 0, fmt.Errorf("velocity row %d: guidance: %g; must be 0, the network takes none", i, r.Guidance)
		}
		switch err := r.Conditioning.check(c.Conditioning); {
		case c.Pipeline != nil && r.Conditioning != nil && r.Conditioning.Recipe != nil: // its tensors are for events
		case err != nil:
			return 0, fmt.Errorf("velocity row %d: conditioning: %w", i, err)
		}
	}
	return tokens, nil
}

// Conditioning is an encoded prompt. It is immutable: rows of a batch may share one.
type Conditioning struct {
	// Prompt is the text that it was made from.
	Prompt string
	// Tensors are the inputs of the network, one for each name of Card.Conditioning, in that
	// order; of a Recipe what the pipeline encodes of texts, which no velocity takes.
	Tensors []Tensor
	// Cut is the number of tokens of the prompt that EncodeTruncated dropped.
	Cut int
	// Recipe is what a Pipeline was conditioned on.
	Recipe *Recipe
}

// Tensor is a named part of a conditioning, row-major. Masks are 0 and 1.
type Tensor struct {
	Name  string
	Shape []int
	Data  []float32
}

// check checks the names of the tensors, and that their data fits their shapes. c may be nil, which is an error.
func (c *Conditioning) check(names []string) error {
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

// ErrPrompt is wrapped by the error for a prompt that the model cannot accept; a retry does not help.
var ErrPrompt = errors.New("prompt that the model cannot take")

// ErrLatents is wrapped by the error for latents that cannot be evaluated or decoded; a retry does not help.
var ErrLatents = errors.New("latents that the model cannot compute")

// ErrWeights is wrapped by the error of an evaluation whose weights are not in memory any more, and cannot be loaded
// again.
var ErrWeights = errors.New("the weights cannot be loaded")

// ErrAway is wrapped by the error of a model that another process computes, while that cannot be reached.
var ErrAway = errors.New("the model cannot be computed now")

// ErrKills is wrapped by the error of a call in which the process that computes the model ended each time; others work.
var ErrKills = errors.New("what computes the model is lost each time")

// MaxSigma is the largest sigma of a row: 1 plus the rounding errors of a schedule. Package flow
// makes such schedules and defines the same value.
const MaxSigma = 1 + 1.0/(1<<19)

// Model is a network that is ready to sample. All methods are safe for concurrent use, except
// Close, which must be called last.
type Model interface {
	// Card describes the model; it never changes.
	Card() Card
	// Encode turns prompts into conditionings, in order. A prompt of more than
	// MaxPromptTokens is an ErrPrompt.
	Encode(ctx context.Context, prompts []string) ([]*Conditioning, error)
	// EncodeTruncated is Encode, but it accepts prompts that are too long: it drops the tokens beyond
	// MaxPromptTokens.
	EncodeTruncated(ctx context.Context, prompts []string) ([]*Conditioning, error)
	// Velocity sets the Dst of each row to the network's output at the row's latents, for samples of
	// that size. Where the card has IndependentRows, the bits of a row do not depend on the rows beside
	// it. After an error no Dst holds a result.
	Velocity(ctx context.Context, rows []Row, size Size) error
	// Decode turns latents [S, C] into media of that size.
	Decode(ctx context.Context, latents []float32, size Size) (Media, error)
	// EncodeMedia turns media, of a size that the card allows, into latents [S, C] that Decode turns into nearly
	// the same media. Training adds noise to them. Transparency is ignored.
	EncodeMedia(ctx context.Context, m Media) ([]float32, error)
	// MemoryBytes returns the memory of the weights, and of everything else that is kept
	// between calls.
	MemoryBytes() (weights, working int)
	// Close frees what the model holds.
	Close() error
}
