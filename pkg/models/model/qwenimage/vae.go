package qwenimage

import (
	"fmt"
	"image"
	"math"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// autoencoder is AutoencoderKLQwenImage for single frames. The class also convolves over
// time, causally; the frames before the first are zeros. So for one frame only the last
// temporal slice of a filter matters, and convolutions only over time do nothing. Images are
// channels last.
type autoencoder struct {
	config  *vaeConfig
	mean    []float32 // [Z]
	std     []float32 // [Z]
	invStd  []float32 // [Z], rounded as in the pipeline
	decoder vaeDecoder
	encoder vaeEncoder
}

type vaeDecoder struct {
	postQuant nn.Linear
	in        nn.Conv
	mid       vaeMiddle
	ups       []vaeUp
	norm      tensor.Vector
	out       nn.Conv
}

// vaeUp is one level of the decoder; the last one does not resize.
type vaeUp struct {
	blocks []resBlock
	resize *nn.Conv // after upsampling; nil at the last level
}

type vaeEncoder struct {
	in    nn.Conv
	downs []vaeDown
	mid   vaeMiddle
	norm  tensor.Vector
	out   nn.Conv
	quant nn.Linear
}

// vaeDown is one level of the encoder.
type vaeDown struct {
	blocks []resBlock
	resize *nn.Conv
}

// resBlock is norm, SiLU, convolution, twice, around a shortcut.
type resBlock struct {
	norm1, norm2 tensor.Vector
	conv1, conv2 nn.Conv
	shortcut     nn.Linear // without weights if in equals out
	in, out      int
}

// vaeMiddle is residual block, attention over all pixels, residual block.
type vaeMiddle struct {
	first, second resBlock
	norm          tensor.Vector
	qkv, proj     nn.Linear
}

// loadResBlock reads a residual block of in to out channels.
func loadResBlock(l *nn.Loader, name string, in, out int) resBlock {
	b := resBlock{
		norm1: l.Vector(name+"norm1.gamma", in, 1, 1, 1),
		norm2: l.Vector(name+"norm2.gamma", out, 1, 1, 1),
		conv1: l.CausalConv(name+"conv1", out, in, 3),
		conv2: l.CausalConv(name+"conv2", out, out, 3),
		in:    in, out: out,
	}
	if in != out {
		b.shortcut = l.Pointwise(name+"conv_shortcut", out, in, 3)
	}
	return b
}

// loadMiddle reads the middle of the encoder or the decoder.
func loadMiddle(l *nn.Loader, name string, d int) vaeMiddle {
	return vaeMiddle{
		first:  loadResBlock(l, name+"resnets.0.", d, d),
		second: loadResBlock(l, name+"resnets.1.", d, d),
		norm:   l.Vector(name+"attentions.0.norm.gamma", d, 1, 1),
		qkv:    l.Pointwise(name+"attentions.0.to_qkv", 3*d, d, 2),
		proj:   l.Pointwise(name+"attentions.0.proj", d, d, 2),
	}
}

// expectUnused checks the convolution over time of a resampler, which a single frame does not use.
func expectUnused(l *nn.Loader, name string, out, in int) {
	l.Expect(name+".weight", out, in, 3, 1, 1)
	l.Expect(name+".bias", out)
}

func loadAutoencoder(l *nn.Loader, c *vaeConfig) *autoencoder {
	v := &autoencoder{config: c, decoder: loadDecoder(l, c), encoder: loadEncoder(l, c)}
	for i := range c.Latents {
		mean, std := float32(c.Mean[i]), float32(c.Std[i])
		v.mean, v.std, v.invStd = append(v.mean, mean), append(v.std, std), append(v.invStd, 1/std)
	}
	return v
}

// loadDecoder reads the decoder.
func loadDecoder(l *nn.Loader, c *vaeConfig) vaeDecoder {
	last := len(c.Mult) - 1
	top := c.Base * c.Mult[last]
	d := vaeDecoder{
		postQuant: l.Pointwise("post_quant_conv", c.Latents, c.Latents, 3),
		in:        l.CausalConv("decoder.conv_in", top, c.Latents, 3),
		mid:       loadMiddle(l, "decoder.mid_block.", top),
		ups:       make([]vaeUp, len(c.Mult)),
	}
	in := top
	for i := range d.ups {
		out := c.Base * c.Mult[last-i]
		name := fmt.Sprintf("decoder.up_blocks.%d.", i)
		for j := range c.ResBlocks + 1 {
			d.ups[i].blocks = append(d.ups[i].blocks, loadResBlock(l, fmt.Sprintf("%sresnets.%d.", name, j), in, out))
			in = out
		}
		if i == last {
			break
		}
		// Resizing halves the channels.
		d.ups[i].resize = new(l.Conv(name+"upsamplers.0.resample.1", out/2, out, 3))
		if c.Temporal[last-1-i] {
			expectUnused(l, name+"upsamplers.0.time_conv", 2*out, out)
		}
		in = out / 2
	}
	d.norm = l.Vector("decoder.norm_out.gamma", in, 1, 1, 1)
	d.out = l.CausalConv("decoder.conv_out", c.Channels, in, 3)
	return d
}

// loadEncoder reads the encoder.
func loadEncoder(l *nn.Loader, c *vaeConfig) vaeEncoder {
	e := vaeEncoder{in: l.CausalConv("encoder.conv_in", c.Base, c.Channels, 3), downs: make([]vaeDown, len(c.Mult))}
	in, index := c.Base, 0
	for i := range e.downs {
		out := c.Base * c.Mult[i]
		for range c.ResBlocks {
			e.downs[i].blocks = append(e.downs[i].blocks,
				loadResBlock(l, fmt.Sprintf("encoder.down_blocks.%d.", index), in, out))
			in = out
			index++
		}
		if i == len(e.downs)-1 {
			break
		}
		name := fmt.Sprintf("encoder.down_blocks.%d.", index)
		e.downs[i].resize = new(l.Conv(name+"resample.1", out, out, 3))
		if c.Temporal[i] {
			expectUnused(l, name+"time_conv", out, out)
		}
		index++
	}
	e.mid = loadMiddle(l, "encoder.mid_block.", in)
	e.norm = l.Vector("encoder.norm_out.gamma", in, 1, 1, 1)
	e.out = l.CausalConv("encoder.conv_out", 2*c.Latents, in, 3)
	e.quant = l.Pointwise("quant_conv", 2*c.Latents, 2*c.Latents, 3)
	return e
}

func (b *resBlock) bytes() int {
	return b.conv1.Bytes() + b.conv2.Bytes() + b.shortcut.Bytes() + nn.VectorBytes(b.norm1, b.norm2)
}

func (m *vaeMiddle) bytes() int {
	return m.first.bytes() + m.second.bytes() + m.qkv.Bytes() + m.proj.Bytes() + nn.VectorBytes(m.norm)
}

// bytes returns the memory of the weights.
func (v *autoencoder) bytes() int {
	d, e := &v.decoder, &v.encoder
	n := d.postQuant.Bytes() + d.in.Bytes() + d.mid.bytes() + d.out.Bytes() + nn.VectorBytes(d.norm)
	n += e.in.Bytes() + e.mid.bytes() + e.out.Bytes() + e.quant.Bytes() + nn.VectorBytes(e.norm)
	for _, u := range d.ups {
		n += u.resize.Bytes()
		for i := range u.blocks {
			n += u.blocks[i].bytes()
		}
	}
	for _, u := range e.downs {
		n += u.resize.Bytes()
		for i := range u.blocks {
			n += u.blocks[i].bytes()
		}
	}
	return n
}

// vaeNormEpsilon is the floor of the norm in torch's normalize.
const vaeNormEpsilon = 1e-12

// frames is the memory of a pass through the autoencoder; each block has room for the largest
// image of the pass. x and next alternate as input and output of the stages; y and z are
// inputs of convolutions.
type frames struct{ x, next, y, z, shortcut tensor.Block }

func newFrames(s tensor.Session, most int) *frames {
	return &frames{
		x: s.Block(most), next: s.Block(most), y: s.Factors(most), z: s.Factors(most),
		shortcut: s.Block(most),
	}
}

// forward writes the block's output to f.next, which becomes f.x.
func (b *resBlock) forward(s tensor.Session, f *frames, x tensor.Image) tensor.Image {
	out := f.next.Image(1, x.H, x.W, b.out)
	y := f.y.Image(1, x.H, x.W, b.in)
	z := f.z.Image(1, x.H, x.W, b.out)
	s.L2Norm(y.Matrix(), x.Matrix(), b.norm1, vaeNormEpsilon, tensor.SiLU)
	s.Conv2D(z, y, b.conv1.W, tensor.SamePad(3), tensor.Epilogue{Bias: b.conv1.Bias})
	s.L2Norm(z.Matrix(), z.Matrix(), b.norm2, vaeNormEpsilon, tensor.SiLU)
	shortcut := x.Matrix()
	if b.shortcut.W != nil {
		shortcut = f.shortcut.Matrix(x.H*x.W, b.out)
		b.shortcut.Apply(s, shortcut, x.Matrix(), tensor.Epilogue{})
	}
	s.Conv2D(out, z, b.conv2.W, tensor.SamePad(3), tensor.Epilogue{Bias: b.conv2.Bias, Residual: shortcut})
	f.x, f.next = f.next, f.x
	return out
}

// forward computes the middle in f and returns its output.
func (m *vaeMiddle) forward(s tensor.Session, f *frames, x tensor.Image) tensor.Image {
	x = m.first.forward(s, f, x)
	h, d := x.Matrix(), x.C
	y := tensor.NewMatrix(s, h.Rows, d)
	qkv := tensor.NewMatrix(s, h.Rows, 3*d)
	s.L2Norm(y, h, m.norm, vaeNormEpsilon, tensor.Identity)
	m.qkv.Apply(s, qkv, y, tensor.Epilogue{})
	s.Attention(y, qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d), tensor.Attention{Heads: 1})
	m.proj.Apply(s, h, y, tensor.Epilogue{Residual: h})
	return m.second.forward(s, f, x)
}

