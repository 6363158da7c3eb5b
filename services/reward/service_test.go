package reward

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// broken serves functions that are each broken in a way of its own, and fine ones, over
// HTTP and NATS; scorers is the file that has them.
func broken(t *testing.T, p *plane) (scorers string) {
	t.Helper()
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
	garbage := web(t, func(w http.ResponseWriter, _ *http.Request, _ int) { fmt.Fprint(w, "<html>nice image</html>") })
	nan := web(t, func(w http.ResponseWriter, _ *http.Request, n int) { scores(w, "NaN", n) })
	refuse := web(t, func(w http.ResponseWriter, _ *http.Request, _ int) {
		http.Error(w, "what is this", http.StatusBadRequest)
	})
	fine := web(t, func(w http.ResponseWriter, _ *http.Request, n int) { scores(w, "0.25", n) })

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
	answer("huge", map[string]any{"v": 1, "score": 1e29})
	answer("sorry", map[string]any{"v": 1, "error": "no face in the image"})

	return file(t, fmt.Sprintf(`
http:
  hang: {url: %q, timeout: 500ms, retries: 0}
  crash: {url: %q, retries: 1, retry_wait: 10ms}
  garbage: {url: %q}
  nan: {url: %q}
  refuse: {url: %q}
  fine: {url: %q}
nats:
  hang: {timeout: 500ms}
`, hang, crash, garbage, nan, refuse, fine))
}

