package main

import (
	"fmt"
	"math"
)

// rowsAMD64 writes the kernels on rows. Each works on whole vectors and finishes with
// one masked vector, so that the bits do not depend on where a row ends.
//
//	DI dst, SI DX R8 inputs, CX elements left, AX offset in bytes, BX scratch
func rowsAMD64(w *writer) {
	constants(w)
	for _, v := range []vectors{avx2, avx512} {
		r := rows{w: w, v: v}
		r.silu()
		r.gelu()
		r.siluMul()
		r.expSum()
		r.maxOf()
		r.add()
		r.mul()
		r.scale()
		r.gate()
		r.normMod()
		r.patchIn()
		r.patchOut()
	}
	r := rows{w: w, v: avx2}
	r.sum64()
	r.sumSq64()
	r.scaleNorm()
	(&rows{w: w, v: avx512}).scaleNorm8()
	r.ropePairs()
	r.ropeHalves()
	r.transpose()
}

// The constants of exp32 and gelu32 in package tensor, each as a vector of 16. Their
// values are rounded to float32 as the Go compiler rounds them there.
var table = []struct {
	name  string
	value float64
}{
	{"expMax", 88.37626},
	{"expMin", -87.33654},
	{"log2e", 1.44269504088896341},
	{"expBias", 12582912},
	{"minusLn2Hi", -0.693359375},
	{"minusLn2Lo", 2.12194440e-4},
	{"exp7", 1.0 / 5040},
	{"exp6", 1.0 / 720},
	{"exp5", 1.0 / 120},
	{"exp4", 1.0 / 24},
	{"exp3", 1.0 / 6},
	{"exp2", 0.5},
	{"one", 1},
	{"minusZero", math.Copysign(0, -1)},
	{"minusInf", math.Inf(-1)},
	{"minusGelu1", -1.5957691216057308},
	{"minusGelu3", -0.071354816272600248},
}

func constants(w *writer) {
	for i, c := range table {
		w.line("")
		w.line("// %s", c.name)
		for j := range 16 {
			w.line("DATA consts<>+%d(SB)/4, $0x%08x", 64*i+4*j, math.Float32bits(float32(c.value)))
		}
	}
	w.line("GLOBL consts<>(SB), RODATA|NOPTR, $%d", 64*len(table))
	w.line("")
	w.line("// masks + 32 - 4n masks the first n of 8 lanes")
	for j := range 16 {
		v := uint32(0)
		if j < 8 {
			v = math.MaxUint32
		}
		w.line("DATA masks<>+%d(SB)/4, $0x%08x", 4*j, v)
	}
	w.line("GLOBL masks<>(SB), RODATA|NOPTR, $64")
	w.line("")
	w.line("// each of 4 angles twice")
	for j := range 8 {
		w.line("DATA twice<>+%d(SB)/4, $%d", 4*j, j/2)
	}
	w.line("GLOBL twice<>(SB), RODATA|NOPTR, $32")
}

func konst(name string) string {
	for i, c := range table {
		if c.name == name {
			return fmt.Sprintf("consts<>+%d(SB)", 64*i)
		}
	}
	panic("no constant " + name)
}

// rows writes row kernels for one vector extension.
type rows struct {
	w    *writer
	v    vectors
	tail bool // within the masked last vector
}

func (r *rows) op(format string, args ...any) { r.w.op(format, args...) }

// Vector registers. 15 is the mask of AVX2, 8 to 14 keep their value in a kernel.
func (r *rows) r(i int) string { return r.v.r(i) }

func (r *rows) is512() bool { return r.v.bytes == 64 }

func (r *rows) text(name, args string, size int) {
	r.w.line("")
	r.w.line("// func %s%s(%s)", name, r.v.suffix, args)
	r.w.line("TEXT ·%s%s(SB), NOSPLIT, $0-%d", name, r.v.suffix, size)
}

// pointers loads the slices named, the first one's length to CX.
func (r *rows) pointers(names ...string) {
	regs := []string{"DI", "SI", "DX", "R8"}
	for i, n := range names {
		r.op("MOVQ %s_base+%d(FP), %s", n, 24*i, regs[i])
	}
	r.op("MOVQ %s_len+8(FP), CX", names[0])
	r.op("XORL AX, AX")
}

