// Package cuda is the tensor.Device of an NVIDIA GPU. Weights are in its memory; it runs the
// kernels of package kernels in one order on one stream. Results of CopyOutLater are copied on
// another stream, while the kernels of the next session run.
//
// The GPU is behind an interface, package driver, so that all of this also runs without
// one: package ptxvm interprets the same PTX. Computation is in float32 with IEEE
// operations only: the interpreter's bits are those that IEEE 754 asks of a GPU. With
// [Options].Factors BF16, products and attention round their factors and run on tensor
// cores, whose sums differ from one GPU to another. Every sum has one order, whatever the
// batch, but those of cuBLASLt, which multiplies in bf16 where it is installed: the name
// of the device says so, and [Options].Deterministic keeps it out.
//
// Memory comes from a pool with a ceiling. An operation of a session cannot fail; what
// goes wrong in one (no memory, a faulty kernel, a lost device) makes the operations after
// it do nothing, and is what Run returns.
package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/internal/gpu"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/kernels"
)

// Options of a Device.
type Options struct {
	// Ceiling is the most device memory in bytes that is taken; 0 is all there is.
	Ceiling int
	// Factors is the element type in which factors meet: F32 (the default), or BF16 for
	// tensor cores, with weights of projections and what sessions hold as factors kept in it.
	// Sums, and all else that a session holds, are float32.
	Factors tensor.DType
	// Deterministic leaves products in bf16 to the kernels, where the driver has a faster
	// library: that chooses another algorithm for other numbers of rows, so that bits depend on
	// what shares a call. The name of the device says so.
	Deterministic bool
	// Warn, where set, is told what makes the device slower than it could be: a library of products that is missing or
	// fails, an old driver.
	Warn func(error)
	// Profile, where set, is told how long each kernel took. The device then waits for each kernel.
	Profile func(kernel string, took time.Duration)
}

// Device is one GPU. Its sessions come one after another; each has all of it.
type Device struct {
	driver  driver.Driver
	pool    *pool
	kernels map[string]driver.Function
	bf16    bool
	turn    chan struct{} // holds the right to launch
	staging staging
	busy    stopwatch
	lost    atomic.Pointer[error]
	warn    func(error)
	profile func(kernel string, took time.Duration)

	products      driver.Products // of a library; nil: the kernels
	libraryFailed sync.Once       // guards the warning of it

	uploading sync.Mutex
	decoded   []float32 // of an upload
	encoded   []byte
}

// Count is the number of GPUs that can be opened. An error that wraps ErrNone says why there is
// none in this program or on this machine, and what would have to be.
func Count() (int, error) { return gpu.Count() }

// Built says whether the program is built for GPUs.
const Built = gpu.Built

// ErrNone is there being no GPU.
var ErrNone = gpu.ErrNone

// ErrOld is wrapped by the error of Open for a GPU that is too old.
var ErrOld = gpu.ErrOld

// Available returns an error with the reason if this machine has no GPU with that number, or one that is too old
// (ErrOld); else nil.
func Available(index int) error {
	n, err := Count()
	switch {
	case err != nil:
		return err
	case index < 0 || index >= n:
		return fmt.Errorf("no such GPU; must be %s", gpuNames(n))
	}
	return gpu.Usable(index)
}

// Open makes a device of the GPU with that number, below Count; the caller closes it. It fails
// where there is no such GPU or driver, and on one that is too old.
func Open(index int, o Options) (*Device, error) {
	if err := Available(index); err != nil {
		return nil, err
	}
	d, err := gpu.Open(index)
	if err != nil {
		return nil, err
	}
	dev, err := New(d, o)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return dev, nil
}

// gpuNames names n GPUs.
func gpuNames(n int) string {
	if n == 1 {
		return "cuda:0, the only one"
	}
	return fmt.Sprintf("one of cuda:0 to cuda:%d", n-1)
}

var (
	_ tensor.Device         = (*Device)(nil)
	_ tensor.Limited        = (*Device)(nil)
	_ tensor.LowRankAdder   = (*Device)(nil)
	_ tensor.RowsMultiplier = (*session)(nil)
)

