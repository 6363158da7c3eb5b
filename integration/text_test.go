package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// babble is a folder of a language model of random weights.
func babble(t *testing.T, r qwen2test.Random) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "babble")
	r.Seed = 3
	if err := r.Write(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// textRun is meander run of texts, and what it came to.
func textRun(t *testing.T, dir, model string, args ...string) (groups []results.Group, sum results.Summary) {
	t.Helper()
	out := meander(t, dir, append([]string{
		"run", "--model", model, "--json", "--seed", "11", "-n", "4", "--out", "-",
		"--reward", "exact_match", "--ground-truth", "4",
	}, args...)...).must(t, 0)
	for line := range strings.Lines(out.stdout) {
		var g struct {
			results.Group
			Summary *results.Summary `json:"summary"`
		}
		if err := json.Unmarshal([]byte(line), &g); err != nil {
			t.Fatal(err)
		}
		if g.Summary != nil {
			sum = *g.Summary
		} else {
			groups = append(groups, g.Group)
		}
	}
	return groups, sum
}

// proven is what verify finds in a run.
func proven(t *testing.T, dir, model, run string) verify.Report {
	t.Helper()
	var r verify.Report
	out := meander(t, dir, "verify", "--json", "--run", run, "--model", model).must(t, 0)
	if err := json.Unmarshal([]byte(out.stdout), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// Equal seeds give equal texts, however the work is packed and spread, and verify draws every token again.
func TestText_DigestDoesNotDependOnPacking(t *testing.T) {
	t.Parallel()
	model := babble(t, qwen2test.Random{})
	var want string
	for _, packing := range [][]string{
		{"--batch", "1", "--workers", "1", "--threads", "1"},
		{"--batch", "8", "--workers", "2", "--threads", "2"},
		{"--batch", "3", "--workers", "2", "--replicas", "2"},
	} {
		dir := t.TempDir()
		_, sum := textRun(t, dir, model, append(packing, "--run", "r", "--max-new-tokens", "9", "--logits",
			"topk:5:F16",
			"2+2=?", "3+3=?", "what is it?")...)
		if want == "" {
			want = sum.Digest
			if r := proven(t, dir, model, "r"); r.Trajectories != 12 || r.Tokens == 0 || r.Logits != r.Tokens ||
				r.MaxTokenDifference != 0 {
				t.Errorf("verify: %+v; want all tokens of 12 samples, with their logits, and no difference", r)
			}
		}
		if sum.Digest != want {
			t.Errorf("%v: digest %s, want %s", packing, sum.Digest, want)
		}
	}
}

// Each form of logits is stored as asked for, and proven.
func TestText_Logits(t *testing.T) {
	t.Parallel()
	dir, model := t.TempDir(), babble(t, qwen2test.Random{})
	for i, args := range [][]string{
		{"--logits", "full"},
		{"--logits", "full:BF16:processed", "--temperature", "0.7", "--top-p", "0.9"},
		{"--logits", "topk:3:processed", "--top-k", "2"},
		{"--logits", "ids:3,250,7", "--tokens-per-event", "4"},
		{"--temperature", "0"},
	} {
		run := fmt.Sprintf("r%d", i)
		_, sum := textRun(t, dir, model, append(args, "--run", run, "--max-new-tokens", "6", "2+2=?")...)
		r := proven(t, dir, model, run)
		if stored := i < 4; sum.Complete != 1 || r.Tokens == 0 || r.MaxTokenDifference != 0 ||
			stored != (r.Logits == r.Tokens) || !stored && r.Logits != 0 {
			t.Errorf("%v: %+v, verify %+v", args, sum, r)
		}
	}
}

// What ends an answer, and what keeps a sample from being one, has its own state and its name.
func TestText_States(t *testing.T) {
	t.Parallel()
	dir, model := t.TempDir(), babble(t, qwen2test.Random{MaxPositions: 64})
	groups, _ := textRun(t, dir, model, "--run", "free", "--max-new-tokens", "40", "2+2=?")
	for _, m := range groups[0].Members {
		if x := m.Text; x.FinishReason != "length" && x.FinishReason != "stop" || x.PromptTokens+x.Tokens > 64 ||
			int(x.PromptTokens+x.Tokens) != len(x.IDs) {
			t.Errorf("sample %d: %+v", m.SampleIndex, x)
		}
	}
	t.Run("stop across tokens", func(t *testing.T) {
		stop := ""
		for _, m := range groups[0].Members {
			if a := m.Text.Answer; stop == "" {
				for i := 1; i+1 < len(a); i++ { // a token is a byte
					if s := a[i : i+2]; s[0] > ' ' && s[0] < 0x7f && s[1] > ' ' && s[1] < 0x7f &&
						!strings.Contains(a[:i+1], s) {
						stop = s
						break
					}
				}
			}
		}
		if stop == "" {
			t.Fatal("no answer has two letters in a row; take another seed")
		}
		stopped, _ := textRun(t, dir, model, "--run", "stopped", "--max-new-tokens", "40", "--stop", stop, "2+2=?")
		cut := 0
		for i, m := range stopped[0].Members {
			before, _, found := strings.Cut(groups[0].Members[i].Text.Answer, stop)
			if m.Text.Answer != before || found != (m.Text.Turns[1].Matched == stop) {
				t.Errorf("sample %d: answer %q, want %q; turns %+v", i, m.Text.Answer, before, m.Text.Turns)
			}
			if found {
				cut++
			}
		}
		if cut == 0 {
			t.Error("no answer was stopped")
		}
		proven(t, dir, model, "stopped")
	})
	t.Run("no tokens", func(t *testing.T) {
		groups, sum := textRun(t, dir, model, "--run", "none", "--max-new-tokens", "0", "2+2=?")
		if x := groups[0].Members[0].Text; sum.Complete != 1 || x.Answer != "" || x.Tokens != 0 ||
			x.FinishReason != "length" {
			t.Errorf("%+v, %+v", sum, x)
		}
	})
	t.Run("longer than the context", func(t *testing.T) {
		out := meander(t, dir, "run", "--model", model, "--json", "--out", "-", "-n", "2", "--reward", "exact_match",
			"--ground-truth", "4", "--max-new-tokens", "4", strings.Repeat("long ", 20)).must(t, 1)
		if !strings.Contains(out.stdout, "the context of babble") {
			t.Errorf("the result does not say why: %s", out.stdout)
		}
	})
}

// A conversation is answered to its last message, and what its answer should be is looked for in all that the user
// says, when it is asked, rated and rated again.
func TestText_Messages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sums, err := filepath.Abs(filepath.Join(root, "deploy/models/sums"))
	if err != nil {
		t.Fatal(err)
	}
	messages := filepath.Join(dir, "messages.json")
	talk := `[{"role":"user","content":"347+58=?"},{"role":"assistant","content":"395"},{"role":"user","content":"too low"}]`
	if err := os.WriteFile(messages, []byte(talk), 0o600); err != nil {
		t.Fatal(err)
	}
	out := meander(t, dir, "run", "--model", sums, "--json", "--run", "r", "--seed", "3", "-n", "4", "--temperature",
		"0",
		"--out", "-", "--messages", messages).must(t, 0)
	if !strings.Contains(out.stdout, `"405"`) {
		t.Errorf("no answer is 405: %s", out.stdout)
	}
	again := meander(t, dir, "rescore", "--run", "r", "--reward", "numeric_match", "--json").must(t, 0)
	if !strings.Contains(again.stdout, `"405"`) {
		t.Errorf("rated again: %s", again.stdout)
	}
}

// Full logits of a large vocabulary go through a server that takes messages of 1 MiB, whole or in parts.
func TestText_LargeVocabulary(t *testing.T) {
	skipShort(t)
	sequential(t)
	t.Parallel()
	for _, c := range []struct {
		vocabulary, tokens int64
		dtype              string
	}{{151936, 100, "F16"}, {262144, 3, "F32"}} {
		model := babble(t, qwen2test.Random{
			Vocabulary: int(c.vocabulary), Width: 8, Layers: 1, Heads: 2, KVHeads: 1, MaxPositions: 256,
		})
		w := start(t, func(o *config) { o.sampler.Model = model })
		_, err := w.client.Publish(t.Context(), "large", &schemas.Prompt{
			UID: "g", Prompt: "2+2=?", GroupSize: new(int64(1)), Text: &schemas.Text{
				MaxNewTokens: &c.tokens, Logits: &schemas.Logits{Form: schemas.LogitsFull, DType: c.dtype},
			},
			Reward: []schemas.RewardSpec{{Name: "topk_mass", Params: map[string]string{"k": "3"}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if a := w.advantages(t, "large", 1)["g"]; a.Status != schemas.StatusComplete || !(*a.Mean > 0 && *a.Mean < 1) {
			t.Fatalf("%+v", a)
		}
		tr, err := w.client.Trajectory(t.Context(), "large", "g", 0)
		if err != nil {
			t.Fatal(err)
		}
		size, _ := schemas.DTypeSize(c.dtype)
		vectors := int64(0)
		for e, err := range w.client.Tokens(t.Context(), tr) {
			if err != nil {
				t.Fatal(err)
			}
			if e.Logits != nil {
				vectors++
				if n := int64(len(e.Logits.Values.Data)); n != c.vocabulary*size {
					t.Fatalf("token %d: %d bytes of logits, want %d", vectors, n, c.vocabulary*size)
				}
			}
		}
		if vectors != tr.Text.Generated() || vectors == 0 {
			t.Errorf("%d vectors of %d tokens", vectors, tr.Text.Generated())
		}
	}
}
