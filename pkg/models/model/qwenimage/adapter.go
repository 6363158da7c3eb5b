package qwenimage

import (
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Adapted returns a model of the checkpoint plus exactly these adapters, also if there
// are none. It reads no files: projections that no adapter changes are shared, and so are
// text encoder, autoencoder, threads and conditionings. The new model has its own digest.
// Both models stay usable, and each must be closed.
//
// An adapter that does not fit is an error that names all its wrong modules.
func (m *Model) Adapted(adapters ...lora.Weighted) (model.Model, error) {
	t := m.base.clone()
	if err := nn.Adapt(m.device, t.projections(), adapters); err != nil {
		return nil, err
	}
	return m.derive(t, lora.WeightsDigest(m.baseDigest, adapters...)), nil
}

// BaseDigest returns the digest of the checkpoint without adapters.
func (m *Model) BaseDigest() string { return m.baseDigest }

// Modules returns the projections that adapters can change.
func (m *Model) Modules() lora.Table { return nn.Table(m.base.projections()) }

// Tensors returns the shapes of the tensors of the transformer.
func (m *Model) Tensors() lora.Shapes {
	l := nn.NewLoader(&safetensors.Archive{}, nil)
	loadMMDiT(l, m.base.config)
	return l.Expected()
}

// Replaced returns a model of the checkpoint with another transformer.
func (m *Model) Replaced(weights *lora.Full, digest string) (model.Model, error) {
	l := nn.NewLoader(weights.Archive(), m.device)
	t := loadMMDiT(l, m.base.config)
	if err := l.Finish(); err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	return m.derive(t, digest), nil
}

// derive returns a model that shares everything with m but the transformer.
func (m *Model) derive(t *mmdit, digest string) *Model {
	n := &Model{shared: m.shared, card: m.card, transformer: t}
	n.modulations.Limit = m.modulations.Limit
	n.card.WeightsDigest = digest
	m.users.Add(1)
	return n
}

// projections returns all projections by their names in a checkpoint, which adapters use,
// too.
func (m *mmdit) projections() map[string]nn.Projection {
	d := m.config.width()
	at := func(l *nn.Linear, from, n, k int) nn.Projection { return nn.Projection{In: l, From: from, N: n, K: k} }
	p := map[string]nn.Projection{
		"img_in":          at(&m.imgIn, 0, d, m.config.In),
		"txt_in":          at(&m.textIn, 0, d, m.config.TextWidth),
		"norm_out.linear": at(&m.modOut, 0, 2*d, d),
		"proj_out":        at(&m.out, 0, m.config.In, d),
		"time_text_embed.timestep_embedder.linear_1": at(&m.time1, 0, d, timeChannels),
		"time_text_embed.timestep_embedder.linear_2": at(&m.time2, 0, d, d),
	}
	for i := range m.blocks {
		stream := func(name string, s *mmditStream, attn [4]string) {
			block := fmt.Sprintf("transformer_blocks.%d.", i)
			for j, q := range attn[:3] {
				p[block+"attn."+q] = at(&s.qkv, j*d, d, d)
			}
			p[block+"attn."+attn[3]] = at(&s.out, 0, d, d)
			p[block+name+"_mod.1"] = at(&s.mod, 0, 6*d, d)
			p[block+name+"_mlp.net.0.proj"] = at(&s.up, 0, 4*d, d)
			p[block+name+"_mlp.net.2"] = at(&s.down, 0, d, 4*d)
		}
		stream("img", &m.blocks[i].img, [4]string{"to_q", "to_k", "to_v", "to_out.0"})
		stream("txt", &m.blocks[i].txt, [4]string{"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"})
	}
	return p
}

// clone returns a transformer whose projections may be replaced.
func (m *mmdit) clone() *mmdit {
	n := *m
	n.blocks = slices.Clone(m.blocks)
	return &n
}
