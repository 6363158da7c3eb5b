package ptxvm

import (
	"math/bits"
	"slices"
)

const allLanes = 0xffffffff

// warp is 32 threads in lockstep.
type warp struct {
	block *block
	first int    // thread of lane 0
	start uint32 // lanes that exist
	alive uint32 // lanes that have not ended

	r32   []v32
	r64   []v64
	p     []uint32
	local [32]*region

	groups  []group // by program counter
	at      *inst   // being executed
	waiting int     // program counter of the barrier it waits at, or -1
	paused  bool    // others run first
	stamp   stamp   // of lane 0 now
	copies  [32][]asyncCopy
	async   async
	fences  [32][]stamp // when a lane executed fence.proxy.async

	t32 v32 // scratch of instructions that some lanes skip
	t64 v64
}

// group is lanes at one program counter. A parked one waits at an instruction that needs
// lanes which are elsewhere.
type group struct {
	pc     int
	lanes  uint32
	parked bool
}

type control int

const (
	plain control = iota
	branch
	exit
	barrier
)

// inst is a decoded instruction.
type inst struct {
	run     func(w *warp, in *inst, m uint32)
	control control
	line    int
	op      string
	text    string
	guard   int // predicate slot, or -1
	negated bool
	target  int
	uniform bool // of a branch: lanes agree

	need members // lanes that must take part

	d, a, b, c int // slots
	list       [4][]int
	offset     uint64
	space      space
	size       int // bytes of an access, or of an element
	vector     int
	imm        uint64
	signed     bool
	wide       bool // a load into registers of 64 bits
	hit        *region
	touches    []touch // registers of products, in instructions that are none
}

// members says which lanes an instruction needs.
type members int

const (
	anyLanes   members = iota
	everyLane          // all 32
	livingLane         // all that have not ended
	maskLanes          // those of the mask in slot c
)

// reset makes the warp as at the start of a block.
func (w *warp) reset(b *block) {
	w.block, w.alive, w.waiting = b, w.start, -1
	w.groups = append(w.groups[:0], group{lanes: w.start})
	w.stamp = b.serial<<serialShift | stamp(w.first)<<threadShift
	w.async.reset(b.kernel)
	for i := range w.copies {
		w.copies[i], w.fences[i] = w.copies[i][:0], w.fences[i][:0]
		if w.local[i] != nil {
			w.local[i].renew()
		}
	}
}

// run executes until the warp waits at a barrier, has arrived at one, or has ended.
func (w *warp) run() {
	for w.paused = false; w.alive != 0 && w.waiting < 0 && !w.paused; {
		i := w.pick()
		g := w.groups[i]
		limit := int(^uint(0) >> 1)
		for j, other := range w.groups {
			if j != i && other.pc > g.pc {
				limit = min(limit, other.pc)
			}
		}
		w.groups = slices.Delete(w.groups, i, i+1)
		w.advance(g, limit)
	}
}

// pick joins groups that met and returns the one to run: the lowest that is not parked,
// else a parked one that has got all it needs.
func (w *warp) pick() int {
	if len(w.groups) == 1 && !w.groups[0].parked {
		return 0
	}
	slices.SortFunc(w.groups, func(a, b group) int { return a.pc - b.pc })
	for i := len(w.groups) - 1; i > 0; i-- {
		if a, b := &w.groups[i-1], w.groups[i]; a.pc == b.pc {
			a.lanes, a.parked = a.lanes|b.lanes, false
			w.groups = slices.Delete(w.groups, i, i+1)
		}
	}
	for i, g := range w.groups {
		if !g.parked {
			return i
		}
	}
	for i, g := range w.groups {
		in := &w.block.kernel.code[g.pc]
		if w.missing(in, g.lanes) == 0 {
			return i
		}
	}
	g := w.groups[0]
	w.at = &w.block.kernel.code[g.pc]
	lane := bits.TrailingZeros32(g.lanes)
	w.fail(Divergence, lane, "lanes %#x must execute this together, and only %#x do", w.needs(w.at, lane), g.lanes)
	return 0
}

// needs is which lanes an instruction must have.
func (w *warp) needs(in *inst, lane int) uint32 {
	switch in.need {
	case everyLane:
		return allLanes
	case livingLane:
		return w.alive
	case maskLanes:
		return w.r32[in.c][lane] & w.alive
	}
	return 0
}

