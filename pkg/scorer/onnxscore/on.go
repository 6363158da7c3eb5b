//go:build onnx && cgo

package onnxscore

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"sync"

	ort "github.com/yalue/onnxruntime_go"

	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/scorer/internal/wire"
)

// Scorer is a scorer.BatchScorer. It may be used concurrently.
type Scorer struct {
	name    string // of the instance
	version string
	cfg     Config
	batch   int
	bytes   bool // the network takes uint8
	slots   chan struct{}
	session *ort.DynamicAdvancedSession // nil when closed; read within a slot
}

// New loads the network and checks that it fits the settings.
func New(name string, cfg Config) (*Scorer, error) {
	if err := wire.CheckName(name); err != nil {
		return nil, fmt.Errorf("onnx scorer: %w", err)
	}
	s := &Scorer{name: name, cfg: cfg, slots: make(chan struct{}, max(1, cfg.Concurrency))}
	err := cfg.Validate()
	if err == nil {
		err = s.load()
	}
	if err != nil {
		return nil, fmt.Errorf("onnx:%s: %w", name, err)
	}
	return s, nil
}

var environment sync.Mutex

// initialize loads the library once for the process, and never unloads it.
func initialize() error {
	environment.Lock()
	defer environment.Unlock()
	if ort.IsInitialized() {
		return nil
	}
	path := os.Getenv(LibraryVariable)
	if path == "" {
		return fmt.Errorf("environment variable %s is not set; must name the path of the ONNX Runtime library, %s",
			LibraryVariable, libraryHelp)
	}
	ort.SetSharedLibraryPath(path)
	if err := ort.InitializeEnvironment(ort.WithLogLevelError()); err != nil {
		return fmt.Errorf("load ONNX Runtime from %s, %q: %w", LibraryVariable, path, err)
	}
	return nil
}

// load loads the library and the network, checks its input and output against the settings, and sets the version.
func (s *Scorer) load() error {
	digest, err := s.digest() // first: a missing file is a plainer error here
	if err != nil {
		return fmt.Errorf("model: %w", err)
	}
	if err := initialize(); err != nil {
		return err
	}
	options, err := ort.NewSessionOptions()
	if err != nil {
		return fmt.Errorf("session options: %w", err)
	}
	defer free(options)
	err = errors.Join(options.SetIntraOpNumThreads(s.cfg.Threads), options.SetInterOpNumThreads(1),
		options.AddSessionConfigEntry("session.intra_op.allow_spinning", "0")) // others need the cores
	if err != nil {
		return fmt.Errorf("session options: %w", err)
	}
	inputs, outputs, err := ort.GetInputOutputInfoWithOptions(s.cfg.Model, options)
	if err != nil {
		return fmt.Errorf("model %q: %w", s.cfg.Model, err)
	}
	input, err := pick("input", s.cfg.Input, inputs)
	if err == nil && len(inputs) != 1 {
		err = fmt.Errorf("inputs: %s; must be images alone", names(inputs))
	}
	if err == nil {
		err = s.fit(input)
	}
	if err != nil {
		return err
	}
	output, err := pick("output", s.cfg.Output, outputs)
	if err != nil {
		return err
	}
	if output.DataType != ort.TensorElementDataTypeFloat {
		return fmt.Errorf("output %q is %v; must be float32", output.Name, output.DataType)
	}
	s.session, err = ort.NewDynamicAdvancedSession(s.cfg.Model, []string{input.Name}, []string{output.Name}, options)
	if err != nil {
		return fmt.Errorf("model %q: %w", s.cfg.Model, err)
	}
	s.version = fmt.Sprintf("onnx-1-%s-ort%s", digest, ort.GetVersion())
	return nil
}

// digest returns a hash of the network and of every setting that changes a score.
func (s *Scorer) digest() (string, error) {
	file, err := os.Open(s.cfg.Model)
	if err != nil {
		return "", err
	}
	defer file.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, file); err != nil {
		return "", err
	}
	cfg := s.cfg
	cfg.Model, cfg.MaxBatch, cfg.Threads, cfg.Concurrency = "", 0, 0, 0
	fmt.Fprintf(hash, "%+v", cfg)
	return fmt.Sprintf("%x", hash.Sum(nil)[:6]), nil
}

