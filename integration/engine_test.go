package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/remotelm/remotelmtest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// sums is the folder that the recorded servers serve.
func sums(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../deploy/models/sums")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Tokens of a server become the same events and trajectories as those of a sampler, with the numbers that it gives and
// its name on them, and verify computes these again.
func TestEngine_Recorded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode, values string
		args         []string
		logits       bool
	}{
		{remotelmtest.Logits, schemas.EngineLogits, []string{
			"--logits", "topk:3:F16", "--temperature", "0.7", "--top-p",
			"0.95", "--min-p", "0.01",
		}, true},
		{remotelmtest.LogProbs, schemas.EngineRaw, nil, false},
		{remotelmtest.Completions, schemas.EngineRaw, []string{"--temperature", "0.5", "--top-p", "0.9"}, false},
		{remotelmtest.SGLang, schemas.EngineTempered, nil, false},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			s, dir := remotelmtest.New(t, c.mode), t.TempDir()
			groups, sum := textRun(t, dir, sums(t), append([]string{
				"--engine", s.Engine(), "--run", "r",
				remotelmtest.Prompt,
			},
				c.args...)...)
			if sum.Complete != 1 || len(s.Asked()) != 4 {
				t.Fatalf("%+v, %d requests; want a group of 4", sum, len(s.Asked()))
			}
			for _, m := range groups[0].Members {
				x := m.Text
				if x.Answer != "305" || x.FinishReason != "stop" || x.Tokens != 4 || x.Drawn == nil ||
					x.Drawn.Engine.Values != c.values ||
					len(x.Drawn.Weights) == 0 != (c.mode == remotelmtest.Completions) {
					t.Errorf("sample %d: %q, %s, %d tokens, drawn by %+v", m.SampleIndex, x.Answer, x.FinishReason,
						x.Tokens, x.Drawn)
				}
				if want := schemas.FilterOrderOf(x.Drawn.Engine.Name); x.Drawn.Engine.Filters != want ||
					(want == "min_p,top_k,top_p") == (c.mode == remotelmtest.SGLang) {
					t.Errorf("sample %d: filters in the order %q", m.SampleIndex, x.Drawn.Engine.Filters)
				}
				if tempered := strings.Contains(fmt.Sprint(c.args), "temperature"); len(x.LogProbs) != len(x.IDs) ||
					(len(x.Entropies) > 0) != c.logits || len(x.ProcessedLogProbs) == 0 != (tempered && !c.logits) {
					t.Errorf("sample %d: %d tokens, %d log-probs, %d processed, %d entropies", m.SampleIndex,
						len(x.IDs),
						len(x.LogProbs), len(x.ProcessedLogProbs), len(x.Entropies))
				}
			}
			r := proven(t, dir, sums(t), "r")
			if r.Tokens != 0 || r.Drawn != 16 || len(r.DrawnBy) != 1 || r.MaxDrawnDifference == 0 ||
				r.MaxDrawnDifference > 1e-3 || (r.Logits == 16) != c.logits {
				t.Errorf("verify: %+v; want 16 tokens that were drawn elsewhere, a small difference", r)
			}
			out := meander(t, dir, "verify", "--json", "--run", "r", "--model", sums(t), "--engine-tolerance",
				"1e-9").must(t, 1)
			var strict verify.Report
			if err := json.Unmarshal([]byte(out.stdout), &strict); err != nil || strict.EngineTolerance != 1e-9 {
				t.Errorf("verify with no tolerance: %+v, %v", strict, err)
			}
			if shown := meander(t, dir, "show", "--run", "r", string(groups[0].UID)).must(t,
				0); !strings.Contains(shown.stdout,
				"random generator") || !strings.Contains(shown.stdout, "305") {
				t.Errorf("show does not say who drew:\n%s", shown.stdout)
			}
		})
	}
}

