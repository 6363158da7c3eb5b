package model

import (
	"fmt"
	"image"
	"math"

	"github.com/meander-rl/meander/pkg/tensor"
)

// autoencoder is AutoencoderKLQwenImage on single frames. The class convolves causally
// over time too; before the first frame there is nothing but zeros, so only the last
// temporal slice of a kernel acts, and the convolutions over time alone not at all.
// Images are channels last.
type autoencoder struct {
	config  *vaeConfig
	mean    []float32 // [Z]
	std     []float32 // [Z]
	invStd  []float32 // [Z], rounded as the pipeline rounds it
	decoder vaeDecoder
	encoder vaeEncoder
}

type vaeDecoder struct {
	postQuant linear
	in        conv
	mid       vaeMiddle
	ups       []vaeUp
	norm      []float32
	out       conv
}

// vaeUp is one level of the decoder; the last one does not resize.
type vaeUp struct {
	blocks []resBlock
	resize *conv // upsampled before; nil at the last level
}

type vaeEncoder struct {
	in    conv
	downs []vaeDown
	mid   vaeMiddle
	norm  []float32
	out   conv
	quant linear
}

// vaeDown is one level of the encoder.
type vaeDown struct {
	blocks []resBlock
	resize *conv
}

// conv is a convolution with bias.
type conv struct {
	w    *tensor.PackedConv
	bias []float32
}

// resBlock is norm, SiLU, convolution, twice, around a shortcut.
type resBlock struct {
	norm1, norm2 []float32
	conv1, conv2 conv
	shortcut     linear // without weights where widths agree
	in, out      int
}

// vaeMiddle is residual block, attention over all pixels, residual block.
type vaeMiddle struct {
	first, second resBlock
	norm          []float32
	qkv, proj     linear
}

// causal reads a [out, in, 3, k, k] kernel and keeps its last temporal slice.
func (l *loader) causal(name string, out, in, k int) conv {
	before := l.kept
	w := l.floats(name+".weight", out, in, k, k, k)
	l.kept = before + (l.kept-before)/k
	bias := l.floats(name+".bias", out)
	taps := k * k
	if w == nil || bias == nil {
		return conv{}
	}
	last := make([]float32, out*in*taps)
	for i := range out * in {
		copy(last[i*taps:(i+1)*taps], w[(i*k+k-1)*taps:(i+1)*k*taps])
	}
	return conv{w: tensor.PackConv(last, out, in, k, k), bias: bias}
}

// flat reads a [out, in, 3, 3] kernel.
func (l *loader) flat(name string, out, in int) *conv {
	w := l.floats(name+".weight", out, in, 3, 3)
	bias := l.floats(name+".bias", out)
	if w == nil || bias == nil {
		return &conv{}
	}
	return &conv{w: tensor.PackConv(w, out, in, 3, 3), bias: bias}
}

// pointwise reads a kernel of one tap as a projection; ones is its trailing dimensions.
func (l *loader) pointwise(name string, out, in, ones int) linear {
	shape := []int{out, in}
	for range ones {
		shape = append(shape, 1)
	}
	w := l.floats(name+".weight", shape...)
	bias := l.floats(name+".bias", out)
	if w == nil || bias == nil {
		return linear{}
	}
	return linear{w: tensor.Pack(w, out, in), bias: bias}
}

func (l *loader) resBlock(name string, in, out int) resBlock {
	b := resBlock{
		norm1: l.floats(name+"norm1.gamma", in, 1, 1, 1),
		norm2: l.floats(name+"norm2.gamma", out, 1, 1, 1),
		conv1: l.causal(name+"conv1", out, in, 3),
		conv2: l.causal(name+"conv2", out, out, 3),
		in:    in, out: out,
	}
	if in != out {
		b.shortcut = l.pointwise(name+"conv_shortcut", out, in, 3)
	}
	return b
}

func (l *loader) middle(name string, d int) vaeMiddle {
	return vaeMiddle{
		first:  l.resBlock(name+"resnets.0.", d, d),
		second: l.resBlock(name+"resnets.1.", d, d),
		norm:   l.floats(name+"attentions.0.norm.gamma", d, 1, 1),
		qkv:    l.pointwise(name+"attentions.0.to_qkv", 3*d, d, 2),
		proj:   l.pointwise(name+"attentions.0.proj", d, d, 2),
	}
}

