package main

// paethAMD64 writes the filter of a row of a PNG, 32 bytes a turn, in lanes of 16 bits.
//
//	DI dst, SI x, DX a, R8 b, R9 c, CX bytes left, AX offset; Y15 zeros
func paethAMD64(w *writer) {
	w.line("")
	w.line("// func paethAVX2(dst, x, a, b, c []byte)")
	w.line("TEXT ·paethAVX2(SB), NOSPLIT, $0-120")
	for i, reg := range []string{"DI", "SI", "DX", "R8", "R9"} {
		w.op("MOVQ %s_base+%d(FP), %s", []string{"dst", "x", "a", "b", "c"}[i], 24*i, reg)
	}
	w.op("MOVQ dst_len+8(FP), CX")
	w.op("XORL AX, AX")
	w.op("VPXOR Y15, Y15, Y15")
	w.op("SUBQ $32, CX")
	w.op("JLT done")
	w.line("loop:")
	w.op("VMOVDQU (DX)(AX*1), Y0")
	w.op("VMOVDQU (R8)(AX*1), Y1")
	w.op("VMOVDQU (R9)(AX*1), Y2")
	for i, unpack := range []string{"VPUNPCKLBW", "VPUNPCKHBW"} {
		a, b, c, t := 3+i, 5, 6, 7
		for j, to := range []int{a, b, c} {
			w.op("%s Y15, Y%d, Y%d", unpack, j, to)
		}
		w.op("VPSUBW Y%d, Y%d, Y%d", c, b, t)     // b - c, the distance of a
		w.op("VPSUBW Y%d, Y%d, Y%d", c, a, t+1)   // a - c, that of b
		w.op("VPADDW Y%d, Y%d, Y%d", t, t+1, t+2) // that of c
		for j := range 3 {
			w.op("VPABSW Y%d, Y%d", t+j, t+j)
		}
		w.op("VPMINSW Y%d, Y%d, Y10", t+1, t+2)
		w.op("VPCMPGTW Y10, Y%d, Y10", t)             // a is not the nearest
		w.op("VPCMPGTW Y%d, Y%d, Y%d", t+2, t+1, t+1) // c is nearer than b
		w.op("VPBLENDVB Y%d, Y%d, Y%d, Y%d", t+1, c, b, b)
		w.op("VPBLENDVB Y10, Y%d, Y%d, Y%d", b, a, a)
	}
	w.op("VPACKUSWB Y4, Y3, Y3")
	w.op("VMOVDQU (SI)(AX*1), Y0")
	w.op("VPSUBB Y3, Y0, Y0")
	w.op("VMOVDQU Y0, (DI)(AX*1)")
	w.op("ADDQ $32, AX")
	w.op("SUBQ $32, CX")
	w.op("JGE loop")
	w.line("done:")
	w.op("VZEROUPPER")
	w.op("RET")
}
