package remote_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

const class = "StableDiffusion3Pipeline"

// playsWorker is set for the processes that are the worker: the test binary, as the interpreter.
const playsWorker = "MEANDER_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(playsWorker) != "" {
		os.Exit(remotetest.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	goleak.VerifyTestMain(m)
}

// join starts a worker in this process and opens its model.
func join(t *testing.T, o remotetest.Options) (*remotetest.Worker, *remote.Model) {
	t.Helper()
	if o.Dir == "" {
		o.Dir = remotetest.Folder(t, class, 1)
	}
	w, address := remotetest.Start(t, o)
	return w, opened(t, o.Dir, remote.Config{Address: address})
}

// opened opens a model for the length of a test.
func opened(t *testing.T, dir string, cfg remote.Config) *remote.Model {
	t.Helper()
	m, err := remote.Open(t.Context(), dir, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

var size = media.ImageSize(32, 48)

// rowsOf returns n rows, with latents of their index.
func rowsOf(t *testing.T, m model.Model, n int) []model.Row {
	t.Helper()
	conds, err := m.Encode(t.Context(), []string{"red", "blue"})
	if err != nil {
		t.Fatal(err)
	}
	rows := make([]model.Row, n)
	for i := range rows {
		x := make([]float32, 6*remotetest.Channels)
		for j := range x {
			x[j] = float32((i+1)*(j%7)) / 8
		}
		rows[i] = model.Row{
			X: x, Sigma: 0.5, Conditioning: conds[i%2], Guidance: float32(m.Card().Guidance), Dst: make([]float32, len(x)),
		}
	}
	return rows
}

// velocity evaluates rows and returns the results.
func velocity(t *testing.T, m model.Model, rows []model.Row) (v [][]float32) {
	t.Helper()
	if err := m.Velocity(t.Context(), rows, size); err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		v = append(v, slices.Clone(r.Dst))
	}
	return v
}

func TestModel(t *testing.T) {
	for name, o := range map[string]remotetest.Options{
		"deterministic": {Deterministic: true}, "rows together": {}, "bf16": {DType: "bf16"},
	} {
		t.Run(name, func(t *testing.T) {
			for class, family := range map[string]string{class: "sd3", "FluxPipeline": "flux1", "WanPipeline": "wan"} {
				size := size
				if family == "wan" {
					size.Frames = 5
				}
				o.Dir = remotetest.Folder(t, class, 1)
				_, address := remotetest.Start(t, o)
				cfg := remote.Config{Address: address}
				modeltest.Run(t, modeltest.Suite{
					Family: model.Family{
						Name: family, Class: class,
						Open: func(dir string, _ model.Options) (model.Model, error) { return remote.Open(t.Context(), dir, cfg, nil) },
						Inspect: func(dir string) (*model.Info, error) {
							return remote.Inspect(t.Context(), dir, cfg)
						},
					},
					Dir: o.Dir, Prompts: [3]string{"red", "blue", " "}, Size: size,
				})
			}
		})
	}
}

// What a card says of precision follows from the worker's dtype and backend; meander.json of the folder comes first.
func TestOpen_Card(t *testing.T) {
	for _, tt := range []struct {
		o         remotetest.Options
		tolerance float64
		states    tensor.DType
	}{
		{remotetest.Options{}, 1e-5, ""},
		{remotetest.Options{DType: "bf16"}, 5e-2, tensor.BF16},
		{remotetest.Options{DType: "f16"}, 5e-2, ""},
		{remotetest.Options{DType: "bf16", Deterministic: true}, 0, tensor.BF16},
	} {
		_, m := join(t, tt.o)
		c := m.Card()
		if c.Tolerance != tt.tolerance || c.IndependentRows != tt.o.Deterministic || c.LatentsDType != tt.states {
			t.Errorf("%+v: tolerance %g, independent %v, states %q", tt.o, c.Tolerance, c.IndependentRows,
				c.LatentsDType)
		}
		if c.Height != 32 || c.Width != 48 || c.NumInferenceSteps != 4 || c.LatentChannels != 16 ||
			c.PixelsPerToken != 16 ||
			c.TrueCFGScale != 1.5 || !slices.Equal(c.Reward, []string{"jpeg_compressibility"}) || m.Device() != "cpu" ||
			c.MaskOf(model.Tensor{Name: "prompt_embeds"}) != "prompt_embeds_mask" || len(c.Masks) != 1 ||
			!strings.HasPrefix(c.Backend, "torch-") || len(c.SchedulerConfig) == 0 {
			t.Errorf("card %+v on %s", c, m.Device())
		}
	}
}

// A worker may say a constant mu, and that conditionings have one length; what it says must fit together.
func TestOpen_CardOfAWorker(t *testing.T) {
	dir := remotetest.Folder(t, class, 1)
	for name, tt := range map[string]struct {
		change func(c *wire.Card)
		says   string
	}{
		"constant": {func(c *wire.Card) {
			c.Mu, c.ConstantMu, c.ConditioningTokenBytes = model.MuConstant, 0.75, c.ConditioningBytes
			c.Scheduler = `{"_class_name": "DDIMScheduler"}`
		}, ""},
		"no JSON":  {func(c *wire.Card) { c.Scheduler = "{" }, `scheduler: "{"; must be JSON`},
		"boundary": {func(c *wire.Card) { c.BoundaryRatio = 1 }, "boundary_ratio: 1; must be between 0 and 1"},
		"stray":    {func(c *wire.Card) { c.ConstantMu = 0.75 }, "mu_constant: 0.75; must be finite"},
		"infinite": {func(c *wire.Card) { c.Mu, c.ConstantMu = model.MuConstant, math.Inf(1) }, "mu_constant: +Inf"},
		"unknown":  {func(c *wire.Card) { c.Mu = "cubic" }, `mu: "cubic"`},
	} {
		_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Card: tt.change})
		m, err := remote.Open(t.Context(), dir, remote.Config{Address: address}, nil)
		if tt.says != "" {
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("%s: %v; want %q", name, err, tt.says)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if c := m.Card(); c.Mu != model.MuConstant || c.ConstantMu != 0.75 ||
			c.ConditioningTokenBytes != c.ConditioningBytes || !bytes.Contains(c.SchedulerConfig, []byte("DDIM")) {
			t.Errorf("%s: %+v", name, c)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestOpen_Refuses(t *testing.T) {
	dir := remotetest.Folder(t, class, 1)
	_, flux := remotetest.Start(t, remotetest.Options{Dir: remotetest.Folder(t, "FluxPipeline", 1)})
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	w, err := remotetest.New(remotetest.Options{Dir: dir, Token: "secret"})
	if err == nil {
		err = w.Listen("tcp", "127.0.0.1:0")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	short, short1 := remotetest.Start(t, remotetest.Options{Dir: dir})
	short.Play(wire.CallHello, remotetest.Fail(wire.ClassConfig, "model: no weights"))
	empty := t.TempDir()
	if err := os.WriteFile(filepath.Join(empty, "model_index.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		dir  string
		cfg  remote.Config
		says string
	}{
		{dir, remote.Config{Address: flux}, "the worker computes \"FluxPipeline\"; must be StableDiffusion3Pipeline"},
		{remotetest.Folder(t, class, 2), remote.Config{Address: address}, "the worker has other weights than this folder"},
		{dir, remote.Config{Address: address, Deterministic: true}, "deterministic: the worker is not"},
		{dir, remote.Config{Address: address, Device: "cuda:0"}, "device: set; must be absent beside torch=unix:"},
		{dir, remote.Config{Address: address, Options: remote.Options{Compile: true}}, "compile: set; must be absent beside torch=unix:"},
		{dir, remote.Config{Deterministic: true, Options: remote.Options{Compile: true}}, "compile: set; must be absent beside deterministic"},
		{dir, remote.Config{Address: address, Options: remote.Options{TextEncoderDevice: "cpu"}}, "text_encoder_device: set; must be absent beside"},
		{dir, remote.Config{Options: remote.Options{TextEncoderDevice: "cpu,cuda:0"}}, "text_encoder_device: \"cpu,cuda:0\"; must be one device"},
		{dir, remote.Config{Address: "unix:relative"}, "the path must be absolute"},
		{dir, remote.Config{Address: "gpu-7"}, "must be unix:/PATH, HOST:PORT or tls:HOST:PORT"},
		{dir, remote.Config{Address: "gpu-7:99999"}, "must be unix:/PATH, HOST:PORT or tls:HOST:PORT, with a port from 1"},
		{dir, remote.Config{DType: "fp8"}, `dtype: "fp8"; must be auto, f32, bf16 or f16`},
		{dir, remote.Config{Device: "cuda:0,cuda:1"}, "must be auto or one device"},
		{dir, remote.Config{Address: w.Address(), Token: "wrong"}, "token: wrong"},
		{dir, remote.Config{Address: short1}, "worker: model: no weights"},
		{dir, remote.Config{Address: "unix:/nowhere/at/all", Wait: 1}, "no worker at torch=unix:/nowhere/at/all"},
		{empty, remote.Config{Address: address}, `_class_name: ""`},
		{filepath.Join(dir, "none"), remote.Config{Address: address}, "none"},
	} {
		m, err := remote.Open(t.Context(), tt.dir, tt.cfg, nil)
		if err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%+v: %v; want %q", tt.cfg, err, tt.says)
		}
		if m != nil {
			t.Error("a model beside an error")
		}
	}
	opened(t, dir, remote.Config{Address: w.Address(), Token: "secret"})
}

// A model can be inspected while the worker loads it, and has not chosen an element type yet.
func TestInspect_Loading(t *testing.T) {
	dir := remotetest.Folder(t, class, 1)
	w, address := remotetest.Start(t, remotetest.Options{Dir: dir, Polls: 100})
	info, err := remote.Inspect(t.Context(), dir, remote.Config{Address: address})
	if err != nil || len(info.Problems) > 0 || info.Family != "sd3" || info.Tolerance != 5e-2 {
		t.Errorf("%+v, %v", info, err)
	}
	if w.Calls(wire.CallHello) != 1 {
		t.Errorf("%d hellos; want one", w.Calls(wire.CallHello))
	}
}

// While a worker loads it is told what it says, until it is ready.
func TestOpen_TellsWhatItWaitsFor(t *testing.T) {
	remote.SetWaiting(t, time.Millisecond, time.Hour)
	dir := remotetest.Folder(t, class, 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Polls: 3})
	var log events
	opened(t, dir, remote.Config{Address: address, Log: log.add})
	if last := log.list[len(log.list)-1]; log.having(": loading transformer") == 0 || !last.Waiting || last.Text != "" {
		t.Errorf("told %+v", log.list)
	}
}

// Opening waits for a worker that is not there yet, and while it loads.
func TestOpen_Waits(t *testing.T) {
	dir := remotetest.Folder(t, class, 1)
	socket, err := os.MkdirTemp("/tmp", "remotetest-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(socket)
	w, err := remotetest.New(remotetest.Options{Dir: dir, Polls: 2})
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan struct{}, 100)
	cfg := remote.Config{Address: "unix:" + socket + "/s", Log: func(remote.Event) { waits <- struct{}{} }}
	ready := make(chan error, 1)
	go func() {
		m, err := remote.Open(t.Context(), dir, cfg, nil)
		if err == nil {
			err = m.Close()
		}
		ready <- err
	}()
	<-waits
	if err := w.Listen("unix", socket+"/s"); err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if err := <-ready; err != nil || w.Calls(wire.CallHello) != 3 {
		t.Errorf("%v after %d hellos; want 3", err, w.Calls(wire.CallHello))
	}
	w.Stop()
	ctx, cancel := context.WithCancel(t.Context())
	cfg.Log = func(remote.Event) { cancel() }
	if _, err := remote.Open(ctx, dir, cfg, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want the end of the context", err)
	}
}

// Each class of error has the meaning that the rest of the pipeline knows.
func TestErrors_Classes(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	long := strings.Repeat("x", remotetest.MaxTokens+3)
	if _, err := m.Encode(t.Context(), []string{"red", long}); !errors.Is(err, model.ErrPrompt) ||
		!strings.Contains(err.Error(), "67 tokens") {
		t.Errorf("a long prompt: %v", err)
	}
	if c, err := m.EncodeTruncated(t.Context(), []string{long}); err != nil || c[0].Cut != 3 || c[0].Prompt != long {
		t.Errorf("a prompt that is cut: %+v, %v", c, err)
	}
	if _, err := m.Encode(t.Context(), []string{long}); !errors.Is(err, model.ErrPrompt) {
		t.Errorf("a long prompt that was cut before: %v", err)
	}
	w.Play(wire.CallDecode, remotetest.Fail(wire.ClassLatents, "not finite"),
		remotetest.Fail(wire.ClassWorker, "a bug"),
		remotetest.Fail(wire.ClassProtocol, "unknown"))
	x := make([]float32, 6*remotetest.Channels)
	for _, says := range []string{
		"latents that the model cannot compute: not finite", "worker: a bug",
		"protocol: unknown",
	} {
		_, err := m.Decode(t.Context(), x, size)
		if err == nil || !strings.Contains(err.Error(), says) || errors.Is(err, tensor.ErrDeviceLost) ||
			errors.Is(err, model.ErrLatents) != strings.HasPrefix(says, "latents") {
			t.Errorf("%v; want %q", err, says)
		}
	}
	w.Play(wire.CallDecode, remotetest.Fail(wire.ClassConfig, "no VAE"))
	if _, err := m.Decode(t.Context(), x, size); !errors.Is(err, tensor.ErrDeviceLost) ||
		!strings.Contains(err.Error(), "no VAE") {
		t.Errorf("config: %v; want a lost device", err)
	}
}

// A call ends with its context while the worker computes.
func TestCall_Cancelled(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 1)
	begun := make(chan struct{})
	w.Play(wire.CallVelocity, remotetest.Hang(begun))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	if err := m.Velocity(ctx, rows, size); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want the end of the context", err)
	}
	velocity(t, m, rows)
	if err := m.Away(); err != nil {
		t.Errorf("a call that was given up is no loss: %v", err)
	}
}

// Whatever a worker answers that is no answer, the call is repeated on a new connection.
func TestCall_Repeated(t *testing.T) {
	declared := func(frame []byte) []byte { // a body of 2^63 bytes
		frame[11] = 0x80
		return frame
	}
	header := func(frame []byte) []byte {
		frame[3] = 0x7f
		return frame
	}
	for name, play := range map[string]remotetest.Play{
		"nothing": remotetest.Cut(1 << 30), "cut in the lengths": remotetest.Cut(6 * 16 * 4 * 2),
		"cut in the body": remotetest.Cut(1), "cut in the header": remotetest.Cut(6*16*4 + 5),
		"another id": remotetest.OtherID, "a body that is too long": remotetest.Change(declared),
		"a header that is too long": remotetest.Change(header),
	} {
		t.Run(name, func(t *testing.T) {
			var lost []error
			dir := remotetest.Folder(t, class, 1)
			w, address := remotetest.Start(t, remotetest.Options{Dir: dir})
			m := opened(t, dir, remote.Config{
				Address: address, Log: func(e remote.Event) { lost = append(lost, e.Err) },
			})
			rows := rowsOf(t, m, 1)
			want := velocity(t, m, rows)
			w.Play(wire.CallVelocity, play)
			if got := velocity(t, m, rows); !slices.Equal(got[0], want[0]) {
				t.Error("another velocity")
			}
			if w.Calls(wire.CallVelocity) != 3 || len(lost) != 1 || lost[0] == nil {
				t.Errorf("%d calls, lost %v; want one lost and repeated", w.Calls(wire.CallVelocity), lost)
			}
		})
	}
}

// A call without an answer is lost after the patience, and repeated; one that is only slow is waited for.
func TestCall_Hangs(t *testing.T) {
	lost := make(chan error, 8)
	dir := remotetest.Folder(t, class, 1)
	w, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	m := opened(t, dir, remote.Config{Address: address, Log: func(e remote.Event) { lost <- e.Err }})
	rows := rowsOf(t, m, 1)
	want := velocity(t, m, rows)
	w.Play(wire.CallVelocity, remotetest.Hang(make(chan struct{})))
	remote.SetPatience(m, time.Second)
	got := velocity(t, m, rows)
	if err := <-lost; !slices.Equal(got[0], want[0]) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("lost by %v; want the deadline, and the same velocity", err)
	}
	slow := make(chan struct{})
	remote.SetPatience(m, time.Minute)
	w.Play(wire.CallVelocity, remotetest.Slow(slow))
	done := make(chan error, 1)
	go func() { done <- m.Velocity(t.Context(), rows, size) }()
	if _, err := m.Encode(t.Context(), []string{"green"}); err != nil { // on another connection meanwhile
		t.Error(err)
	}
	close(slow)
	if err := <-done; err != nil || m.Away() != nil {
		t.Errorf("%v, %v", err, m.Away())
	}
}

