package main

// Kernels on whole vectors alone: the transforms of convolutions by patches (see goPatchIn of package cpu), and norms
// of eight groups.

// patches begins a kernel: R9 is a pixel in bytes, R8 a plane, R10 a row of pixels, BX the patches left, CX the vectors
// of a patch left, AX their offset. setup comes before the first patch, next moves all pointers by a vector, and last
// moves those of pixels to the next patch.
func (r *rows) patches(name string, setup, body, next, last func()) {
	r.text(name, "t *patches", 8)
	r.op("MOVQ t+0(FP), AX")
	r.op("MOVQ 0(AX), SI")
	r.op("MOVQ 8(AX), DI")
	r.op("MOVQ 16(AX), DX")
	r.op("MOVQ 24(AX), R8")
	r.op("SHLQ $2, R8")
	r.op("MOVQ 32(AX), R10")
	r.op("SHLQ $2, R10")
	r.op("MOVQ 40(AX), BX")
	r.op("MOVQ 48(AX), R9")
	r.op("SHLQ $2, R9")
	setup()
	r.w.line("patch:")
	r.op("MOVQ R9, CX")
	r.w.line("channels:")
	body()
	next()
	r.op("SUBQ $%d, CX", r.v.bytes)
	r.op("JNE channels")
	last()
	r.op("DECQ BX")
	r.op("JNE patch")
	r.end()
}

// move adds a vector, or a register, to pointers.
func (r *rows) move(by string, pointers ...string) {
	for _, p := range pointers {
		r.op("ADDQ %s, %s", by, p)
	}
}

// patchIn: SI R10 R11 R12 rows of pixels, R13 three pixels, DX three planes.
func (r *rows) patchIn() {
	pixels := []string{"SI", "R10", "R11", "R12"}
	r.patches("patchIn", func() {
		r.op("LEAQ (SI)(R10*2), R11")
		r.op("LEAQ (R11)(R10*1), R12")
		r.op("ADDQ SI, R10")
		r.op("LEAQ (R9)(R9*2), R13")
		r.op("LEAQ (R8)(R8*2), DX")
	}, func() {
		r.op("MOVQ DI, AX")
		for j, of := range [][2]int{{0, 2}, {1, 2}, {2, 1}, {1, 3}} {
			op := "VSUBPS"
			if j == 1 {
				op = "VADDPS"
			}
			for x, at := range []string{"(%s)", "(%s)(R9*1)", "(%s)(R9*2)", "(%s)(R13*1)"} {
				r.op("VMOVUPS "+at+", %s", pixels[of[0]], r.r(x))
				r.op(op+" "+at+", %s, %s", pixels[of[1]], r.r(x), r.r(x))
			}
			r.op3("VSUBPS", 0, 2, 4)
			r.op3("VADDPS", 1, 2, 5)
			r.op3("VSUBPS", 2, 1, 6)
			r.op3("VSUBPS", 1, 3, 7)
			for x, at := range []string{"(AX)", "(AX)(R8*1)", "(AX)(R8*2)", "(AX)(DX*1)"} {
				r.op("VMOVUPS %s, %s", r.r(4+x), at)
			}
			if j < 3 {
				r.op("LEAQ (AX)(R8*4), AX")
			}
		}
	}, func() {
		for _, p := range append(pixels, "DI") {
			r.op("ADDQ $%d, %s", r.v.bytes, p)
		}
	}, func() { r.move("R9", pixels...) })
}

// patchOut: DI R10 rows of pixels, DX the bias, R12 four planes, R13 twelve. CX counts what is left of the bias.
func (r *rows) patchOut() {
	r.patches("patchOut", func() {
		r.op("ADDQ DI, R10")
		r.op("LEAQ (R8*4), R12")
		r.op("LEAQ (R12)(R12*2), R13")
		r.op("ADDQ R9, DX") // its end
	}, func() {
		r.op("MOVQ SI, AX")
		for x := range 4 {
			for i, at := range []string{"(AX)", "(AX)(R12*1)", "(AX)(R12*2)", "(AX)(R13*1)"} {
				r.op("VMOVUPS %s, %s", at, r.r(8+i))
			}
			r.op3("VADDPS", 8, 9, x)
			r.op3("VADDPS", x, 10, x)
			r.op3("VSUBPS", 9, 10, 4+x)
			r.op3("VSUBPS", 4+x, 11, 4+x)
			if x < 3 {
				r.op("ADDQ R8, AX")
			}
		}
		r.op("MOVQ DX, AX")
		r.op("SUBQ CX, AX")
		r.op("VMOVUPS (AX), %s", r.r(12))
		for row, to := range []string{"DI", "R10"} {
			m := 4 * row
			r.op3("VADDPS", m, m+1, 8)
			r.op3("VADDPS", 8, m+2, 8)
			r.op3("VADDPS", 8, 12, 8)
			r.op("VMOVUPS %s, (%s)", r.r(8), to)
			r.op3("VSUBPS", m+1, m+2, 9)
			r.op3("VSUBPS", 9, m+3, 9)
			r.op3("VADDPS", 9, 12, 9)
			r.op("VMOVUPS %s, (%s)(R9*1)", r.r(9), to)
		}
	}, func() {
		for _, p := range []string{"SI", "DI", "R10"} {
			r.op("ADDQ $%d, %s", r.v.bytes, p)
		}
	}, func() { r.move("R9", "DI", "R10") })
}

