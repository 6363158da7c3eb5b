package tensor

import "sync"

//go:noescape
func tileNEON(t *tile)

//go:noescape
func peakNEON(n int)

// kernelSets returns what every arm64 processor runs, the fastest first.
var kernelSets = sync.OnceValue(func() []*kernelSet {
	neon := goKernels
	neon.name, neon.tile, neon.tileRows, neon.tileCols = KernelsNEON, tileNEON, 6, 1
	neon.peak, neon.peakFlops = peakNEON, 24*4*2
	return []*kernelSet{&neon, &goKernels}
})
