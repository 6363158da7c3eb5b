package integration_test

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// An answer of nothing is one: the interaction is asked what it says to it, and the conversation goes on, whether no
// token may be drawn or the first one ends the answer.
func TestTurns_EmptyAnswers(t *testing.T) {
	t.Parallel()
	w := start(t, func(o *config) { o.sampler.Model = sumsFolder(t) })
	var asked atomic.Int64
	replies(t, w, "patient", func(r *schemas.InteractRequest) []byte {
		asked.Add(1)
		if last := r.Messages[len(r.Messages)-1]; last.Content != "" || last.Role != schemas.RoleAssistant ||
			len(r.IDs) != len(r.LogProbs) || r.EventCount != 1 {
			t.Errorf("answer %d: %+v, %d tokens in %d events; want an empty one", r.Answer, last, len(r.IDs),
				r.EventCount)
		}
		return packed(t, &schemas.InteractReply{Content: "too low", Score: new(float64(r.Answer))})
	})
	with := &schemas.Interaction{Name: "patient", MaxTurns: new(int64(3))}
	digits := strings.Split("0123456789-", "")
	talk(t, w, "r", "none", 1, &schemas.Text{
		MaxNewTokens: new(int64(0)), Interaction: with, Logits: &schemas.Logits{Form: schemas.LogitsTopK},
	})
	talk(t, w, "r", "ended", 1, &schemas.Text{Stop: digits, Interaction: with, Temperature: new(0.0)})
	closed := w.advantages(t, "r", 2)
	for uid, tokens := range map[schemas.UID]int64{"none": 0, "ended": 1} {
		x := w.trajectory(t, "r", uid, 0).Text
		if x == nil || len(x.Turns) != 6 || x.Conversation != schemas.ConversationMaxTurns || x.Answer() != "" ||
			x.Generated() != 3*tokens || closed[uid].Status != schemas.StatusComplete || *closed[uid].Mean != 3 {
			t.Fatalf("%s: %s, %+v", uid, closed[uid].Status, x)
		}
		for i, turn := range x.Turns {
			if turn.Generated != (i%2 == 1) || turn.Generated &&
				(turn.Text != "" || turn.End-turn.Begin != tokens || (turn.Matched != "") != (tokens == 1)) {
				t.Errorf("%s: turn %d: %+v", uid, i, turn)
			}
		}
	}
	if n := asked.Load(); n != 6 {
		t.Errorf("the interaction was asked %d times, want 6", n)
	}
}

// What becomes of a text is said in the table, with the exit status, to the user.
func TestText_StatesShown(t *testing.T) {
	t.Parallel()
	dir, digits := t.TempDir(), []string{"--interaction", "sums", "347+58=?"}
	for _, digit := range strings.Split("0123456789-", "") {
		digits = append(digits, "--stop", digit)
	}
	for _, c := range []struct {
		name   string
		status int
		says   []string
		args   []string
	}{
		{
			"three answers", 0,
			[]string{"305 › too low › ", "complete"},
			[]string{"--interaction", "sums", "--logits", "topk:3:answers=0,2", "347+58=?"},
		},
		{
			"no worker", 1,
			[]string{
				"failed: no sample was scored",
				"#0 #1 failed: interaction nobody, answer 0: absent: no worker listens on mdr.v1.interact.nobody, for 300ms",
			},
			[]string{"--interaction", "nobody", "--interaction-timeout", "300ms", "347+58=?"},
		},
		{
			"empty answers", 0,
			[]string{`"" › not a number › "" › not a number › ""`},
			digits,
		},
		{"no tokens", 0, []string{`""`, "complete"}, []string{"--max-new-tokens", "0", "347+58=?"}},
		{"stopped across tokens", 0, []string{"complete", " 4\n"}, []string{"--stop", "05", "347+58=?"}},
		{
			"too long", 1,
			[]string{"tokens in the model's template; must be between 1 and 512, the context of sums"},
			[]string{strings.Repeat("12+", 300) + "34=?"},
		},
	} {
		out := meander(t, dir, append([]string{
			"run", "--model", sumsFolder(t), "--run", strings.ReplaceAll(c.name, " ", "-"),
			"-n", "2", "--seed", "1", "--out", "-",
		}, c.args...)...).must(t, c.status)
		for _, want := range c.says {
			if !strings.Contains(out.stdout, want) {
				t.Errorf("%s: want %q in\n%s", c.name, want, out.stdout)
			}
		}
		shown := meander(t, dir, "show", "--run", strings.ReplaceAll(c.name, " ", "-")).must(t, 0)
		if c.status == 0 != strings.Contains(shown.stdout, "complete") {
			t.Errorf("%s: %s", c.name, shown.stdout)
		}
	}
}
