package reward

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// Behind hundreds of samples that wait for a server which hangs, plain samples are scored
// as soon as they would be alone.
func TestService_HangingScorerDelaysNoOther(t *testing.T) {
	t.Parallel()
	release, hanging := make(chan struct{}), make(chan struct{}, 1)
	url := web(t, func(_ http.ResponseWriter, r *http.Request, _ int) {
		select {
		case hanging <- struct{}{}:
		default:
		}
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	t.Cleanup(func() { close(release) })
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScoreTimeout, cfg.ScorePatience = time.Hour, time.Hour // a test that waits for them fails
	cfg.DrainTimeout = 100 * time.Millisecond
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  hang: {url: %q, timeout: 1h, concurrency: 4}\n", url))
	registry := prometheus.NewRegistry()
	cfg.Metrics = registry
	p.serve(t, cfg)
	const behind = 600
	for i := range int64(behind) {
		p.put(t, trajectory(t, "hang", "hang", i, behind, uint8(i), "http:hang"))
	}
	bustest.Receive(t, "a call that hangs", hanging)
	const n = 40
	for i := range int64(n) { // one at a time, so that none waits but for those that hang
		p.put(t, trajectory(t, "plain", "plain", i, n, uint8(i), "jpeg_compressibility", "glyph?"))
		p.rewards(t, "plain", int(i)+1)
	}
	// A plain sample that is put back is a delayed one.
	for _, name := range []string{"jpeg_compressibility", "glyph"} {
		if put := counted(t, registry, "meander_reward_put_back_total", name); put != 0 {
			t.Errorf("%v plain samples were put back for %s", put, name)
		}
	}
	if put := counted(t, registry, "meander_reward_put_back_total", "http:hang"); put == 0 {
		t.Error("no sample waits for the function that hangs; the test proves nothing")
	}
	if have, err := p.Subjects(t.Context(), schemas.StreamRewards,
		schemas.RewardFilter("hang", "*", "*")); err != nil || len(have) != 0 {
		t.Errorf("%d rewards of the samples that hang, %v; the test proves nothing", len(have), err)
	}
}

// counted is the value of a counter or gauge over all series that have a label of that value.
func counted(t testing.TB, r *prometheus.Registry, name, label string) (sum float64) {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetValue() == label {
					sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
				}
			}
		}
	}
	return sum
}

