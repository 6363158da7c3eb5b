package cpu

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Attention computes, per sequence and head,
//
//	dst[i] = sum_j p[i,j] v[j] / sum_j p[i,j], p[i,j] = exp(scale (s[i,j] - max_j s[i,j])),
//	s[i,j] = sum_c q[i,c] k[j,c]
//
// with q [Lq, Heads*D], k [Lk, KVHeads*D], v [Lk, KVHeads*Dv], dst [Lq, Heads*Dv].
// Scores exist for a few queries of one head at a time. dst must not overlap k and v;
// it may be q.
func (c *CPU) Attention(dst, q, k, v Matrix, cfg tensor.Attention) {
	t := &c.attn
	t.prepare(c, dst, q, k, v, cfg)
	c.run(t, len(t.seqs)*t.kvHeads, c.threadsFor(8*t.kept*(k.Cols+v.Cols)))
	t.phase = attend
	c.run(t, t.blocks, c.threadsFor(t.work))
	t.release()
}

// sequence is the plan of one sequence.
type sequence struct {
	queries []int32 // rows of q; nil: all
	keys    []int32 // kept rows of k; nil: all
	nq, nk  int
	seen    []int32 // seen[i]: kept keys that query i sees; nil: all nk
	packed  int     // where its packed keys and values start
	rows    int     // queries of a block
	blocks  int     // blocks of one head
}

const (
	packKV = iota
	attend
)

type attentionTask struct {
	c            *CPU
	dst, q, k, v Matrix
	heads        int
	kvHeads      int
	d, dv        int
	scale        float32
	phase        int
	seqs         []sequence
	index        []int32 // storage of keys and seen
	data         []float32
	kept         int // keys of all sequences
	blocks       int
	work         int
}

// prepare sets up one call of CPU.Attention: it checks the arguments, fills in defaults (as many
// key heads as heads, scale 1/sqrt(d)) and plans the work. Arguments that do not fit panic.
func (t *attentionTask) prepare(c *CPU, dst, q, k, v Matrix, cfg tensor.Attention) {
	t.c, t.dst, t.q, t.k, t.v = c, dst, q, k, v
	t.heads, t.kvHeads = cfg.Heads, cfg.KVHeads
	if t.kvHeads == 0 {
		t.kvHeads = t.heads
	}
	if t.heads < 1 || t.kvHeads < 1 || t.heads%t.kvHeads != 0 {
		panic(fmt.Sprintf("tensor: attention of %d heads, %d key heads", cfg.Heads, cfg.KVHeads))
	}
	t.d, t.dv = q.Cols/t.heads, v.Cols/t.kvHeads
	q.check("attention", "q", q.Rows, t.heads*t.d)
	k.check("attention", "k", k.Rows, t.kvHeads*t.d)
	v.check("attention", "v", k.Rows, t.kvHeads*t.dv)
	dst.check("attention", "dst", q.Rows, t.heads*t.dv)
	if t.d == 0 || t.dv == 0 {
		panic("tensor: attention: empty heads")
	}
	t.scale = cfg.Scale
	if t.scale == 0 {
		t.scale = float32(1 / math.Sqrt(float64(t.d)))
	}
	if !(t.scale > 0) {
		panic(fmt.Sprintf("tensor: attention: scale %v", t.scale))
	}
	if cfg.Mask != nil && len(cfg.Mask) != k.Rows {
		panic(fmt.Sprintf("tensor: attention: mask of %d keys, want %d", len(cfg.Mask), k.Rows))
	}
	if cfg.Sequences != nil && cfg.Keys == nil && q.Rows != k.Rows {
		panic("tensor: attention: sequences need as many queries as keys")
	}
	if cfg.Keys != nil && len(cfg.Keys) != len(cfg.Sequences) {
		panic(fmt.Sprintf("tensor: attention: keys of %d sequences, want %d", len(cfg.Keys), len(cfg.Sequences)))
	}
	t.phase = packKV
	t.plan(cfg)
}