// While a call has no answer for long, the worker does not count as ready; once it has, it does.
func TestCall_HangsVisibly(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 1)
	begun, answer := make(chan struct{}), make(chan struct{})
	w.Play(wire.CallVelocity, func(_ *remotetest.Worker, c net.Conn, _ *wire.Message, made func() *wire.Message) {
		close(begun)
		<-answer
		_ = wire.Write(c, made())
	})
	done := make(chan error, 1)
	go func() { done <- m.Velocity(t.Context(), rows, size) }()
	<-begun
	if err := m.Away(); err != nil {
		t.Errorf("a call that has just begun: %v", err)
	}
	remote.SetPatience(m, 1)
	if err := m.Away(); err == nil || !strings.Contains(err.Error(), "waiting for the torch worker since 20") ||
		!strings.Contains(err.Error(), "no answer to velocity yet") {
		t.Errorf("%v; want which call has no answer, since when", err)
	}
	remote.SetPatience(m, time.Hour)
	close(answer)
	if err := <-done; err != nil || m.Away() != nil {
		t.Errorf("%v, %v", err, m.Away())
	}
}

// An answer that is a frame, but not what was asked for, is an error of its call alone.
func TestCall_WrongAnswer(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 2)
	w.Play(wire.CallVelocity, func(_ *remotetest.Worker, c net.Conn, r *wire.Message, answer func() *wire.Message) {
		a := answer()
		a.Tensors[0].Shape = []int{1, 12, remotetest.Channels}
		_ = wire.Write(c, a)
	})
	if err := m.Velocity(t.Context(), rows, size); err == nil ||
		!strings.Contains(err.Error(), "must be one v, f32 [2 6 16]") {
		t.Errorf("%v", err)
	}
	velocity(t, m, rows)
}

