package texts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// A conversation is one sequence: each answer is generated, each reply of the interaction given. While the episode
// waits for the reply it rests: its part of the cache is freed first when memory is short, and computed again to the
// same bits.

// resting are the episodes of a model that wait for the reply of their interaction.
type resting struct {
	mu   sync.Mutex
	list []*tokenEpisode // the longest first
}

func (x *resting) add(p *tokenEpisode) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = append(x.list, p)
}

func (x *resting) remove(p *tokenEpisode) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.list = slices.DeleteFunc(x.list, func(o *tokenEpisode) bool { return o == p })
}

// dropCaches frees the cache of resting episodes, who compute it again when their replies come; false: there was none.
func (x *resting) dropCaches() (dropped bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, episode := range x.list {
		if episode.sequence != nil {
			episode.sequence.Close()
			episode.sequence, dropped = nil, true
		}
	}
	return dropped
}

// freeCache frees what can be computed again: kept prefixes, or else resting episodes; false: there was nothing.
func (e *tokenEngine) freeCache() bool { return e.prefixes.forgetAll() || e.resting.dropCaches() }

// conversing is the part of a transcript that belongs to the answer being generated, for its interaction.
type conversing struct {
	firstEvent   int64        // the first event of the answer
	lse          []float32    // log-sum-exps of its tokens
	logits       answerLogits // of its tokens
	ask          *schemas.InteractRequest
	conversation string // how the conversation ended
}

// newQuestion returns the question at the end of an answer; of too many tokens without their values.
func (p *transcript) newQuestion() *schemas.InteractRequest {
	x, turn := p.req.Text, p.turns[len(p.turns)-1]
	t := &schemas.TextResult{Settings: *x, Turns: p.turns}
	r := &schemas.InteractRequest{
		Name: x.Interaction.Name, Params: x.Interaction.Params, Answer: answerOf(int64(len(p.turns)) - 1),
		MaxTurns:     x.Answers(),
		Messages:     append(t.Messages(), schemas.Message{Role: schemas.RoleAssistant, Content: turn.Text}),
		FinishReason: turn.FinishReason,
		GroundTruth:  p.req.Group.GroundTruth(), Metadata: p.req.Group.Metadata, LogitsKind: x.LogitsKind(),
		Logits: p.conversing.logits.logits, Vocabulary: x.Vocabulary,
		// what follows is never null: one case less for workers
		FirstEvent: p.firstEvent, EventCount: p.eventCount - p.firstEvent,
		IDs: []int64{}, LogProbs: []float32{}, ProcessedLogProbs: []float32{}, LogSumExps: []float32{},
		Entropies: []float32{},
	}
	if x.StoresLogits(r.Answer) && r.EventCount > 0 && turn.End > turn.Begin {
		r.LogitsForm = x.Logits.Form
	}
	if r.Params == nil {
		r.Params = map[string]string{}
	}
	if turn.End-turn.Begin > schemas.MaxInteractTokens {
		return r
	}
	for _, id := range p.ids[turn.Begin:turn.End] {
		r.IDs = append(r.IDs, int64(id))
	}
	given := p.given()
	for i, to := range []*[]float32{&r.LogProbs, &r.ProcessedLogProbs, &r.Entropies} {
		if given[i] {
			*to = append(*to, p.values[i][turn.Begin:turn.End]...)
		}
	}
	r.LogSumExps = append(r.LogSumExps, p.lse...)
	return r
}

// answerOf returns the number of the answer that a turn is, from 0: turns are prompt, answer, reply, answer ...
func answerOf(turn int64) int64 { return (turn - 1) / 2 }

// answerLogits are the logits of an answer that its interaction gets; none if they are too many (much).
type answerLogits struct {
	logits  *schemas.TokenLogits
	tooMany bool
}

