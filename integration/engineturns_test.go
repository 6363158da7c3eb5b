package integration_test

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
	"github.com/meander-rl/meander/schemas"
)

// computing answers in the form of vLLM's token route with what the weights give, from a generator of its own. Its
// weights have another version for each request, so that answers can be told.
func computing(t *testing.T, dir string) remotelmtest.Answer {
	m, err := qwen2.Open(dir, lm.Options{Options: model.Options{Threads: 1}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	var mu sync.Mutex
	version := 0
	return func(w http.ResponseWriter, body map[string]any) {
		mu.Lock()
		defer mu.Unlock()
		version++
		var ids []int32
		for _, id := range body["token_ids"].([]any) {
			ids = append(ids, int32(id.(float64)))
		}
		sampling := body["sampling_params"].(map[string]any)
		seed, most := uint64(sampling["seed"].(float64)), int(sampling["max_tokens"].(float64))
		sequence, logits := m.NewSequence(), make([]float32, m.Card().Vocabulary)
		defer sequence.Close()
		var d decoding.Distribution
		for n, unseen := 1, ids; ; n++ {
			err := m.Forward(t.Context(), []lm.Row{{Sequence: sequence, IDs: unseen, Logits: logits}})
			if err == nil {
				err = d.Reset(logits, decoding.Params{Temperature: 1})
			}
			if err != nil {
				t.Error(err)
				return
			}
			id := d.Draw(seed, uint32(n))
			finish, versions := "null", "null"
			if n == most {
				finish = `"length"`
			}
			if slices.Contains(m.Card().EOS, id) {
				finish = `"stop"`
			}
			if finish != "null" {
				versions = fmt.Sprintf(`[{"version":"v%d","start":0,"end":%d}]`, version, n)
			}
			c, best := d.At(id), decoding.Top(logits, 1)[0]
			fmt.Fprintf(w, `data: {"choices":[{"index":0,"finish_reason":%s,"token_ids":[%d],"weight_versions":%s,"logprobs":{"content":[{"token_id":%d,"logprob":%v,"rank":1,"top_logprobs":[{"token_id":%d,"logprob":%v,"rank":1}]}]}}]}`+"\n\n",
				finish, id, versions, id, c.LogProb, best, d.At(best).LogProb)
			if finish != "null" {
				fmt.Fprint(w, "data: [DONE]\n\n")
				return
			}
			unseen = []int32{id}
		}
	}
}

// A conversation over a server is a request for each answer, with all ids before it and a seed of its own: verify finds
// the replies in the template, and every number where the weights have it.
func TestEngine_Conversation(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := remotelmtest.New(t, remotelmtest.LogProbs, computing(t, sums(t)))
	const prompt = "999-111=?" // which the model gets wrong at times
	groups, sum := textRun(t, dir, sums(t), "--engine", s.Engine(), "--run", "r", "--interaction", "sums",
		"--ground-truth", "1000", "--max-turns", "3", "--stop", "7", prompt)
	if sum.Complete != 1 || len(s.Asked()) != 3*4 {
		t.Fatalf("%+v, %d requests; want three for each of 4 samples", sum, len(s.Asked()))
	}
	seeds := map[any]bool{}
	begun := map[string]bool{} // the ids that requests had
	for _, body := range s.Asked() {
		seeds[body["sampling_params"].(map[string]any)["seed"]] = true
		ids, _ := json.Marshal(body["token_ids"])
		begun[string(ids)] = true
	}
	if len(seeds) != 12 {
		t.Errorf("%d seeds of 12 answers", len(seeds))
	}
	drawn, spans := 0, 0
	for _, m := range groups[0].Members {
		x := m.Text
		drawn += int(x.Tokens)
		if len(x.Turns) != 6 || x.Conversation != schemas.ConversationMaxTurns || x.Drawn == nil ||
			len(x.LogProbs) != len(x.IDs) {
			t.Fatalf("sample %d: %s, %d turns, drawn by %+v", m.SampleIndex, x.Conversation, len(x.Turns), x.Drawn)
		}
		spans += len(x.Drawn.Weights)
		for _, span := range x.Drawn.Weights {
			if !slices.ContainsFunc(x.Turns, func(t schemas.Turn) bool {
				return t.Generated && t.Begin == span.Begin &&
					t.End == span.End
			}) {
				t.Errorf("sample %d: weights %+v; the turns are %+v", m.SampleIndex, x.Drawn.Weights, x.Turns)
			}
		}
		for i := 1; i < 6; i += 2 {
			ids, _ := json.Marshal(x.IDs[:x.Turns[i].Begin])
			if !begun[string(ids)] {
				t.Errorf("sample %d: the server was not asked to go on from all before answer %d", m.SampleIndex, i/2)
			}
		}
	}
	if spans < 4 || spans > 12 { // none of an answer that its stop text ended before the server said
		t.Errorf("%d versions of 12 answers", spans)
	}
	r := proven(t, dir, sums(t), "r")
	if r.Drawn != drawn || r.Tokens != 0 || math.IsNaN(float64(r.MaxDrawnDifference)) || r.MaxDrawnDifference > 1e-4 ||
		len(r.Mismatches) > 0 {
		t.Errorf("verify: %+v; want %d tokens drawn elsewhere", r, drawn)
	}
}

// Workers of an interaction are handed the numbers that the server gives, and no others.
func TestEngine_ConversationWorker(t *testing.T) {
	t.Parallel()
	s := remotelmtest.New(t, remotelmtest.LogProbs)
	w := start(t, func(o *config) { o.sampler.Model, o.sampler.Engine = sums(t), s.Engine() })
	replies(t, w, "tutor", func(r *schemas.InteractRequest) []byte {
		if n := len(r.IDs); n != 4 || len(r.LogProbs) != n || len(r.ProcessedLogProbs) != n ||
			len(r.Entropies)+len(r.LogSumExps) != 0 {
			t.Errorf("answer %d: %d tokens with %d log-probs, %d entropies, %d log-sum-exps", r.Answer, n,
				len(r.LogProbs),
				len(r.Entropies), len(r.LogSumExps))
		}
		return packed(t, &schemas.InteractReply{Content: "too low", Terminate: r.Answer == 1, Score: new(1.0)})
	})
	talk(t, w, "r", "g", 2, &schemas.Text{Interaction: &schemas.Interaction{Name: "tutor"}})
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete || *a.Mean != 2 {
		t.Fatalf("%+v", a)
	}
	made := w.trajectory(t, "r", "g", 1)
	x, weights := made.Text, made.Drawn.Weights
	if x.Conversation != schemas.ConversationTerminated || len(weights) != 2 || weights[1].Begin != x.Turns[3].Begin ||
		x.Entropies != nil {
		t.Errorf("%s, %+v", x.Conversation, made.Drawn)
	}
}
