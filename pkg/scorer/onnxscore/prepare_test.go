package onnxscore_test

import (
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scorer/onnxscore"
)

// golden is what deploy/scorers/make_onnx.py --testdata computes: the networks by numpy in
// float64, resized images by Pillow.
type golden struct {
	Scores map[string][]float64
	Frames []struct {
		Width, Height  int
		Resize, Filter string
		Pixels         []int
	}
}

func readGolden(t *testing.T) golden {
	t.Helper()
	data, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	if err := json.Unmarshal(data, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

// image is the one of make_onnx.py.
func img(width, height int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			img.SetNRGBA(x, y, color.NRGBA{uint8(7*x + 3*y), uint8(x * y), uint8(255 - (5*x+11*y)%256), 255})
		}
	}
	return img
}

func prepare(t *testing.T, cfg onnxscore.Config, img *image.NRGBA) []float32 {
	t.Helper()
	dst := make([]float32, 3*cfg.Width*cfg.Height)
	if err := cfg.Prepare(dst, img); err != nil {
		t.Fatal(err)
	}
	return dst
}

// raw leaves bytes as they are.
func raw(width, height int) onnxscore.Config {
	cfg := onnxscore.DefaultConfig()
	cfg.Width, cfg.Height, cfg.Scale = width, height, 1
	cfg.Mean, cfg.Std = []float64{0, 0, 0}, []float64{1, 1, 1}
	return cfg
}

// Pillow rounds to bytes after each of its two passes, we once: 1 apart, at most.
func TestPrepare_ResizesAsPillow(t *testing.T) {
	for _, f := range readGolden(t).Frames {
		t.Run(fmt.Sprintf("%dx%d, %s, %s", f.Width, f.Height, f.Resize, f.Filter), func(t *testing.T) {
			cfg := raw(8, 6)
			cfg.Resize, cfg.Filter, cfg.Layout = f.Resize, f.Filter, onnxscore.LayoutNHWC
			far := 0
			for i, got := range prepare(t, cfg, img(f.Width, f.Height)) {
				if off := math.Abs(float64(got) - float64(f.Pixels[i])); off > 1 {
					far++
					t.Errorf("element %d (x %d, y %d): %v, Pillow has %d", i, i/3%8, i/24, got, f.Pixels[i])
				}
			}
			if far > 0 {
				t.Errorf("%d of %d elements", far, len(f.Pixels))
			}
		})
	}
}

