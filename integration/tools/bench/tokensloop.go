package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// topLogits is how many logits of each token are stored.
const topLogits = 20

// perEvent are how many tokens an event has.
var perEvent = []int{1, 16}

// overhead measures what events cost the loop that draws tokens.
func (b *tokensBench) overhead(ctx context.Context, out io.Writer, p *plane, models []tokensModel) error {
	key, err := p.bus.SealKey(ctx)
	if err != nil {
		return err
	}
	heading(out, "In a sampler's loop")
	fmt.Fprintf(out, "Events of one token, or more, each with its %d largest logits in float32; the server is in "+
		"the same process, the model computes on one thread. Batches with and without events take turns for %v; "+
		"medians of the rounds. Handing over: making the event, digest, seal, publish.\n\n", topLogits, b.events)
	fmt.Fprint(out, "| model | batch | tokens an event | rounds | us per token without events | with | of it "+
		"handing over | handing over, share of the loop | more time | more processor time |\n| --- | --- | --- | "+
		"--- | --- | --- | --- | --- | --- | --- |\n")
	for _, model := range models {
		for _, batch := range b.batches {
			for _, n := range perEvent {
				if err := b.withEvents(ctx, out, p, key, model, batch, n); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// withEvents is the row of one batch and so many tokens an event.
func (b *tokensBench) withEvents(
	ctx context.Context, out io.Writer, p *plane, key []byte, of tokensModel, batch, perEvent int,
) (err error) {
	m, err := families.All().Open(of.dir, lm.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	prompt, err := tokensPrompt(m)
	if err != nil {
		return err
	}
	tokens := float64(b.tokens * batch)
	var took [2][]float64
	var handed, shares, more, moreCPU []float64
	for began, round := time.Now(), -1; round < 3 || time.Since(began) < b.events; round++ { // the first warms up
		p.tick("events", min(1, time.Since(began).Seconds()/b.events.Seconds()))
		r := newTokenRecorder(p, key, m, batch, min(perEvent, b.tokens))
		var t, c [2]float64
		for k := range 2 {
			e := (k + round + 1) % 2
			cpu, before := cpuSeconds(), time.Now()
			if e == 0 {
				err = b.answer(ctx, m, prompt, batch, nil)
			} else {
				err = b.answer(ctx, m, prompt, batch, r.record)
			}
			if t[e] = time.Since(before).Seconds(); e == 1 {
				err = errors.Join(err, r.stored(ctx))
			}
			if c[e] = cpuSeconds() - cpu; err != nil {
				return err
			}
		}
		if round < 0 {
			continue
		}
		for e := range 2 {
			took[e] = append(took[e], t[e]/tokens*1e6)
		}
		handed, shares = append(handed, r.handing.Seconds()/tokens*1e6), append(shares, r.handing.Seconds()/t[1])
		more, moreCPU = append(more, t[1]/t[0]-1), append(moreCPU, c[1]/c[0]-1)
	}
	fmt.Fprintf(out, "| %s | %d | %d | %d | %.1f | %.1f | %.1f | **%.1f %%** | %.1f %% | %.1f %% |\n",
		of.name, batch, perEvent, len(more), median(took[0]), median(took[1]), median(handed), 100*median(shares),
		100*median(more), 100*median(moreCPU))
	return p.clear(ctx, schemas.StreamSteps)
}

// tokenRecorder makes the tokens of one batch into events, as a sampler does. Those of an event that is not full at the
// end are left out.
type tokenRecorder struct {
	text    schemas.TextRequest
	mark    schemas.StepMark
	answers []*recorder.Recording
	open    []*schemas.Tokens // of each answer: the event that its next token goes to
	close   func()
	handing time.Duration // that the loop was held up
}

func newTokenRecorder(p *plane, key []byte, m lm.Model, batch, perEvent int) *tokenRecorder {
	publisher := p.bus.NewPublisher(windowSteps, windowBytes)
	card := m.Card()
	r := &tokenRecorder{
		close: publisher.Close, answers: make([]*recorder.Recording, batch), open: make([]*schemas.Tokens, batch),
		text: schemas.TextRequest{
			Temperature: 1, TopP: 1, TokensPerEvent: int64(perEvent), Vocabulary: int64(card.Vocabulary),
			Logits: &schemas.Logits{
				Form: schemas.LogitsTopK, K: new(int64(topLogits)), DType: "F32", Kind: schemas.LogitsRaw,
			},
		},
		mark: schemas.StepMark{
			Run: p.nextRun(), UID: "p0000000", Stage: schemas.StageMain, Attempt: "k3v9x2pq-17",
			WeightsDigest: strings.Repeat("1", 64),
			Sampler:       "sampler-k3v9x2pq", Backend: card.Backend,
		},
	}
	for i := range r.answers {
		r.answers[i] = recorder.NewRecording(key, publisher)
	}
	return r
}

func (r *tokenRecorder) record(
	ctx context.Context, answer, step int, d *decoding.Distribution, id int32, logits []float32,
) error {
	began := time.Now()
	defer func() { r.handing += time.Since(began) }()
	e := r.open[answer]
	if e == nil {
		e = &schemas.Tokens{
			Stage: schemas.StageMain,
			N:     int64(step) / r.text.TokensPerEvent, Turn: 1, Position: int64(step), TurnPosition: int64(step),
			Generated: true, LogitsKind: r.text.LogitsKind(),
			Vocabulary: r.text.Vocabulary, Temperature: r.text.Temperature, TopP: r.text.TopP,
			ScheduleDigest: strings.Repeat("0", 64),
		}
		r.open[answer] = e
	}
	texts.RecordToken(e, &r.text, d, id, logits)
	if err := texts.KeepLogits(e, &r.text, logits); err != nil || int64(len(e.IDs)) < r.text.TokensPerEvent {
		return err
	}
	r.open[answer] = nil
	mark := r.mark
	mark.SampleIndex = int64(answer)
	e.Mark(mark)
	if err := e.Validate(); err != nil {
		return err
	}
	return r.answers[answer].Step(ctx, e)
}

// stored waits until all events are.
func (r *tokenRecorder) stored(ctx context.Context) error {
	defer r.close()
	for _, a := range r.answers {
		if _, err := a.Stored(ctx); err != nil {
			return err
		}
	}
	return nil
}
