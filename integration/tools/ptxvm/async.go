package ptxvm

import "math/bits"

// async is what products of a warp are under way. Groups are numbered from 1.
type async struct {
	registers []asyncRegister // by slot
	group     int             // that the next product joins
	last      int             // that has the last product
	done      int             // the last that was waited for
	fences    int             // wgmma.fence so far
	issued    int             // products so far
	reads     []asyncRead     // that may go on until a wait
}

// asyncRegister is what products and others did to a register.
type asyncRegister struct {
	d, n    int  // group and columns of the last product that has it in D
	a       int  // group of the last product that has it in A
	touched int  // wgmma.fences, and one more, before another instruction used it last
	known   bool // it was written
}

// asyncRead is 16 bytes of shared memory, by offset, that a product of a group reads.
type asyncRead struct{ group, at int }

// touch is a register that an instruction uses.
type touch struct {
	slot   int
	writes bool
}

// issue is a product as a warp started it; the other warps of its group must do the same.
type issue struct {
	in   *inst
	a, b uint64
	keep bool
}

// proxy is what products must know of two bytes of shared memory: how many
// fence.proxy.async the writer had passed, and the reads that are under way.
type proxy struct{ fences, readers uint32 }

func (a *async) reset(k *kernel) {
	*a = async{registers: a.registers, group: 1, reads: a.reads[:0]}
	if k.products && a.registers == nil {
		a.registers = make([]asyncRegister, k.banks[bank32])
	}
	clear(a.registers)
}

// touch checks that no product under way has the registers of another instruction.
func (w *warp) touch(in *inst, m uint32) {
	for _, t := range in.touches {
		r := &w.async.registers[t.slot]
		if max(r.d, r.a) > w.async.done {
			w.fail(Pending, bits.TrailingZeros32(m), "a register is that of a product that was not waited for")
		}
		r.touched = w.async.fences + 1
		r.known = r.known || t.writes
	}
}

// issue checks the registers of a product, and that the warps of its group agree.
func (w *warp) issue(in *inst, keep bool) {
	b, now := w.block, &w.async
	if threads := b.grid.Threads.Count(); w.first/128*128+128 > threads {
		w.fail(Divergence, 0, "a warpgroup is 128 threads, and the block ends at %d", threads)
	}
	if now.fences == 0 {
		w.fail(Race, 0, "no wgmma.fence comes before the first product")
	}
	for _, slot := range in.list[1] {
		r := &now.registers[slot]
		w.ordered(r)
		if r.d > now.done {
			w.fail(Pending, 0, "a register of A is in D of a product that was not waited for")
		}
		r.a = now.group
	}
	n := 2 * len(in.list[0])
	for _, slot := range in.list[0] {
		r := &now.registers[slot]
		w.ordered(r)
		switch {
		case r.a > now.done:
			w.fail(Pending, 0, "a register of D is in A of a product that was not waited for")
		case r.d > now.done && r.n != n:
			w.fail(Pending, 0, "a register of D is in that of a product of another shape that was not waited for")
		case keep && !r.known:
			w.fail(Uninitialised, 0, "a register of D, which is added to, was never written")
		}
		r.d, r.n, r.known = now.group, n, true
	}
	now.last = now.group
	w.agree(issue{in, w.r64[in.a][0], w.r64[in.b][0], keep})
}

// ordered checks that a wgmma.fence orders other uses of a register before a product.
func (w *warp) ordered(r *asyncRegister) {
	if r.touched > w.async.fences {
		w.fail(Race, 0, "another instruction used a register of the product after the last wgmma.fence")
	}
}

// agree compares a product with that of the warps of the group that came first.
func (w *warp) agree(p issue) {
	if p.in.list[1] != nil {
		p.a = 0
	}
	issues, i := &w.block.issues[w.first/128], w.async.issued
	w.async.issued++
	if i == len(*issues) {
		*issues = append(*issues, p)
		return
	}
	if other := (*issues)[i]; other != p {
		w.fail(Divergence, 0, "product %d of another warp of the group is that of line %d, of matrices %#x and %#x; "+
			"here of %#x and %#x", i, other.in.line, other.a, other.b, p.a, p.b)
	}
}

