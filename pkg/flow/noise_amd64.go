package flow

import "golang.org/x/sys/cpu"

// Implementations in noise_amd64.s, which kernelgen writes. They fill dst, of whole vectors, with what Normal draws.

//go:noescape
func normalAVX2(dst []float32, seed uint64, step, stream uint32)

//go:noescape
func normalAVX512(dst []float32, seed uint64, step, stream uint32)

// normalKernel is one of them, with the elements of a vector of blocks.
type normalKernel struct {
	fill   func(dst []float32, seed uint64, step, stream uint32)
	vector int
}

// normalKernels are those that this processor runs, the fastest first.
var normalKernels = func() (list []normalKernel) {
	if cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL {
		list = append(list, normalKernel{normalAVX512, 32})
	}
	if cpu.X86.HasAVX2 {
		list = append(list, normalKernel{normalAVX2, 16})
	}
	return list
}()

// fillNormal fills the beginning of dst by assembly and returns its length, a multiple of 4.
func fillNormal(dst []float32, seed uint64, step, stream uint32) int {
	if len(normalKernels) == 0 {
		return 0
	}
	k := normalKernels[0]
	n := len(dst) - len(dst)%k.vector
	k.fill(dst[:n], seed, step, stream)
	return n
}
