package qwen2

import (
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/model/tokenizer"
	"github.com/meander-rl/meander/pkg/safetensors"
)

// script turns conversations into ids and ids into text, by the tokenizer and the chat template of a folder.
type script struct {
	tokenizer *tokenizer.Tokenizer
	template  *template
	eos       []int32
}

// readScript reads the tokenizer and the chat template of a folder.
func readScript(folder *safetensors.Folder, c *configs) (s script, err error) {
	var errs [2]error
	s.tokenizer, errs[0] = tokenizer.Read(folder, ".")
	s.template, errs[1] = readTemplate(folder)
	s.eos = c.generation.EOS
	if err := errors.Join(errs[:]...); err != nil {
		return s, err
	}
	return s, c.fitTokenizer(s.tokenizer)
}

// Piece returns the bytes of a token.
func (s script) Piece(id int32) string { return s.tokenizer.Piece(id) }

// Prompt returns the ids of a conversation in the folder's chat template.
func (s script) Prompt(messages []lm.Message) ([]int32, error) {
	if err := lm.CheckMessages(messages); err != nil {
		return nil, err
	}
	return s.encode(s.template.renderMessages(messages))
}

// Reply returns the ids between two answers.
func (s script) Reply(before []lm.Message, answer string, ended bool, messages []lm.Message) ([]int32, error) {
	if err := errors.Join(lm.CheckMessages(before), lm.CheckMessages(messages)); err != nil {
		return nil, err
	}
	ids, err := s.encode(s.template.renderReply(before, answer, messages))
	if err == nil && ended && len(ids) > 0 && slices.Contains(s.eos, ids[0]) {
		ids = ids[1:] // the answer has it
	}
	return ids, err
}

// encode returns the ids of the text of a template. It makes its errors ErrPrompt.
func (s script) encode(text string, err error) ([]int32, error) {
	var ids []int32
	if err == nil {
		ids, err = s.tokenizer.Encode(text)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", lm.ErrPrompt, err)
	}
	return ids, nil
}

// language is a model without its weights.
type language struct {
	script
	card lm.Card
}

// Card returns the card without the fields that need the weights.
func (l *language) Card() lm.Card { return l.card }

// openLanguage implements Family.Language.
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
