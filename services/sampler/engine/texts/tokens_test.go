package texts

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/enginetest"
)

// poisonedText does what the token says that a sequence is seen with.
type poisonedText struct {
	lm.Model
	of map[int32]string
}

func (m poisonedText) Forward(ctx context.Context, rows []lm.Row) error {
	err := m.Model.Forward(ctx, rows)
	var outputs [][]float32
	for _, r := range rows {
		outputs = append(outputs, r.Logits)
	}
	for _, r := range rows {
		for _, id := range r.IDs {
			err = errors.Join(err, enginetest.Strike(m.of[id], r.Logits, outputs...))
		}
	}
	return err
}

// randomText opens a language model of random weights.
func randomText(t *testing.T) lm.Model {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "babble")
	if err := (qwen2test.Random{Seed: 3}).Write(dir); err != nil {
		t.Fatal(err)
	}
	m, err := families.All().Open(dir, lm.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// A sequence that the model cannot compute fails alone; those beside it get the tokens that they get without it.
func TestTokenEngine_PoisonFailsAlone(t *testing.T) {
	t.Parallel()
	m := randomText(t)
	const samples = 6
	run := func(of map[int32]string) (*tokenEngine, []engine.Episode, []error) {
		e := newTokenEngine(poisonedText{m, of}, true)
		var episodes []engine.Episode
		for i := range samples {
			x := &schemas.TextRequest{
				Messages: []schemas.Message{{Role: "user", Content: "2+2=?"}}, MaxNewTokens: 12,
				Temperature: 1, TopP: 1, TokensPerEvent: 1, Vocabulary: int64(e.card.Vocabulary),
			}
			req := &schemas.Request{Identity: schemas.Identity{
				Stage: schemas.StageMain, Run: "r", UID: "g", SampleIndex: int64(i),
			}, Sampling: schemas.Sampling{SampleSeed: uint64(i)}, Text: x}
			req.ScheduleDigest = req.ComputeScheduleDigest()
			p, err := e.Start(t.Context(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.(*tokenEpisode).Close() })
			episodes = append(episodes, p)
		}
		_, faults := enginetest.StepAll(t, e, episodes)
		return e, episodes, faults
	}
	_, want, _ := run(nil)
	prompt := slices.Index(want[0].(*tokenEpisode).mask, 1)
	generated := func(p engine.Episode) []int32 { return p.(*tokenEpisode).ids[prompt:] }
	for _, poison := range enginetest.Poisons {
		// The poison is a token that some samples draw, and not as their last: that one the model never sees.
		of := map[int32]string{generated(want[2])[3]: poison}
		_, got, faults := run(of)
		struck := 0
		for i, p := range got {
			ids := generated(want[i])
			seen := slices.IndexFunc(ids[:len(ids)-1], func(id int32) bool { return of[id] != "" })
			switch {
			case seen < 0 && (faults[i] != nil || !slices.Equal(generated(p), ids)):
				t.Errorf("a token %s: sample %d: %v, %v; want %v as without it", poison, i, faults[i], generated(p),
					ids)
			case seen >= 0 && (faults[i] == nil || !slices.Equal(generated(p), ids[:seen+1])):
				t.Errorf("a token %s: sample %d: %v, %v; want a fault at %d", poison, i, faults[i], generated(p), seen)
			}
			if seen >= 0 {
				struck++
			}
		}
		if struck == 0 || struck == samples {
			t.Errorf("a token %s: %d of %d samples drew it; the test needs some", poison, struck, samples)
		}
	}
}

// A prompt that the model panics at ends the sample that has it computed, and keeps none of its group waiting.
func TestPrefixes_Panic(t *testing.T) {
	t.Parallel()
	m := randomText(t)
	x := prefixes{model: poisonedText{m, map[int32]string{7: enginetest.Panics}}}
	for range 2 { // the second would wait for the first
		_, err := x.forkSequence(t.Context(), []int32{6, 7}, make([]float32, m.Card().Vocabulary))
		if bus.Code(err) != schemas.CodePanic {
			t.Errorf("%v; want a panic", err)
		}
	}
}
