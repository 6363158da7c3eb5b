package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/schemas"
)

// rated is what a reward function elsewhere gets of a text.
type rated struct {
	Prompt, Text, Trajectory string
	Messages                 []struct{ Role, Content string }
}

// follows finds, by the reference that a worker was handed, the logits of the text it was handed, and returns how many
// vectors.
func (w *world) follows(t *testing.T, r *rated) (vectors int64) {
	t.Helper()
	at, ok := schemas.ParseSubject(r.Trajectory)
	sample, err := strconv.ParseInt(at.Sample, 10, 64)
	if !ok || err != nil {
		t.Fatalf("reference %q", r.Trajectory)
	}
	tr := w.trajectory(t, at.Run, at.UID, sample)
	if tr.Text.Answer() != r.Text {
		t.Errorf("%s: text %q, its trajectory has %q", r.Trajectory, r.Text, tr.Text.Answer())
	}
	for e, err := range w.client.Tokens(t.Context(), tr) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Logits != nil {
			vectors += e.Logits.Values.Shape[0]
		}
	}
	if vectors != tr.Text.Generated() {
		t.Errorf("%s: %d vectors of %d tokens", r.Trajectory, vectors, tr.Text.Generated())
	}
	return vectors
}

// Workers of all kinds get a text with the conversation that it ends, one with a long message in it, and where its
// logits are.
func TestText_Scorers(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("all of it ", 2000) // an answer may be as long, and more than a prompt
	talk := []schemas.Message{
		{Role: schemas.RoleUser, Content: "tell me"},
		{Role: schemas.RoleAssistant, Content: long},
		{Role: schemas.RoleUser, Content: "more"},
	}
	check := func(r *rated, by string) {
		if len(r.Messages) != 5 || r.Messages[1].Content != long || r.Messages[4].Content != "go on" ||
			r.Messages[4].Role != schemas.RoleUser || r.Prompt != "more" || r.Text == "" {
			t.Errorf("%s was handed %d messages, prompt %q, text %q", by, len(r.Messages), r.Prompt, r.Text)
		}
	}
	var posted [2]atomic.Pointer[rated] // nats, http
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		var body struct{ Samples []*rated }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || len(body.Samples) != 1 {
			t.Errorf("%v, %d samples", err, len(body.Samples))
			return
		}
		posted[1].Store(body.Samples[0])
		fmt.Fprint(rw, `{"scores": [0.5]}`)
	}))
	t.Cleanup(server.Close)
	scorers := filepath.Join(t.TempDir(), "scorers.yaml")
	if err := os.WriteFile(scorers, fmt.Appendf(nil, "http:\n  judge: {url: %q}\n", server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, func(o *config) {
		o.sampler.Model = babble(t, qwen2test.Random{Width: 8, Layers: 1, Heads: 2, KVHeads: 1, MaxPositions: 32000})
		o.reward.Scorers = scorers
	})
	replies(t, w, "tutor", func(r *schemas.InteractRequest) []byte {
		if len(r.Messages) != 4+2*int(r.Answer) || r.Messages[1].Content != long {
			t.Errorf("the interaction was handed %d messages", len(r.Messages))
		}
		return packed(t, &schemas.InteractReply{Content: "go on", Terminate: r.Answer == 1})
	})
	s, err := w.Conn().QueueSubscribe(schemas.ScoreSubject("judge"), "judge", func(m *nats.Msg) {
		r := &schemas.ScoreRequest{}
		if err := schemas.DecodeValid(m.Data, r); err != nil || r.Text == nil {
			t.Errorf("request: %v", err)
			return
		}
		got := &rated{Prompt: r.Prompt, Text: *r.Text, Trajectory: r.Trajectory}
		for _, m := range r.Messages {
			got.Messages = append(got.Messages, struct{ Role, Content string }(m))
		}
		posted[0].Store(got)
		data, err := schemas.Encode(&schemas.ScoreReply{Score: new(0.25)})
		if err = errors.Join(err, m.Respond(data)); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Unsubscribe() })
	verdict := &schemas.Verdict{Run: "r", UID: "g", Name: "reader", Value: new(1.0), At: time.Now().UnixNano()}
	if err = w.client.Verdict(t.Context(), verdict); err != nil {
		t.Fatal(err)
	}
	if _, err = w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Messages: talk, GroupSize: new(int64(1)), Seed: new(int64(7)),
		Text:   &schemas.Text{MaxNewTokens: new(int64(6)), Logits: &schemas.Logits{Form: schemas.LogitsTopK}, Interaction: &schemas.Interaction{Name: "tutor"}},
		Reward: []schemas.RewardSpec{{Name: "nats:judge", Weight: new(1.0)}, {Name: "http:judge", Weight: new(2.0)}, {Name: "external:reader", Weight: new(4.0)}},
	}); err != nil {
		t.Fatal(err)
	}
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete || *a.Mean != 0.25+2*0.5+4 {
		t.Fatalf("%s, %v; members %+v", a.Status, a.Mean, a.Members)
	}
	for i, by := range []string{"nats:judge", "http:judge"} {
		r := posted[i].Load()
		if check(r, by); w.follows(t, r) == 0 {
			t.Errorf("%s: no logits", by)
		}
	}
}