// sameProducts checks at the end of a block that no warp did less than others of its group.
func (b *block) sameProducts() {
	if !b.kernel.products {
		return
	}
	for _, w := range b.all {
		if all := len(b.issues[w.first/128]); w.async.issued < all {
			w.fail(Divergence, 0, "the warp ends after %d products of %d that its group did", w.async.issued, all)
		}
	}
}

// waitProducts completes all groups but the in.imm newest.
func waitProducts(w *warp, in *inst, _ uint32) {
	now := &w.async
	now.done = max(now.done, now.group-1-int(in.imm))
	left := now.reads[:0]
	for _, r := range now.reads {
		if r.group > now.done {
			left = append(left, r)
			continue
		}
		w.finish(r.at)
	}
	now.reads = left
}

// finish ends a read of 16 bytes: other warps need a barrier from here before they write
// them, this one, which has waited, does not.
func (w *warp) finish(at int) {
	r, now := w.block.shared, w.stamp|waited<<syncShift
	for i := at / 2; i < at/2+8; i++ {
		r.proxies[i].readers--
		if c := &r.cells[i]; c.read != now {
			c.read = joined(c.read, now, w.block.serial<<serialShift)
		}
	}
}

// overwrite checks that no product reads what a lane writes.
func (w *warp) overwrite(r *region, lane, at, n int) {
	for i := at / 2; i < (at+n+1)/2; i++ {
		p := &r.proxies[i]
		if p.readers > 0 {
			w.fail(Race, lane, "byte %d of %s, written here, may still be read by a product that was not waited for",
				2*i, r.what)
		}
		p.fences = uint32(len(w.fences[lane]))
	}
}

// proxyFence is fence.proxy.async: it notes the time.
func proxyFence(w *warp, _ *inst, m uint32) {
	if !w.block.kernel.products {
		return
	}
	for ; m != 0; m &= m - 1 {
		lane := bits.TrailingZeros32(m)
		w.fences[lane] = append(w.fences[lane], w.stamp+stamp(lane)<<threadShift)
	}
}

// row is 16 bytes of a matrix: the hardware swaps those of each 128 by the address. The
// reader is a lane that did not write them, since the writer is not ordered before the
// warpgroup by itself.
func (w *warp) row(in *inst, address uint64) []byte {
	address ^= address >> 7 & 7 << 4
	r, at := w.find(in, 0, address)
	if r.proxies == nil || at >= uint64(len(r.data)) {
		return w.access(in, 0, address, 16, false)
	}
	lane := 0
	if int(r.cells[at/2].write.thread()) == w.first {
		lane = 1
	}
	data := w.access(in, lane, address, 16, false)
	w.fenced(r, lane, int(at))
	for i := at / 2; i < at/2+8; i++ {
		r.proxies[i].readers++
	}
	w.async.reads = append(w.async.reads, asyncRead{w.async.group, int(at)})
	return data
}

// fenced checks that the thread that wrote 16 bytes executed fence.proxy.async after that, and that a
// barrier came then.
func (w *warp) fenced(r *region, lane, at int) {
	now := w.stamp + stamp(lane)<<threadShift
	for i := at / 2; i < at/2+8; i++ {
		thread, passed := int(r.cells[i].write.thread()), int(r.proxies[i].fences)
		fences := w.block.all[thread/32].fences[thread%32]
		if passed >= len(fences) {
			w.fail(Proxy, lane, "byte %d of %s is what thread %d wrote with no fence.proxy.async after it", 2*i, r.what,
				thread)
		}
		if clash(fences[passed], now, 0) {
			w.fail(Proxy, lane, "byte %d of %s is what thread %d wrote, with no barrier after its fence.proxy.async",
				2*i, r.what, thread)
		}
	}
}