// A server that is away for longer than its retries and the breaker: everything is scored
// once it is back, and while it is away it gets a few calls, not one per sample.
func TestService_AwayForAWhile(t *testing.T) {
	t.Parallel()
	var up atomic.Bool
	var refused, served atomic.Int64
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		if !up.Load() {
			refused.Add(1)
			http.Error(w, "loading the model", http.StatusServiceUnavailable)
			return
		}
		served.Add(int64(n))
		scores(w, "0.5", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScorePatience = time.Hour
	registry := prometheus.NewRegistry()
	cfg.Metrics = registry
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  away: {url: %q, retries: 1, retry_wait: 10ms, max_batch: 4}\n", url))
	p.serve(t, cfg)
	const n = 200
	for i := range int64(n) {
		p.put(t, trajectory(t, "r", "u", i, n, uint8(i), "http:away"+[]string{"", "?"}[i%2], "synthetic"))
	}
	bustest.Until(t, "all have been put back", func() error {
		if put := counted(t, registry, "meander_reward_put_back_total", "http:away"); put < n {
			return fmt.Errorf("%v of %d", put, n)
		}
		return nil
	})
	calls := refused.Load()
	up.Store(true)
	for key, r := range p.rewards(t, "r", n) {
		if r.Status != schemas.StatusScored || *r.Scores[0].Value != 0.5 {
			t.Errorf("%s: %s %s", key, r.Status, r.Error)
		}
	}
	if calls > 40 || served.Load() != n {
		t.Errorf("%d refused calls for %d samples, %d scored; want at most 40, and each once", calls, n, served.Load())
	}
}

// A server that asks for a longer wait than the service has patience is not waited for: the call ends before its retry.
func TestService_PatienceBoundsRetryAfter(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		if calls.Add(1) > 1 { // a retry within the call, or the sample again
			scores(w, "0.5", n)
			return
		}
		w.Header().Set("Retry-After", "100000")
		http.Error(w, "too many", http.StatusTooManyRequests)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScoreTimeout, cfg.ScorePatience = time.Minute, 20*time.Second
	registry := prometheus.NewRegistry()
	cfg.Metrics = registry
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  busy: {url: %q, retries: 1}\n", url))
	p.serve(t, cfg)
	p.put(t, trajectory(t, "r", "u", 0, 1, 0, "http:busy"))
	p.rewards(t, "r", 1)
	if put := counted(t, registry, "meander_reward_put_back_total", "http:busy"); put == 0 {
		t.Error("the call waited as long as the server asked")
	}
}

// A group that is rated as a whole is rated once, whichever replica sees it complete: beside that,
// every sample goes to the slow function once, however many handlers and replicas there
// are, and however often samples were put back before.
func TestService_GroupsAreRatedOnce(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		calls.Add(int64(n))
		time.Sleep(5 * time.Millisecond)
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScorePatience = time.Minute
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  slow: {url: %q, concurrency: 2}\n", url))
	const groups, n = 4, 16
	put := func(i int64) {
		for g := range groups {
			p.put(t, trajectory(t, "r", schemas.UID(fmt.Sprint("g", g)), i, n, uint8(16*i), "diversity", "http:slow"))
		}
	}
	for i := range int64(n / 2) { // half before the service is there, half after
		put(i)
	}
	p.serve(t, cfg)
	for i := range int64(n / 2) {
		put(n/2 + i)
	}
	got := p.rewards(t, "r", groups*n)
	for key, r := range got {
		if r.Status != schemas.StatusScored || len(r.Scores) != 2 || r.Scores[0].Version == "" ||
			!(*r.Scores[0].Value > 0) {
			t.Errorf("%s: %+v", key, r)
		}
	}
	if c := calls.Load(); c != groups*n {
		t.Errorf("%d calls for %d samples", c, groups*n)
	}
	for i := range n - 1 { // equal for every group, and by the formula
		if a, b := *got[fmt.Sprint("g0.", i)].Scores[0].Value, *got[fmt.Sprint("g3.",
			i)].Scores[0].Value; math.Abs(a-b) > 1e-12 {
			t.Errorf("sample %d: diversity %v and %v", i, a, b)
		}
	}
}

// Two replicas that see a group complete at once, each by a sample of its own, leave none
// of its others waiting for the other replica.
func TestService_ReplicasLeaveNoSampleWaiting(t *testing.T) {
	t.Parallel()
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		time.Sleep(10 * time.Millisecond) // so that lanes fill, and handlers give turns
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScorePatience = time.Minute
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  slow: {url: %q, concurrency: 1}\n", url))
	p.serve(t, cfg)
	p.serve(t, cfg)
	const groups, n = 16, 8
	for g := range groups { // the first ones of each group wait for the rest
		for i := range int64(n) {
			p.put(t, trajectory(t, "r", schemas.UID(fmt.Sprint("g", g)), i, n, uint8(16*i), "diversity", "http:slow"))
		}
	}
	for key, r := range p.rewards(t, "r", groups*n) {
		if r.Status != schemas.StatusScored {
			t.Errorf("%s: %+v", key, r)
		}
	}
}

// An image that has been evicted fails its sample, at once and with the reason.
func TestService_ImageIsGone(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	tr := trajectory(t, "r", "u", 0, 2, 9, "jpeg_compressibility")
	tr.Media[0].Ref = &schemas.Ref{Bucket: schemas.BlobBucket, Digest: strings.Repeat("ab", 32), Size: 100}
	tr.Media[0].Data = nil
	p.put(t, tr, trajectory(t, "r", "u", 1, 2, 9, "jpeg_compressibility"))
	got := p.rewards(t, "r", 2)
	if r := got["u.0"]; r.Status != schemas.StatusFailed || !strings.Contains(r.Error, "no longer stored") {
		t.Errorf("%+v", r)
	}
	if r := got["u.1"]; r.Status != schemas.StatusScored {
		t.Errorf("%+v", r)
	}
}

// Files that a sample was conditioned on count for image_mib where a function sees them, before they are read.
func TestService_ConditionsCount(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	cfg := testConfig()
	cfg.ImageMiB = 16
	p.serve(t, cfg)
	large := []schemas.Condition{{Name: "image", Type: "image", DataImage: schemas.DataImage{Ref: &schemas.Ref{
		Bucket: schemas.BlobBucket, Digest: strings.Repeat("ab", 32), Size: 17 << 20,
	}}}}
	for uid, function := range map[schemas.UID]string{"sees": "unchanged", "blind": "jpeg_compressibility"} {
		tr := trajectory(t, "r", uid, 0, 1, 9, function)
		tr.Conditions = large
		p.put(t, tr)
	}
	if d := bustest.Dead(t, p.Bus, 1)[0]; d.UID != "sees" ||
		!strings.Contains(d.Reason, "image and conditions: 32x16 pixels count for 18 MiB") {
		t.Errorf("%s: %s", d.UID, d.Reason)
	}
	if r := p.rewards(t, "r", 2)["blind.0"]; r == nil || r.Status != schemas.StatusScored {
		t.Errorf("%+v", r)
	}
}

// What waits at a shutdown is handed back at once, though the function hangs.
func TestService_StopsBesideAHangingScorer(t *testing.T) {
	t.Parallel()
	hanging := make(chan struct{}, 40)
	url := web(t, func(_ http.ResponseWriter, r *http.Request, _ int) {
		hanging <- struct{}{}
		<-r.Context().Done()
	})
	p := newPlane(t)
	cfg := testConfig()
	// a wait of an hour fails the test
	cfg.AckWait, cfg.ScoreTimeout, cfg.DrainTimeout = time.Hour, time.Hour, 300*time.Millisecond
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  hang: {url: %q, timeout: 1h}\n", url))
	for i := range int64(40) {
		p.put(t, trajectory(t, "r", "u", i, 40, 3, "http:hang"))
	}
	first := p.serve(t, cfg)
	bustest.Receive(t, "a call that hangs", hanging)
	first.Stop()
	// Everything is another's at once, not after the ack wait.
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  hang: {url: %q}\n",
		web(t, func(w http.ResponseWriter, _ *http.Request, n int) { scores(w, "1", n) })))
	p.serve(t, cfg)
	p.rewards(t, "r", 40)
}

