//go:build cuda

package gpu

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/internal/cudashim"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/internal/cuext"
)

// Built says whether the program is built for GPUs.
const Built = true

// Count is the number of GPUs.
func Count() (int, error) {
	if err := cudashim.Available(); err != nil {
		return 0, none(err.Error())
	}
	n, err := cu.NumDevices()
	if err != nil {
		return 0, fmt.Errorf("count GPUs: %w", result(err))
	}
	if n == 0 {
		return 0, none("the CUDA driver finds no GPU; must be cpu, or show it one (CUDA_VISIBLE_DEVICES)")
	}
	return n, nil
}

// Open opens a GPU by its number, below Count, on its primary context: what else of this
// process uses the GPU, such as cuBLAS, shares that. A goroutine that waits for it sleeps: by
// default a wait keeps a core busy, one for each GPU.
func Open(index int) (driver.Driver, error) {
	d, name, version, err := inspect(index)
	if err != nil {
		return nil, err
	}
	var context cu.CUContext
	if err = d.SetPrimaryCtxFlags(cu.SchedBlockingSync); err == nil {
		context, err = d.RetainPrimaryCtx()
	}
	if err != nil {
		return nil, fmt.Errorf("open GPU %d, %s: %w", index, name, result(err))
	}
	g := &device{cu: d, name: name, version: version, context: context}
	release, err := g.Bind()
	if err == nil {
		g.copies, err = cu.MakeStream(cu.NonBlocking)
		release()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open GPU %d, %s: %w", index, name, result(err)),
			result(d.ReleasePrimaryCtx()))
	}
	return g, nil
}

// Usable returns an error that wraps ErrOld for a GPU that is too old, without opening it.
func Usable(index int) error {
	_, _, _, err := inspect(index)
	return err
}

// inspect returns a GPU, its name and its compute capability. One that is too old is an error that wraps ErrOld.
func inspect(index int) (d cu.Device, name string, version int, err error) {
	d, err = cu.GetDevice(index)
	if err == nil {
		name, err = d.Name()
	}
	if err != nil {
		return d, "", 0, fmt.Errorf("open GPU %d: %w", index, result(err))
	}
	major, err := d.Attribute(cu.ComputeCapabilityMajor)
	minor, err2 := d.Attribute(cu.ComputeCapabilityMinor)
	if err = errors.Join(err, err2); err != nil {
		return d, "", 0, fmt.Errorf("open GPU %d, %s: %w", index, name, result(err))
	}
	if version = 10*major + minor; version < Least {
		return d, "", 0,
			old(fmt.Sprintf("%s has compute capability %d.%d; must be a GPU of %d.%d (Ampere) or newer, or cpu", name,
				major, minor, Least/10, Least%10))
	}
	return d, name, version, nil
}

// old is an ErrOld with words of its own.
type old string

func (o old) Error() string { return string(o) }

func (old) Is(target error) bool { return target == ErrOld }

type device struct {
	cu      cu.Device
	name    string
	version int // compute capability
	context cu.CUContext
	copies  cu.Stream // of Fetch; all else is on the stream that there is
}

type module struct {
	cu cu.Module
}

type function struct {
	cu     cu.Function
	name   string
	shared int // dynamic shared memory that launches may have
}

// result is an error of cu as a driver.Code. Its type is hidden, an integer.
func result(err error) error {
	if err == nil {
		return nil
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if v := reflect.ValueOf(e); v.Kind() == reflect.Int {
			return driver.Code(v.Int())
		}
	}
	return err
}

func (d *device) Name() string { return d.name }

func (d *device) Capability() int { return d.version }

// Bind keeps the goroutine on its thread meanwhile: a context is current on a thread.
func (d *device) Bind() (release func(), err error) {
	runtime.LockOSThread()
	if err := cu.PushCurrentCtx(d.context); err != nil {
		runtime.UnlockOSThread()
		return nil, result(err)
	}
	return func() {
		_, _ = cu.PopCurrentCtx() // it was pushed
		runtime.UnlockOSThread()
	}, nil
}

func (d *device) Memory() (free, total int, err error) {
	f, t, err := cu.MemInfo()
	return int(f), int(t), result(err)
}

func (d *device) LoadModule(ptx []byte) (driver.Module, error) {
	m, log, err := cuext.LoadModule(string(ptx))
	if err != nil {
		return nil, fmt.Errorf("load module: %w: %s", err, log)
	}
	return &module{cu: m}, nil
}

