// Package qwenimage is the Qwen-Image family: Qwen2.5-VL as text encoder, the MMDiT
// transformer and the autoencoder of the published checkpoints, from folders in the
// layout of diffusers.
package qwenimage

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"image"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/model/tokenizer"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cpu"
)

// Family opens folders of the QwenImagePipeline class.
func Family() model.Family {
	return model.Family{
		Name: familyName, Class: pipelineClass, Inspect: Inspect,
		Open: func(dir string, o model.Options) (model.Model, error) {
			m, err := openAdapted(dir, o)
			if err != nil {
				return nil, err
			}
			return m, nil
		},
	}
}

const familyName = "qwen-image"

// openAdapted opens a checkpoint with the adapter of the options, if they name one.
func openAdapted(dir string, o model.Options) (*Model, error) {
	base, err := Open(dir, Options{Device: o.Device, Threads: o.Threads, PromptCacheBytes: o.PromptCacheBytes})
	if err != nil || o.Adapter == "" {
		return base, err
	}
	defer func() { _ = base.Close() }() // the adapted model keeps what both share
	adapter, err := nn.OpenAdapter(o.Adapter)
	if err != nil {
		return nil, err
	}
	if o.AdapterScale == 0 {
		o.AdapterScale = 1
	}
	return base.WithAdapters(nn.Weighted{Adapter: adapter, Weight: o.AdapterScale})
}

// Options are the choices that a checkpoint leaves open. Zero fields take the
// defaults below.
type Options struct {
	// Device computes, and stays the caller's; default a CPU of Threads threads.
	Device tensor.Device
	// Threads is how many threads that CPU has; default GOMAXPROCS. Results do not depend on
	// it.
	Threads int
	// Height, Width (pixels), NumInferenceSteps and TrueCFGScale are the Card's defaults for
	// prompts. Their default is what the file meander.json of the folder says, else that of
	// the pipeline: 1024, 1024, 50 and 4.
	Height, Width, NumInferenceSteps int
	TrueCFGScale                     float64
	// MaxPixels bounds height*width; default 2048*2048, at least Height*Width.
	MaxPixels int
	// MaxPromptTokens bounds a conditioning, the five tokens of the template's end included;
	// default 512, at most 1024.
	MaxPromptTokens int
	// PromptCacheBytes bounds the conditionings that are kept; default 32 MiB. Negative
	// keeps none.
	PromptCacheBytes int
}

// Bounds of the other caches: timestep modulations (one per sigma) and position tables
// (one per image size).
const (
	modulationCacheBytes = 32 << 20
	ropeCacheBytes       = 32 << 20
)

// Model is a checkpoint of the family, computed in float32.
//
// The bits of a result depend on the weights and the arguments alone: not on threads,
// kernels, or the rows that share a call.
//
// Memory: all weights as float32, whatever their type in the files. Besides, per thread and
// growing to the largest request: for Velocity 40 D bytes per token, image and text, of the
// rows that the thread computes together, D being the transformer's width; for Decode
// five images of the autoencoder's largest stage, which has the full size and twice
// base_dim channels, 40 base_dim bytes per pixel. MemoryBytes tells the sum.
type Model struct {
	*shared
	card        model.Card
	transformer *mmdit
	modulations nn.LRU[float32, []float32]
	closed      sync.Once
}

// shared is what a model has in common with those derived from it by adapters.
type shared struct {
	users      atomic.Int32
	base       *mmdit // without adapters
	baseDigest string
	tokenizer  *tokenizer.Tokenizer
	text       *textEncoder
	vae        *autoencoder
	device     tensor.Device
	ownDevice  bool // it ends with the last model
	indices    sync.Pool
	prompts    nn.LRU[[sha256.Size]byte, *model.Conditioning]
	ropes      nn.LRU[[2]int, *nn.RopeTable]
}

var _ model.Model = (*Model)(nil)

