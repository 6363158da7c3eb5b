package integration_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/schemas"
)

// sumsFolder is the language model that ships.
func sumsFolder(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join(root, "deploy/models/sums"))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// replies has a worker of an interaction answer each request; nil: not this one.
func replies(t *testing.T, w *world, name string, say func(r *schemas.InteractRequest) []byte) {
	t.Helper()
	s, err := w.Conn().QueueSubscribe(schemas.InteractSubject(name), name, func(m *nats.Msg) {
		r := &schemas.InteractRequest{}
		if err := schemas.DecodeValid(m.Data, r); err != nil {
			t.Errorf("request to %s: %v", name, err)
		}
		if r.Params == nil || r.IDs == nil || r.LogProbs == nil || r.ProcessedLogProbs == nil || r.LogSumExps == nil ||
			r.Entropies == nil {
			t.Errorf("request to %s: %+v; what there is none of must be empty, not null", name, r)
		}
		if data := say(r); data != nil {
			if err := m.Respond(data); err != nil {
				t.Error(err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Unsubscribe() })
}

func packed(t *testing.T, r *schemas.InteractReply) []byte {
	t.Helper()
	data, err := schemas.Encode(r)
	if err != nil {
		t.Error(err)
	}
	return data
}

// talk publishes a prompt that an interaction answers.
func talk(t *testing.T, w *world, run schemas.Run, uid schemas.UID, samples int64, x *schemas.Text,
	reward ...schemas.RewardSpec,
) {
	t.Helper()
	if len(reward) == 0 {
		reward = []schemas.RewardSpec{{Name: "turns", Params: map[string]string{"of": "sum"}}}
	}
	_, err := w.client.Publish(t.Context(), run, &schemas.Prompt{
		UID: uid, Prompt: "2+2=?", Seed: new(int64(5)), GroupSize: &samples, Text: x, Reward: reward,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) trajectory(t *testing.T, run schemas.Run, uid schemas.UID, sample int64) *schemas.Trajectory {
	t.Helper()
	tr, err := w.client.Trajectory(t.Context(), run, uid, sample)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// Equal seeds give equal conversations, however the work is packed and spread, whether or not prompts are shared; and
// verify draws all turns again.
func TestTurns_DigestDoesNotDependOnPacking(t *testing.T) {
	t.Parallel()
	model, want := sumsFolder(t), ""
	for _, packing := range [][]string{
		{"--batch", "1", "--workers", "1", "--threads", "1", "--share-prefixes=false"},
		{"--batch", "8", "--workers", "2", "--threads", "2"},
		{"--batch", "3", "--workers", "2", "--replicas", "2"},
	} {
		dir := t.TempDir()
		_, sum := textRun(t, dir, model, append(packing, "--run", "r", "--interaction", "sums", "--max-turns", "3",
			"--logits", "topk:5:F16:answers=0,2", "--ground-truth", "1000", "347+58=?", "172-119=?")...)
		if want == "" {
			want = sum.Digest
			r := proven(t, dir, model, "r")
			if r.Trajectories != 8 || r.Tokens < 3*8*3 || r.Logits == 0 || r.Logits >= r.Tokens ||
				r.MaxTokenDifference != 0 {
				t.Errorf("verify: %+v; want all tokens of three answers of 8 samples, the logits of two, and no "+
					"difference", r)
			}
		}
		if sum.Digest != want || sum.Complete != 2 {
			t.Errorf("%v: digest %s, want %s", packing, sum.Digest, want)
		}
	}
}

// A conversation of three answers whose second one has no logits: places in the sequence, masks, scores and what the
// worker was handed.
func TestTurns_Worker(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *config) { o.sampler.Model = babble(t, qwen2test.Random{}) })
	var handed [3]atomic.Pointer[schemas.InteractRequest]
	replies(t, w, "tutor", func(r *schemas.InteractRequest) []byte {
		handed[r.Answer].Store(r)
		md, _ := schemas.MetadataFrom(map[string]any{"answer": r.Answer})
		return packed(t, &schemas.InteractReply{
			Content: fmt.Sprintf("%s, again %d", r.Params["tone"], r.Answer),
			Score:   new(float64(r.Answer)), Metadata: md,
		})
	})
	talk(t, w, "r", "g", 1, &schemas.Text{
		MaxNewTokens: new(int64(5)), Interaction: &schemas.Interaction{Name: "tutor", MaxTurns: new(int64(3)), Params: map[string]string{"tone": "kindly"}},
		Logits: &schemas.Logits{Form: "topk", K: new(int64(2)), Answers: []int64{0, 2}},
	})
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete || *a.Mean != 3 {
		t.Fatalf("%+v; want the sum of the turns, 3", a)
	}
	tr := w.trajectory(t, "r", "g", 0)
	x := tr.Text
	if len(x.Turns) != 6 || x.Conversation != schemas.ConversationMaxTurns || x.Turns[1].Reply != "kindly, again 0" ||
		*x.Turns[5].Score != 2 || x.Turns[5].Reply == "" {
		t.Fatalf("%s: %+v", x.Conversation, x.Turns)
	}
	for i, turn := range x.Turns {
		for at := turn.Begin; at < turn.End; at++ {
			if got := x.Mask.Data[at] == 1; got != turn.Generated {
				t.Errorf("turn %d, token %d: mask %v, generated %v", i, at, got, turn.Generated)
			}
		}
	}
	logits := map[int64]int{}
	for e, err := range w.client.Tokens(t.Context(), tr) {
		if err != nil {
			t.Fatal(err)
		}
		turn := x.Turns[e.Turn]
		if e.Generated != turn.Generated || e.Position-e.TurnPosition != turn.Begin {
			t.Errorf("event %d: turn %d at %d, %d in it", e.N, e.Turn, e.Position, e.TurnPosition)
		}
		if e.Logits != nil {
			logits[e.Turn]++
		}
	}
	if logits[1] == 0 || logits[3] != 0 || logits[5] == 0 {
		t.Errorf("events with logits by turn: %v; want of the first and third answer", logits)
	}
	for i := range handed {
		r, turn := handed[i].Load(), x.Turns[2*i+1]
		if n := int(turn.End - turn.Begin); len(r.IDs) != n || len(r.LogSumExps) != n ||
			(r.Logits != nil) != (i != 1) || r.Logits != nil && r.Logits.Values.Shape[0] != int64(n) ||
			len(r.Messages) != 2*i+2 || r.Messages[2*i+1].Content != turn.Text || r.EventCount != int64(n) {
			t.Errorf("answer %d: handed %+v; the turn is %+v", i, r, turn)
		}
	}
}

// What an interaction may do wrong is a state of the sample, by name, and ends it.
func TestTurns_Faults(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *config) { o.sampler.Model = babble(t, qwen2test.Random{MaxPositions: 128}) })
	again := packed(t, &schemas.InteractReply{Content: "again"})
	var tries atomic.Int64
	cases := []struct {
		name, state, says string
		timeout           int64
		say               func(r *schemas.InteractRequest) []byte
	}{
		{name: "dies", state: schemas.ConversationTimeout, says: "interaction dies, answer 1: timeout: no answer on mdr.v1.interact.dies", timeout: 2000, say: func(r *schemas.InteractRequest) []byte {
			if r.Answer == 0 {
				return again
			}
			return nil
		}},
		{name: "silent", state: schemas.ConversationTimeout, says: "answer 0: timeout", timeout: 2000, say: func(*schemas.InteractRequest) []byte { return nil }},
		{name: "nobody", state: schemas.ConversationAbsent, says: "no worker listens on mdr.v1.interact.nobody", timeout: 2000},
		{name: "garbage", state: schemas.ConversationGarbage, says: "answer 0: garbage", say: func(*schemas.InteractRequest) []byte { return []byte("again") }},
		{name: "empty", state: schemas.ConversationGarbage, says: "content: \"\"; must not be empty", say: func(*schemas.InteractRequest) []byte { return []byte{0x81, 0xa1, 'v', 1} }},
		{name: "nan", state: schemas.ConversationGarbage, says: "score: NaN; must be finite", say: func(*schemas.InteractRequest) []byte {
			return packed(t, &schemas.InteractReply{Content: "again", Score: new(math.NaN())})
		}},
		{name: "huge", state: schemas.ConversationGarbage, says: "must be at most 65536", say: func(*schemas.InteractRequest) []byte {
			return packed(t, &schemas.InteractReply{Content: strings.Repeat("x", 70000)})
		}},
		{name: "broken", state: schemas.ConversationError, says: "the worker says: no \ufffd[31mGPU", say: func(*schemas.InteractRequest) []byte {
			return packed(t, &schemas.InteractReply{Error: "no \x1b[31mGPU"})
		}},
		{name: "busy", state: schemas.ConversationMaxTurns, say: func(*schemas.InteractRequest) []byte {
			if tries.Add(1) == 1 {
				return packed(t, &schemas.InteractReply{Error: "busy", Retry: true})
			}
			return again
		}},
		{name: "wordy", state: schemas.ConversationContext, say: func(*schemas.InteractRequest) []byte {
			return packed(t, &schemas.InteractReply{Content: strings.Repeat("many words ", 20)})
		}},
		{name: "content", state: schemas.ConversationTerminated, say: func(*schemas.InteractRequest) []byte { return packed(t, &schemas.InteractReply{Terminate: true}) }},
	}
	for _, c := range cases {
		if c.say != nil {
			replies(t, w, c.name, c.say)
		}
		x := &schemas.Text{
			MaxNewTokens: new(int64(4)), Interaction: &schemas.Interaction{Name: c.name, MaxTurns: new(int64(2))},
		}
		if c.timeout > 0 {
			x.Interaction.TimeoutMS = &c.timeout
		}
		talk(t, w, "r", schemas.UID(c.name), 1, x, schemas.RewardSpec{Name: "confidence"})
	}
	closed := w.advantages(t, "r", len(cases))
	for _, c := range cases {
		tr := w.trajectory(t, "r", schemas.UID(c.name), 0)
		ended := c.says == ""
		if tr.Text.Conversation != c.state || (tr.StopReason == schemas.StopCompleted) != ended ||
			!strings.Contains(tr.Error, c.says) || (closed[tr.UID].Status == schemas.StatusComplete) != ended {
			t.Errorf("%s: %s, conversation %q, group %s: %s", c.name, tr.StopReason, tr.Text.Conversation,
				closed[tr.UID].Status, tr.Error)
		}
	}
}

// While samples wait for their interaction, more than a sampler has slots for, others are made.
func TestTurns_OthersGoOn(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *config) {
		o.sampler.Model, o.sampler.Batch, o.sampler.Workers = babble(t, qwen2test.Random{}), 1, 1
	})
	gate := make(chan struct{})
	replies(t, w, "slow", func(*schemas.InteractRequest) []byte {
		<-gate // all of the worker's requests wait behind the first
		return packed(t, &schemas.InteractReply{Terminate: true, Score: new(1.0)})
	})
	slow := &schemas.Text{MaxNewTokens: new(int64(3)), Interaction: &schemas.Interaction{
		Name: "slow", TimeoutMS: new(int64(schemas.MaxInteractMS)),
	}}
	talk(t, w, "r", "slow", 6, slow) // a sampler has two slots
	talk(t, w, "r", "quick", 4, &schemas.Text{MaxNewTokens: new(int64(3))}, schemas.RewardSpec{Name: "confidence"})
	if a := w.advantages(t, "r", 1)["quick"]; a == nil || a.Status != schemas.StatusComplete {
		t.Fatalf("the first group to close: %+v; want the one without an interaction", a)
	}
	close(gate)
	if a := w.advantages(t, "r", 2)["slow"]; a.Status != schemas.StatusComplete || *a.Mean != 1 {
		t.Errorf("%+v", a)
	}
}

