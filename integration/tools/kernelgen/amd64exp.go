package main

// The kernels on rows that take exponentials.

// expConstants loads what expOf keeps in registers.
func (r *rows) expConstants() {
	r.constant("expBias", 12)
	r.constant("one", 13)
	r.constant("expMax", 14)
}

// expOf sets register 1 to exp32 of register x (not 1, 2 or 3), using 2, 3 and, for
// AVX2, 4 and 5.
func (r *rows) expOf(x int) {
	if r.is512() {
		r.op("VCMPPS $0x15, %s, %s, K2", konst("expMin"), r.r(x)) // not less, or NaN
		r.op("VCMPPS $3, %s, %s, K3", r.r(x), r.r(x))
	} else {
		r.op("VCMPPS $0x11, %s, %s, Y4", konst("expMin"), r.r(x)) // less
		r.op("VCMPPS $3, %s, %s, Y5", r.r(x), r.r(x))
	}
	r.op3("VMINPS", 14, x, 3) // x where it is NaN
	r.op("VMOVAPS %s, %s", r.r(3), r.r(2))
	r.op("VFMADD132PS %s, %s, %s", konst("log2e"), r.r(12), r.r(2)) // t = x log2e + bias
	r.op("VSUBPS %s, %s, %s", r.r(12), r.r(2), r.r(1))              // n
	r.op("VFMADD231PS %s, %s, %s", konst("minusLn2Hi"), r.r(1), r.r(3))
	r.op("VFMADD231PS %s, %s, %s", konst("minusLn2Lo"), r.r(1), r.r(3))
	r.op("VMOVUPS %s, %s", konst("exp7"), r.r(1))
	for _, c := range []string{"exp6", "exp5", "exp4", "exp3", "exp2"} {
		r.op("VFMADD213PS %s, %s, %s", konst(c), r.r(3), r.r(1))
	}
	r.op("VFMADD213PS %s, %s, %s", r.r(13), r.r(3), r.r(1))
	r.op("VFMADD213PS %s, %s, %s", r.r(13), r.r(3), r.r(1))
	r.op("VPSLLD $23, %s, %s", r.r(2), r.r(2))
	r.op("VPADDD %s, %s, %s", r.r(2), r.r(1), r.r(1))
	if r.is512() {
		r.op("VMOVUPS.Z %s, K2, %s", r.r(1), r.r(1))
		r.op("VMOVUPS %s, K3, %s", r.r(x), r.r(1))
	} else {
		r.op("VANDNPS Y1, Y4, Y1")
		r.op("VORPS Y5, Y1, Y1")
	}
}

// siluOf sets register 1 to silu32 of register 0; register 11 is -0.
func (r *rows) siluOf() {
	r.op3("VXORPS", 0, 11, 6)
	r.expOf(6)
	r.op3("VADDPS", 1, 13, 1)
	r.op3("VDIVPS", 0, 1, 1)
}

func (r *rows) silu() {
	r.text("silu", "dst, x []float32", 48)
	r.pointers("dst", "x")
	r.expConstants()
	r.constant("minusZero", 11)
	r.loop(func() {
		r.load("SI", 0)
		r.siluOf()
		r.store(1, "DI")
	})
	r.end()
}

func (r *rows) siluMul() {
	r.text("siluMul", "dst, x, y []float32", 72)
	r.pointers("dst", "x", "y")
	r.expConstants()
	r.constant("minusZero", 11)
	r.loop(func() {
		r.load("SI", 0)
		r.load("DX", 7)
		r.siluOf()
		r.op3("VMULPS", 1, 7, 1)
		r.store(1, "DI")
	})
	r.end()
}

func (r *rows) gelu() {
	r.text("gelu", "dst, x []float32", 48)
	r.pointers("dst", "x")
	r.expConstants()
	r.constant("minusGelu1", 10)
	r.constant("minusGelu3", 11)
	r.loop(func() {
		r.load("SI", 0)
		r.op3("VMULPS", 0, 0, 6)
		r.op("VFMADD213PS %s, %s, %s", r.r(10), r.r(11), r.r(6)) // x^2 (-g3) - g1
		r.op3("VMULPS", 0, 6, 6)
		r.expOf(6)
		r.op3("VADDPS", 1, 13, 1)
		r.op3("VDIVPS", 0, 1, 1)
		r.store(1, "DI")
	})
	r.end()
}

// expSum keeps lanes 0 to 7 in register 8 and, for AVX2, 8 to 15 in register 9: the
// two change places after every vector, so that the next one goes to the other.
func (r *rows) expSum() {
	r.text("expSum", "x []float32, m, scale float32) (ret float32", 36)
	r.op("MOVQ x_base+0(FP), DI")
	r.op("MOVQ x_len+8(FP), CX")
	r.op("XORL AX, AX")
	r.op("VBROADCASTSS m+24(FP), %s", r.r(10))
	r.op("VBROADCASTSS scale+28(FP), %s", r.r(11))
	r.expConstants()
	r.op("VXORPS %s, %s, %s", r.r(8), r.r(8), r.r(8))
	r.op("VXORPS %s, %s, %s", r.r(9), r.r(9), r.r(9))
	r.op("MOVQ CX, R9")
	body := func() {
		r.load("DI", 0)
		r.op3("VSUBPS", 0, 10, 0)
		r.op3("VMULPS", 0, 11, 0)
		r.expOf(0)
		r.store(1, "DI")
		switch {
		case r.is512() && r.tail:
			r.op("VADDPS Z1, Z8, K1, Z8")
			return
		case r.is512():
			r.op("VADDPS Z1, Z8, Z8")
			return
		case r.tail:
			r.op("VANDPS Y15, Y1, Y1")
		}
		r.op("VADDPS Y1, Y8, Y0")
		r.op("VMOVAPS Y9, Y8")
		r.op("VMOVAPS Y0, Y9")
	}
	r.loop(body)
	// Pairs of lanes 8 apart, then 4, 2 and 1. Addition commutes, so it does not
	// matter which of the two registers holds the lower lanes at the end.
	if r.is512() {
		r.op("VEXTRACTF64X4 $1, Z8, Y9")
	}
	r.op("VADDPS Y9, Y8, Y8")
	r.op("VEXTRACTF128 $1, Y8, X9")
	r.op("VADDPS X9, X8, X8")
	r.op("VMOVHLPS X8, X8, X9")
	r.op("VADDPS X9, X8, X8")
	r.op("VMOVSHDUP X8, X9")
	r.op("VADDSS X9, X8, X8")
	r.op("VMOVSS X8, ret+32(FP)")
	r.end()
}