// convolve returns the convolution of x, with its bias. It is in f.next, the spare buffer, which becomes f.x; x must
// not lie in f.next.
func convolve(s tensor.Session, f *frames, c *nn.Conv, x tensor.Image, how tensor.Conv) tensor.Image {
	kh, kw := c.W.Size()
	_, channels := c.W.Channels()
	h, w := how.OutSize(kh, kw, x.H, x.W)
	out := f.next.Image(1, h, w, channels)
	s.Conv2D(out, x, c.W, how, tensor.Epilogue{Bias: c.Bias})
	f.x, f.next = f.next, f.x
	return out
}

// convolveDoubled is convolve of x at twice its height and width.
func convolveDoubled(s tensor.Session, f *frames, c *nn.Conv, x tensor.Image) tensor.Image {
	double, ok := s.(tensor.Doubler)
	if !ok {
		up := f.y.Image(1, 2*x.H, 2*x.W, x.C)
		s.Upsample2(up, x)
		return convolve(s, f, c, up, tensor.SamePad(3))
	}
	_, channels := c.W.Channels()
	out := f.next.Image(1, 2*x.H, 2*x.W, channels)
	double.DoubledConv2D(out, x, c.W, tensor.Epilogue{Bias: c.Bias})
	f.x, f.next = f.next, f.x
	return out
}

