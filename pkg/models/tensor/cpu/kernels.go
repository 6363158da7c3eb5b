package cpu

// maxTileRows is the most rows that any tile kernel takes.
const maxTileRows = 12

// kernelSet is one implementation of the inner loops. Slices of one call have equal
// lengths, any length, unless said otherwise; dst may be an input.
type kernelSet struct {
	name     Kernels
	tileRows int // most rows of a tile, at most maxTileRows
	tileCols int // most panels of a tile: 1 or 2

	// tile computes a result tile, see goTile.
	tile func(t *tile)
	// tileHalf is tile where b is bf16; nil where there is none.
	tileHalf func(t *tile)

	// peak runs n rounds of peakFlops independent operations (a multiply-add is two);
	// nil where there is no assembly.
	peak      func(n int)
	peakFlops int

	// maxOf returns the largest element, NaN excluded; len(x) >= 1.
	maxOf func(x []float32) float32
	// expSum sets x[i] = exp((x[i]-m)*scale) and returns their sum.
	expSum func(x []float32, m, scale float32) float32
	// sum64 returns the sum of x in float64.
	sum64 func(x []float32) float64
	// sumSq64 returns the sum of (x[i]-mean)^2 in float64.
	sumSq64 func(x []float32, mean float64) float64

	silu func(dst, x []float32)
	gelu func(dst, x []float32)
	// siluMul sets dst = silu(x)*y.
	siluMul func(dst, x, y []float32)

	add func(dst, x, y []float32)
	mul func(dst, x, y []float32)
	// scale sets dst = x*a.
	scale func(dst, x []float32, a float32)
	// gate sets dst = fma(g, x, y).
	gate func(dst, g, x, y []float32)
	// normMod sets dst = fma((x-mean)*rstd, 1+scale, shift).
	normMod func(dst, x, scale, shift []float32, mean, rstd float32)
	// scaleNorm sets, per group of len(w) elements, dst = (x*a)*w with
	// a = num / max(sqrt(sum of x^2 / n + eps), floor).
	scaleNorm func(dst, x, w []float32, n, eps, floor, num float64)
	// ropePairs rotates the pairs (2i, 2i+1) by the angle with cos[i], sin[i];
	// len(cos) = len(sin) = len(x)/2.
	ropePairs func(dst, x, cos, sin []float32)
	// ropeHalves rotates the pairs (i, i+n/2).
	ropeHalves func(dst, x, cos, sin []float32)

	// patchIn and patchOut are the transforms of convolutions by patches, see goPatchIn.
	patchIn  func(t *patches)
	patchOut func(t *patches)

	// packPanel sets panel[p*16+r] = rows[r][p]; all rows are equally long.
	packPanel func(panel []float32, rows *[panelCols][]float32)
}

// tile is the argument of a tile kernel: c [rows, 16*panels] (row stride ldc)
// continues the products of a [rows, k] (row stride lda) and panels of b, each k
// rows of 16, bstride apart. Pointers, since the assembly reads the struct; strides
// count floats. The field order is known to the assembly.
type tile struct {
	a       *float32 // 0
	lda     int      // 8
	b       *float32 // 16
	bstride int      // 24
	c       *float32 // 32
	ldc     int      // 40
	k       int      // 48
	bias    *float32 // 56, panels*16 elements, for tileBias
	rows    int      // 64, 1 <= rows <= tileRows
	panels  int      // 72, 1 <= panels <= tileCols
	init    int      // 80
}

// What an accumulator starts from.
const (
	tileZero = iota // 0
	tileLoad        // the present c: the chain goes on
	tileBias        // the bias of its column
)
