//go:build onnx && cgo

package onnxscore_test

import (
	"context"
	"errors"
	"fmt"
	"image"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/media"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/onnxscore"
)

var _ scorer.BatchScorer = (*onnxscore.Scorer)(nil)

func needLibrary(t *testing.T) {
	t.Helper()
	if os.Getenv(onnxscore.LibraryVariable) == "" {
		t.Skipf("needs the ONNX Runtime library: set %s to the path of libonnxruntime.so", onnxscore.LibraryVariable)
	}
}

func model(name string) onnxscore.Config {
	cfg := onnxscore.DefaultConfig()
	cfg.Model, cfg.Width, cfg.Height = filepath.Join("testdata", name), 32, 32
	return cfg
}

func open(t *testing.T, cfg onnxscore.Config) *onnxscore.Scorer {
	t.Helper()
	needLibrary(t)
	s, err := onnxscore.New("net", cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// images are the three of make_onnx.py.
func images() []scorer.Input {
	plain := img(32, 32)
	inverse, rolled := img(32, 32), img(32, 32)
	for i := range inverse.Pix {
		if i%4 != 3 {
			inverse.Pix[i] = 255 - inverse.Pix[i]
		}
	}
	for y := range 32 {
		copy(rolled.Pix[(y+5)%32*rolled.Stride:][:rolled.Stride], plain.Pix[y*plain.Stride:])
	}
	return []scorer.Input{{Media: media.Of(plain)}, {Media: media.Of(inverse)}, {Media: media.Of(rolled)}}
}

// The networks in float32 agree with numpy in float64, one image at a time and in batches.
func TestScorer_Golden(t *testing.T) {
	for name, want := range readGolden(t).Scores {
		for _, batch := range []int{1, 2, 8} {
			cfg := model(name + ".onnx")
			cfg.MaxBatch = batch
			s := open(t, cfg)
			if s.MaxBatch() != batch {
				t.Errorf("%s: batches of %d, want %d", name, s.MaxBatch(), batch)
			}
			for i, r := range s.ScoreBatch(t.Context(), images()) {
				// 192 products of float32 in the convolution, then short sums.
				if r.Err != nil || math.Abs(r.Value-want[i]) > 1e-5*math.Abs(want[i]) {
					t.Errorf("%s, batch %d, image %d: %v, %v; numpy has %v", name, batch, i, r.Value, r.Err, want[i])
				}
			}
		}
	}
}

func TestScorer_Output(t *testing.T) {
	img := image.NewNRGBA(image.Rect(0, 0, 6, 4))
	for i := 0; i < len(img.Pix); i += 4 {
		copy(img.Pix[i:], []uint8{3, 250, 90, 255})
	}
	// bytes.onnx: the mean of the first channel, and 0.01 times that of the second.
	cfg := raw(6, 4)
	cfg.Model, cfg.Layout = "testdata/bytes.onnx", onnxscore.LayoutNHWC
	tests := []struct {
		name   string
		change func(*onnxscore.Config)
		want   float64
	}{
		{"first", func(*onnxscore.Config) {}, 3},
		{"index", func(c *onnxscore.Config) { c.Index = 1 }, 2.5},
		{"scale and offset", func(c *onnxscore.Config) { c.OutputScale, c.OutputOffset = -2, 1 }, -5},
		{"sigmoid", func(c *onnxscore.Config) { c.Transform = "sigmoid" }, 1 / (1 + math.Exp(-3))},
		{
			"sigmoid, then scale", func(c *onnxscore.Config) { c.Transform, c.OutputScale = "sigmoid", 10 },
			10 / (1 + math.Exp(-3)),
		},
		{"bgr", func(c *onnxscore.Config) { c.Channels = "bgr" }, 90},
	}
	for _, tt := range tests {
		c := cfg
		tt.change(&c)
		s := open(t, c)
		got, err := s.Score(t.Context(), scorer.Input{Media: media.Of(img)})
		if err != nil || math.Abs(got-tt.want) > 1e-6 {
			t.Errorf("%s: %v, %v; want %v", tt.name, got, err, tt.want)
		}
		if s.MaxBatch() != 1 {
			t.Errorf("%s: batches of %d from a network for one image", tt.name, s.MaxBatch())
		}
	}
	cfg.Index = 2
	if _, err := open(t, cfg).Score(t.Context(), scorer.Input{Media: media.Of(img)}); err == nil ||
		!strings.Contains(err.Error(), "index: 2; the output has 2 elements") {
		t.Errorf("index beyond the output: %v", err)
	}
}

// A NaN fails its own image, not its neighbours; so does an image that is none.
func TestScorer_FailuresStayAlone(t *testing.T) {
	cfg := raw(16, 16)
	cfg.Model, cfg.Output, cfg.Scale = "testdata/nan.onnx", "root", 1.0/255
	s := open(t, cfg)
	white := image.NewNRGBA(image.Rect(0, 0, 16, 16))
	for i := range white.Pix {
		white.Pix[i] = 255
	}
	black := image.NewNRGBA(image.Rect(0, 0, 16, 16))
	results := s.ScoreBatch(t.Context(), []scorer.Input{
		{Media: media.Of(white)},
		{Media: media.Of(black)},
		{},
		{Media: media.Of(white), Params: map[string]string{"a": "b"}},
		{Media: media.Of(white)},
	})
	for i, fault := range []string{"", "gives the score NaN", "no image", "params", ""} {
		r := results[i]
		if fault == "" && (r.Err != nil || math.Abs(r.Value-math.Sqrt(0.5)) > 1e-6) || fault != "" &&
			(r.Err == nil || !strings.Contains(r.Err.Error(), fault) || r.Value != 0) {
			t.Errorf("image %d: %+v, want %q", i, r, fault)
		}
	}
}

func TestNew_RefusesNetworks(t *testing.T) {
	needLibrary(t)
	garbage := filepath.Join(t.TempDir(), "garbage.onnx")
	if err := os.WriteFile(garbage, []byte("no network"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		cfg    onnxscore.Config
		change func(*onnxscore.Config)
		fault  string
	}{
		{"no file", model("none.onnx"), nil, "model: open testdata/none.onnx"},
		{"garbage", model("aesthetic.onnx"), func(c *onnxscore.Config) { c.Model = garbage }, "garbage.onnx"},
		{
			"size", model("aesthetic.onnx"), func(c *onnxscore.Config) { c.Width = 64 },
			"width, height and layout give [-1 3 32 64]",
		},
		{"layout", model("aesthetic.onnx"), func(c *onnxscore.Config) { c.Layout = "nhwc" }, "give [-1 32 32 3]"},
		{
			"input", model("aesthetic.onnx"), func(c *onnxscore.Config) { c.Input = "image" },
			`input: "image"; the model has pixel_values`,
		},
		{"output", model("aesthetic.onnx"), func(c *onnxscore.Config) { c.Output = "x" }, `output: "x"; the model has score`},
		{"which output", model("nan.onnx"), nil, "output: missing; the model has root, mean"},
		{
			"two inputs", model("two.onnx"), func(c *onnxscore.Config) { c.Width, c.Height, c.Input = 8, 8, "a" },
			"model has inputs a, b: must be images alone",
		},
		{"float16", model("half.onnx"), nil, "must be float32 or uint8"},
		{
			"bytes with a mean", model("bytes.onnx"), func(c *onnxscore.Config) { c.Width, c.Height, c.Layout = 6, 4, "nhwc" },
			"takes bytes; must be scale: 1",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.change != nil {
				tt.change(&tt.cfg)
			}
			if _, err := onnxscore.New("net", tt.cfg); err == nil || !strings.Contains(err.Error(), tt.fault) ||
				!strings.HasPrefix(err.Error(), "onnx:net: ") {
				t.Errorf("error %v, want %q", err, tt.fault)
			}
		})
	}
}

// A score's version changes with the network and with what it is shown, not with speed.
func TestScorer_Version(t *testing.T) {
	cfg := model("aesthetic.onnx")
	base := open(t, cfg).Version()
	if s := open(t, cfg); s.Name() != "onnx:net" || s.Version() != base || s.Concurrency() != 1 {
		t.Errorf("%s, version %s after %s", s.Name(), s.Version(), base)
	}
	cfg.Threads, cfg.MaxBatch, cfg.Concurrency = 2, 3, 2
	if got := open(t, cfg).Version(); got != base {
		t.Errorf("version %s with other threads, want %s", got, base)
	}
	cfg.Mean = []float64{0, 0, 0}
	if got := open(t, cfg).Version(); got == base {
		t.Errorf("version %s with another mean as well", got)
	}
	if got := open(t, model("clip_score.onnx")).Version(); got == base {
		t.Errorf("version %s of another network as well", got)
	}
}

func TestScorer_Concurrent(t *testing.T) {
	cfg := model("clip_score.onnx")
	cfg.Concurrency = 2
	s := open(t, cfg)
	want := readGolden(t).Scores["clip_score"]
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() {
			for range 5 {
				for i, r := range s.ScoreBatch(t.Context(), images()) {
					if r.Err != nil || math.Abs(r.Value-want[i]) > 1e-5*want[i] {
						t.Errorf("image %d: %+v, want %v", i, r, want[i])
					}
				}
			}
		})
	}
	wait.Wait()
}

