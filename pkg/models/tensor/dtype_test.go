package tensor_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// valueF16 is the definition of binary16, in float64: sign, 5 exponent bits with
// bias 15, 10 fraction bits. NaN for the NaN patterns.
func valueF16(h uint16) float64 {
	exp, frac := int(h>>10&31), float64(h&1023)
	v := math.Ldexp(frac, -24)
	switch {
	case exp == 31 && frac != 0:
		return math.NaN()
	case exp == 31:
		v = math.Inf(1)
	case exp > 0:
		v = math.Ldexp(1024+frac, exp-25)
	}
	if h&0x8000 != 0 {
		v = -v
	}
	return v
}

func sameFloat(a float32, b float64) bool {
	return float64(a) == b && math.Signbit(float64(a)) == math.Signbit(b) || a != a && b != b
}

func half(h uint16) []byte { return binary.LittleEndian.AppendUint16(nil, h) }

func TestDType_Size(t *testing.T) {
	sizes := map[tensor.DType]int{
		tensor.F64: 8, tensor.F32: 4, tensor.F16: 2, tensor.BF16: 2, tensor.F8E4M3: 1, tensor.F8E5M2: 1,
		tensor.I64: 8, tensor.I32: 4, tensor.I16: 2, tensor.I8: 1,
		tensor.U64: 8, tensor.U32: 4, tensor.U16: 2, tensor.U8: 1, tensor.Bool: 1,
		"": 0, "f32": 0, "float32": 0,
	}
	for d, want := range sizes {
		if got := d.Size(); got != want {
			t.Errorf("DType(%q).Size() = %d, want %d", d, got, want)
		}
		if got := d.Valid(); got != (want > 0) {
			t.Errorf("DType(%q).Valid() = %v, want %v", d, got, want > 0)
		}
	}
}

// Every binary16 pattern decodes to its definition, survives Round, and encodes
// back to itself (a signalling NaN comes back quiet).
func TestF16_AllPatterns(t *testing.T) {
	for h := range 1 << 16 {
		x := make([]float32, 1)
		if err := tensor.F16.DecodeFloats(x, half(uint16(h))); err != nil {
			t.Fatal(err)
		}
		if want := valueF16(uint16(h)); !sameFloat(x[0], want) {
			t.Fatalf("decode %#04x = %v, want %v", h, x[0], want)
		}
		want := uint16(h)
		if x[0] != x[0] {
			want |= 0x0200
		}
		if got := tensor.F16.AppendFloats(nil, x); !bytes.Equal(got, half(want)) {
			t.Fatalf("encode %v = %x, want %x", x[0], got, half(want))
		}
		rounded := []float32{x[0]}
		tensor.F16.Round(rounded)
		if !sameFloat(rounded[0], valueF16(uint16(h))) {
			t.Fatalf("round %v = %v, want it unchanged", x[0], rounded[0])
		}
	}
}

// Between each pair of neighbouring finite halves: just below the midpoint, the
// midpoint (to the even pattern), just above it.
func TestF16_Midpoints(t *testing.T) {
	for h := range uint16(0x7c00) {
		lo, hi := valueF16(h), valueF16(h+1)
		if h+1 == 0x7c00 {
			hi = 65536 // the value that would follow the largest finite one
		}
		mid := float32((lo + hi) / 2) // exact: 12 significant bits
		even := h + h&1
		cases := []struct {
			x    float32
			want uint16
		}{
			{math.Nextafter32(mid, 0), h},
			{mid, even},
			{math.Nextafter32(mid, 1e9), h + 1},
		}
		for _, c := range cases {
			for _, sign := range []uint16{0, 0x8000} {
				x := []float32{c.x}
				if sign != 0 {
					x[0] = -x[0]
				}
				if got := tensor.F16.AppendFloats(nil, x); !bytes.Equal(got, half(c.want|sign)) {
					t.Fatalf("encode %v = %x, want %x", x[0], got, half(c.want|sign))
				}
				in := x[0]
				tensor.F16.Round(x)
				if !sameFloat(x[0], valueF16(c.want|sign)) {
					t.Fatalf("round %v = %v, want %v", in, x[0], valueF16(c.want|sign))
				}
			}
		}
	}
}

// Every bfloat16 pattern is the upper half of a binary32; around each midpoint the
// nearest pattern wins, ties to even.
func TestBF16_AllPatterns(t *testing.T) {
	for h := range uint32(1 << 16) {
		x := []float32{0}
		if err := tensor.BF16.DecodeFloats(x, half(uint16(h))); err != nil {
			t.Fatal(err)
		}
		if got := math.Float32bits(x[0]); got != h<<16 {
			t.Fatalf("decode %#04x = %#08x, want %#08x", h, got, h<<16)
		}
		if x[0] != x[0] {
			got := tensor.BF16.AppendFloats(nil, []float32{math.Float32frombits(h<<16 | 1)})
			if !bytes.Equal(got, half(uint16(h)|0x40)) {
				t.Fatalf("encode NaN %#08x = %x, want %x", h<<16|1, got, half(uint16(h)|0x40))
			}
			continue
		}
		even := h + h&1
		cases := []struct{ bits, want uint32 }{{h << 16, h}}
		if h&0x7fff < 0x7f80 {
			cases = append(cases, []struct{ bits, want uint32 }{
				{h<<16 | 0x7fff, h}, {h<<16 | 0x8000, even}, {h<<16 | 0x8001, h + 1},
			}...)
		}
		for _, c := range cases {
			x := []float32{math.Float32frombits(c.bits)}
			if got := tensor.BF16.AppendFloats(nil, x); !bytes.Equal(got, half(uint16(c.want))) {
				t.Fatalf("encode %#08x = %x, want %x", c.bits, got, half(uint16(c.want)))
			}
			tensor.BF16.Round(x)
			if got := math.Float32bits(x[0]); got != c.want<<16 {
				t.Fatalf("round %#08x = %#08x, want %#08x", c.bits, got, c.want<<16)
			}
		}
	}
}

