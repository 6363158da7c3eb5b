package cpu

import (
	"fmt"

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

// PackedConv is a packed convolution filter.
type PackedConv struct {
	KH, KW int
	In     int // channels of the input
	Out    int // channels of the output
	w      *Packed
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
	return &PackedConv{KH: kh, KW: kw, In: in, Out: out, w: Pack(t, out, in*taps)}
}

// Size is height and width of the kernel.
func (w *PackedConv) Size() (kh, kw int) { return w.KH, w.KW }

// Channels are those of the input and of the output.
func (w *PackedConv) Channels() (in, out int) { return w.In, w.Out }

// Bytes returns the memory held.
func (w *PackedConv) Bytes() int { return w.w.Bytes() }

// convTask: a part is a band of output rows.
//
// The input is copied once with its border of zeros. Then the KW*In inputs of one
// output pixel and one kernel row ky lie side by side, and those of the next pixel
// start Stride*In later: a matrix with overlapping rows, which the tile kernels read
// as it is. The chain of an output element goes on from ky to ky.
type convTask struct {
	c            *CPU
	dst          Image
	pad          []float32
	padH, padW   int
	w            *PackedConv
	e            Epilogue
	stride, step int
}

// Conv2D computes dst[n,y,x,o] = sum over ky, kx, i of
// x[n, y*Stride+ky-Top, x*Stride+kx-Left, i] w[o,i,ky,kx], with an epilogue over the
// rows of dst.Matrix(). dst must not overlap x; the residual must not overlap dst.
func (c *CPU) Conv2D(dst, x Image, w *PackedConv, v tensor.Conv, e Epilogue) {
	oh, ow := v.OutSize(w.KH, w.KW, x.H, x.W)
	if x.C != w.In || dst.N != x.N || dst.H != oh || dst.W != ow || dst.C != w.Out || oh < 1 || ow < 1 ||
		min(v.Stride, v.Top, v.Left, v.Bottom, v.Right) < 0 {
		panic(fmt.Sprintf("tensor: convolution %+v of %d x %d x %d x %d by %d x %d x %d x %d to %d x %d x %d x %d",
			v, x.N, x.H, x.W, x.C, w.Out, w.In, w.KH, w.KW, dst.N, dst.H, dst.W, dst.C))
	}
	rows := dst.N * oh * ow
	dst.Matrix().checkView("convolution", "dst")
	x.Matrix().checkView("convolution", "x")
	e.check(rows, w.Out)
	if rows == 0 {
		return
	}
	t := &c.conv
	*t = convTask{
		c: c, dst: dst, w: w, e: e, stride: max(1, v.Stride), padH: x.H + v.Top + v.Bottom,
		padW: x.W + v.Left + v.Right,
	}
	if t.padH == x.H && t.padW == x.W {
		t.pad = x.Data
	} else {
		t.pad = c.padding.floats(x.N * t.padH * t.padW * x.C)
		padImage(t.pad, x, v, t.padH, t.padW)
	}
	threads := c.threadsFor(rows * w.Out * w.w.k)
	t.step = max(1, min(8, dst.N*oh/(2*threads)))
	c.run(t, (dst.N*oh+t.step-1)/t.step, threads)
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
	kern, w, in := t.c.k, t.w, t.w.In
	row0 := (n*t.dst.H + y) * t.dst.W // of dst.Matrix()
	out := t.dst.Data[row0*w.Out : (row0+t.dst.W)*w.Out]
	a := &s.tile
	for j := 0; j < w.Out; {
		a.panels = min(kern.tileCols, panels(w.Out-j))
		cols := min(a.panels*panelCols, w.Out-j)
		for ky := range w.KH {
			src := t.pad[(n*t.padH+y*t.stride+ky)*t.padW*in:]
			a.lda, a.k = t.stride*in, w.KW*in
			a.b, a.bstride = &w.w.data[j/panelCols*panelCols*w.w.k+ky*w.KW*in*panelCols], panelCols*w.w.k
			a.init = tileZero
			if ky > 0 {
				a.init = tileLoad
			} else if t.e.Bias != nil {
				s.setBias(t.e.Bias[j : j+cols])
			}
			for x := 0; x < t.dst.W; {
				a.rows = tileHeight(t.dst.W-x, kern.tileRows)
				a.a = &src[x*a.lda]
				s.runTile(kern.tile, out[x*w.Out+j:], w.Out, cols)
				x += a.rows
			}
		}
		j += cols
	}
	if t.e.plain() {
		return
	}
	y0 := NewMatrix(out, t.dst.W, w.Out)
	t.e.applyTo(kern, y0, y0, row0, 0)
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
