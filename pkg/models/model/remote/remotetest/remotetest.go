// Package remotetest has a worker of package remote for tests, in Go: a small network over the same protocol, which
// fails, hangs or breaks off if a test says so. Folder writes a checkpoint of it, and Main is the worker as a program.
package remotetest

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/models/model/remote/internal/wire"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Shape of the network: channels of a token, and the edge in pixels of its square.
const (
	Channels = 16
	Edge     = 16
	// MaxTokens bounds a prompt, whose tokens are its bytes.
	MaxTokens = 64
)

// Options say how a worker is. The zero value is one of the class of its folder, in f32.
type Options struct {
	Dir           string // of the model
	Token         string // that hello must have
	DType, Device string
	Deterministic bool
	// Compiled says that the backend is.
	Compiled bool
	// VAETiling is in the backend, too, and so are Generic and TrustClass.
	VAETiling, Generic, TrustClass bool
	// Family is FILE.py:NAME; its name is in the backend, too, and so is Network.
	Family, Network string
	// TextEncoderDevice is in the backend, too; "" is none.
	TextEncoderDevice string
	Limits            wire.Limits
	// MaxRows is how many rows its memory is enough for; 0: any.
	MaxRows int
	// MaxWhole is how many whole networks it holds besides the checkpoint, and refuses more, where the worker in Python
	// frees the oldest; 0: any number.
	MaxWhole int
	// TLS has the certificate of a worker that speaks TLS.
	TLS *tls.Config
	// Card changes what the worker says of its model; nil: nothing.
	Card func(c *wire.Card)
	// BoundaryRatio is that of the card.
	BoundaryRatio float64
	// Polls is how many times hello says that the model is loading.
	Polls int
}

// Worker serves the protocol on a listener.
type Worker struct {
	o    Options
	base *weights
	card wire.Card

	mu      sync.Mutex
	open    map[net.Conn]bool
	plays   map[string][]Play
	counts  map[string]int
	handles map[string][]wire.Tensor
	loaded  map[string]*weights
	given   map[string][]byte // conditions by their digests
	done    chan struct{}
	serving sync.WaitGroup
	compute sync.Mutex // one call at a time
	listens net.Listener
	dies    bool // at an evaluation for a prompt that has "poison"
}

// Play is what a worker does in place of an answer, or before it.
type Play func(w *Worker, c net.Conn, m *wire.Message, answer func() *wire.Message)

// New returns a worker, which listens to nothing yet.
func New(o Options) (*Worker, error) {
	index, err := readIndex(o.Dir)
	if err != nil {
		return nil, err
	}
	base, err := readWeights(filepath.Join(o.Dir, "transformer", weightsFile))
	if err != nil {
		return nil, err
	}
	if o.Limits.BodyBytes == 0 {
		o.Limits = wire.Limits{BodyBytes: 64 << 20, Rows: 16}
	}
	if o.DType == "" || o.DType == "auto" {
		o.DType = "f32"
	}
	if o.Device == "" || o.Device == "auto" {
		o.Device = "cpu"
	}
	card := cardOf(index)
	card.BoundaryRatio = o.BoundaryRatio
	if o.Card != nil {
		o.Card(&card)
	}
	return &Worker{
		o: o, base: base, card: card, open: map[net.Conn]bool{}, plays: map[string][]Play{},
		counts: map[string]int{}, handles: map[string][]wire.Tensor{}, loaded: map[string]*weights{},
		given: map[string][]byte{},
	}, nil
}

// Start serves a worker at a Unix socket for the length of a test, and returns it with its address as package remote
// has it.
func Start(t testing.TB, o Options) (w *Worker, address string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "remotetest-") //nolint:usetesting // a socket needs a short path
	if err != nil {
		t.Fatal(err)
	}
	w, err = New(o)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	if err := w.Listen("unix", path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Stop()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return w, "unix:" + path
}

// Listen begins to serve.
func (w *Worker) Listen(network, address string) error {
	l, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	if w.o.TLS != nil {
		l = tls.NewListener(l, w.o.TLS)
	}
	w.mu.Lock()
	w.listens, w.done = l, make(chan struct{})
	w.mu.Unlock()
	w.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.mu.Lock()
			w.open[c] = true
			w.mu.Unlock()
			w.serving.Go(func() { w.serve(c) })
		}
	})
	return nil
}

// Address is where the worker listens.
func (w *Worker) Address() string { return w.listens.Addr().String() }

// Stop ends the worker as a kill would: all connections break, and it forgets what it was sent. It can Listen again.
func (w *Worker) Stop() {
	w.mu.Lock()
	select {
	case <-w.done:
	default:
		close(w.done)
	}
	_ = w.listens.Close()
	for c := range w.open {
		_ = c.Close()
	}
	w.mu.Unlock()
	w.serving.Wait()
	w.Forget()
}

// Forget drops encoded prompts, conditions and weights.
func (w *Worker) Forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.handles)
	clear(w.loaded)
	clear(w.given)
}

// Play has the next calls of that name answered by plays, in order.
func (w *Worker) Play(call string, plays ...Play) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.plays[call] = append(w.plays[call], plays...)
}

// Calls returns how many calls of that name there were.
func (w *Worker) Calls(call string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.counts[call]
}

// Loaded returns how many weights besides the checkpoint it holds.
func (w *Worker) Loaded() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.loaded)
}

