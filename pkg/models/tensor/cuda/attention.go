package cuda

import (
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

const (
	valueColumns = 128 // of a value that a warp of attention_f32, or a block of attention_bf16, makes
	queryTile    = 128 // queries that a block of attention_bf16 takes
	flashColumns = 384 // of a head that attention_bf16 takes at most
)

// attentionPlan is which queries see which keys, on the device. All blocks of a transformer ask
// the same.
type plan struct {
	of            tensor.Attention // a copy of the lists that it was made of
	lq, lk        int
	n             int        // queries
	queries, keys driver.Arg // see attended
	tiles         driver.Arg // pairs: the first query of a tile, and how many
	tileCount     int
}

func (p *plan) fits(a tensor.Attention, lq, lk int) bool {
	return p.lq == lq && p.lk == lk && p.of.Causal == a.Causal && (p.of.Mask == nil) == (a.Mask == nil) &&
		slices.Equal(p.of.Mask, a.Mask) &&
		(p.of.Sequences == nil) == (a.Sequences == nil) &&
		slices.EqualFunc(p.of.Sequences, a.Sequences, slices.Equal) &&
		slices.EqualFunc(p.of.Keys, a.Keys, slices.Equal)
}

// attentionPlan returns the lists of rows on the device that attention a over lq queries and lk
// keys needs, those of an earlier call of this session where they are the same. All layers of a
// network ask for the same few. Lists that do not fit panic.
func (s *session) attentionPlan(a tensor.Attention, lq, lk int) *plan {
	for _, p := range s.plans {
		if p.fits(a, lq, lk) {
			return p
		}
	}
	queries, keys := attentionLists(a, lq, lk)
	// A tile's queries see the first of one list of keys.
	var tiles []int32
	for i := 0; i < len(queries); i += 3 {
		last := len(tiles) - 2
		if last < 0 || tiles[last+1] == queryTile || queries[3*tiles[last]+1] != queries[i+1] {
			tiles = append(tiles, int32(i/3), 0)
			last += 2
		}
		tiles[last+1]++
	}
	of := tensor.Attention{Causal: a.Causal, Mask: slices.Clone(a.Mask)}
	of.Sequences, of.Keys = cloneLists(a.Sequences), cloneLists(a.Keys)
	p := &plan{of: of, lq: lq, lk: lk, n: len(queries) / 3, tileCount: len(tiles) / 2}
	p.queries, p.keys, p.tiles = s.uploadInts(queries), s.uploadInts(keys), s.uploadInts(tiles)
	const most = 4 // what an encoder, a transformer and an autoencoder ask, and one more
	if len(s.plans) == most {
		s.plans = s.plans[1:]
	}
	s.plans = append(s.plans, p)
	return p
}

func cloneLists(x [][]int32) [][]int32 {
	y := slices.Clone(x)
	for i, rows := range x {
		y[i] = slices.Clone(rows)
	}
	return y
}

// Attention implements tensor.Session: in bf16 by attentionBF16 if the device and the shapes allow,
// else in float32 by attentionF32. Arguments that do not fit panic; errors of the device come from
// Run.
func (s *session) Attention(dst, q, k, v tensor.Matrix, a tensor.Attention) {
	kv := a.KVHeads
	if kv == 0 {
		kv = a.Heads
	}
	if a.Heads < 1 || kv < 1 || a.Heads%kv != 0 || q.Cols%a.Heads != 0 || k.Cols%kv != 0 || v.Cols%kv != 0 ||
		q.Cols/a.Heads != k.Cols/kv {
		panic(fmt.Sprintf("tensor: attention: %d heads, %d of keys, over %d, %d and %d columns", a.Heads, kv, q.Cols,
			k.Cols, v.Cols))
	}
	d, dv := q.Cols/a.Heads, v.Cols/kv
	want("attention", "dst", dst, q.Rows, a.Heads*dv)
	want("attention", "v", v, k.Rows, kv*dv)
	if a.Mask != nil && len(a.Mask) != k.Rows {
		panic(fmt.Sprintf("tensor: attention: mask of %d for %d keys", len(a.Mask), k.Rows))
	}
	scale := a.Scale
	if scale == 0 {
		scale = float32(1 / math.Sqrt(float64(d)))
	}
	p := s.attentionPlan(a, q.Rows, k.Rows)
	if p.n == 0 || dv == 0 {
		return
	}
	defer s.releaseScratch()
	if s.d.bf16 && d == dv && d%8 == 0 && d <= flashColumns {
		s.attentionBF16(dst, q, k, v, p, a.Heads, kv, scale)
		return
	}
	s.attentionF32(dst, q, k, v, p, a.Heads, kv, scale)
}

// attentionF32 launches attention in float32 over the lists of p, for any shape that Attention has
// checked.
func (s *session) attentionF32(dst, q, k, v tensor.Matrix, p *plan, heads, kv int, scale float32) {
	d, dv := q.Cols/heads, v.Cols/kv
	if dst.Memory == q.Memory && !isBF16(q) && (d != dv || dv > valueColumns) {
		// A warp would write what others still read.
		own := s.scratch(q.Rows, q.Cols, q.Cols, tensor.F32)
		s.copy(own, q, 0)
		q = own
	}
	q, k, v = s.float(q), s.float(k), s.float(v)
	to := dst
	if isBF16(dst) {
		to = s.float(dst) // rows of no sequence keep their values
	}
	s.launchWarps("attention_f32", p.n*heads, blocks(dv, valueColumns), s.address(to), i32(to.Stride), s.address(q),
		i32(q.Stride),
		s.address(k), i32(k.Stride),
		s.address(v), i32(v.Stride), p.queries, p.keys, i32(p.n), i32(heads), i32(kv), i32(d), i32(dv),
		driver.Float(scale))
	if to != dst {
		s.copy(dst, to, 0)
	}
}

// attentionBF16 launches attention with factors in bf16 and without storing the scores
// (FlashAttention, Dao 2022), for heads whose columns are a multiple of 8 and equally many in keys
// and values.
func (s *session) attentionBF16(dst, q, k, v tensor.Matrix, p *plan, heads, kv int, scale float32) {
	d := q.Cols / heads
	// On a GPU with products of warpgroups: a tile of queries, three of keys, three of values, each of 128 rows in
	// bf16; and threads that load them.
	wgmma := s.d.kernels["attention_wgmma_128"] != nil && scale > 0
	name, shared := "attention_bf16_384", 0
	switch {
	case d <= 32:
		name = "attention_bf16_32"
	case d <= 64 && wgmma:
		name, shared = "attention_wgmma_64", 7*queryTile*64*2
	case d <= valueColumns && wgmma:
		name, shared = "attention_wgmma_128", 7*queryTile*128*2
	case d <= 64:
		name = "attention_bf16_64"
	case d <= valueColumns:
		name = "attention_bf16_128"
	}
	q, k, v = s.factor(q), s.factor(k), s.factor(v)
	threads := 2 * queryTile
	if shared > 0 {
		threads += 128
	}
	grid := driver.Grid{
		Blocks: driver.Dim{X: p.tileCount, Y: heads * blocks(d, valueColumns)}, Threads: driver.Dim{X: threads},
		Shared: shared,
	}
	s.launchGrid(name, grid, s.address(dst), i32(dst.Stride), s.address(q), i32(q.Stride), s.address(k), i32(k.Stride),
		s.address(v), i32(v.Stride), p.tiles, p.queries, p.keys, i32(heads), i32(kv), i32(d), driver.Float(scale),
		bf16Bits(dst))
}

// attentionLists lists, for each query, its row, where its keys begin in keys, and how many of them
// it sees; and the rows of the keys. What is masked is not listed. Row numbers out of range panic.
func attentionLists(a tensor.Attention, queryRows, keyRows int) (queries, keys []int32) {
	seq := func(rows, seenRows []int32, lq, lk int) {
		first, positions := len(keys), make([]int, 0, lk)
		for j := range lk {
			row := int32(j)
			if seenRows != nil {
				row = seenRows[j]
			}
			if a.Mask == nil || a.Mask[row] {
				keys = append(keys, row)
				positions = append(positions, j)
			}
		}
		seen := 0
		for i := range lq {
			row := int32(i)
			if rows != nil {
				row = rows[i]
			}
			for seen < len(positions) && (!a.Causal || positions[seen] <= i+lk-lq) {
				seen++
			}
			queries = append(queries, row, int32(first), int32(seen))
		}
	}
	if a.Sequences == nil {
		seq(nil, nil, queryRows, keyRows)
	}
	if a.Keys != nil && len(a.Keys) != len(a.Sequences) {
		panic(fmt.Sprintf("tensor: attention: keys of %d sequences, want %d", len(a.Keys), len(a.Sequences)))
	}
	for i, rows := range a.Sequences {
		checkRows("attention", "row", rows, len(rows), queryRows)
		seen := rows
		if a.Keys != nil {
			seen = a.Keys[i]
		}
		checkRows("attention", "key row", seen, len(seen), keyRows)
		seq(rows, seen, len(rows), len(seen))
	}
	return queries, keys
}
