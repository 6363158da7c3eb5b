package cpu

import (
	"fmt"
	"slices"
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

// Kernels returns the set in use.
func (c *CPU) Kernels() Kernels { return c.k.name }

// Threads returns the number of threads an operation may use.
func (c *CPU) Threads() int { return c.pool.Threads() }

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