// addLogits adds the logits of an event. Beyond a size it keeps none: the interaction reads them from the events.
func (h *answerLogits) addLogits(l *schemas.TokenLogits) {
	if l == nil || h.tooMany {
		return
	}
	if h.logits == nil {
		h.logits = &schemas.TokenLogits{}
	}
	if h.logits.Bytes()+l.Bytes() > schemas.MaxInteractLogits {
		*h = answerLogits{tooMany: true}
		return
	}
	h.logits.Append(l)
}

// Asks returns the question for the interaction; nil while the model generates.
func (p *transcript) Asks() *schemas.InteractRequest { return p.ask }

// Rest does nothing: a transcript has no memory to free.
func (p *transcript) Rest() {}

// Told adds the interaction's reply and begins the next answer, unless the conversation ends: by the interaction, after
// its last answer, or where the context is full.
func (p *transcript) Told(_ context.Context, reply *schemas.InteractReply) error {
	x, last, answer := p.req.Text, &p.turns[len(p.turns)-1], p.ask.Answer
	p.conversing = conversing{}
	last.Score, last.Reply, last.Metadata = reply.Score, reply.Content, reply.Metadata
	if reply.Terminate {
		p.closeConversation(schemas.ConversationTerminated)
		return nil
	}
	if answer+1 == x.Answers() {
		p.closeConversation(schemas.ConversationMaxTurns)
		return nil
	}
	ids, err := ReplyIDs(p.language, &schemas.TextResult{Settings: *x, Turns: p.turns}, p.ids)
	if errors.Is(err, lm.ErrPrompt) {
		return engine.Failed("interaction %s, answer %d: %w", x.Interaction.Name, answer, err)
	}
	if err != nil {
		return fmt.Errorf("encode the reply: %w", err)
	}
	begin := int64(len(p.ids))
	end := begin + int64(len(ids))
	if end >= int64(p.maxTokens) {
		p.closeConversation(schemas.ConversationContext)
		return nil
	}
	p.ids = append(p.ids, ids...)
	p.turns = append(p.turns, schemas.Turn{Begin: begin, End: end}, schemas.Turn{Begin: end, End: end, Generated: true})
	p.appendGiven(len(ids))
	p.firstEvent = p.eventCount
	p.text.Reset()
	p.decoder = lm.Decoder{}
	return nil
}

// closeConversation ends the text; state says why.
func (p *transcript) closeConversation(state string) { p.conversation, p.ended = state, true }

// Rest lets the engine free the episode's cache until Told.
func (p *tokenEpisode) Rest() { p.e.resting.add(p) }

// Told adds the interaction's reply, and has the model evaluate it.
func (p *tokenEpisode) Told(ctx context.Context, reply *schemas.InteractReply) error {
	p.e.resting.remove(p)
	if err := p.transcript.Told(ctx, reply); err != nil || p.ended {
		return err
	}
	return p.prefill(ctx)
}

// ReplyIDs returns the tokens of the reply to the last answer, in the model's template; ids end with that answer.
func ReplyIDs(m lm.Language, t *schemas.TextResult, ids []int32) ([]int32, error) {
	answer := t.Turns[len(t.Turns)-1]
	ended := slices.Contains(m.Card().EOS, ids[len(ids)-1])
	return m.With(t.Settings.ChatTemplateKwargs).Reply(messages(t.Messages()), answer.Text, ended,
		[]lm.Message{{Role: schemas.RoleUser, Content: answer.Reply}})
}

// prefill has the model evaluate the ids that it has not seen. Without free cache the next Step tries again.
func (p *tokenEpisode) prefill(ctx context.Context) error {
	if p.sequence == nil {
		p.sequence = p.e.model.NewSequence()
	}
	for p.unseen = slices.Clone(p.ids[p.sequence.Len():]); ; {
		err := p.e.model.Forward(ctx, []lm.Row{{Sequence: p.sequence, IDs: p.unseen, Logits: p.logits}})
		switch {
		case err == nil:
			p.unseen = nil
			return nil
		case !errors.Is(err, lm.ErrFull):
			return fmt.Errorf("prefill: %w", err)
		case !p.e.freeCache():
			return nil
		}
	}
}
