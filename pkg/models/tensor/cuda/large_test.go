package cuda_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// bounded is a GPU that refuses the grids that NVIDIA's driver refuses, and runs the first block of the others.
type bounded struct {
	*ptxvm.VM
	blocks int // of the largest launch
}

func (b *bounded) Launch(f driver.Function, g driver.Grid, args ...driver.Arg) error {
	if g.Blocks.X > 1<<31-1 || g.Blocks.Y > 65535 || g.Blocks.Z > 65535 {
		return fmt.Errorf("a grid of %+v: %w", g.Blocks, driver.ErrInvalidValue)
	}
	b.blocks = max(b.blocks, g.Blocks.Count())
	g.Blocks = driver.Dim{}
	return b.VM.Launch(f, g, args...)
}

// What an image of 2048 x 2048 pixels and larger ones take has grids that a driver takes: 65535 blocks in y are fewer
// than the tiles of its pixels.
func TestDevice_LargeImages(t *testing.T) {
	for _, factors := range []tensor.DType{tensor.F32, tensor.BF16} {
		for _, tt := range []struct{ images, side, in, out int }{{1, 2048, 3, 8}, {2, 2048, 8, 3}, {1, 4096, 8, 8}} {
			gpu := &bounded{VM: ptxvm.New(ptxvm.Options{Count: true, Memory: 1 << 40})}
			d, err := cuda.New(gpu, cuda.Options{Factors: factors})
			if err != nil {
				t.Fatal(err)
			}
			filter, err := d.Filter(tensor.Floats(make([]float32, tt.out*tt.in*9), tt.out, tt.in, 3, 3))
			if err != nil {
				t.Fatal(err)
			}
			weight, err := d.Weight(tensor.Floats(make([]float32, tt.out*tt.in), tt.out, tt.in))
			if err != nil {
				t.Fatal(err)
			}
			n := tt.images * tt.side * tt.side
			if err := d.Run(t.Context(), true, func(s tensor.Session) error {
				x := s.Factors(n*tt.in).Image(tt.images, tt.side, tt.side, tt.in)
				y := s.Factors(n*tt.out).Image(tt.images, tt.side, tt.side, tt.out)
				s.Conv2D(y, x, filter, tensor.SamePad(3), tensor.Epilogue{})
				s.Linear(y.Matrix(), x.Matrix(), weight, tensor.Epilogue{})
				s.Upsample2(x, s.Factors(n*tt.in/4).Image(tt.images, tt.side/2, tt.side/2, tt.in))
				return nil
			}); err != nil {
				t.Errorf("%+v in %s: %v", tt, factors, err)
			}
			if gpu.blocks < n/128 {
				t.Errorf("%+v in %s: at most %d blocks", tt, factors, gpu.blocks)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
