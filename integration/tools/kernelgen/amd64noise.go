package main

import (
	"fmt"
	"math"
)

// The constants of the noise, each as a vector of 8: as the Go of packages flow and portable has them. Numbers up to
// 2^52 become float64 where they are put into the fraction of 2^52.
const two52 = 0x4330000000000000

var noiseTable = func() []noiseConst {
	list := []noiseConst{
		{"philox0", 0xD2511F53},
		{"philox1", 0xCD9E8D57},
		{"weyl0", 0x9E3779B9},
		{"weyl1", 0xBB67AE85},
		{"lanes", 0}, // 0 1 2 .. 7
		{"doubled", 1<<33 - 2},
		{"doubledTurn", 1<<31 - 2},
		{"two52", two52},
		{"two52AndOne", two52 | 1},
		{"eighth", 1 << 29}, // of a turn
		{"shift", 0x3ff0000000000000 - 0x3fe6a09e667f3bcd},
		{"fraction", 1<<52 - 1},
		{"half", 0x3fe6a09e667f3bcd},
		{"sign", 1 << 63},
	}
	for _, c := range []struct {
		name  string
		value float64
	}{
		{"two52F", 1 << 52},
		{"two52Exponent", 1<<52 + 1023},
		{"two52Turn", 1<<52 + 1<<30},
		{"unit", 0x1p-33},
		{"one", 1},
		{"minusTwo", -2},
		{"ln2", 0x1.62e42fefa39efp-1},
		{"pi2n32", 0x1.921fb54442d18p-31},
	} {
		list = append(list, noiseConst{c.name, math.Float64bits(c.value)})
	}
	for _, series := range [][]float64{lnSeries, sinSeries, cosSeries} {
		for _, c := range series {
			list = append(list, noiseConst{seriesName(c), math.Float64bits(c)})
		}
	}
	return list
}()

type noiseConst struct {
	name string
	bits uint64
}

// The coefficients of portable.Ln and portable.Sincos, that of the highest power first.
var (
	lnSeries = []float64{
		0x1.8618618618618p-5, 0x1.af286bca1af28p-5, 0x1.e1e1e1e1e1e1ep-5, 0x1.1111111111111p-4, 0x1.3b13b13b13b14p-4,
		0x1.745d1745d1746p-4, 0x1.c71c71c71c71cp-4, 0x1.2492492492492p-3, 0x1.999999999999ap-3, 0x1.5555555555555p-2,
	}
	sinSeries = []float64{
		-0x1.ae7f3e733b81fp-41, 0x1.6124613a86d09p-33, -0x1.ae64567f544e4p-26, 0x1.71de3a556c734p-19,
		-0x1.a01a01a01a01ap-13, 0x1.1111111111111p-7, -0x1.5555555555555p-3,
	}
	cosSeries = []float64{
		0x1.ae7f3e733b81fp-45, -0x1.93974a8c07c9dp-37, 0x1.1eed8eff8d898p-29, -0x1.27e4fb7789f5cp-22,
		0x1.a01a01a01a01ap-16, -0x1.6c16c16c16c17p-10, 0x1.5555555555555p-5, -0x1p-1,
	}
)

func seriesName(c float64) string { return fmt.Sprintf("%x", c) }

// noiseAMD64 writes the kernels that fill a slice with the numbers of flow.Normal.
func noiseAMD64(w *writer) {
	for i, c := range noiseTable {
		w.line("")
		w.line("// %s", c.name)
		for j := range 8 {
			bits := c.bits
			if c.name == "lanes" {
				bits = uint64(j)
			}
			w.line("DATA noise<>+%d(SB)/8, $0x%016x", 64*i+8*j, bits)
		}
	}
	w.line("GLOBL noise<>(SB), RODATA|NOPTR, $%d", 64*len(noiseTable))
	for _, v := range []vectors{avx2, avx512} {
		n := noise{rows{w: w, v: v}}
		n.normal()
	}
}

// noise writes a kernel for one vector extension. A lane is a block of Philox, in 64 bits; the upper half of a lane
// that holds a word has no meaning. Every product and sum is rounded by itself.
type noise struct{ rows }

func noiseAt(name string) string {
	for i, c := range noiseTable {
		if c.name == name {
			return fmt.Sprintf("noise<>+%d(SB)", 64*i)
		}
	}
	panic("no constant " + name)
}

// with writes dst = a op b for registers, and mem for a constant by its name as b; dst = b - a where op subtracts.
func (n *noise) with(op, b string, a, dst int) {
	n.op("%s %s, %s, %s", n.named(op), noiseAt(b), n.r(a), n.r(dst))
}

// three writes dst = a op b.
func (n *noise) three(op string, a, b, dst int) { n.op3(n.named(op), a, b, dst) }

// named is the name of a bitwise operation at the width.
func (n *noise) named(op string) string {
	switch op {
	case "VPAND", "VPOR", "VPXOR":
		if n.is512() {
			return op + "Q"
		}
	}
	return op
}