// verify names the number of a server that is off, with its sample and token, and why; how far it may be off follows
// from the precision that the server shows.
func TestEngine_VerifySaysWhy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		off  string // in place of -1.396, of the first token
		bf16 bool
		code int
		says string
	}{
		{"a little, in fp32", "-1.45", false, 1, "--dtype float32"},
		{"a little, in bf16", "-1.45", true, 0, "of which 0.2 passes"},
		{"more than bf16 gives", "-3.5", true, 1, "the server has other weights than the model here"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s, dir := remotelmtest.New(t, remotelmtest.LogProbs), t.TempDir()
			if c.bf16 {
				s.Row = func(z []float64) {
					for i := range z {
						z[i] = math.Round(16*z[i]) / 16
					}
				}
			}
			first := regexp.MustCompile(`"logprob":-[0-9.e-]+`)
			number := first.Find(s.Stream())
			s.Then(remotelmtest.Whole(bytes.ReplaceAll(s.Stream(), number, []byte(`"logprob":`+c.off))))
			textRun(t, dir, sums(t), "--engine", s.Engine(), "--run", "r", "-n", "1", remotelmtest.Prompt)
			out := meander(t, dir, "verify", "--run", "r", "--model", sums(t)).must(t, c.code)
			if !strings.Contains(out.stdout, c.says) || strings.Contains(out.stdout, "\nverified") != (c.code == 0) {
				t.Errorf("%s:\n%s\nwant %q", number, out.stdout, c.says)
			}
			if of := "#0, token 15: the log_prob is " + c.off + " by vllm 0.32.0"; c.code == 1 &&
				!strings.Contains(out.stdout, of) {
				t.Errorf("not %q:\n%s", of, out.stdout)
			}
		})
	}
}

// A token of which vLLM gives no log-prob, for which it writes -9999.0, has none in the sample, which says so.
func TestEngine_TokenWithoutLogProb(t *testing.T) {
	t.Parallel()
	s, dir := remotelmtest.New(t, remotelmtest.LogProbs), t.TempDir()
	first := regexp.MustCompile(`"logprob":-[0-9.e-]+`).Find(s.Stream())
	s.Then(remotelmtest.Whole(bytes.ReplaceAll(s.Stream(), first, []byte(`"logprob":-9999.0`))))
	groups, _ := textRun(t, dir, sums(t), "--engine", s.Engine(), "--run", "r", "-n", "1", remotelmtest.Prompt)
	x := groups[0].Members[0].Text
	none := 0
	for _, v := range x.LogProbs {
		if math.IsNaN(float64(v)) {
			none++
		} else if v < -9000 {
			t.Errorf("a log-prob of %g", v)
		}
	}
	if none != 1 || x.Drawn.Unscored != 1 {
		t.Errorf("%d log-probs are not there, the sample says %d; want 1", none, x.Drawn.Unscored)
	}
	out := meander(t, dir, "verify", "--run", "r", "--model", sums(t)).must(t, 0).stdout
	if !strings.Contains(out, "numbers that the server did not give") {
		t.Error(out)
	}
}

// What a server cannot give is refused where it is asked for, with what to do.
func TestEngine_Refuses(t *testing.T) {
	t.Parallel()
	vllm, sglang := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.SGLang)
	for _, c := range []struct {
		s    *remotelmtest.Server
		args []string
		says string
	}{
		{vllm, []string{"--logits", "topk:5"}, "--logprobs-mode raw_logits --max-logprobs -1"},
		{vllm, []string{"--reward", "entropy_mean"}, "entropies"},
		{vllm, []string{"--reward", "topk_mass"}, "text.logits"},
		{sglang, []string{"--logits", "full"}, "without --engine"},
		{sglang, []string{"--temperature", "0.7", "--top-p", "0.9"}, "temperature"},
		{vllm, []string{"--temperature", "2.5"}, "--temperature: 2.5; must be 0, or between 0.01 and 2"},
		{vllm, []string{"--temperature", "0.001"}, "--temperature: 0.001; must be 0, or between 0.01 and 2"},
		{vllm, []string{"--dry-run", "--reward", "entropy_mean"}, "every prompt would be refused"},
	} {
		out := meander(t, t.TempDir(), append([]string{
			"run", "--model", sums(t), "--engine", c.s.Engine(), "-n", "2",
			remotelmtest.Prompt,
		}, c.args...)...)
		if out.code == 0 || !strings.Contains(out.stderr, c.says) {
			t.Errorf("%v: exit %d, %s; want %q", c.args, out.code, out.stderr, c.says)
		}
	}
	for _, args := range [][]string{
		{"--engine", "llama=http://x"},
		{"--engine", vllm.Engine(), "--adapter", "x"},
		{"--engine", vllm.Engine(), "--model", "signs"},
	} {
		if out := meander(t, t.TempDir(), append([]string{"run", "--model", sums(t), remotelmtest.Prompt},
			args...)...); out.code == 0 || !strings.Contains(out.stderr, "engine") &&
			!strings.Contains(out.stderr, "no such model") {
			t.Errorf("%v: exit %d, %s", args, out.code, out.stderr)
		}
	}
	if asked := len(vllm.Asked()) + len(sglang.Asked()); asked != 0 {
		t.Errorf("%d requests for tokens of what was refused", asked)
	}
}

