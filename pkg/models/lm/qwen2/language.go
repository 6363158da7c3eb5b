package qwen2

import (
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tokenizer"
)

// chatCodec turns conversations into ids and ids into text, by the tokenizer and the chat template of a folder.
type chatCodec struct {
	tokenizer *tokenizer.Tokenizer
	template  *template
	eos       []int32
}

// readChatCodec reads the tokenizer and the chat template of a folder. Faults of both are joined; a
// tokenizer with ids beyond the model's vocabulary is an error.
func readChatCodec(folder *safetensors.Folder, c *configs) (s chatCodec, err error) {
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
func (s chatCodec) Piece(id int32) string { return s.tokenizer.Piece(id) }

// With implements lm.Language.
func (s chatCodec) With(variables map[string]string) lm.Conversation {
	if len(variables) > 0 {
		t := *s.template
		t.variables = variables
		s.template = &t
	}
	return s
}

// Prompt returns the ids of a conversation in the folder's chat template.
func (s chatCodec) Prompt(messages []lm.Message) ([]int32, error) {
	if err := lm.CheckMessages(messages); err != nil {
		return nil, err
	}
	return s.encode(s.template.renderMessages(messages))
}

// Reply implements lm.Language: it returns the ids between an answer to the conversation before and
// the next answer, in which messages are. ended says that the answer has its end token, which is
// then not repeated. A template that writes the answer in another way than it was generated is an
// error.
func (s chatCodec) Reply(before []lm.Message, answer string, ended bool, messages []lm.Message) ([]int32, error) {
	if err := errors.Join(lm.CheckMessages(before), lm.CheckMessages(messages)); err != nil {
		return nil, err
	}
	ids, err := s.encode(s.template.renderReply(before, answer, messages))
	if err == nil && ended && len(ids) > 0 && slices.Contains(s.eos, ids[0]) {
		ids = ids[1:] // the answer has it
	}
	return ids, err
}

// encode returns the ids of a text that a template wrote. err is the template's; it, and a text
// that is too long, become lm.ErrPrompt.
func (s chatCodec) encode(text string, err error) ([]int32, error) {
	var ids []int32
	if err == nil {
		ids, err = s.tokenizer.Encode(text)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", lm.ErrPrompt, err)
	}
	return ids, nil
}

// language is a model without its weights. modules is what adapters can change of them, tensors what they are.
type language struct {
	chatCodec
	card    lm.Card
	modules lora.Table
	tensors lora.Shapes
}

// Card returns the card without the fields that need the weights.
func (l *language) Card() lm.Card { return l.card }

// Modules returns what adapters can change of the weights, as Model.Modules does.
func (l *language) Modules() lora.Table { return l.modules }

// Tensors returns the shapes of the weights, as Model.Tensors does.
func (l *language) Tensors() lora.Shapes { return l.tensors }

// openLanguage implements Family.Language: it opens what turns conversations into ids, without
// weights, for engines whose server has them. Errors are those of the folder's files.
func openLanguage(dir string) (lm.Language, error) {
	return nn.Open(dir, func(folder *safetensors.Folder) (lm.Language, error) {
		c, err := readConfigs(folder)
		if err != nil {
			return nil, err
		}
		s, err := readChatCodec(folder, c)
		if err != nil {
			return nil, err
		}
		card := c.card(dir, min(c.decoder.MaxPositions, mostPositions), 0)
		card.Dated = s.template.dated
		return &language{s, card, c.decoder.Modules(modulePrefix), shapesOf(c.decoder, card.MaxPositions)}, nil
	})
}
