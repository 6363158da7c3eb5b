package ptxvm

import (
	"fmt"
	"math/bits"
	"strings"
)

// compiler turns the statements of a kernel into instructions.
type compiler struct {
	p     *program
	k     *kernel
	lines []string
	s     *statement
	used  []registers // of each instruction

	products []int // instructions that are wgmma.mma_async
}

// compile decodes a kernel. It fails for every form that is not known.
func compile(p *program, k *kernel, lines []string) (err error) {
	c := &compiler{p: p, k: k, lines: lines}
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(*syntaxError)
			if !ok {
				panic(r)
			}
			err = e
		}
	}()
	c.layout()
	declared := k.banks
	k.code = make([]inst, 0, len(k.statements)+1)
	for i := range k.statements {
		k.code = append(k.code, c.instruction(&k.statements[i]))
	}
	c.s = &statement{op: "ret"} // where the body ends without one
	if n := len(k.statements); n > 0 {
		c.s.line = k.statements[n-1].line
	}
	k.code = append(k.code, c.instruction(c.s))
	c.watch()
	if i, name := unset(k.code, c.used, declared); i >= 0 {
		c.s = &statement{line: k.code[i].line}
		c.fail("register %s may be read before it is written", name)
	}
	k.statements, k.scopes = nil, nil
	return nil
}

func (c *compiler) fail(format string, args ...any) {
	panic(&syntaxError{c.s.line, fmt.Sprintf("%s: %s", c.text(c.s.line), fmt.Sprintf(format, args...))})
}

func (c *compiler) text(line int) string {
	if line < 1 || line > len(c.lines) {
		return c.s.op
	}
	return strings.Join(strings.Fields(c.lines[line-1]), " ")
}

// layout places shared and local variables: static ones first, dynamic shared memory
// after them.
func (c *compiler) layout() {
	k := c.k
	used := map[string]bool{}
	for _, s := range k.statements {
		for _, o := range s.operands {
			used[o.name] = true
		}
	}
	for name, v := range c.p.variables {
		if used[name] && v.space == "shared" && k.variables[name] == nil {
			own := *v
			k.variables[name] = &own
		}
	}
	place := func(v *variable, top *int, start int) {
		v.offset = (start+*top+v.align-1)/v.align*v.align - start
		*top = v.offset + v.size
	}
	var dynamic []*variable
	for _, name := range sortedKeys(k.variables) {
		switch v := k.variables[name]; {
		case v.space == "local":
			place(v, &k.local, localStart)
		case v.extern:
			dynamic = append(dynamic, v)
		default:
			place(v, &k.shared, sharedStart)
		}
	}
	k.maxShared = maxStatic
	if strings.HasPrefix(c.p.target, "sm_90") {
		k.maxShared = maxSharedHopper
	}
	if len(dynamic) > 0 {
		k.dynamic = true
		align := 128
		for _, v := range dynamic {
			align = max(align, v.align)
		}
		k.shared = (sharedStart+k.shared+align-1)/align*align - sharedStart
		for _, v := range dynamic {
			v.offset = k.shared
		}
	}
}

// constant returns the slot that has a value in all lanes.
func (c *compiler) constant(b bank, value uint64) int {
	if b == bank32 {
		value = uint64(uint32(value))
	}
	slot, ok := c.k.consts[b][value]
	if !ok {
		slot = c.k.banks[b]
		c.k.banks[b]++
		c.k.consts[b][value] = slot
	}
	return slot
}

// symbol is the address of a variable.
func (c *compiler) symbol(name string) (uint64, bool) {
	if v := c.k.variables[name]; v != nil {
		if v.space == "local" {
			return uint64(localStart + v.offset), true
		}
		return uint64(sharedStart + v.offset), true
	}
	address, ok := c.p.addresses[name]
	return address, ok
}

// source returns the slot of an operand to read.
func (c *compiler) source(o operand, b bank) int {
	switch {
	case o.address || o.list != nil || o.second != nil:
		c.fail("an operand of this form is not known here")
	case o.reg != nil:
		if o.reg.bank != b {
			c.fail("register %s is of another size", o.original)
		}
		c.reads(o)
		return o.reg.slot
	case b == bankPred:
		c.fail("%s; must be a predicate", o.original)
	case o.imm != nil:
		return c.constant(b, *o.imm)
	case isSpecial(o.name) && b == bank32:
		slot, ok := c.k.specials[o.name]
		if !ok {
			slot = c.k.banks[b]
			c.k.banks[b]++
			c.k.specials[o.name] = slot
		}
		return slot
	}
	address, ok := c.symbol(o.name)
	if !ok {
		c.fail("%s is not declared", o.name)
	}
	return c.constant(b, address)
}