// An estimate promises the numbers that the server gives, and none before the server is there.
func TestEngine_Estimate(t *testing.T) {
	t.Parallel()
	for mode, says := range map[string]string{
		remotelmtest.Logits: "none stored; log-probs, processed log-probs, log-sum-exps, entropies are, by vllm " +
			"0.32.0",
		remotelmtest.LogProbs: "none stored; log-probs, processed log-probs are, by vllm 0.32.0",
	} {
		s := remotelmtest.New(t, mode)
		dryRun := func() string {
			out := meander(t, t.TempDir(), "run", "--dry-run", "--model", sums(t), "--engine", s.Engine(),
				remotelmtest.Prompt)
			return strings.Join(strings.Fields(out.must(t, 0).stdout), " ")
		}
		if out := dryRun(); !strings.Contains(out, says) {
			t.Errorf("%s:\n%s\nwant %q", mode, out, says)
		}
		s.Down(true)
		if out := dryRun(); !strings.Contains(out, "which other numbers are is known when vllm answers") {
			t.Errorf("%s, away:\n%s", mode, out)
		}
	}
}

// Answers that break off are gone on with, stop texts end them here, and what the server refuses fails its sample by
// name.
func TestEngine_States(t *testing.T) {
	skipShort(t)
	t.Parallel()
	run := func(s *remotelmtest.Server, code int, args ...string) output {
		return meander(t, t.TempDir(), append([]string{
			"run", "--model", sums(t), "--engine", s.Engine(), "--engine-patience",
			"1s", "-n", "1", "--json", "--out", "-", remotelmtest.Prompt,
		}, args...)...).must(t, code)
	}
	for _, c := range []struct {
		name string
		args []string
		code int
		play func(s *remotelmtest.Server) []remotelmtest.Answer
		says []string
	}{
		{"cut", nil, 0, func(s *remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{
				remotelmtest.Cut(s.Stream(), 2),
				remotelmtest.Whole(remotelmtest.Tail(s.Stream(), 2)),
			}
		}, []string{`"answer":"305"`, `"resumed":1`}},
		{"hangs", nil, 0, func(s *remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{s.Hang(s.Stream(), 1), remotelmtest.Whole(remotelmtest.Tail(s.Stream(), 1))}
		}, []string{`"answer":"305"`, `"resumed":1`}},
		{"split", nil, 0, func(s *remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{remotelmtest.Bytewise(s.Stream())}
		}, []string{`"answer":"305"`}},
		{"stop text over tokens", []string{"--stop", "05"}, 0, func(s *remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{s.Hang(s.Stream(), 3)}
		}, []string{`"answer":"3"`, `"matched":"05"`, `"tokens":3`}},
		{"no tokens", []string{"--max-new-tokens", "0"}, 0, func(s *remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{remotelmtest.Fail(500, "nobody should ask")}
		}, []string{`"answer":""`, `"finish_reason":"length"`}},
		{"refused", nil, 1, func(*remotelmtest.Server) []remotelmtest.Answer {
			return []remotelmtest.Answer{remotelmtest.Fail(400, `{"error":{"message":"seed: not in this mode","code":400}}`)}
		}, []string{"seed: not in this mode"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, remotelmtest.LogProbs)
			s.Then(c.play(s)...)
			out := run(s, c.code, c.args...)
			for _, says := range c.says {
				if !strings.Contains(out.stdout+out.stderr, says) {
					t.Errorf("says no %s:\n%s\n%s", says, out.stdout, out.stderr)
				}
			}
		})
	}
}

