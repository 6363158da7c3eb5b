package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// scoreServer answers score requests over HTTP with what reply says.
func scoreServer(t *testing.T, reply func(w http.ResponseWriter, r *http.Request, samples int)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Samples []json.RawMessage `json:"samples"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); errors.Is(err, io.ErrUnexpectedEOF) {
			return // the service that asks has been killed
		} else if err != nil {
			t.Errorf("score request: %v", err)
		}
		reply(w, r, len(body.Samples))
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func sendScores(w http.ResponseWriter, value string, samples int) {
	fmt.Fprintf(w, `{"scores": [%s]}`, strings.TrimSuffix(strings.Repeat(value+",", samples), ","))
}

func scorersFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scorers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// small is a prompt of four small samples.
func small(uid schemas.UID, rewards ...schemas.RewardSpec) *schemas.Prompt {
	return &schemas.Prompt{
		UID: uid, Prompt: "a red fox", GroupSize: new(int64(4)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(2)), Height: new(int64(32)), Width: new(int64(32)),
		},
		Reward: rewards,
	}
}

func (w *world) publish(t *testing.T, run schemas.Run, prompts ...*schemas.Prompt) {
	t.Helper()
	for _, p := range prompts {
		if _, err := w.client.Publish(t.Context(), run, p); err != nil {
			t.Fatal(err)
		}
	}
}

// statuses counts the members of a group.
func statuses(a *schemas.Advantage) map[string]int {
	out := map[string]int{}
	for _, m := range a.Members {
		out[m.Status]++
	}
	return out
}

// Whatever is wrong with a reward function, groups close: with a required one as failed,
// with an optional one as if it had not been asked, with one that fails for some samples
// as partial, and complete with one that comes back.
func TestReward_GroupsCloseWhateverScorersDo(t *testing.T) {
	t.Parallel()
	file := brokenScorers(t)
	w := start(t, func(c *config) {
		c.reward.Scorers, c.reward.ScorePatience, c.reward.DrainTimeout = file, 10*time.Second, 100*time.Millisecond
		c.reward.ScoreTimeout = 5 * time.Second
	})
	answer(t, w, map[string]any{
		"fine": map[string]any{"v": 1, "score": 0.5},
		"nan":  map[string]any{"v": 1, "score": "NaN"}, "mute": nil,
	})
	want := map[string]string{
		"http:hang": "failed", "http:crash": "failed", "http:garbage": "failed", "http:nan": "failed",
		"http:closed": "failed",
		"http:half":   "partial", "http:away": "complete", "nats:fine": "complete", "nats:nan": "failed", "nats:mute": "failed",
		"nats:nobody": "failed",
	}
	uid := func(name, more string) schemas.UID { return schemas.UID(strings.ReplaceAll(name, ":", "-") + more) }
	for name := range want {
		w.publish(t, "r", small(uid(name, ""), schemas.RewardSpec{Name: name}))
		if name != "http:half" {
			w.publish(t, "r", small(uid(name, "-optional"), schemas.RewardSpec{Name: "jpeg_compressibility"},
				schemas.RewardSpec{Name: name, Required: new(false)}))
		}
	}
	w.publish(t, "r", small("plain", schemas.RewardSpec{Name: "jpeg_compressibility"}))
	got := w.advantages(t, "r", 2*len(want))
	for name, status := range want {
		a := got[uid(name, "")]
		members := statuses(a)
		scored := map[string]int{"complete": 4, "partial": 2}[status]
		if a.Status != status || members["scored"] != scored || members["failed"] != 4-scored {
			t.Errorf("%s: %s, members %v; want %s with %d scored", name, a.Status, members, status, scored)
		}
		if a := got[uid(name, "-optional")]; a != nil && (a.Status != "complete" || statuses(a)["scored"] != 4) {
			t.Errorf("optional %s: %s, members %v; want complete", name, a.Status, statuses(a))
		}
	}
	// The plain group does not wait for the patience with the others.
	if a := got["plain"]; a.Status != "complete" {
		t.Errorf("plain group: %s", a.Status)
	}
}

// brokenScorers is a scorers file of servers that fail, each in its own way.
func brokenScorers(t *testing.T) string {
	t.Helper()
	var half, away atomic.Int64
	up := time.Now().Add(2 * time.Second)
	return scorersFile(t, fmt.Sprintf(`
http:
  hang: {url: %q, timeout: 500ms, retries: 0}
  crash: {url: %q, retries: 1, retry_wait: 10ms}
  garbage: {url: %q}
  nan: {url: %q}
  half: {url: %q}
  away: {url: %q, retries: 1, retry_wait: 10ms}
  closed: {url: "http://127.0.0.1:1/score", retries: 1, retry_wait: 10ms}
nats:
  mute: {timeout: 300ms}
`,
		scoreServer(t, func(_ http.ResponseWriter, r *http.Request, _ int) { <-r.Context().Done() }),
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, _ int) {
			if c, _, err := w.(http.Hijacker).Hijack(); err == nil {
				_ = c.Close()
			}
		}),
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, _ int) { fmt.Fprint(w, `{"scores": "many"}`) }),
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, n int) { sendScores(w, "NaN", n) }),
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, n int) {
			if half.Add(1)%2 == 0 {
				sendScores(w, "null", n)
				return
			}
			sendScores(w, fmt.Sprint(half.Load()), n)
		}),
		scoreServer(t, func(w http.ResponseWriter, _ *http.Request, n int) {
			if time.Now().Before(up) {
				http.Error(w, "warming up", http.StatusServiceUnavailable)
				return
			}
			sendScores(w, fmt.Sprint(away.Add(1)), n)
		})))
}

// answer has a worker of each name answer the score requests of the world; nil: never.
func answer(t *testing.T, w *world, replies map[string]any) {
	t.Helper()
	for name, reply := range replies {
		s, err := w.Conn().QueueSubscribe(schemas.ScoreSubject(name), name, func(m *nats.Msg) {
			if reply == nil {
				return
			}
			data, err := msgpack.Marshal(reply)
			if err == nil {
				err = m.Respond(data)
			}
			if err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Unsubscribe() })
	}
}

// tooLate publishes prompts, and reports whether intake refused one because its deadline was over.
func tooLate(t *testing.T, c *client.Client, run schemas.Run, prompts ...*schemas.Prompt) bool {
	t.Helper()
	for _, p := range prompts {
		_, err := c.Publish(t.Context(), run, p)
		if refused, ok := errors.AsType[*client.RefusedError](err); ok && refused.Code == schemas.CodeLate {
			return true
		}
		if err != nil {
			t.Fatalf("publish %s: %v", p.UID, err)
		}
	}
	return false
}

// Rewards from outside: given before the samples are made, after, and never.
func TestReward_External(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	run := schemas.Run("r")
	give := func(uid schemas.UID, i int64, name string, value *float64) {
		t.Helper()
		v := &schemas.Verdict{Run: run, UID: uid, SampleIndex: i, Name: name, Value: value, At: time.Now().UnixNano()}
		if value == nil {
			v.Error = "cannot tell"
		}
		if _, err := w.Publish(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	human, img := schemas.RewardSpec{Name: "external:human"}, schemas.RewardSpec{Name: "jpeg_compressibility"}
	// What is judged a little before its deadline is stored by then, unless the machine is
	// busy: then there is more time.
	var got map[schemas.UID]*schemas.Advantage
	for wait, missing := 4*time.Second, 1; missing > 0 && wait < bustest.Patience; wait *= 2 {
		run += "r"
		prompt := func(uid schemas.UID, wait time.Duration, rewards ...schemas.RewardSpec) *schemas.Prompt {
			p := small(uid, rewards...)
			p.Deadline = new(time.Now().Add(wait).UnixNano())
			return p
		}
		give("before", 0, "human", new(0.25))
		give("before", 1, "human", new(0.5))
		if tooLate(t, w.client, run,
			prompt("before", time.Hour, human), prompt("never", wait, human), prompt("some", wait, human, img),
			prompt("left-out", wait, img, schemas.RewardSpec{Name: "external", Required: new(false)})) {
			continue
		}
		give("before", 2, "human", new(0.75))
		give("some", 3, "human", new(1.0))
		give("some", 2, "human", nil)
		// Only this group's samples are sure to be made: the deadline of the others may be over before.
		bustest.Await(t, w.Bus, 4, schemas.StreamTrajectories, string(schemas.Prefix+"trajectory."+run+".before.>"))
		give("before", 3, "human", new(1.0))
		got, missing = w.advantages(t, run, 4), 0
		for _, a := range got {
			missing += statuses(a)["missing"]
		}
	}
	for uid, want := range map[schemas.UID]struct {
		status string
		scored int
	}{"before": {"complete", 4}, "never": {"failed", 0}, "some": {"partial", 1}, "left-out": {"complete", 4}} {
		a := got[uid]
		if members := statuses(a); a.Status != want.status || members["scored"] != want.scored ||
			members["missing"] != 0 {
			t.Errorf("%s: %s, members %v; want %s with %d scored and none missing", uid, a.Status, members, want.status,
				want.scored)
		}
	}
	for i, want := range []float64{0.25, 0.5, 0.75, 1} {
		if m := got["before"].Members[i]; m.Reward == nil || *m.Reward != want {
			t.Errorf("sample %d: %v, want %v", i, m.Reward, want)
		}
	}
	// One that comes after the end is a dead letter.
	give("never", 0, "human", new(1.0))
	bustest.Until(t, "a dead letter of a late verdict", func() error {
		letters := bustest.Dead(t, w.Bus, 0)
		for _, d := range letters {
			if d.Code == schemas.CodeLate && d.Service == "reward" &&
				d.OriginalSubject == schemas.VerdictSubject(run, "never", 0, "human") {
				return nil
			}
		}
		return fmt.Errorf("%+v", letters)
	})
}

// The worker in Python that comes with the project, if Python has what it needs.
func TestReward_PythonWorker(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	info := serve(t, dir)
	startWorker(t, "--url", info.URL)
	groups, _ := meander(t, dir, "run", "--json", "-n", "4", "--out", "-", "--reward", "nats:colour",
		"a red fox").must(t,
		0).parse(t)
	for _, m := range groups[0].Members {
		if m.Reward == nil || *m.Reward < 0 || *m.Reward > 2 {
			t.Errorf("sample %d: %s %v, want a colourfulness", m.SampleIndex, m.Status, m.Reward)
		}
	}
}

// The example that rates whole groups, against a pipeline: scores that are win rates, of the same answer as those that
// are shown and exported, and again in a pass; a function of single samples says that it is none of whole groups.
func TestReward_GroupWorker(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	info := serve(t, dir)
	startWorker(t, "--url", info.URL)
	startGroupWorker(t, info.URL)
	groups, _ := meander(t, dir, "run", "--json", "-n", "4", "--out", "-", "--run", "ranks", "--reward", "nats:rank",
		"--group-min", "nats:rank=2", "--optional-reward", "nats:colour", "--group-min", "nats:colour=2", "a red fox").
		must(t, 0).parse(t)
	sum := 0.0
	for _, m := range groups[0].Members {
		if m.Reward == nil || len(m.Scores) != 2 || m.Scores[0].Members != 4 || *m.Scores[0].Value != *m.Reward ||
			!strings.Contains(m.Scores[0].Detail, "of 3") ||
			!strings.Contains(m.Scores[1].Error, "leave out --group-min") {
			t.Fatalf("sample %d: %v %+v", m.SampleIndex, m.Reward, m.Scores)
		}
		sum += *m.Reward
	}
	if math.Abs(sum-2) > 1e-12 { // six comparisons, each of which gives one point among three
		t.Errorf("win rates add up to %v", sum)
	}
	uid := groups[0].UID
	if out := meander(t, dir, "show", "--run", "ranks", uid, "0").must(t, 0).stdout; !strings.Contains(out,
		"among 4 samples of its group") {
		t.Errorf("show: %s", out)
	}
	meander(t, dir, "rescore", "--run", "ranks", "--pass", "again", "--reward", "nats:rank", "--group-min",
		"nats:rank=4").must(t, 0)
	meander(t, dir, "rescore", "--run", "ranks", "--pass", "never", "--reward", "nats:rank", "--group-min",
		"nats:rank=5").must(t, 2)
	if out := meander(t, dir, "run", "--dry-run", "-n", "4", "--reward", "glyph", "--group-min", "glyph=2",
		`a sign that says "A"`); !strings.Contains(out.stderr+out.stdout, "group_min: 2; must be absent") {
		t.Errorf("dry run: %s %s", out.stdout, out.stderr)
	}
}

// startGroupWorker runs the example of a function of whole groups until the test ends.
func startGroupWorker(t *testing.T, url string) {
	t.Helper()
	python := pythonWith(t, "nats, msgpack, PIL, blake3, numpy")
	c := exec.Command(python, filepath.Join(root, "deploy/scorers/rank.py"), "--nats", url)
	c.Env = append(os.Environ(), "PYTHONPATH="+filepath.Join(root, "pkg/client/python"), "PYTHONDONTWRITEBYTECODE=1")
	startListening(t, c, "rank is loaded", "answers for nats:rank")
}
