// Package synthetic is a family of models without networks and files. The distribution of
// their samples (a Mixture) is known in closed form. They serve load tests, tests of solvers
// and transitions, and first runs without weights.
package synthetic

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
)

// Model is a model without a network. Each prompt has a Gaussian mixture over latents
// (Mixture), whose velocity has a closed form; each component of the mixture is a soft
// colour image. So the right output of a sampler is known exactly, at any image size and
// at almost no cost.
type Model struct {
	cfg   Config
	card  model.Card
	cache *mixtureCache
}

// Config holds the parameters of the mixtures.
type Config struct {
	// Components of each mixture, 1 to 64.
	Components int
	// MinStd and MaxStd bound the components' standard deviations, which are drawn from
	// the prompt; 0 < MinStd <= MaxStd. Latents are of order 1.
	MinStd, MaxStd float64
	// Contrast >= 0 multiplies the means. At 0 every component is centred at zero, and
	// with one component the data is N(0, std^2) in each element.
	Contrast float64
	// Prediction makes it a variance-preserving model: epsilon or v_prediction; empty: a flow model.
	Prediction string
}

// DefaultConfig returns mixtures of four images per prompt, each with visible variety.
func DefaultConfig() Config {
	return Config{Components: 4, MinStd: 0.12, MaxStd: 0.24, Contrast: 1}
}

// varianceConfig has the betas of Ho et al. 2020.
const varianceConfig = `{
  "_class_name": "DDPMScheduler",
  "beta_end": 0.02,
  "beta_schedule": "linear",
  "beta_start": 0.0001,
  "num_train_timesteps": 1000,
  "prediction_type": %q
}
`

// names are the names of the models, by their prediction.
var names = map[string]string{"": Name, model.PredictsEpsilon: Name + "-epsilon", model.PredictsV: Name + "-v"}

// schedulerConfig has the constants of published checkpoints with a dynamic shift.
const schedulerConfig = `{
  "_class_name": "FlowMatchEulerDiscreteScheduler",
  "base_image_seq_len": 256,
  "base_shift": 0.5,
  "invert_sigmas": false,
  "max_image_seq_len": 8192,
  "max_shift": 0.9,
  "num_train_timesteps": 1000,
  "shift": 1.0,
  "shift_terminal": 0.02,
  "stochastic_sampling": false,
  "time_shift_type": "exponential",
  "use_beta_sigmas": false,
  "use_dynamic_shifting": true,
  "use_exponential_sigmas": false,
  "use_karras_sigmas": false
}
`

// revision is part of the weights digest: it changes with any formula that
// turns a prompt into a mixture or latents into an image.
const revision = 1

// Name is the name of the model with the default mixtures.
const Name = "synthetic"

// Family returns the family of the model called Name. It needs no folder.
func Family() model.Family { return family("") }

// VarianceFamilies returns families with the same mixtures whose models predict epsilon and v,
// synthetic-epsilon and synthetic-v, for scheduled sampling. They cannot sample by flow matching.
func VarianceFamilies() []model.Family {
	return []model.Family{family(model.PredictsEpsilon), family(model.PredictsV)}
}

// family returns the family of the model with that prediction. It has no adapters.
func family(prediction string) model.Family {
	cfg := DefaultConfig()
	cfg.Prediction = prediction
	name := names[prediction]
	return model.Family{
		Name: name,
		Open: func(_ string, o model.Options) (model.Model, error) {
			if o.Adapter != "" {
				return nil, fmt.Errorf("adapter: %q; the %s model takes none", o.Adapter, name)
			}
			return NewWith(cfg), nil
		},
		Inspect: func(string) (*model.Info, error) {
			card := NewWith(cfg).Card()
			card.WeightsDigest, card.Backend = "", ""
			return &model.Info{Card: card}, nil
		},
	}
}

// New returns the synthetic model with its default mixtures.
func New() *Model { return NewWith(DefaultConfig()) }

// NewWith returns a synthetic model with mixtures of another shape. Its digest covers the config and revision.
func NewWith(cfg Config) *Model {
	formula := fmt.Appendf(nil, "synthetic revision=%d components=%d min_std=%x max_std=%x contrast=%x",
		revision, cfg.Components, cfg.MinStd, cfg.MaxStd, cfg.Contrast)
	config := schedulerConfig
	if cfg.Prediction != "" {
		formula = fmt.Appendf(formula, " prediction=%s", cfg.Prediction)
		config = fmt.Sprintf(varianceConfig, cfg.Prediction)
	}
	digest := sha256.Sum256(formula)
	return &Model{
		cfg: cfg,
		card: model.Card{
			Name: names[cfg.Prediction], Family: names[cfg.Prediction], WeightsDigest: hex.EncodeToString(digest[:]),
			SchedulerConfig: []byte(config), Prediction: cfg.Prediction,
			LatentChannels: tokenChannels, PixelsPerToken: tokenEdge,
			Size: media.ImageSize(64, 64), NumInferenceSteps: 10, TrueCFGScale: 1, IndependentRows: true,
			MaxPixels: 8192 * tokenEdge * tokenEdge, MaxPromptTokens: 1,
			NegativePrompt: " ", CFGRule: model.CFGRescaled, Conditioning: []string{promptEmbeds},
			ConditioningBytes: 4 * embedWidth, ConditioningTokenBytes: 4 * embedWidth, Backend: "cpu",
		},
		cache: newMixtureCache(cacheElements),
	}
}

