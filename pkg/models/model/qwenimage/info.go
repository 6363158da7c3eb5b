package qwenimage

import (
	"errors"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

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
