// Package cpu is the tensor.Device of the CPU, in float32: matrix products with packed
// weights, attention, norms, rotary embeddings, convolutions.
//
// Operations are methods of [CPU] and write to their first argument, dst. After the
// largest shape they allocate no more: temporary memory comes from the scratch of the
// CPU, memory for results from an [Arena]. Inputs are not modified, unless they may
// alias dst and do.
//
// # Bits
//
// A result depends only on the arguments: not on the number of threads, the other
// rows of a call, or the instruction set. This is because
//
//   - an element of a matrix product is one chain of fused multiply-adds over k in
//     ascending order, acc = fma(a[i,k], b[k,j], acc), starting from the bias or 0; 3x3
//     convolutions take such products of transformed pixels (see patches.go),
//   - a sum along a row (softmax, norms) goes to 16 lanes, lane l adding the
//     elements l, l+16, l+32, ... in ascending order, and the lanes are added
//     pairwise: l and l+8, then l and l+4, l and l+2, l and l+1,
//   - exp is one polynomial, and no other operation is fused unless its formula
//     here is written with fma.
//
// Norm statistics are accumulated in float64, everything else in float32. The
// plain Go kernels are the definition; the assembly ones give the same bits.
//
// # Misuse
//
// Shapes that do not fit are a programming error and panic with "tensor: ...". A sampler survives it: the sample fails.
package cpu

import (
	"fmt"
	"slices"
	"time"
)

// Kernels names a set of inner loops.
type Kernels string

// Kernel sets. All of them give the same bits; KernelsGo exists everywhere.
const (
	KernelsGo     Kernels = "go"     // plain Go, the definition, slow
	KernelsAVX2   Kernels = "avx2"   // amd64 with AVX2 and FMA
	KernelsAVX512 Kernels = "avx512" // amd64 with AVX-512 F, DQ and VL
	KernelsNEON   Kernels = "neon"   // arm64
)

// AvailableKernels lists the sets that run on this machine, the fastest first.
func AvailableKernels() []Kernels {
	var names []Kernels
	for _, k := range kernelSets() {
		names = append(names, k.name)
	}
	return names
}

// CPU runs operations. It owns scratch memory, so one goroutine uses it at a time;
// make one per goroutine, sharing a Pool. Split work over rows or samples by CPUs of
// their own rather than by threads where the matrices are small.
type CPU struct {
	pool *Pool
	k    *kernelSet
	b    batch

	slots   []slot
	packing scratch // packed operands of Attention
	padding scratch // padded image of Conv2D
	zero    []float32

	linear linearTask
	attn   attentionTask
	conv   convTask
	square patchTask
	each   rowTask
}

// slot is the scratch of one thread.
type slot struct {
	tile    tile
	patches patches
	edge    []float32 // a result tile that sticks out of dst
	bias    []float32 // the bias of the last panel, padded
	strip   scratch   // scores of a few query rows; patches of a convolution
	rows    [panelCols][]float32
}

// NewCPU returns a CPU with the fastest kernels. A nil pool is one thread.
func NewCPU(pool *Pool) *CPU {
	return newCPU(pool, kernelSets()[0])
}

// NewCPUWith returns a CPU with the named kernels, or an error where this machine
// does not have them.
func NewCPUWith(pool *Pool, name Kernels) (*CPU, error) {
	sets := kernelSets()
	i := slices.IndexFunc(sets, func(k *kernelSet) bool { return k.name == name })
	if i < 0 {
		return nil, fmt.Errorf("kernels %q: not on this machine, have %v", string(name), AvailableKernels())
	}
	return newCPU(pool, sets[i]), nil
}

func newCPU(pool *Pool, k *kernelSet) *CPU {
	c := &CPU{pool: pool, k: k, slots: make([]slot, pool.Threads())}
	for i := range c.slots {
		c.slots[i].edge = alignedFloats(maxTileRows * 2 * panelCols)
		c.slots[i].bias = alignedFloats(2 * panelCols)
	}
	return c
}

// ScratchBytes returns the scratch memory held, which grows to the largest shape seen.
func (c *CPU) ScratchBytes() int {
	n := len(c.packing.buf) + len(c.padding.buf) + len(c.zero)
	for i := range c.slots {
		n += len(c.slots[i].edge) + len(c.slots[i].bias) + len(c.slots[i].strip.buf)
	}
	return 4 * n
}

// threadWork is the work, in multiply-adds, that pays for waking one more thread: some
// 30 microseconds, waking takes about 5.
const threadWork = 1 << 22

// threadsFor returns how many threads work is worth.
func (c *CPU) threadsFor(work int) int {
	return max(1, min(c.pool.Threads(), 1+work/threadWork))
}

func (c *CPU) run(t task, parts, threads int) { c.pool.runTask(&c.b, t, parts, threads) }

// MeasurePeak returns the multiply-add peak of one core with c's instruction set in
// GFLOP/s (a multiply-add is two operations): the best of many short loops of
// independent multiply-adds within d, at least one. It is 0 for the plain Go kernels.
func (c *CPU) MeasurePeak(d time.Duration) float64 {
	if c.k.peak == nil {
		return 0
	}
	const rounds = 200_000 // about a millisecond, shorter than a scheduler's slice
	best := 0.0
	for start := time.Now(); ; {
		t := time.Now()
		c.k.peak(rounds)
		best = max(best, float64(rounds*c.k.peakFlops)/float64(time.Since(t).Nanoseconds()))
		if time.Since(start) >= d {
			return best
		}
	}
}