// scaleNorm8 is scaleNorm of eight groups at a time, of whole vectors: the lanes of all eight are added together, and
// there is one root and one division. R9 is the bytes of a group, R10 the groups left, R11 the group.
func (r *rows) scaleNorm8() {
	r.w.line("")
	r.w.line("// func scaleNorm8AVX512(dst, x, w []float32, n, eps, floor, num float64)")
	r.w.line("TEXT ·scaleNorm8AVX512(SB), NOSPLIT, $32-104")
	r.op("MOVQ dst_base+0(FP), DI")
	r.op("MOVQ x_base+24(FP), SI")
	r.op("MOVQ w_base+48(FP), DX")
	r.op("MOVQ w_len+56(FP), R9")
	r.op("SHLQ $2, R9")
	r.op("MOVQ x_len+32(FP), R10")
	r.op("SHLQ $2, R10")
	r.op("ADDQ SI, R10") // the end
	for i, v := range []string{"n+72", "eps+80", "floor+88", "num+96"} {
		r.op("VBROADCASTSD %s(FP), Z%d", v, 28+i)
	}
	r.w.line("groups:")
	r.op("MOVQ SI, R11")
	for g := range 8 {
		r.op("VXORPD Z%d, Z%d, Z%d", g, g, g)
		r.op("VXORPD Z%d, Z%d, Z%d", 8+g, 8+g, 8+g)
		r.op("MOVQ R9, CX")
		r.w.line("square%d:", g)
		r.op("VCVTPS2PD (R11), Z16")
		r.op("VCVTPS2PD 32(R11), Z17")
		r.op("VFMADD231PD Z16, Z16, Z%d", g) // squares of float32 are exact
		r.op("VFMADD231PD Z17, Z17, Z%d", 8+g)
		r.op("ADDQ $64, R11")
		r.op("SUBQ $64, CX")
		r.op("JNE square%d", g)
		r.op("VADDPD Z%d, Z%d, Z%d", 8+g, g, g)
	}
	// pair adds the halves of a and b, which both shuffles take side by side.
	pair := func(op string, low, high, a, b, dst int) {
		if op == "VSHUFF64X2" {
			r.op("VSHUFF64X2 $0x%02X, Z%d, Z%d, Z16", low, b, a)
			r.op("VSHUFF64X2 $0x%02X, Z%d, Z%d, Z17", high, b, a)
		} else {
			r.op("VUNPCKLPD Z%d, Z%d, Z16", b, a)
			r.op("VUNPCKHPD Z%d, Z%d, Z17", b, a)
		}
		r.op("VADDPD Z17, Z16, Z%d", dst)
	}
	for i := range 4 {
		pair("VSHUFF64X2", 0x44, 0xEE, 2*i, 2*i+1, i)
	}
	for i := range 2 {
		pair("VSHUFF64X2", 0x88, 0xDD, 2*i, 2*i+1, i)
	}
	pair("VUNPCK", 0, 0, 0, 1, 0)
	r.op("VDIVPD Z28, Z0, Z0")
	r.op("VADDPD Z29, Z0, Z0")
	r.op("VSQRTPD Z0, Z0")
	r.op("VMAXPD Z0, Z30, Z0") // the root where it is NaN
	r.op("VDIVPD Z0, Z31, Z0")
	r.op("VCVTPD2PS Z0, Y0")
	r.op("VMOVUPS Y0, 0(SP)")
	for _, lane := range []int{0, 2, 4, 6, 1, 3, 5, 7} {
		r.op("VBROADCASTSS %d(SP), Z8", 4*lane)
		r.op("XORL AX, AX")
		r.w.line("scale%d:", lane)
		r.op("VMULPS (SI)(AX*1), Z8, Z0")
		r.op("VMULPS (DX)(AX*1), Z0, Z0")
		r.op("VMOVUPS Z0, (DI)(AX*1)")
		r.op("ADDQ $64, AX")
		r.op("CMPQ AX, R9")
		r.op("JLT scale%d", lane)
		r.op("ADDQ R9, SI")
		r.op("ADDQ R9, DI")
	}
	r.op("CMPQ SI, R10")
	r.op("JLT groups")
	r.end()
}
