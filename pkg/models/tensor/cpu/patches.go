package cpu

import (
	"unsafe"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Convolutions by patches: the minimal filtering algorithm F(2x2, 3x3) of Winograd (Lavin and Gray, arXiv 1509.09308).
// A patch of 4x4 pixels d and a filter g give 2x2 outputs by 16 products for each channel where a chain takes 36:
//
//	y = A [sum over channels of (G g G') . (B d B')] A'.
//
// All factors of A and B are 1 or -1. Its error against float64 is less than that of one chain, 1.6e-7 of the norm
// against 2.2e-7 for 16 channels, because sums are shorter. The larger F(4, 3), along a row or both ways, rounds two to
// five times as much.
const (
	patchOut  = 2            // pixels of a patch's output, in both directions
	patchIn   = patchOut + 2 // of its input
	patchTaps = patchIn * patchIn
)

// patchFilter is G.
var patchFilter = [patchIn][3]float64{{1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}}

// packPatches packs the transformed filter: part 4j+i is its row j and column i, [out, in], rounded once.
func packPatches(w *PackedConv, taps []float32) []*Packed {
	parts := make([]*Packed, patchTaps)
	for p := range parts {
		x := make([]float64, w.Out*w.In)
		for i := range x {
			for k := range 9 {
				g := patchFilter[p/patchIn][k/3] * patchFilter[p%patchIn][k%3]
				x[i] += g * float64(taps[(i/w.In*9+k)*w.In+i%w.In])
			}
		}
		parts[p] = Pack(rounded(x), w.Out, w.In)
	}
	return parts
}

// patches is the argument of the kernels patchIn and patchOut: n patches of a row, and patchTaps planes [n, channels].
// Channels are a multiple of 16. Strides count floats; the field order is known to the assembly.
type patches struct {
	src, dst *float32 // 0, 8
	bias     *float32 // 16, of patchOut
	plane    int      // 24, from one plane to the next
	stride   int      // 32, from one row of pixels to the next
	n        int      // 40
	channels int      // 48
}

// patchTask is a convolution by patches; a part is a run of them, in the order of rows.
type patchTask struct {
	c          *CPU
	dst        Image
	pad        []float32 // the image with zeros around it
	padH, padW int
	w          []*Packed
	e          Epilogue
	bias       []float32
	in         int // channels
	high, wide int // patches of an image
	step       int // patches of a part
}

// patchFloats is how many floats of a part stay in the first level cache.
const patchFloats = 6 << 10

// convolvePatches is Conv2D by patches. The caller has checked the shapes.
func (c *CPU) convolvePatches(dst, x Image, w *PackedConv, v tensor.Conv, e Epilogue) {
	t := &c.square
	*t = patchTask{
		c: c, dst: dst, w: w.patches.take(w, packPatches), e: e, bias: e.Bias, in: w.In,
		high: (dst.H + 1) / patchOut, wide: (dst.W + 1) / patchOut,
	}
	t.padH, t.padW = patchOut*t.high+2, patchOut*t.wide+2
	v.Bottom, v.Right = t.padH-x.H-v.Top, t.padW-x.W-v.Left
	t.pad = c.padding.floats(x.N * t.padH * t.padW * x.C)
	padImage(t.pad, x, v, t.padH, t.padW)
	if t.bias == nil {
		t.bias = c.zeros(w.Out)
	}
	all := dst.N * t.high * t.wide
	threads := c.threadsFor(all * patchTaps * w.In * w.Out)
	t.step = max(1, patchFloats/patchTaps/(w.In+w.Out)/maxTileRows) * maxTileRows
	if threads > 1 {
		t.step = min(t.step, max(maxTileRows, all/(2*threads)))
	}
	c.run(t, (all+t.step-1)/t.step, threads)
	*t = patchTask{}
}

// part implements task: it computes a run of patches and its epilogue.
func (t *patchTask) part(i, slot int) {
	kern, s, out := t.c.k, &t.c.slots[slot], t.dst.C
	a := &s.patches
	from := i * t.step
	n := min(t.step, t.dst.N*t.high*t.wide-from)
	floats := s.strip.floats(patchTaps*n*(t.in+out) + patchOut*patchOut*n*out)
	planes, sums := floats[:patchTaps*n*t.in], floats[patchTaps*n*t.in:patchTaps*n*(t.in+out)]
	for k := 0; k < n; {
		row, x := (from+k)/t.wide, (from+k)%t.wide
		*a = patches{
			src: &t.pad[((row/t.high*t.padH+row%t.high*patchOut)*t.padW+x*patchOut)*t.in], dst: &planes[k*t.in],
			plane: n * t.in, stride: t.padW * t.in, n: min(n-k, t.wide-x), channels: t.in,
		}
		kern.patchIn(a)
		k += a.n
	}
	t.multiply(s, planes, sums, n)
	for k := 0; k < n; {
		row, x := (from+k)/t.wide, (from+k)%t.wide
		*a = patches{
			src: &sums[k*out], bias: &t.bias[0], plane: n * out, n: min(n-k, t.wide-x), channels: out,
		}
		t.store(a, floats[patchTaps*n*(t.in+out):], row, x)
		k += a.n
	}
}

// multiply computes sums [patchTaps, n, out] of planes [patchTaps, n, in], each one chain over the channels.
func (t *patchTask) multiply(s *slot, planes, sums []float32, n int) {
	kern, a, out := t.c.k, &s.tile, t.dst.C
	a.lda, a.k, a.ldc, a.init = t.in, t.in, out, tileZero
	for p, w := range t.w {
		for j := 0; j < out; j += a.panels * panelCols {
			a.panels = min(kern.tileCols, panels(out-j))
			a.b, a.bstride = &w.data[j*w.k], panelCols*w.k
			for r := 0; r < n; r += a.rows {
				a.rows = tileHeight(n-r, kern.tileRows)
				a.a, a.c = &planes[(p*n+r)*t.in], &sums[(p*n+r)*out+j]
				kern.tile(a)
			}
		}
	}
}

// store transforms the sums of patches side by side, the first of which is number x of a row of patches, to pixels, and
// applies the epilogue. What sticks out of the image goes through a copy.
func (t *patchTask) store(a *patches, edge []float32, row, x int) {
	out := t.dst.C
	y := row % t.high * patchOut
	first := (row/t.high*t.dst.H+y)*t.dst.W + x*patchOut // pixel
	rows, cols := min(patchOut, t.dst.H-y), min(patchOut*a.n, t.dst.W-x*patchOut)
	if rows == patchOut && cols == patchOut*a.n {
		a.dst, a.stride = &t.dst.Data[first*out], t.dst.W*out
		t.c.k.patchOut(a)
	} else {
		a.dst, a.stride = &edge[0], patchOut*a.n*out
		t.c.k.patchOut(a)
		for r := range rows {
			copy(t.dst.Data[(first+r*t.dst.W)*out:][:cols*out], edge[r*a.stride:])
		}
	}
	if t.e.plain() {
		return
	}
	for r := range rows {
		at := first + r*t.dst.W
		y0 := t.dst.Matrix().SliceRows(at, at+cols)
		t.e.applyTo(t.c.k, y0, y0, at, 0)
	}
}

// goPatchIn is the plain Go form of the kernel patchIn: it transforms 4x4 pixels of a patch, both ways by B,
//
//	d0-d2, d1+d2, d2-d1, d1-d3,
//
// first over rows. Patches are two pixels apart.
func goPatchIn(t *patches) {
	c := t.channels
	src := unsafe.Slice(t.src, (patchIn-1)*t.stride+(patchOut*t.n+2)*c)
	dst := unsafe.Slice(t.dst, (patchTaps-1)*t.plane+t.n*c)
	for i := range t.n * c {
		d := src[i/c*patchOut*c+i%c:]
		var rows [patchIn][patchIn]float32
		for x := range patchIn {
			d0, d1, d2, d3 := d[x*c], d[t.stride+x*c], d[2*t.stride+x*c], d[3*t.stride+x*c]
			rows[0][x], rows[1][x], rows[2][x], rows[3][x] = d0-d2, d1+d2, d2-d1, d1-d3
		}
		for j, d := range rows {
			y := dst[patchIn*j*t.plane+i:]
			y[0], y[t.plane], y[2*t.plane], y[3*t.plane] = d[0]-d[2], d[1]+d[2], d[2]-d[1], d[1]-d[3]
		}
	}
}

// goPatchOut is the plain Go form of the kernel patchOut: it transforms 4x4 sums of a patch, both ways by A,
//
//	(m0+m1)+m2, (m1-m2)-m3,
//
// first over rows, and adds the bias.
func goPatchOut(t *patches) {
	c := t.channels
	src := unsafe.Slice(t.src, (patchTaps-1)*t.plane+t.n*c)
	dst := unsafe.Slice(t.dst, (patchOut-1)*t.stride+patchOut*t.n*c)
	bias := unsafe.Slice(t.bias, c)
	for i := range t.n * c {
		var rows [patchOut][patchIn]float32
		for x := range patchIn {
			m := src[x*t.plane+i:]
			m0, m1, m2, m3 := m[0], m[patchIn*t.plane], m[2*patchIn*t.plane], m[3*patchIn*t.plane]
			rows[0][x], rows[1][x] = (m0+m1)+m2, (m1-m2)-m3
		}
		for r, m := range rows {
			y := dst[r*t.stride+i/c*patchOut*c+i%c:]
			y[0], y[c] = ((m[0]+m[1])+m[2])+bias[i%c], ((m[1]-m[2])-m[3])+bias[i%c]
		}
	}
}