func (m *module) Function(name string) (driver.Function, error) {
	f, err := m.cu.Function(name)
	if err != nil {
		return nil, fmt.Errorf("kernel %s: %w", name, result(err))
	}
	return &function{cu: f, name: name, shared: 48 << 10}, nil
}

func (d *device) Alloc(bytes int) (driver.Pointer, error) {
	p, err := cu.MemAlloc(int64(bytes))
	return driver.Pointer(p), result(err)
}

func (d *device) Free(p driver.Pointer) error { return result(cu.MemFree(cu.DevicePtr(p))) }

func (d *device) Host(bytes int) ([]byte, error) { return cuext.HostAlloc(bytes) }

func (d *device) FreeHost(b []byte) error { return result(cuext.HostFree(b)) }

func (d *device) CopyIn(dst driver.Pointer, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	return result(cu.MemcpyHtoD(cu.DevicePtr(dst), unsafe.Pointer(unsafe.SliceData(src)), int64(len(src))))
}

func (d *device) CopyOut(dst []byte, src driver.Pointer) error {
	if len(dst) == 0 {
		return nil
	}
	return result(cu.MemcpyDtoH(unsafe.Pointer(unsafe.SliceData(dst)), cu.DevicePtr(src), int64(len(dst))))
}

func (d *device) Send(dst driver.Pointer, src []byte) error {
	if len(src) == 0 {
		return nil
	}
	return result(cu.MemcpyHtoDAsync(cu.DevicePtr(dst), unsafe.Pointer(unsafe.SliceData(src)), int64(len(src)),
		cu.NoStream))
}

// Fetch starts to copy src to dst on the stream of copies, after all work launched so far. The event is done when
// dst is set.
func (d *device) Fetch(dst []byte, src driver.Pointer) (driver.Event, error) {
	e, err := cu.MakeEvent(cu.DisableTiming | cu.BlockingSyncEvent)
	if err != nil {
		return nil, result(err)
	}
	if err = e.Record(cu.NoStream); err == nil {
		err = d.copies.Wait(e, 0)
	}
	if err == nil && len(dst) > 0 {
		err = cu.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(dst)), cu.DevicePtr(src), int64(len(dst)), d.copies)
	}
	if err == nil {
		err = e.Record(d.copies)
	}
	if err != nil {
		return nil, errors.Join(result(err), result(cu.DestroyEvent(&e)))
	}
	return e, nil
}

func (d *device) Wait(e driver.Event) error {
	event := e.(cu.Event)
	err := result(event.Synchronize())
	return errors.Join(err, result(cu.DestroyEvent(&event)))
}

// Launch starts a kernel on a grid.
func (d *device) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	k, ok := f.(*function)
	if !ok {
		return fmt.Errorf("launch of something that is not a kernel: %w", driver.ErrInvalidValue)
	}
	if g.Shared > k.shared {
		if err := cuext.SetMaxDynamicShared(k.cu, g.Shared); err != nil {
			return fmt.Errorf("launch %s: %d bytes of shared memory: %w", k.name, g.Shared, err)
		}
		k.shared = g.Shared
	}
	params := make([]unsafe.Pointer, len(args))
	for i := range args {
		params[i] = unsafe.Pointer(&args[i]) // 8 bytes, as cu copies them
	}
	b, t := g.Blocks, g.Threads
	err := k.cu.Launch(max(b.X, 1), max(b.Y, 1), max(b.Z, 1), max(t.X, 1), max(t.Y, 1), max(t.Z, 1), g.Shared,
		cu.NoStream, params)
	if err != nil {
		return fmt.Errorf("launch %s: %w", k.name, result(err))
	}
	return nil
}

func (d *device) Sync() error { return result(cu.Synchronize()) }

// Close implements driver.Driver: it ends the stream of copies and gives the primary context back.
// On a lost GPU the stream went with it: that is no error.
func (d *device) Close() error {
	release, err := d.Bind()
	if err == nil {
		err = result(d.copies.Destroy())
		release()
	}
	if code, ok := errors.AsType[driver.Code](err); ok && code.Lost() {
		err = nil // it went with the GPU
	}
	return errors.Join(err, result(d.cu.ReleasePrimaryCtx()))
}
