package main

const neonRows = 6

// tilesARM64 writes the NEON tile kernel: 6 x 16, accumulators V8 to V31.
//
//	R0 tile, R1 b, R2 c, R3 ldc, R4 k, R5 to R10 rows of a, R11 lda, R12 scratch
func tilesARM64(w *writer) {
	w.line("")
	w.line("// func tileNEON(t *tile)")
	w.line("TEXT ·tileNEON(SB), NOSPLIT, $0-8")
	w.op("MOVD t+0(FP), R0")
	w.op("MOVD 0(R0), R5")
	w.op("MOVD 8(R0), R11")
	w.op("LSL $2, R11, R11")
	w.op("MOVD 16(R0), R1")
	w.op("MOVD 32(R0), R2")
	w.op("MOVD 40(R0), R3")
	w.op("LSL $2, R3, R3")
	w.op("MOVD 48(R0), R4")
	for r := 1; r < neonRows; r++ {
		w.op("ADD R11, R%d, R%d", 4+r, 5+r)
	}
	w.op("MOVD 64(R0), R12")
	for r := neonRows; r > 1; r-- {
		w.op("CMP $%d, R12", r)
		w.op("BEQ tile%d", r)
	}
	w.op("B tile1")
	for r := neonRows; r >= 1; r-- {
		neonTile(w, r)
	}

	w.line("")
	w.line("// func peakNEON(n int)")
	w.line("TEXT ·peakNEON(SB), NOSPLIT, $0-8")
	w.op("MOVD n+0(FP), R0")
	for i := range 26 {
		w.op("VEOR V%d.B16, V%d.B16, V%d.B16", i, i, i)
	}
	w.line("loop:")
	for i := range 24 {
		w.op("VFMLA V24.S4, V25.S4, V%d.S4", i)
	}
	w.op("SUBS $1, R0, R0")
	w.op("BNE loop")
	w.op("RET")
}

func neonTile(w *writer, rows int) {
	w.line("")
	w.line("tile%d:", rows)
	w.op("MOVD 80(R0), R12")
	w.op("CMP $1, R12")
	w.op("BEQ load%d", rows)
	w.op("BGT bias%d", rows)
	for i := range 4 * rows {
		w.op("VEOR V%d.B16, V%d.B16, V%d.B16", 8+i, 8+i, 8+i)
	}
	w.op("B start%d", rows)
	w.line("bias%d:", rows)
	w.op("MOVD 56(R0), R12")
	for r := range rows {
		w.op("VLD1 (R12), %s", quad(8+4*r))
	}
	w.op("B start%d", rows)
	w.line("load%d:", rows)
	w.op("MOVD R2, R12")
	for r := range rows {
		w.op("VLD1 (R12), %s", quad(8+4*r))
		w.op("ADD R3, R12, R12")
	}
	w.line("start%d:", rows)
	w.op("CBZ R4, done%d", rows)
	w.line("loop%d:", rows)
	w.op("VLD1.P 64(R1), %s", quad(0))
	for r := range rows {
		w.op("VLD1R.P 4(R%d), [V%d.S4]", 5+r, 4+r%4)
		for h := range 4 {
			w.op("VFMLA V%d.S4, V%d.S4, V%d.S4", h, 4+r%4, 8+4*r+h)
		}
	}
	w.op("SUBS $1, R4, R4")
	w.op("BNE loop%d", rows)
	w.line("done%d:", rows)
	for r := range rows {
		w.op("VST1 %s, (R2)", quad(8+4*r))
		w.op("ADD R3, R2, R2")
	}
	w.op("RET")
}
