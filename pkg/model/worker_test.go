package model

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/tensor"
)

func TestCrew_split(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	c, err := newCrew(3, tensor.KernelsGo)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	for n := range 8 {
		done := make([]int, n)
		err := c.split(t.Context(), n, func(_ *worker, from, to int) error {
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
	if err := c.split(t.Context(), 3, func(_ *worker, from, _ int) error {
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
		_ = c.split(t.Context(), 3, func(_ *worker, from, _ int) error {
			if from == 0 {
				panic("misuse")
			}
			return nil
		})
	}()
	// Every worker is back.
	if err := c.split(t.Context(), 3, func(*worker, int, int) error { return nil }); err != nil {
		t.Error(err)
	}
}
