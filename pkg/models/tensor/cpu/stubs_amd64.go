package cpu

// Implementations in tile_amd64.s and rows_amd64.s; their meaning is at kernelSet.

//go:noescape
func tileAVX2(t *tile)

//go:noescape
func tileHalfAVX2(t *tile)

//go:noescape
func peakAVX2(n int)

//go:noescape
func tileAVX512(t *tile)

//go:noescape
func tileHalfAVX512(t *tile)

//go:noescape
func peakAVX512(n int)

//go:noescape
func siluAVX2(dst, x []float32)

//go:noescape
func geluAVX2(dst, x []float32)

//go:noescape
func siluMulAVX2(dst, x, y []float32)

//go:noescape
func expSumAVX2(x []float32, m, scale float32) (ret float32)

//go:noescape
func maxOfAVX2(x []float32) (ret float32)

//go:noescape
func addAVX2(dst, x, y []float32)

//go:noescape
func mulAVX2(dst, x, y []float32)

//go:noescape
func scaleAVX2(dst, x []float32, a float32)

//go:noescape
func gateAVX2(dst, g, x, y []float32)

//go:noescape
func normModAVX2(dst, x, scale, shift []float32, mean, rstd float32)

//go:noescape
func siluAVX512(dst, x []float32)

//go:noescape
func geluAVX512(dst, x []float32)

//go:noescape
func siluMulAVX512(dst, x, y []float32)

//go:noescape
func expSumAVX512(x []float32, m, scale float32) (ret float32)

//go:noescape
func maxOfAVX512(x []float32) (ret float32)

//go:noescape
func addAVX512(dst, x, y []float32)

//go:noescape
func mulAVX512(dst, x, y []float32)

//go:noescape
func scaleAVX512(dst, x []float32, a float32)

//go:noescape
func gateAVX512(dst, g, x, y []float32)

//go:noescape
func normModAVX512(dst, x, scale, shift []float32, mean, rstd float32)

//go:noescape
func sum64AVX2(x []float32) (ret float64)

//go:noescape
func sumSq64AVX2(x []float32, mean float64) (ret float64)

//go:noescape
func scaleNormAVX2(dst, x, w []float32, n, eps, floor, num float64)

//go:noescape
func ropePairsAVX2(dst, x, cos, sin []float32)

//go:noescape
func ropeHalvesAVX2(dst, x, cos, sin []float32)

//go:noescape
func transposeAVX2(dst *float32, x *[8]*float32, blocks int)