// unused notes the convolution over time of a resampler, which a single frame never meets.
func (l *loader) unused(name string, out, in int) {
	l.expect(name+".weight", out, in, 3, 1, 1)
	l.expect(name+".bias", out)
}

func loadAutoencoder(l *loader, c *vaeConfig) *autoencoder {
	v := &autoencoder{config: c, decoder: l.decoder(c), encoder: l.encoder(c)}
	for i := range c.Latents {
		mean, std := float32(c.Mean[i]), float32(c.Std[i])
		v.mean, v.std, v.invStd = append(v.mean, mean), append(v.std, std), append(v.invStd, 1/std)
	}
	return v
}

func (l *loader) decoder(c *vaeConfig) vaeDecoder {
	last := len(c.Mult) - 1
	top := c.Base * c.Mult[last]
	d := vaeDecoder{
		postQuant: l.pointwise("post_quant_conv", c.Latents, c.Latents, 3),
		in:        l.causal("decoder.conv_in", top, c.Latents, 3),
		mid:       l.middle("decoder.mid_block.", top),
		ups:       make([]vaeUp, len(c.Mult)),
	}
	in := top
	for i := range d.ups {
		out := c.Base * c.Mult[last-i]
		name := fmt.Sprintf("decoder.up_blocks.%d.", i)
		for j := range c.ResBlocks + 1 {
			d.ups[i].blocks = append(d.ups[i].blocks, l.resBlock(fmt.Sprintf("%sresnets.%d.", name, j), in, out))
			in = out
		}
		if i == last {
			break
		}
		// Resizing halves the channels.
		d.ups[i].resize = l.flat(name+"upsamplers.0.resample.1", out/2, out)
		if c.Temporal[last-1-i] {
			l.unused(name+"upsamplers.0.time_conv", 2*out, out)
		}
		in = out / 2
	}
	d.norm = l.floats("decoder.norm_out.gamma", in, 1, 1, 1)
	d.out = l.causal("decoder.conv_out", c.Channels, in, 3)
	return d
}

func (l *loader) encoder(c *vaeConfig) vaeEncoder {
	e := vaeEncoder{in: l.causal("encoder.conv_in", c.Base, c.Channels, 3), downs: make([]vaeDown, len(c.Mult))}
	in, index := c.Base, 0
	for i := range e.downs {
		out := c.Base * c.Mult[i]
		for range c.ResBlocks {
			e.downs[i].blocks = append(e.downs[i].blocks, l.resBlock(fmt.Sprintf("encoder.down_blocks.%d.", index), in, out))
			in = out
			index++
		}
		if i == len(e.downs)-1 {
			break
		}
		name := fmt.Sprintf("encoder.down_blocks.%d.", index)
		e.downs[i].resize = l.flat(name+"resample.1", out, out)
		if c.Temporal[i] {
			l.unused(name+"time_conv", out, out)
		}
		index++
	}
	e.mid = l.middle("encoder.mid_block.", in)
	e.norm = l.floats("encoder.norm_out.gamma", in, 1, 1, 1)
	e.out = l.causal("encoder.conv_out", 2*c.Latents, in, 3)
	e.quant = l.pointwise("quant_conv", 2*c.Latents, 2*c.Latents, 3)
	return e
}

func (c *conv) bytes() int {
	if c == nil || c.w == nil {
		return 0
	}
	return c.w.Bytes() + 4*len(c.bias)
}

func (b *resBlock) bytes() int {
	return b.conv1.bytes() + b.conv2.bytes() + b.shortcut.bytes() + 4*(len(b.norm1)+len(b.norm2))
}

func (m *vaeMiddle) bytes() int {
	return m.first.bytes() + m.second.bytes() + m.qkv.bytes() + m.proj.bytes() + 4*len(m.norm)
}

func (v *autoencoder) bytes() int {
	d, e := &v.decoder, &v.encoder
	n := d.postQuant.bytes() + d.in.bytes() + d.mid.bytes() + d.out.bytes() + 4*len(d.norm)
	n += e.in.bytes() + e.mid.bytes() + e.out.bytes() + e.quant.bytes() + 4*len(e.norm)
	for _, u := range d.ups {
		n += u.resize.bytes()
		for i := range u.blocks {
			n += u.blocks[i].bytes()
		}
	}
	for _, u := range e.downs {
		n += u.resize.bytes()
		for i := range u.blocks {
			n += u.blocks[i].bytes()
		}
	}
	return n
}

