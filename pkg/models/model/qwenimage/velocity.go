package qwenimage

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Velocity evaluates the transformer for rows of different prompts and sigmas. Each thread
// computes a part of the rows together, without padding. Rows of several models share all but the products with weights
// that differ.
func (m *Model) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	rows, of, err := m.sortRows(rows)
	if err != nil {
		return err
	}
	tokens, err := m.card.CheckRows(rows, size)
	if err != nil {
		return err
	}
	for i, r := range rows {
		if err := m.checkEmbeds(r.Conditioning); err != nil {
			return fmt.Errorf("velocity row %d: %w", i, err)
		}
	}
	b := &batch{
		m: m, ctx: ctx, rows: rows, of: of, tokens: tokens,
		rope: m.rope(size.Height/m.card.PixelsPerToken, size.Width/m.card.PixelsPerToken),
	}
	switch n := len(rows); {
	case n == 0:
		return nil
	case n < m.device.Parallel():
		err = m.device.Run(ctx, true, func(s tensor.Session) error { return b.compute(s, 0, n) })
	default:
		err = nn.Split(ctx, m.device, n, b.compute)
	}
	if err == nil {
		b.keepModulations()
	}
	return err
}

// Mix implements lora.Mixer: adapters leave the norms, which tell checkpoints apart.
func (m *Model) Mix() any { return m.transformer.textRMS }

// sortRows returns rows with those of one model one after the other, and the model of each; rows and nil if all are of
// m.
func (m *Model) sortRows(rows []model.Row) (sorted []model.Row, of []*Model, err error) {
	if !slices.ContainsFunc(rows, func(r model.Row) bool { return r.Of != nil && r.Of != model.Model(m) }) {
		return rows, nil, nil
	}
	var each []*Model // once
	for i := range rows {
		o, ok := cmp.Or(rows[i].Of, model.Model(m)).(*Model)
		if !ok || o.Mix() != m.Mix() {
			return nil, nil, fmt.Errorf("velocity row %d: of another checkpoint; must be of that of the call", i)
		}
		if of = append(of, o); !slices.Contains(each, o) {
			each = append(each, o)
		}
	}
	for _, o := range each {
		for i, r := range rows {
			if r.Of = nil; of[i] == o { // the check of rows compares weights with those of m
				sorted = append(sorted, r)
			}
		}
	}
	slices.SortStableFunc(of, func(a, b *Model) int { return slices.Index(each, a) - slices.Index(each, b) })
	return sorted, of, nil
}

// modelOf returns the model of a row.
func (b *batch) modelOf(row int) *Model {
	if b.of == nil {
		return b.m
	}
	return b.of[row]
}

// promptEmbeds is the conditioning of the family: hidden states [tokens, width] without
// padding, so that no mask is needed.
const promptEmbeds = "prompt_embeds"

// embedsOf returns the embeddings of a conditioning that fits the card, and their rows.
func embedsOf(c *model.Conditioning) (embeds []float32, tokens int) {
	return c.Tensors[0].Data, c.Tensors[0].Shape[0]
}

