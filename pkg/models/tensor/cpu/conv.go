package cpu

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Image is a dense batch of images, channels last: element (n, y, x, c) is
// Data[((n*H+y)*W+x)*C+c].
type Image struct {
	Data       []float32
	N, H, W, C int
}

// NewImage views the first n*h*w*c elements of data.
func NewImage(data []float32, n, h, w, c int) Image {
	if n < 0 || h < 0 || w < 0 || c < 0 || len(data) < n*h*w*c {
		panic(fmt.Sprintf("tensor: image of %d x %d x %d x %d over %d elements", n, h, w, c, len(data)))
	}
	return Image{Data: data[:n*h*w*c], N: n, H: h, W: w, C: c}
}

// Matrix views the image as [N*H*W, C], one row a pixel. A 1x1 convolution is Linear
// on it, norms over channels and operations on elements apply to it directly.
func (m Image) Matrix() Matrix { return NewMatrix(m.Data, m.N*m.H*m.W, m.C) }

// PackedConv is a packed convolution filter, for its own form of Conv2D, and for others from the first time that they
// are used on.
type PackedConv struct {
	KH, KW int
	In     int // channels of the input
	Out    int // channels of the output
	direct [1]*Packed

	patches, doubled, beside packedForm
}

// packedForm is a filter in another form; its parts are what tiles multiply by.
type packedForm struct {
	once  sync.Once
	parts []*Packed
	bytes atomic.Int64
}

// take returns the form, which pack makes of the filter w [out, kh, kw, in] when it is first used.
func (f *packedForm) take(w *PackedConv, pack func(w *PackedConv, taps []float32) []*Packed) []*Packed {
	f.once.Do(func() {
		taps := make([]float32, w.direct[0].n*w.direct[0].k)
		w.direct[0].Unpack(taps)
		f.parts = pack(w, taps)
		for _, p := range f.parts {
			f.bytes.Add(int64(p.Bytes()))
		}
	})
	return f.parts
}

// PackConv packs w [out, in, kh, kw], the layout of a torch Conv2d weight, for Conv2D, once when a
// model is opened. The reduction runs over (ky, kx, in). A w of another length than the shape
// panics.
func PackConv(w []float32, out, in, kh, kw int) *PackedConv {
	if out <= 0 || in <= 0 || kh <= 0 || kw <= 0 || len(w) != out*in*kh*kw {
		panic(fmt.Sprintf("tensor: convolution weight of %d elements, want %d x %d x %d x %d", len(w), out, in, kh, kw))
	}
	t := make([]float32, len(w))
	taps := kh * kw
	for o := range out {
		for i := range in {
			for p := range taps {
				t[(o*taps+p)*in+i] = w[(o*in+i)*taps+p]
			}
		}
	}
	return &PackedConv{KH: kh, KW: kw, In: in, Out: out, direct: [1]*Packed{Pack(t, out, in*taps)}}
}

// Size is height and width of the kernel.
func (w *PackedConv) Size() (kh, kw int) { return w.KH, w.KW }

// Channels are those of the input and of the output.
func (w *PackedConv) Channels() (in, out int) { return w.In, w.Out }

// Bytes returns the memory held: more when other forms have been used.
func (w *PackedConv) Bytes() int {
	return w.direct[0].Bytes() + int(w.patches.bytes.Load()+w.doubled.bytes.Load()+w.beside.bytes.Load())
}

// packDoubled packs a 3x3 filter for an image that is doubled first: an output of one parity sees 2x2 pixels of the
// image before, by the sums of the taps that fall on them. Part 2a+b is for odd rows if a is 1, odd columns if b is.
// Sums are rounded once.
func packDoubled(w *PackedConv, taps []float32) []*Packed {
	at := [2][3]int{{0, 1, 1}, {0, 0, 1}} // where tap k of an even and of an odd pixel looks
	var parts []*Packed
	for a := range 2 {
		for b := range 2 {
			sums := make([]float64, w.Out*4*w.In)
			for i, v := range taps {
				o, ky, kx, ch := i/(9*w.In), i/(3*w.In)%3, i/w.In%3, i%w.In
				sums[((2*o+at[a][ky])*2+at[b][kx])*w.In+ch] += float64(v)
			}
			parts = append(parts, Pack(rounded(sums), w.Out, 4*w.In))
		}
	}
	return parts
}

// packBeside packs a filter of few outputs for pixels side by side, which fill a panel together: column p*Out+o is
// output o of pixel p. What a pixel does not see has weight 0, so its chain has the terms of its own in their order.
func packBeside(w *PackedConv, taps []float32) []*Packed {
	n := panelCols / w.Out
	row := (w.KW + n - 1) * w.In
	wide := make([]float32, n*w.Out*w.KH*row)
	for p := range n {
		for o := range w.Out {
			for ky := range w.KH {
				copy(wide[((p*w.Out+o)*w.KH+ky)*row+p*w.In:], taps[(o*w.KH+ky)*w.KW*w.In:(o*w.KH+ky+1)*w.KW*w.In])
			}
		}
	}
	return []*Packed{Pack(wide, n*w.Out, w.KH*row)}
}

