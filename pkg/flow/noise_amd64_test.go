package flow

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Every kernel has the bits of Go, for lengths around its vector and seeds that use all bits.
func TestNormal_KernelsHaveTheBitsOfGo(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, k := range normalKernels {
		for _, n := range []int{0, k.vector, 3 * k.vector, 1 << 14, 1 << 18} {
			got, want := make([]float32, n), make([]float32, n)
			seed, step, stream := r.Uint64(), r.Uint32(), r.Uint32()
			k.fill(got, seed, step, stream)
			goNormal(want, 0, seed, step, stream)
			if !slices.Equal(got, want) {
				t.Fatalf("vectors of %d, %d elements, seed %d, step %d, stream %d: other numbers", k.vector, n, seed,
					step, stream)
			}
		}
	}
}
