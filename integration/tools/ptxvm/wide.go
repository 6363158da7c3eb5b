package ptxvm

import (
	"encoding/binary"
	"math/bits"
)

// asyncCopy is a cp.async that has not arrived. Group -1 is not committed.
type asyncCopy struct {
	in      *inst
	address uint64
	data    [16]byte
	n       int
	group   int
}

// Modes of shfl.
const (
	shflUp = iota
	shflDown
	shflXor
	shflIdx
)

// shuffle is shfl.sync: d and the predicate in list 0, value a, lane b, segments in list 1.
func shuffle(w *warp, in *inst, m uint32) {
	values, valid := w.r32[in.a], uint32(0)
	to := &w.r32[in.d]
	for rest := m; rest != 0; rest &= rest - 1 {
		lane := bits.TrailingZeros32(rest)
		b, c := int(w.r32[in.b][lane]&31), w.r32[in.list[1][0]][lane]
		clamp, segment := int(c&31), int(c>>8&31)
		low := lane & segment
		high := low | clamp&^segment
		j, ok := 0, false
		switch in.imm {
		case shflUp:
			j = lane - b
			ok = j >= high
		case shflDown:
			j = lane + b
			ok = j <= high
		case shflXor:
			j = lane ^ b
			ok = j <= high
		case shflIdx:
			j = low | b&^segment
			ok = j <= high
		}
		if !ok {
			j = lane
		}
		if m>>j&1 == 0 {
			w.fail(Divergence, lane, "reads lane %d, which does not take part", j)
		}
		to[lane] = values[j]
		valid |= flag(ok, lane)
	}
	if len(in.list[0]) > 0 {
		p := in.list[0][0]
		w.p[p] = w.p[p]&^m | valid&m
	}
}

// warpSync is bar.warp.sync: it orders the memory of its lanes.
func warpSync(w *warp, _ *inst, _ uint32) {
	if w.stamp>>syncShift&(1<<syncBits-1) < waited-1 {
		w.stamp += 1 << syncShift
	}
}

// ldmatrix loads 8 x 8 matrices of 16-bit elements: lanes 8i to 8i+7 give the rows of
// matrix i, the slots of list 0 are its fragments.
func ldmatrix(w *warp, in *inst, _ uint32) {
	var rows [8][]byte
	for i, slot := range in.list[0] {
		for r := range rows {
			lane := 8*i + r
			rows[r] = w.access(in, lane, w.r64[in.a][lane]+in.offset, 16, false)
		}
		for lane := range 32 {
			g, t := lane>>2, 2*(lane&3)
			if in.imm != 0 { // transposed
				low, high := rows[t][2*g:], rows[t+1][2*g:]
				w.r32[slot][lane] = uint32(binary.LittleEndian.Uint16(low)) |
					uint32(binary.LittleEndian.Uint16(high))<<16
			} else {
				w.r32[slot][lane] = binary.LittleEndian.Uint32(rows[g][2*t:])
			}
		}
	}
}

// mma is mma.sync m16n8k16 of bf16 to float32: lists d, a, b, c.
func mma(w *warp, in *inst, _ uint32) {
	var a, b [16][16]uint32 // rows of A, columns of B, as float32 bits
	w.rows(&a, in.list[1])
	for lane := range 32 {
		g, t := lane>>2, 2*(lane&3)
		for i, slot := range in.list[2] {
			x := w.r32[slot][lane]
			b[g][t+8*i], b[g][t+8*i+1] = x<<16, x&0xffff0000
		}
	}
	n := w.block.vm.options.Numerics
	var out [4]v32
	for lane := range 32 {
		g, t := lane>>2, 2*(lane&3)
		for i, slot := range in.list[3] {
			out[i][lane] = n.dot(w.r32[slot][lane], &a[g+8*(i>>1)], &b[t+i&1])
		}
	}
	for i, slot := range in.list[0] {
		w.r32[slot] = out[i]
	}
}

// rows unpacks the fragments of 16 rows of A.
func (w *warp) rows(a *[16][16]uint32, slots []int) {
	for lane := range 32 {
		g, t := lane>>2, 2*(lane&3)
		for i, slot := range slots {
			row, k, x := g+8*(i&1), t+8*(i>>1), w.r32[slot][lane]
			a[row][k], a[row][k+1] = x<<16, x&0xffff0000
		}
	}
}

// copyAsync is cp.async: the data arrives when it is waited for, and not before.
func copyAsync(w *warp, in *inst, m uint32) {
	for rest := m; rest != 0; rest &= rest - 1 {
		lane := bits.TrailingZeros32(rest)
		size := in.size
		if len(in.list[0]) > 0 {
			if size = int(w.r32[in.list[0][0]][lane]); size > in.size {
				w.fail(Bounds, lane, "copies %d bytes of a size of %d", size, in.size)
			}
		}
		c := asyncCopy{in: in, address: w.r64[in.d][lane] + in.offset, n: in.size, group: -1}
		from := *in
		from.space, from.hit = global, in.hit
		if size > 0 {
			// The source is aligned as if all of it were read.
			address := w.r64[in.a][lane] + in.imm
			if address&uint64(in.size-1) != 0 {
				w.fail(Misaligned, lane, "copies %d bytes from %#x", in.size, address)
			}
			for i := 0; i < size; {
				step := 1 << min(bits.TrailingZeros(uint(size-i)), bits.TrailingZeros(uint(i)|16))
				copy(c.data[i:], w.access(&from, lane, address+uint64(i), step, false))
				i += step
			}
			in.hit = from.hit
		}
		to := w.access(in, lane, c.address, in.size, true)
		r, at := w.find(in, lane, c.address)
		for i := range to {
			to[i] = fresh
			if r.state != nil {
				r.state[int(at)+i] = copying
			}
		}
		w.copies[lane] = append(w.copies[lane], c)
	}
}

// commit closes the group of the copies so far, which is one older from now on.
func commit(w *warp, _ *inst, m uint32) {
	for rest := m; rest != 0; rest &= rest - 1 {
		copies := w.copies[bits.TrailingZeros32(rest)]
		for i := range copies {
			copies[i].group++
		}
	}
}

// waitGroup completes the copies of all groups but the in.imm newest.
func waitGroup(w *warp, in *inst, m uint32) {
	for rest := m; rest != 0; rest &= rest - 1 {
		lane := bits.TrailingZeros32(rest)
		left := w.copies[lane][:0]
		for _, c := range w.copies[lane] {
			if c.group < int(in.imm) {
				left = append(left, c)
				continue
			}
			r, at := w.find(c.in, lane, c.address)
			if r.state != nil {
				for i := range c.n {
					r.state[int(at)+i] = written
				}
			}
			copy(w.access(c.in, lane, c.address, c.n, true), c.data[:c.n])
		}
		w.copies[lane] = left
	}
}

func waitAll(w *warp, in *inst, m uint32) {
	commit(w, in, m)
	waitGroup(w, in, m)
}