func (r *rows) load(ptr string, reg int) {
	switch {
	case !r.tail:
		r.op("VMOVUPS (%s)(AX*1), %s", ptr, r.r(reg))
	case r.is512():
		r.op("VMOVUPS.Z (%s)(AX*1), K1, %s", ptr, r.r(reg))
	default:
		r.op("VMASKMOVPS (%s)(AX*1), Y15, %s", ptr, r.r(reg))
	}
}

func (r *rows) store(reg int, ptr string) {
	switch {
	case !r.tail:
		r.op("VMOVUPS %s, (%s)(AX*1)", r.r(reg), ptr)
	case r.is512():
		r.op("VMOVUPS %s, K1, (%s)(AX*1)", r.r(reg), ptr)
	default:
		r.op("VMASKMOVPS %s, Y15, (%s)(AX*1)", r.r(reg), ptr)
	}
}

func (r *rows) constant(name string, reg int) { r.op("VMOVUPS %s, %s", konst(name), r.r(reg)) }

// mask sets the mask for the CX elements left.
func (r *rows) mask() {
	if r.is512() {
		r.op("MOVL $1, BX")
		r.op("SHLL CX, BX")
		r.op("DECL BX")
		r.op("KMOVW BX, K1")
		return
	}
	r.op("LEAQ masks<>+32(SB), BX")
	r.op("SHLQ $2, CX")
	r.op("SUBQ CX, BX")
	r.op("VMOVUPS (BX), Y15")
}

// loop runs body over whole vectors, then over the rest.
func (r *rows) loop(body func()) {
	n := r.v.bytes / 4
	r.op("SUBQ $%d, CX", n)
	r.op("JLT rest")
	r.w.line("loop:")
	r.tail = false
	body()
	r.op("ADDQ $%d, AX", r.v.bytes)
	r.op("SUBQ $%d, CX", n)
	r.op("JGE loop")
	r.w.line("rest:")
	r.op("ADDQ $%d, CX", n)
	r.op("JEQ done")
	r.mask()
	r.tail = true
	body()
	r.tail = false
	r.w.line("done:")
}

func (r *rows) end() {
	r.op("VZEROUPPER")
	r.op("RET")
}

func (r *rows) op3(name string, a, b, dst int) {
	r.op("%s %s, %s, %s", name, r.r(b), r.r(a), r.r(dst))
}

func (r *rows) maxOf() {
	r.text("maxOf", "x []float32) (ret float32", 28)
	r.op("MOVQ x_base+0(FP), DI")
	r.op("MOVQ x_len+8(FP), CX")
	r.op("XORL AX, AX")
	r.constant("minusInf", 8)
	r.loop(func() {
		switch {
		case r.tail && r.is512():
			r.op("VMOVAPS Z8, Z0")
			r.op("VMOVUPS (DI)(AX*1), K1, Z0")
		case r.tail:
			r.load("DI", 0)
			r.op("VBLENDVPS Y15, Y0, Y8, Y0")
		default:
			r.load("DI", 0)
		}
		r.op3("VMAXPS", 0, 8, 8) // the old maximum where the element is NaN
	})
	if r.is512() {
		r.op("VEXTRACTF64X4 $1, Z8, Y9")
		r.op("VMAXPS Y9, Y8, Y8")
	}
	r.op("VEXTRACTF128 $1, Y8, X9")
	r.op("VMAXPS X9, X8, X8")
	r.op("VMOVHLPS X8, X8, X9")
	r.op("VMAXPS X9, X8, X8")
	r.op("VMOVSHDUP X8, X9")
	r.op("VMAXSS X9, X8, X8")
	r.op("VMOVSS X8, ret+24(FP)")
	r.end()
}

func (r *rows) binary(name, op string) {
	r.text(name, "dst, x, y []float32", 72)
	r.pointers("dst", "x", "y")
	r.loop(func() {
		r.load("SI", 0)
		r.load("DX", 1)
		r.op3(op, 0, 1, 0)
		r.store(0, "DI")
	})
	r.end()
}

func (r *rows) add() { r.binary("add", "VADDPS") }
func (r *rows) mul() { r.binary("mul", "VMULPS") }

