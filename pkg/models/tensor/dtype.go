package tensor

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"
)

// DType is an element type, spelled as in a safetensors header.
type DType string

// Element types of safetensors. Only F64, F32, F16 and BF16 convert from and to
// float32 here; the others have a name and a size.
const (
	F64    DType = "F64"
	F32    DType = "F32"
	F16    DType = "F16"  // IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits
	BF16   DType = "BF16" // the upper half of a binary32: 1 sign, 8 exponent, 7 fraction bits
	F8E4M3 DType = "F8_E4M3"
	F8E5M2 DType = "F8_E5M2"
	I64    DType = "I64"
	I32    DType = "I32"
	I16    DType = "I16"
	I8     DType = "I8"
	U64    DType = "U64"
	U32    DType = "U32"
	U16    DType = "U16"
	U8     DType = "U8"
	Bool   DType = "BOOL"
)

// Size returns the bytes of one element, or 0 for an unknown type: readers of files reject a type
// by it.
func (d DType) Size() int {
	switch d {
	case F64, I64, U64:
		return 8
	case F32, I32, U32:
		return 4
	case F16, BF16, I16, U16:
		return 2
	case F8E4M3, F8E5M2, I8, U8, Bool:
		return 1
	}
	return 0
}

// Valid reports whether d is one of the types above.
func (d DType) Valid() bool { return d.Size() > 0 }

// Float reports whether Round, AppendFloats and DecodeFloats accept d.
func (d DType) Float() bool { return d == F64 || d == F32 || d == F16 || d == BF16 }

// Round replaces every x[i] by the nearest value that d can hold, ties to even. Rollouts round
// latents to the type that they are stored in. Values beyond the largest finite one become
// infinite, values below the smallest normal one round to subnormals or a signed zero, a NaN stays
// a (quiet) NaN. F32 and F64 leave x as it is. Round panics when d is not a Float type.
func (d DType) Round(x []float32) {
	switch d {
	case F32, F64:
	case F16:
		roundF16(x)
	case BF16:
		roundBF16(x)
	default:
		panic(notFloat(d))
	}
}

// littleEndian says that this machine has floats in memory as they are stored.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// viewF32 returns the memory of x. It is x in F32 where the machine is little-endian.
func viewF32(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// F32Bytes returns x in F32, little-endian. The bytes may share the memory of x: they hold as long as x is not changed.
func F32Bytes(x []float32) []byte {
	if littleEndian {
		return viewF32(x)
	}
	return F32.AppendFloats(nil, x)
}

// AppendFloats appends x, rounded to d and little-endian, to dst and returns the
// extended slice. It panics when d is not a Float type.
func (d DType) AppendFloats(dst []byte, x []float32) []byte {
	if !d.Float() {
		panic(notFloat(d))
	}
	if d == F32 && littleEndian {
		return append(dst, viewF32(x)...)
	}
	n, size := len(dst), len(x)*d.Size()
	dst = append(dst, make([]byte, size)...) // the compiler extends in place, without a temporary
	b := dst[n : n+size]
	switch d {
	case F64:
		for i, v := range x {
			binary.LittleEndian.PutUint64(b[8*i:8*i+8], math.Float64bits(float64(v)))
		}
	case F32:
		for i, v := range x {
			binary.LittleEndian.PutUint32(b[4*i:4*i+4], math.Float32bits(v))
		}
	case F16:
		for i, v := range x {
			binary.LittleEndian.PutUint16(b[2*i:2*i+2], toF16(v))
		}
	case BF16:
		for i, v := range x {
			binary.LittleEndian.PutUint16(b[2*i:2*i+2], toBF16(v))
		}
	}
	return dst
}

// DecodeFloats fills dst from the little-endian elements b of type d. It is exact
// for F32, F16 and BF16 and rounds F64 to nearest even. It fails when d is not a
// Float type or b is not exactly len(dst) elements long; dst is then unchanged.
func (d DType) DecodeFloats(dst []float32, b []byte) error {
	if !d.Float() {
		return fmt.Errorf("decode dtype %q as floats; must be F64, F32, F16 or BF16", string(d))
	}
	if want := len(dst) * d.Size(); len(b) != want {
		return fmt.Errorf("decode %d %s elements: have %d bytes; must be %d", len(dst), string(d), len(b), want)
	}
	if d == F32 && littleEndian {
		copy(viewF32(dst), b)
		return nil
	}
	switch d {
	case F64:
		for i := range dst {
			dst[i] = float32(math.Float64frombits(binary.LittleEndian.Uint64(b[8*i : 8*i+8])))
		}
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i : 4*i+4]))
		}
	case F16:
		for i := range dst {
			dst[i] = fromF16(binary.LittleEndian.Uint16(b[2*i : 2*i+2]))
		}
	case BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:2*i+2])) << 16)
		}
	}
	return nil
}

