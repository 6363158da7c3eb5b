package qwen2

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/model/tokenizer"
	"github.com/meander-rl/meander/pkg/safetensors"
)

// script is how a folder writes conversations as ids, and ids as text.
type script struct {
	tokenizer *tokenizer.Tokenizer
	template  *template
}

func readScript(folder *safetensors.Folder, c *configs) (s script, err error) {
	var errs [2]error
	s.tokenizer, errs[0] = tokenizer.Read(folder, ".")
	s.template, errs[1] = readTemplate(folder)
	if err := errors.Join(errs[:]...); err != nil {
		return s, err
	}
	return s, c.fitTokenizer(s.tokenizer)
}

// Piece is the bytes of a token.
func (s script) Piece(id int32) string { return s.tokenizer.Piece(id) }

// Prompt gives the ids of a conversation in the folder's chat template.
func (s script) Prompt(messages []lm.Message) ([]int32, error) {
	if err := lm.CheckMessages(messages); err != nil {
		return nil, err
	}
	return s.ids(s.template.prompt(messages))
}

// Reply gives the ids between two answers.
func (s script) Reply(ended bool, messages []lm.Message) ([]int32, error) {
	if err := lm.CheckMessages(messages); err != nil {
		return nil, err
	}
	return s.ids(s.template.reply(ended, messages))
}

func (s script) ids(text string) ([]int32, error) {
	ids, err := s.tokenizer.Encode(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", lm.ErrPrompt, err)
	}
	return ids, nil
}

// language is a folder without its weights.
type language struct {
	script
	card lm.Card
}

// Card describes the model, as far as its configurations do.
func (l *language) Card() lm.Card { return l.card }

func openLanguage(dir string) (lm.Language, error) {
	return nn.Open(dir, func(folder *safetensors.Folder) (lm.Language, error) {
		c, err := readConfigs(folder)
		if err != nil {
			return nil, err
		}
		s, err := readScript(folder, c)
		if err != nil {
			return nil, err
		}
		return &language{s, c.card(dir, min(c.decoder.MaxPositions, mostPositions), 0)}, nil
	})
}
