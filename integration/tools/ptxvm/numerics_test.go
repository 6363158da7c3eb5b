package ptxvm_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
)

// randomFloat has a random exponent, few or many fraction bits: ties and subnormals occur.
func randomFloat(r *rand.Rand) float32 {
	x := r.Uint32()
	if r.IntN(2) == 0 {
		x &= 0xffff0000
	}
	e := uint32(r.IntN(60) + 100)
	if r.IntN(4) == 0 {
		e = uint32(r.IntN(80))
	}
	return math.Float32frombits(x&0x807fffff | e<<23)
}

// fma is rounded once, also where float64 would round twice and into the subnormals:
// against arithmetic without rounding.
func TestFMA_RoundsOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const n, rounds = 1024, 8
	in := make([]uint32, 3*n)
	for range rounds {
		for i := range n {
			x, y, z := randomFloat(r), randomFloat(r), randomFloat(r)
			if r.IntN(2) == 0 { // z half a unit of the product beside it
				z = x * y * float32(math.Ldexp(1, r.IntN(60)-30))
			}
			in[i], in[n+i], in[2*n+i] = bits(x), bits(y), bits(z)
		}
		got, err := launch(t, ptxvm.Options{}, kernel(`
	ld.global.f32 %f1, [%rd3]; ld.global.f32 %f2, [%rd3+4096]; ld.global.f32 %f3, [%rd3+8192];
	fma.rn.f32 %f4, %f1, %f2, %f3;
	st.global.f32 [%rd4], %f4;`), threads(n), in, n)
		if err != nil {
			t.Fatal(err)
		}
		for i, g := range got {
			x, y, z := math.Float32frombits(in[i]), math.Float32frombits(in[n+i]), math.Float32frombits(in[2*n+i])
			exact := new(big.Float).SetPrec(2000).Mul(big.NewFloat(float64(x)), big.NewFloat(float64(y)))
			exact.Add(exact, big.NewFloat(float64(z)))
			if want, _ := exact.Float32(); math.Float32frombits(g) != want {
				t.Fatalf("fma(%v, %v, %v) is %v, want %v", x, y, z, math.Float32frombits(g), want)
			}
		}
	}
}

// product multiplies A [16, 16] by B [16, 8] and adds C [16, 8] with ldmatrix and
// mma.sync; all are given row by row, A and B as pairs of bf16.
const product = `
	// 32 lanes fill the tile: A at 0 with rows of 32 bytes, B transposed ([n][k]) at 512
	mul.wide.u32 %rd7, %r1, 16; add.s64 %rd8, %rd1, %rd7; add.s64 %rd9, %rd5, %rd7;
	ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd8];
	st.shared.v4.u32 [%rd9], {%r10, %r11, %r12, %r13};
	setp.gt.u32 %p1, %r1, 15;
	@%p1 bra FILLED;
	ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd8+512];
	st.shared.v4.u32 [%rd9+512], {%r10, %r11, %r12, %r13};
FILLED:
	bar.sync 0;
	and.b32 %r14, %r1, 15; shr.u32 %r15, %r1, 4;
	mul.wide.u32 %rd7, %r14, 32; add.s64 %rd7, %rd7, %rd5;
	mul.wide.u32 %rd8, %r15, 16; add.s64 %rd7, %rd7, %rd8;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%rd7];
	and.b32 %r14, %r1, 7; shr.u32 %r15, %r1, 3; and.b32 %r15, %r15, 1;
	mul.wide.u32 %rd7, %r14, 32; add.s64 %rd7, %rd7, %rd5;
	mul.wide.u32 %rd8, %r15, 16; add.s64 %rd7, %rd7, %rd8;
	ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%rd7+512];
	shr.u32 %r16, %r1, 2; and.b32 %r17, %r1, 3;
	mad.lo.s32 %r18, %r16, 8, 0; mad.lo.s32 %r18, %r17, 2, %r18;
	mul.wide.u32 %rd7, %r18, 4; add.s64 %rd8, %rd1, %rd7; add.s64 %rd9, %rd2, %rd7;
	ld.global.v2.f32 {%f1, %f2}, [%rd8+768]; ld.global.v2.f32 {%f3, %f4}, [%rd8+1024];
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%f1, %f2, %f3, %f4};
	st.global.v2.f32 [%rd9], {%f5, %f6}; st.global.v2.f32 [%rd9+256], {%f7, %f8};`