// A sampler is not ready while its server is not, says why, and takes up what waited when the server is back.
func TestEngine_Away(t *testing.T) {
	t.Parallel()
	s := remotelmtest.New(t, remotelmtest.LogProbs)
	s.Down(true)
	var mu sync.Mutex
	checks := map[string]func() error{}
	c := defaults()
	c.sampler.Model, c.sampler.Engine = sums(t), s.Engine()
	c.sampler.Health = func(name string, check func() error) {
		mu.Lock()
		defer mu.Unlock()
		checks[name] = check
	}
	w := newWorld(t)
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	// says waits until readiness says something of the engine; nothing: that it is there.
	says := func(what string) {
		t.Helper()
		bustest.Until(t, fmt.Sprintf("readiness: %q", what), func() error {
			mu.Lock()
			check := checks["engine"]
			mu.Unlock()
			if check == nil {
				return errors.New("no condition yet")
			}
			err := check()
			if (err == nil) != (what == "") || err != nil && !strings.Contains(err.Error(), what) {
				return errors.New("it is " + fmt.Sprint(err))
			}
			return nil
		})
	}
	publish := func(uid schemas.UID) {
		t.Helper()
		if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
			UID:       uid,
			Routing:   schemas.Routing{Model: "sums"},
			Prompt:    remotelmtest.Prompt,
			GroupSize: new(int64(2)),
		}); err != nil {
			t.Fatal(err)
		}
	}
	says("the engine is dead")
	s.Down(false)
	says("")
	publish("a")
	w.advantages(t, "r", 1)
	s.Down(true)
	says("the engine is dead")
	publish("b")
	before := len(s.Asked())
	s.Down(false)
	w.advantages(t, "r", 2)
	if after := len(s.Asked()); after != before+2 {
		t.Errorf("%d requests for the group that waited; want 2", after-before)
	}
}

// A server that is away, or is another than it should be, is said at once: in the line of the run, to those who
// publish, and in the refusal.
func TestEngine_SaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	vllm, sglang := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.SGLang)
	for engine, says := range map[string]string{
		"vllm=" + sglang.URL:          "it is a server of sglang: name it sglang=" + sglang.URL,
		"sglang=" + vllm.URL:          "it is a server of vllm: name it vllm=" + vllm.URL,
		"vllm=" + vllm.URL + "/wrong": "it is no server of vllm or sglang: is its port right?",
	} {
		out := meander(t, t.TempDir(), "run", "--model", sums(t), "--engine", engine, remotelmtest.Prompt).must(t, 2)
		if !strings.Contains(out.stderr, says) {
			t.Errorf("%s: %s; want %q", engine, out.stderr, says)
		}
	}
	vllm.Down(true)
	c := defaults()
	c.sampler.Model, c.sampler.Engine = sums(t), vllm.Engine()
	told := make(chan string, 100)
	c.sampler.Waiting = func(text string) { told <- text }
	w := newWorld(t)
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	wait := "waiting for the engine: vllm at " + vllm.URL
	if first := <-told; !strings.HasPrefix(first, wait) || !strings.Contains(first, "the engine is dead") {
		t.Errorf("told %q", first)
	}
	var held *client.HeldError
	var err error
	for window := 4 * time.Second; held == nil && window < bustest.Patience; window *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), window)
		_, err = w.client.Publish(ctx, "r", &schemas.Prompt{
			UID: "a", Routing: schemas.Routing{Model: "sums"}, Prompt: remotelmtest.Prompt, GroupSize: new(int64(2)),
		})
		cancel()
		errors.As(err, &held)
	}
	if held == nil || !strings.Contains(held.Reason, `the sampler of "sums" is not up yet: `+wait) {
		t.Errorf("a prompt for a lane whose engine is away: %v", err)
	}
	vllm.Down(false)
	w.advantages(t, "r", 1)
}

