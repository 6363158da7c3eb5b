package qwenimage_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
)

// A key that nothing knows, in any file of a folder that makes images, is refused by name.
func TestOpen_RefusesUnknownKeys(t *testing.T) {
	t.Parallel()
	open := func(dir string) error {
		info, err := qwenimage.Inspect(dir)
		if err != nil {
			return err
		}
		return errors.New(strings.Join(info.Problems, "; "))
	}
	free := map[string]string{
		"scheduler/":                                                              "pkg/flow reads it, where a schedule is made",
		"text_encoder/generation_config.json:":                                    "a text encoder draws no tokens",
		"text_encoder/config.json:.vision_config":                                 "prompts are texts",
		"tokenizer/added_tokens.json:":                                            "there is an added_tokens_decoder, and transformers reads that alone",
		"tokenizer/tokenizer.json:.decoder":                                       "text is made of the bytes of tokens",
		"tokenizer/tokenizer.json:.model.vocab$":                                  "its keys are tokens; ids that do not fit are refused",
		"tokenizer/tokenizer_config.json:.added_tokens_decoder$":                  "its keys are ids; one that is none is refused",
		"transformer/diffusion_pytorch_model.safetensors.index.json:.weight_map$": "its keys are tensors, which are counted",
		"tokenizer/tokenizer.json:.post_processor.special_tokens$":                "must be empty",
		"tokenizer/vocab.json:":                                                   "there is a tokenizer.json",
		"transformer/diffusion_pytorch_model.safetensors.index.json:.metadata":    "sizes, for people",
	}
	for _, dir := range []string{"../../../../deploy/models/signs", filepath.Join("testdata", "golden", "full")} {
		modeltest.Unread(t, dir, free, open)
	}
}