// A run of conversations that was killed goes on where it stopped, and ends as if nothing had happened.
func TestTurns_KilledAndResumed(t *testing.T) {
	t.Parallel()
	model := babble(t, qwen2test.Random{Width: 128, Layers: 4, MaxPositions: 1024})
	args := func(run string) []string {
		return []string{
			"run", "--model", model, "--json", "--seed", "5", "--run", run, "--out", "-", "-n", "4", "--batch", "2", "--workers", "1", "--ack-wait", "1s",
			"--max-new-tokens", "100", "--interaction", "sums", "--max-turns", "3", "--reward", "turns", "1+1=?", "1+2=?", "1+3=?",
		}
	}
	_, calm := meander(t, t.TempDir(), args("calm")...).must(t, 0).parse(t)
	dir := t.TempDir()
	x := background(t, dir, args("killed")...)
	if made(t, dir, "killed", 2, x) == 0 {
		t.Fatal("the run ended before it could be killed; make it longer")
	}
	x.signal(t, os.Kill)
	<-x.ended
	groups, sum := meander(t, dir, args("killed")...).must(t, 0).parse(t)
	if sum.Digest != calm.Digest || len(groups) != 3 || sum.Trajectories != 12 {
		t.Errorf("digest %s, %+v; without the kill %s", sum.Digest, sum, calm.Digest)
	}
}