// Open loads a checkpoint in the diffusers layout: model_index.json, scheduler/,
// tokenizer/, text_encoder/, transformer/ and vae/, weights in F32, F16 or BF16, whole or
// in shards. Nothing outside dir is read. Whatever is missing, unexpected, mis-shaped or
// not supported is named in the error.
func Open(dir string, o Options) (*Model, error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	m, err := open(folder, dir, o)
	if err = errors.Join(err, folder.Close()); err != nil {
		return nil, fmt.Errorf("open model %q: %w", dir, err)
	}
	return m, nil
}

func open(folder *safetensors.Folder, dir string, o Options) (*Model, error) {
	c, err := readConfigs(folder)
	if err != nil {
		return nil, err
	}
	if err := o.complete(&c.defaults); err != nil {
		return nil, err
	}
	tok, err := tokenizer.Read(folder, "tokenizer")
	if err != nil {
		return nil, err
	}
	if err := c.fitTokenizer(tok); err != nil {
		return nil, err
	}
	digest, err := newDigest(folder)
	if err != nil {
		return nil, err
	}
	s := &shared{tokenizer: tok, device: o.Device}
	s.indices.New = func() any { return &nn.Indices{} }
	if s.device == nil {
		if s.device, err = cpu.NewDevice(cpu.Options{Threads: o.Threads}); err != nil {
			return nil, err
		}
		s.ownDevice = true
	}
	m := &Model{shared: s}
	if err := m.load(folder, dir, o, c, digest); err != nil {
		return nil, errors.Join(err, s.closeDevice())
	}
	return m, nil
}

// load reads the weights onto the device and fills in the rest.
func (m *Model) load(folder *safetensors.Folder, dir string, o Options, c *modelConfigs, digest *nn.Digest) error {
	s := m.shared
	var errs [3]error
	errs[0] = nn.LoadPart(folder, s.device, "text_encoder", digest, func(l *nn.Loader) { s.text = loadTextEncoder(l, c.text) })
	errs[1] = nn.LoadPart(folder, s.device, "transformer", digest, func(l *nn.Loader) { m.transformer = loadMMDiT(l, c.transformer) })
	errs[2] = nn.LoadPart(folder, s.device, "vae", digest, func(l *nn.Loader) { s.vae = loadAutoencoder(l, c.vae) })
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	s.users.Store(1)
	s.base, s.baseDigest = m.transformer, digest.Hex()
	s.prompts.Limit = o.PromptCacheBytes
	s.ropes.Limit = ropeCacheBytes
	m.modulations.Limit = modulationCacheBytes
	m.card = c.card(dir, o)
	m.card.WeightsDigest, m.card.Backend = s.baseDigest, s.device.Name()
	return checkDefaults(m.card)
}

func (s *shared) closeDevice() error {
	if !s.ownDevice {
		return nil
	}
	return s.device.Close()
}

// complete fills zero fields and checks all.
func (o *Options) complete(d *sampleDefaults) error {
	o.Threads = orDefault(o.Threads, runtime.GOMAXPROCS(0))
	o.Height, o.Width = orDefault(o.Height, d.Height), orDefault(o.Width, d.Width)
	o.NumInferenceSteps = orDefault(o.NumInferenceSteps, d.NumInferenceSteps)
	o.TrueCFGScale = orDefault(o.TrueCFGScale, d.TrueCFGScale)
	o.MaxPromptTokens = orDefault(o.MaxPromptTokens, 512)
	o.PromptCacheBytes = max(0, orDefault(o.PromptCacheBytes, 32<<20))
	var f nn.Faults
	f.Within("Threads", o.Threads, 1, 4096)
	f.Within("Height", o.Height, 1, 1<<15)
	f.Within("Width", o.Width, 1, 1<<15)
	f.Within("NumInferenceSteps", o.NumInferenceSteps, 1, 1000)
	f.Within("MaxPromptTokens", o.MaxPromptTokens, 1, promptTokensLimit)
	f.Check(o.TrueCFGScale > 0 && o.TrueCFGScale <= 1000, "TrueCFGScale = %g: want more than 0, at most 1000", o.TrueCFGScale)
	if len(f) == 0 {
		o.MaxPixels = orDefault(o.MaxPixels, max(2048*2048, o.Height*o.Width))
		f.Within("MaxPixels", o.MaxPixels, o.Height*o.Width, 1<<28)
	}
	return f.Of("model options")
}