// destination returns the slot of a register to write.
func (c *compiler) destination(o operand, b bank) int {
	if o.reg == nil || o.reg.bank != b || o.address || o.second != nil {
		c.fail("the destination must be a register of the result's size")
	}
	c.writes(*o.reg)
	return o.reg.slot
}

// slots are those of a list, or of one operand.
func (c *compiler) slots(o operand, b bank, n int, dest bool) []int {
	list := o.list
	if list == nil {
		list = []operand{o}
	}
	if len(list) != n {
		c.fail("%d registers; must be %d", len(list), n)
	}
	out := make([]int, n)
	for i, e := range list {
		if dest {
			out[i] = c.destination(e, b)
		} else {
			out[i] = c.source(e, b)
		}
	}
	return out
}

// address sets base slot and offset of [base+offset].
func (c *compiler) address(o operand) (slot int, offset uint64) {
	if !o.address {
		c.fail("must be an address in brackets")
	}
	o.address = false
	if o.reg != nil && o.reg.bank == bank32 {
		c.fail("32-bit addresses are not known")
	}
	return c.source(o, bank64), uint64(o.offset)
}

func (c *compiler) count(n int) []operand {
	if len(c.s.operands) != n {
		c.fail("%d operands; must be %d", len(c.s.operands), n)
	}
	return c.s.operands
}

func (c *compiler) reads(o operand) {
	u := &c.used[len(c.used)-1]
	u.reads = append(u.reads, o)
}

func (c *compiler) writes(r register) {
	u := &c.used[len(c.used)-1]
	u.writes = append(u.writes, r)
}

// instruction decodes one statement.
func (c *compiler) instruction(s *statement) inst {
	c.s = s
	c.used = append(c.used, registers{})
	in := inst{line: s.line, op: s.op, text: c.text(s.line), guard: -1, negated: s.negated}
	if s.guard != nil {
		in.guard = s.guard.slot
		c.reads(operand{reg: s.guard, original: "of the guard"})
	}
	if f := alu[s.op]; f != nil {
		c.alu(&in, f)
		return in
	}
	family, _, _ := strings.Cut(s.op, ".")
	switch family {
	case "setp":
		c.setp(&in)
	case "selp":
		c.selp(&in)
	case "ld", "st":
		c.memory(&in)
	case "cvta":
		c.cvta(&in)
	case "bra", "ret", "exit":
		c.jump(&in)
	case "mov":
		c.pack(&in)
	case "bar", "barrier", "shfl", "activemask", "setmaxnreg":
		c.wide(&in)
	case "cp", "ldmatrix", "mma":
		c.tensor(&in)
	case "wgmma", "fence":
		c.warpgroup(&in)
	default:
		c.unknown()
	}
	return in
}

func (c *compiler) unknown() { c.fail("instruction %s is not known", c.s.op) }

