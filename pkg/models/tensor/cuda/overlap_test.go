package cuda_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// late is a GPU that does everything as late as its driver may: launches and copies when somebody
// waits for them, and what is fetched after all launches that were made until then.
type late struct {
	driver.Driver
	before func() // a Wait

	mu    sync.Mutex
	queue []func() error
	err   error
}

// awaitResults does what is in the queue.
func (l *late) finish() error {
	for _, f := range l.queue {
		if l.err == nil {
			l.err = f()
		}
	}
	l.queue = nil
	return l.err
}

func (l *late) enqueue(f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, f)
	return l.err
}

// now is a call that the queue goes before.
func (l *late) now(f func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.finish(); err != nil {
		return err
	}
	return f()
}

func (l *late) Send(p driver.Pointer, x []byte) error {
	return l.enqueue(func() error { return l.Driver.Send(p, x) })
}

func (l *late) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	args = slices.Clone(args)
	return l.enqueue(func() error { return l.Driver.Launch(f, g, args...) })
}

func (l *late) Fetch(x []byte, p driver.Pointer) (driver.Event, error) {
	return func() error { return l.Driver.CopyOut(x, p) }, nil
}

func (l *late) Wait(e driver.Event) error {
	if f := l.before; f != nil {
		l.before = nil
		f()
	}
	return l.now(e.(func() error))
}

func (l *late) CopyIn(p driver.Pointer, x []byte) error {
	return l.now(func() error { return l.Driver.CopyIn(p, x) })
}

func (l *late) CopyOut(x []byte, p driver.Pointer) error {
	return l.now(func() error { return l.Driver.CopyOut(x, p) })
}

func (l *late) Free(p driver.Pointer) error {
	return l.now(func() error { return l.Driver.Free(p) })
}

func (l *late) FreeHost(b []byte) error {
	return l.now(func() error { return l.Driver.FreeHost(b) })
}

func (l *late) Alloc(n int) (p driver.Pointer, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Driver.Alloc(n)
}

func (l *late) Host(n int) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Driver.Host(n)
}

func (l *late) Sync() error { return l.now(l.Driver.Sync) }

// squares is a pass whose results come later: of x, and of them again.
func squares(ctx context.Context, d *cuda.Device, x float32) ([]float32, error) {
	const rows, cols = 7, 24
	out := make([]float32, 2*rows*cols)
	err := d.Run(ctx, false, func(s tensor.Session) error {
		m, src := tensor.NewMatrix(s, rows, cols), make([]float32, rows*cols)
		for range 3 { // the last is what counts
			for i := range src {
				src[i] += x + float32(i)/64
			}
			s.CopyIn(m, src)
		}
		s.SiLUMul(m, m, m)
		s.CopyOutLater(out[:rows*cols], m)
		s.SiLUMul(m, m, m)
		s.CopyOutLater(out[rows*cols:], m)
		return nil
	})
	return out, err
}

// While the results of one session are on their way the next has its turn, takes the memory that
// the first has no need of, and computes; both are right, however late the copies are.
func TestDevice_CopiesOverlapTheNextSession(t *testing.T) {
	quiet := newDevice(t, ptxvm.Options{})
	var want [2][]float32
	for i := range want {
		var err error
		if want[i], err = squares(t.Context(), quiet, float32(i)); err != nil {
			t.Fatal(err)
		}
	}
	vm := ptxvm.New(ptxvm.Options{})
	l := &late{Driver: vm}
	d, err := cuda.New(l, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 { // the first time in new memory
		var second []float32
		inside := false
		l.before = func() {
			inside = len(l.queue) > 0 // no one has waited for the first one's launches
			// Without a turn of its own it would wait for itself.
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if second, err = squares(ctx, d, 1); err != nil {
				t.Fatal(err)
			}
		}
		first, err := squares(t.Context(), d, 0)
		if err != nil || !inside || !slices.Equal(first, want[0]) || !slices.Equal(second, want[1]) {
			t.Fatalf("the second within the first: %v, %v; %v and %v, want %v and %v", inside, err, first[:3],
				second[:3],
				want[0][:3], want[1][:3])
		}
		if u := d.Usage(); u.Blocks != 0 || u.Used != 0 {
			t.Errorf("%+v after the last session", u)
		}
	}
	if err := d.Close(); err != nil || vm.Used() != 0 {
		t.Errorf("close: %v, %d bytes are lost", err, vm.Used())
	}
}

// Many sessions at once, on a GPU that is late.
func TestDevice_SessionsAtOnce(t *testing.T) {
	l := &late{Driver: ptxvm.New(ptxvm.Options{})}
	d, err := cuda.New(l, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	quiet := newDevice(t, ptxvm.Options{})
	var g sync.WaitGroup
	for i := range 4 {
		want, err := squares(t.Context(), quiet, float32(i))
		if err != nil {
			t.Fatal(err)
		}
		g.Go(func() {
			for range 8 {
				if got, err := squares(t.Context(), d, float32(i)); err != nil || !slices.Equal(got, want) {
					t.Errorf("session %d: %v, %v; want %v", i, err, got[:3], want[:3])
					return
				}
			}
		})
	}
	g.Wait()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