// A pass scores stored samples under another run, by the same rules.
func TestRescore(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	one := 1.0
	var pass Pass
	for i := range int64(3) {
		tr := trajectory(t, "r", "u", i, 4, uint8(100*i), "jpeg_compressibility")
		ack, err := p.Publish(t.Context(), tr)
		if err != nil {
			t.Fatal(err)
		}
		pass.Samples = append(pass.Samples, PassSample{Seq: ack.Seq, Index: i})
	}
	pass.Samples = append(pass.Samples, PassSample{Seq: pass.Samples[0].Seq, Index: 3, Lost: true})
	p.put(t, verdict("u", 1, "human", &one))
	pass.Change = func(t *schemas.Trajectory) {
		t.Run, t.Group.SourceRun = "again", "r"
		t.Group.Reward = []schemas.RewardSpec{
			{Name: "diversity", Weight: new(1.0), Required: new(true)},
			{Name: "external:human", Weight: new(1.0), Required: new(false)},
		}
	}
	var done int
	pass.Done = func() { done++ }
	for round := range 2 { // the second one finds everything there
		done = 0
		if err := Rescore(t.Context(), testConfig(), p.Bus, zerolog.Nop(), pass); err != nil {
			t.Fatal(err)
		}
		if done != 4 {
			t.Errorf("round %d: %d samples done, want 4", round, done)
		}
	}
	got := p.rewards(t, "again", 4)
	for i := range 3 {
		r := got[fmt.Sprint("u.", i)]
		if r.Status != schemas.StatusScored || r.Group.SourceRun != "r" || r.TrajectorySeq == 0 {
			t.Errorf("sample %d: %+v", i, r)
			continue
		}
		if has := r.Scores[1].Value != nil; has != (i == 1) {
			t.Errorf("sample %d: verdict %+v", i, r.Scores[1])
		}
	}
	if r := got["u.3"]; r.Status != schemas.StatusFailed || !strings.Contains(r.Error, "not stored") {
		t.Errorf("lost sample: %+v", r)
	}
	if have, err := p.Subjects(context.Background(), schemas.StreamRewards,
		schemas.RewardFilter("r", "*", "*")); err != nil || len(have) != 0 {
		t.Errorf("%d rewards of the run itself, %v", len(have), err)
	}
}