// A server is asked for as many answers at once as --engine-concurrency says, 64 by default, and for fewer while it is
// overloaded.
func TestEngine_Concurrency(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		// least and most are in flight at once; above full they are refused.
		least, most, full int
	}{
		{"by default", nil, 20, 20, 0},
		{"set", []string{"--engine-concurrency", "3"}, 3, 3, 0},
		{"adapts", nil, 1, 20, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := remotelmtest.New(t, remotelmtest.LogProbs)
			stream, reached := s.Stream(), make(chan struct{})
			reach := sync.OnceFunc(func() { close(reached) })
			var mu sync.Mutex
			now, most, refused := 0, 0, 0
			s.Then(func(w http.ResponseWriter, body map[string]any) {
				mu.Lock()
				now++
				over := c.full > 0 && now > c.full
				if most = max(most, now); now >= c.least {
					reach()
				}
				if over {
					refused++
				}
				mu.Unlock()
				defer func() {
					mu.Lock()
					now--
					mu.Unlock()
				}()
				if over {
					http.Error(w, "too many", http.StatusTooManyRequests)
					return
				}
				<-reached
				remotelmtest.Whole(stream)(w, body)
			})
			_, sum := textRun(t, t.TempDir(), sums(t), append(c.args, "--engine", s.Engine(), "-n", "20",
				remotelmtest.Prompt)...)
			if sum.Complete != 1 || most < c.least || most > c.most {
				t.Errorf("%+v, %d at once, %d refused; want %d to %d", sum, most, refused, c.least, c.most)
			}
		})
	}
	out := meander(t, t.TempDir(), "run", "--model", sums(t), "--engine", "vllm=http://127.0.0.1:1", "--batch",
		"4", "x").must(t, 2)
	if !strings.Contains(out.stderr, "--engine-concurrency") && !strings.Contains(out.stderr, "engine_concurrency") {
		t.Errorf("--batch beside a server: %s", out.stderr)
	}
}

// Several servers of the same weights share the samples. One that is away, or has other weights, is said and not used;
// what it had begun the others go on with.
func TestEngine_Several(t *testing.T) {
	t.Parallel()
	a, b := remotelmtest.New(t, remotelmtest.LogProbs), remotelmtest.New(t, remotelmtest.LogProbs)
	engine := a.Engine() + "," + b.URL
	dir := t.TempDir()
	_, sum := textRun(t, dir, sums(t), "--engine", engine, "--run", "r", "-n", "8", "--engine-concurrency", "4",
		remotelmtest.Prompt)
	if sum.Complete != 1 || len(a.Asked()) == 0 || len(b.Asked()) == 0 || len(a.Asked())+len(b.Asked()) != 8 {
		t.Fatalf("%+v, asked %d and %d times; want both, 8 in all", sum, len(a.Asked()), len(b.Asked()))
	}
	if r := proven(t, dir, sums(t), "r"); r.Drawn != 32 || r.MaxDrawnDifference > 1e-3 {
		t.Errorf("verify: %+v", r)
	}
	a.Then(remotelmtest.Cut(a.Stream(), 1))
	b.Then(remotelmtest.Whole(remotelmtest.Tail(b.Stream(), 1)))
	if _, sum = textRun(t, dir, sums(t), "--engine", engine, "--run", "cut", "-n", "1",
		remotelmtest.Prompt); sum.Complete != 1 ||
		len(a.Asked()) != 1 || len(b.Asked()) != 1 {
		t.Errorf("%+v: an answer that broke off: asked %d and %d times", sum, len(a.Asked()), len(b.Asked()))
	}
	b.Then(remotelmtest.Whole(b.Stream()))
	b.Row = func(z []float64) { slices.Reverse(z) }
	a.Then(remotelmtest.Whole(a.Stream()))
	out := meander(t, dir, "run", "--model", sums(t), "--engine", engine, "--run", "other", "-n", "4",
		remotelmtest.Prompt).must(t, 0)
	if !strings.Contains(out.stderr, "a server of the engine is not used") ||
		!strings.Contains(out.stderr, "other weights") ||
		len(b.Asked()) != 0 {
		t.Errorf("a server of other weights was asked %d times:\n%s", len(b.Asked()), out.stderr)
	}
}