// Card describes the model.
func (m *Model) Card() model.Card {
	card := m.card
	card.SchedulerConfig = slices.Clone(card.SchedulerConfig)
	return card
}

// Encode turns each prompt into one token that holds its SHA-256 and the colours of
// its images. Common colour names in the text set these colours. Every text is valid,
// also the empty one.
func (m *Model) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := make([]*model.Conditioning, len(prompts))
	for i, p := range prompts {
		out[i] = condition(p)
	}
	return out, nil
}

// promptEmbeds is the conditioning of the family: one token [1, embedWidth].
const promptEmbeds = "prompt_embeds"

func condition(prompt string) *model.Conditioning {
	e := embed(prompt)
	return &model.Conditioning{
		Prompt:  prompt,
		Tensors: []model.Tensor{{Name: promptEmbeds, Shape: []int{1, len(e)}, Data: e[:]}},
	}
}

// EncodeTruncated is Encode, since no prompt is too long.
func (m *Model) EncodeTruncated(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.Encode(ctx, prompts)
}

// Velocity is Mixture.Velocity, Epsilon or V row by row.
func (m *Model) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	if _, err := m.card.CheckRows(rows, size); err != nil {
		return err
	}
	for i, r := range rows {
		if err := ctx.Err(); err != nil {
			return err
		}
		mix, err := m.mixture(r.Conditioning, size)
		if err != nil {
			return fmt.Errorf("velocity: row %d: %w", i, err)
		}
		s := float64(r.Sigma)
		n := math.Sqrt(1 + float64(s*s))
		switch m.cfg.Prediction {
		case model.PredictsEpsilon:
			mix.Epsilon(r.Dst, r.X, 1/n, s/n)
		case model.PredictsV:
			mix.V(r.Dst, r.X, 1/n, s/n)
		default:
			mix.Velocity(r.Dst, r.X, s)
		}
	}
	return nil
}

// Mixture returns the data distribution of a prompt at an image size. It is shared
// with the model and must not be changed.
func (m *Model) Mixture(prompt string, height, width int) (*Mixture, error) {
	size := media.ImageSize(height, width)
	if _, err := m.card.Tokens(size); err != nil {
		return nil, err
	}
	return m.mixture(condition(prompt), size)
}

// mixture returns the mixture of a conditioning at a size, from the cache if it is there. A conditioning of another
// family is an error.
func (m *Model) mixture(cond *model.Conditioning, size model.Size) (*Mixture, error) {
	e := cond.Tensors[0].Data
	if len(e) != embedWidth {
		return nil, errors.New("conditioning is not of the synthetic model")
	}
	key := mixtureKey{embeds: [embedWidth]float32(e), height: size.Height, width: size.Width}
	digest, err := key.digest()
	if err != nil {
		return nil, err
	}
	elements := size.Height / tokenEdge * (size.Width / tokenEdge) * tokenChannels
	return m.cache.get(key, elements*m.cfg.Components, func() *Mixture {
		return newMixture(m.cfg, digest, key)
	}), nil
}

// Decode blends the tokens' images (see decodeTokens) and clamps each colour to
// 0..255. Latents must be finite.
func (m *Model) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	if err := ctx.Err(); err != nil {
		return model.Media{}, err
	}
	tokens, err := m.card.Tokens(size)
	if err != nil {
		return model.Media{}, err
	}
	if len(latents) != tokens*tokenChannels {
		return model.Media{}, fmt.Errorf("decode: latents of %d elements; must be %d", len(latents),
			tokens*tokenChannels)
	}
	for i, z := range latents {
		if z-z != 0 {
			return model.Media{}, fmt.Errorf("decode: latent %d is %v", i, z)
		}
	}
	return media.Of(decodeTokens(latents, size.Height, size.Width)), nil
}

// EncodeMedia returns the latents of an image: the cosine series of each token's window. Beyond the
// edges the nearest pixels count.
func (m *Model) EncodeMedia(ctx context.Context, sample model.Media) ([]float32, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := m.card.Tokens(sample.Size()); err != nil {
		return nil, err
	}
	img := sample.Frames[0]
	size := img.Rect.Size()
	rgb := func(y, x float64) (out [3]float64) {
		at := img.PixOffset(img.Rect.Min.X+nearest(x, size.X), img.Rect.Min.Y+nearest(y, size.Y))
		for c := range out {
			out[c] = float64(img.Pix[at+c]) / 255
		}
		return out
	}
	return encodeImage(rgb, size.Y, size.X), nil
}

// nearest returns the pixel at a position, clamped to 0..n-1.
func nearest(x float64, n int) int { return min(max(int(x), 0), n-1) }

// MemoryBytes returns the memory of the cached mixtures; there are no weights.
func (m *Model) MemoryBytes() (weights, working int) { return 0, m.cache.bytes() }

// Close does nothing: the model holds only memory.
func (m *Model) Close() error { return nil }
