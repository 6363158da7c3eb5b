package client

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Latents returns the states that a trajectory kept, packed [S, C] in row-major order, by
// index: 0 is x_T, k the state before step k, the number of steps the final one. F16 and
// BF16 are widened, which is exact.
func (c *Client) Latents(ctx context.Context, t *schemas.Trajectory) (map[int64][]float32, error) {
	steps, err := c.Steps(ctx, t)
	if err != nil {
		return nil, err
	}
	out := map[int64][]float32{}
	for _, s := range steps {
		for _, l := range s.Latents {
			width, _ := schemas.DTypeSize(l.Tensor.DType)
			x := make([]float32, len(l.Tensor.Data)/int(max(width, 1)))
			if err := tensor.DType(l.Tensor.DType).DecodeFloats(x, l.Tensor.Data); err != nil {
				return nil, fmt.Errorf("latents %d of sample %d: %w", l.Index, t.SampleIndex, err)
			}
			out[l.Index] = x
		}
	}
	return out, nil
}