// A group that one engine has begun waits for an engine of the kind: another one does not finish it unless it is so
// set, and then the results say who drew what.
func TestEngine_Mix(t *testing.T) {
	t.Parallel()
	s, dir := remotelmtest.New(t, remotelmtest.LogProbs), t.TempDir()
	s.Then(remotelmtest.Whole(s.Stream()), remotelmtest.Whole(s.Stream()),
		remotelmtest.Fail(http.StatusServiceUnavailable, "busy"))
	args := []string{
		"run", "--model", sums(t), "--json", "--seed", "11", "-n", "4", "--out", "-", "--reward", "exact_match",
		"--ground-truth", "4", "--run", "r", remotelmtest.Prompt,
	}
	begun := background(t, dir, append(args, "--engine", s.Engine())...)
	made(t, dir, "r", 2, begun)
	begun.signal(t, os.Kill)
	begun.wait(t)
	out := meander(t, dir, args...).must(t, 2)
	if !strings.Contains(out.stderr, `is made by the sampler itself; run "r" was started with what is served by vllm`) || !strings.Contains(out.stderr, "--engine-mix") {
		t.Errorf("another engine: %s", out.stderr)
	}
	_, sum := textRun(t, dir, sums(t), "--engine-mix", "--run", "r", remotelmtest.Prompt)
	if sum.Complete != 1 || sum.Engines["vllm 0.32.0"] != 2 || sum.Engines["sampler"] != 2 {
		t.Errorf("%+v; want two samples of each engine", sum)
	}
	again := slices.DeleteFunc(append(args, "--engine-mix"), func(arg string) bool { return arg == "--json" })
	out = meander(t, dir, again...).must(t, 0)
	if !strings.Contains(out.stdout, "samples by engine: sampler 2, vllm 0.32.0 2") {
		t.Errorf("the results for people: %s", out.stdout)
	}
	if r := proven(t, dir, sums(t), "r"); r.Drawn == 0 || r.Tokens == 0 {
		t.Errorf("verify: %+v; want tokens of both", r)
	}
}

// A real server, where MEANDER_ENGINE names one (vllm=URL or sglang=URL) that serves deploy/models/sums in float32,
// gives what the recorded ones do: its numbers are those of the model here.
func TestEngine_Real(t *testing.T) {
	t.Parallel()
	engine := os.Getenv("MEANDER_ENGINE")
	if engine == "" {
		t.Skip("MEANDER_ENGINE names no server (vllm=http://127.0.0.1:8000) of deploy/models/sums: nothing was asked " +
			"of a real one")
	}
	dir := t.TempDir()
	prompts := []string{"347+58=?", "12+30=?", "999-1=?", "1+1=?"}
	groups, sum := textRun(t, dir, sums(t), slices.Concat([]string{"--engine", engine, "-n", "8", "--run", "r"},
		prompts)...)
	if sum.Complete != 4 {
		t.Fatalf("%+v", sum)
	}
	answers := &bytes.Buffer{}
	for _, g := range groups {
		for _, m := range g.Members {
			fmt.Fprintf(answers, "%s ", m.Text.Answer)
		}
	}
	if r := proven(t, dir, sums(t), "r"); r.Drawn == 0 || r.MaxDrawnDifference > 1e-4 {
		t.Errorf("verify: %+v", r)
	}
	if !strings.Contains(answers.String(), "405") || !strings.Contains(answers.String(), "42") {
		t.Errorf("no answer is right: %s", answers)
	}
}
