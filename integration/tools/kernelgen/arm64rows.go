package main

import (
	"fmt"
	"math"
	"slices"
)

// rowsARM64 writes NEON kernels on rows. They work on whole vectors of 4; callers
// leave the last elements, fewer than 4, to Go.
//
// The Go assembler does not know most vector instructions on floats, so they are
// written as words: the number of the instruction with its three registers.
//
//	R0 dst, R1 R2 R3 inputs, R4 vectors left, R5 scratch; V16 up constants
func rowsARM64(w *writer) {
	n := neon{w}
	n.constants()
	n.silu()
	n.siluMul()
	n.gelu()
	n.expSum()
	n.maxOf()
	n.elementwise("add", 3, "", func() { n.three(fadd, 0, 0, 1) })
	n.elementwise("mul", 3, "", func() { n.three(fmul, 0, 0, 1) })
	n.elementwise("scale", 2, "a", func() { n.three(fmul, 0, 0, 8) })
	n.elementwise("gate", 4, "", func() {
		n.fma(2, 0, 1)
		n.move(2, 0)
	})
	n.elementwise("normMod", 4, "mean rstd", func() {
		n.three(fsub, 0, 0, 8)
		n.three(fmul, 0, 0, 9)
		n.three(fadd, 1, 1, vOne)
		n.fma(2, 0, 1)
		n.move(2, 0)
	})
}

// Vector instructions on four float32: the word without its registers.
const (
	fadd  = 0x4E20D400
	fsub  = 0x4EA0D400
	fmul  = 0x6E20DC00
	fdiv  = 0x6E20FC00
	fmin  = 0x4EA0F400 // NaN if either is
	fcmgt = 0x6EA0E400
	fcmeq = 0x4E20E400
	fneg  = 0x6EA0F800 // of one operand
	bic   = 0x4E601C00 // n and not m
	bif   = 0x6EE01C00 // d where m, else n
	bit   = 0x6EA01C00 // n where m, else d
)

type neon struct{ *writer }

// three writes d = n op m.
func (n neon) three(op uint32, d, a, b int) {
	n.op("WORD $0x%08X", op|uint32(b)<<16|uint32(a)<<5|uint32(d))
}

// fma writes d = fma(a, b, d).
func (n neon) fma(d, a, b int) { n.op("VFMLA V%d.S4, V%d.S4, V%d.S4", b, a, d) }

func (n neon) move(from, to int) { n.op("VMOV V%d.B16, V%d.B16", from, to) }

// Registers that hold constants, in the order of table from V16.
const (
	vExpMax  = 16 + iota
	vExpMin  // 17
	vLog2e   // 18
	vExpBias // 19
	vLn2Hi   // 20
	vLn2Lo   // 21
	vExp7    // 22
	vExp6    // 23
	vExp5    // 24
	vExp4    // 25
	vExp3    // 26
	vExp2    // 27
	vOne     // 28
	vGelu1   // 29
	vGelu3   // 30
)

func (n neon) constants() {
	at := 0
	for _, c := range table {
		if slices.Contains([]string{"minusZero", "minusInf"}, c.name) {
			continue
		}
		n.line("")
		n.line("// %s", c.name)
		for range 4 {
			n.line("DATA consts<>+%d(SB)/4, $0x%08x", at, math.Float32bits(float32(c.value)))
			at += 4
		}
	}
	n.line("GLOBL consts<>(SB), RODATA|NOPTR, $%d", at)
}

func (n neon) loadConstants() {
	n.op("MOVD $consts<>(SB), R5")
	for v := vExpMax; v < vGelu1; v += 4 {
		if v == vOne {
			n.op("VLD1 (R5), [V28.S4, V29.S4, V30.S4]")
			continue
		}
		n.op("VLD1.P 64(R5), %s", quad(v))
	}
}

func (n neon) text(name, args string, size int) {
	n.line("")
	n.line("// func %sNEON(%s)", name, args)
	n.line("TEXT ·%sNEON(SB), NOSPLIT, $0-%d", name, size)
	n.loadConstants()
}

// loop loads a vector of every input (V0, V1, ...), runs body, stores V0.
func (n neon) loop(inputs int, body func()) {
	n.op("CBZ R4, done")
	n.line("loop:")
	for i := range inputs {
		n.op("VLD1.P 16(R%d), [V%d.S4]", 1+i, i)
	}
	body()
	n.op("VST1.P [V0.S4], 16(R0)")
	n.op("SUBS $1, R4, R4")
	n.op("BNE loop")
	n.line("done:")
	n.op("RET")
}

