package qwenimage

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/nn"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Velocity evaluates the transformer for rows of different prompts and sigmas. Each thread
// computes a part of the rows together, without padding.
func (m *Model) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
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
		m: m, ctx: ctx, rows: rows, tokens: tokens,
		rope: m.rope(size.Height/m.card.PixelsPerToken, size.Width/m.card.PixelsPerToken),
	}
	switch n := len(rows); {
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

	// Rows of one sigma share a modulation.
	first := lists.Take(len(rows)) // the row where each modulation's sigma comes first
	groups := 0
	text, image, at := 0, p.text, 0
	for i, r := range rows {
		g := 0
		for g < groups && rows[first[g]].Sigma != r.Sigma {
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

	mod := tensor.NewMatrix(s, groups, m.transformer.modulationSize())
	for g := range groups {
		m.modulation(s, mod.SliceRows(g, g+1), rows[first[g]].Sigma)
	}
	out := tensor.NewMatrix(s, p.image, channels)
	if err := m.transformer.forward(s, out, x, embeds, mod, &p, b.ctx.Err); err != nil {
		return err
	}
	for i, r := range rows {
		s.CopyOutLater(r.Dst, out.SliceRows(i*b.tokens, (i+1)*b.tokens))
	}
	return nil
}

// modulation writes the modulation of a sigma, from the cache if it is there: requests use the
// same sigmas again.
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
