package cpu

// Implementations in tile_arm64.s and rows_arm64.s; their meaning is at kernelSet,
// except that the kernels on rows leave out the last len%4 elements.

//go:noescape
func tileNEON(t *tile)

//go:noescape
func peakNEON(n int)

//go:noescape
func siluNEON(dst, x []float32)

//go:noescape
func siluMulNEON(dst, x, y []float32)

//go:noescape
func geluNEON(dst, x []float32)

// expSumNEON returns the 16 partial sums.
//
//go:noescape
func expSumNEON(x []float32, m, scale float32, lanes *[16]float32)

// maxOfNEON raises the 4 partial maxima.
//
//go:noescape
func maxOfNEON(x []float32, lanes *[4]float32)

//go:noescape
func addNEON(dst, x, y []float32)

//go:noescape
func mulNEON(dst, x, y []float32)

//go:noescape
func scaleNEON(dst, x []float32, a float32)

//go:noescape
func gateNEON(dst, g, x, y []float32)

//go:noescape
func normModNEON(dst, x, scale, shift []float32, mean, rstd float32)