// The record of a prompt reaches its reward functions as it is.
func TestService_MetadataReachesFunctions(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	record := `{"include":[{"class":"dog","count":1},{"class":"tie","count":1,"position":["right of",0]}],` +
		`"reward_model":{"ground_truth":{"numbers":[1,2.5,true,null]}},"tag":"position"}`
	got := make(chan string, 1)
	s, err := p.Conn().QueueSubscribe(schemas.ScoreSubject("record"), "record", func(m *nats.Msg) {
		var request schemas.ScoreRequest
		if err := schemas.Decode(m.Data, &request); err != nil {
			t.Error(err)
		}
		text, err := json.Marshal(request.Metadata)
		if err != nil {
			t.Error(err)
		}
		got <- string(text)
		_ = m.Respond([]byte("\x82\xa1v\x01\xa5score\x01"))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Unsubscribe() //nolint:errcheck // the connection ends with the test
	p.serve(t, testConfig())
	tr := trajectory(t, "records", "a", 0, 1, 9, "nats:record")
	if tr.Group.Metadata, err = schemas.MetadataFromJSON([]byte(record)); err != nil {
		t.Fatal(err)
	}
	p.put(t, tr)
	if r := p.rewards(t, "records", 1)["a.0"]; r.Status != schemas.StatusScored {
		t.Errorf("%s: %s", r.Status, r.Error)
	}
	if text := <-got; text != record {
		t.Errorf("metadata %s, want %s", text, record)
	}
}

// Functions see what the network was given: workers the files, unchanged their pixels. What is gone fails the sample.
func TestService_ConditionsReachFunctions(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	got := make(chan []schemas.ScoreCondition, 1)
	s, err := p.Conn().QueueSubscribe(schemas.ScoreSubject("edit"), "edit", func(m *nats.Msg) {
		var request schemas.ScoreRequest
		if err := schemas.DecodeValid(m.Data, &request); err != nil {
			t.Error(err)
		}
		got <- request.Conditions
		_ = m.Respond([]byte("\x82\xa1v\x01\xa5score\x01"))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Unsubscribe() //nolint:errcheck // the connection ends with the test
	p.serve(t, testConfig())
	tr, gone := trajectory(t, "edits", "a", 0, 1, 9, "nats:edit", "unchanged"),
		trajectory(t, "edits", "b", 0, 1, 9, "unchanged")
	mask, err := media.EncodePNG(image.NewNRGBA(image.Rect(0, 0, 32, 16)))
	if err != nil {
		t.Fatal(err)
	}
	for kind, file := range map[string][]byte{"image": tr.Media[0].Data, "mask": mask} {
		ref, err := p.PutBlob(t.Context(), file)
		if err != nil {
			t.Fatal(err)
		}
		c := schemas.Condition{Name: kind, Type: kind, DataImage: schemas.DataImage{Ref: &ref}}
		tr.Conditions = append(tr.Conditions, c)
	}
	slices.SortFunc(tr.Conditions, func(a, b schemas.Condition) int { return strings.Compare(a.Name, b.Name) })
	lost := *tr.Conditions[0].Ref
	lost.Digest = strings.Repeat("7", 64)
	gone.Conditions = []schemas.Condition{{Name: "image", Type: "image", DataImage: schemas.DataImage{Ref: &lost}}}
	p.put(t, tr, gone)
	rewards := p.rewards(t, "edits", 2)
	if r := rewards["a.0"]; r.Status != schemas.StatusScored || *r.Reward != 2 { // nothing has changed
		t.Errorf("%s: %s %v", r.Status, r.Error, r.Reward)
	}
	if c := <-got; len(c) != 2 || c[0].Type != "image" || !bytes.Equal(c[0].File, tr.Media[0].Data) ||
		!bytes.Equal(c[1].File, mask) {
		t.Errorf("%d conditions; want both files", len(c))
	}
	if r := rewards["b.0"]; r.Status != schemas.StatusFailed ||
		!strings.Contains(r.Error, "no longer stored: load the condition image") {
		t.Errorf("a condition that is gone: %s: %s", r.Status, r.Error)
	}
}

// A scorer that hangs, resets the connection, answers garbage, NaN, or nothing at all
// fails the samples that need it, and is left out where it is optional.
func TestService_BrokenScorers(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	cfg := testConfig()
	cfg.Scorers = broken(t, p)
	p.serve(t, cfg)
	type want struct {
		status, fault string
		value         float64
	}
	cases := map[string]want{
		"http:hang": {"failed", "http:hang", 0}, "http:crash": {"failed", "http:crash", 0},
		"http:garbage": {"failed", "http:garbage", 0},
		"http:nan":     {"failed", "NaN", 0}, "http:refuse": {"failed", "400", 0}, "http:fine": {"scored", "", 0.25},
		"http:unknown": {"failed", "not configured here", 0},
		"nats:fine":    {"scored", "", 0.75}, "nats:hang": {"failed", "nats:hang", 0},
		"nats:garbage": {"failed", "nats:garbage", 0}, "nats:nan": {"failed", "NaN", 0},
		"nats:huge": {"scored", "", 1e29}, "nats:sorry": {"failed", "no face in the image", 0}, "nats:nobody": {"failed", "nats:nobody", 0},
	}
	uid := func(name, kind string) schemas.UID { return schemas.UID(strings.ReplaceAll(name, ":", "-") + kind) }
	samples := 0
	for name := range cases {
		for i := range int64(6) {
			p.put(t, trajectory(t, "broken", uid(name, ""), i, 6, uint8(40*i), name))
			p.put(t, trajectory(t, "broken", uid(name, "-opt"), i, 6, uint8(40*i), "jpeg_incompressibility", name+"?"))
			samples += 2
		}
	}
	heavy := trajectory(t, "broken", "heavy", 0, 1, 0, "nats:huge")
	heavy.Group.Reward[0].Weight = new(1e6)
	p.put(t, heavy)
	got := p.rewards(t, "broken", samples+1)
	if r := got["heavy.0"]; r.Status != "failed" || !strings.Contains(r.Error,
		"weighted sum is 1e+35; must be between") {
		t.Errorf("a sum that no event holds: %s %q", r.Status, r.Error)
	}
	for name, w := range cases {
		for i := range 6 {
			r := got[fmt.Sprintf("%s.%d", uid(name, ""), i)]
			if r.Status != w.status || !strings.Contains(r.Error, w.fault) || w.status == "scored" &&
				*r.Reward != w.value {
				t.Errorf("%s: %s %q %v, want %s %q %v", name, r.Status, r.Error, r.Reward, w.status, w.fault, w.value)
			}
			// As an optional score it is left out, and said so; never a number.
			r = got[fmt.Sprintf("%s.%d", uid(name, "-opt"), i)]
			score := r.Scores[1]
			if r.Status != "scored" || score.Name != name || score.Status != w.status ||
				(score.Value != nil) != (w.status == "scored") {
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
	registry := prometheus.NewRegistry()
	var full atomic.Bool
	var mu sync.Mutex
	var sizes []int
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		mu.Lock()
		sizes = append(sizes, n)
		mu.Unlock()
		bustest.Until(t, "a line", func() error { // there are more, and this call may take a batch of them
			if line := counted(t, registry, "meander_reward_waiting_samples", "http:many"); !full.Load() && line < 8 {
				return fmt.Errorf("of %v", line)
			}
			full.Store(true)
			return nil
		})
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.Metrics = registry
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  many: {url: %q, max_batch: 8, concurrency: 2}\n", url))
	for g := range 8 {
		for i := range int64(4) {
			p.put(t, trajectory(t, "r", schemas.UID(fmt.Sprint("g", g)), i, 4, 9, "http:many"))
		}
	}
	p.serve(t, cfg)
	p.rewards(t, "r", 32)
	mu.Lock()
	defer mu.Unlock()
	largest, total := 0, 0
	for _, n := range sizes {
		largest, total = max(largest, n), total+n
	}
	t.Logf("requests of %v samples", sizes)
	if largest != 8 || total != 32 {
		t.Errorf("requests of %v samples, want 32 in all, up to 8 together", sizes)
	}
}

// A group is rated as a whole when all of it is there, failed samples left out, and at
// the deadline with what there is.
func TestService_Diversity(t *testing.T) {
	t.Parallel()
	var p *plane
	var early map[string]uint64 // rewards before the group is there
	bustest.Before(t, func(deadline time.Time) {
		p = newPlane(t)
		p.serve(t, testConfig())
		now := time.Now()
		for i, shade := range []uint8{0, 255, 0} {
			p.put(t, trajectory(t, "r", "all", int64(i), 4, shade, "diversity"))
			short := trajectory(t, "r", "short", int64(i), 4, shade, "diversity")
			// Samples are finished a tenth of the time before: after the deadline of this function.
			short.Group.Created, short.Group.Deadline = now.UnixNano(), deadline.Add(deadline.Sub(now)/8).UnixNano()
			p.put(t, short)
		}
		p.handled(t)
		var err error
		if early, err = p.Subjects(t.Context(), schemas.StreamRewards,
			schemas.RewardFilter("r", "*", "*")); err != nil {
			t.Fatal(err)
		}
	})
	if len(early) != 0 {
		t.Errorf("%v before the group is there", early)
	}
	failed := &schemas.Trajectory{
		Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: "all", SampleIndex: 3, GroupSize: 4, Lane: "lane"},
		Provenance: schemas.Provenance{Attempt: "a"},
		Outcome:    schemas.Outcome{StopReason: schemas.StopFailed, Error: "NaN"},
		Group:      trajectory(t, "r", "all", 0, 4, 0, "diversity").Group,
	}
	p.put(t, failed)
	got := p.rewards(t, "r", 7)
	for i := range 3 {
		want := 0.5
		if i == 1 {
			want = 1
		}
		for _, uid := range []schemas.UID{"all", "short"} {
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
	var once sync.Once
	begun := make(chan struct{})
	url := web(t, func(w http.ResponseWriter, _ *http.Request, n int) {
		once.Do(func() { close(begun) })
		time.Sleep(20 * time.Millisecond)
		scores(w, "1", n)
	})
	p := newPlane(t)
	cfg := testConfig()
	cfg.Scorers = file(t, fmt.Sprintf("http:\n  slow: {url: %q, concurrency: 2}\n", url))
	for i := range int64(40) {
		p.put(t, trajectory(t, "r", "u", i, 40, 3, "http:slow", "synthetic"))
	}
	first := p.serve(t, cfg)
	bustest.Receive(t, "the first call", begun)
	first.Stop()
	p.serve(t, cfg)
	p.serve(t, cfg)
	for key, r := range p.rewards(t, "r", 40) {
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
	if !errors.Is(err, scorer.ErrNoTesseract) || !strings.Contains(err.Error(), "apt-get install tesseract-ocr") ||
		!strings.Contains(err.Error(), `"http:other" is not configured`) {
		t.Errorf("error %v", err)
	}
	cfg.Require = []string{"ocr"}
	if _, err := newService(t.Context(), cfg, newPlane(t).Bus, zerolog.Nop()); !errors.Is(err, scorer.ErrNoTesseract) {
		t.Errorf("a service that must have ocr starts without tesseract: %v", err)
	}
}
