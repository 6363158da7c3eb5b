package cuda_test

import (
	"context"
	"errors"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

func newDevice(t *testing.T, o ptxvm.Options) *cuda.Device {
	t.Helper()
	d, err := cuda.New(ptxvm.New(o), cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// All operations, with every access checked. Float32 uses no instruction whose result
// depends on the GPU.
func TestDevice_Conformance(t *testing.T) { tensortest.Run(t, newDevice(t, ptxvm.Options{})) }

// With factors in bf16 an operation is off by their rounding, whichever way a tensor core
// adds and whatever its approximations are.
func TestDevice_ConformanceInBF16(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	modes := []ptxvm.Options{{Numerics: ptxvm.Ampere, Jitter: true}, {Numerics: ptxvm.Hopper, Capability: 90}, {}}
	var devices []*cuda.Device
	launched := map[string]bool{}
	note := func(kernel string, _ time.Duration) { launched[kernel] = true }
	for _, o := range modes {
		d, err := cuda.New(ptxvm.New(o), cuda.Options{Factors: tensor.BF16, Profile: note})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		devices = append(devices, d)
	}
	if name := devices[0].Name(); name != "cuda/ptxvm/bf16" {
		t.Errorf("the name is %s", name)
	}
	for i, cs := range tensortest.Cases() {
		t.Run(cs.Name, func(t *testing.T) {
			on := devices[i%len(devices) : i%len(devices)+1]
			if strings.HasPrefix(cs.Name, "attention/") {
				on = devices[:2] // Hopper has kernels of its own for it
			}
			for _, d := range on {
				closeInBF16(t, d, cs)
			}
		})
	}
	launchEveryKernel(t, launched, note)
}

// closeInBF16 compares a case with float64: it is off by the rounding of factors.
func closeInBF16(t *testing.T, d tensor.Device, cs tensortest.Case) {
	t.Helper()
	want := cs.Output(t, reference.Device{}, false, false)
	for _, factors := range []bool{false, true} {
		if e := distance(cs.Output(t, d, false, factors), want); len(want) > 0 && !(e < 1e-2) {
			t.Errorf("%s: relative L2 distance %.3g, want less than 0.01; operands are factors: %v", cs.Name, e,
				factors)
		}
	}
}

// launchEveryKernel checks that the cases launch each kernel that there is: those of float32 without bf16, the ends of
// products beside a library.
func launchEveryKernel(t *testing.T, launched map[string]bool, note func(kernel string, took time.Duration)) {
	t.Helper()
	unchecked := ptxvm.New(ptxvm.Options{Unchecked: true})
	for d, o := range map[driver.Driver]cuda.Options{
		unchecked: {Profile: note}, &multiplier{Driver: ptxvm.New(ptxvm.Options{})}: {Profile: note, Factors: tensor.BF16},
	} {
		d, err := cuda.New(d, o)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		for _, cs := range tensortest.Cases() {
			if o.Factors == "" || strings.HasPrefix(cs.Name, "linear/") {
				cs.Output(t, d, false, false)
			}
		}
	}
	entries := regexp.MustCompile(`(?m)^\.visible \.entry (\w+)\(`)
	for _, ptx := range [][]byte{kernels.PTX, kernels.Hopper} {
		for _, m := range entries.FindAllSubmatch(ptx, -1) {
			if name := string(m[1]); !launched[name] {
				t.Errorf("no case launches %s", name)
			}
		}
	}
}

// pass computes something of everything; it makes its weights itself.
func pass(d *cuda.Device) ([]float32, error) {
	var out []float32
	err := d.Run(context.Background(), false, func(s tensor.Session) error {
		x := make([]float32, 24*24)
		for i := range x {
			x[i] = float32(i%13)/6 - 1
		}
		w, err1 := d.Weight(tensor.Floats(x, 24, 24))
		bias, err2 := d.Vector(tensor.Floats(x[:24], 24))
		x = x[:20*24]
		table, err3 := d.Table(tensor.Floats(x, 20, 24))
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		m := tensor.NewMatrix(s, 20, 30).SliceCols(3, 27)
		s.CopyIn(m, x)
		y := tensor.NewMatrix(s, 20, 24)
		s.Linear(y, m, w, tensor.Epilogue{Bias: bias, Act: tensor.SiLU, Gate: m, Group: make([]int32, 20)})
		s.Attention(m, y, y, y, tensor.Attention{Heads: 2, Causal: true})
		s.Gather(y, table, []int32{3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0})
		out = make([]float32, 20*24)
		s.CopyOutLater(out[:10*24], m.SliceRows(0, 10))
		s.CopyOut(out[10*24:], m.SliceRows(10, 20))
		return nil
	})
	return out, err
}

// broken fails one call of a driver, and all that come later where the GPU is lost then.
type broken struct {
	driver.Driver
	code  driver.Code
	calls int // until the one that fails
	fired bool
}

func (b *broken) next() error {
	if b.fired && b.code.Lost() {
		return b.code
	}
	if b.calls--; b.calls == -1 {
		b.fired = true
		return b.code
	}
	return nil
}

func (b *broken) Bind() (func(), error) {
	if err := b.next(); err != nil {
		return nil, err
	}
	return b.Driver.Bind()
}

func (b *broken) Host(n int) ([]byte, error) {
	if err := b.next(); err != nil {
		return nil, err
	}
	return b.Driver.Host(n)
}

func (b *broken) FreeHost(x []byte) error { return errors.Join(b.next(), b.Driver.FreeHost(x)) }

func (b *broken) LoadModule(ptx []byte) (driver.Module, error) {
	if err := b.next(); err != nil {
		return nil, err
	}
	return b.Driver.LoadModule(ptx)
}

func (b *broken) Alloc(n int) (driver.Pointer, error) {
	if err := b.next(); err != nil {
		return 0, err
	}
	return b.Driver.Alloc(n)
}

func (b *broken) Free(p driver.Pointer) error {
	return errors.Join(b.next(), b.Driver.Free(p))
}

func (b *broken) CopyIn(p driver.Pointer, x []byte) error {
	if err := b.next(); err != nil {
		return err
	}
	return b.Driver.CopyIn(p, x)
}

func (b *broken) CopyOut(x []byte, p driver.Pointer) error {
	if err := b.next(); err != nil {
		return err
	}
	return b.Driver.CopyOut(x, p)
}

func (b *broken) Send(p driver.Pointer, x []byte) error {
	if err := b.next(); err != nil {
		return err
	}
	return b.Driver.Send(p, x)
}

func (b *broken) Fetch(x []byte, p driver.Pointer) (driver.Event, error) {
	if err := b.next(); err != nil {
		return nil, err
	}
	return b.Driver.Fetch(x, p)
}

func (b *broken) Wait(e driver.Event) error { return errors.Join(b.next(), b.Driver.Wait(e)) }

func (b *broken) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	if err := b.next(); err != nil {
		return err
	}
	return b.Driver.Launch(f, g, args...)
}

func (b *broken) Sync() error {
	return errors.Join(b.next(), b.Driver.Sync())
}

// Whichever call of the driver fails, and how, the pass says so, or has taken memory that it
// found elsewhere. On a GPU that survives it the next pass is right and no memory is lost; after
// the others each pass says that the device is.
func TestDevice_EveryDriverCallMayFail(t *testing.T) {
	want, err := pass(newDevice(t, ptxvm.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, code := range []driver.Code{driver.ErrMemory, driver.ErrResources, driver.ErrLaunchFailed} {
		t.Run(code.Error(), func(t *testing.T) {
			calls := 0
			for failsAt(t, code, calls, want) {
				calls++
			}
			if calls < 30 {
				t.Errorf("only %d calls of the driver", calls)
			}
		})
	}
}

// failsAt says whether there was a call of that number to fail.
func failsAt(t *testing.T, code driver.Code, call int, want []float32) bool {
	t.Helper()
	vm := ptxvm.New(ptxvm.Options{})
	b := &broken{Driver: vm, code: code, calls: call}
	d, err := cuda.New(b, cuda.Options{})
	if err != nil {
		if !errors.Is(err, code) {
			t.Fatal(err)
		}
		return true
	}
	got, err := pass(d)
	found := code == driver.ErrMemory && err == nil // after a collection
	switch {
	case b.fired && !found && !errors.Is(err, code), !b.fired && err != nil:
		t.Fatalf("call %d failed: the pass returned %v", call, err)
	case err == nil && !slices.Equal(got, want), err != nil && got != nil && got[0] == got[0] &&
		!slices.Equal(got, want):
		t.Errorf("call %d failed: the result is %v, want %v or NaN", call, got[:4], want[:4])
	}
	lost := b.fired && code.Lost()
	if errors.Is(err, tensor.ErrDeviceLost) != lost {
		t.Errorf("call %d failed: %v", call, err)
	}
	ended := b.fired // Close calls, too
	got, err = pass(d)
	switch {
	case lost && !errors.Is(err, tensor.ErrDeviceLost), !lost && ended && (err != nil || !slices.Equal(got, want)):
		t.Fatalf("call %d failed: the next pass returned %v", call, err)
	}
	if err := d.Close(); err != nil && ended {
		t.Errorf("call %d failed: close: %v", call, err)
	}
	if n := vm.Used(); n != 0 && !lost && (ended || !b.fired) {
		t.Errorf("call %d failed: %d bytes are lost", call, n)
	}
	return b.fired
}

// A fault of the device is the error of a pass, not what the pass thought of its results: that it
// cannot be made, say.
func TestDevice_FaultGoesBeforeItsConsequences(t *testing.T) {
	b := &broken{Driver: ptxvm.New(ptxvm.Options{}), code: driver.ErrResources, calls: -1}
	d, err := cuda.New(b, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	notNumbers := errors.New("pixels that are not numbers")
	err = d.Run(t.Context(), false, func(s tensor.Session) error {
		m, x := tensor.NewMatrix(s, 4, 4), make([]float32, 16)
		b.calls = 0
		s.SiLUMul(m, m, m)
		if s.CopyOut(x, m); x[0] != x[0] {
			return notNumbers
		}
		return nil
	})
	if !errors.Is(err, driver.ErrResources) || errors.Is(err, notNumbers) {
		t.Errorf("got %v, want %v alone", err, driver.ErrResources)
	}
}

// Sessions give their memory back, also when they panic; weights do when no one has them.
func TestDevice_GivesMemoryBack(t *testing.T) {
	// A weight that is collected in the middle of a pass would leave room for the rest of it.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	d := newDevice(t, ptxvm.Options{})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic did not come through")
			}
		}()
		_ = d.Run(t.Context(), false, func(s tensor.Session) error {
			s.Block(1000)
			panic("stop")
		})
	}()
	if _, err := pass(d); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); d.Usage().Blocks > 0; {
		runtime.GC()
		runtime.Gosched()
		if time.Now().After(deadline) {
			t.Fatalf("%d blocks are still out", d.Usage().Blocks)
		}
	}
	before := d.Usage().Idle
	if _, err := pass(d); err != nil {
		t.Fatal(err)
	}
	if u := d.Usage(); u.Idle+u.Used != before {
		t.Errorf("a second pass took new memory: %d bytes, then %d", before, u.Idle+u.Used)
	}
}

// The pool stays below its ceiling, frees what it keeps to stay there, and says what is
// missing when it cannot.
func TestDevice_Ceiling(t *testing.T) {
	const ceiling = 1 << 20
	d, err := cuda.New(ptxvm.New(ptxvm.Options{}), cuda.Options{Ceiling: ceiling})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	allocate := func(elements ...int) error {
		return d.Run(t.Context(), false, func(s tensor.Session) error {
			for _, n := range elements {
				s.Block(n)
			}
			if u := d.Usage(); u.Used+u.Idle > ceiling {
				t.Errorf("%d bytes are taken, the ceiling is %d", u.Used+u.Idle, ceiling)
			}
			return nil
		})
	}
	for _, n := range [][]int{{100_000}, {200_000}, {100_000, 100_000}} { // of 4 bytes
		if err := allocate(n...); err != nil {
			t.Errorf("blocks of %d: %v", n, err)
		}
	}
	if err := allocate(150_000, 150_000); !errors.Is(err, driver.ErrMemory) {
		t.Errorf("got %v, want %v", err, driver.ErrMemory)
	}
	if u := d.Usage(); u.Blocks != 0 || u.Used != 0 {
		t.Errorf("%+v after the last session", u)
	}
}

// What is not there: a type of factors without kernels, memory for a weight.
func TestDevice_SaysWhatIsMissing(t *testing.T) {
	_, err := cuda.New(ptxvm.New(ptxvm.Options{}), cuda.Options{Factors: tensor.F16})
	if want := `factors: "F16"; must be F32 or BF16`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	d, err := cuda.New(ptxvm.New(ptxvm.Options{}), cuda.Options{Ceiling: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	_, err = d.Weight(tensor.Floats(make([]float32, 600*600), 600, 600))
	if want := "1.4 MiB more than the 0.0 MiB in use, with 1024.0 MiB free of 1024.0 MiB and a ceiling of 1.0 MiB; " +
		"must fit: use"; !errors.Is(err, driver.ErrMemory) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %v with %s", err, driver.ErrMemory, want)
	}
}

// A session waits for its turn, and no longer than its context.
func TestDevice_SessionsTakeTurns(t *testing.T) {
	d := newDevice(t, ptxvm.Options{})
	stop := errors.New("stop")
	err := d.Run(t.Context(), false, func(tensor.Session) error {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(stop)
		if err := d.Run(ctx, true, func(tensor.Session) error { return nil }); !errors.Is(err, stop) {
			t.Errorf("got %v, want %v", err, stop)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Two passes over other rows, or the same rows among others, have the same bits.
func TestDevice_BitsDoNotDependOnTheBatch(t *testing.T) {
	d := newDevice(t, ptxvm.Options{Unchecked: true})
	run := func(rows int) (out []float32) {
		err := d.Run(t.Context(), false, func(s tensor.Session) error {
			x := make([]float32, rows*40)
			for i := range x {
				x[i] = float32(i*i%101)/50 - 1
			}
			w, err := d.Weight(tensor.Floats(x[:40*5], 5, 40))
			if err != nil {
				return err
			}
			m, y := tensor.NewMatrix(s, rows, 40), tensor.NewMatrix(s, rows, 5)
			s.CopyIn(m, x)
			var sequences [][]int32
			for i := range int32(rows / 5) {
				sequences = append(sequences, []int32{5 * i, 5*i + 1, 5*i + 2, 5*i + 3, 5*i + 4})
			}
			s.Attention(m, m, m, m, tensor.Attention{Heads: 2, Sequences: sequences})
			s.Linear(y, m, w, tensor.Epilogue{Act: tensor.GELU})
			out = make([]float32, rows*5)
			s.CopyOut(out, y)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	few := run(5)
	if many := run(150); !slices.Equal(few, many[:len(few)]) {
		t.Error("the first rows differ when others share their call")
	}
}

// sink is a GPU whose memory takes weights, and nothing else.
type sink struct {
	driver.Driver
	at      driver.Pointer
	largest int // copy, in bytes
}

func (l *sink) Alloc(n int) (driver.Pointer, error) {
	l.at += driver.Pointer(n)
	return 1<<40 + l.at - driver.Pointer(n), nil
}

func (l *sink) Free(driver.Pointer) error { return nil }

func (l *sink) CopyIn(_ driver.Pointer, x []byte) error {
	l.largest = max(l.largest, len(x))
	return nil
}

// A weight goes to the device in pieces, through memory of the host that does not grow with
// it, whatever its type and the device's.
func TestDevice_UploadsInBoundedMemory(t *testing.T) {
	const rows, cols = 3000, 4004 // 48 MB in float32; rows in bf16 are padded
	x := make([]float32, rows*cols)
	for i := range x {
		x[i] = float32(i%251) - 125 // bf16 has them
	}
	for _, from := range []tensor.DType{tensor.F32, tensor.BF16} {
		file := tensor.Array{DType: from, Shape: []int{rows, cols}, Data: from.AppendFloats(nil, x)}
		for _, factors := range []tensor.DType{tensor.F32, tensor.BF16} {
			s := &sink{Driver: ptxvm.New(ptxvm.Options{})}
			d, err := cuda.New(s, cuda.Options{Factors: factors})
			if err != nil {
				t.Fatal(err)
			}
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err = d.Weight(file)
			runtime.ReadMemStats(&after)
			if err != nil {
				t.Error(err)
			}
			if host := after.TotalAlloc - before.TotalAlloc; host > 21<<20 || s.largest == 0 || s.largest > 4<<20 {
				t.Errorf("%s to %s takes %d bytes of the host, and copies of %d", from, factors, host, s.largest)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}

			whole, err := cuda.New(ptxvm.New(ptxvm.Options{Unchecked: true}), cuda.Options{Factors: factors})
			if err != nil {
				t.Fatal(err)
			}
			got := make([]float32, rows*cols)
			w, err := whole.Weight(file)
			if err == nil {
				err = whole.Read(got, w)
			}
			if err != nil || !slices.Equal(got, x) {
				t.Errorf("%s to %s: other numbers come back, %v", from, factors, err)
			}
			if err := whole.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