func (n *noise) shift(op string, bits, a, dst int) {
	n.op("%s $%d, %s, %s", op, bits, n.r(a), n.r(dst))
}

// normal fills whole vectors of blocks:
//
//	DI dst, CX blocks left, 15 the counters; 0 to 3 words, 4 5 keys, later 0 to 13 the two pairs of a block
func (n *noise) normal() {
	lanes := n.v.bytes / 8
	n.text("normal", "dst []float32, seed uint64, step, stream uint32", 40)
	n.op("MOVQ dst_base+0(FP), DI")
	n.op("MOVQ dst_len+8(FP), CX")
	n.op("SHRQ $2, CX")
	n.op("MOVQ $%d, AX", lanes)
	n.op("VMOVDQU%s %s, %s", map[bool]string{true: "64"}[n.is512()], noiseAt("lanes"), n.r(15))
	n.op("VMOVQ AX, X14")
	n.op("VPBROADCASTQ X14, %s", n.r(14))
	n.op("SUBQ $%d, CX", lanes)
	n.op("JLT done")
	n.w.line("loop:")
	words := n.philox()
	n.three("VPADDQ", 15, 14, 15)
	n.boxMuller(words)
	n.op("ADDQ $%d, DI", 16*lanes)
	n.op("SUBQ $%d, CX", lanes)
	n.op("JGE loop")
	n.w.line("done:")
	n.end()
}

// philox returns the registers of the four words.
func (n *noise) philox() [4]int {
	c, p := [4]int{0, 1, 2, 3}, [2]int{6, 7}
	n.three("VPOR", 15, 15, 0)
	n.op("VBROADCASTSS step+32(FP), %s", n.r(1))
	n.op("VBROADCASTSS stream+36(FP), %s", n.r(2))
	n.three("VPXOR", 3, 3, 3)
	n.op("VPBROADCASTQ seed+24(FP), %s", n.r(4))
	n.shift("VPSRLQ", 32, 4, 5)
	for round := range 10 {
		if round > 0 {
			n.with("VPADDD", "weyl0", 4, 4)
			n.with("VPADDD", "weyl1", 5, 5)
		}
		n.with("VPMULUDQ", "philox0", c[0], p[0])
		n.with("VPMULUDQ", "philox1", c[2], p[1])
		n.shift("VPSRLQ", 32, p[1], c[0])
		n.shift("VPSRLQ", 32, p[0], c[2])
		for i := range 2 {
			n.three("VPXOR", c[2*i], c[2*i+1], c[2*i])
			n.three("VPXOR", c[2*i], 4+i, c[2*i])
		}
		c[1], c[3], p[0], p[1] = p[1], p[0], c[3], c[1]
	}
	return c
}

// boxMuller stores the normals of two pairs of words, that of a block side by side.
func (n *noise) boxMuller(words [4]int) {
	free := []int{}
	for i := range 14 {
		if i != words[1] && i != words[3] && i != words[0] && i != words[2] {
			free = append(free, i)
		}
	}
	// both writes an operation for the first pair and then for the second, so that neither waits for the other.
	both := func(write func(pair int)) { write(0); write(1) }
	u, turn := [2]int{words[0], words[2]}, [2]int{words[1], words[3]}
	e, z, p := [2]int{free[0], free[1]}, [2]int{free[2], free[3]}, [2]int{free[4], free[5]}
	x, y := u, [2]int{free[6], free[7]}

	both(func(i int) { n.asFloat(u[i], "doubled", "two52F", "unit") })
	both(func(i int) { n.with("VPADDQ", "shift", u[i], u[i]) })
	both(func(i int) { n.shift("VPSRLQ", 52, u[i], e[i]) })
	both(func(i int) { n.with("VPOR", "two52", e[i], e[i]) })
	both(func(i int) { n.with("VSUBPD", "two52Exponent", e[i], e[i]) })
	both(func(i int) { n.with("VMULPD", "ln2", e[i], e[i]) })
	both(func(i int) { n.with("VPAND", "fraction", u[i], u[i]) })
	both(func(i int) { n.with("VPADDQ", "half", u[i], u[i]) })
	both(func(i int) { n.with("VADDPD", "one", u[i], z[i]) })
	both(func(i int) { n.with("VSUBPD", "one", u[i], u[i]) })
	both(func(i int) { n.three("VDIVPD", u[i], z[i], u[i]) })
	both(func(i int) { n.three("VMULPD", u[i], u[i], z[i]) })
	n.series(lnSeries, z, p)
	both(func(i int) { n.three("VMULPD", z[i], p[i], p[i]) })
	both(func(i int) { n.three("VADDPD", u[i], u[i], u[i]) })
	both(func(i int) { n.three("VMULPD", u[i], p[i], p[i]) })
	both(func(i int) { n.three("VADDPD", u[i], p[i], p[i]) })
	both(func(i int) { n.three("VADDPD", e[i], p[i], e[i]) })
	both(func(i int) { n.with("VMULPD", "minusTwo", e[i], e[i]) })
	both(func(i int) { n.op("VSQRTPD %s, %s", n.r(e[i]), n.r(e[i])) }) // e is the radius

	both(func(i int) { n.with("VPADDD", "eighth", turn[i], turn[i]) })
	both(func(i int) { n.three("VPOR", turn[i], turn[i], x[i]) })
	both(func(i int) { n.asFloat(x[i], "doubledTurn", "two52Turn", "pi2n32") })
	both(func(i int) { n.three("VMULPD", x[i], x[i], z[i]) })
	n.series(sinSeries, z, p)
	n.series(cosSeries, z, y)
	both(func(i int) { n.three("VMULPD", z[i], p[i], p[i]) })
	both(func(i int) { n.three("VMULPD", x[i], p[i], p[i]) })
	both(func(i int) { n.three("VADDPD", x[i], p[i], p[i]) }) // the sine
	both(func(i int) { n.three("VMULPD", z[i], y[i], y[i]) })
	both(func(i int) { n.with("VADDPD", "one", y[i], y[i]) }) // the cosine

	// The quarter turn is in bits 30 and 31: the lower one swaps sine and cosine.
	both(func(i int) { n.shift("VPSLLQ", 33, turn[i], z[i]) })
	both(func(i int) { n.swap(z[i], y[i], p[i], x[i]) })
	both(func(i int) { n.swap(z[i], p[i], y[i], y[i]) })
	both(func(i int) { n.shift("VPSLLQ", 32, turn[i], turn[i]) })
	both(func(i int) { n.three("VPXOR", z[i], turn[i], z[i]) })
	for _, part := range []struct{ sign, of [2]int }{{z, x}, {turn, y}} {
		both(func(i int) { n.with("VPAND", "sign", part.sign[i], part.sign[i]) })
		both(func(i int) { n.three("VPXOR", part.sign[i], part.of[i], part.of[i]) })
		both(func(i int) { n.three("VMULPD", e[i], part.of[i], part.of[i]) })
		both(func(i int) { n.narrow(part.of[i]) })
	}
	n.store(x, y, z, p)
}