// alu binds the operands of a lane-wise function by its type.
func (c *compiler) alu(in *inst, f any) {
	if c.s.op[:3] == "mov" && len(c.s.operands) == 2 && (c.s.operands[0].list != nil || c.s.operands[1].list != nil) {
		c.pack(in)
		return
	}
	o := c.s.operands
	bind := func(banks ...bank) {
		c.count(len(banks))
		in.d = c.destination(o[0], banks[0])
		for i, slot := range []*int{&in.a, &in.b, &in.c}[:len(banks)-1] {
			*slot = c.source(o[i+1], banks[i+1])
		}
	}
	switch f := f.(type) {
	case func(d, a *v32):
		bind(bank32, bank32)
		in.run = run32(func(w *warp, in *inst, d *v32) { f(d, &w.r32[in.a]) })
	case func(d, a, b *v32):
		bind(bank32, bank32, bank32)
		in.run = run32(func(w *warp, in *inst, d *v32) { f(d, &w.r32[in.a], &w.r32[in.b]) })
	case func(d, a, b, c *v32):
		bind(bank32, bank32, bank32, bank32)
		in.run = run32(func(w *warp, in *inst, d *v32) { f(d, &w.r32[in.a], &w.r32[in.b], &w.r32[in.c]) })
	case func(d *v32, a *v64):
		bind(bank32, bank64)
		in.run = run32(func(w *warp, in *inst, d *v32) { f(d, &w.r64[in.a]) })
	case divides:
		bind(bank32, bank32, bank32)
		in.run = divide(run32(func(w *warp, in *inst, d *v32) { f(d, &w.r32[in.a], &w.r32[in.b]) }))
	case approx:
		bind(bank32, bank32)
		in.run = f.run
	case func(d, a *v64):
		bind(bank64, bank64)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r64[in.a]) })
	case func(d, a, b *v64):
		bind(bank64, bank64, bank64)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r64[in.a], &w.r64[in.b]) })
	case func(d *v64, a *v32):
		bind(bank64, bank32)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r32[in.a]) })
	case func(d *v64, a, b *v32):
		bind(bank64, bank32, bank32)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r32[in.a], &w.r32[in.b]) })
	case func(d *v64, a, b *v32, c *v64):
		bind(bank64, bank32, bank32, bank64)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r32[in.a], &w.r32[in.b], &w.r64[in.c]) })
	case func(d, a *v64, b *v32):
		bind(bank64, bank64, bank32)
		in.run = run64(func(w *warp, in *inst, d *v64) { f(d, &w.r64[in.a], &w.r32[in.b]) })
	default:
		c.predicates(in, f)
	}
}

// predicates binds functions of lane masks.
func (c *compiler) predicates(in *inst, f any) {
	o := c.s.operands
	switch f := f.(type) {
	case func(x uint32) uint32:
		c.count(2)
		in.d = c.destination(o[0], bankPred)
		if o[1].imm != nil { // mov.pred %p, -1
			value := uint32(0)
			if *o[1].imm != 0 {
				value = allLanes
			}
			in.run = func(w *warp, in *inst, m uint32) { w.p[in.d] = w.p[in.d]&^m | f(value)&m }
			return
		}
		in.a = c.source(o[1], bankPred)
		in.run = func(w *warp, in *inst, m uint32) { w.p[in.d] = w.p[in.d]&^m | f(w.p[in.a])&m }
	case func(x, y uint32) uint32:
		c.count(3)
		in.d, in.a, in.b = c.destination(o[0], bankPred), c.source(o[1], bankPred), c.source(o[2], bankPred)
		in.run = func(w *warp, in *inst, m uint32) { w.p[in.d] = w.p[in.d]&^m | f(w.p[in.a], w.p[in.b])&m }
	default:
		c.unknown()
	}
}

// run32 computes all lanes, and keeps what the mask says.
func run32(f func(w *warp, in *inst, d *v32)) func(*warp, *inst, uint32) {
	return func(w *warp, in *inst, m uint32) {
		if m == allLanes {
			f(w, in, &w.r32[in.d])
			return
		}
		f(w, in, &w.t32)
		for d := &w.r32[in.d]; m != 0; m &= m - 1 {
			lane := bits.TrailingZeros32(m) & 31
			d[lane] = w.t32[lane]
		}
	}
}

func run64(f func(w *warp, in *inst, d *v64)) func(*warp, *inst, uint32) {
	return func(w *warp, in *inst, m uint32) {
		if m == allLanes {
			f(w, in, &w.r64[in.d])
			return
		}
		f(w, in, &w.t64)
		for d := &w.r64[in.d]; m != 0; m &= m - 1 {
			lane := bits.TrailingZeros32(m) & 31
			d[lane] = w.t64[lane]
		}
	}
}

func divide(run func(*warp, *inst, uint32)) func(*warp, *inst, uint32) {
	return func(w *warp, in *inst, m uint32) {
		for rest := m; rest != 0; rest &= rest - 1 {
			if lane := bits.TrailingZeros32(rest); w.r32[in.b][lane] == 0 {
				w.fail(Arithmetic, lane, "division by 0")
			}
		}
		run(w, in, m)
	}
}

// run computes in float64, rounds, flushes subnormals and adds the noise asked for.
func (f approx) run(w *warp, in *inst, m uint32) {
	vm := w.block.vm
	for ; m != 0; m &= m - 1 {
		lane := bits.TrailingZeros32(m)
		y := f(float64(f32(flush(w.r32[in.a][lane]))))
		if vm.options.Jitter {
			vm.draws++
			y *= jitter(vm.draws)
		}
		w.r32[in.d][lane] = flush(b32(float32(y)))
	}
}

