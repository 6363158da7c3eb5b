// Package qwen2 is the Qwen2 family of language models: Qwen1.5, Qwen2 and Qwen2.5, from
// folders in the layout of transformers.
package qwen2

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model/nn"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Model is a checkpoint of the family, computed in float32.
//
// Its memory holds the projections, in bf16 if the files and the device have them so, and all other weights in
// float32; the embedding of a tied checkpoint twice; the cache; and, for each thread, the activations of at most
// passTokens tokens.
type Model struct {
	*shared
	card    lm.Card
	decoder *nn.Decoder
	head    nn.Linear // [vocabulary, width]
	cache   cache
	closed  sync.Once
}

// shared is what a model shares with the models derived from it.
type shared struct {
	users      atomic.Int32
	base       *nn.Decoder // without adapters
	baseHead   nn.Linear
	baseDigest string
	config     *nn.DecoderConfig
	positions  int
	chatCodec
	device    tensor.Device
	ownDevice bool         // closed with the last model
	caches    sync.RWMutex // see cache
}

var _ lora.Adaptable[lm.Model] = (*Model)(nil)

// Card describes the model.
func (m *Model) Card() lm.Card { return m.card }

// NewSequence returns an empty sequence.
func (m *Model) NewSequence() lm.Sequence { return &sequence{m, m.cache.pages.NewSpan()} }

// MemoryBytes returns the memory of the weights, and that of sessions and cache.
func (m *Model) MemoryBytes() (weights, working int) {
	return m.decoder.Bytes() + m.head.Bytes(), m.device.WorkingBytes() + m.cache.bytes()
}

// Close ends the use of the model. The device is closed with the last of the models that share it: a model and those
// made from it.
func (m *Model) Close() error {
	var err error
	m.closed.Do(func() {
		if m.users.Add(-1) == 0 {
			err = m.closeDevice()
		}
	})
	return err
}

// closeDevice closes the device unless it belongs to the caller.
func (s *shared) closeDevice() error {
	if !s.ownDevice {
		return nil
	}
	return s.device.Close()
}

// modulePrefix is what the names of the decoder's modules begin with in a checkpoint.
const modulePrefix = "model."

// Adapted returns a model of the checkpoint plus exactly these adapters, with a cache of its own, see lora.Adaptable.
// No memory is an error, too.
func (m *Model) Adapted(adapters ...lora.Weighted) (lm.Model, error) {
	d := m.base.Clone()
	if err := nn.Adapt(m.device, d.Projections(modulePrefix), adapters); err != nil {
		return nil, err
	}
	return m.derive(d, m.baseHead, lora.WeightsDigest(m.baseDigest, adapters...)), nil
}

// derive returns a model of other weights, which shares all but them and the cache with m.
func (m *Model) derive(d *nn.Decoder, head nn.Linear, digest string) *Model {
	n := &Model{shared: m.shared, card: m.card, decoder: d, head: head}
	n.cache.init(m.device, &m.caches, m.cache.cols, 4*m.cache.cols*m.cache.pages.Tokens())
	n.card.WeightsDigest = digest
	m.users.Add(1)
	return n
}

// BaseDigest returns the digest of the checkpoint without adapters.
func (m *Model) BaseDigest() string { return m.baseDigest }

// Modules returns the projections that adapters can change.
func (m *Model) Modules() lora.Table { return nn.Table(m.base.Projections(modulePrefix)) }

// Tensors returns the shapes of the tensors of the checkpoint; a tied head is none of them.
func (m *Model) Tensors() lora.Shapes { return shapesOf(m.config, m.positions) }

func shapesOf(c *nn.DecoderConfig, positions int) lora.Shapes {
	l := nn.NewLoader(&safetensors.Archive{}, nil)
	load(l, c, positions)
	return l.Expected()
}

// Replaced returns a model with other weights in place of all of the checkpoint's.
func (m *Model) Replaced(weights *lora.Full, digest string) (lm.Model, error) {
	l := nn.NewLoader(weights.Archive(), m.device)
	d, head := load(l, m.config, m.positions)
	if err := l.Finish(); err != nil {
		return nil, fmt.Errorf("weights: %w", err)
	}
	return m.derive(d, head, digest), nil
}

