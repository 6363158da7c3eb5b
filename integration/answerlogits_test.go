package integration_test

import (
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// A reward of three turns that is made of all logits of each answer, entropy and margin of its tokens, in Go and, where
// it is there, in Python: whether they fit into a message or not.
func TestTurns_RewardOfFullLogits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		model  qwen2test.Random
		dtype  string
		inline bool
	}{
		{"few", qwen2test.Random{}, "F32", true},
		{"few-half", qwen2test.Random{}, "F16", true},
		{"many", qwen2test.Random{Vocabulary: 60_000}, "F32", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, services := newWorld(t, func(o *natsd.Options) { o.Listen = "127.0.0.1:0" }), defaults()
			services.sampler.Model = babble(t, c.model)
			for _, name := range stages {
				w.Serve(t, services.run(name))
			}
			workers := []string{"go"}
			replies(t, w, "go", func(r *schemas.InteractRequest) []byte {
				if c.inline != (r.Logits != nil) || r.LogitsForm != schemas.LogitsFull {
					t.Errorf("answer %d: form %q, beside the request %v; want %v", r.Answer, r.LogitsForm,
						r.Logits != nil, c.inline)
				}
				l, err := w.client.AnswerLogits(t.Context(), r)
				if err != nil || l.Values.DType != c.dtype ||
					!slices.Equal(l.Values.Shape, []int64{int64(len(r.IDs)), r.Vocabulary}) {
					t.Errorf("answer %d: %+v, %v", r.Answer, l, err)
					return packed(t, &schemas.InteractReply{Error: fmt.Sprint(err)})
				}
				return packed(t, &schemas.InteractReply{Content: "again", Score: new(entropyAndMargin(t, l, r))})
			})
			if python := os.Getenv("MEANDER_PYTHON"); python != "" {
				workers = append(workers, "python")
				listensIn(t, w, "python", python, "../../../integration/testdata/logits_worker.py",
					w.Server.ClientURL())
			}
			var scores [][]float64
			for _, name := range workers {
				const uid = "g" // the same seeds
				talk(t, w, schemas.Run(name), uid, 1, &schemas.Text{
					MaxNewTokens: new(int64(6)), Interaction: &schemas.Interaction{Name: name, MaxTurns: new(int64(3))},
					Logits: &schemas.Logits{Form: schemas.LogitsFull, DType: c.dtype},
				})
				if a := w.advantages(t, schemas.Run(name), 1)[uid]; a.Status != schemas.StatusComplete {
					t.Fatalf("%s: %+v", name, a)
				}
				var of []float64
				for _, turn := range w.trajectory(t, schemas.Run(name), uid, 0).Text.Turns {
					if turn.Generated {
						of = append(of, *turn.Score)
					}
				}
				scores = append(scores, of)
			}
			for _, of := range scores {
				if len(of) != 3 || !slices.EqualFunc(of, scores[0],
					func(a, b float64) bool { return math.Abs(a-b) < 1e-3 }) {
					t.Errorf("scores %v; want three of each worker, the same", scores)
				}
			}
		})
	}
}

// entropyAndMargin is the mean entropy of an answer's tokens and the mean distance of the two largest logits.
func entropyAndMargin(t *testing.T, l *schemas.TokenLogits, r *schemas.InteractRequest) (score float64) {
	v := int(r.Vocabulary)
	z := make([]float32, len(r.IDs)*v)
	if err := tensor.DType(l.Values.DType).DecodeFloats(z, l.Values.Data); err != nil {
		t.Error(err)
	}
	for i := range r.IDs {
		row := slices.Clone(z[i*v : (i+1)*v])
		entropy := 0.0
		for _, x := range row {
			p := math.Exp(float64(x) - float64(r.LogSumExps[i]))
			entropy -= p * (float64(x) - float64(r.LogSumExps[i]))
		}
		if math.Abs(entropy-float64(r.Entropies[i])) > 1e-2 {
			t.Errorf("token %d: an entropy of %g by the logits, %g by the request", i, entropy, r.Entropies[i])
		}
		slices.Sort(row)
		score += (entropy + float64(row[v-1]-row[v-2])) / float64(len(r.IDs))
	}
	return score
}
