package sampler

import (
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// StartState sets x to the state that a sample begins with: of states, [n, S, C] or, for all
// samples of the group, [1, S, C], the one of its index. The shape is [S, C]. Errors name the
// field of states.
func StartState(x []float32, states *schemas.Tensor, sample int64, shape []int64) error {
	dtype := tensor.DType(states.DType)
	if len(states.Shape) != 3 || !slices.Equal(states.Shape[1:], shape) {
		return fmt.Errorf("shape: %v; must be %v after the samples", states.Shape, shape)
	}
	if states.Shape[0] == 1 {
		sample = 0
	}
	size := int64(len(x) * dtype.Size())
	if end := (sample + 1) * size; sample >= states.Shape[0] || int64(len(states.Data)) < end {
		return fmt.Errorf("data: %d bytes of shape %v; must have a state of sample %d", len(states.Data), states.Shape, sample)
	}
	if err := dtype.DecodeFloats(x, states.Data[sample*size:(sample+1)*size]); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	return nil
}
