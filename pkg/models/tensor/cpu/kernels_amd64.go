package cpu

import (
	"sync"

	"golang.org/x/sys/cpu"
)

//go:generate go run ../../../../integration/tools/kernelgen ../../../..

// kernelSets returns what this processor runs, the fastest first.
var kernelSets = sync.OnceValue(func() []*kernelSet {
	sets := []*kernelSet{&goKernels}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		sets = append([]*kernelSet{&avx2Kernels}, sets...)
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL {
			sets = append([]*kernelSet{&avx512Kernels}, sets...)
		}
	}
	return sets
})

// avx2Kernels and avx512Kernels are assembly (stubs_amd64.go), but for the rest of a few.
var avx2Kernels = kernelSet{
	name:       KernelsAVX2,
	tileRows:   6,
	tileCols:   1,
	tile:       tileAVX2,
	tileHalf:   tileHalfAVX2,
	peak:       peakAVX2,
	peakFlops:  12 * 8 * 2,
	maxOf:      maxOfAVX2,
	expSum:     expSumAVX2,
	sum64:      sum64AVX2,
	sumSq64:    sumSq64AVX2,
	silu:       siluAVX2,
	gelu:       geluAVX2,
	siluMul:    siluMulAVX2,
	add:        addAVX2,
	mul:        mulAVX2,
	scale:      scaleAVX2,
	gate:       gateAVX2,
	normMod:    normModAVX2,
	scaleNorm:  scaleNormAVX2,
	ropePairs:  ropePairsAMD64,
	ropeHalves: ropeHalvesAVX2,
	patchIn:    patchInAVX2,
	patchOut:   patchOutAVX2,
	packPanel:  packPanelAMD64,
}

// avx512Kernels keeps the AVX2 forms of what wider vectors do not help.
var avx512Kernels = kernelSet{
	name:       KernelsAVX512,
	tileRows:   12,
	tileCols:   2,
	tile:       tileAVX512,
	tileHalf:   tileHalfAVX512,
	peak:       peakAVX512,
	peakFlops:  12 * 16 * 2,
	maxOf:      maxOfAVX512,
	expSum:     expSumAVX512,
	sum64:      sum64AVX2,
	sumSq64:    sumSq64AVX2,
	silu:       siluAVX512,
	gelu:       geluAVX512,
	siluMul:    siluMulAVX512,
	add:        addAVX512,
	mul:        mulAVX512,
	scale:      scaleAVX512,
	gate:       gateAVX512,
	normMod:    normModAVX512,
	scaleNorm:  scaleNormAVX512,
	ropePairs:  ropePairsAMD64,
	ropeHalves: ropeHalvesAVX2,
	patchIn:    patchInAVX512,
	patchOut:   patchOutAVX512,
	packPanel:  packPanelAMD64,
}

// scaleNormAVX512 takes eight groups of whole vectors at a time, and leaves others to AVX2.
func scaleNormAVX512(dst, x, w []float32, n, eps, floor, num float64) {
	if eight := 8 * len(w); len(w)%panelCols == 0 && len(x) >= eight {
		whole := len(x) / eight * eight
		scaleNorm8AVX512(dst[:whole], x[:whole], w, n, eps, floor, num)
		dst, x = dst[whole:], x[whole:]
	}
	scaleNormAVX2(dst, x, w, n, eps, floor, num)
}

// ropePairsAMD64 leaves the last pairs, fewer than a vector, to Go.
func ropePairsAMD64(dst, x, cos, sin []float32) {
	ropePairsAVX2(dst, x, cos, sin)
	if n := len(cos) &^ 3; n < len(cos) {
		goRopePairs(dst[2*n:], x[2*n:], cos[n:], sin[n:])
	}
}

// packPanelAMD64 is packPanel by AVX2: it writes 16 rows of equal length as a panel of 16 columns,
// eight by eight. It leaves the last columns, fewer than a vector, to Go.
func packPanelAMD64(panel []float32, rows *[panelCols][]float32) {
	n := len(rows[0]) / 8
	if n > 0 {
		for h := range 2 {
			var x [8]*float32
			for i := range x {
				x[i] = &rows[8*h+i][0]
			}
			transposeAVX2(&panel[8*h], &x, n)
		}
	}
	for r, row := range rows {
		for p := 8 * n; p < len(row); p++ {
			panel[p*panelCols+r] = row[p]
		}
	}
}
