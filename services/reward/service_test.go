package reward

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plane is an event plane of a test.
type plane struct {
	*bus.Bus
	server *natsd.Server
}

func newPlane(t testing.TB) *plane {
	t.Helper()
	server, err := natsd.Start(t.Context(), natsd.Options{StoreDir: t.TempDir(), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	p := &plane{server: server}
	p.Bus = p.connect(t)
	t.Cleanup(func() { _ = p.Close() })
	if err := p.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *plane) connect(t testing.TB) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(t.Context(), bus.Config{InProcess: p.server.InProcess(), Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func testConfig() Config {
	c := DefaultConfig()
	c.AckWait, c.ScoreTimeout, c.ScorePatience = time.Second, 2*time.Second, 3*time.Second
	return c
}

// serve runs the service; stop ends it.
func (p *plane) serve(t testing.TB, cfg Config) (stop func()) {
	t.Helper()
	b := p.connect(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, cfg, b, zerolog.Nop()) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("service: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// prompted is when the prompts of all tests came.
var prompted = time.Now()

// trajectory is a finished sample whose picture is of one grey.
func trajectory(t testing.TB, run, uid string, i, n int64, shade uint8, rewards ...string) *schemas.Trajectory {
	t.Helper()
	im := image.NewNRGBA(image.Rect(0, 0, 32, 16))
	for k := range im.Pix {
		im.Pix[k] = shade
		if k%4 == 3 {
			im.Pix[k] = 255
		}
	}
	im.Set(1, 1, color.NRGBA{uint8(i), 10, 20, 255})
	var file bytes.Buffer
	if err := png.Encode(&file, im); err != nil {
		t.Fatal(err)
	}
	digest := strings.Repeat("0123456789abcdef", 4)
	now := time.Now().UnixNano()
	tr := &schemas.Trajectory{
		Run: run, UID: uid, SampleIndex: i, GroupSize: n, Lane: "lane", Attempt: "a", StopReason: schemas.StopCompleted,
		Prompt: `a sign that says "A"`, Height: 16, Width: 32, TrueCFGScale: 1, CFGRule: schemas.CFGPlain,
		Sigmas: []float32{1, 0}, Timesteps: []float32{1000, 0}, Transitions: []string{"sde"}, LogProbs: []*float64{new(-1.5)},
		LogProbKind: schemas.LogProbDensity, Solver: "euler", LatentStepIndices: []int64{}, LatentsShape: []int64{2, 64}, LatentsDType: "F32",
		Steps: []schemas.StepRef{{Seq: 1, Digest: digest}}, ContentDigest: digest, Conditioning: []schemas.NamedTensor{},
		Image:          &schemas.Image{Format: schemas.ImagePNG, Width: 32, Height: 16, Digest: digest, Data: file.Bytes()},
		ScheduleDigest: digest, WeightsDigest: digest, Sampler: "s", Backend: "cpu",
		Timings: schemas.SampleTimings{Received: now, Started: now, Finished: now},
		Group: schemas.Group{
			Batch: uid, PromptSeq: 1, Created: prompted.UnixNano(),
			Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-4)},
		},
	}
	for _, name := range rewards {
		name, optional := strings.CutSuffix(name, "?")
		tr.Group.Reward = append(tr.Group.Reward, schemas.RewardSpec{Name: name, Weight: new(1.0), Required: new(!optional)})
	}
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	return tr
}

func (p *plane) put(t testing.TB, events ...schemas.Keyed) {
	t.Helper()
	for _, e := range events {
		if tr, ok := e.(*schemas.Trajectory); ok && tr.StopReason == schemas.StopCompleted {
			p.putStep(t, tr)
		}
		if _, err := p.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
}

// putStep stores the one step of a trajectory, which then names it.
func (p *plane) putStep(t testing.TB, tr *schemas.Trajectory) {
	t.Helper()
	step := &schemas.Step{
		Run: tr.Run, UID: tr.UID, SampleIndex: tr.SampleIndex, Attempt: tr.Attempt, NumInferenceSteps: 1, Transition: "sde",
		Sigma: 1, Timestep: 1000, LogProbKind: tr.LogProbKind, LogProb: tr.LogProbs[0], LogProbSum: tr.LogProbs[0], ElementCount: 128,
		Latents: []schemas.IndexedTensor{}, Debug: []schemas.NamedTensor{}, ScheduleDigest: tr.ScheduleDigest,
	}
	ack, err := p.Publish(t.Context(), step)
	if err != nil {
		t.Fatal(err)
	}
	data, err := schemas.Encode(step)
	if err != nil {
		t.Fatal(err)
	}
	tr.Steps = []schemas.StepRef{{Seq: ack.Seq, Digest: fmt.Sprintf("%x", sha256.Sum256(data))}}
}

// patience is how long a test waits while nothing moves, at least: the machine may be busy
// elsewhere, and a test that passes does not wait.
const patience = 2 * time.Minute

// rewards waits for n rewards of a run, by uid and sample. The limit is for each to come
// after the one before.
func (p *plane) rewards(t testing.TB, run string, n int, limit time.Duration) map[string]*schemas.Reward {
	t.Helper()
	limit = max(limit, patience)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	idle := time.AfterFunc(limit, cancel)
	defer idle.Stop()
	out := map[string]*schemas.Reward{}
	for m, err := range p.Read(ctx, schemas.StreamRewards, []string{bus.RewardFilter(run, "*", "*")}, bus.ReadOptions{Live: true}) {
		if err != nil {
			break
		}
		idle.Reset(limit)
		var r schemas.Reward
		if err := schemas.DecodeValid(m.Data, &r); err != nil {
			t.Fatal(err)
		}
		if out[fmt.Sprintf("%s.%d", r.UID, r.SampleIndex)] = &r; len(out) == n {
			return out
		}
	}
	t.Fatalf("%d rewards of run %s, and no more in %v; want %d", len(out), run, limit, n)
	return nil
}

// file writes a scorers file.
func file(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scorers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// web answers score requests with what reply says for the number of samples.
func web(t testing.TB, reply func(w http.ResponseWriter, r *http.Request, samples int)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Samples []json.RawMessage `json:"samples"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Errorf("request: %v", err)
		}
		reply(w, r, len(body.Samples))
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func scores(w http.ResponseWriter, value string, samples int) {
	fmt.Fprintf(w, `{"scores": [%s]}`, strings.TrimSuffix(strings.Repeat(value+",", samples), ","))
}

// A scorer that hangs, resets the connection, answers garbage, NaN, or nothing at all
// fails the samples that need it, and is left out where it is optional; one that is away
// for a while delays them; and none slows the samples that do without it.
func TestService_BrokenScorers(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	hang := web(t, func(_ http.ResponseWriter, r *http.Request, _ int) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	t.Cleanup(func() { close(release) })
	crash := web(t, func(w http.ResponseWriter, _ *http.Request, _ int) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	})
	garbage := web(t, func(w http.ResponseWriter, _ *http.Request, _ int) { fmt.Fprint(w, "<html>nice picture</html>") })
	nan := web(t, func(w http.ResponseWriter, _ *http.Request, n int) { scores(w, "NaN", n) })
	refuse := web(t, func(w http.ResponseWriter, _ *http.Request, _ int) {
		http.Error(w, "what is this", http.StatusBadRequest)
	})
	var away atomic.Int64
	for503 := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		if away.Add(1) <= 4 {
			http.Error(w, "warming up", http.StatusServiceUnavailable)
			return
		}
		scores(w, "0.5", n)
	})
	fine := web(t, func(w http.ResponseWriter, _ *http.Request, n int) { scores(w, "0.25", n) })

	p := newPlane(t)
	cfg := testConfig()
	cfg.ScorePatience = 8 * time.Second // more than the breaker of the one that comes back needs
	cfg.Scorers = file(t, fmt.Sprintf(`
http:
  hang: {url: %q, timeout: 500ms, retries: 0}
  crash: {url: %q, retries: 1, retry_wait: 10ms}
  garbage: {url: %q}
  nan: {url: %q}
  refuse: {url: %q}
  away: {url: %q, retries: 0}
  fine: {url: %q}
nats:
  hang: {timeout: 500ms}
`, hang, crash, garbage, nan, refuse, for503, fine))

	answer := func(name string, reply any) {
		s, err := p.Conn().QueueSubscribe(schemas.ScoreSubject(name), name, func(m *nats.Msg) {
			if reply == nil {
				return // it took the request and never answers
			}
			data, ok := reply.([]byte)
			if !ok {
				var err error
				if data, err = msgpack.Marshal(reply); err != nil {
					t.Error(err)
				}
			}
			if err := m.Respond(data); err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Unsubscribe() })
	}
	answer("fine", map[string]any{"v": 1, "score": 0.75})
	answer("hang", nil)
	answer("garbage", []byte{0xc1, 0xff})
	answer("nan", map[string]any{"v": 1, "score": math.NaN()})
	answer("sorry", map[string]any{"v": 1, "error": "no face in the picture"})

	// How long plain samples take without any of this.
	quick := func(run string) time.Duration {
		began := time.Now()
		for i := range int64(64) {
			p.put(t, trajectory(t, run, "quick", i, 64, uint8(i), "jpeg_compressibility"))
		}
		for key, r := range p.rewards(t, run, 64, 30*time.Second) {
			if r.Status != schemas.StatusScored {
				t.Errorf("%s: %s", key, r.Error)
			}
		}
		return time.Since(began)
	}
	p.serve(t, cfg)
	quick("warm")
	alone := quick("alone")

	type want struct {
		status, fault string
		value         float64
	}
	cases := map[string]want{
		"http:hang": {"failed", "http:hang", 0}, "http:crash": {"failed", "http:crash", 0}, "http:garbage": {"failed", "http:garbage", 0},
		"http:nan": {"failed", "NaN", 0}, "http:refuse": {"failed", "400", 0}, "http:away": {"scored", "", 0.5}, "http:fine": {"scored", "", 0.25},
		"http:unknown": {"failed", "not configured here", 0},
		"nats:fine":    {"scored", "", 0.75}, "nats:hang": {"failed", "nats:hang", 0}, "nats:garbage": {"failed", "nats:garbage", 0}, "nats:nan": {"failed", "NaN", 0},
		"nats:sorry": {"failed", "no face in the picture", 0}, "nats:nobody": {"failed", "nats:nobody", 0},
	}
	uid := func(name, kind string) string { return strings.ReplaceAll(name, ":", "-") + kind }
	samples := 0
	for name := range cases {
		for i := range int64(6) {
			p.put(t, trajectory(t, "broken", uid(name, ""), i, 6, uint8(40*i), name))
			p.put(t, trajectory(t, "broken", uid(name, "-opt"), i, 6, uint8(40*i), "jpeg_incompressibility", name+"?"))
			samples += 2
		}
	}
	beside := quick("beside")
	t.Logf("64 plain samples: %v alone, %v beside", alone, beside) // TestService_HangingScorerDelaysNobody is about that
	got := p.rewards(t, "broken", samples, time.Minute)
	for name, w := range cases {
		for i := range 6 {
			r := got[fmt.Sprintf("%s.%d", uid(name, ""), i)]
			if r.Status != w.status || !strings.Contains(r.Error, w.fault) || w.status == "scored" && *r.Reward != w.value {
				t.Errorf("%s: %s %q %v, want %s %q %v", name, r.Status, r.Error, r.Reward, w.status, w.fault, w.value)
			}
			// As an optional score it is left out, and said so; never a number.
			r = got[fmt.Sprintf("%s.%d", uid(name, "-opt"), i)]
			score := r.Scores[1]
			if r.Status != "scored" || score.Name != name || score.Status != w.status || (score.Value != nil) != (w.status == "scored") {
				t.Errorf("optional %s: %s %+v", name, r.Status, score)
				continue
			}
			sum := *r.Scores[0].Value
			if score.Value != nil {
				sum += *score.Value
			}
			if *r.Reward != sum {
				t.Errorf("optional %s: reward %v, want the sum of what there is, %v", name, *r.Reward, sum)
			}
		}
	}
}

// Samples of several groups go to the server together.
func TestService_Batches(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sizes []int
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		mu.Lock()
		sizes = append(sizes, n)
		mu.Unlock()
		time.Sleep(30 * time.Millisecond)
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  many: {url: %q, max_batch: 8, concurrency: 2}\n", url))
	for g := range 8 {
		for i := range int64(4) {
			p.put(t, trajectory(t, "r", fmt.Sprint("g", g), i, 4, 9, "http:many"))
		}
	}
	p.serve(t, cfg)
	p.rewards(t, "r", 32, 30*time.Second)
	mu.Lock()
	defer mu.Unlock()
	largest, total := 0, 0
	for _, n := range sizes {
		largest, total = max(largest, n), total+n
	}
	t.Logf("requests of %v samples", sizes)
	if largest < 2 || largest > 8 || total != 32 || len(sizes) > 24 {
		t.Errorf("requests of %v samples, want 32 in all, up to 8 together", sizes)
	}
}

func verdict(uid string, i int64, name string, value *float64) *schemas.Verdict {
	v := &schemas.Verdict{Run: "r", UID: uid, SampleIndex: i, Name: name, Value: value, Comment: "well done", Author: "lin", At: 1}
	if value == nil {
		v.Error = "skipped"
	}
	return v
}

// A verdict may come before its trajectory or after; what did not come by the deadline
// has failed, and the samples of the group still get their rewards in time.
func TestService_Verdicts(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	now := time.Now() // what is left of a deadline's time counts from the prompt
	sample := func(uid string, i int64, deadline time.Duration, rewards ...string) *schemas.Trajectory {
		tr := trajectory(t, "r", uid, i, 4, 7, rewards...)
		tr.Group.Created, tr.Group.Deadline = now.UnixNano(), now.Add(deadline).UnixNano()
		return tr
	}
	p.put(t, verdict("u", 0, "human", new(0.5)), verdict("two", 1, "a", new(1.0))) // before everything
	p.serve(t, testConfig())
	p.put(t, sample("u", 0, time.Minute, "external:human", "jpeg_incompressibility"), sample("u", 1, time.Minute, "external:human"))
	p.put(t, sample("u", 2, time.Minute, "external"), sample("u", 3, 2*time.Second, "external:human?", "synthetic"))
	p.put(t, sample("two", 0, time.Minute, "external:a", "external:b"), sample("two", 1, 1500*time.Millisecond, "external:a", "external:b"))
	time.Sleep(300 * time.Millisecond)
	p.put(t, verdict("u", 1, "human", new(0.25)), verdict("u", 2, "external", nil), verdict("two", 0, "a", new(1.0)))
	time.Sleep(200 * time.Millisecond)
	p.put(t, verdict("two", 0, "b", new(2.0)))
	got := p.rewards(t, "r", 6, 20*time.Second)
	if r := got["u.0"]; r.Status != "scored" || *r.Reward != 0.5+*r.Scores[1].Value || r.Scores[0].Detail != "well done" {
		t.Errorf("verdict before the sample: %+v", r)
	}
	if r := got["u.1"]; r.Status != "scored" || *r.Reward != 0.25 {
		t.Errorf("verdict after the sample: %+v", r)
	}
	if r := got["u.2"]; r.Status != "failed" || !strings.Contains(r.Error, "skipped") {
		t.Errorf("verdict that there is none: %+v", r)
	}
	if r := got["u.3"]; r.Status != "scored" || r.Scores[0].Status != "failed" || !strings.Contains(r.Scores[0].Error, "no verdict came by") {
		t.Errorf("no verdict, optional: %+v", r)
	}
	if r := got["two.0"]; r.Status != "scored" || *r.Reward != 3 {
		t.Errorf("two verdicts: %+v", r)
	}
	if r := got["two.1"]; r.Status != "failed" || time.Now().UnixNano() > r.Group.Deadline+int64(20*time.Second) || r.Scored > r.Group.Deadline {
		t.Errorf("one of two verdicts: %+v", r)
	}
	// Too late, and for nobody.
	p.put(t, verdict("two", 1, "b", new(2.0)), verdict("u", 0, "robot", new(2.0)))
	codes := map[string]int{}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for m, err := range p.Read(ctx, schemas.StreamDead, []string{schemas.Prefix + "dead.>"}, bus.ReadOptions{Live: true}) {
		var d schemas.Dead
		if err := errors.Join(err, schemas.Decode(m.Data, &d)); err != nil {
			t.Fatal(err)
		}
		if codes[d.Code]++; len(codes) == 2 {
			break
		}
	}
	if codes[schemas.CodeLate] != 1 || codes[schemas.CodeInvalid] != 1 {
		t.Errorf("dead letters %v, want one late and one invalid", codes)
	}
}

// A malformed verdict, or one that nobody waits for, does not keep out the right one.
func TestService_MalformedVerdicts(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	forge := func(v *schemas.Verdict) {
		t.Helper()
		data, err := schemas.Encode(v)
		if err != nil {
			t.Fatal(err)
		}
		subject := schemas.VerdictSubject("r", "u", v.SampleIndex, v.Name)
		if _, err := p.PublishRaw(t.Context(), subject, data, nil, schemas.MessageID(subject)); err != nil {
			t.Fatal(err)
		}
	}
	forge(verdict("u", 0, "human", new(math.NaN()))) // before the service, and before its sample
	sample := func(i int64) *schemas.Trajectory { return trajectory(t, "r", "u", i, 3, 7, "external:human") }
	p.put(t, sample(0), sample(1), sample(2))
	p.serve(t, testConfig())
	forge(verdict("u", 1, "human", new(math.Inf(1))))
	forge(verdict("elsewhere", 2, "human", new(1.0)))
	free := func(i int64) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			_, err := p.Last(t.Context(), schemas.StreamVerdicts, schemas.VerdictSubject("r", "u", i, "human"))
			if errors.Is(err, bus.ErrNotFound) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("sample %d: its subject is not free: %v", i, err)
			}
		}
	}
	for i := range int64(3) {
		free(i)
		if ack, err := p.Publish(t.Context(), verdict("u", i, "human", new(float64(i)))); err != nil || ack.Duplicate {
			t.Errorf("sample %d: got %+v, %v; want stored", i, ack, err)
		}
	}
	for name, r := range p.rewards(t, "r", 3, 20*time.Second) {
		if r.Status != "scored" || *r.Reward != float64(r.SampleIndex) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// A group is rated as a whole when all of it is there, failed samples left out, and at
// the deadline with what there is.
func TestService_Diversity(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	now := time.Now()
	soon := now.Add(3 * time.Second).UnixNano()
	for i, shade := range []uint8{0, 255, 0} {
		p.put(t, trajectory(t, "r", "all", int64(i), 4, shade, "diversity"))
		short := trajectory(t, "r", "short", int64(i), 4, shade, "diversity")
		short.Group.Created, short.Group.Deadline = now.UnixNano(), soon
		p.put(t, short)
	}
	time.Sleep(200 * time.Millisecond)
	if have, err := p.Subjects(t.Context(), schemas.StreamRewards, bus.RewardFilter("r", "*", "*")); err != nil || len(have) != 0 {
		t.Errorf("%d rewards before the group is there, %v", len(have), err)
	}
	failed := &schemas.Trajectory{
		Run: "r", UID: "all", SampleIndex: 3, GroupSize: 4, Lane: "lane", Attempt: "a", StopReason: schemas.StopFailed, Error: "NaN",
		Group: trajectory(t, "r", "all", 0, 4, 0, "diversity").Group,
	}
	p.put(t, failed)
	got := p.rewards(t, "r", 7, 20*time.Second)
	for i := range 3 {
		want := 0.5
		if i == 1 {
			want = 1
		}
		for _, uid := range []string{"all", "short"} {
			if r := got[fmt.Sprintf("%s.%d", uid, i)]; r.Status != "scored" || math.Abs(*r.Reward-want) > 0.02 {
				t.Errorf("%s %d: %+v, want about %v", uid, i, r, want)
			}
		}
	}
	if r := got["all.3"]; r.Status != "failed" || !strings.Contains(r.Error, "NaN") {
		t.Errorf("failed sample: %+v", r)
	}
}

// Stopped in the middle and started again, and by two at once, every sample gets one
// reward.
func TestService_Restart(t *testing.T) {
	t.Parallel()
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		time.Sleep(20 * time.Millisecond)
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  slow: {url: %q, concurrency: 2}\n", url))
	for i := range int64(40) {
		p.put(t, trajectory(t, "r", "u", i, 40, 3, "http:slow", "synthetic"))
	}
	stop := p.serve(t, cfg)
	time.Sleep(100 * time.Millisecond)
	stop()
	p.serve(t, cfg)
	p.serve(t, cfg)
	for key, r := range p.rewards(t, "r", 40, 30*time.Second) {
		if r.Status != "scored" || r.SampleStarted == 0 {
			t.Errorf("%s: %+v", key, r)
		}
	}
}

func TestCheckNames(t *testing.T) {
	cfg := DefaultConfig()
	cfg.Scorers = file(t, "http:\n  clip: {url: \"http://127.0.0.1:1/score\"}\n")
	if err := CheckNames(cfg, []string{"http:clip", "nats:any", "external", "diversity", "glyph"}); err != nil {
		t.Error(err)
	}
	t.Setenv("PATH", t.TempDir())
	err := CheckNames(cfg, []string{"ocr", "http:other"})
	if !errors.Is(err, scorer.ErrNoTesseract) || !strings.Contains(err.Error(), "apt-get install tesseract-ocr") || !strings.Contains(err.Error(), `"http:other" is not configured`) {
		t.Errorf("error %v", err)
	}
	cfg.Require = []string{"ocr"}
	if _, err := newService(t.Context(), cfg, newPlane(t).Bus, zerolog.Nop()); !errors.Is(err, scorer.ErrNoTesseract) {
		t.Errorf("a service that must have ocr starts without tesseract: %v", err)
	}
}
