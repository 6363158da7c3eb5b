package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/schemas"
)

// A conversation is one sequence: each answer is generated, and what the interaction says to it given. In between the episode
// rests, and its part of the cache is the first that goes where there is no room. It is computed anew then, to the same bits.

// resting are the episodes of a model that wait for others.
type resting struct {
	mu   sync.Mutex
	list []*tokenEpisode // the one that rests longest first
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

// drop takes the cache of all that rest; false: there is nothing to take.
func (x *resting) drop() (some bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, p := range x.list {
		if p.sequence != nil {
			p.sequence.Close()
			p.sequence, some = nil, true
		}
	}
	return some
}

// makeRoom frees what the cache can do without; false: there is nothing.
func (e *tokenEngine) makeRoom() bool { return e.prefixes.drop() || e.resting.drop() }

// conversing is the part of a transcript that an interaction has.
type conversing struct {
	first        int64     // event of the turn that is generated
	lse          []float32 // of its tokens
	logits       handed    // of its tokens
	ask          *schemas.InteractRequest
	conversation string // how it ended
}

// asked is what the interaction is to be asked at the end of an answer.
func (p *transcript) asked() *schemas.InteractRequest {
	x, turn := p.req.Text, p.turns[len(p.turns)-1]
	t := &schemas.TextResult{Settings: *x, Turns: p.turns}
	r := &schemas.InteractRequest{
		Name: x.Interaction.Name, Params: x.Interaction.Params, Answer: answerOf(int64(len(p.turns)) - 1), MaxTurns: x.Answers(),
		Messages: append(t.Messages(), schemas.Message{Role: schemas.RoleAssistant, Content: turn.Text}), FinishReason: turn.FinishReason,
		GroundTruth: p.req.Group.GroundTruth(), Metadata: p.req.Group.Metadata, LogitsKind: x.LogitsKind(), Logits: p.conversing.logits.logits,
		FirstEvent: p.first, EventCount: p.n - p.first, // what follows is never null: one case less for workers
		IDs: []int64{}, LogProbs: []float32{}, ProcessedLogProbs: []float32{}, LogSumExps: []float32{}, Entropies: []float32{},
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
	for _, list := range []struct {
		given bool
		to    *[]float32
		of    []float32
	}{{p.numbers.LogProbs, &r.LogProbs, p.logProbs}, {p.numbers.ProcessedLogProbs, &r.ProcessedLogProbs, p.processed}, {p.numbers.Entropies, &r.Entropies, p.entropy}} {
		if list.given {
			*list.to = append(*list.to, list.of[turn.Begin:turn.End]...)
		}
	}
	r.LogSumExps = append(r.LogSumExps, p.lse...)
	return r
}

// answerOf is which of the model's answers a turn is, from 0.
func answerOf(turn int64) int64 { return (turn - 1) / 2 }

// handed are the logits of an answer that an interaction gets, as long as they are few.
type handed struct {
	logits *schemas.TokenLogits
	much   bool
}

// add takes those of an event.
func (h *handed) add(l *schemas.TokenLogits) {
	switch {
	case l == nil || h.much:
	case l.Form == schemas.LogitsFull, h.size()+len(l.Values.Data)+idBytes(l) > schemas.MaxInteractLogits:
		*h = handed{much: true}
	case h.logits == nil:
		h.logits = &schemas.TokenLogits{Form: l.Form, Values: grown(schemas.Tensor{DType: l.Values.DType, Shape: []int64{0, l.Values.Shape[1]}}, &l.Values), Masked: l.Masked}
		ids := *l.IDs
		if l.Form == schemas.LogitsTopK {
			ids = grown(schemas.Tensor{DType: l.IDs.DType, Shape: []int64{0, l.IDs.Shape[1]}}, l.IDs)
		}
		h.logits.IDs = &ids
	default:
		h.logits.Values, h.logits.Masked = grown(h.logits.Values, &l.Values), h.logits.Masked+l.Masked
		if l.Form == schemas.LogitsTopK {
			*h.logits.IDs = grown(*h.logits.IDs, l.IDs)
		}
	}
}

func (h *handed) size() int {
	if h.logits == nil {
		return 0
	}
	return len(h.logits.Values.Data) + idBytes(h.logits)
}

func idBytes(l *schemas.TokenLogits) int {
	if l.IDs == nil {
		return 0
	}
	return len(l.IDs.Data)
}

// grown is a tensor with the rows of another behind its own.
func grown(t schemas.Tensor, more *schemas.Tensor) schemas.Tensor {
	t.Shape = []int64{t.Shape[0] + more.Shape[0], t.Shape[1]}
	t.Data = append(slices.Clip(t.Data), more.Data...)
	return t
}

// Asks is what an interaction is asked, nil while the model generates.
func (p *transcript) Asks() *schemas.InteractRequest { return p.ask }

// Rest has nothing to let go.
func (p *transcript) Rest() {}

// Told takes what the interaction says to the last answer. Unless the conversation has ended, there is another turn to generate.
func (p *transcript) Told(_ context.Context, reply *schemas.InteractReply) error {
	x, last, answer := p.req.Text, &p.turns[len(p.turns)-1], p.ask.Answer
	p.conversing = conversing{}
	last.Score, last.Reply, last.Metadata = reply.Score, reply.Content, reply.Metadata
	if reply.Terminate {
		p.closes(schemas.ConversationTerminated)
		return nil
	}
	if answer+1 == x.Answers() {
		p.closes(schemas.ConversationMaxTurns)
		return nil
	}
	ids, err := ReplyIDs(p.language, &schemas.TextResult{Settings: *x, Turns: p.turns}, p.ids)
	if errors.Is(err, lm.ErrPrompt) {
		return bus.Terminal(schemas.CodeFailed, fmt.Errorf("interaction %s, answer %d: %w", x.Interaction.Name, answer, err))
	}
	if err != nil {
		return fmt.Errorf("encode the reply: %w", err)
	}
	begin := int64(len(p.ids))
	end := begin + int64(len(ids))
	if end >= int64(p.most) {
		p.closes(schemas.ConversationContext)
		return nil
	}
	p.ids = append(p.ids, ids...)
	p.turns = append(p.turns, schemas.Turn{Begin: begin, End: end}, schemas.Turn{Begin: end, End: end, Generated: true})
	p.grow(len(ids))
	p.first = p.n
	p.text.Reset()
	p.decoder = lm.Decoder{}
	return nil
}

func (p *transcript) closes(state string) { p.conversation, p.ended = state, true }

// Rest lets the cache go where others need it, until Told.
func (p *tokenEpisode) Rest() { p.e.resting.add(p) }

// Told takes what the interaction says to the last answer, and has the model see it.
func (p *tokenEpisode) Told(ctx context.Context, reply *schemas.InteractReply) error {
	p.e.resting.remove(p)
	if err := p.transcript.Told(ctx, reply); err != nil || p.ended {
		return err
	}
	return p.see(ctx)
}

// ReplyIDs are the tokens between the last answer of a text, whose last ids are given, and the next one, of the reply to it.
func ReplyIDs(m lm.Language, t *schemas.TextResult, ids []int32) ([]int32, error) {
	answer := t.Turns[len(t.Turns)-1]
	ended := slices.Contains(m.Card().EOS, ids[len(ids)-1])
	return m.Reply(messages(t.Messages()), answer.Text, ended, []lm.Message{{Role: schemas.RoleUser, Content: answer.Reply}})
}

// see has the model see the ids that it has not seen; where the cache has no room now, the next Step does.
func (p *tokenEpisode) see(ctx context.Context) error {
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
		case !p.e.makeRoom():
			return nil
		}
	}
}