// decode turns packed latents [S, 4Z] of an image of height x width into pixels
// [height, width, 3] in [-1, 1].
func (v *autoencoder) decode(s tensor.Session, latents []float32, height, width int) []float32 {
	d := &v.decoder
	z := v.config.Latents
	lh, lw := height>>v.config.levels(), width>>v.config.levels()
	unpacked := make([]float32, lh*lw*z)
	for y := range lh {
		for x := range lw {
			px := unpacked[(y*lw+x)*z : (y*lw+x+1)*z]
			token := latents[(y/2*(lw/2)+x/2)*4*z:]
			for c := range px {
				px[c] = token[4*c+y%2*2+x%2]/v.invStd[c] + v.mean[c]
			}
		}
	}
	in, q := s.Block(len(unpacked)).Image(1, lh, lw, z), s.Block(len(unpacked)).Image(1, lh, lw, z)
	s.CopyIn(in.Matrix(), unpacked)
	d.postQuant.Apply(s, q.Matrix(), in.Matrix(), tensor.Epilogue{})

	f := newFrames(s, v.config.decodeElements(lh, lw))
	x := convolve(s, f, &d.in, q, tensor.SamePad(3))
	x = d.mid.forward(s, f, x)
	for i := range d.ups {
		for j := range d.ups[i].blocks {
			x = d.ups[i].blocks[j].forward(s, f, x)
		}
		if r := d.ups[i].resize; r != nil {
			x = convolveDoubled(s, f, r, x)
		}
	}
	s.L2Norm(x.Matrix(), x.Matrix(), d.norm, vaeNormEpsilon, tensor.SiLU)
	x = convolve(s, f, &d.out, x, tensor.SamePad(3))
	pixels := make([]float32, x.H*x.W*x.C)
	s.CopyOut(pixels, x.Matrix())
	for i, p := range pixels {
		pixels[i] = max(-1, min(1, p))
	}
	return pixels
}