// Round and the codec agree: encoding rounds, and a rounded slice round-trips bit
// for bit.
func TestDType_RoundMatchesCodec(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.SampledFrom([]tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16}).Draw(t, "dtype")
		bits := rapid.SliceOfN(rapid.Uint32(), 0, 50).Draw(t, "bits")
		x := make([]float32, len(bits))
		for i, u := range bits {
			if u&0x7fffffff > 0x7f800000 {
				u |= 0x00400000 // quiet: a signalling NaN may not survive a conversion
			}
			x[i] = math.Float32frombits(u)
		}
		encoded := d.AppendFloats([]byte("prefix"), x)
		d.Round(x)
		again := d.AppendFloats([]byte("prefix"), x)
		if !bytes.Equal(encoded, again) {
			t.Fatalf("%s: rounding changed the encoding:\n got %x\nwant %x", d, again, encoded)
		}
		decoded := make([]float32, len(x))
		if err := d.DecodeFloats(decoded, encoded[len("prefix"):]); err != nil {
			t.Fatal(err)
		}
		for i := range x {
			if math.Float32bits(decoded[i]) != math.Float32bits(x[i]) {
				t.Fatalf("%s: element %d = %x, want %x", d, i, math.Float32bits(decoded[i]), math.Float32bits(x[i]))
			}
		}
	})
}

func TestDType_DecodeFloatsErrors(t *testing.T) {
	cases := []struct {
		name string
		d    tensor.DType
		n    int
		b    []byte
	}{
		{"short", tensor.F32, 2, make([]byte, 7)},
		{"long", tensor.F16, 2, make([]byte, 6)},
		{"integers", tensor.I64, 1, make([]byte, 8)},
		{"unknown", "F4", 1, make([]byte, 1)},
	}
	for _, c := range cases {
		if err := c.d.DecodeFloats(make([]float32, c.n), c.b); err == nil {
			t.Errorf("%s: decode %d %s from %d bytes succeeded, want an error", c.name, c.n, c.d, len(c.b))
		}
	}
}

func ExampleDType_Round() {
	x := []float32{0.1, 65519, 65520, 1e-9}
	tensor.F16.Round(x)
	fmt.Println(x)
	// Output: [0.099975586 65504 +Inf 0]
}

func BenchmarkDType(b *testing.B) {
	x := make([]float32, 1<<16)
	for i := range x {
		x[i] = float32(math.Sin(float64(i)) * 3)
	}
	for _, d := range []tensor.DType{tensor.F32, tensor.F16, tensor.BF16} {
		enc := d.AppendFloats(nil, x)
		y := make([]float32, len(x))
		b.Run("op=round/dtype="+string(d), func(b *testing.B) {
			b.SetBytes(int64(4 * len(x)))
			for b.Loop() {
				copy(y, x)
				d.Round(y)
			}
		})
		b.Run("op=append/dtype="+string(d), func(b *testing.B) {
			b.SetBytes(int64(4 * len(x)))
			for b.Loop() {
				enc = d.AppendFloats(enc[:0], x)
			}
		})
		b.Run("op=decode/dtype="+string(d), func(b *testing.B) {
			b.SetBytes(int64(4 * len(x)))
			for b.Loop() {
				if err := d.DecodeFloats(y, enc); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// F32 is the bits of each value, little-endian, whatever the machine has in memory.
func TestF32_Bytes(t *testing.T) {
	x := []float32{0, float32(math.Copysign(0, -1)), 1, -2.5, float32(math.Inf(1)), math.SmallestNonzeroFloat32}
	var want []byte
	for _, v := range x {
		want = binary.LittleEndian.AppendUint32(want, math.Float32bits(v))
	}
	back := make([]float32, len(x))
	if err := tensor.F32.DecodeFloats(back, want); err != nil {
		t.Fatal(err)
	}
	if b := tensor.F32Bytes(x); !bytes.Equal(b, want) || !bytes.Equal(tensor.F32Bytes(back), want) {
		t.Errorf("%x, and %v read back; want %x", b, back, want)
	}
	if b := tensor.F32.AppendFloats([]byte{7}, x); !bytes.Equal(b, append([]byte{7}, want...)) {
		t.Errorf("appended %x", b)
	}
	if b := tensor.F32Bytes(nil); len(b) != 0 {
		t.Errorf("%d bytes of nothing", len(b))
	}
}
