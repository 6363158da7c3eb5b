package nn

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

func TestSplit(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	d, err := cpu.NewDevice(cpu.Options{Threads: 3, Kernels: cpu.KernelsGo})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for n := range 8 {
		done := make([]int, n)
		err := Split(t.Context(), d, n, func(_ tensor.Session, from, to int) error {
			for i := from; i < to; i++ {
				done[i]++
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, k := range done {
			if k != 1 {
				t.Errorf("%d of %d done %d times", i, n, k)
			}
		}
	}

	fault := errors.New("fault")
	if err := Split(t.Context(), d, 3, func(_ tensor.Session, from, _ int) error {
		if from == 1 {
			return fault
		}
		return nil
	}); !errors.Is(err, fault) {
		t.Errorf("got %v, want the error of a part", err)
	}
	func() {
		defer func() {
			if got := recover(); got != "misuse" {
				t.Errorf("recovered %v, want the panic of a part", got)
			}
		}()
		_ = Split(t.Context(), d, 3, func(_ tensor.Session, from, _ int) error {
			if from == 0 {
				panic("misuse")
			}
			return nil
		})
	}()
	// Every session is back.
	if err := Split(t.Context(), d, 3, func(tensor.Session, int, int) error { return nil }); err != nil {
		t.Error(err)
	}
}