func (r *rows) scale() {
	r.text("scale", "dst, x []float32, a float32", 52)
	r.pointers("dst", "x")
	r.op("VBROADCASTSS a+48(FP), %s", r.r(8))
	r.loop(func() {
		r.load("SI", 0)
		r.op3("VMULPS", 0, 8, 0)
		r.store(0, "DI")
	})
	r.end()
}

func (r *rows) gate() {
	r.text("gate", "dst, g, x, y []float32", 96)
	r.pointers("dst", "g", "x", "y")
	r.loop(func() {
		r.load("SI", 0)
		r.load("DX", 1)
		r.load("R8", 2)
		r.op("VFMADD231PS %s, %s, %s", r.r(1), r.r(0), r.r(2))
		r.store(2, "DI")
	})
	r.end()
}

func (r *rows) normMod() {
	r.text("normMod", "dst, x, scale, shift []float32, mean, rstd float32", 104)
	r.pointers("dst", "x", "scale", "shift")
	r.op("VBROADCASTSS mean+96(FP), %s", r.r(8))
	r.op("VBROADCASTSS rstd+100(FP), %s", r.r(9))
	r.constant("one", 13)
	r.loop(func() {
		r.load("SI", 0)
		r.load("DX", 1)
		r.load("R8", 2)
		r.op3("VSUBPS", 0, 8, 0)
		r.op3("VMULPS", 0, 9, 0)
		r.op3("VADDPS", 1, 13, 1)
		r.op("VFMADD231PS %s, %s, %s", r.r(1), r.r(0), r.r(2))
		r.store(2, "DI")
	})
	r.end()
}

// sums adds x (from SI), or the squares of its distances to Y10, to the 16 float64
// lanes Y0 to Y3; labels get the prefix. It spends CX, from AX, and uses Y4 to Y7,
// Y11, Y15.
func (r *rows) sums(prefix string, square bool) {
	for i := range 4 {
		r.op("VXORPD Y%d, Y%d, Y%d", i, i, i)
	}
	// half adds 8 elements at off to lanes first, first+1.
	half := func(off, first int, masked bool) {
		if masked {
			r.op("VMASKMOVPS %d(SI)(AX*1), Y15, Y4", off)
			r.op("VEXTRACTF128 $1, Y4, X5")
			r.op("VCVTPS2PD X4, Y4")
			r.op("VCVTPS2PD X5, Y5")
		} else {
			r.op("VCVTPS2PD %d(SI)(AX*1), Y4", off)
			r.op("VCVTPS2PD %d(SI)(AX*1), Y5", off+16)
		}
		if square {
			r.op("VSUBPD Y10, Y4, Y4")
			r.op("VSUBPD Y10, Y5, Y5")
			r.op("VMULPD Y4, Y4, Y4")
			r.op("VMULPD Y5, Y5, Y5")
			if masked {
				r.op("VPMOVSXDQ X15, Y6")
				r.op("VEXTRACTI128 $1, Y15, X7")
				r.op("VPMOVSXDQ X7, Y7")
				r.op("VANDPD Y6, Y4, Y4")
				r.op("VANDPD Y7, Y5, Y5")
			}
		}
		r.op("VADDPD Y4, Y%d, Y%d", first, first)
		r.op("VADDPD Y5, Y%d, Y%d", first+1, first+1)
	}
	l := func(s string) string { return prefix + s }
	tail := func(off, first int, next string) {
		r.op("LEAQ masks<>+32(SB), BX")
		r.op("SHLQ $2, CX")
		r.op("SUBQ CX, BX")
		r.op("VMOVUPS (BX), Y15")
		half(off, first, true)
		if next != "" {
			r.op("JMP %s", next)
		}
	}
	r.op("SUBQ $16, CX")
	r.op("JLT %s", l("rest"))
	r.w.line("%s:", l("loop"))
	half(0, 0, false)
	half(32, 2, false)
	r.op("ADDQ $64, AX")
	r.op("SUBQ $16, CX")
	r.op("JGE %s", l("loop"))
	r.w.line("%s:", l("rest"))
	r.op("ADDQ $16, CX")
	r.op("JEQ %s", l("sum"))
	r.op("CMPQ CX, $8")
	r.op("JLT %s", l("few"))
	half(0, 0, false)
	r.op("SUBQ $8, CX")
	r.op("JEQ %s", l("sum"))
	tail(32, 2, l("sum"))
	r.w.line("%s:", l("few"))
	tail(0, 0, "")
	r.w.line("%s:", l("sum"))
	r.op("VADDPD Y2, Y0, Y0")
	r.op("VADDPD Y3, Y1, Y1")
	r.op("VADDPD Y1, Y0, Y0")
	r.op("VEXTRACTF128 $1, Y0, X1")
	r.op("VADDPD X1, X0, X0")
	r.op("VUNPCKHPD X0, X0, X1")
	r.op("VADDSD X1, X0, X0")
}