// names of the kernels that sessions launch.
var names = []string{
	"linear_f32", "conv_f32", "attention_f32", "layer_norm_f32", "norm_f32", "rope_f32",
	"silu_mul_f32", "copy_f32", "upsample2_f32",
	"norm_rope_f32", "finish_f32", "linear_bf16", "conv_bf16", "attention_bf16_32", "attention_bf16_64",
	"attention_bf16_128", "attention_bf16_384", "layer_norm_wide", "norm_rope_wide", "copy_wide", "finish_wide",
}

// hopperNames of those that GPUs of compute capability hopper have beside them.
var hopperNames = []string{"attention_wgmma_64", "attention_wgmma_128"}

const hopper = 90

// New makes a device of a driver, which belongs to it from then on: it loads the kernels and, for
// bf16, the library of products. Open calls it with a GPU's driver, tests with the interpreter's.
// On an error the driver stays the caller's.
func New(d driver.Driver, o Options) (*Device, error) {
	switch o.Factors {
	case "", tensor.F32, tensor.BF16:
	default:
		return nil, fmt.Errorf("factors: %q; must be %s or %s", o.Factors, tensor.F32, tensor.BF16)
	}
	d = &locked{Driver: d}
	release, err := d.Bind()
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name(), err)
	}
	defer release()
	if _, _, err := d.Memory(); err != nil { // so that there is always one that was read
		return nil, fmt.Errorf("device %s: %w", d.Name(), err)
	}
	m, err := d.LoadModule(kernels.PTX)
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", d.Name(), err)
	}
	dev := &Device{
		driver: d, pool: newPool(d, o.Ceiling), staging: staging{d: d}, kernels: map[string]driver.Function{},
		bf16: o.Factors == tensor.BF16, warn: o.Warn, profile: o.Profile, turn: make(chan struct{}, 1),
	}
	if dev.warn == nil {
		dev.warn = func(error) {}
	}
	for _, name := range names {
		if dev.kernels[name], err = m.Function(name); err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Name(), err)
		}
	}
	if dev.bf16 && d.Capability() == hopper {
		// A driver of before CUDA 12 does not take it.
		if m, err := d.LoadModule(kernels.Hopper); err != nil {
			dev.warn(fmt.Errorf("attention by the kernels of older GPUs: %w", err))
		} else {
			for _, name := range hopperNames {
				if dev.kernels[name], err = m.Function(name); err != nil {
					return nil, fmt.Errorf("device %s: %w", d.Name(), err)
				}
			}
		}
	}
	if dev.bf16 && !o.Deterministic {
		// Without a library the kernels do it.
		if dev.products, err = d.(*locked).Products(); err != nil && !errors.Is(err, driver.ErrUnsupported) {
			dev.warn(err)
		}
	}
	return dev, nil
}

// locked lets several goroutines use a driver: weights may come while a session runs.
type locked struct {
	driver.Driver // its name, Bind, Wait and Close take no lock: others go on meanwhile
	mu            sync.Mutex
	memory        atomic.Pointer[[2]int] // free and total, as read last
}

// hold takes the lock; what it returns gives it back.
func (l *locked) hold() func() {
	l.mu.Lock()
	return l.mu.Unlock
}

// Memory returns what was read last while another call is under way: copies take as long as a pass.
func (l *locked) Memory() (free, total int, err error) {
	if known := l.memory.Load(); known == nil {
		l.mu.Lock()
	} else if !l.mu.TryLock() {
		return known[0], known[1], nil
	}
	defer l.mu.Unlock()
	if free, total, err = l.Driver.Memory(); err == nil {
		l.memory.Store(&[2]int{free, total})
	}
	return free, total, err
}

func (l *locked) Host(bytes int) ([]byte, error) {
	defer l.hold()()
	return l.Driver.Host(bytes)
}

func (l *locked) FreeHost(b []byte) error {
	defer l.hold()()
	return l.Driver.FreeHost(b)
}

func (l *locked) LoadModule(ptx []byte) (driver.Module, error) {
	defer l.hold()()
	return l.Driver.LoadModule(ptx)
}

func (l *locked) Alloc(bytes int) (driver.Pointer, error) {
	defer l.hold()()
	return l.Driver.Alloc(bytes)
}

func (l *locked) Free(p driver.Pointer) error {
	defer l.hold()()
	return l.Driver.Free(p)
}

func (l *locked) CopyIn(dst driver.Pointer, src []byte) error {
	defer l.hold()()
	return l.Driver.CopyIn(dst, src)
}

