package ptxvm

import (
	"cmp"
	"encoding/binary"
	"maps"
	"math/bits"
	"slices"
	"strings"
)

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// specials are the special registers of a thread.
var specials = map[string]func(b *block, thread, lane int) int{
	"%tid.x":    func(b *block, t, _ int) int { return t % b.grid.Threads.X },
	"%tid.y":    func(b *block, t, _ int) int { return t / b.grid.Threads.X % b.grid.Threads.Y },
	"%tid.z":    func(b *block, t, _ int) int { return t / b.grid.Threads.X / b.grid.Threads.Y },
	"%ntid.x":   func(b *block, _, _ int) int { return b.grid.Threads.X },
	"%ntid.y":   func(b *block, _, _ int) int { return b.grid.Threads.Y },
	"%ntid.z":   func(b *block, _, _ int) int { return b.grid.Threads.Z },
	"%ctaid.x":  func(b *block, _, _ int) int { return b.index.X },
	"%ctaid.y":  func(b *block, _, _ int) int { return b.index.Y },
	"%ctaid.z":  func(b *block, _, _ int) int { return b.index.Z },
	"%nctaid.x": func(b *block, _, _ int) int { return b.grid.Blocks.X },
	"%nctaid.y": func(b *block, _, _ int) int { return b.grid.Blocks.Y },
	"%nctaid.z": func(b *block, _, _ int) int { return b.grid.Blocks.Z },
	"%laneid":   func(_ *block, _, lane int) int { return lane },
}

func isSpecial(name string) bool { return specials[name] != nil }

// words splits a mnemonic after its family and takes out what does not change its meaning.
func (c *compiler) words(ignored ...string) []string {
	words := strings.Split(c.s.op, ".")[1:]
	return slices.DeleteFunc(words, func(word string) bool { return slices.Contains(ignored, word) })
}

// memory is ld and st: [volatile] space [nc] [v2|v4] type.
func (c *compiler) memory(in *inst) {
	words := c.words("volatile", "relaxed", "nc")
	in.space, in.vector = generic, 1
	if len(words) > 0 {
		switch words[0] {
		case "global":
			in.space, words = global, words[1:]
		case "shared":
			in.space, words = shared, words[1:]
		case "local":
			in.space, words = local, words[1:]
		case "const":
			in.space, words = constant, words[1:]
		case "param":
			c.param(in, words[1:])
			return
		}
	}
	if len(words) > 0 && (words[0] == "v2" || words[0] == "v4") {
		in.vector, words = int(words[0][1]-'0'), words[1:]
	}
	if len(words) != 1 || typeSize("."+words[0]) == 0 {
		c.unknown()
	}
	in.size, in.signed = typeSize("."+words[0]), words[0][0] == 's'
	if in.size*in.vector > 16 {
		c.unknown()
	}
	b := bank32
	if in.size == 8 {
		b = bank64
	}
	o := c.count(2)
	if c.s.op[:2] == "ld" {
		if r := o[0].reg; r != nil && r.bank == bank64 {
			b, in.wide = bank64, in.size < 8
		}
		in.list[0] = c.slots(o[0], b, in.vector, true)
		in.a, in.offset = c.address(o[1])
		in.run = load
		return
	}
	in.a, in.offset = c.address(o[0])
	in.list[0] = c.slots(o[1], b, in.vector, false)
	in.run = store
}

func load(w *warp, in *inst, m uint32) {
	addresses, n := &w.r64[in.a], in.size*in.vector
	for ; m != 0; m &= m - 1 {
		lane := bits.TrailingZeros32(m) & 31
		data := w.access(in, lane, addresses[lane]+in.offset, n, false)
		for i, slot := range in.list[0] {
			switch {
			case in.size == 8:
				w.r64[slot][lane] = binary.LittleEndian.Uint64(data[8*i:])
			case in.wide:
				w.r64[slot][lane] = uint64(number(data[i*in.size:], in.size, in.signed))
			case in.size == 4:
				w.r32[slot][lane] = binary.LittleEndian.Uint32(data[4*i:])
			default:
				w.r32[slot][lane] = uint32(number(data[i*in.size:], in.size, in.signed))
			}
		}
	}
}