func rounded(x []float64) []float32 {
	y := make([]float32, len(x))
	for i, v := range x {
		y[i] = float32(v)
	}
	return y
}

// convTask: a part is a band of output rows.
//
// The input is copied once with its border of zeros. Then the KW*In inputs of one
// output pixel and one kernel row ky lie side by side, and those of the next pixel
// start Stride*In later: a matrix with overlapping rows, which the tile kernels read
// as it is. The chain of an output element goes on from ky to ky.
type convTask struct {
	c          *CPU
	dst        Image
	pad        []float32
	padH, padW int
	in         int
	e          Epilogue
	stride     int
	step       int
	kh, kw     int       // of w
	w          []*Packed // one, or the four of a doubled image
	times      int       // 2 if the image is doubled, else 1
	beside     int       // pixels of a row of a product
}

// Conv2D computes dst[n,y,x,o] = sum over ky, kx, i of
// x[n, y*Stride+ky-Top, x*Stride+kx-Left, i] w[o,i,ky,kx], with an epilogue over the
// rows of dst.Matrix(). dst must not overlap x; the residual must not overlap dst.
// 3x3 filters of stride 1 and whole panels of channels go by patches (see patchTask), all others by one chain for each
// element.
func (c *CPU) Conv2D(dst, x Image, w *PackedConv, v tensor.Conv, e Epilogue) {
	checkConv(dst, x, 1, w, v, &e)
	switch {
	case dst.N == 0:
	case v.Stride <= 1 && w.KH == 3 && w.KW == 3 && w.In%panelCols == 0 && w.Out%panelCols == 0:
		c.convolvePatches(dst, x, w, v, e)
	case v.Stride <= 1 && w.Out <= panelCols/2:
		c.convolve(convTask{
			dst: dst, e: e, kh: w.KH, kw: w.KW + panelCols/w.Out - 1, w: w.beside.take(w, packBeside), times: 1,
			beside: panelCols / w.Out,
		}, x, v)
	default:
		c.convolve(convTask{dst: dst, e: e, kh: w.KH, kw: w.KW, w: w.direct[:], times: 1, beside: 1}, x, v)
	}
}

// DoubledConv2D is Upsample2, then Conv2D of a 3x3 filter with a border of one, without the larger image: 4/9 of the
// products.
func (c *CPU) DoubledConv2D(dst, x Image, w *PackedConv, e Epilogue) {
	if w.KH != 3 || w.KW != 3 {
		panic(fmt.Sprintf("tensor: convolution of a doubled image by %d x %d, want 3 x 3", w.KH, w.KW))
	}
	checkConv(dst, x, 2, w, tensor.SamePad(3), &e)
	if dst.N > 0 {
		c.convolve(convTask{
			dst: dst, e: e, kh: 2, kw: 2, w: w.doubled.take(w, packDoubled), times: 2, beside: 1,
		}, x, tensor.SamePad(3))
	}
}

// checkConv panics unless all shapes fit a convolution of x at so many times its size.
func checkConv(dst, x Image, times int, w *PackedConv, v tensor.Conv, e *Epilogue) {
	oh, ow := v.OutSize(w.KH, w.KW, times*x.H, times*x.W)
	if x.C != w.In || dst.N != x.N || dst.H != oh || dst.W != ow || dst.C != w.Out || oh < 1 || ow < 1 ||
		min(v.Stride, v.Top, v.Left, v.Bottom, v.Right) < 0 {
		panic(fmt.Sprintf("tensor: convolution %+v of %d x %d x %d x %d by %d x %d x %d x %d to %d x %d x %d x %d",
			v, x.N, x.H, x.W, x.C, w.Out, w.In, w.KH, w.KW, dst.N, dst.H, dst.W, dst.C))
	}
	dst.Matrix().checkView("convolution", "dst")
	x.Matrix().checkView("convolution", "x")
	e.check(dst.N*oh*ow, w.Out)
}

// convolve runs t over x, with zeros around it as v says.
func (c *CPU) convolve(how convTask, x Image, v tensor.Conv) {
	t := &c.conv
	*t = how
	t.c, t.in, t.stride, t.padH, t.padW = c, x.C, max(1, v.Stride), x.H+v.Top+v.Bottom, x.W+v.Left+v.Right
	if t.padH == x.H && t.padW == x.W && t.beside == 1 {
		t.pad = x.Data
	} else {
		// The last pixels side by side look beyond the last row.
		n := x.N * t.padH * t.padW * x.C
		t.pad = c.padding.floats(n + (t.beside-1)*x.C)
		clear(t.pad[n:])
		padImage(t.pad, x, v, t.padH, t.padW)
	}
	threads := c.threadsFor(t.dst.N * t.dst.H * t.dst.W * t.w[0].n * t.w[0].k / t.beside)
	t.step = max(1, min(8, t.dst.N*t.dst.H/(2*threads)))
	c.run(t, (t.dst.N*t.dst.H+t.step-1)/t.step, threads)
	*t = convTask{}
}

