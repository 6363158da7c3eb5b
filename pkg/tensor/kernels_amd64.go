package tensor

import (
	"sync"

	"golang.org/x/sys/cpu"
)

//go:generate go run ./internal/kernelgen .

//go:noescape
func tileAVX2(t *tile)

//go:noescape
func tileAVX512(t *tile)

//go:noescape
func peakAVX2(n int)

//go:noescape
func peakAVX512(n int)

// kernelSets returns what this processor runs, the fastest first.
var kernelSets = sync.OnceValue(func() []*kernelSet {
	sets := []*kernelSet{&goKernels}
	if !cpu.X86.HasAVX2 || !cpu.X86.HasFMA {
		return sets
	}
	avx2 := goKernels
	avx2.name, avx2.tile, avx2.tileRows, avx2.tileCols = KernelsAVX2, tileAVX2, 6, 1
	avx2.peak, avx2.peakFlops = peakAVX2, 12*8*2
	sets = append([]*kernelSet{&avx2}, sets...)
	if cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL {
		avx512 := avx2
		avx512.name, avx512.tile, avx512.tileRows, avx512.tileCols = KernelsAVX512, tileAVX512, 12, 2
		avx512.peak, avx512.peakFlops = peakAVX512, 12*16*2
		sets = append([]*kernelSet{&avx512}, sets...)
	}
	return sets
})