// matrices are operands of product, as float32.
type matrices struct {
	a [16][16]float32
	b [16][8]float32
	c [16][8]float32
}

func (m *matrices) words() []uint32 {
	var w []uint32
	pair := func(x, y float32) { w = append(w, bits(x)>>16|bits(y)&0xffff0000) }
	for i := range 16 {
		for k := 0; k < 16; k += 2 {
			pair(m.a[i][k], m.a[i][k+1])
		}
	}
	for n := range 8 {
		for k := 0; k < 16; k += 2 {
			pair(m.b[k][n], m.b[k+1][n])
		}
	}
	for i := range 16 {
		for n := range 8 {
			w = append(w, bits(m.c[i][n]))
		}
	}
	return w
}

// Fragments of ldmatrix and mma.sync lie as the ISA says: a product of small integers,
// each element of A and B another one, is exact in every mode.
func TestMMA_Layout(t *testing.T) {
	var m matrices
	for i := range 16 {
		for k := range 16 {
			m.a[i][k] = float32((i*16+k)%251 - 120)
		}
		for n := range 8 {
			m.b[i][n] = float32((i*8+n)*5%127 - 60)
			m.c[i][n] = float32(i*8 + n)
		}
	}
	for _, mode := range []ptxvm.Numerics{ptxvm.Chain, ptxvm.Ampere, ptxvm.Hopper} {
		got, err := launch(t, ptxvm.Options{Numerics: mode}, shared(product), threads(32), m.words(), 128)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			for n := range 8 {
				want := m.c[i][n]
				for k := range 16 {
					want += m.a[i][k] * m.b[k][n]
				}
				if g := math.Float32frombits(got[8*i+n]); g != want {
					t.Fatalf("mode %d: element (%d, %d) is %v, want %v", mode, i, n, g, want)
				}
			}
		}
	}
}

// step is the published formula of a tensor core's step, in float64: every term is cut to
// a number of bits below the largest exponent, the sum to float32.
func step(c float32, a, b []float32, fraction int) float32 {
	exponent := func(x float32) int { _, e := math.Frexp(float64(x)); return max(e-1, -126) }
	largest := math.MinInt
	if c != 0 {
		largest = exponent(c)
	}
	for i := range a {
		if a[i] != 0 && b[i] != 0 {
			largest = max(largest, exponent(a[i])+exponent(b[i]))
		}
	}
	if largest == math.MinInt {
		return 0
	}
	unit := math.Ldexp(1, largest-fraction)
	sum := math.Trunc(float64(c) / unit)
	for i := range a {
		sum += math.Trunc(float64(a[i]) * float64(b[i]) / unit)
	}
	sum *= unit
	f := float32(sum)
	if math.Abs(float64(f)) > math.Abs(sum) {
		f = math.Nextafter32(f, 0)
	}
	return f
}

func TestMMA_ModelsOfHardware(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	bf16 := func(spread int) float32 {
		x := math.Ldexp(r.NormFloat64(), r.IntN(2*spread+1)-spread)
		return math.Float32frombits(bits(float32(x)) & 0xffff0000)
	}
	for round := range 60 {
		var m matrices
		spread := round % 12
		if round%10 == 9 {
			spread = 60 // products below all of float32
		}
		for i := range 16 {
			for k := range 16 {
				m.a[i][k] = bf16(spread)
			}
			for n := range 8 {
				m.b[i][n], m.c[i][n] = bf16(spread), float32(math.Ldexp(r.NormFloat64(), r.IntN(2*spread+1)-spread))
			}
		}
		for mode, model := range map[ptxvm.Numerics]func(c float32, a, b []float32) float32{
			ptxvm.Chain: func(c float32, a, b []float32) float32 {
				for i := range a {
					c += float32(a[i] * b[i])
				}
				return c
			},
			ptxvm.Ampere: func(c float32, a, b []float32) float32 {
				return step(step(c, a[:8], b[:8], 24), a[8:], b[8:], 24)
			},
			ptxvm.Hopper: func(c float32, a, b []float32) float32 { return step(c, a, b, 25) },
		} {
			got, err := launch(t, ptxvm.Options{Numerics: mode}, shared(product), threads(32), m.words(), 128)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 16 {
				for n := range 8 {
					var column []float32
					for k := range 16 {
						column = append(column, m.b[k][n])
					}
					if g, want := math.Float32frombits(got[8*i+n]), model(m.c[i][n], m.a[i][:], column); g != want {
						t.Fatalf("mode %d, spread %d: element (%d, %d) is %v, want %v", mode, spread, i, n, g, want)
					}
				}
			}
		}
	}
}

