package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// decodeFloats converts the elements in b, of type d, to float32; b has the size of dst. Floats are
// rounded; an integer that float32 cannot hold exactly is an error.
func decodeFloats(dst []float32, d tensor.DType, b []byte) error {
	switch d {
	case tensor.F8E4M3:
		for i, v := range b {
			dst[i] = e4m3(v)
		}
		return nil
	case tensor.F8E5M2:
		for i, v := range b {
			dst[i] = e5m2(v)
		}
		return nil
	}
	if d.Float() {
		return d.DecodeFloats(dst, b)
	}
	size := d.Size()
	for i := range dst {
		v, err := integerFloat(d, b[i*size:(i+1)*size])
		if err != nil {
			return fmt.Errorf("element %d: %w", i, err)
		}
		dst[i] = v
	}
	return nil
}

// integerFloat converts one integer or boolean to float32; one that float32 cannot hold exactly is an error.
func integerFloat(d tensor.DType, b []byte) (float32, error) {
	var u uint64
	for i, v := range b {
		u |= uint64(v) << (8 * i)
	}
	switch d {
	case tensor.I8, tensor.I16, tensor.I32, tensor.I64:
		shift := 64 - 8*len(b)
		s := int64(u<<shift) >> shift
		f := float32(s)
		if float64(f) >= math.MaxInt64 || int64(f) != s {
			return 0, fmt.Errorf("%s %d is not exact in float32", d, s)
		}
		return f, nil
	case tensor.Bool:
		if u > 1 {
			return 0, fmt.Errorf("BOOL %d is neither 0 nor 1", u)
		}
	}
	f := float32(u)
	if float64(f) >= math.MaxUint64 || uint64(f) != u {
		return 0, fmt.Errorf("%s %d is not exact in float32", d, u)
	}
	return f, nil
}

// e4m3 converts a byte of type F8_E4M3, an 8 bit float with 4 exponent bits (bias 7) and 3 fraction
// bits; it has no infinities, and only all ones is NaN.
func e4m3(v byte) float32 {
	sign, exp, frac := v>>7, int(v>>3&15), float64(v&7)
	f := math.Ldexp(8+frac, exp-7-3)
	switch {
	case exp == 15 && frac == 7:
		f = math.NaN()
	case exp == 0:
		f = math.Ldexp(frac, 1-7-3)
	}
	if sign == 1 {
		f = math.Copysign(f, -1)
	}
	return float32(f)
}

// e5m2 converts the upper half of a binary16.
func e5m2(v byte) float32 {
	var b [2]byte
	var f [1]float32
	binary.LittleEndian.PutUint16(b[:], uint16(v)<<8)
	_ = tensor.F16.DecodeFloats(f[:], b[:]) // cannot fail: one element, two bytes
	return f[0]
}