// plan fills seqs, one for each sequence of rows that attend to each other, and counts the blocks
// of queries, the work and the memory for packed keys and values. Row numbers out of range panic.
// The block size decides no bits.
func (t *attentionTask) plan(cfg tensor.Attention) {
	t.seqs, t.index = t.seqs[:0], t.index[:0]
	if cfg.Sequences == nil {
		t.seqs = append(t.seqs, sequence{nq: t.q.Rows, nk: t.k.Rows})
	}
	for i, rows := range cfg.Sequences {
		keys := rows
		if checkRows(rows, t.q.Rows); cfg.Keys != nil {
			keys = cfg.Keys[i]
			checkRows(keys, t.k.Rows)
		}
		t.seqs = append(t.seqs, sequence{queries: rows, keys: keys, nq: len(rows), nk: len(keys)})
	}
	size := 0
	t.kept, t.blocks, t.work = 0, 0, 0
	for i := range t.seqs {
		s := &t.seqs[i]
		t.compressKeys(s, cfg)
		s.packed = size
		t.kept += s.nk
		size += t.kvHeads * (t.keySize(s) + t.valueSize(s))
		// A strip of scores stays in the second level cache.
		tall := t.c.k.tileRows
		s.rows = tall * max(2, min(4, 65536/(tall*max(s.nk, 1))))
		s.blocks = (s.nq + s.rows - 1) / s.rows
		t.blocks += t.heads * s.blocks
		t.work += t.heads * s.nq * s.nk * (t.d + t.dv + 16)
	}
	t.data = t.c.packing.floats(size)
	t.c.zeros(t.d)
}

func checkRows(rows []int32, n int) {
	for _, r := range rows {
		if r < 0 || int(r) >= n {
			panic(fmt.Sprintf("tensor: attention: row %d of %d", r, n))
		}
	}
}

// compressKeys lists the keys of sequence s that cfg.Mask keeps in s.keys, and, in causal
// attention, how many of them each query sees in s.seen. plan calls it for each sequence; the
// kernels then know no mask.
func (t *attentionTask) compressKeys(s *sequence, cfg tensor.Attention) {
	all := s.nk
	first := len(t.index) // seen, then keys
	if cfg.Causal {
		for i := range s.nq {
			t.index = append(t.index, int32(max(0, min(all, i+1+all-s.nq))))
		}
		s.seen = t.index[first:len(t.index):len(t.index)]
	}
	if cfg.Mask == nil {
		return
	}
	start, j, q := len(t.index), 0, 0
	for ; j <= all; j++ {
		// Queries that see exactly j keys see what is kept of them.
		for q < len(s.seen) && int(s.seen[q]) == j {
			s.seen[q] = int32(len(t.index) - start)
			q++
		}
		if j == all {
			break
		}
		r := int32(j)
		if s.keys != nil {
			r = s.keys[j]
		}
		if cfg.Mask[r] {
			t.index = append(t.index, r)
		}
	}
	s.keys = t.index[start:len(t.index):len(t.index)]
	s.nk = len(s.keys)
}

func (t *attentionTask) keySize(s *sequence) int   { return panels(s.nk) * panelCols * t.d }
func (t *attentionTask) valueSize(s *sequence) int { return panels(t.dv) * panelCols * s.nk }

func (t *attentionTask) release() {
	clear(t.seqs)
	*t = attentionTask{seqs: t.seqs[:0], index: t.index[:0]}
}

// part implements task. In the first phase (packKV) part i packs the keys and values of one head of
// a sequence; in the second it computes one block of queries of a head. slot names the thread's
// scratch memory.
func (t *attentionTask) part(i, slot int) {
	if t.phase == packKV {
		t.packHead(&t.c.slots[slot], &t.seqs[i/t.kvHeads], i%t.kvHeads)
		return
	}
	for n := range t.seqs {
		s := &t.seqs[n]
		if i < t.heads*s.blocks {
			t.attendBlock(&t.c.slots[slot], s, i/s.blocks, i%s.blocks*s.rows)
			return
		}
		i -= t.heads * s.blocks
	}
}