func (r *rows) sum64() {
	r.text("sum64", "x []float32) (ret float64", 32)
	r.op("MOVQ x_base+0(FP), SI")
	r.op("MOVQ x_len+8(FP), CX")
	r.op("XORL AX, AX")
	r.sums("", false)
	r.op("VMOVSD X0, ret+24(FP)")
	r.end()
}

func (r *rows) sumSq64() {
	r.text("sumSq64", "x []float32, mean float64) (ret float64", 40)
	r.op("MOVQ x_base+0(FP), SI")
	r.op("MOVQ x_len+8(FP), CX")
	r.op("XORL AX, AX")
	r.op("VBROADCASTSD mean+24(FP), Y10")
	r.sums("", true)
	r.op("VMOVSD X0, ret+32(FP)")
	r.end()
}

// scaleNorm works group by group: R9 is the bytes of a group, R10 the groups left.
func (r *rows) scaleNorm() {
	r.text("scaleNorm", "dst, x, w []float32, n, eps, floor, num float64", 104)
	r.op("MOVQ dst_base+0(FP), DI")
	r.op("MOVQ x_base+24(FP), SI")
	r.op("MOVQ w_base+48(FP), DX")
	r.op("MOVQ x_len+32(FP), R10")
	r.op("VXORPD Y10, Y10, Y10")
	r.w.line("group:")
	r.op("MOVQ w_len+56(FP), CX")
	r.op("SUBQ CX, R10")
	r.op("JLT end")
	r.op("XORL AX, AX")
	r.sums("sq", true)
	r.op("VDIVSD n+72(FP), X0, X0")
	r.op("VADDSD eps+80(FP), X0, X0")
	r.op("VSQRTSD X0, X0, X0")
	r.op("VMOVSD floor+88(FP), X1")
	r.op("VMAXSD X0, X1, X0") // the root where it is NaN
	r.op("VMOVSD num+96(FP), X1")
	r.op("VDIVSD X0, X1, X0")
	r.op("VCVTSD2SS X0, X0, X0")
	r.op("VBROADCASTSS X0, Y8")
	r.op("MOVQ w_len+56(FP), CX")
	r.op("LEAQ (CX*4), R9")
	r.op("XORL AX, AX")
	r.loop(func() {
		r.load("SI", 0)
		r.load("DX", 1)
		r.op3("VMULPS", 0, 8, 0)
		r.op3("VMULPS", 0, 1, 0)
		r.store(0, "DI")
	})
	r.op("ADDQ R9, SI")
	r.op("ADDQ R9, DI")
	r.op("JMP group")
	r.w.line("end:")
	r.end()
}

// ropePairs rotates len(cos)/4*4 pairs.
func (r *rows) ropePairs() {
	r.text("ropePairs", "dst, x, cos, sin []float32", 96)
	r.op("MOVQ dst_base+0(FP), DI")
	r.op("MOVQ x_base+24(FP), SI")
	r.op("MOVQ cos_base+48(FP), DX")
	r.op("MOVQ cos_len+56(FP), CX")
	r.op("MOVQ sin_base+72(FP), R8")
	r.op("XORL AX, AX")
	r.op("VMOVUPS twice<>(SB), Y8")
	r.op("SUBQ $4, CX")
	r.op("JLT done")
	r.w.line("loop:")
	r.op("VBROADCASTF128 (DX)(AX*1), Y1")
	r.op("VBROADCASTF128 (R8)(AX*1), Y2")
	r.op("VPERMILPS Y8, Y1, Y1")
	r.op("VPERMILPS Y8, Y2, Y2")
	r.op("VMOVUPS (SI)(AX*2), Y0")
	r.op("VPERMILPS $0xB1, Y0, Y3")
	r.op("VMULPS Y1, Y0, Y0")
	r.op("VMULPS Y2, Y3, Y3")
	r.op("VADDSUBPS Y3, Y0, Y0")
	r.op("VMOVUPS Y0, (DI)(AX*2)")
	r.op("ADDQ $16, AX")
	r.op("SUBQ $4, CX")
	r.op("JGE loop")
	r.w.line("done:")
	r.end()
}