// asFloat makes word w the float64 (2 w + 1 - bias) * scale; doubled is the mask of 2 w.
func (n *noise) asFloat(w int, doubled, bias, scale string) {
	n.shift("VPSLLQ", 1, w, w)
	n.with("VPAND", doubled, w, w)
	n.with("VPOR", "two52AndOne", w, w)
	n.with("VSUBPD", bias, w, w)
	n.with("VMULPD", scale, w, w)
}

// series sets dst of both pairs to the sum of a series in z.
func (n *noise) series(list []float64, z, dst [2]int) {
	for i := range dst {
		n.op("VMOVUPD %s, %s", noiseAt(seriesName(list[0])), n.r(dst[i]))
	}
	for _, c := range list[1:] {
		for i := range dst {
			n.three("VMULPD", dst[i], z[i], dst[i])
		}
		for i := range dst {
			n.with("VADDPD", seriesName(c), dst[i], dst[i])
		}
	}
}

// swap sets dst to b where the sign of mask is set, and to a elsewhere.
func (n *noise) swap(mask, a, b, dst int) {
	if n.is512() {
		n.op("VPMOVQ2M %s, K1", n.r(mask))
		n.op("VBLENDMPD %s, %s, K1, %s", n.r(b), n.r(a), n.r(dst))
		return
	}
	n.op("VBLENDVPD %s, %s, %s, %s", n.r(mask), n.r(b), n.r(a), n.r(dst))
}

// narrow rounds a vector to float32, in the lower half of its register.
func (n *noise) narrow(of int) {
	if n.is512() {
		n.op("VCVTPD2PS Z%d, Y%d", of, of)
		return
	}
	n.op("VCVTPD2PSY Y%d, X%d", of, of)
}

// store writes the four normals of each block, cosine and sine of the first pair and those of the second; t are free.
func (n *noise) store(cos, sin [2]int, t, s [2]int) {
	half := "X"
	if n.is512() {
		half = "Y"
	}
	op := func(name string, a, b, dst int) { n.op("%s %s%d, %s%d, %s%d", name, half, b, half, a, half, dst) }
	for i := range 2 {
		op("VUNPCKLPS", cos[i], sin[i], t[i]) // blocks 0 1, and 4 5 in the upper half
		op("VUNPCKHPS", cos[i], sin[i], s[i])
	}
	blocks := [4]int{cos[0], cos[1], sin[0], sin[1]}
	op("VUNPCKLPD", t[0], t[1], blocks[0])
	op("VUNPCKHPD", t[0], t[1], blocks[1])
	op("VUNPCKLPD", s[0], s[1], blocks[2])
	op("VUNPCKHPD", s[0], s[1], blocks[3])
	for i, b := range blocks {
		n.op("VMOVUPS X%d, %d(DI)", b, 16*i)
		if n.is512() {
			n.op("VEXTRACTF128 $1, Y%d, %d(DI)", b, 64+16*i)
		}
	}
}