// serve answers the calls of one connection.
func (w *Worker) serve(c net.Conn) {
	defer func() {
		_ = c.Close()
		w.mu.Lock()
		delete(w.open, c)
		w.mu.Unlock()
	}()
	for greeted := false; ; {
		m, err := wire.Read(c, w.o.Limits.BodyBytes)
		if err != nil {
			return
		}
		w.mu.Lock()
		w.counts[m.Call]++
		var play Play
		if plays := w.plays[m.Call]; len(plays) > 0 {
			play, w.plays[m.Call] = plays[0], plays[1:]
		}
		w.mu.Unlock()
		answer := func() *wire.Message {
			a := w.answer(m, greeted)
			a.ID = m.ID
			return a
		}
		if play != nil {
			play(w, c, m, answer)
			continue
		}
		a := answer()
		if err := wire.Write(c, a); err != nil || m.Call == wire.CallHello && a.Error != nil {
			return
		}
		greeted = greeted || m.Call == wire.CallHello
	}
}

// Fail answers with an error.
func Fail(class, message string) Play {
	return func(_ *Worker, c net.Conn, m *wire.Message, _ func() *wire.Message) {
		_ = wire.Write(c, &wire.Message{ID: m.ID, Error: &wire.Fault{Class: class, Message: message}})
	}
}

// Cut sends the answer without its last bytes and ends the connection.
func Cut(bytes int) Play {
	return func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
		b := frame(answer())
		_, _ = c.Write(b[:max(0, len(b)-bytes)])
		_ = c.Close()
	}
}

// Change sends the answer after change has altered its frame.
func Change(change func(frame []byte) []byte) Play {
	return func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
		_, _ = c.Write(change(frame(answer())))
	}
}

// OtherID answers another call than the one that was made.
func OtherID(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
	a := answer()
	a.ID++
	_ = wire.Write(c, a)
}

// Then answers and calls f.
func Then(f func()) Play {
	return func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
		_ = wire.Write(c, answer())
		f()
	}
}

// Before calls f and answers.
func Before(f func()) Play {
	return func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
		f()
		_ = wire.Write(c, answer())
	}
}

// Slow answers once until is closed.
func Slow(until <-chan struct{}) Play {
	return func(_ *Worker, c net.Conn, _ *wire.Message, answer func() *wire.Message) {
		<-until
		_ = wire.Write(c, answer())
	}
}

// Hang answers nothing until the worker stops, and closes begun once it was called.
func Hang(begun chan<- struct{}) Play {
	return func(w *Worker, _ net.Conn, _ *wire.Message, _ func() *wire.Message) {
		close(begun)
		w.mu.Lock()
		done := w.done
		w.mu.Unlock()
		<-done
	}
}

// frame returns a message as bytes.
func frame(m *wire.Message) []byte {
	var b writer
	_ = wire.Write(&b, m)
	return b
}

type writer []byte

func (w *writer) Write(b []byte) (int, error) {
	*w = append(*w, b...)
	return len(b), nil
}

// result returns an answer.
func result(v any, tensors ...wire.Tensor) *wire.Message {
	b, err := wire.Encode(v)
	if err != nil {
		return fault(wire.ClassWorker, "%v", err)
	}
	return &wire.Message{Result: b, Tensors: tensors}
}

func fault(class, format string, args ...any) *wire.Message {
	return &wire.Message{Error: &wire.Fault{Class: class, Message: fmt.Sprintf(format, args...)}}
}

// decode reads the arguments of a call.
func decode[T any](m *wire.Message) (args T, bad *wire.Message) {
	if err := msgpack.Unmarshal(m.Args, &args); err != nil {
		return args, fault(wire.ClassProtocol, "%s: %v", m.Call, err)
	}
	return args, nil
}

// Folder writes a checkpoint of a class: random weights of a seed, in the layout of diffusers.
func Folder(t testing.TB, class string, seed uint64) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "tiny-"+class)
	if err := WriteFolder(dir, class, seed); err != nil {
		t.Fatal(err)
	}
	return dir
}

// WriteFolder is Folder in a folder that it makes.
func WriteFolder(dir, class string, seed uint64) error {
	files := map[string]string{
		"model_index.json":                fmt.Sprintf(`{"_class_name": %q}`, class),
		"scheduler/scheduler_config.json": `{"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}`,
		"transformer/config.json":         `{"_class_name": "Tiny"}`,
		"text_encoder/config.json":        `{"architectures": ["Bytes"]}`,
		"vae/config.json":                 `{"_class_name": "Blocks"}`,
		"tokenizer/tokenizer.json":        `{}`,
		"meander.json": `{"height": 32, "width": 48, "num_inference_steps": 4,` +
			`"reward": ["jpeg_compressibility"]}`,
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return err
		}
	}
	for part, file := range map[string]string{
		"transformer": weightsFile, "text_encoder": "model.safetensors", "vae": weightsFile,
	} {
		x, err := safetensors.FloatTensor(projWeight, tensor.F32, []int{Channels, Channels}, draw(seed, part))
		if err != nil {
			return err
		}
		if err := safetensors.WriteFile(filepath.Join(dir, part, file), []safetensors.Tensor{x}, nil); err != nil {
			return err
		}
	}
	return nil
}

// draw returns the weights of a seed.
func draw(seed uint64, part string) []float32 {
	x := make([]float32, Channels*Channels)
	for i := range x {
		sum := sha256.Sum256(fmt.Appendf(nil, "%d %s %d", seed, part, i))
		x[i] = (float32(sum[0]) - 128) / 512
	}
	return x
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