func (r *rows) ropeHalves() {
	r.text("ropeHalves", "dst, x, cos, sin []float32", 96)
	r.op("MOVQ dst_base+0(FP), DI")
	r.op("MOVQ x_base+24(FP), SI")
	r.op("MOVQ cos_base+48(FP), DX")
	r.op("MOVQ cos_len+56(FP), CX")
	r.op("MOVQ sin_base+72(FP), R8")
	r.op("LEAQ (DI)(CX*4), R9")
	r.op("LEAQ (SI)(CX*4), R10")
	r.op("XORL AX, AX")
	r.loop(func() {
		r.load("SI", 0)
		r.load("R10", 1)
		r.load("DX", 2)
		r.load("R8", 3)
		r.op3("VMULPS", 0, 2, 4)
		r.op3("VMULPS", 1, 3, 5)
		r.op3("VMULPS", 1, 2, 6)
		r.op3("VMULPS", 0, 3, 7)
		r.op3("VSUBPS", 4, 5, 4)
		r.op3("VADDPS", 6, 7, 6)
		r.store(4, "DI")
		r.store(6, "R9")
	})
	r.end()
}

// transpose writes 8 rows of x as 8 adjacent columns of dst, whose rows are 16 wide:
// rows of x in SI, DX, R8 to R13, DI dst, CX blocks of 8 columns left.
func (r *rows) transpose() {
	from := []string{"SI", "DX", "R8", "R9", "R10", "R11", "R12", "R13"}
	r.text("transpose", "dst *float32, x *[8]*float32, blocks int", 24)
	r.op("MOVQ dst+0(FP), DI")
	r.op("MOVQ x+8(FP), BX")
	r.op("MOVQ blocks+16(FP), CX")
	for i, p := range from {
		r.op("MOVQ %d(BX), %s", 8*i, p)
	}
	r.op("XORL AX, AX")
	r.op("TESTQ CX, CX")
	r.op("JEQ done")
	r.w.line("loop:")
	for i, p := range from {
		r.op("VMOVUPS (%s)(AX*1), Y%d", p, i)
	}
	// Pairs of rows, then fours, then eights.
	for i := range 4 {
		r.op("VUNPCKLPS Y%d, Y%d, Y%d", 2*i+1, 2*i, 8+2*i)
		r.op("VUNPCKHPS Y%d, Y%d, Y%d", 2*i+1, 2*i, 9+2*i)
	}
	for h := range 2 {
		a, b, c, d := 8+4*h, 9+4*h, 10+4*h, 11+4*h
		r.op("VSHUFPS $0x44, Y%d, Y%d, Y%d", c, a, 4*h)
		r.op("VSHUFPS $0xEE, Y%d, Y%d, Y%d", c, a, 4*h+1)
		r.op("VSHUFPS $0x44, Y%d, Y%d, Y%d", d, b, 4*h+2)
		r.op("VSHUFPS $0xEE, Y%d, Y%d, Y%d", d, b, 4*h+3)
	}
	for i := range 4 {
		r.op("VPERM2F128 $0x20, Y%d, Y%d, Y8", 4+i, i)
		r.op("VPERM2F128 $0x31, Y%d, Y%d, Y9", 4+i, i)
		r.op("VMOVUPS Y8, %d(DI)", 64*i)
		r.op("VMOVUPS Y9, %d(DI)", 64*(i+4))
	}
	r.op("ADDQ $32, AX")
	r.op("ADDQ $512, DI")
	r.op("DECQ CX")
	r.op("JNE loop")
	r.w.line("done:")
	r.end()
}