func (c *compiler) setp(in *inst) {
	o := c.count(3)
	in.d = c.destination(o[0], bankPred)
	switch f := compares[strings.TrimPrefix(c.s.op, "setp.")].(type) {
	case func(a, b *v32) uint32:
		in.a, in.b = c.source(o[1], bank32), c.source(o[2], bank32)
		in.run = func(w *warp, in *inst, m uint32) {
			w.p[in.d] = w.p[in.d]&^m | f(&w.r32[in.a], &w.r32[in.b])&m
		}
	case func(a, b *v64) uint32:
		in.a, in.b = c.source(o[1], bank64), c.source(o[2], bank64)
		in.run = func(w *warp, in *inst, m uint32) {
			w.p[in.d] = w.p[in.d]&^m | f(&w.r64[in.a], &w.r64[in.b])&m
		}
	default:
		c.unknown()
	}
}

func (c *compiler) selp(in *inst) {
	o := c.count(4)
	in.c = c.source(o[3], bankPred)
	switch c.s.op {
	case "selp.b16", "selp.b32", "selp.u32", "selp.s32", "selp.f32":
		in.d, in.a, in.b = c.destination(o[0], bank32), c.source(o[1], bank32), c.source(o[2], bank32)
		in.run = run32(func(w *warp, in *inst, d *v32) {
			a, b, p := &w.r32[in.a], &w.r32[in.b], w.p[in.c]
			for i := range d {
				if p>>i&1 != 0 {
					d[i] = a[i]
				} else {
					d[i] = b[i]
				}
			}
		})
	case "selp.b64", "selp.u64", "selp.s64":
		in.d, in.a, in.b = c.destination(o[0], bank64), c.source(o[1], bank64), c.source(o[2], bank64)
		in.run = run64(func(w *warp, in *inst, d *v64) {
			a, b, p := &w.r64[in.a], &w.r64[in.b], w.p[in.c]
			for i := range d {
				if p>>i&1 != 0 {
					d[i] = a[i]
				} else {
					d[i] = b[i]
				}
			}
		})
	default:
		c.unknown()
	}
}

// pack is mov between a register and the list of its parts, lowest first.
func (c *compiler) pack(in *inst) {
	o := c.count(2)
	switch {
	case c.s.op == "mov.b32" && o[0].list != nil:
		in.list[0], in.a = c.slots(o[0], bank32, 2, true), c.source(o[1], bank32)
		in.run = func(w *warp, in *inst, m uint32) {
			for ; m != 0; m &= m - 1 {
				lane := bits.TrailingZeros32(m)
				x := w.r32[in.a][lane]
				w.r32[in.list[0][0]][lane], w.r32[in.list[0][1]][lane] = x&0xffff, x>>16
			}
		}
	case c.s.op == "mov.b32" && o[1].list != nil:
		in.d, in.list[0] = c.destination(o[0], bank32), c.slots(o[1], bank32, 2, false)
		in.run = run32(func(w *warp, in *inst, d *v32) {
			a, b := w.r32[in.list[0][0]], w.r32[in.list[0][1]]
			for i := range d {
				d[i] = a[i]&0xffff | b[i]<<16
			}
		})
	case c.s.op == "mov.b64" && o[0].list != nil:
		in.list[0], in.a = c.slots(o[0], bank32, 2, true), c.source(o[1], bank64)
		in.run = func(w *warp, in *inst, m uint32) {
			for ; m != 0; m &= m - 1 {
				lane := bits.TrailingZeros32(m)
				x := w.r64[in.a][lane]
				w.r32[in.list[0][0]][lane], w.r32[in.list[0][1]][lane] = uint32(x), uint32(x>>32)
			}
		}
	case c.s.op == "mov.b64" && o[1].list != nil:
		in.d, in.list[0] = c.destination(o[0], bank64), c.slots(o[1], bank32, 2, false)
		in.run = run64(func(w *warp, in *inst, d *v64) {
			a, b := &w.r32[in.list[0][0]], &w.r32[in.list[0][1]]
			for i := range d {
				d[i] = uint64(a[i]) | uint64(b[i])<<32
			}
		})
	default:
		c.unknown()
	}
}