// padImage copies x [N, H, W, C] to pad [N, padH, padW, C] with zeros around each image as v says,
// so that Conv2D needs no test for edges.
func padImage(pad []float32, x Image, v tensor.Conv, padH, padW int) {
	row := padW * x.C
	for n := range x.N {
		p := pad[n*padH*row : (n+1)*padH*row]
		clear(p[:v.Top*row])
		clear(p[(v.Top+x.H)*row:])
		for y := range x.H {
			to := p[(v.Top+y)*row : (v.Top+y+1)*row]
			clear(to[:v.Left*x.C])
			copy(to[v.Left*x.C:], x.Data[(n*x.H+y)*x.W*x.C:][:x.W*x.C])
			clear(to[(v.Left+x.W)*x.C:])
		}
	}
}

func (t *convTask) part(i, slot int) {
	s := &t.c.slots[slot]
	for r := i * t.step; r < min((i+1)*t.step, t.dst.N*t.dst.H); r++ {
		t.computeRow(s, r/t.dst.H, r%t.dst.H)
	}
}

// computeRow computes output row y of image n, for all channels, and its epilogue, with scratch
// memory s. A part of Conv2D is a band of such rows.
func (t *convTask) computeRow(s *slot, n, y int) {
	row0 := (n*t.dst.H + y) * t.dst.W // of dst.Matrix()
	out := t.dst.Data[row0*t.dst.C : (row0+t.dst.W)*t.dst.C]
	odd := y % t.times
	for b := range t.times {
		first := (n*t.padH + y/t.times*t.stride + odd) * t.padW
		t.multiplyRow(s, out[b*t.dst.C:], t.pad[(first+b)*t.in:], t.w[odd*t.times+b])
	}
	if t.e.plain() {
		return
	}
	y0 := NewMatrix(out, t.dst.W, t.dst.C)
	t.e.applyTo(t.c.k, y0, y0, row0, 0)
}

// multiplyRow computes every times-th pixel of an output row, as many side by side as a row of the product has.
func (t *convTask) multiplyRow(s *slot, out, src []float32, w *Packed) {
	kern, a := t.c.k, &s.tile
	width := t.dst.W / t.times * t.dst.C // floats of the row that are written
	ldc := t.times * w.n
	for j := 0; j < w.n; {
		a.panels = min(kern.tileCols, panels(w.n-j))
		cols := min(a.panels*panelCols, w.n-j)
		for ky := range t.kh {
			a.lda, a.k = t.stride*t.beside*t.in, t.kw*t.in
			a.b, a.bstride = &w.data[j/panelCols*panelCols*w.k+ky*a.k*panelCols], panelCols*w.k
			a.init = tileZero
			if ky > 0 {
				a.init = tileLoad
			} else if t.e.Bias != nil {
				t.setBias(s, j, cols)
			}
			whole, rest := width/w.n, 0
			if t.beside > 1 {
				rest = width % w.n
			}
			for x := 0; x < whole; {
				a.rows = tileHeight(whole-x, kern.tileRows)
				a.a = &src[ky*t.padW*t.in+x*a.lda]
				s.runTile(kern.tile, out[x*ldc+j:], ldc, cols)
				x += a.rows
			}
			if rest > 0 {
				a.rows, a.a = 1, &src[ky*t.padW*t.in+whole*a.lda]
				s.runTile(kern.tile, out[whole*ldc:], ldc, rest)
			}
		}
		j += cols
	}
}

// setBias has the next tile start its sums from the bias of columns j to j+cols-1 of the product.
func (t *convTask) setBias(s *slot, j, cols int) {
	if t.beside == 1 {
		s.setBias(t.e.Bias[j : j+cols])
		return
	}
	for i := range cols {
		s.bias[i] = t.e.Bias[i%len(t.e.Bias)]
	}
	s.tile.init, s.tile.bias = tileBias, &s.bias[0]
}

// Upsample2 computes dst[n, y, x] = x[n, y/2, x/2]: nearest neighbour, twice the height and width,
// as decoders of latents need. Shapes that do not fit panic.
func (c *CPU) Upsample2(dst, x Image) {
	if dst.N != x.N || dst.H != 2*x.H || dst.W != 2*x.W || dst.C != x.C {
		panic(fmt.Sprintf("tensor: upsample %d x %d x %d x %d to %d x %d x %d x %d", x.N, x.H, x.W, x.C, dst.N, dst.H,
			dst.W, dst.C))
	}
	row := dst.W * dst.C
	for y := range x.N * x.H {
		src := x.Data[y*x.W*x.C : (y+1)*x.W*x.C]
		to := dst.Data[2*y*row : (2*y+2)*row]
		for p := range x.W {
			pixel := src[p*x.C : (p+1)*x.C]
			copy(to[2*p*x.C:], pixel)
			copy(to[(2*p+1)*x.C:], pixel)
		}
		copy(to[row:], to[:row])
	}
}
