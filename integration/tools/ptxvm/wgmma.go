package ptxvm

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Products of a warpgroup, four warps in a row. Each warp computes its 16 rows when it
// starts the product; that the hardware may do so at any time up to the wait, checks must
// see to.

// warpgroup decodes wgmma and the fences that go with it.
func (c *compiler) warpgroup(in *inst) {
	in.need = everyLane
	switch c.s.op {
	case "fence.proxy.async", "fence.proxy.async.shared::cta":
		c.target("sm_90")
		c.count(0)
		in.need, in.run = anyLanes, proxyFence
	case "wgmma.fence.sync.aligned":
		c.target("sm_90a")
		c.count(0)
		in.run = func(w *warp, _ *inst, _ uint32) { w.async.fences++ }
	case "wgmma.commit_group.sync.aligned":
		c.target("sm_90a")
		c.count(0)
		in.run = func(w *warp, _ *inst, _ uint32) { w.async.group++ }
	case "wgmma.wait_group.sync.aligned":
		c.target("sm_90a")
		o := c.count(1)
		if o[0].imm == nil || *o[0].imm > 7 {
			c.fail("the number of groups must be a constant from 0 to 7")
		}
		in.imm, in.run = *o[0].imm, waitProducts
	default:
		c.product(in)
	}
}

// target refuses what NVIDIA's assembler would: instructions of a later GPU or ISA.
func (c *compiler) target(name string) {
	if !strings.HasPrefix(c.p.target, name) || c.p.version < 8 {
		c.fail("%s needs .target %s and .version 8.0", c.s.op, name)
	}
}

// product is wgmma.mma_async of bf16: list 0 has D, list 1 has A where it is in registers,
// else a its descriptor; b is that of B, c the predicate that keeps D, imm 1 where B is
// MN-major.
func (c *compiler) product(in *inst) {
	const prefix, suffix = "wgmma.mma_async.sync.aligned.m64n", "k16.f32.bf16.bf16"
	shape, ok := strings.CutPrefix(c.s.op, prefix)
	shape, of := strings.CutSuffix(shape, suffix)
	n, err := strconv.Atoi(shape)
	if !ok || !of || err != nil || n < 8 || n > 256 || n%8 != 0 {
		c.unknown()
	}
	c.target("sm_90a")
	o := c.s.operands
	if len(o) < 2 || o[0].list == nil {
		c.fail("D and A are missing")
	}
	constant := func(name string, i int, allowed ...uint64) uint64 {
		for _, x := range allowed {
			if o[i].imm != nil && *o[i].imm == x {
				return x
			}
		}
		c.fail("%s is %s; must be one of %v", name, o[i].original, allowed)
		return 0
	}
	inRegisters := o[1].list != nil
	if inRegisters {
		c.count(7)
		in.list[1] = c.slots(o[1], bank32, 4, false)
	} else {
		c.count(8)
		in.a = c.source(o[1], bank64)
		constant("imm-trans-a", 6, 0)
	}
	in.list[0] = c.slots(o[0], bank32, n/2, true)
	in.b, in.c = c.source(o[2], bank64), c.source(o[3], bankPred)
	constant("imm-scale-a", 4, 1)
	constant("imm-scale-b", 5, 1)
	in.imm = constant("imm-trans-b", len(o)-1, 0, 1)
	in.space, in.run = shared, product
	c.products = append(c.products, len(c.used)-1)
}

// watch finds the instructions that touch registers of products: only those pay for the
// checks.
func (c *compiler) watch() {
	c.k.products = len(c.products) > 0
	watched := map[int]bool{}
	for _, i := range c.products {
		for _, slots := range c.k.code[i].list[:2] {
			for _, slot := range slots {
				watched[slot] = true
			}
		}
	}
	for i := range c.k.code {
		in := &c.k.code[i]
		if slices.Contains(c.products, i) {
			continue
		}
		for _, o := range c.used[i].reads {
			if o.reg.bank == bank32 && watched[o.reg.slot] {
				in.touches = append(in.touches, touch{slot: o.reg.slot})
			}
		}
		for _, r := range c.used[i].writes {
			if r.bank == bank32 && watched[r.slot] {
				in.touches = append(in.touches, touch{slot: r.slot, writes: true})
			}
		}
	}
}

