package qwenimage

import (
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// The prompt template of the pipeline, and the number of tokens of its fixed beginning, whose
// hidden states are dropped. The published weights were trained with this template.
const (
	promptPrefix = "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, " +
		"text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
	promptSuffix        = "<|im_end|>\n<|im_start|>assistant\n"
	promptTokensDropped = 34
	// promptTokensLimit is the longest conditioning of the pipeline.
	promptTokensLimit = 1024
)

// textPrefixes are the prefixes of the language model in checkpoints of different versions.
var textPrefixes = []string{"model.language_model.", "language_model.model.", "model."}

// loadTextEncoder reads the layers of the language model of Qwen2.5-VL, which encode prompts. It
// leaves out the vision tower and the output head. What is missing, unexpected or unreadable is
// an error of l.Finish.
func loadTextEncoder(l *nn.Loader, c *nn.DecoderConfig) *nn.Decoder {
	for _, l.Prefix = range textPrefixes {
		if l.Has("embed_tokens.weight") {
			break
		}
	}
	l.Ignored = func(name string) bool {
		return strings.HasPrefix(name, "visual.") || strings.HasPrefix(name, "model.visual.") ||
			strings.HasPrefix(name, "vision_tower.") || name == "lm_head.weight" ||
			name == "language_model.lm_head.weight" || strings.HasSuffix(name, ".rotary_emb.inv_freq")
	}
	// The model sees the fixed beginning, too, although its hidden states are dropped.
	return l.Decoder(c, promptTokensLimit+promptTokensDropped)
}

// promptIDs returns the tokens of a prompt in the template. The whole is tokenized at
// once, as the pipeline does: white space at the ends of the prompt joins the template's.
//
// If there are more than limit tokens after the beginning of the template, the last ones are
// dropped, the end of the template included; cut is how many. The pipeline drops their hidden
// states instead, with the same result: no token depends on later ones.
func promptIDs(tok *tokenizer.Tokenizer, prompt string, limit int) (ids []int32, cut int, err error) {
	if ids, err = tok.Encode(promptPrefix + prompt + promptSuffix); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", model.ErrPrompt, err)
	}
	kept := len(ids) - promptTokensDropped
	if kept <= 0 {
		return nil, 0, fmt.Errorf("%w: the template makes %d tokens; must be more than %d", model.ErrPrompt, len(ids),
			promptTokensDropped)
	}
	if cut = kept - limit; cut > 0 {
		return ids[:promptTokensDropped+limit], cut, nil
	}
	return ids, 0, nil
}