// number is an integer of 1, 2 or 4 bytes, which a wider register takes with its sign.
func number(data []byte, size int, signed bool) int64 {
	var x int64
	switch size {
	case 1:
		x = int64(data[0])
	case 2:
		x = int64(binary.LittleEndian.Uint16(data))
	default:
		x = int64(binary.LittleEndian.Uint32(data))
	}
	if unused := 64 - 8*size; signed {
		x = x << unused >> unused
	}
	return x
}

func store(w *warp, in *inst, m uint32) {
	addresses, n := &w.r64[in.a], in.size*in.vector
	for ; m != 0; m &= m - 1 {
		lane := bits.TrailingZeros32(m) & 31
		data := w.access(in, lane, addresses[lane]+in.offset, n, true)
		for i, slot := range in.list[0] {
			switch in.size {
			case 4:
				binary.LittleEndian.PutUint32(data[4*i:], w.r32[slot][lane])
			case 8:
				binary.LittleEndian.PutUint64(data[8*i:], w.r64[slot][lane])
			case 2:
				binary.LittleEndian.PutUint16(data[2*i:], uint16(w.r32[slot][lane]))
			case 1:
				data[i] = byte(w.r32[slot][lane])
			}
		}
	}
}

// param is ld.param: parameters are the same for all lanes.
func (c *compiler) param(in *inst, words []string) {
	o := c.count(2)
	if c.s.op[:2] != "ld" || len(words) != 1 || !o[1].address {
		c.unknown()
	}
	v := c.k.params[o[1].name]
	if v == nil || o[1].offset != 0 || typeSize("."+words[0]) != v.size || v.size < 4 {
		c.fail("a parameter is read whole, as 4 or 8 bytes")
	}
	in.offset, in.size, in.signed = uint64(v.offset), v.size, words[0][0] == 's'
	if o[0].reg != nil && o[0].reg.bank == bank64 {
		in.d = c.destination(o[0], bank64)
		in.run = run64(func(w *warp, in *inst, d *v64) {
			x := binary.LittleEndian.Uint64(w.block.params[in.offset:])
			if in.size < 8 {
				x = uint64(number(w.block.params[in.offset:], in.size, in.signed))
			}
			for i := range d {
				d[i] = x
			}
		})
		return
	}
	if v.size == 8 {
		c.fail("a pointer needs a register of 64 bits")
	}
	in.d = c.destination(o[0], bank32)
	in.run = run32(func(w *warp, in *inst, d *v32) {
		x := binary.LittleEndian.Uint32(w.block.params[in.offset:])
		for i := range d {
			d[i] = x
		}
	})
}

// cvta goes between addresses of a space and generic ones.
func (c *compiler) cvta(in *inst) {
	o := c.count(2)
	in.d, in.a = c.destination(o[0], bank64), c.source(o[1], bank64)
	var add uint64
	switch c.s.op {
	case "cvta.to.global.u64", "cvta.global.u64", "cvta.to.const.u64", "cvta.const.u64":
	case "cvta.shared.u64":
		add = sharedWindow
	case "cvta.local.u64":
		add = localWindow
	case "cvta.to.shared.u64":
		add -= sharedWindow
	case "cvta.to.local.u64":
		add -= localWindow
	default:
		c.unknown()
	}
	in.run = run64(func(w *warp, in *inst, d *v64) {
		a := &w.r64[in.a]
		for i := range d {
			d[i] = a[i] + add
		}
	})
}

func (c *compiler) jump(in *inst) {
	switch c.s.op {
	case "ret", "exit", "ret.uni":
		c.count(0)
		in.control = exit
	case "bra", "bra.uni":
		o := c.count(1)
		target, ok := c.k.labels[o[0].name]
		if !ok {
			c.fail("label %s is not there", o[0].original)
		}
		in.control, in.target, in.uniform = branch, target, c.s.op == "bra.uni"
	default:
		c.unknown()
	}
}