// descriptor says where a matrix lies in shared memory; all numbers are bytes.
type descriptor struct{ start, leading, stride uint64 }

// descriptor unpacks what all lanes must have in a register. unbroken is the bytes that
// follow each other from the start; 128 of them are swizzled.
func (w *warp) descriptor(slot int, unbroken uint64) descriptor {
	x := w.r64[slot][0]
	for lane, other := range w.r64[slot] {
		if other != x {
			w.fail(Divergence, lane, "its matrix descriptor is %#x, that of lane 0 is %#x", other, x)
		}
	}
	const unused = 3<<14 | 3<<30 | 7<<46 | 0x3ff<<52
	const field = 1<<14 - 1
	d := descriptor{start: x & field << 4, leading: x >> 16 & field << 4, stride: x >> 32 & field << 4}
	switch {
	case x&unused != 0:
		w.fail(Descriptor, 0, "%#x has bits %#x, which no field has", x, x&unused)
	case x>>62 != 1:
		w.fail(Descriptor, 0, "%#x has swizzle mode %d; only mode 1, of 128 bytes, is known", x, x>>62)
	case x>>49&7 != 0:
		w.fail(Descriptor, 0, "%#x has base offset %d; only 0 is known", x, x>>49&7)
	case d.start%128+unbroken > 128:
		w.fail(Descriptor, 0, "%#x starts at byte %d of 128 that are swizzled, and %d bytes follow", x, d.start%128,
			unbroken)
	}
	return d
}

// kMajor reads rows of 16 elements, each row without a gap.
func (w *warp) kMajor(in *inst, d descriptor, first int, to [][16]uint32) {
	for i := range to {
		r := uint64(first + i)
		at := d.start + r/8*d.stride + r%8*128
		for half := range uint64(2) {
			data := w.row(in, at+16*half)
			for j := range 8 {
				to[i][8*int(half)+j] = uint32(binary.LittleEndian.Uint16(data[2*j:])) << 16
			}
		}
	}
}

// nMajor reads columns of 16 elements where those of one k follow each other, 64 without a gap.
func (w *warp) nMajor(in *inst, d descriptor, to [][16]uint32) {
	for k := range uint64(16) {
		at := d.start + k/8*d.stride + k%8*128
		for i := 0; i < len(to); i += 8 {
			data := w.row(in, at+uint64(i%64)*2+uint64(i/64)*d.leading)
			for j := range 8 {
				to[i+j][k] = uint32(binary.LittleEndian.Uint16(data[2*j:])) << 16
			}
		}
	}
}

// product computes the 16 rows of D that belong to this warp.
func product(w *warp, in *inst, _ uint32) {
	keep := w.p[in.c]
	if keep != 0 && keep != allLanes {
		w.fail(Divergence, bits.TrailingZeros32(keep), "scale-d is true in lanes %#x only", keep)
	}
	w.issue(in, keep != 0)
	n := 2 * len(in.list[0])
	var a [16][16]uint32 // rows, as float32 bits
	var all [256][16]uint32
	b := all[:n] // columns
	if in.list[1] != nil {
		w.rows(&a, in.list[1])
	} else {
		w.kMajor(in, w.descriptor(in.a, 32), w.first%128/2, a[:])
	}
	if in.imm == 0 {
		w.kMajor(in, w.descriptor(in.b, 32), 0, b)
	} else {
		w.nMajor(in, w.descriptor(in.b, uint64(2*min(n, 64))), b)
	}
	numerics := w.block.vm.options.Numerics
	for i, slot := range in.list[0] {
		for lane := range 32 {
			d := &w.r32[slot][lane]
			if keep == 0 {
				*d = 0
			}
			*d = numerics.dot(*d, &a[lane/4+8*(i>>1&1)], &b[8*(i/4)+2*(lane%4)+i&1])
		}
	}
}