// The modes differ where the hardware's do: 16 products of 2^-24 vanish one by one beside
// 1, and count together on Ampere; those of 2^-25 only on Hopper.
func TestMMA_ModesDiffer(t *testing.T) {
	for _, tt := range []struct {
		mode     ptxvm.Numerics
		exponent int
		want     float32
	}{
		{ptxvm.Chain, -24, 1},
		{ptxvm.Ampere, -24, 1 + 0x1p-20},
		{ptxvm.Hopper, -24, 1 + 0x1p-20},
		{ptxvm.Chain, -25, 1},
		{ptxvm.Ampere, -25, 1},
		{ptxvm.Hopper, -25, 1 + 0x1p-21},
	} {
		var m matrices
		for k := range 16 {
			m.a[0][k], m.b[k][0] = float32(math.Ldexp(1, tt.exponent)), 1
		}
		m.c[0][0] = 1
		got, err := launch(t, ptxvm.Options{Numerics: tt.mode}, shared(product), threads(32), m.words(), 128)
		if err != nil {
			t.Fatal(err)
		}
		if g := math.Float32frombits(got[0]); g != tt.want {
			t.Errorf("mode %d, products 2^%d: got %v, want %v", tt.mode, tt.exponent, g, tt.want)
		}
	}
}

// Jitter moves a result by at most 2^-22 of it and a rounding, not always the same way.
func TestJitter(t *testing.T) {
	in := make([]uint32, 256)
	for i := range in {
		in[i] = bits(float32(i)/16 - 8)
	}
	body := kernel(`
	ld.global.f32 %f1, [%rd3];
	ex2.approx.ftz.f32 %f2, %f1;
	st.global.f32 [%rd4], %f2;`)
	plain, err := launch(t, ptxvm.Options{}, body, threads(256), in, 256)
	if err != nil {
		t.Fatal(err)
	}
	moved, err := launch(t, ptxvm.Options{Jitter: true}, body, threads(256), in, 256)
	if err != nil {
		t.Fatal(err)
	}
	up, down := 0, 0
	for i := range in {
		want := math.Exp2(float64(math.Float32frombits(in[i])))
		p, m := float64(math.Float32frombits(plain[i])), float64(math.Float32frombits(moved[i]))
		if float32(p) != float32(want) {
			t.Errorf("2^%v is %v, want %v", math.Float32frombits(in[i]), p, want)
		}
		if d := math.Abs(m/want - 1); d > 0x1p-22+0x1p-24 {
			t.Errorf("2^%v with jitter is off by %v", math.Float32frombits(in[i]), d)
		}
		if m > p {
			up++
		} else if m < p {
			down++
		}
	}
	if up < 50 || down < 50 {
		t.Errorf("%d of 256 results went up, %d down", up, down)
	}
}

// A transposed matrix: register of lane l has elements (2t, g) and (2t+1, g) of the rows
// that lanes 0 to 7 point at, g = l/4, t = l%4.
func TestLdmatrix_Transposed(t *testing.T) {
	in := make([]uint32, 32) // 8 rows of 8: element (r, c) is 8r + c
	for i := range in {
		in[i] = uint32(2*i) | uint32(2*i+1)<<16
	}
	got, err := launch(t, ptxvm.Options{}, shared(`
	ld.global.u32 %r10, [%rd3]; st.shared.u32 [%rd6], %r10;
	bar.sync 0;
	and.b32 %r11, %r1, 7; mul.wide.u32 %rd7, %r11, 16; add.s64 %rd7, %rd7, %rd5;
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r12}, [%rd7];
	st.global.u32 [%rd4], %r12;`), threads(32), in, 32)
	if err != nil {
		t.Fatal(err)
	}
	for l, x := range got {
		g, t2 := uint32(l/4), uint32(l%4)*2
		if want := 8*t2 + g | (8*(t2+1)+g)<<16; x != want {
			t.Errorf("lane %d has %#x, want %#x", l, x, want)
		}
	}
}
