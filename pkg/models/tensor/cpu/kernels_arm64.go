package cpu

import (
	"math"
	"sync"
)

// kernelSets returns what every arm64 processor runs, the fastest first.
var kernelSets = sync.OnceValue(func() []*kernelSet {
	return []*kernelSet{&neonKernels, &goKernels}
})

var neonKernels = kernelSet{
	name:       KernelsNEON,
	tileRows:   6,
	tileCols:   1,
	tile:       tileNEON,
	peak:       peakNEON,
	peakFlops:  24 * 4 * 2,
	maxOf:      neonMaxOf,
	expSum:     neonExpSum,
	sum64:      goSum64,
	sumSq64:    goSumSq64,
	silu:       neonSiLU,
	gelu:       neonGELU,
	siluMul:    neonSiLUMul,
	add:        neonAdd,
	mul:        neonMul,
	scale:      neonScale,
	gate:       neonGate,
	normMod:    neonNormMod,
	scaleNorm:  goScaleNorm,
	ropePairs:  goRopePairs,
	ropeHalves: goRopeHalves,
	patchIn:    goPatchIn,
	patchOut:   goPatchOut,
	packPanel:  goPackPanel,
}

// The functions called neon do the fours by assembly (stubs_arm64.go), the rest in Go; their contracts are those of
// kernelSet. Of the assembly, expSumNEON returns the 16 partial sums, and maxOfNEON raises the 4 partial maxima.

// quads is how many of n elements the assembly does.
func quads(n int) int { return n &^ 3 }

func neonMaxOf(x []float32) float32 {
	m := float32(math.Inf(-1))
	lanes := [4]float32{m, m, m, m}
	maxOfNEON(x, &lanes)
	return max(goMaxOf(lanes[:]), goMaxOf(x[quads(len(x)):]))
}

// neonExpSum is the kernel expSum by NEON: it replaces each x[i] by exp((x[i]-m)*scale) and returns
// their sum, with the bits of goExpSum. It leaves the last elements, fewer than a vector, to Go.
func neonExpSum(x []float32, m, scale float32) float32 {
	var s [lanes]float32
	expSumNEON(x, m, scale, &s)
	for i := quads(len(x)); i < len(x); i++ {
		x[i] = exp32(float32((x[i] - m) * scale))
		s[i%lanes] += x[i]
	}
	return sumLanes32(&s)
}

func neonSiLU(dst, x []float32) {
	siluNEON(dst, x)
	n := quads(len(x))
	goSiLU(dst[n:], x[n:])
}

func neonGELU(dst, x []float32) {
	geluNEON(dst, x)
	n := quads(len(x))
	goGELU(dst[n:], x[n:])
}

func neonSiLUMul(dst, x, y []float32) {
	siluMulNEON(dst, x, y)
	n := quads(len(x))
	goSiLUMul(dst[n:], x[n:], y[n:])
}

func neonAdd(dst, x, y []float32) {
	addNEON(dst, x, y)
	n := quads(len(x))
	goAdd(dst[n:], x[n:], y[n:])
}

func neonMul(dst, x, y []float32) {
	mulNEON(dst, x, y)
	n := quads(len(x))
	goMul(dst[n:], x[n:], y[n:])
}

func neonScale(dst, x []float32, a float32) {
	scaleNEON(dst, x, a)
	n := quads(len(x))
	goScale(dst[n:], x[n:], a)
}

func neonGate(dst, g, x, y []float32) {
	gateNEON(dst, g, x, y)
	n := quads(len(g))
	goGate(dst[n:], g[n:], x[n:], y[n:])
}

func neonNormMod(dst, x, scale, shift []float32, mean, rstd float32) {
	normModNEON(dst, x, scale, shift, mean, rstd)
	n := quads(len(x))
	goNormMod(dst[n:], x[n:], scale[n:], shift[n:], mean, rstd)
}