// elementwise writes a kernel of dst and inputs, with up to two scalars in V8 and V9.
func (n neon) elementwise(name string, slices int, scalars string, body func()) {
	args, names := "", []string{"dst", "x", "y", "z"}
	switch name {
	case "gate":
		names = []string{"dst", "g", "x", "y"}
	case "normMod":
		names = []string{"dst", "x", "scale", "shift"}
	}
	for i := range slices {
		if i > 0 {
			args += ", "
		}
		args += names[i]
	}
	args += " []float32"
	size := 24 * slices
	var list []string
	switch scalars {
	case "a":
		args, list = args+", a float32", []string{"a"}
	case "mean rstd":
		args, list = args+", mean, rstd float32", []string{"mean", "rstd"}
	}
	n.text(name, args, size+4*len(list))
	for i := range slices {
		n.op("MOVD %s_base+%d(FP), R%d", names[i], 24*i, i)
	}
	n.op("MOVD dst_len+8(FP), R4")
	n.op("LSR $2, R4, R4")
	for i, s := range list {
		n.op("FMOVS %s+%d(FP), F%d", s, size+4*i, 8+i)
		n.op("VDUP V%d.S[0], V%d.S4", 8+i, 8+i)
	}
	n.loop(slices-1, body)
}

// expOf sets V3 to exp32 of V(x), x not in 3 to 7.
func (n neon) expOf(x int) {
	n.three(fmin, 4, x, vExpMax)
	n.move(vExpBias, 5)
	n.fma(5, 4, vLog2e)           // t
	n.three(fsub, 6, 5, vExpBias) // n
	n.fma(4, 6, vLn2Hi)
	n.fma(4, 6, vLn2Lo) // r
	p, q := 3, 7
	n.move(vExp7, p)
	for _, c := range []int{vExp6, vExp5, vExp4, vExp3, vExp2, vOne, vOne} {
		n.move(c, q)
		n.fma(q, p, 4)
		p, q = q, p
	}
	if p != 3 {
		n.move(p, 3)
	}
	n.op("VSHL $23, V5.S4, V5.S4")
	n.op("VADD V5.S4, V3.S4, V3.S4")
	n.three(fcmgt, 4, vExpMin, x)
	n.three(bic, 3, 3, 4)
	n.three(fcmeq, 4, x, x)
	n.three(bif, 3, x, 4)
}

// siluOf sets V0 to silu32 of V0.
func (n neon) siluOf() {
	n.three(fneg, 2, 0, 0)
	n.expOf(2)
	n.three(fadd, 3, vOne, 3)
	n.three(fdiv, 0, 0, 3)
}

func (n neon) silu() { n.elementwise("silu", 2, "", n.siluOf) }

func (n neon) siluMul() {
	n.elementwise("siluMul", 3, "", func() {
		n.siluOf()
		n.three(fmul, 0, 0, 1)
	})
}

func (n neon) gelu() {
	n.elementwise("gelu", 2, "", func() {
		n.three(fmul, 1, 0, 0)
		n.move(vGelu1, 2)
		n.fma(2, 1, vGelu3)
		n.three(fmul, 2, 0, 2)
		n.expOf(2)
		n.three(fadd, 3, vOne, 3)
		n.three(fdiv, 0, 0, 3)
	})
}

// expSum keeps lanes 4i to 4i+3 of the sum in V(8+i) while i counts the vectors.
func (n neon) expSum() {
	n.text("expSum", "x []float32, m, scale float32, lanes *[16]float32", 40)
	n.op("MOVD x_base+0(FP), R0")
	n.op("MOVD x_len+8(FP), R4")
	n.op("LSR $2, R4, R4")
	n.op("FMOVS m+24(FP), F12")
	n.op("VDUP V12.S[0], V12.S4")
	n.op("FMOVS scale+28(FP), F13")
	n.op("VDUP V13.S[0], V13.S4")
	for i := range 4 {
		n.op("VEOR V%d.B16, V%d.B16, V%d.B16", 8+i, 8+i, 8+i)
	}
	n.line("loop:")
	for i := range 4 {
		n.op("CBZ R4, done")
		n.op("VLD1 (R0), [V0.S4]")
		n.three(fsub, 0, 0, 12)
		n.three(fmul, 0, 0, 13)
		n.expOf(0)
		n.op("VST1.P [V3.S4], 16(R0)")
		n.three(fadd, 8+i, 8+i, 3)
		n.op("SUB $1, R4, R4")
	}
	n.op("B loop")
	n.line("done:")
	n.op("MOVD lanes+32(FP), R5")
	n.op("VST1 %s, (R5)", quad(8))
	n.op("RET")
}

func (n neon) maxOf() {
	n.line("")
	n.line("// func maxOfNEON(x []float32, lanes *[4]float32)")
	n.line("TEXT ·maxOfNEON(SB), NOSPLIT, $0-32")
	n.op("MOVD x_base+0(FP), R0")
	n.op("MOVD x_len+8(FP), R4")
	n.op("LSR $2, R4, R4")
	n.op("MOVD lanes+24(FP), R5")
	n.op("VLD1 (R5), [V8.S4]")
	n.op("CBZ R4, done")
	n.line("loop:")
	n.op("VLD1.P 16(R0), [V0.S4]")
	n.three(fcmgt, 1, 0, 8)
	n.three(bit, 8, 0, 1)
	n.op("SUBS $1, R4, R4")
	n.op("BNE loop")
	n.op("VST1 [V8.S4], (R5)")
	n.line("done:")
	n.op("RET")
}

// quad lists four registers.
func quad(first int) string {
	return fmt.Sprintf("[V%d.S4, V%d.S4, V%d.S4, V%d.S4]", first, first+1, first+2, first+3)
}