func orDefault[T int | float64](v, d T) T {
	if v == 0 {
		return d
	}
	return v
}

// Card describes the model.
func (m *Model) Card() model.Card { return m.card }

// Close stops the threads. A model and those made from it by WithAdapters share them:
// the last Close counts.
func (m *Model) Close() error {
	var err error
	m.closed.Do(func() {
		if m.users.Add(-1) == 0 {
			err = m.closeDevice()
		}
	})
	return err
}

// MemoryBytes returns the memory of the weights, and that of everything kept between
// calls besides: activations of the largest request of each thread, conditionings,
// position tables and modulations.
func (m *Model) MemoryBytes() (weights, working int) {
	weights = m.transformer.bytes() + m.text.bytes() + m.vae.bytes()
	working = m.device.WorkingBytes() + m.prompts.Bytes() + m.ropes.Bytes() + m.modulations.Bytes()
	return weights, working
}

// Encode returns the prompt embeddings that the pipeline hands to its transformer: the
// last hidden states of the prompt in its template, without the template's beginning.
func (m *Model) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.encode(ctx, prompts, false)
}

// EncodeTruncated is Encode of the first MaxPromptTokens tokens, as the pipeline does it.
func (m *Model) EncodeTruncated(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.encode(ctx, prompts, true)
}

