package main

import "fmt"

// vectors is one amd64 vector extension.
type vectors struct {
	suffix   string
	reg      string // register prefix
	bytes    int    // of a register
	perPanel int    // registers of a 16-wide panel row
	rows     int    // most rows of a tile
	panels   int    // most panels of a tile
	b, a     int    // first register for the right and the left operand
	regs     int
	half     bool   // b is bf16
	name     string // of the kernel
}

var (
	avx2   = vectors{suffix: "AVX2", reg: "Y", bytes: 32, perPanel: 2, rows: 6, panels: 1, b: 12, a: 14, regs: 16}
	avx512 = vectors{suffix: "AVX512", reg: "Z", bytes: 64, perPanel: 1, rows: 12, panels: 2, b: 24, a: 26, regs: 32}
)

// tilesAMD64 writes the tile kernels and the loops that measure the peak.
//
//	DI tile, SI R9 R10 R11 rows 0 3 6 9 of a, R8 lda, BX R12 panels of b,
//	CX k, DX c, R13 ldc, AX scratch; strides in bytes
func tilesAMD64(w *writer) {
	for _, v := range []vectors{avx2, avx512} {
		v.name = "tile"
		v.tile(w)
		v.peak(w)
		v.name, v.half = "tileHalf", true
		v.tile(w)
	}
}

// element is the size of a number of b, in bytes.
func (v vectors) element() int {
	if v.half {
		return 2
	}
	return 4
}

func (v vectors) tile(w *writer) {
	w.line("")
	w.line("// func %s%s(t *tile)", v.name, v.suffix)
	w.line("TEXT ·%s%s(SB), NOSPLIT, $0-8", v.name, v.suffix)
	w.op("MOVQ t+0(FP), DI")
	w.op("MOVQ 0(DI), SI")
	w.op("MOVQ 8(DI), R8")
	w.op("SHLQ $2, R8")
	w.op("MOVQ 16(DI), BX")
	w.op("MOVQ 24(DI), R12")
	w.op("LEAQ (BX)(R12*%d), R12", v.element())
	w.op("MOVQ 32(DI), DX")
	w.op("MOVQ 40(DI), R13")
	w.op("SHLQ $2, R13")
	w.op("MOVQ 48(DI), CX")
	w.op("LEAQ (R8)(R8*2), AX")
	w.op("LEAQ (SI)(AX*1), R9")
	if v.rows > 6 {
		w.op("LEAQ (R9)(AX*1), R10")
		w.op("LEAQ (R10)(AX*1), R11")
	}
	w.op("MOVQ 64(DI), AX")
	if v.panels > 1 {
		w.op("CMPQ 72(DI), $1")
		w.op("JEQ rows1")
	}
	for p := v.panels; p >= 1; p-- {
		w.line("rows%d:", p)
		for r := v.rows; r > 1; r-- {
			w.op("CMPQ AX, $%d", r)
			w.op("JEQ tile%dx%d", r, p)
		}
		w.op("JMP tile1x%d", p)
	}
	for p := v.panels; p >= 1; p-- {
		for r := v.rows; r >= 1; r-- {
			v.variant(w, r, p)
		}
	}
}

func (v vectors) r(i int) string { return fmt.Sprintf("%s%d", v.reg, i) }

// acc names the accumulator of row r, register h of the tile row.
func (v vectors) acc(r, h, panels int) string { return v.r(r*panels*v.perPanel + h) }

// left addresses element off (in bytes) of row r of a.
func left(r, off int) string {
	s := fmt.Sprintf("%d(%s)", off, []string{"SI", "R9", "R10", "R11"}[r/3])
	if r%3 > 0 {
		s += fmt.Sprintf("(R8*%d)", r%3)
	}
	return s
}

