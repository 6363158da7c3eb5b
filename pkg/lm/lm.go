// Package lm is what causal language models have in common: conversations to token ids, ids
// to logits over a cache of what came before, ids to text. It draws no tokens: that is
// pkg/decoding's, and who joins the two decides when.
//
// The networks are families, one package each below this one. A Registry lists those that a
// program can open, by the config.json of a folder; the families of this project are in
// pkg/lm/families.
package lm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/meander-rl/meander/pkg/decoding"
	"github.com/meander-rl/meander/pkg/lora"
)

// Card is what the rest of the pipeline must know about a model.
type Card struct {
	// Name tells this model from others, Family the architecture.
	Name, Family string
	// WeightsDigest is the SHA-256 of the folder's files in hex: equal digests, equal logits on
	// one build.
	WeightsDigest string
	// Backend names what computes, e.g. cpu/avx512.
	Backend string
	// Vocabulary is V, the logits of a token. A tokenizer may know fewer ids.
	Vocabulary int
	// MaxPositions bounds a sequence, prompts and answers together, in tokens.
	MaxPositions int
	// EOS are the ids that end an answer.
	EOS []int32
	// Decoding is how tokens are drawn, and MaxNewTokens how many, where a prompt does not say.
	Decoding     decoding.Params
	MaxNewTokens int
	// Reward names the reward functions of prompts that name none; empty: no preference.
	Reward []string
	// Notes are what the folder asks for and nobody follows.
	Notes []string
	// CacheTokens is how many tokens the caches of all sequences hold at most.
	CacheTokens int
}

// Message is a turn of a conversation. Roles are system, user and assistant.
type Message struct{ Role, Content string }

// ErrPrompt is wrapped by the errors of a conversation that the model cannot take, however
// often it is tried, ErrLong by those of a sequence of more than MaxPositions tokens, and
// ErrFull by that of a cache without room: it has some again when sequences are closed.
var (
	ErrPrompt = errors.New("conversation that the model cannot take")
	ErrLong   = errors.New("sequence longer than the model's context")
	ErrFull   = errors.New("no room in the cache")
)

// Language is what there is of a model without its weights: how conversations become ids, and ids text. All methods are
// safe for concurrent use.
type Language interface {
	// Card describes the model; it never changes.
	Card() Card
	// Prompt gives the ids of a conversation up to where the assistant speaks.
	Prompt(messages []Message) ([]int32, error)
	// Reply gives the ids between an answer to the conversation before and the next answer: messages came in between.
	// ended says whether the answer's last id ended it (Card.EOS), so that the template's end of a turn is there in part.
	// It fails with ErrPrompt where the template does not continue what Prompt gave for the conversation before, and the
	// answer.
	Reply(before []Message, answer string, ended bool, messages []Message) ([]int32, error)
	// Piece is the bytes of a token; none for a special one, and for an id of no token.
	Piece(id int32) string
}

// Model is a network ready to generate. All methods are safe for concurrent use, except that
// Close must come last, and that a sequence is in one call of Forward at a time.
type Model interface {
	Language
	// NewSequence is an empty sequence.
	NewSequence() Sequence
	// Forward appends ids to each sequence and gives the logits that follow the last of them. The
	// bits of a row depend on the ids of its sequence alone: not on other rows, nor on how they were
	// cut into calls. On an error no sequence has changed, and Logits hold no result.
	Forward(ctx context.Context, rows []Row) error
	// MemoryBytes returns the memory of the weights, and that of everything kept between
	// calls besides.
	MemoryBytes() (weights, working int)
	// Close frees what the model holds.
	Close() error
}

// Row is what Forward does with a sequence.
type Row struct {
	Sequence Sequence
	IDs      []int32   // at least one
	Logits   []float32 // [V]; nil where nobody needs them
}

// Sequence is the tokens that a model has seen, in its cache.
type Sequence interface {
	// Len is how many there are.
	Len() int
	// Fork is another sequence of the same tokens, whose part of the cache both use.
	Fork() Sequence
	// Close gives the cache back. It may be called twice.
	Close()
}

// Adaptable is a model that LoRAs can be added to while it is in use.
type Adaptable interface {
	Model
	// BaseDigest names the checkpoint, without adapters.
	BaseDigest() string
	// Modules is what adapters can change.
	Modules() lora.Table
	// Adapted returns the checkpoint plus the adapters, whatever adapters the model has. No files
	// are read, and what no adapter changes is shared, the cache not: sequences belong to the model
	// that made them. Both models stay usable, and each must be closed. No adapters give the
	// checkpoint again. An adapter that does not fit is an error.
	Adapted(adapters ...lora.Weighted) (Model, error)
}

// Text is what ids say, as transformers has it with skip_special_tokens: bytes that are no
// UTF-8 are U+FFFD.
func Text(m Language, ids []int32) string {
	var d Decoder
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(d.Push(m.Piece(id)))
	}
	b.WriteString(d.Flush())
	return b.String()
}

// CheckMessages checks what all templates ask of a conversation.
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
