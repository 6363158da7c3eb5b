package texts

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/models/decoding"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Log-probs from logits that are stored in half the bytes are off by as much as these are: those of the
// event are of the logits as they were.
func TestLogits_InHalfTheBytes(t *testing.T) {
	logProb := func(z []float32) float64 {
		var d decoding.Distribution
		if err := d.Reset(z, decoding.Params{Temperature: 1}); err != nil {
			t.Fatal(err)
		}
		return float64(d.At(1).LogProb)
	}
	z := []float32{23.4567, 17.125, -3.14159, .001}
	if got := logProb(z); math.Abs(got+6.333477426) > 1e-6 {
		t.Errorf("log-prob %v, want -6.333477426", got)
	}
	for dtype, want := range map[tensor.DType]struct {
		values       [4]float32
		off, logProb float64
	}{
		tensor.F16:  {[4]float32{23.453125, 17.125, -3.140625, .0010004043579}, .003575, -6.329908786},
		tensor.BF16: {[4]float32{23.5, 17.125, -3.140625, .00099945068}, .043300, -6.376702170},
	} {
		var x [4]float32
		if err := dtype.DecodeFloats(x[:], dtype.AppendFloats(nil, z)); err != nil {
			t.Fatal(err)
		}
		off := 0.0
		for i := range x {
			off = max(off, math.Abs(float64(x[i])-float64(z[i])))
		}
		if got := logProb(x[:]); x != want.values || math.Abs(off-want.off) > 1e-6 ||
			math.Abs(got-want.logProb) > 1e-6 {
			t.Errorf("%s: %v, off by %v, log-prob %v; want %v, %v, %v", dtype, x, off, got, want.values, want.off,
				want.logProb)
		}
	}
}