func (v vectors) variant(w *writer, rows, panels int) {
	label := fmt.Sprintf("%dx%d", rows, panels)
	width := panels * v.perPanel
	w.line("")
	w.line("tile%s:", label)
	w.op("MOVQ 80(DI), AX")
	w.op("CMPQ AX, $1")
	w.op("JEQ load%s", label)
	w.op("JGT bias%s", label)
	for i := range rows * width {
		w.op("VXORPS %s, %s, %s", v.r(i), v.r(i), v.r(i))
	}
	w.op("JMP start%s", label)

	w.line("bias%s:", label)
	w.op("MOVQ 56(DI), AX")
	for h := range width {
		w.op("VMOVUPS %d(AX), %s", h*v.bytes, v.acc(0, h, panels))
	}
	for r := 1; r < rows; r++ {
		for h := range width {
			w.op("VMOVAPS %s, %s", v.acc(0, h, panels), v.acc(r, h, panels))
		}
	}
	w.op("JMP start%s", label)

	w.line("load%s:", label)
	w.op("MOVQ DX, AX")
	for r := range rows {
		for h := range width {
			w.op("VMOVUPS %d(AX), %s", h*v.bytes, v.acc(r, h, panels))
		}
		if r+1 < rows {
			w.op("ADDQ R13, AX")
		}
	}

	w.line("start%s:", label)
	const unroll = 4
	w.op("SUBQ $%d, CX", unroll)
	w.op("JLT rest%s", label)
	w.line("PCALIGN $32")
	w.line("loop%s:", label)
	for u := range unroll {
		v.step(w, rows, panels, u)
	}
	v.advance(w, rows, panels, unroll)
	w.op("SUBQ $%d, CX", unroll)
	w.op("JGE loop%s", label)
	w.line("rest%s:", label)
	w.op("ADDQ $%d, CX", unroll)
	w.op("JEQ done%s", label)
	w.line("one%s:", label)
	v.step(w, rows, panels, 0)
	v.advance(w, rows, panels, 1)
	w.op("DECQ CX")
	w.op("JNE one%s", label)

	w.line("done%s:", label)
	for r := range rows {
		for h := range width {
			w.op("VMOVUPS %s, %d(DX)", v.acc(r, h, panels), h*v.bytes)
		}
		if r+1 < rows {
			w.op("ADDQ R13, DX")
		}
	}
	w.op("VZEROUPPER")
	w.op("RET")
}

// step is one k: rank-one update of the tile.
func (v vectors) step(w *writer, rows, panels, u int) {
	for p := range panels {
		for h := range v.perPanel {
			from, to := []string{"BX", "R12"}[p], v.r(v.b+p*v.perPanel+h)
			if v.half { // the upper half of a float32
				w.op("VPMOVZXWD %d(%s), %s", u*32+h*v.bytes/2, from, to)
				w.op("VPSLLD $16, %s, %s", to, to)
				continue
			}
			w.op("VMOVUPS %d(%s), %s", u*64+h*v.bytes, from, to)
		}
	}
	width := panels * v.perPanel
	spare := v.regs - v.a
	for r := range rows {
		if width == 1 {
			w.op("VFMADD231PS.BCST %s, %s, %s", left(r, 4*u), v.r(v.b), v.acc(r, 0, panels))
			continue
		}
		a := v.r(v.a + r%spare)
		w.op("VBROADCASTSS %s, %s", left(r, 4*u), a)
		for h := range width {
			w.op("VFMADD231PS %s, %s, %s", v.r(v.b+h), a, v.acc(r, h, panels))
		}
	}
}

func (v vectors) advance(w *writer, rows, panels, n int) {
	for i, base := range []string{"SI", "R9", "R10", "R11"} {
		if 3*i < rows {
			w.op("ADDQ $%d, %s", 4*n, base)
		}
	}
	w.op("ADDQ $%d, BX", 16*v.element()*n)
	if panels > 1 {
		w.op("ADDQ $%d, R12", 16*v.element()*n)
	}
}

// peak writes a loop of independent multiply-adds.
func (v vectors) peak(w *writer) {
	w.line("")
	w.line("// func peak%s(n int)", v.suffix)
	w.line("TEXT ·peak%s(SB), NOSPLIT, $0-8", v.suffix)
	w.op("MOVQ n+0(FP), CX")
	for i := range peakChains + 2 {
		w.op("VXORPS %s, %s, %s", v.r(i), v.r(i), v.r(i))
	}
	w.line("loop:")
	for i := range peakChains {
		w.op("VFMADD231PS %s, %s, %s", v.r(peakChains), v.r(peakChains+1), v.r(i))
	}
	w.op("DECQ CX")
	w.op("JNE loop")
	w.op("VZEROUPPER")
	w.op("RET")
}

// peakChains is enough to hide a latency of 6 cycles at two multiply-adds a cycle.
const peakChains = 12