// checkEmbeds checks the shape of the embeddings of a conditioning.
func (m *Model) checkEmbeds(c *model.Conditioning) error {
	shape, width := c.Tensors[0].Shape, m.transformer.config.TextWidth
	if len(shape) != 2 || shape[0] < 1 || shape[0] > m.card.MaxPromptTokens || shape[1] != width {
		return fmt.Errorf("conditioning: %s %v; must be 1 to %d tokens x %d", promptEmbeds, shape,
			m.card.MaxPromptTokens, width)
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
	ctx    context.Context // of the call; the value does not outlive it
	rows   []model.Row
	of     []*Model // of each row; nil: m
	tokens int
	rope   *nn.RopeTable

	mu       sync.Mutex // guards computed
	computed []modulations
}

// modulations are the modulations of sigmas by a model, row by row, in the memory of the host.
type modulations struct {
	of     *Model
	sigmas []float32
	values []float32 // [sigmas, modulationSize]
}

// compute evaluates rows from..to-1 in one pass.
func (b *batch) compute(s tensor.Session, from, to int) error {
	m := b.m
	lists := m.indices.Get().(*nn.Indices)
	defer m.indices.Put(lists)
	lists.Reset()
	channels, textWidth := m.card.LatentChannels, m.transformer.config.TextWidth
	rows := b.rows[from:to]
	p := packing{image: len(rows) * b.tokens}
	longest := 0
	for _, r := range rows {
		_, tokens := embedsOf(r.Conditioning)
		p.text += tokens
		longest = max(longest, tokens)
	}
	n := p.text + p.image
	p.positions, p.groups = lists.Take(n), lists.Take(n)
	p.cos, p.sin = b.rope.Load(s, b.tokens+longest)
	order := lists.Take(n) // the sequences, one after the other
	x, embeds := tensor.NewMatrix(s, p.image, channels), tensor.NewMatrix(s, p.text, textWidth)

	// Rows of one sigma and model share a modulation.
	first := lists.Take(len(rows)) // the row where each modulation comes first
	groups := 0
	text, image, at := 0, p.text, 0
	for i, r := range rows {
		g := 0
		for g < groups && (rows[first[g]].Sigma != r.Sigma || b.modelOf(from+int(first[g])) != b.modelOf(from+i)) {
			g++
		}
		if g == groups {
			first[g] = int32(i)
			groups++
		}
		states, words := embedsOf(r.Conditioning)
		sequence := order[at : at+words+b.tokens]
		at += len(sequence)
		s.CopyIn(embeds.SliceRows(text, text+words), states)
		s.CopyIn(x.SliceRows(image-p.text, image-p.text+b.tokens), r.X)
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

	transformer, mod := b.mix(s, from, to, first[:groups])
	defer runtime.KeepAlive(mod)
	out := tensor.NewMatrix(s, p.image, channels)
	if err := transformer.forward(s, out, x, embeds, mod, &p, b.ctx.Err); err != nil {
		return err
	}
	for i, r := range rows {
		s.CopyOutLater(r.Dst, out.SliceRows(i*b.tokens, (i+1)*b.tokens))
	}
	return nil
}

// mix returns the transformer of a pass of rows from..to-1, and the modulations of the rows first, by their models.
func (b *batch) mix(s tensor.Session, from, to int, first []int32) (*mmdit, tensor.Matrix) {
	if b.of == nil {
		return b.m.transformer, b.modulations(s, b.m, b.sigmas(from, first))
	}
	var of []*mmdit
	var images, texts, ends []int // of tokens of each model, and of modulations
	var mods []tensor.Matrix
	text, g := 0, 0
	for i := from; i < to; {
		m, end := b.of[i], i
		for ; end < to && b.of[end] == m; end++ {
			_, words := embedsOf(b.rows[end].Conditioning)
			text += words
		}
		own := g
		for g < len(first) && from+int(first[g]) < end {
			g++
		}
		of, ends = append(of, m.transformer), append(ends, g)
		mods = append(mods, b.modulations(s, m, b.sigmas(from, first[own:g])))
		images, texts = append(images, (end-from)*b.tokens), append(texts, text)
		i = end
	}
	if len(of) == 1 {
		return of[0], mods[0]
	}
	all := tensor.NewMatrix(s, g, mods[0].Cols)
	at := 0
	for i, mod := range mods {
		rows := make([]int32, 0, g)
		for j := range ends[i] - at {
			rows = append(rows, int32(j))
		}
		s.Gather(all.SliceRows(at, ends[i]), mod, rows)
		at = ends[i]
	}
	runtime.KeepAlive(mods) // until the copies are launched
	return mixed(of, images, texts), all
}

// sigmas returns those of some rows, counted from the row from.
func (b *batch) sigmas(from int, rows []int32) []float32 {
	out := make([]float32, len(rows))
	for i, row := range rows {
		out[i] = b.rows[from+int(row)].Sigma
	}
	return out
}

// modulations returns the modulations of sigmas by model m [sigmas, modulationSize]. Those that the device does not
// have yet are computed together, and keepModulations gets them.
func (b *batch) modulations(s tensor.Session, m *Model, sigmas []float32) tensor.Matrix {
	size := m.transformer.modulationSize()
	held := make([]tensor.Matrix, len(sigmas))
	var missing []float32
	for i, sigma := range sigmas {
		var ok bool
		if held[i], ok = m.modulations.Get(sigma); !ok {
			missing = append(missing, sigma)
		}
	}
	if len(sigmas) == 1 && len(missing) == 0 {
		return held[0]
	}
	computed := tensor.NewMatrix(s, len(missing), size)
	if len(missing) > 0 {
		m.transformer.modulate(s, computed, missing)
		values := make([]float32, len(missing)*size)
		s.CopyOutLater(values, computed)
		b.mu.Lock()
		b.computed = append(b.computed, modulations{m, missing, values})
		b.mu.Unlock()
	}
	if len(missing) == len(sigmas) {
		return computed
	}
	all := tensor.NewMatrix(s, len(sigmas), size)
	next := 0 // row of computed
	for i := range sigmas {
		from, row := held[i], int32(0)
		if from.IsZero() {
			from, row = computed, int32(next)
			next++
		}
		s.Gather(all.SliceRows(i, i+1), from, []int32{row})
	}
	runtime.KeepAlive(held) // until the copies are launched: later passes run after them
	return all
}

// keepModulations puts the modulations that passes have computed on the device, where later passes find them: requests
// use the same sigmas again. Where passes may need that memory, they are computed each time.
func (b *batch) keepModulations() {
	for _, c := range b.computed {
		m, size := c.of, c.of.transformer.modulationSize()
		for i, sigma := range c.sigmas {
			if _, ok := m.modulations.Get(sigma); ok {
				continue
			}
			if limited, ok := m.device.(tensor.Limited); ok {
				free, _, err := limited.FreeSpace()
				if err != nil || free-m.device.WorkingBytes() < leastSpare*m.modulations.Limit {
					return
				}
			}
			if kept, err := m.device.Table(tensor.Floats(c.values[i*size:(i+1)*size], 1, size)); err == nil {
				m.modulations.Put(sigma, kept, 4*size)
			}
		}
	}
}