// vaeNormEpsilon is the floor of the norm in torch's normalize.
const vaeNormEpsilon = 1e-12

// frames is the memory of a pass through the autoencoder: images of any size up to the
// largest of the pass. x and next alternate as input and output of its stages.
type frames struct{ x, next, y, z, shortcut []float32 }

func newFrames(a *tensor.Arena, most int) *frames {
	return &frames{a.Floats(most), a.Floats(most), a.Floats(most), a.Floats(most), a.Floats(most)}
}

// forward writes the block's output to f.next, which becomes f.x.
func (b *resBlock) forward(cpu *tensor.CPU, f *frames, x tensor.Image) tensor.Image {
	out := tensor.NewImage(f.next, 1, x.H, x.W, b.out)
	y := tensor.NewImage(f.y, 1, x.H, x.W, b.in)
	z := tensor.NewImage(f.z, 1, x.H, x.W, b.out)
	cpu.L2Norm(y.Matrix(), x.Matrix(), b.norm1, vaeNormEpsilon, tensor.SiLU)
	cpu.Conv2D(z, y, b.conv1.w, tensor.SamePad(3), tensor.Epilogue{Bias: b.conv1.bias})
	cpu.L2Norm(z.Matrix(), z.Matrix(), b.norm2, vaeNormEpsilon, tensor.SiLU)
	shortcut := x.Matrix()
	if b.shortcut.w != nil {
		shortcut = tensor.NewMatrix(f.shortcut, x.H*x.W, b.out)
		cpu.Linear(shortcut, x.Matrix(), b.shortcut.w, tensor.Epilogue{Bias: b.shortcut.bias})
	}
	cpu.Conv2D(out, z, b.conv2.w, tensor.SamePad(3), tensor.Epilogue{Bias: b.conv2.bias, Residual: shortcut})
	f.x, f.next = f.next, f.x
	return out
}

func (m *vaeMiddle) forward(w *worker, f *frames, x tensor.Image) tensor.Image {
	x = m.first.forward(w.cpu, f, x)
	cpu, a := w.cpu, &w.arena
	h, d := x.Matrix(), x.C
	y := a.Matrix(h.Rows, d)
	qkv := a.Matrix(h.Rows, 3*d)
	cpu.L2Norm(y, h, m.norm, vaeNormEpsilon, tensor.Identity)
	cpu.Linear(qkv, y, m.qkv.w, tensor.Epilogue{Bias: m.qkv.bias})
	cpu.Attention(y, qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d), tensor.Attention{Heads: 1})
	cpu.Linear(h, y, m.proj.w, tensor.Epilogue{Bias: m.proj.bias, Residual: h})
	return m.second.forward(cpu, f, x)
}

// resize writes the convolution of x to f.next, which becomes f.x.
func (c *conv) resize(cpu *tensor.CPU, f *frames, x tensor.Image, how tensor.Conv) tensor.Image {
	h, w := how.OutSize(c.w, x.H, x.W)
	out := tensor.NewImage(f.next, 1, h, w, c.w.Out)
	cpu.Conv2D(out, x, c.w, how, tensor.Epilogue{Bias: c.bias})
	f.x, f.next = f.next, f.x
	return out
}

