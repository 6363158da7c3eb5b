package qwenimage

import (
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Constants of the transformer's class.
const (
	timeChannels = 256 // sines and cosines of a timestep
	mmditEpsilon = 1e-6
)

// mmdit is QwenImageTransformer2DModel: a stream of image tokens and one of text tokens,
// joined by attention in every block and modulated by the timestep (adaLN). It is
// immutable; adapters make a new one that shares the weights that they do not change.
type mmdit struct {
	config  *transformerConfig
	imgIn   nn.Linear
	textRMS tensor.Vector
	textIn  nn.Linear
	time1   nn.Linear
	time2   nn.Linear
	blocks  []mmditBlock
	modOut  nn.Linear // [2D, D]: scale, shift
	out     nn.Linear
	freqs   []float32 // [timeChannels/2]
}

// mmditBlock holds the weights of both streams of a block.
type mmditBlock struct{ img, txt mmditStream }

type mmditStream struct {
	mod          nn.Linear     // [6D, D]: shift, scale, gate of attention, the same of the MLP
	qkv          nn.Linear     // [3D, D]
	normQ, normK tensor.Vector // [head]
	out          nn.Linear
	up, down     nn.Linear // 4D
}

// loadMMDiT reads the transformer. In a dry run of l it only checks names and shapes.
func loadMMDiT(l *nn.Loader, c *transformerConfig) *mmdit {
	d := c.width()
	m := &mmdit{config: c, blocks: make([]mmditBlock, c.Layers)}
	m.imgIn = l.Linear(c.In, true, nn.Out("img_in", d))
	m.textRMS = l.Vector("txt_norm.weight", c.TextWidth)
	m.textIn = l.Linear(c.TextWidth, true, nn.Out("txt_in", d))
	m.time1 = l.Linear(timeChannels, true, nn.Out("time_text_embed.timestep_embedder.linear_1", d))
	m.time2 = l.Linear(d, true, nn.Out("time_text_embed.timestep_embedder.linear_2", d))
	for i := range m.blocks {
		name := fmt.Sprintf("transformer_blocks.%d.", i)
		stream := func(stream, q, k, v, normQ, normK, out string) mmditStream {
			return mmditStream{
				mod: l.Linear(d, true, nn.Out(name+stream+"_mod.1", 6*d)),
				qkv: l.Linear(d, true, nn.Out(name+"attn."+q, d), nn.Out(name+"attn."+k, d),
					nn.Out(name+"attn."+v, d)),
				normQ: l.Vector(name+"attn."+normQ+".weight", c.HeadDim),
				normK: l.Vector(name+"attn."+normK+".weight", c.HeadDim),
				out:   l.Linear(d, true, nn.Out(name+"attn."+out, d)),
				up:    l.Linear(d, true, nn.Out(name+stream+"_mlp.net.0.proj", 4*d)),
				down:  l.Linear(4*d, true, nn.Out(name+stream+"_mlp.net.2", d)),
			}
		}
		m.blocks[i].img = stream("img", "to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0")
		m.blocks[i].txt = stream("txt", "add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k",
			"to_add_out")
	}
	m.modOut = l.Linear(d, true, nn.Out("norm_out.linear", 2*d))
	m.out = l.Linear(d, true, nn.Out("proj_out", c.In))
	m.freqs = make([]float32, timeChannels/2)
	for i := range m.freqs {
		m.freqs[i] = float32(math.Exp(float64(float32(-math.Log(10000)) * float32(i) / (timeChannels / 2))))
	}
	return m
}

// linears returns every matrix of weights of the transformer, each with its bias: of the timesteps, and those that
// multiply tokens of images and of texts.
func (m *mmdit) linears() (times, images, texts []*nn.Linear) {
	times = []*nn.Linear{&m.time1, &m.time2, &m.modOut}
	images, texts = []*nn.Linear{&m.imgIn, &m.out}, []*nn.Linear{&m.textIn}
	for i := range m.blocks {
		img, txt := &m.blocks[i].img, &m.blocks[i].txt
		times = append(times, &img.mod, &txt.mod)
		images = append(images, &img.qkv, &img.out, &img.up, &img.down)
		texts = append(texts, &txt.qkv, &txt.out, &txt.up, &txt.down)
	}
	return times, images, texts
}

// mixed returns a transformer for a pass in which the tokens of images and of texts up to images[i] and texts[i] are of
// transformer of[i]. Its modulations are those of the first.
func mixed(of []*mmdit, images, texts []int) *mmdit {
	if len(of) == 1 {
		return of[0]
	}
	m := of[0].clone()
	_, image, text := m.linears()
	each := [2][][]*nn.Linear{}
	for _, o := range of {
		_, i, t := o.linears()
		each[0], each[1] = append(each[0], i), append(each[1], t)
	}
	nn.Mix(image, each[0], images)
	nn.Mix(text, each[1], texts)
	return m
}

// bytes returns the memory of the transformer's weights on the device, in bytes, for the model's
// usage.
func (m *mmdit) bytes() int {
	n := nn.VectorBytes(m.textRMS)
	for i := range m.blocks {
		b := &m.blocks[i]
		n += nn.VectorBytes(b.img.normQ, b.img.normK, b.txt.normQ, b.txt.normK)
	}
	for _, l := range slices.Concat(m.linears()) {
		n += l.Bytes()
	}
	return n
}

// modulationSize returns the number of columns of a modulation: six vectors (shift, scale and gate
// of attention and of the MLP) for image and for text in every block, then two for the output.
func (m *mmdit) modulationSize() int { return (12*len(m.blocks) + 2) * m.config.width() }

// modulate evaluates the modulations of sigmas, the shifts, scales and gates by which the timestep acts on all blocks,
// and writes them to dst [sigmas, modulationSize]. A modulation depends on its sigma alone, so that Model.modulations
// keeps it.
func (m *mmdit) modulate(s tensor.Session, dst tensor.Matrix, sigmas []float32) {
	d, n := m.config.width(), len(sigmas)
	waves := make([]float32, n*timeChannels)
	for row, sigma := range sigmas {
		// The pipeline passes t = 1000*sigma, divides it by 1000 and multiplies again, in
		// float32. At angles up to 1000 these roundings show, so they are repeated.
		t := sigma * 1000 / 1000
		for i, f := range m.freqs {
			angle := float64(1000 * (t * f))
			waves[row*timeChannels+i] = float32(math.Cos(angle))
			waves[row*timeChannels+len(m.freqs)+i] = float32(math.Sin(angle))
		}
	}
	wave, h, temb := tensor.NewFactors(s, n, timeChannels), tensor.NewFactors(s, n, d), tensor.NewFactors(s, n, d)
	s.CopyIn(wave, waves)
	m.time1.Apply(s, h, wave, tensor.Epilogue{Act: tensor.SiLU})
	// Every use of the embedding goes through SiLU first.
	m.time2.Apply(s, temb, h, tensor.Epilogue{Act: tensor.SiLU})
	for i := range m.blocks {
		for j, stream := range []*mmditStream{&m.blocks[i].img, &m.blocks[i].txt} {
			from := (12*i + 6*j) * d
			stream.mod.Apply(s, dst.SliceCols(from, from+6*d), temb, tensor.Epilogue{})
		}
	}
	from := 12 * len(m.blocks) * d
	m.modOut.Apply(s, dst.SliceCols(from, from+2*d), temb, tensor.Epilogue{})
}

// packing says where the rows of a pass are in the matrices of forward: first the text
// tokens of all rows, then the image tokens of all rows.
type packing struct {
	text, image int           // tokens of all rows
	cos, sin    tensor.Matrix // of rotary positions
	positions   []int32       // row of cos and sin of each token
	groups      []int32       // modulation row of each token
	sequences   [][]int32     // tokens of each row, text first
}

// forward computes velocities: x [image, C] and embeds [text, textWidth] to dst
// [image, C]; mod [groups, modulationSize]. It calls stop before every block; an error ends it.
func (m *mmdit) forward(s tensor.Session, dst, x, embeds, mod tensor.Matrix, p *packing, stop func() error) error {
	c := m.config
	d, hd := c.width(), c.HeadDim
	n := p.text + p.image

	h := tensor.NewMatrix(s, n, d) // both streams
	y := tensor.NewFactors(s, n, d)
	qkv := tensor.NewFactors(s, n, 3*d)
	attn := tensor.NewFactors(s, n, d)
	hidden := tensor.NewFactors(s, n, 4*d)
	part := func(t tensor.Matrix, image bool) tensor.Matrix {
		if image {
			return t.SliceRows(p.text, n)
		}
		return t.SliceRows(0, p.text)
	}

	normed := tensor.NewFactors(s, p.text, c.TextWidth)
	s.RMSNorm(normed, embeds, m.textRMS, mmditEpsilon)
	m.textIn.Apply(s, part(h, false), normed, tensor.Epilogue{})
	m.imgIn.Apply(s, part(h, true), x, tensor.Epilogue{})

	type half struct {
		stream      *mmditStream
		image       bool
		groups      []int32
		positions   []int32
		mod         tensor.Matrix // [groups, 6D]
		h, y        tensor.Matrix
		qkv, attn   tensor.Matrix
		hidden      tensor.Matrix
		modAttn     [3]tensor.Matrix // shift, scale, gate
		modMLP      [3]tensor.Matrix
		unnecessary bool
	}
	for i := range m.blocks {
		if err := stop(); err != nil {
			return err
		}
		last := i == len(m.blocks)-1
		halves := [2]half{
			{stream: &m.blocks[i].txt, groups: p.groups[:p.text], positions: p.positions[:p.text], unnecessary: last},
			{stream: &m.blocks[i].img, image: true, groups: p.groups[p.text:], positions: p.positions[p.text:]},
		}
		halves[0].mod, halves[1].mod = mod.SliceCols((12*i+6)*d, (12*i+12)*d), mod.SliceCols(12*i*d, (12*i+6)*d)
		for j := range halves {
			f := &halves[j]
			f.h, f.y, f.qkv, f.attn, f.hidden = part(h, f.image), part(y, f.image), part(qkv, f.image), part(attn,
				f.image), part(hidden, f.image)
			for k := range 3 {
				f.modAttn[k] = f.mod.SliceCols(k*d, (k+1)*d)
				f.modMLP[k] = f.mod.SliceCols((3+k)*d, (4+k)*d)
			}
			s.LayerNormModulate(f.y, f.h, f.modAttn[1], f.modAttn[0], f.groups, mmditEpsilon)
			f.stream.qkv.Apply(s, f.qkv, f.y, tensor.Epilogue{})
			q, k := f.qkv.SliceCols(0, d), f.qkv.SliceCols(d, 2*d)
			s.RMSNormRopePairs(q, q, f.stream.normQ, mmditEpsilon, p.cos, p.sin, f.positions)
			s.RMSNormRopePairs(k, k, f.stream.normK, mmditEpsilon, p.cos, p.sin, f.positions)
		}
		s.Attention(attn, qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d),
			tensor.Attention{Heads: d / hd, Sequences: p.sequences})
		for j := range halves {
			f := &halves[j]
			if f.unnecessary { // nothing reads the text after the last attention
				continue
			}
			f.stream.out.Apply(s, f.h, f.attn, tensor.Epilogue{Gate: f.modAttn[2], Residual: f.h, Group: f.groups})
			s.LayerNormModulate(f.y, f.h, f.modMLP[1], f.modMLP[0], f.groups, mmditEpsilon)
			f.stream.up.Apply(s, f.hidden, f.y, tensor.Epilogue{Act: tensor.GELU})
			f.stream.down.Apply(s, f.h, f.hidden, tensor.Epilogue{Gate: f.modMLP[2], Residual: f.h, Group: f.groups})
		}
	}
	from := 12 * len(m.blocks) * d
	scale, shift := mod.SliceCols(from, from+d), mod.SliceCols(from+d, from+2*d)
	s.LayerNormModulate(part(y, true), part(h, true), scale, shift, p.groups[p.text:], mmditEpsilon)
	m.out.Apply(s, dst, part(y, true), tensor.Epilogue{})
	return nil
}

// jointTheta is the base of the transformer's rotary embedding, fixed by its class.
const jointTheta = 10000

// jointRope returns the table of an image of h x w tokens followed by text: rows 0 to
// h*w-1 are the image, row-major, positions (frame, y, x) with frame 0 and y and x
// centred, y in [-(h-h/2), h/2); row h*w+i is text token i, at max(h/2, w/2)+i on all
// three axes (QwenEmbedRope with scale_rope).
func jointRope(axes []int, h, w, textTokens int) *nn.RopeTable {
	pairs := (axes[0] + axes[1] + axes[2]) / 2
	t := nn.NewRopeTable(h*w+textTokens, pairs)
	var freqs [3][]float32
	for i, d := range axes {
		freqs[i] = nn.RopeFrequencies(jointTheta, d)
	}
	set := func(row int, position [3]int) {
		from := 0
		for i, f := range freqs {
			t.Fill(row, from, position[i], f)
			from += len(f)
		}
	}
	for y := range h {
		for x := range w {
			set(y*w+x, [3]int{0, y - (h - h/2), x - (w - w/2)})
		}
	}
	start := max(h/2, w/2)
	for i := range textTokens {
		set(h*w+i, [3]int{start + i, start + i, start + i})
	}
	return t
}
