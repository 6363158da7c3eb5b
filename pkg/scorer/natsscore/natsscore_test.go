package natsscore_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/natsscore"
	"github.com/meander-rl/meander/schemas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var _ scorer.Detailer = (*natsscore.Scorer)(nil)

var subject = schemas.ScoreSubject("pickscore")

// connect starts a server and returns two connections: the scorer's, and the workers'.
func connect(t testing.TB, opts natsd.Options) (asks, answers *nats.Conn) {
	t.Helper()
	opts.StoreDir = t.TempDir()
	server, err := natsd.Start(context.Background(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	dial := func() *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(server.InProcess()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	return dial(), dial()
}

// work subscribes a worker until stop is called or the connection ends.
func work(t testing.TB, nc *nats.Conn, handle nats.MsgHandler) (stop func()) {
	t.Helper()
	sub, err := nc.QueueSubscribe(subject, "pickscore", handle)
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := sub.Unsubscribe(); err != nil {
			t.Error(err)
		}
	}
}

func respond(t testing.TB, m *nats.Msg, data []byte) {
	if err := m.Respond(data); err != nil {
		t.Error(err)
	}
}

func pack(t testing.TB, kv ...any) []byte {
	t.Helper()
	m := map[string]any{}
	for i := 0; i < len(kv); i += 2 {
		m[kv[i].(string)] = kv[i+1]
	}
	data, err := msgpack.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func config() natsscore.Config {
	cfg := natsscore.DefaultConfig()
	cfg.Timeout = 5 * time.Second
	return cfg
}

func open(t testing.TB, nc *nats.Conn, cfg natsscore.Config) *natsscore.Scorer {
	t.Helper()
	s, err := natsscore.New(nc, "pickscore", cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func input(width, height int) scorer.Input {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range img.Pix {
		if img.Pix[i] = uint8(rng.Uint32()); i%4 == 3 {
			img.Pix[i] = 255
		}
	}
	return scorer.Input{
		Media: media.Of(img), Prompt: "a fox", GroundTruth: "fox", Params: map[string]string{"k": "v"},
		Metadata: map[string]any{"include": []any{map[string]any{"class": "fox", "count": int64(1)}}},
	}
}

// A worker reads the map that the package comment shows, and its number and text come back.
func TestScorer_RoundTrip(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	for _, format := range []string{"png", "jpeg"} {
		t.Run(format, func(t *testing.T) {
			stop := work(t, answers, func(m *nats.Msg) {
				var got map[string]any
				if err := msgpack.Unmarshal(m.Data, &got); err != nil {
					t.Error(err)
				}
				file, _ := got["image"].([]byte)
				img, kind, err := image.Decode(bytes.NewReader(file))
				if err != nil || kind != format || got["image_format"] != format || img.Bounds().Dx() != 40 {
					t.Errorf("image %v in %s, error %v", got["image_format"], kind, err)
				}
				delete(got, "image")
				delete(got, "image_format")
				if text := fmt.Sprint(got); text != "map[ground_truth:fox metadata:map[include:[map[class:fox "+
					"count:1]]] "+
					"name:pickscore params:map[k:v] prompt:a fox v:1]" {
					t.Errorf("request %s", text)
				}
				respond(t, m, pack(t, "v", 1, "score", 0.25, "detail", strings.Repeat("é", 200)))
			})
			defer stop()
			cfg := config()
			cfg.Image = format
			s := open(t, asks, cfg)
			r := s.ScoreDetail(t.Context(), input(40, 30))
			if r.Err != nil || r.Value != 0.25 || r.Detail != strings.Repeat("é", 128) {
				t.Errorf("%+v, want 0.25 and 128 of the 200 letters", r)
			}
			if v, err := s.Score(t.Context(), input(40, 30)); v != 0.25 || err != nil {
				t.Errorf("%v, %v", v, err)
			}
		})
	}
}

func TestScorer_Replies(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	tests := []struct {
		name  string
		reply []byte
		want  float64
		fault string // empty: scored
		pass  bool   // wraps ErrUnavailable
	}{
		{"score", pack(t, "v", 1, "score", -1.5), -1.5, "", false},
		{"an integer", pack(t, "v", 1, "score", 3, "error", nil), 3, "", false},
		{"more fields", pack(t, "v", 1, "score", 1, "gpu", []int{1, 2}), 1, "", false},
		{"error", pack(t, "v", 1, "error", "no face"), 0, `worker: "no face"`, false},
		{"error that stays", pack(t, "v", 1, "error", "no face", "retry", false, "score", 3), 0, `worker: "no face"`, false},
		{"error that may pass", pack(t, "v", 1, "error", "out of memory", "retry", true), 0, `worker: "out of memory"`, true},
		{"retry of another type", pack(t, "v", 1, "error", "x", "retry", 1), 0, "retry: 1; must be true or false", false},
		{"error of another type", pack(t, "v", 1, "error", 3), 0, "error: 3; must be a text", false},
		{"NaN", pack(t, "v", 1, "score", math.NaN()), 0, "score NaN; must be a finite number", false},
		{"infinity", pack(t, "v", 1, "score", math.Inf(1)), 0, "score +Inf", false},
		{"null", pack(t, "v", 1, "score", nil), 0, "score null", false},
		{"a text", pack(t, "v", 1, "score", "0.5"), 0, `score "0.5"; must be a finite number`, false},
		{"no score", pack(t, "v", 1), 0, "neither score nor error", false},
		{"no version", pack(t, "score", 1), 0, "v: null; must be 1", false},
		{"another version", pack(t, "v", 2, "score", 1), 0, "v: 2; must be 1", false},
		{"detail of another type", pack(t, "v", 1, "score", 1, "detail", 3), 0, "detail: 3; must be a text", false},
		{"empty", nil, 0, "no msgpack map", false},
		{"JSON", []byte(` {"v":1,"score":0.25}`), 0.25, "", false},
		{"an error in JSON", []byte(`{"v":1,"error":"no face"}`), 0, `worker: "no face"`, false},
		{"NaN in JSON", []byte(`{"v":1,"score":NaN}`), 0, `score "NaN"; must be a finite number`, false},
		{"JSON that ends early", []byte(`{"v":1,"score":`), 0, "no json map", false},
		{"a length that is not there", []byte("\x81\xa1v\xdd\xff\xff\xff\xff"), 0, "ends early", false},
		{"huge", pack(t, "v", 1, "score", 1, "pad", make([]byte, 64<<10)), 0, "must be at most 65536", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			stop := work(t, answers, func(m *nats.Msg) { respond(t, m, tt.reply) })
			defer stop()
			got, err := open(t, asks, config()).Score(t.Context(), input(8, 8))
			if got != tt.want || (err == nil) != (tt.fault == "") || errors.Is(err, scorer.ErrUnavailable) != tt.pass {
				t.Errorf("%v, %v; want %v, %q, passing %v", got, err, tt.want, tt.fault, tt.pass)
			}
			if err != nil && (!strings.Contains(err.Error(), tt.fault) ||
				!strings.HasPrefix(err.Error(), "nats:pickscore: ")) {
				t.Errorf("error %q, want nats:pickscore and %q", err, tt.fault)
			}
		})
	}
}

func TestScorer_Absent(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	cfg := config()
	cfg.Timeout = time.Hour // longer than a test may take
	_, err := open(t, asks, cfg).Score(t.Context(), input(8, 8))
	if !errors.Is(err, scorer.ErrUnavailable) ||
		!strings.Contains(err.Error(), "no worker listens on mdr.v1.score.pickscore") {
		t.Errorf("no worker: %v, want to hear so at once", err)
	}

	// One that takes requests and dies with them.
	stop := work(t, answers, func(*nats.Msg) {})
	cfg.Timeout = 50 * time.Millisecond
	_, err = open(t, asks, cfg).Score(t.Context(), input(8, 8))
	if !errors.Is(err, scorer.ErrUnavailable) || !strings.Contains(err.Error(), "no worker answered within 50ms") {
		t.Errorf("a worker that hangs: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	cfg.Timeout = time.Minute
	if _, err = open(t, asks, cfg).Score(ctx, input(8, 8)); !errors.Is(err, scorer.ErrUnavailable) ||
		strings.Contains(err.Error(), "1m0s") {
		t.Errorf("the caller's deadline: %v", err)
	}
	stop()

	asks.Close()
	if _, err = open(t, asks, cfg).Score(t.Context(), input(8, 8)); !errors.Is(err, scorer.ErrUnavailable) {
		t.Errorf("connection closed: %v", err)
	}
}

// An image that the server would not take is refused with both sizes; as JPEG it fits.
func TestScorer_TooLarge(t *testing.T) {
	asks, answers := connect(t, natsd.Options{MaxPayload: 96 << 10})
	work(t, answers, func(m *nats.Msg) { respond(t, m, pack(t, "v", 1, "score", 1)) })
	in := input(200, 200)
	_, err := open(t, asks, config()).Score(t.Context(), in)
	if err == nil || errors.Is(err, scorer.ErrUnavailable) || !strings.Contains(err.Error(), "takes 98304") ||
		!strings.Contains(err.Error(), "with an image of 12") {
		t.Errorf("error %v, want a final one with both sizes", err)
	}
	cfg := config()
	cfg.Image = "jpeg"
	if _, err := open(t, asks, cfg).Score(t.Context(), in); err != nil {
		t.Errorf("as JPEG: %v", err)
	}
}

// The members of a group that no message holds go into the store, each as the map that it would be in the request. A
// group of more files than one may have, and one without a store, is refused with sizes.
func TestScoreGroup_Large(t *testing.T) {
	asks, answers := connect(t, natsd.Options{MaxPayload: 96 << 10})
	stored := map[string][]byte{}
	work(t, answers, func(m *nats.Msg) {
		var r schemas.ScoreRequest
		if err := schemas.DecodeValid(m.Data, &r); err != nil || len(r.Members) != 2 || r.Prompt != "a fox" {
			t.Errorf("request %+v: %v", r, err)
		}
		scores := []any{}
		for _, x := range r.Members {
			data := stored[x.Ref.Digest]
			if int64(len(data)) != x.Ref.Size || len(x.Image) > 0 {
				t.Errorf("member %+v; stored are %d bytes", x, len(data))
			}
			var member map[string]any
			if err := msgpack.Unmarshal(data, &member); err != nil || len(member["image"].([]byte)) < 96<<10 {
				t.Errorf("stored %v: %v", len(data), err)
			}
			scores = append(scores, map[string]any{"sample_index": member["sample_index"], "score": x.SampleIndex})
		}
		respond(t, m, pack(t, "v", 1, "scores", scores))
	})
	g := scorer.Group{Size: 4, Members: []int64{1, 3}}
	g.Sample = func(context.Context, int) (scorer.Input, func(), error) { return input(200, 200), func() {}, nil }
	s := open(t, asks, config())
	for _, r := range s.ScoreGroup(t.Context(), g) {
		if r.Err == nil || !strings.Contains(r.Err.Error(), "with 2 samples") {
			t.Errorf("without a store: %+v", r)
		}
	}
	g.Store = func(_ context.Context, data []byte) (string, error) {
		digest := fmt.Sprintf("%x", sha256.Sum256(data))
		stored[digest] = data
		return digest, nil
	}
	for i, r := range s.ScoreGroup(t.Context(), g) {
		if r.Err != nil || r.Value != float64(g.Members[i]) {
			t.Errorf("member %d: %+v", i, r)
		}
	}
	g.Members = make([]int64, 40)
	for i := range g.Members {
		g.Members[i] = int64(i)
	}
	big := input(768, 768)
	g.Sample = func(context.Context, int) (scorer.Input, func(), error) { return big, func() {}, nil }
	r := s.ScoreGroup(t.Context(), g)[39]
	if r.Err == nil || !strings.Contains(r.Err.Error(), "more than 64 MiB as png") {
		t.Errorf("40 large images: %+v", r)
	}
}

// Two workers of the group share the requests, each gets an answer once, and no more than
// Concurrency are on their way.
func TestScorer_QueueGroup(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	var now, most, total atomic.Int32
	for range 2 {
		work(t, answers, func(m *nats.Msg) {
			go func() {
				n := now.Add(1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				time.Sleep(5 * time.Millisecond)
				now.Add(-1)
				respond(t, m, pack(t, "v", 1, "score", total.Add(1)))
			}()
		})
	}
	cfg := config()
	cfg.Concurrency = 3
	s := open(t, asks, cfg)
	var wait sync.WaitGroup
	for range 30 {
		wait.Go(func() {
			if _, err := s.Score(t.Context(), input(8, 8)); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if total.Load() != 30 || most.Load() > 3 || most.Load() < 2 {
		t.Errorf("%d answers, %d requests at once; want 30, at most 3", total.Load(), most.Load())
	}
}

func TestScorer_Cancel(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	in := make(chan struct{}, 4)
	work(t, answers, func(*nats.Msg) { in <- struct{}{} })
	cfg := config()
	cfg.Timeout, cfg.Concurrency = time.Minute, 1
	s := open(t, asks, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			if _, err := s.Score(ctx, input(8, 8)); !errors.Is(err, context.Canceled) ||
				errors.Is(err, scorer.ErrUnavailable) {
				t.Errorf("error %v, want that of the caller who left", err)
			}
		})
	}
	select {
	case <-in:
	case <-time.After(2 * time.Minute):
		t.Error("the worker was not asked")
	}
	cancel()
	wait.Wait()
}

func TestNew_Refuses(t *testing.T) {
	for fault, change := range map[string]func(*natsscore.Config){
		`image: "gif"; must be one of png, jpeg`:     func(c *natsscore.Config) { c.Image = "gif" },
		"timeout: -1s; must be above 0s and":         func(c *natsscore.Config) { c.Timeout = -time.Second },
		"concurrency: 0; must be between 1 and 1024": func(c *natsscore.Config) { c.Concurrency = 0 },
		"version: 200 bytes; must be at most 128":    func(c *natsscore.Config) { c.Version = strings.Repeat("x", 200) },
	} {
		cfg := config()
		change(&cfg)
		if _, err := natsscore.New(nil, "pickscore", cfg); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("error %v, want %q", err, fault)
		}
	}
	for _, name := range []string{"", "a.b", "*", ">", strings.Repeat("x", 65)} {
		if _, err := natsscore.New(nil, name, config()); err == nil {
			t.Errorf("name %q was taken", name)
		}
	}
	_, err := open(t, nil, config()).Score(t.Context(), scorer.Input{})
	if err == nil || !strings.Contains(err.Error(), "no image") {
		t.Errorf("no image: %v", err)
	}
	if _, err := open(t, nil, config()).Score(t.Context(), input(8, 8)); !errors.Is(err, scorer.ErrUnavailable) ||
		!strings.Contains(err.Error(), "no connection") {
		t.Errorf("no connection: %v", err)
	}
}

// FuzzReply: whatever a worker answers is a finite number or an error.
func FuzzReply(f *testing.F) {
	for _, seed := range []string{
		"\x82\xa1v\x01\xa5score\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
		"\x82\xa1v\x01\xa5score\x05", "\x83\xa1v\x01\xa5error\xa1x\xa5retry\xc3", "\xdf\xff\xff\xff\xff",
		"\x81\xa1a\xdd\x00\x00\x00\x01\x91",
	} {
		f.Add([]byte(seed))
	}
	asks, answers := connect(f, natsd.Options{})
	var reply atomic.Pointer[[]byte]
	work(f, answers, func(m *nats.Msg) { respond(f, m, *reply.Load()) })
	s, in := open(f, asks, config()), input(8, 8)
	f.Fuzz(func(t *testing.T, data []byte) {
		reply.Store(&data)
		r := s.ScoreDetail(t.Context(), in)
		if r.Err == nil && (math.IsNaN(r.Value) || math.IsInf(r.Value, 0)) || len(r.Detail) > scorer.MaxDetail {
			t.Errorf("value %v, detail of %d bytes", r.Value, len(r.Detail))
		}
	})
}

// What goes over the wire is what the contract says, in both directions.
func TestScorer_Contract(t *testing.T) {
	asks, nc := connect(t, natsd.Options{})
	replies := map[string][]byte{
		"score":           pack(t, "v", 1, "score", 0.27),
		"whole score":     pack(t, "v", 1, "score", 3, "detail", "three"),
		"error":           pack(t, "v", 1, "error", "out of memory", "retry", true),
		"another version": pack(t, "v", 2, "score", 0.27),
		"neither":         pack(t, "v", 1),
		"nan":             pack(t, "v", 1, "score", math.NaN()),
		"text":            pack(t, "v", 1, "score", "0.27"),
		"no map":          {0x01},
	}
	var reply []byte
	defer work(t, nc, func(m *nats.Msg) {
		var r schemas.ScoreRequest
		if err := schemas.DecodeValid(m.Data, &r); err != nil || r.Name != "pickscore" || len(r.Image) == 0 {
			t.Errorf("request %+v: %v", r, err)
		}
		respond(t, m, reply)
	})()
	s := open(t, asks, config())
	for name, data := range replies {
		reply = data
		var contract schemas.ScoreReply
		err := schemas.DecodeValid(data, &contract)
		result := s.ScoreDetail(t.Context(), input(8, 8))
		switch {
		case err == nil && contract.Score != nil:
			if result.Err != nil || result.Value != *contract.Score || result.Detail != contract.Detail {
				t.Errorf("%s: %+v, want %+v", name, result, contract)
			}
		case err == nil:
			if !strings.Contains(fmt.Sprint(result.Err), contract.Error) ||
				errors.Is(result.Err, scorer.ErrUnavailable) != contract.Retry {
				t.Errorf("%s: %v, want %+v", name, result.Err, contract)
			}
		case result.Err == nil:
			t.Errorf("%s: %+v; the contract refuses it: %v", name, result, err)
		}
	}
}

// A worker sees the frame in the middle of a video, and all frames that it is handed where its settings ask for them.
func TestScore_Video(t *testing.T) {
	asks, answers := connect(t, natsd.Options{})
	requests := make(chan *schemas.ScoreRequest, 1)
	work(t, answers, func(m *nats.Msg) {
		e := &schemas.ScoreRequest{}
		if err := schemas.DecodeValid(m.Data, e); err != nil {
			t.Error(err)
		}
		requests <- e
		respond(t, m, pack(t, "v", 1, "score", 0.5))
	})
	var video media.Media
	for f := range 5 {
		img := image.NewNRGBA(image.Rect(0, 0, 4, 3))
		for i := range img.Pix {
			img.Pix[i] = uint8(50*f) | 255*uint8(i%4/3)
		}
		video.Frames = append(video.Frames, img)
	}
	cfg := config()
	cfg.Frames = 3
	s := open(t, asks, cfg)
	if scorer.FramesOf(s) != 3 || scorer.FramesOf(open(t, asks, config())) > 1 {
		t.Error("the settings say 3 frames, and no more than one by default")
	}
	if _, err := s.Score(t.Context(), scorer.Input{Media: video.Spaced(3)}); err != nil {
		t.Fatal(err)
	}
	e := <-requests
	if len(e.Frames) != 3 || !bytes.Equal(e.Image, e.Frames[1]) {
		t.Fatalf("%d frames; want 3, the image in the middle", len(e.Frames))
	}
	for i, file := range e.Frames {
		if got, err := media.Decode(file, media.ImageSize(3, 4)); err != nil || got.Frames[0].Pix[0] != uint8(100*i) {
			t.Errorf("frame %d: %v", i, err)
		}
	}
	if _, err := s.Score(t.Context(), scorer.Input{Media: video.Middle()}); err != nil {
		t.Fatal(err)
	}
	if e := <-requests; e.Frames != nil || e.Image == nil || e.Conditions != nil {
		t.Errorf("an image: %d frames, conditions %v", len(e.Frames), e.Conditions)
	}
	edit := scorer.Input{
		Media: video.Middle(), Conditions: []scorer.Condition{{Name: "image", Type: "image", File: []byte("PNG")}},
	}
	if _, err := s.Score(t.Context(), edit); err != nil {
		t.Fatal(err)
	}
	if c := (<-requests).Conditions; len(c) != 1 || c[0].Name != "image" || c[0].Type != "image" ||
		string(c[0].File) != "PNG" {
		t.Errorf("conditions %v; want those of the sample", c)
	}
	cfg.Frames = 1025
	if _, err := natsscore.New(asks, "x", cfg); err == nil {
		t.Error("1025 frames: no error")
	}
}
