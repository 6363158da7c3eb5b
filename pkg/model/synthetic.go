package model

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"math"
	"slices"
)

// Synthetic is a model without a network: each prompt stands for a Gaussian mixture
// over latents (Mixture), whose velocity has a closed form, and each mixture component
// for a soft colour picture. What a sampler ought to produce is therefore known
// exactly, at any picture size, at almost no cost: for load tests, for tests of
// solvers and transitions, and for a first run without weights.
type Synthetic struct {
	cfg   SyntheticConfig
	card  Card
	cache *mixtureCache
}

// SyntheticConfig shapes the mixtures.
type SyntheticConfig struct {
	// Components of each mixture, 1 to 64.
	Components int
	// MinStd and MaxStd bound the components' standard deviations, which are drawn from
	// the prompt; 0 < MinStd <= MaxStd. Latents are of order 1.
	MinStd, MaxStd float64
	// Contrast >= 0 multiplies the means. At 0 every component is centred at zero, and
	// with one component the data is N(0, std^2) in each element.
	Contrast float64
}

// DefaultSyntheticConfig gives three pictures per prompt, each with visible variety.
func DefaultSyntheticConfig() SyntheticConfig {
	return SyntheticConfig{Components: 4, MinStd: 0.12, MaxStd: 0.24, Contrast: 1}
}

// Validate joins all faults by field name.
func (c SyntheticConfig) Validate() error {
	var faults []error
	if c.Components < 1 || c.Components > 64 {
		faults = append(faults, fmt.Errorf("components = %d: want 1 to 64", c.Components))
	}
	if !(c.MinStd > 0) || !(c.MaxStd >= c.MinStd) || math.IsInf(c.MaxStd, 1) {
		faults = append(faults, fmt.Errorf("min_std, max_std = %v, %v: want finite and 0 < min_std <= max_std", c.MinStd, c.MaxStd))
	}
	if !(c.Contrast >= 0) || math.IsInf(c.Contrast, 1) {
		faults = append(faults, fmt.Errorf("contrast = %v: want a finite number of at least 0", c.Contrast))
	}
	return errors.Join(faults...)
}