// However late the caller leaves, there is the score or his error.
func TestScorer_Cancel(t *testing.T) {
	cfg := raw(512, 512)
	cfg.Model, cfg.Output, cfg.Scale = "testdata/nan.onnx", "mean", 1.0/255
	s := open(t, cfg)
	in := scorer.Input{Media: media.Of(img(512, 512))}
	want, err := s.Score(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := s.Score(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	scored, left := 0, 0
	for i := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(took*time.Duration(i)/20, cancel)
		switch got, err := s.Score(ctx, in); {
		case err == nil && got == want:
			scored++
		case errors.Is(err, context.Canceled):
			left++
		default:
			t.Errorf("%v, %v", got, err)
		}
		timer.Stop()
		cancel()
	}
	if left == 0 {
		t.Errorf("%d scored, none left", scored)
	}
}

func TestScorer_Ends(t *testing.T) {
	s := open(t, model("aesthetic.onnx"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Score(ctx, images()[0]); !errors.Is(err, context.Canceled) || errors.Is(err, scorer.ErrUnavailable) {
		t.Errorf("cancelled: %v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if _, err := s.Score(ctx, images()[0]); !errors.Is(err, scorer.ErrUnavailable) {
		t.Errorf("deadline: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.Score(t.Context(), images()[0]); err == nil || fmt.Sprint(err) != "onnx:net: closed" {
		t.Errorf("closed: %v", err)
	}
}