func notFloat(d DType) string {
	return fmt.Sprintf("tensor: dtype %q does not hold floats", string(d))
}

const (
	signMask = 0x80000000
	infBits  = 0x7f800000 // +Inf in binary32
	// f16Overflow is 65520 in binary32, halfway between the largest binary16 and the
	// next power of two: from here on the nearest value is Inf.
	f16Overflow = 0x477ff000
	// f16Normal is 2^-14, the smallest normal binary16.
	f16Normal = 0x38800000
	// f16Rebias moves the exponent from bias 127 to bias 15.
	f16Rebias = (127 - 15) << 23
)

// roundF16 is DType.Round for F16: it rounds each x[i] in place to a value of binary16, half to
// even, and keeps it as binary32 throughout. Adding 0.5 to a number below 2^-14 makes the adder
// round it to a multiple of 2^-24, the binary16 subnormal spacing, with ties to even. Too large
// values become infinite; a NaN becomes a quiet one.
func roundF16(x []float32) {
	for i, v := range x {
		u := math.Float32bits(v)
		sign := u & signMask
		u &^= signMask
		switch {
		case u-f16Normal < f16Overflow-f16Normal:
			u = (u + 0xfff + u>>13&1) &^ 0x1fff
		case u < f16Normal:
			half := math.Float32frombits(u) + 0.5
			u = math.Float32bits(half - 0.5)
		case u > infBits:
			u = u&^0x1fff | 0x00400000
		default:
			u = infBits
		}
		x[i] = math.Float32frombits(sign | u)
	}
}

func roundBF16(x []float32) {
	for i, v := range x {
		x[i] = math.Float32frombits(uint32(toBF16(v)) << 16)
	}
}

// toF16 returns the bits of v rounded to binary16, half to even. AppendFloats writes them. Values
// beyond its range become infinite; NaN stays NaN.
func toF16(v float32) uint16 {
	u := math.Float32bits(v)
	sign := uint16(u >> 16 & 0x8000)
	u &^= signMask
	switch {
	case u-f16Normal < f16Overflow-f16Normal:
		return sign | uint16((u-f16Rebias+0xfff+u>>13&1)>>13)
	case u < f16Normal:
		// 0.5 + k*2^-24 carries k in its lowest fraction bits.
		half := math.Float32frombits(u) + 0.5
		return sign | uint16(math.Float32bits(half)-math.Float32bits(0.5))
	case u > infBits:
		return sign | 0x7e00 | uint16(u>>13&0x3ff)
	default:
		return sign | 0x7c00
	}
}

// fromF16 returns the value of binary16 bits. DecodeFloats reads them; every value is exact in
// float32.
func fromF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	u := uint32(h&0x7fff) << 13
	switch {
	case u >= 0x7c00<<13: // Inf and NaN: all exponent bits set
		u |= infBits
	case u >= 0x0400<<13:
		u += f16Rebias
	default: // k*2^-24, exact
		u = math.Float32bits(float32(h&0x7fff) * (1.0 / (1 << 24)))
	}
	return math.Float32frombits(sign | u)
}

func toBF16(v float32) uint16 {
	u := math.Float32bits(v)
	if u&^signMask > infBits {
		return uint16(u>>16) | 0x0040
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}