// missing is the needed lanes that still may come.
func (w *warp) missing(in *inst, lanes uint32) uint32 {
	return w.needs(in, bits.TrailingZeros32(lanes)) & w.alive &^ lanes
}

// advance runs a group up to the program counter of another, a jump, or where it ends.
func (w *warp) advance(g group, limit int) {
	code, b := w.block.kernel.code, w.block
	alone := len(w.groups) == 0
	for g.pc < limit {
		in := &code[g.pc]
		w.at = in
		if b.steps--; b.steps < 0 {
			w.fail(Budget, bits.TrailingZeros32(g.lanes), "the launch takes more than %d instructions of a warp",
				b.vm.options.Budget)
		}
		m := g.lanes
		if in.guard >= 0 {
			p := w.p[in.guard]
			if in.negated {
				p = ^p
			}
			m &= p
		}
		if in.need != anyLanes && m != 0 {
			if w.missing(in, g.lanes) != 0 {
				g.parked = true
				w.groups = append(w.groups, g)
				return
			}
			w.together(in, m)
		}
		if b.executed != nil {
			b.count(g.pc, m)
		}
		if len(in.touches) > 0 && m != 0 {
			w.touch(in, m)
		}
		switch in.control {
		case plain:
			if m != 0 {
				in.run(w, in, m)
			}
			if g.pc++; w.paused {
				w.groups = append(w.groups, g)
				return
			}
		case barrier:
			g.pc++
			if m != 0 {
				w.waiting = g.pc - 1
				w.groups = append(w.groups, g)
				if in.run != nil {
					in.run(w, in, m)
				}
				return
			}
		case exit:
			w.exit(m)
			g.lanes &^= m
			g.pc++
			if g.lanes == 0 {
				return
			}
		case branch:
			if !w.branch(in, &g, m) || !alone {
				w.groups = append(w.groups, g)
				return
			}
		}
	}
	w.groups = append(w.groups, g)
}

// branch moves the group; it returns false when lanes part, with those that fall through
// in a group of their own.
func (w *warp) branch(in *inst, g *group, m uint32) bool {
	switch m {
	case g.lanes:
		g.pc = in.target
		return true
	case 0:
		g.pc++
		return true
	}
	if in.uniform {
		w.fail(Divergence, bits.TrailingZeros32(m), "bra.uni is taken by lanes %#x of %#x", m, g.lanes)
	}
	w.groups = append(w.groups, group{pc: g.pc + 1, lanes: g.lanes &^ m})
	g.pc, g.lanes = in.target, m
	return false
}

// together fails when lanes that an instruction needs will never come: they ended, or
// their guard is off.
func (w *warp) together(in *inst, m uint32) {
	lane := bits.TrailingZeros32(m)
	need := w.needs(in, lane)
	if in.need == maskLanes {
		for rest := m; rest != 0; rest &= rest - 1 {
			l := bits.TrailingZeros32(rest)
			if mask := w.r32[in.c][l]; mask != w.r32[in.c][lane] || mask>>l&1 == 0 {
				w.fail(Divergence, l, "its mask is %#x, that of lane %d is %#x", mask, lane, w.r32[in.c][lane])
			}
		}
	}
	if need&^m != 0 {
		w.fail(Divergence, lane, "lanes %#x must execute this together, and only %#x do", need, m)
	}
}

func (w *warp) exit(m uint32) {
	if w.async.last > w.async.done && m != 0 {
		w.fail(Pending, bits.TrailingZeros32(m), "the thread ends with products that were not waited for")
	}
	for rest := m; rest != 0; rest &= rest - 1 {
		lane := bits.TrailingZeros32(rest)
		if n := len(w.copies[lane]); n > 0 {
			w.fail(Pending, lane, "the thread ends with %d cp.async that were not waited for", n)
		}
	}
	w.alive &^= m
}

// synced moves the warp past a barrier of the block.
func (w *warp) synced(epoch stamp) {
	w.waiting = -1
	w.stamp = w.block.serial<<serialShift | epoch<<epochShift | stamp(w.first)<<threadShift
}