// syntheticScheduler has the constants that Qwen-Image's scheduler_config.json has.
const syntheticScheduler = `{
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

// syntheticRevision is part of the weights digest: it changes with any formula that
// turns a prompt into a mixture or latents into a picture.
const syntheticRevision = 1

// NewSynthetic returns the synthetic model with its default mixtures.
func NewSynthetic() *Synthetic {
	return newSynthetic(DefaultSyntheticConfig())
}

// NewSyntheticWith returns a synthetic model with mixtures of another shape.
func NewSyntheticWith(cfg SyntheticConfig) (*Synthetic, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("synthetic model: %w", err)
	}
	return newSynthetic(cfg), nil
}

func newSynthetic(cfg SyntheticConfig) *Synthetic {
	digest := sha256.Sum256(fmt.Appendf(nil, "synthetic revision=%d components=%d min_std=%x max_std=%x contrast=%x",
		syntheticRevision, cfg.Components, cfg.MinStd, cfg.MaxStd, cfg.Contrast))
	return &Synthetic{
		cfg: cfg,
		card: Card{
			Name: "synthetic", Family: "synthetic", WeightsDigest: hex.EncodeToString(digest[:]),
			SchedulerConfig: []byte(syntheticScheduler),
			LatentChannels:  syntheticChannels, PixelsPerToken: syntheticEdge,
			Height: 64, Width: 64, NumInferenceSteps: 10, TrueCFGScale: 1,
			MaxPixels: 8192 * syntheticEdge * syntheticEdge, MaxPromptTokens: 1,
			CFGRule: CFGRescaled, Backend: "cpu",
		},
		cache: newMixtureCache(cacheElements),
	}
}

// Card describes the model.
func (m *Synthetic) Card() Card {
	card := m.card
	card.SchedulerConfig = slices.Clone(card.SchedulerConfig)
	return card
}

// Encode turns each prompt into one token that holds its SHA-256 and the colours of
// its pictures. Common colour names in the text set these colours. Any text will do,
// the empty one too.
func (m *Synthetic) Encode(ctx context.Context, prompts []string) ([]*Conditioning, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := make([]*Conditioning, len(prompts))
	for i, p := range prompts {
		e := embed(p)
		out[i] = &Conditioning{Prompt: p, Embeds: e[:], Tokens: 1, Width: len(e)}
	}
	return out, nil
}

// EncodeTruncated is Encode, since no prompt is too long.
func (m *Synthetic) EncodeTruncated(ctx context.Context, prompts []string) ([]*Conditioning, error) {
	return m.Encode(ctx, prompts)
}

// Velocity is Mixture.Velocity row by row.
func (m *Synthetic) Velocity(ctx context.Context, dst, x [][]float32, sigma []float32, cond []*Conditioning, height, width int) error {
	tokens, err := m.card.Tokens(height, width)
	if err != nil {
		return err
	}
	if len(dst) != len(x) || len(sigma) != len(x) || len(cond) != len(x) {
		return fmt.Errorf("velocity: %d results, %d latents, %d sigmas, %d conditionings: want as many of each", len(dst), len(x), len(sigma), len(cond))
	}
	size := tokens * syntheticChannels
	for i := range x {
		if err := ctx.Err(); err != nil {
			return err
		}
		if len(x[i]) != size || len(dst[i]) != size {
			return fmt.Errorf("velocity: row %d: latents of %d and result of %d elements: want %d", i, len(x[i]), len(dst[i]), size)
		}
		if !(sigma[i] >= 0 && sigma[i] <= maxSigma) {
			return fmt.Errorf("velocity: row %d: sigma = %v: want 0 to 1", i, sigma[i])
		}
		mix, err := m.mixture(cond[i], height, width)
		if err != nil {
			return fmt.Errorf("velocity: row %d: %w", i, err)
		}
		mix.Velocity(dst[i], x[i], float64(sigma[i]))
	}
	return nil
}

// Mixture returns the data distribution of a prompt at a picture size. It is shared
// with the model and must not be changed.
func (m *Synthetic) Mixture(prompt string, height, width int) (*Mixture, error) {
	if _, err := m.card.Tokens(height, width); err != nil {
		return nil, err
	}
	e := embed(prompt)
	return m.mixture(&Conditioning{Prompt: prompt, Embeds: e[:], Tokens: 1, Width: len(e)}, height, width)
}

func (m *Synthetic) mixture(cond *Conditioning, height, width int) (*Mixture, error) {
	if cond == nil || cond.Tokens != 1 || cond.Width != embedWidth || len(cond.Embeds) != embedWidth {
		return nil, errors.New("conditioning is not of the synthetic model")
	}
	key := mixtureKey{embeds: [embedWidth]float32(cond.Embeds), height: height, width: width}
	digest, err := key.digest()
	if err != nil {
		return nil, err
	}
	size := height / syntheticEdge * (width / syntheticEdge) * syntheticChannels
	return m.cache.get(key, size*m.cfg.Components, func() *Mixture {
		return newMixture(m.cfg, digest, key)
	}), nil
}

// Decode blends the tokens' pictures (see decodeTokens) and clamps each colour to
// 0..255. Latents must be finite.
func (m *Synthetic) Decode(ctx context.Context, latents []float32, height, width int) (*image.NRGBA, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	tokens, err := m.card.Tokens(height, width)
	if err != nil {
		return nil, err
	}
	if len(latents) != tokens*syntheticChannels {
		return nil, fmt.Errorf("decode: latents of %d elements: want %d", len(latents), tokens*syntheticChannels)
	}
	for i, z := range latents {
		if z-z != 0 {
			return nil, fmt.Errorf("decode: latent %d is %v", i, z)
		}
	}
	return decodeTokens(latents, height, width), nil
}

// Close does nothing: the model holds only memory.
func (m *Synthetic) Close() error { return nil }