// A worker that is killed between two calls costs nothing: the next one serves, and gets the prompts again.
func TestCall_WorkerComesBack(t *testing.T) {
	w, m := join(t, remotetest.Options{})
	rows := rowsOf(t, m, 2)
	want := velocity(t, m, rows)
	address := w.Address()
	w.Stop()
	back := make(chan error, 1)
	go func() { back <- w.Listen("unix", address) }()
	if got := velocity(t, m, rows); !slices.EqualFunc(got, want, slices.Equal) {
		t.Error("other velocities")
	}
	if err := <-back; err != nil || w.Calls(wire.CallPut) != 2 {
		t.Errorf("%v, %d prompts sent again", err, w.Calls(wire.CallPut))
	}
}

// Another model at the address of a worker is not used.
func TestCall_AnotherModel(t *testing.T) {
	for says, dir := range map[string]string{
		"the worker is now FluxPipeline": remotetest.Folder(t, "FluxPipeline", 1),
		"the worker has other weights":   remotetest.Folder(t, class, 2),
	} {
		w, m := join(t, remotetest.Options{})
		rows := rowsOf(t, m, 1)
		address := w.Address()
		w.Stop()
		other, err := remotetest.New(remotetest.Options{Dir: dir})
		if err == nil {
			err = other.Listen("unix", address)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer other.Stop()
		if err := m.Velocity(t.Context(), rows, size); !errors.Is(err, tensor.ErrDeviceLost) ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%v; want that %s", err, says)
		}
	}
}
