package qwenimage

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/model/tokenizer"
	"github.com/meander-rl/meander/pkg/safetensors"
)

// modelConfigs is everything that a folder says besides its tensors.
type modelConfigs struct {
	text        *textConfig
	transformer *transformerConfig
	vae         *vaeConfig
	scheduler   []byte
	defaults    sampleDefaults
}

// sampleDefaults is meander.json, an optional file that diffusers ignores: what to paint
// where a prompt does not say.
type sampleDefaults struct {
	Height            int     `json:"height"`
	Width             int     `json:"width"`
	NumInferenceSteps int     `json:"num_inference_steps"`
	TrueCFGScale      float64 `json:"true_cfg_scale"`
	// Reward names reward functions that suit the images.
	Reward []string `json:"reward"`
}

// Paths in a model folder.
const (
	schedulerFile = "scheduler/scheduler_config.json"
	defaultsFile  = "meander.json"
)

// pixelsPerToken is the edge of what a token covers: a 2x2 patch of latents.
func (c *modelConfigs) pixelsPerToken() int { return 2 << c.vae.levels() }

// card is that of the model without what only its weights tell; sizes of configurations
// with faults are 0.
func (c *modelConfigs) card(dir string, o Options) model.Card {
	card := model.Card{
		Name:              model.NameOf(dir),
		Family:            familyName,
		SchedulerConfig:   c.scheduler,
		Height:            o.Height,
		Width:             o.Width,
		NumInferenceSteps: o.NumInferenceSteps,
		TrueCFGScale:      o.TrueCFGScale,
		Reward:            c.defaults.Reward,
		MaxPixels:         o.MaxPixels,
		MaxPromptTokens:   o.MaxPromptTokens,
		NegativePrompt:    " ", // of the pipeline
		CFGRule:           model.CFGRescaled,
		Conditioning:      []string{promptEmbeds},
	}
	if c.transformer != nil && c.vae != nil {
		card.LatentChannels, card.PixelsPerToken = c.transformer.In, c.pixelsPerToken()
	}
	return card
}

// checkDefaults holds the default size against what the model can paint.
func checkDefaults(c model.Card) error {
	if _, err := c.Tokens(c.Height, c.Width); err != nil {
		return fmt.Errorf("default size: %w", err)
	}
	return nil
}

// fitTokenizer checks that every token has an embedding.
func (c *modelConfigs) fitTokenizer(t *tokenizer.Tokenizer) error {
	if t.Size() > c.text.Vocabulary {
		return fmt.Errorf("tokenizer: ids up to %d, but text_encoder has vocab_size %d", t.Size()-1, c.text.Vocabulary)
	}
	return nil
}

// readConfigs reads and checks all configurations, reporting the faults of all. Without a
// model_index.json there are none, and it returns nil; otherwise a configuration with
// faults is nil.
func readConfigs(folder *safetensors.Folder) (*modelConfigs, error) {
	if _, err := readIndexConfig(folder); err != nil {
		return nil, err
	}
	c := &modelConfigs{defaults: sampleDefaults{Height: 1024, Width: 1024, NumInferenceSteps: 50, TrueCFGScale: 4}}
	var errs [5]error
	c.text, errs[0] = readTextConfig(folder, "text_encoder")
	c.transformer, errs[1] = readTransformerConfig(folder, "transformer")
	c.vae, errs[2] = readVAEConfig(folder, "vae")
	c.scheduler, errs[3] = folder.Read(schedulerFile, nn.MaxConfigFile)
	if errs[3] == nil && !json.Valid(c.scheduler) {
		c.scheduler, errs[3] = nil, fmt.Errorf("read %s: not JSON", schedulerFile)
	}
	if errs[4] = nn.ReadJSON(folder, defaultsFile, &c.defaults); errors.Is(errs[4], fs.ErrNotExist) {
		errs[4] = nil
	}
	if err := errors.Join(errs[:]...); err != nil {
		return c, err
	}
	var f nn.Faults
	f.Check(c.transformer.TextWidth == c.text.Width,
		"transformer joint_attention_dim = %d, but text_encoder hidden_size = %d", c.transformer.TextWidth, c.text.Width)
	f.Check(c.transformer.Out == c.vae.Latents,
		"transformer out_channels = %d, but vae z_dim = %d", c.transformer.Out, c.vae.Latents)
	return c, errors.Join(f...)
}

// newDigest starts with configurations and tokenizer.
func newDigest(folder *safetensors.Folder) (*nn.Digest, error) {
	d := nn.NewDigest()
	return d, d.Files(folder, tokenizer.MaxFile,
		"text_encoder/config.json", "transformer/config.json", "vae/config.json",
		"tokenizer/tokenizer.json", "tokenizer/vocab.json", "tokenizer/merges.txt",
		"tokenizer/tokenizer_config.json", "tokenizer/added_tokens.json")
}
