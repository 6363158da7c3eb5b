package qwen2

import (
	"encoding/json"

	"github.com/meander-rl/meander/pkg/models/lm"
)

// CacheInUse is the tokens that pages in use have room for.
func CacheInUse(m *Model) int { return m.cache.pages.InUse() }

// RenderTemplate writes messages in a template, with the tokens of a tokenizer_config.json.
func RenderTemplate(text string, config []byte, messages []lm.Message) (string, error) {
	t, err := testTemplate(text, config)
	if err != nil {
		return "", err
	}
	return t.renderMessages(messages)
}

// ReplyTemplate writes what a template has between an answer and the next one.
func ReplyTemplate(text string, config []byte, before []lm.Message, answer string, messages []lm.Message) (string,
	error,
) {
	t, err := testTemplate(text, config)
	if err != nil {
		return "", err
	}
	return t.renderReply(before, answer, messages)
}

func testTemplate(text string, config []byte) (*template, error) {
	side := map[string]json.RawMessage{}
	if config != nil {
		if err := json.Unmarshal(config, &side); err != nil {
			return nil, err
		}
	}
	tokens, err := specialTokens(side, text)
	if err != nil {
		return nil, err
	}
	return parseTemplate(text, tokens)
}