// wide is what a warp or a block does together.
func (c *compiler) wide(in *inst) {
	switch c.s.op {
	case "bar.sync", "bar.arrive":
		if len(c.s.operands) == 2 || c.s.op == "bar.arrive" {
			o := c.count(2)
			in.list[0] = []int{c.source(o[0], bank32), c.source(o[1], bank32)}
			in.need, in.run, c.k.named = livingLane, arrive, true
			if c.s.op == "bar.sync" {
				in.control = barrier
			}
			return
		}
		fallthrough
	case "barrier.sync", "barrier.sync.aligned":
		o := c.count(1)
		if o[0].imm == nil || *o[0].imm > 15 {
			c.fail("barrier %s; must be a number from 0 to 15", o[0].original)
		}
		in.control, in.need, in.imm = barrier, livingLane, *o[0].imm
	case "setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32":
		o := c.count(1)
		if o[0].imm == nil || *o[0].imm < 24 || *o[0].imm > 256 || *o[0].imm%8 != 0 {
			c.fail("%s registers; must be a multiple of 8 from 24 to 256", o[0].original)
		}
		in.need, in.run = everyLane, func(*warp, *inst, uint32) {} // registers are not counted
	case "bar.warp.sync":
		o := c.count(1)
		in.c, in.need, in.run = c.source(o[0], bank32), maskLanes, warpSync
	case "activemask.b32":
		in.d = c.destination(c.count(1)[0], bank32)
		in.run = func(w *warp, in *inst, m uint32) {
			for rest := m; rest != 0; rest &= rest - 1 {
				w.r32[in.d][bits.TrailingZeros32(rest)] = m
			}
		}
	case "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32", "shfl.sync.idx.b32":
		o := c.count(5)
		mode := strings.Split(c.s.op, ".")[2]
		in.imm = uint64(slices.Index([]string{"up", "down", "bfly", "idx"}, mode))
		if p := o[0].second; p != nil {
			if p.bank != bankPred {
				c.fail("the second result must be a predicate")
			}
			in.list[0] = []int{p.slot}
			c.writes(*p)
			o[0].second = nil
		}
		in.d, in.a, in.b = c.destination(o[0], bank32), c.source(o[1], bank32), c.source(o[2], bank32)
		in.list[1] = []int{c.source(o[3], bank32)}
		in.c, in.need, in.run = c.source(o[4], bank32), maskLanes, shuffle
	default:
		c.unknown()
	}
}

// tensor is matrices and the copies that feed them.
func (c *compiler) tensor(in *inst) {
	o := c.s.operands
	switch c.s.op {
	case "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
		c.count(4)
		for i, n := range []int{4, 4, 2, 4} {
			in.list[i] = c.slots(o[i], bank32, n, i == 0)
		}
		in.need, in.run = everyLane, mma
	case "cp.async.commit_group":
		c.count(0)
		in.run = commit
	case "cp.async.wait_all":
		c.count(0)
		in.run = waitAll
	case "cp.async.wait_group":
		c.count(1)
		if o[0].imm == nil || *o[0].imm > 1000 {
			c.fail("the number of groups must be a constant")
		}
		in.imm, in.run = *o[0].imm, waitGroup
	case "cp.async.cg.shared.global", "cp.async.ca.shared.global":
		if len(o) == 4 {
			in.list[0] = []int{c.source(o[3], bank32)}
		} else {
			c.count(3)
		}
		if o[2].imm == nil || !slices.Contains([]uint64{4, 8, 16}, *o[2].imm) || *o[2].imm < 16 &&
			strings.Contains(c.s.op, ".cg") {
			c.fail("copies are of 16 bytes, with .ca also of 4 and 8")
		}
		in.size, in.space, in.run = int(*o[2].imm), shared, copyAsync
		in.d, in.offset = c.address(o[0])
		in.a, in.imm = c.address(o[1])
	default:
		c.ldmatrix(in)
	}
}

func (c *compiler) ldmatrix(in *inst) {
	words := c.words("sync", "aligned", "shared")
	if len(words) > 2 && words[2] == "trans" {
		in.imm, words = 1, slices.Delete(words, 2, 3)
	}
	if !strings.HasPrefix(c.s.op, "ldmatrix.sync.aligned.m8n8.") || len(words) != 3 || words[2] != "b16" {
		c.unknown()
	}
	n, ok := map[string]int{"x1": 1, "x2": 2, "x4": 4}[words[1]]
	if !ok {
		c.unknown()
	}
	o := c.count(2)
	in.list[0] = c.slots(o[0], bank32, n, true)
	in.a, in.offset = c.address(o[1])
	in.space, in.need, in.run = shared, everyLane, ldmatrix
}