// pick returns the tensor with that name, or the only one if name is empty. what is "input" or "output", for
// errors.
func pick(what, name string, infos []ort.InputOutputInfo) (ort.InputOutputInfo, error) {
	i := slices.IndexFunc(infos, func(info ort.InputOutputInfo) bool { return info.Name == name })
	switch {
	case i >= 0:
		return infos[i], nil
	case name != "":
		return ort.InputOutputInfo{}, fmt.Errorf("%s: %q; the model has %s", what, name, names(infos))
	case len(infos) != 1:
		return ort.InputOutputInfo{}, fmt.Errorf("%s: missing; the model has %s", what, names(infos))
	}
	return infos[0], nil
}

func names(infos []ort.InputOutputInfo) string {
	var list []string
	for _, info := range infos {
		list = append(list, info.Name)
	}
	return strings.Join(list, ", ")
}

// fit checks the type and the shape of the input, and sets how many images one call may have.
func (s *Scorer) fit(input ort.InputOutputInfo) error {
	want := []int64{-1, 3, int64(s.cfg.Height), int64(s.cfg.Width)}
	if s.cfg.Layout == LayoutNHWC {
		want = []int64{-1, int64(s.cfg.Height), int64(s.cfg.Width), 3}
	}
	got := input.Dimensions
	ok := len(got) == 4
	for i := 1; ok && i < 4; i++ {
		ok = got[i] == want[i] || got[i] < 0
	}
	if !ok {
		return fmt.Errorf("input %q has shape %v; width, height and layout give %v (-1: any)", input.Name, got, want)
	}
	switch s.batch = s.cfg.MaxBatch; {
	case got[0] == 1:
		s.batch = 1
	case got[0] > 1:
		return fmt.Errorf("input %q has shape %v; must have a first axis that is dynamic or 1", input.Name, got)
	}
	switch input.DataType {
	case ort.TensorElementDataTypeFloat:
	case ort.TensorElementDataTypeUint8:
		s.bytes = true
		if s.cfg.Scale != 1 || !slices.Equal(s.cfg.Mean, []float64{0, 0, 0}) ||
			!slices.Equal(s.cfg.Std, []float64{1, 1, 1}) {
			return fmt.Errorf("input %q takes bytes; must have scale: 1, mean: [0, 0, 0], std: [1, 1, 1]", input.Name)
		}
	default:
		return fmt.Errorf("input %q is %v; must be float32 or uint8 (half-precision exports have an option to keep "+
			"float32 at the ends)", input.Name, input.DataType)
	}
	return nil
}

// Name returns onnx:NAME.
func (s *Scorer) Name() string { return scorer.ONNX + ":" + s.name }

// Version names the content of the network, the settings, and the release of ONNX Runtime.
func (s *Scorer) Version() string { return s.version }

// MaxBatch returns the most images of one call.
func (s *Scorer) MaxBatch() int { return s.batch }

// Concurrency returns how many calls run at once; further calls wait.
func (s *Scorer) Concurrency() int { return s.cfg.Concurrency }

// Close waits until running calls end and frees the network.
func (s *Scorer) Close() error {
	for range cap(s.slots) {
		s.slots <- struct{}{}
	}
	var err error
	if s.session != nil {
		err = s.session.Destroy()
		s.session = nil
	}
	for range cap(s.slots) {
		<-s.slots
	}
	return err
}

// Score rates one image.
func (s *Scorer) Score(ctx context.Context, in scorer.Input) (float64, error) {
	r := s.ScoreBatch(ctx, []scorer.Input{in})[0]
	return r.Value, r.Err
}

// ScoreBatch rates all images in calls of at most MaxBatch, one after the other.
func (s *Scorer) ScoreBatch(ctx context.Context, in []scorer.Input) []scorer.Result {
	results := make([]scorer.Result, len(in))
	for from := 0; from < len(in); from += s.batch {
		to := min(from+s.batch, len(in))
		s.call(ctx, in[from:to], results[from:to])
	}
	for i := range results {
		if err := results[i].Err; err != nil {
			results[i] = scorer.Result{Err: fmt.Errorf("%s: %w", s.Name(), err)}
		}
	}
	return results
}