// decode turns packed latents [S, 4Z] of a picture of height x width into pixels
// [height, width, 3] in [-1, 1], taken from the worker's arena.
func (v *autoencoder) decode(w *worker, latents []float32, height, width int) tensor.Image {
	cpu, a, d := w.cpu, &w.arena, &v.decoder
	z := v.config.Latents
	lh, lw := height>>v.config.levels(), width>>v.config.levels()
	packed := a.Image(1, lh, lw, z)
	for y := range lh {
		for x := range lw {
			px := packed.Data[(y*lw+x)*z : (y*lw+x+1)*z]
			token := latents[(y/2*(lw/2)+x/2)*4*z:]
			for c := range px {
				px[c] = token[4*c+y%2*2+x%2]/v.invStd[c] + v.mean[c]
			}
		}
	}
	q := a.Image(1, lh, lw, z)
	cpu.Linear(q.Matrix(), packed.Matrix(), d.postQuant.w, tensor.Epilogue{Bias: d.postQuant.bias})

	f := newFrames(a, v.decodeElements(lh, lw))
	x := d.in.resize(cpu, f, q, tensor.SamePad(3))
	x = d.mid.forward(w, f, x)
	for i := range d.ups {
		for j := range d.ups[i].blocks {
			x = d.ups[i].blocks[j].forward(cpu, f, x)
		}
		if r := d.ups[i].resize; r != nil {
			up := tensor.NewImage(f.y, 1, 2*x.H, 2*x.W, x.C)
			cpu.Upsample2(up, x)
			x = r.resize(cpu, f, up, tensor.SamePad(3))
		}
	}
	cpu.L2Norm(x.Matrix(), x.Matrix(), d.norm, vaeNormEpsilon, tensor.SiLU)
	out := d.out.resize(cpu, f, x, tensor.SamePad(3))
	for i, p := range out.Data {
		out.Data[i] = max(-1, min(1, p))
	}
	return out
}

// decodeElements returns the size of the largest image of a decoding: at every level the
// widest block, and the upsampled one with the channels of the level below.
func (v *autoencoder) decodeElements(lh, lw int) int {
	most, in := 0, len(v.decoder.in.bias)
	for i, u := range v.decoder.ups {
		out := u.blocks[0].out
		most = max(most, (lh<<i)*(lw<<i)*max(in, out))
		if u.resize != nil {
			most = max(most, (lh<<(i+1))*(lw<<(i+1))*out)
			in = out / 2
		}
	}
	return most
}

// encode turns pixels [height, width, 3] in [-1, 1] into packed latents [S, 4Z], the mode
// of the posterior, normalized as the transformer sees them.
func (v *autoencoder) encode(w *worker, latents []float32, pixels tensor.Image) {
	cpu, a, e := w.cpu, &w.arena, &v.encoder
	f := newFrames(a, v.encodeElements(pixels.H, pixels.W))
	x := e.in.resize(cpu, f, pixels, tensor.SamePad(3))
	for i := range e.downs {
		for j := range e.downs[i].blocks {
			x = e.downs[i].blocks[j].forward(cpu, f, x)
		}
		if r := e.downs[i].resize; r != nil {
			x = r.resize(cpu, f, x, tensor.Conv{Stride: 2, Bottom: 1, Right: 1})
		}
	}
	x = e.mid.forward(w, f, x)
	cpu.L2Norm(x.Matrix(), x.Matrix(), e.norm, vaeNormEpsilon, tensor.SiLU)
	y := e.out.resize(cpu, f, x, tensor.SamePad(3))
	q := a.Image(1, y.H, y.W, y.C)
	cpu.Linear(q.Matrix(), y.Matrix(), e.quant.w, tensor.Epilogue{Bias: e.quant.bias})
	z := v.config.Latents
	for i := range q.H {
		for j := range q.W {
			px := q.Data[(i*q.W+j)*q.C:]
			token := latents[(i/2*(q.W/2)+j/2)*4*z:]
			for c := range z {
				token[4*c+i%2*2+j%2] = (px[c] - v.mean[c]) / v.std[c]
			}
		}
	}
}

// encodeElements returns the size of the largest image of an encoding.
func (v *autoencoder) encodeElements(h, w int) int {
	most, in := 0, len(v.encoder.in.bias)
	for i, d := range v.encoder.downs {
		out := d.blocks[0].out
		most = max(most, (h>>i)*(w>>i)*max(in, out))
		in = out
	}
	return max(most, (h>>v.config.levels())*(w>>v.config.levels())*max(in, 2*v.config.Latents))
}

// toNRGBA rounds pixels in [-1, 1] to bytes as the pipeline does: half to even.
func toNRGBA(pixels tensor.Image) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, pixels.W, pixels.H))
	for i := range pixels.H * pixels.W {
		for c := range 3 {
			p := pixels.Data[3*i+c]*0.5 + 0.5
			img.Pix[4*i+c] = uint8(math.RoundToEven(float64(p * 255)))
		}
		img.Pix[4*i+3] = 255
	}
	return img
}
