package qwenimage

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// modelConfigs holds the configurations of a folder.
type modelConfigs struct {
	text        *nn.DecoderConfig
	transformer *transformerConfig
	vae         *vaeConfig
	scheduler   []byte
	defaults    nn.Defaults
}

// pixelsPerToken returns the edge in pixels of a token, which is a 2x2 patch of latents.
func (c *modelConfigs) pixelsPerToken() int { return 2 << c.vae.levels() }

// card returns the card without the fields that need the weights: digest and backend. Sizes
// of faulty configurations are 0.
func (c *modelConfigs) card(dir string, o Options) model.Card {
	card := model.Card{
		Name:              model.NameOf(dir),
		Source:            hub.Source(dir),
		Family:            familyName,
		SchedulerConfig:   c.scheduler,
		Size:              media.ImageSize(c.defaults.Height, c.defaults.Width),
		NumInferenceSteps: c.defaults.NumInferenceSteps,
		TrueCFGScale:      c.defaults.TrueCFGScale,
		Reward:            c.defaults.Reward,
		MaxPixels:         maxPixels(&c.defaults),
		MaxPromptTokens:   o.MaxPromptTokens,
		NegativePrompt:    " ", // of the pipeline
		CFGRule:           model.CFGRescaled,
		IndependentRows:   true,
		Conditioning:      []string{promptEmbeds},
	}
	if c.text != nil {
		card.ConditioningTokenBytes = 4 * int64(c.text.Width)
		card.ConditioningBytes = card.ConditioningTokenBytes * int64(o.MaxPromptTokens)
	}
	if c.transformer != nil && c.vae != nil {
		card.LatentChannels, card.PixelsPerToken = c.transformer.In, c.pixelsPerToken()
	}
	return card
}

// fitTokenizer checks that every token has an embedding.
func (c *modelConfigs) fitTokenizer(t *tokenizer.Tokenizer) error {
	if t.Size() > c.text.Vocabulary {
		return fmt.Errorf("tokenizer: ids up to %d; must be below the text_encoder's vocab_size %d", t.Size()-1,
			c.text.Vocabulary)
	}
	return nil
}

// readConfigs reads and checks all configurations and joins their faults. Without a valid
// model_index.json it returns nil; otherwise the fields of faulty configurations are nil.
func readConfigs(folder *safetensors.Folder) (*modelConfigs, error) {
	if _, err := readIndexConfig(folder); err != nil {
		return nil, err
	}
	c := &modelConfigs{defaults: nn.Defaults{
		Frames: 1, Height: 1024, Width: 1024, NumInferenceSteps: 50,
		TrueCFGScale: 4,
	}}
	var errs [5]error
	c.text, errs[0] = readTextConfig(folder, "text_encoder")
	c.transformer, errs[1] = readTransformerConfig(folder, "transformer")
	c.vae, errs[2] = readVAEConfig(folder, "vae")
	c.scheduler, errs[3] = nn.ReadScheduler(folder)
	errs[4] = c.defaults.Read(folder)
	if err := errors.Join(errs[:]...); err != nil {
		return c, err
	}
	var f nn.Faults
	f.Check(c.defaults.Frames == 1, "%s: frames: %d; must be 1, the model makes images", nn.DefaultsFile,
		c.defaults.Frames)
	f.Check(c.defaults.FPS == nil, "%s: fps: must not be there, the model makes images", nn.DefaultsFile)
	f.Check(c.transformer.TextWidth == c.text.Width,
		"transformer: joint_attention_dim: %d; must be the text_encoder's hidden_size = %d", c.transformer.TextWidth,
		c.text.Width)
	f.Check(c.transformer.Out == c.vae.Latents,
		"transformer: out_channels: %d; must be the vae's z_dim = %d", c.transformer.Out, c.vae.Latents)
	return c, errors.Join(f...)
}

// newDigest returns a digest of the configurations and the tokenizer, to which the weights are added.
func newDigest(folder *safetensors.Folder) (*safetensors.Digest, error) {
	d := safetensors.NewDigest()
	return d, d.Files(folder, tokenizer.MaxFile,
		"text_encoder/config.json", "transformer/config.json", "vae/config.json",
		"tokenizer/tokenizer.json", "tokenizer/vocab.json", "tokenizer/merges.txt",
		"tokenizer/tokenizer_config.json", "tokenizer/added_tokens.json")
}
