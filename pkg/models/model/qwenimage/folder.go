package qwenimage

import (
	"errors"
	"fmt"
	"math"

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
	f.Check(c.defaults.Arguments == nil, "%s: arguments: must not be there, only whole pipelines have some",
		nn.DefaultsFile)
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

// Inspect reads configurations and headers of a folder in the diffusers layout. An error
// means that it is not such a folder; all other faults are in Problems.
func Inspect(dir string) (_ *model.Info, err error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("inspect model: %w", err)
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	c, err := readConfigs(folder)
	if c == nil {
		return nil, fmt.Errorf("inspect model %q: %w", dir, err)
	}
	info := &model.Info{}
	info.Problem(err)
	var o Options
	fault := o.setDefaults(&c.defaults)
	info.Problem(fault)
	info.Card = c.card(dir, o)
	if info.PixelsPerToken > 0 && fault == nil {
		info.Problem(info.Card.Validate())
	}
	if tok, err := tokenizer.Read(folder, "tokenizer"); err != nil {
		info.Problem(err)
	} else {
		info.Vocabulary = tok.Size()
		info.CountTokens = func(prompt string) (int, error) {
			ids, _, err := promptIDs(tok, prompt, math.MaxInt)
			return len(ids) - promptTokensDropped, err
		}
		if c.text != nil {
			info.Problem(c.fitTokenizer(tok))
		}
	}
	for _, p := range []struct {
		name, class string
		known       bool // its configuration could be read
		load        func(*nn.Loader)
	}{
		{"text_encoder", textEncoderClass, c.text != nil, func(l *nn.Loader) { loadTextEncoder(l, c.text) }},
		{"transformer", transformerClass, c.transformer != nil, func(l *nn.Loader) { loadMMDiT(l, c.transformer) }},
		{"vae", autoencoderClass, c.vae != nil, func(l *nn.Loader) { loadAutoencoder(l, c.vae) }},
	} {
		if !p.known {
			p.load = nil
		}
		nn.InspectPart(info, folder, p.name, p.class, p.load)
	}
	if c.text != nil && c.transformer != nil && c.vae != nil {
		info.Pass = c.passBytes(o.MaxPromptTokens)
		info.LoRA = c.transformer.loraBytes
	}
	return info, nil
}