// The order of elements and the arithmetic, by hand.
func TestPrepare_Elements(t *testing.T) {
	img := image.NewNRGBA(image.Rect(5, 7, 7, 8)) // two pixels, not at the origin
	img.SetNRGBA(5, 7, color.NRGBA{10, 20, 30, 255})
	img.SetNRGBA(6, 7, color.NRGBA{100, 200, 250, 51}) // over black: 20, 40, 50
	tests := []struct {
		name   string
		change func(*onnxscore.Config)
		want   []float32
	}{
		{"nchw", func(*onnxscore.Config) {}, []float32{10, 20, 20, 40, 30, 50}},
		{"nhwc", func(c *onnxscore.Config) { c.Layout = "nhwc" }, []float32{10, 20, 30, 20, 40, 50}},
		{"bgr", func(c *onnxscore.Config) { c.Channels = "bgr" }, []float32{30, 50, 20, 40, 10, 20}},
		{"nhwc, bgr", func(c *onnxscore.Config) { c.Layout, c.Channels = "nhwc", "bgr" }, []float32{30, 20, 10, 50, 40, 20}},
		{
			"scale, mean, std", func(c *onnxscore.Config) {
				c.Scale, c.Mean, c.Std = 0.5, []float64{1, 2, 3},
					[]float64{1, 2, 4}
			},
			[]float32{4, 9, 4, 9, 3, 5.5},
		},
		{
			"mean follows the order of channels", func(c *onnxscore.Config) {
				c.Channels, c.Mean = "bgr",
					[]float64{30, 20, 10}
			},
			[]float32{0, 20, 0, 20, 0, 10},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := raw(2, 1)
			tt.change(&cfg)
			if got := prepare(t, cfg, img); !slices.Equal(got, tt.want) {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
	cfg := onnxscore.DefaultConfig()
	white := image.NewNRGBA(image.Rect(0, 0, 10, 10))
	for i := range white.Pix {
		white.Pix[i] = 255
	}
	got := prepare(t, cfg, white)
	for c, want := range []float64{
		(1 - 0.48145466) / 0.26862954, (1 - 0.4578275) / 0.26130258,
		(1 - 0.40821073) / 0.27577711,
	} {
		if plane := got[c*224*224 : (c+1)*224*224]; plane[0] != float32(want) || plane[224*224-1] != float32(want) {
			t.Errorf("channel %d of white: %v, want %v", c, plane[0], want)
		}
	}
}

// Where an image of four columns lands in frames that do not fit: what is cut, what is black.
func TestPrepare_Places(t *testing.T) {
	img := image.NewNRGBA(image.Rect(0, 0, 4, 2))
	for x := range 4 {
		for y := range 2 {
			img.SetNRGBA(x, y, color.NRGBA{uint8(10 * (x + 1)), 0, 0, 255})
		}
	}
	tests := []struct {
		resize        string
		width, height int
		want          string // the red channel
	}{
		{"short", 2, 2, "[20 30 20 30]"},
		{"pad", 4, 4, "[0 0 0 0 10 20 30 40 10 20 30 40 0 0 0 0]"},
		{"pad", 6, 2, "[0 10 20 30 40 0 0 10 20 30 40 0]"},
		{"exact", 4, 2, "[10 20 30 40 10 20 30 40]"},
	}
	for _, tt := range tests {
		cfg := raw(tt.width, tt.height)
		cfg.Resize = tt.resize
		if got := fmt.Sprint(prepare(t, cfg, img)[:tt.width*tt.height]); got != tt.want {
			t.Errorf("%s to %dx%d: %s, want %s", tt.resize, tt.width, tt.height, got, tt.want)
		}
	}
}

func TestPrepare_Refuses(t *testing.T) {
	cfg := raw(8, 6)
	dst := make([]float32, 3*8*6)
	if err := cfg.Prepare(dst, nil); err == nil {
		t.Error("no image was taken")
	}
	if err := cfg.Prepare(dst, image.NewNRGBA(image.Rectangle{})); err == nil {
		t.Error("an empty image was taken")
	}
	if err := cfg.Prepare(dst[1:], img(8, 6)); err == nil {
		t.Error("a short dst was taken")
	}
	cfg = raw(4096, 4096)
	if err := cfg.Prepare(make([]float32, 3*4096*4096), img(8192, 16)); err == nil ||
		!strings.Contains(err.Error(), "image of 8192x16: too large to resize") {
		t.Errorf("a thin image: %v", err)
	}
}

func TestNew_Refuses(t *testing.T) {
	tests := []struct {
		fault  string
		change func(*onnxscore.Config)
	}{
		{"model: missing", func(c *onnxscore.Config) { c.Model = "" }},
		{"index: -1; must be 0 to", func(c *onnxscore.Config) { c.Index = -1 }},
		{"width: 0; must be 1 to 4096", func(c *onnxscore.Config) { c.Width = 0 }},
		{"height: 5000; must be 1 to 4096", func(c *onnxscore.Config) { c.Height = 5000 }},
		{`resize: "cut"; must be one of short, exact, pad`, func(c *onnxscore.Config) { c.Resize = "cut" }},
		{`filter: ""; must be one of bicubic, bilinear`, func(c *onnxscore.Config) { c.Filter = "" }},
		{`layout: "chw"; must be one of nchw, nhwc`, func(c *onnxscore.Config) { c.Layout = "chw" }},
		{`channels: "rgba"; must be one of rgb, bgr`, func(c *onnxscore.Config) { c.Channels = "rgba" }},
		{"scale: 0; must be a finite number other than 0", func(c *onnxscore.Config) { c.Scale = 0 }},
		{"mean: [0 0]; must be three finite numbers", func(c *onnxscore.Config) { c.Mean = []float64{0, 0} }},
		{"std: [1 0 1]; must be three finite numbers above 0", func(c *onnxscore.Config) { c.Std = []float64{1, 0, 1} }},
		{`transform: "softmax"; must be one of none, sigmoid`, func(c *onnxscore.Config) { c.Transform = "softmax" }},
		{"output_scale: NaN", func(c *onnxscore.Config) { c.OutputScale = math.NaN() }},
		{"output_offset: +Inf", func(c *onnxscore.Config) { c.OutputOffset = math.Inf(1) }},
		{"max_batch: 0; must be 1 to 256", func(c *onnxscore.Config) { c.MaxBatch = 0 }},
		{"threads: 0; must be 1 to 256", func(c *onnxscore.Config) { c.Threads = 0 }},
		{"concurrency: -1; must be 1 to 256", func(c *onnxscore.Config) { c.Concurrency = -1 }},
	}
	for _, tt := range tests {
		cfg := onnxscore.DefaultConfig()
		cfg.Model = "testdata/aesthetic.onnx"
		tt.change(&cfg)
		if _, err := onnxscore.New("aesthetic", cfg); err == nil || !strings.Contains(err.Error(), tt.fault) ||
			!strings.HasPrefix(err.Error(), "onnx:aesthetic: ") {
			t.Errorf("error %v, want onnx:aesthetic and %q", err, tt.fault)
		}
	}
	cfg := onnxscore.DefaultConfig()
	cfg.Model = "testdata/aesthetic.onnx"
	if _, err := onnxscore.New("a.b", cfg); err == nil || !strings.Contains(err.Error(), `name: "a.b"`) {
		t.Errorf("name: %v", err)
	}
}