func (m *Model) encode(ctx context.Context, prompts []string, truncate bool) ([]*model.Conditioning, error) {
	tooLong := func(prompt string, cut int) error {
		limit := m.card.MaxPromptTokens
		return fmt.Errorf("prompt %.80q: %w: %d tokens: want at most %d", prompt, model.ErrPrompt, limit+cut, limit)
	}
	out := make([]*model.Conditioning, len(prompts))
	first := make(map[string]int, len(prompts)) // where a prompt that is not cached comes first
	var missing []int
	for i, prompt := range prompts {
		if c, ok := m.prompts.Get(sha256.Sum256([]byte(prompt))); ok {
			if out[i] = c; c.Cut > 0 && !truncate {
				return nil, tooLong(prompt, c.Cut)
			}
		} else if _, ok := first[prompt]; !ok {
			first[prompt] = i
			missing = append(missing, i)
		}
	}
	ids, cut := make([][]int32, len(missing)), make([]int, len(missing))
	for k, i := range missing {
		var err error
		if ids[k], cut[k], err = promptIDs(m.tokenizer, prompts[i], m.card.MaxPromptTokens); err != nil {
			return nil, fmt.Errorf("prompt %.80q: %w", prompts[i], err)
		}
		if cut[k] > 0 && !truncate {
			return nil, tooLong(prompts[i], cut[k])
		}
	}
	if len(missing) > 0 {
		err := nn.Split(ctx, m.device, len(missing), func(s tensor.Session, from, to int) error {
			for k := from; k < to; k++ {
				if err := ctx.Err(); err != nil {
					return err
				}
				i := missing[k]
				out[i] = m.encodeOne(s, prompts[i], ids[k])
				out[i].Cut = cut[k]
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("encode prompts: %w", err)
		}
	}
	for _, i := range missing {
		c := out[i]
		m.prompts.Put(sha256.Sum256([]byte(c.Prompt)), c, 4*len(c.Tensors[0].Data)+len(c.Prompt))
	}
	for i, prompt := range prompts {
		if out[i] == nil {
			out[i] = out[first[prompt]]
		}
	}
	return out, nil
}

func (m *Model) encodeOne(s tensor.Session, prompt string, ids []int32) *model.Conditioning {
	d := m.text.config.Width
	hidden := tensor.NewMatrix(s, len(ids), d)
	m.text.forward(s, hidden, ids)
	embeds := make([]float32, (len(ids)-promptTokensDropped)*d)
	s.CopyOut(embeds, hidden.SliceRows(promptTokensDropped, len(ids)))
	shape := []int{len(ids) - promptTokensDropped, d}
	return &model.Conditioning{Prompt: prompt, Tensors: []model.Tensor{{Name: promptEmbeds, Shape: shape, Data: embeds}}}
}

// Velocity evaluates the transformer for rows of different prompts and sigmas. Rows are
// spread over the threads; those of one thread are computed together without padding.
func (m *Model) Velocity(
	ctx context.Context, dst, x [][]float32, sigma []float32, cond []*model.Conditioning, height, width int,
) error {
	tokens, err := m.card.CheckRows(dst, x, sigma, cond, height, width)
	if err != nil {
		return err
	}
	for i, c := range cond {
		if err := m.checkEmbeds(c); err != nil {
			return fmt.Errorf("velocity row %d: %w", i, err)
		}
	}
	b := &batch{
		m: m, ctx: ctx, dst: dst, x: x, sigma: sigma, cond: cond, tokens: tokens,
		rope: m.rope(height/m.card.PixelsPerToken, width/m.card.PixelsPerToken),
	}
	switch n := len(x); {
	case n == 0:
		return nil
	case n < m.device.Parallel():
		return m.device.Run(ctx, true, func(s tensor.Session) error { return b.compute(s, 0, n) })
	default:
		return nn.Split(ctx, m.device, n, b.compute)
	}
}

// promptEmbeds is the conditioning of the family: hidden states [tokens, width] without
// padding, so that no mask is needed.
const promptEmbeds = "prompt_embeds"

// embedsOf returns the embeddings of a conditioning that fits the card, and their rows.
func embedsOf(c *model.Conditioning) (embeds []float32, tokens int) {
	return c.Tensors[0].Data, c.Tensors[0].Shape[0]
}

func (m *Model) checkEmbeds(c *model.Conditioning) error {
	shape, width := c.Tensors[0].Shape, m.transformer.config.TextWidth
	if len(shape) != 2 || shape[0] < 1 || shape[0] > m.card.MaxPromptTokens || shape[1] != width {
		return fmt.Errorf("conditioning: %s %v; must be 1 to %d tokens x %d", promptEmbeds, shape, m.card.MaxPromptTokens, width)
	}
	return nil
}

// rope returns the positions of an image of h x w tokens with the longest prompt.
func (m *Model) rope(h, w int) *nn.RopeTable {
	if t, ok := m.ropes.Get([2]int{h, w}); ok {
		return t
	}
	t := jointRope(m.transformer.config.Axes, h, w, m.card.MaxPromptTokens)
	m.ropes.Put([2]int{h, w}, t, t.Bytes())
	return t
}

// batch is the arguments of one call of Velocity.
type batch struct {
	m      *Model
	ctx    context.Context // of the call that this value lives in
	dst, x [][]float32
	sigma  []float32
	cond   []*model.Conditioning
	tokens int
	rope   *nn.RopeTable
}

// compute evaluates rows from..to-1 in one pass.
func (b *batch) compute(s tensor.Session, from, to int) error {
	m := b.m
	lists := m.indices.Get().(*nn.Indices)
	defer m.indices.Put(lists)
	lists.Reset()
	channels, textWidth := m.card.LatentChannels, m.transformer.config.TextWidth
	rows := to - from
	p := packing{image: rows * b.tokens}
	longest := 0
	for _, c := range b.cond[from:to] {
		_, tokens := embedsOf(c)
		p.text += tokens
		longest = max(longest, tokens)
	}
	n := p.text + p.image
	p.positions, p.groups = lists.Take(n), lists.Take(n)
	p.cos, p.sin = b.rope.Load(s, b.tokens+longest)
	order := lists.Take(n) // the sequences, one after the other
	x, embeds := tensor.NewMatrix(s, p.image, channels), tensor.NewMatrix(s, p.text, textWidth)

	// Rows of one sigma share a modulation.
	first := lists.Take(rows) // the row where each modulation's sigma comes first
	groups := 0
	text, image, at := 0, p.text, 0
	for i := range rows {
		r := from + i
		g := 0
		for g < groups && b.sigma[first[g]] != b.sigma[r] {
			g++
		}
		if g == groups {
			first[g] = int32(r)
			groups++
		}
		states, words := embedsOf(b.cond[r])
		sequence := order[at : at+words+b.tokens]
		at += len(sequence)
		s.CopyIn(embeds.SliceRows(text, text+words), states)
		s.CopyIn(x.SliceRows(image-p.text, image-p.text+b.tokens), b.x[r])
		for j := range sequence {
			token, position := text, b.tokens+j
			if j >= words {
				token, position = image, j-words
				image++
			} else {
				text++
			}
			sequence[j] = int32(token)
			p.positions[token], p.groups[token] = int32(position), int32(g)
		}
		lists.Sequences = append(lists.Sequences, sequence)
	}
	p.sequences = lists.Sequences

	mod := tensor.NewMatrix(s, groups, m.transformer.modulationSize())
	for g := range groups {
		m.modulation(s, mod.SliceRows(g, g+1), b.sigma[first[g]])
	}
	out := tensor.NewMatrix(s, p.image, channels)
	if err := m.transformer.forward(s, out, x, embeds, mod, &p, b.ctx.Err); err != nil {
		return err
	}
	for i := range rows {
		s.CopyOut(b.dst[from+i], out.SliceRows(i*b.tokens, (i+1)*b.tokens))
	}
	return nil
}

// modulation writes the modulation of a sigma, from the cache if it is there: a schedule
// comes back with every request.
func (m *Model) modulation(s tensor.Session, dst tensor.Matrix, sigma float32) {
	if v, ok := m.modulations.Get(sigma); ok {
		s.CopyIn(dst, v)
		return
	}
	m.transformer.modulation(s, dst, sigma)
	v := make([]float32, dst.Cols)
	s.CopyOut(v, dst)
	m.modulations.Put(sigma, v, 4*len(v))
}

// Decode turns latents [S, C] into an image. Latents that are not finite are an error.
func (m *Model) Decode(ctx context.Context, latents []float32, height, width int) (*image.NRGBA, error) {
	pixels, err := m.DecodePixels(ctx, latents, height, width)
	if err != nil {
		return nil, err
	}
	return toNRGBA(pixels, height, width), nil
}

// DecodePixels is Decode without the rounding to bytes: pixels [height, width, 3] in
// [-1, 1].
func (m *Model) DecodePixels(ctx context.Context, latents []float32, height, width int) ([]float32, error) {
	tokens, err := m.card.Tokens(height, width)
	if err != nil {
		return nil, err
	}
	if len(latents) != tokens*m.card.LatentChannels {
		return nil, fmt.Errorf("decode: latents of %d elements, want %d x %d", len(latents), tokens, m.card.LatentChannels)
	}
	var pixels []float32
	err = m.device.Run(ctx, true, func(s tensor.Session) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		pixels = m.vae.decode(s, latents, height, width)
		for _, p := range pixels {
			if p != p {
				return fmt.Errorf("decode: %w: pixels that are not numbers", model.ErrLatents)
			}
		}
		return nil
	})
	return pixels, err
}

// EncodeImage returns the latents [S, C] of an image: the mode of the autoencoder's
// posterior, normalized as the transformer sees them. Transparency is ignored.
func (m *Model) EncodeImage(ctx context.Context, img *image.NRGBA) ([]float32, error) {
	r := img.Rect
	tokens, err := m.card.Tokens(r.Dy(), r.Dx())
	if err != nil {
		return nil, err
	}
	pixels := make([]float32, 3*r.Dx()*r.Dy())
	for y := range r.Dy() {
		for x := range r.Dx() {
			px := img.Pix[img.PixOffset(r.Min.X+x, r.Min.Y+y):]
			for c := range 3 {
				pixels[3*(y*r.Dx()+x)+c] = float32(px[c])/255*2 - 1
			}
		}
	}
	latents := make([]float32, tokens*m.card.LatentChannels)
	err = m.device.Run(ctx, true, func(s tensor.Session) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		m.vae.encode(s, latents, pixels, r.Dy(), r.Dx())
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("encode image: %w", err)
	}
	return latents, nil
}