func (l *locked) CopyOut(dst []byte, src driver.Pointer) error {
	defer l.hold()()
	return l.Driver.CopyOut(dst, src)
}

func (l *locked) Send(dst driver.Pointer, src []byte) error {
	defer l.hold()()
	return l.Driver.Send(dst, src)
}

func (l *locked) Fetch(dst []byte, src driver.Pointer) (driver.Event, error) {
	defer l.hold()()
	return l.Driver.Fetch(dst, src)
}

func (l *locked) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	defer l.hold()()
	return l.Driver.Launch(f, g, args...)
}

func (l *locked) Sync() error {
	defer l.hold()()
	return l.Driver.Sync()
}

// Name is cuda/, what the driver calls the GPU, /bf16 where factors are, and the library of their
// products: with one, bits depend on the batch, and the name says that, too. Samples are stored
// with it.
func (d *Device) Name() string {
	name := "cuda/" + d.driver.Name()
	if d.bf16 {
		name += "/bf16"
	}
	if d.products != nil {
		name += "/" + d.products.Name() + "/nondeterministic"
	}
	return name
}

// Parallel is 1: one pass keeps all of a GPU busy.
func (d *Device) Parallel() int { return 1 }

// Run calls f with a session when it is its turn, on a goroutine that keeps to its thread with
// the GPU's primary context meanwhile. It returns the error of f, or what went wrong on the
// device. All memory of the session is back in the pool then, also when f panics. On a GPU that
// is lost it calls nothing: the error wraps tensor.ErrDeviceLost.
//
// The turn ends with f: while the results of CopyOutLater are on their way, the kernels of the
// next session run.
func (d *Device) Run(ctx context.Context, _ bool, f func(tensor.Session) error) (err error) {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	s := &session{d: d, lists: map[*int32]list{}}
	d.busy.start()
	defer func() {
		if fault := s.awaitResults(); fault != nil {
			err = fault // what f made of it is a consequence
		}
		d.busy.stop()
	}()
	defer func() { <-d.turn }()
	return d.withContext(func() error {
		defer s.releaseMemory()
		return f(s)
	})
}

// withContext calls f with the GPU's context bound to this goroutine's thread, which every call of
// the driver needs. On a GPU that is lost it returns that error and does not call f.
func (d *Device) withContext(f func() error) error {
	if lost := d.lost.Load(); lost != nil {
		return *lost
	}
	release, err := d.driver.Bind()
	if err != nil {
		return d.deviceError(err)
	}
	defer release()
	return f()
}

// deviceError returns an error of the driver with the name of the device. After one that no call
// survives it is tensor.ErrDeviceLost, now and for all later calls.
func (d *Device) deviceError(err error) error {
	if code, ok := errors.AsType[driver.Code](err); ok && code.Lost() {
		lost := fmt.Errorf("device %s: %w: %w; start this process again, and look for the reason in dmesg and "+
			"nvidia-smi", d.Name(), tensor.ErrDeviceLost, err)
		d.lost.CompareAndSwap(nil, &lost)
		return *d.lost.Load()
	}
	return fmt.Errorf("device %s: %w", d.Name(), err)
}

// Usage is the memory in use now, and how long the device was busy, for metrics. On a lost device
// free and total are 0.
func (d *Device) Usage() tensor.Usage {
	u := d.pool.now()
	u.Busy = d.busy.total()
	_ = d.withContext(func() (err error) { // a lost device has none
		u.Free, u.Total, err = d.driver.Memory()
		return err
	})
	return u
}

// WorkingBytes is the memory that the pool keeps for sessions.
func (d *Device) WorkingBytes() int { return d.pool.now().Idle }

// Close frees all memory and gives the GPU back. No session may run. The memory of a lost device is
// the driver's to free: that is no error.
func (d *Device) Close() error {
	err := d.withContext(func() error {
		var err error
		if d.products != nil {
			err = d.products.Close()
		}
		return errors.Join(err, d.staging.close(), d.pool.close())
	})
	if d.lost.Load() != nil {
		err = nil // the driver frees everything
	}
	if err = errors.Join(err, d.driver.Close()); err != nil {
		return fmt.Errorf("close device %s: %w", d.Name(), err)
	}
	return nil
}