// Mix implements lora.Mixer: adapters leave the head, which tells checkpoints apart.
func (m *Model) Mix() any { return m.head.W }

// passTokens is the most tokens of one pass: it bounds the memory of activations.
const passTokens = 512

// splitBytes is the size of the weights below which each thread computes rows of its own. For
// larger weights all threads compute one product together: else each would read all weights.
const splitBytes = 16 << 20

// Forward implements lm.Model: it appends ids to sequences, in passes of at most passTokens, and
// sets the logits of rows that ask for them. On an error (see checkRows, a full cache, the device,
// ctx) all sequences are as before.
func (m *Model) Forward(ctx context.Context, rows []lm.Row) (err error) {
	if err := m.checkRows(rows); err != nil {
		return err
	}
	rows, models := sortRows(rows)
	before := make([]int, len(rows))
	for i, r := range rows {
		before[i] = r.Sequence.Len()
	}
	defer func() {
		if err != nil {
			for i, r := range rows {
				r.Sequence.(*sequence).Cut(before[i])
			}
		}
	}()
	for i, r := range rows {
		if err := r.Sequence.(*sequence).Grow(len(r.IDs)); err != nil {
			return fmt.Errorf("row %d: %w", i, err)
		}
	}
	for _, of := range models {
		if err := of.cache.growToPages(ctx); err != nil {
			return err
		}
	}
	var parts []part
	taken := 0
	flush := func() error {
		if len(parts) == 0 {
			return nil
		}
		err := m.computeParts(ctx, parts)
		parts, taken = parts[:0], 0
		return err
	}
	for i, r := range rows {
		for from := 0; from < len(r.IDs); {
			n := min(len(r.IDs)-from, passTokens-taken)
			s := r.Sequence.(*sequence)
			p := part{of: s.of, rows: s.Rows()[:before[i]+from+n], ids: r.IDs[from : from+n]}
			each := len(r.Logits) == len(r.IDs)*m.card.Vocabulary
			if each {
				p.logits = r.Logits[from*m.card.Vocabulary : (from+n)*m.card.Vocabulary]
			}
			if from += n; from == len(r.IDs) && !each {
				p.logits = r.Logits
			}
			parts = append(parts, p)
			if taken += n; taken == passTokens {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	return flush()
}

// sortRows returns rows with those of one model one after the other, and the models.
func sortRows(rows []lm.Row) (sorted []lm.Row, models []*Model) {
	place := func(r lm.Row) int {
		of := r.Sequence.(*sequence).of
		if i := slices.Index(models, of); i >= 0 {
			return i
		}
		models = append(models, of)
		return len(models) - 1
	}
	for _, r := range rows {
		place(r)
	}
	sorted = slices.Clone(rows)
	slices.SortStableFunc(sorted, func(a, b lm.Row) int { return place(a) - place(b) })
	return sorted, models
}

// checkRows returns an error that names the row unless Forward can compute all rows: sequences of
// this checkpoint, each once, ids of the vocabulary, and not too many.
func (m *Model) checkRows(rows []lm.Row) error {
	seen := make(map[*sequence]bool, len(rows))
	for i, r := range rows {
		s, ok := r.Sequence.(*sequence)
		switch {
		case !ok || s.of.Mix() != m.Mix():
			return fmt.Errorf("row %d: a sequence of another checkpoint; must be of this one", i)
		case seen[s]:
			return fmt.Errorf("row %d: a sequence that is in the call already; must be there once", i)
		case len(r.IDs) == 0:
			return fmt.Errorf("row %d: no ids; must be at least one", i)
		case s.Len()+len(r.IDs) > m.card.MaxPositions:
			return fmt.Errorf("row %d: %w: %d tokens; must be at most %d", i, lm.ErrLong, s.Len()+len(r.IDs),
				m.card.MaxPositions)
		case r.Logits != nil && len(r.Logits) != m.card.Vocabulary && len(r.Logits) != len(r.IDs)*m.card.Vocabulary:
			return fmt.Errorf("row %d: logits of %d elements; must be %d, or as many for each id", i, len(r.Logits),
				m.card.Vocabulary)
		}
		seen[s] = true
		for _, id := range r.IDs {
			if id < 0 || int(id) >= m.card.Vocabulary {
				return fmt.Errorf("row %d: %w: id %d; must be below %d", i, lm.ErrPrompt, id, m.card.Vocabulary)
			}
		}
	}
	return nil
}

// part is some tokens (ids) of a sequence of a model in one pass. rows are its rows in the cache, up to the last of
// ids. logits are those after the last of ids, or after each.
type part struct {
	of     *Model
	rows   []int32
	ids    []int32
	logits []float32
}

// computeParts runs the network on parts of rows: side by side if the model is so small that one
// thread each is faster, else in one pass. Errors are those of the device and ctx.
func (m *Model) computeParts(ctx context.Context, parts []part) error {
	m.caches.RLock()
	defer m.caches.RUnlock()
	if len(parts) > 1 && m.decoder.Bytes() < splitBytes {
		return nn.Split(ctx, m.device, len(parts),
			func(s tensor.Session, from, to int) error { return m.forwardParts(ctx, s, parts[from:to]) })
	}
	return m.device.Run(ctx, true, func(s tensor.Session) error { return m.forwardParts(ctx, s, parts) })
}

// forwardParts runs the network once on parts, writes their keys and values to the cache, and sets
// the logits of those that have them, when the session ends. It fails only if ctx has ended.
func (m *Model) forwardParts(ctx context.Context, s tensor.Session, parts []part) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	tokens := 0
	for _, p := range parts {
		tokens += len(p.ids)
	}
	lists := make([]int32, 4*tokens) // ids, rows, positions, tokens of the pass
	ids, rows := lists[:0:tokens], lists[tokens:tokens:2*tokens]
	positions, order := lists[2*tokens:2*tokens:3*tokens], lists[3*tokens:]
	var last []int32
	var pasts []nn.Past
	var decoders []*nn.Decoder
	var counts []int // of the tokens up to the end of each
	for i, p := range parts {
		from, n := len(ids), len(p.ids)
		if i == 0 || p.of != parts[i-1].of {
			pasts = append(pasts, nn.Past{Cache: p.of.cache.matrix, From: from})
			decoders, counts = append(decoders, p.of.decoder), append(counts, 0)
		}
		k := len(pasts) - 1
		past := &pasts[k]
		ids = append(ids, p.ids...)
		rows = append(rows, p.rows[len(p.rows)-n:]...)
		for j := range n {
			positions = append(positions, int32(len(p.rows)-n+j))
			order[from+j] = int32(from + j)
		}
		past.Queries, past.Keys = append(past.Queries, order[from:from+n]), append(past.Keys, p.rows)
		past.Rows, past.Positions, counts[k] = rows[past.From:], positions[past.From:], from+n
		for j := n - len(p.logits)/m.card.Vocabulary; j < n; j++ {
			last = append(last, int32(from+j))
		}
	}
	d := m.decoder.Config.Width
	x := tensor.NewMatrix(s, tokens, d)
	nn.MixDecoders(decoders, counts).Forward(s, x, ids, pasts...)
	if len(last) == 0 {
		return nil
	}
	ends, logits := tensor.NewFactors(s, len(last), d), tensor.NewMatrix(s, len(last), m.card.Vocabulary)
	s.Gather(ends, x, last)
	m.decoder.Norm(s, ends, ends)
	m.head.Apply(s, logits, ends, tensor.Epilogue{})
	i := 0
	for _, p := range parts {
		if n := len(p.logits) / m.card.Vocabulary; n > 0 {
			s.CopyOutLater(p.logits, logits.SliceRows(i, i+n))
			i += n
		}
	}
	return nil
}
