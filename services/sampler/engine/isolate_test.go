package engine_test

import (
	"context"
	"errors"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// A device that is lost, a cache without room and the end of the context say nothing of the rows.
func TestIsolate_Outages(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	for _, c := range []struct {
		ctx  context.Context
		want error
	}{{t.Context(), tensor.ErrDeviceLost}, {t.Context(), lm.ErrFull}, {ended, context.Canceled}} {
		calls := 0
		faults, err := engine.Isolate(c.ctx, []int{1, 2, 3}, func([]int) (map[int]error, error) {
			calls++
			return nil, c.want
		})
		if calls != 1 || faults != nil || !errors.Is(err, c.want) {
			t.Errorf("%v: %d calls, faults %v, error %v; want one call and the error", c.want, calls, faults, err)
		}
	}
}

// A device that is lost while samples are tried alone says nothing of them: they go elsewhere.
func TestIsolate_DeviceLost(t *testing.T) {
	t.Parallel()
	calls := 0
	faults, err := engine.Isolate(t.Context(), []int{1, 2}, func([]int) (map[int]error, error) {
		if calls++; calls == 1 {
			return nil, errors.New("the call failed")
		}
		return nil, tensor.ErrDeviceLost
	})
	if !errors.Is(err, tensor.ErrDeviceLost) || faults != nil {
		t.Errorf("faults %v, %v; want the lost device", faults, err)
	}
}