// packHead lays out the kept keys of one key head of sequence s as the right operand of q k^T and
// its values as the right operand of p v, in panels of panelCols columns padded with zeros, for the
// matrix kernels.
func (t *attentionTask) packHead(sl *slot, s *sequence, head int) {
	keys := t.data[s.packed+head*t.keySize(s):][:t.keySize(s)]
	values := t.data[s.packed+t.kvHeads*t.keySize(s)+head*t.valueSize(s):][:t.valueSize(s)]
	row := func(j int) int {
		if s.keys != nil {
			return int(s.keys[j])
		}
		return j
	}
	for j0 := 0; j0 < s.nk; j0 += panelCols {
		rows := &sl.rows
		for r := range rows {
			if j0+r < s.nk {
				rows[r] = t.k.Data[row(j0+r)*t.k.Stride+head*t.d:][:t.d]
			} else {
				rows[r] = t.c.zeros(t.d)
			}
		}
		t.c.k.packPanel(keys[j0*t.d:(j0+panelCols)*t.d], rows)
	}
	for c0 := 0; c0 < t.dv; c0 += panelCols {
		to := values[c0*s.nk:][:s.nk*panelCols]
		for j := range s.nk {
			x := t.v.Data[row(j)*t.v.Stride+head*t.dv:][c0:t.dv]
			if len(x) >= panelCols {
				part := [panelCols]float32(x) // no call of memmove
				*(*[panelCols]float32)(to[j*panelCols:]) = part
			} else {
				clear(to[j*panelCols+copy(to[j*panelCols:], x):][:panelCols-len(x)])
			}
		}
	}
}

// attendBlock writes the attention outputs of queries i0 to i0+rows-1 of one head to dst, rows
// being the rows of a block or what is left of the sequence. Scores, sums and the copied queries
// are in memory of the slot. A query that sees no key gets zeros.
func (t *attentionTask) attendBlock(sl *slot, s *sequence, head, i0 int) {
	kern := t.c.k
	rows := min(s.rows, s.nq-i0)
	width := panels(s.nk) * panelCols
	outWidth := panels(t.dv) * panelCols
	buf := sl.strip.floats(s.rows*(width+outWidth+t.d) + 3*alignFloats)
	scores, buf := buf[:rows*width], buf[rows*width:]
	out, q := buf[:rows*outWidth], buf[rows*outWidth:][:rows*t.d]
	at := func(i int) int {
		if s.queries != nil {
			return int(s.queries[i0+i])
		}
		return i0 + i
	}
	for i := range rows {
		copy(q[i*t.d:(i+1)*t.d], t.q.Data[at(i)*t.q.Stride+head*t.d:][:t.d])
	}
	visible := s.nk // the most keys that a query of the block sees: those of the last one
	if s.seen != nil {
		visible = int(s.seen[i0+rows-1])
	}
	if visible == 0 {
		for i := range rows {
			clear(t.dst.Data[at(i)*t.dst.Stride+head*t.dv:][:t.dv])
		}
		return
	}
	kv := head * t.kvHeads / t.heads
	keys := t.data[s.packed+kv*t.keySize(s):]
	values := t.data[s.packed+t.kvHeads*t.keySize(s)+kv*t.valueSize(s):]
	sl.multiplyPanels(kern, scores, width, q, t.d, keys, t.d, panels(visible), t.d, rows)
	for i := range rows {
		n := visible
		if s.seen != nil {
			n = int(s.seen[i0+i])
		}
		p := scores[i*width : i*width+visible]
		clear(p[n:])
		if n == 0 {
			continue
		}
		sum := kern.expSum(p[:n], kern.maxOf(p[:n]), t.scale)
		q[i] = 1 / sum // the queries are used up
	}
	sl.multiplyPanels(kern, out, outWidth, scores, width, values, s.nk, panels(t.dv), visible, rows)
	for i := range rows {
		dst := t.dst.Data[at(i)*t.dst.Stride+head*t.dv:][:t.dv]
		if s.seen != nil && s.seen[i0+i] == 0 {
			clear(dst)
			continue
		}
		kern.scale(dst, out[i*outWidth:][:t.dv], q[i])
	}
}

// multiplyPanels writes the product of a [rows, k] and n whole panels of b to c, for one block of
// attention: scores, then outputs. A panel of b has bk rows, of which the first k are used. lda and
// ldc are the lengths of the rows of a and c.
func (s *slot) multiplyPanels(
	kern *kernelSet, c []float32, ldc int, a []float32, lda int, b []float32, bk, n, k, rows int,
) {
	t := &s.tile
	t.lda, t.ldc, t.k, t.bstride, t.init = lda, ldc, k, bk*panelCols, tileZero
	for j := 0; j < n; j += t.panels {
		t.panels = min(kern.tileCols, n-j)
		t.b = &b[j*bk*panelCols]
		for i := 0; i < rows; i += t.rows {
			t.rows = tileHeight(rows-i, kern.tileRows)
			t.a, t.c = &a[i*lda], &c[i*ldc+j*panelCols]
			kern.tile(t)
		}
	}
}