// decodeElements returns the number of elements of the largest feature map in the decoding of a latent of lh x lw. At
// each level that is its widest block, or its output at twice the size, before the upsampler halves the channels.
func (c *vaeConfig) decodeElements(lh, lw int) int {
	last := c.levels()
	most, in := 0, c.Base*c.Mult[last]
	for i := range c.Mult {
		out := c.Base * c.Mult[last-i]
		most = max(most, (lh<<i)*(lw<<i)*max(in, out))
		if i < last {
			most = max(most, (lh<<(i+1))*(lw<<(i+1))*out)
			in = out / 2
		}
	}
	return most
}

// encode turns pixels [height, width, 3] in [-1, 1] into packed latents [S, 4Z], the mode
// of the posterior, normalized as the transformer sees them.
func (v *autoencoder) encode(s tensor.Session, latents, pixels []float32, height, width int) {
	e := &v.encoder
	f := newFrames(s, v.encodeElements(height, width))
	x := s.Block(len(pixels)).Image(1, height, width, 3)
	s.CopyIn(x.Matrix(), pixels)
	x = convolve(s, f, &e.in, x, tensor.SamePad(3))
	for i := range e.downs {
		for j := range e.downs[i].blocks {
			x = e.downs[i].blocks[j].forward(s, f, x)
		}
		if r := e.downs[i].resize; r != nil {
			x = convolve(s, f, r, x, tensor.Conv{Stride: 2, Bottom: 1, Right: 1})
		}
	}
	x = e.mid.forward(s, f, x)
	s.L2Norm(x.Matrix(), x.Matrix(), e.norm, vaeNormEpsilon, tensor.SiLU)
	x = convolve(s, f, &e.out, x, tensor.SamePad(3))
	q := tensor.NewMatrix(s, x.H*x.W, x.C)
	e.quant.Apply(s, q, x.Matrix(), tensor.Epilogue{})
	moments := make([]float32, q.Rows*q.Cols)
	s.CopyOut(moments, q)
	z := v.config.Latents
	for i := range x.H {
		for j := range x.W {
			px := moments[(i*x.W+j)*x.C:]
			token := latents[(i/2*(x.W/2)+j/2)*4*z:]
			for c := range z {
				token[4*c+i%2*2+j%2] = (px[c] - v.mean[c]) / v.std[c]
			}
		}
	}
}

// encodeElements returns the size of the largest image of an encoding.
func (v *autoencoder) encodeElements(h, w int) int {
	most, in := 0, v.encoder.in.Bias.Len()
	for i, d := range v.encoder.downs {
		out := d.blocks[0].out
		most = max(most, (h>>i)*(w>>i)*max(in, out))
		in = out
	}
	return max(most, (h>>v.config.levels())*(w>>v.config.levels())*max(in, 2*v.config.Latents))
}

// toNRGBA rounds pixels [height, width, 3] in [-1, 1] to bytes as the pipeline does: half
// to even.
func toNRGBA(pixels []float32, height, width int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for i := range height * width {
		for c := range 3 {
			p := pixels[3*i+c]*0.5 + 0.5
			img.Pix[4*i+c] = uint8(math.RoundToEven(float64(p * 255)))
		}
		img.Pix[4*i+3] = 255
	}
	return img
}
