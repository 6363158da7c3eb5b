package onnxscore

import (
	"errors"
	"fmt"
	"math"
)

// Values of Config.Resize, Filter, Layout, Channels and Transform.
const (
	ResizeShort = "short" // fill the frame, centred, and cut the rest (CLIP)
	ResizeExact = "exact" // stretch to the frame
	ResizePad   = "pad"   // fit into the frame, black around it

	FilterBicubic  = "bicubic" // a = -1/2, as in Pillow
	FilterBilinear = "bilinear"

	LayoutNCHW = "nchw"
	LayoutNHWC = "nhwc"

	ChannelsRGB = "rgb"
	ChannelsBGR = "bgr"

	TransformNone    = "none"
	TransformSigmoid = "sigmoid"
)

// Config says which network to use, how images are prepared for it, and how its output becomes a score.
type Config struct {
	// Model is the .onnx file. Required. It has one input, the images.
	Model string `yaml:"model"`
	// Input and Output are names of tensors of the network; empty: it has only one.
	Input  string `yaml:"input"`
	Output string `yaml:"output"`
	// Index is the element of a sample's output that becomes the score.
	Index int `yaml:"index"`

	// Width and Height are the size of the frame, the input image, in pixels. Resize and Filter
	// say how an image is fitted to it; shrinking is anti-aliased.
	Width  int    `yaml:"width"`
	Height int    `yaml:"height"`
	Resize string `yaml:"resize"`
	Filter string `yaml:"filter"`
	// Layout of the tensor and order of its channels.
	Layout   string `yaml:"layout"`
	Channels string `yaml:"channels"`
	// An element is (Scale*byte - Mean[c]) / Std[c], c in the order of Channels.
	Scale float64   `yaml:"scale"`
	Mean  []float64 `yaml:"mean"`
	Std   []float64 `yaml:"std"`

	// The score is OutputScale*Transform(output) + OutputOffset.
	Transform    string  `yaml:"transform"`
	OutputScale  float64 `yaml:"output_scale"`
	OutputOffset float64 `yaml:"output_offset"`

	// MaxBatch is the most images of one call, if the network's first axis is dynamic; else it is 1.
	MaxBatch int `yaml:"max_batch"`
	// Threads is the number of threads of one call, Concurrency the number of calls at once.
	Threads     int `yaml:"threads"`
	Concurrency int `yaml:"concurrency"`
}

// DefaultConfig returns settings that prepare images as CLIP ViT-L/14 does; aesthetic
// predictors and PickScore use its features.
func DefaultConfig() Config {
	return Config{
		Width: 224, Height: 224, Resize: ResizeShort, Filter: FilterBicubic, Layout: LayoutNCHW, Channels: ChannelsRGB,
		Scale: 1.0 / 255,
		// openai/clip-vit-large-patch14, preprocessor_config.json
		Mean:      []float64{0.48145466, 0.4578275, 0.40821073},
		Std:       []float64{0.26862954, 0.26130258, 0.27577711},
		Transform: TransformNone, OutputScale: 1,
		MaxBatch: 8, Threads: 1, Concurrency: 1,
	}
}

// Validate joins all faults; each names its field. It does not read the file.
func (c Config) Validate() error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	oneOf := func(field, value string, a, b, also string) {
		if value != a && value != b && (value != also || also == "") {
			if also != "" {
				b += ", " + also
			}
			fault("%s: %q; must be one of %s, %s", field, value, a, b)
		}
	}
	within := func(field string, value, low, high int) {
		if value < low || value > high {
			fault("%s: %d; must be %d to %d", field, value, low, high)
		}
	}
	finite := func(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
	if c.Model == "" {
		fault("model: missing; must be the path of an .onnx file")
	}
	within("index", c.Index, 0, 1<<20)
	within("width", c.Width, 1, maxSide)
	within("height", c.Height, 1, maxSide)
	oneOf("resize", c.Resize, ResizeShort, ResizeExact, ResizePad)
	oneOf("filter", c.Filter, FilterBicubic, FilterBilinear, "")
	oneOf("layout", c.Layout, LayoutNCHW, LayoutNHWC, "")
	oneOf("channels", c.Channels, ChannelsRGB, ChannelsBGR, "")
	if !finite(c.Scale) || c.Scale == 0 {
		fault("scale: %v; must be a finite number other than 0", c.Scale)
	}
	if len(c.Mean) != 3 || !finite(c.Mean[0]) || !finite(c.Mean[1]) || !finite(c.Mean[2]) {
		fault("mean: %v; must be three finite numbers", c.Mean)
	}
	if len(c.Std) != 3 || !(min(c.Std[0], c.Std[1], c.Std[2]) > 0) || !finite(max(c.Std[0], c.Std[1], c.Std[2])) {
		fault("std: %v; must be three finite numbers above 0", c.Std)
	}
	oneOf("transform", c.Transform, TransformNone, TransformSigmoid, "")
	if !finite(c.OutputScale) || c.OutputScale == 0 {
		fault("output_scale: %v; must be a finite number other than 0", c.OutputScale)
	}
	if !finite(c.OutputOffset) {
		fault("output_offset: %v; must be a finite number", c.OutputOffset)
	}
	within("max_batch", c.MaxBatch, 1, 256)
	within("threads", c.Threads, 1, 256)
	within("concurrency", c.Concurrency, 1, 256)
	return errors.Join(errs...)
}
