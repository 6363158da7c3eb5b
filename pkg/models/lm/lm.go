// Package lm defines what causal language models have in common. A Language turns conversations into
// token ids and ids into text. A Model is a Language with weights: Forward turns ids into logits, and a
// Sequence is the ids that it has seen, with their keys and values in the cache. The package draws no
// tokens: pkg/models/decoding does, and the sampler service joins the two.
//
// A Family is an architecture, one package each below this one. A Registry lists the families that a
// program can open and finds the family of a folder by its config.json; those of this project are in
// pkg/models/lm/families.
package lm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/models/decoding"
)

// Card is what the rest of the pipeline must know about a model.
type Card struct {
	// Name is the name of the model in events, Family its architecture.
	Name   string `json:"name"`
	Family string `json:"family"`
	// Source is that of model.Card.
	Source string `json:"source,omitempty"`
	// WeightsDigest is the SHA-256 of the folder's files in hex. Equal digests give equal logits with
	// the same build.
	WeightsDigest string `json:"-"`
	// Backend names what computes, e.g. cpu/avx512.
	Backend string `json:"-"`
	// Vocabulary is V, the number of logits of a token. A tokenizer may have fewer ids.
	Vocabulary int `json:"vocabulary"`
	// MaxPositions bounds a sequence, prompts and answers together, in tokens.
	MaxPositions int `json:"max_tokens"`
	// EOS are the ids that end an answer.
	EOS []int32 `json:"eos_token_ids"`
	// Params say how tokens are drawn, MaxNewTokens how many at most, if a prompt does not.
	decoding.Params
	MaxNewTokens int `json:"max_new_tokens"`
	// Dated says that the chat template asks for the day.
	Dated bool `json:"dated"`
	// Reward names the reward functions of prompts that name none; empty: no preference.
	Reward []string `json:"reward"`
	// Notes lists settings of the folder that are ignored, for people.
	Notes []string `json:"notes"`
	// CacheTokens is the most tokens in the cache, over all sequences.
	CacheTokens int `json:"cache_tokens"`
}

// Message is a turn of a conversation. Roles are system, user and assistant.
type Message struct{ Role, Content string }

// Errors of prompts and sequences.
var (
	// ErrPrompt is wrapped by the error for a conversation that the model cannot accept; a retry does not help.
	ErrPrompt = errors.New("conversation that the model cannot take")
	// ErrLong is wrapped by the error for a sequence of more than MaxPositions tokens.
	ErrLong = errors.New("sequence longer than the model's context")
	// ErrFull is wrapped by the error for a full cache. A retry may help once other sequences are closed.
	ErrFull = errors.New("no room in the cache")
)

// Language is a model without its weights: it turns conversations into ids, and ids into text. All
// methods are safe for concurrent use.
type Language interface {
	// Card describes the model; it never changes.
	Card() Card
	Conversation
	// With returns how conversations are written with further variables of the chat template (chat_template_kwargs).
	// The one named strftime_now is the day, such as 2026-11-28, that the template's function of that name gives. A day
	// that is none is an ErrPrompt of its methods.
	With(variables map[string]string) Conversation
	// Piece returns the bytes of a token: none for a special token or an unknown id.
	Piece(id int32) string
}

// Conversation writes conversations as ids.
type Conversation interface {
	// Prompt returns the ids of a conversation, up to the begin of the assistant's answer.
	Prompt(messages []Message) ([]int32, error)
	// Reply returns the ids of messages that follow an answer, up to the begin of the next answer. before is the
	// conversation before the answer. ended says that the last id of the answer is one of Card.EOS: the template
	// writes it at the end of a turn, so Reply leaves it out. It fails with ErrPrompt if the template, with more
	// messages, writes before or the answer in another way.
	Reply(before []Message, answer string, ended bool, messages []Message) ([]int32, error)
}

// Model is a network ready to generate. All methods are safe for concurrent use, except that Close must
// come last, and that a sequence is in one call of Forward at a time.
type Model interface {
	Language
	// NewSequence returns an empty sequence.
	NewSequence() Sequence
	// Forward appends the ids of each row to its sequence and sets the logits after the last or each of them. The bits
	// of a row depend only on the ids of its sequence: neither on other rows, nor on how the ids were split into calls.
	// After an error no sequence has changed, and Logits hold no result.
	Forward(ctx context.Context, rows []Row) error
	// MemoryBytes returns the memory of the weights, and of everything else that is kept
	// between calls.
	MemoryBytes() (weights, working int)
	// Close frees what the model holds.
	Close() error
}

// Row is one sequence in a call of Forward.
type Row struct {
	Sequence Sequence
	IDs      []int32   // at least one
	Logits   []float32 // [V], after the last id; [len(IDs), V], after each; nil if they are not needed
}

// Sequence is the tokens that a model has seen, with their place in its cache.
type Sequence interface {
	// Len returns the number of tokens.
	Len() int
	// Fork returns another sequence of the same tokens. Both use the same part of the cache.
	Fork() Sequence
	// Close frees the sequence's part of the cache. A second call does nothing.
	Close()
}

// Text returns the text of the ids of an answer, as transformers does with skip_special_tokens:
// U+FFFD stands for bytes that are not UTF-8.
func Text(m Language, ids []int32) string {
	var d Decoder
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.Push(m.Piece(id)))
	}
	b.WriteString(d.Flush())
	return b.String()
}

// CheckMessages returns an ErrPrompt unless a conversation has what all templates need: at least
// one message, and known roles.
func CheckMessages(messages []Message) error {
	if len(messages) == 0 {
		return fmt.Errorf("%w: no messages; must be at least one", ErrPrompt)
	}
	for i, m := range messages {
		if m.Role != "system" && m.Role != "user" && m.Role != "assistant" {
			return fmt.Errorf("%w: message %d: role: %.40q; must be system, user or assistant", ErrPrompt, i, m.Role)
		}
	}
	return nil
}