// call scores images by one run of the network and sets results. An image that cannot be prepared gets its own
// error and is left out.
func (s *Scorer) call(ctx context.Context, in []scorer.Input, results []scorer.Result) {
	size := 3 * s.cfg.Width * s.cfg.Height
	pixels := make([]float32, 0, len(in)*size)
	var sent []int
	for i := range in {
		if len(in[i].Params) > 0 {
			results[i].Err = errors.New("params: there are none")
			continue
		}
		img, err := in[i].Media.Image()
		if err == nil {
			err = s.cfg.Prepare(pixels[len(pixels):len(pixels)+size], img)
		}
		if results[i].Err = err; err == nil {
			pixels, sent = pixels[:len(pixels)+size], append(sent, i)
		}
	}
	if len(sent) == 0 {
		return
	}
	out, err := s.run(ctx, pixels, len(sent))
	for k, i := range sent {
		if err != nil {
			results[i].Err = err
			continue
		}
		x := float64(out[k])
		if s.cfg.Transform == TransformSigmoid {
			x = 1 / (1 + math.Exp(-x))
		}
		x = float64(s.cfg.OutputScale*x) + s.cfg.OutputOffset
		if math.IsNaN(x) || math.IsInf(x, 0) {
			results[i].Err = fmt.Errorf("output %v gives the score %v; must be a finite number", out[k], x)
			continue
		}
		results[i].Value = x
	}
}

// run runs the network on n images and returns the output element Index of each.
func (s *Scorer) run(ctx context.Context, pixels []float32, n int) ([]float32, error) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return nil, stopped(ctx)
	}
	if s.session == nil {
		return nil, errors.New("closed")
	}
	input, err := s.tensor(pixels, n)
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	defer free(input)
	options, err := ort.NewRunOptions()
	if err != nil {
		return nil, fmt.Errorf("run options: %w", err)
	}
	defer free(options)
	// The network stops at its next operation when ctx ends. The watcher is over before
	// the options are freed.
	var watcher sync.WaitGroup
	watcher.Add(1)
	stop := context.AfterFunc(ctx, func() {
		defer watcher.Done()
		_ = options.Terminate() // without it the run ends by itself
	})
	outputs := []ort.Value{nil}
	err = s.session.RunWithOptions([]ort.Value{input}, outputs, options)
	if !stop() {
		watcher.Wait()
	}
	if outputs[0] != nil {
		defer free(outputs[0])
	}
	switch {
	case ctx.Err() != nil:
		return nil, stopped(ctx)
	case err != nil:
		return nil, fmt.Errorf("run: %w", err)
	}
	tensor, ok := outputs[0].(*ort.Tensor[float32])
	if !ok {
		return nil, fmt.Errorf("output is %T; must be a tensor of float32", outputs[0])
	}
	shape, data := tensor.GetShape(), tensor.GetData()
	each := len(data) / n
	if each*n != len(data) || n > 1 && shape[0] != int64(n) {
		return nil, fmt.Errorf("output has shape %v for %d images", shape, n)
	}
	if s.cfg.Index >= each {
		return nil, fmt.Errorf("index: %d; the output has %d elements an image", s.cfg.Index, each)
	}
	picked := make([]float32, n)
	for i := range picked {
		picked[i] = data[i*each+s.cfg.Index]
	}
	return picked, nil
}

// tensor returns the pixels of n images as the input of the network, in float32 or bytes.
func (s *Scorer) tensor(pixels []float32, n int) (ort.Value, error) {
	shape := ort.NewShape(int64(n), 3, int64(s.cfg.Height), int64(s.cfg.Width))
	if s.cfg.Layout == LayoutNHWC {
		shape = ort.NewShape(int64(n), int64(s.cfg.Height), int64(s.cfg.Width), 3)
	}
	if !s.bytes {
		return ort.NewTensor(shape, pixels)
	}
	data := make([]uint8, len(pixels))
	for i, p := range pixels {
		data[i] = uint8(p) // whole numbers: fit wants bytes to be as they are
	}
	return ort.NewTensor(shape, data)
}

// free releases memory of the library. It ignores the error, which cannot occur for a value that this package made.
func free(v interface{ Destroy() error }) { _ = v.Destroy() }

// stopped returns the error of a done ctx; a deadline is temporary (ErrUnavailable).
func stopped(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", scorer.ErrUnavailable, ctx.Err())
	}
	return ctx.Err()
}
