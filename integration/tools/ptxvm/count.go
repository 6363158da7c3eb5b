package ptxvm

import (
	"math/bits"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// Counts is what a launch did.
type Counts struct {
	// Instructions are those of warps, as the PTX has them.
	Instructions int
	// Products is the FLOP of tensor cores, Flops that of lanes in float32; a fused multiply-add is two.
	Products, Flops int
	// Special is approximations, divisions and roots of lanes.
	Special int
	// Read and Written are bytes of global memory, by allocation.
	Read, Written map[driver.Pointer]int
}

// executed is how often warps, and lanes of them, executed an instruction.
type executed struct{ warps, lanes int }

// count notes that a warp comes to an instruction, and its lanes m execute it.
func (b *block) count(pc int, m uint32) {
	b.executed[pc].warps++
	b.executed[pc].lanes += bits.OnesCount32(m)
}

// Counts is what the last launch did, with Options.Count.
func (vm *VM) Counts() Counts { return vm.counts }

// newCounts adds up what the instructions of a launch did.
func (vm *VM) newCounts(b *block) Counts {
	c := Counts{Read: map[driver.Pointer]int{}, Written: map[driver.Pointer]int{}}
	for pc, n := range b.executed {
		products, flops, special := operations(b.kernel.code[pc].op)
		c.Instructions += n.warps
		c.Products += n.warps * products
		c.Flops += n.lanes * flops
		c.Special += n.lanes * special
	}
	for _, r := range vm.heap.regions {
		if r.read > 0 {
			c.Read[driver.Pointer(r.base)] = r.read
		}
		if r.written > 0 {
			c.Written[driver.Pointer(r.base)] = r.written
		}
		r.read, r.written = 0, 0
	}
	return c
}

// operations is what an instruction does: the FLOP of a warp's tensor cores, those of a lane, and 1 if it is special.
func operations(op string) (products, flops, special int) {
	family, rest, _ := strings.Cut(op, ".")
	switch {
	case family == "mma":
		return 2 * 16 * 8 * 16, 0, 0
	case strings.HasPrefix(op, "wgmma.mma_async.sync.aligned.m64n"):
		columns, _, _ := strings.Cut(strings.TrimPrefix(op, "wgmma.mma_async.sync.aligned.m64n"), "k16")
		n, _ := strconv.Atoi(columns) // it was decoded
		return 2 * 64 * n * 16 / 4, 0, 0
	case !strings.HasSuffix(rest, "f32"):
		return 0, 0, 0
	}
	switch family {
	case "fma":
		return 0, 2, 0
	case "add", "sub", "mul":
		return 0, 1, 0
	case "div", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh":
		return 0, 1, 1
	}
	return 0, 0, 0
}
