package portable

import (
	"math"
	"testing"
)

// Against the standard library, over the ranges in use.
func TestElementary(t *testing.T) {
	const limit = 1e-15
	check := func(name string, x, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > limit*max(math.Abs(want), 1e-3) {
			t.Errorf("%s(%v) = %v, want %v", name, x, got, want)
		}
	}
	for i := 1; i <= 20000; i++ {
		u := float64(i) / 20000
		for _, x := range []float64{u, u * 1e-9, u * 1e9, 1 - u*1e-6} {
			check("ln", x, Ln(x), math.Log(x))
		}
		x := (u - 0.5) * math.Pi / 2
		sin, cos := Sincos(x)
		check("sin", x, sin, math.Sin(x))
		check("cos", x, cos, math.Cos(x))
		sin, cos = SincosQuarter(u)
		wantSin, wantCos := math.Sincos(u * math.Pi / 2)
		if u > 0.5 { // u*pi/2 loses the digits of the cosine
			wantCos, wantSin = math.Sincos((1 - u) * math.Pi / 2)
		}
		check("sin of quarter", u, sin, wantSin)
		check("cos of quarter", u, cos, wantCos)
		for _, x := range []float64{u, -u, 50 * u, -50 * u} {
			check("exp", x, Exp(x), math.Exp(x))
		}
	}
	if sin, cos := SincosQuarter(1); sin != 1 || cos != 0 {
		t.Errorf("SincosQuarter(1) = %v, %v, want exactly 1, 0", sin, cos)
	}
	if sin, cos := SincosQuarter(0); sin != 0 || cos != 1 {
		t.Errorf("SincosQuarter(0) = %v, %v, want exactly 0, 1", sin, cos)
	}
	if Ln(1) != 0 || Exp(0) != 1 {
		t.Errorf("Ln(1), Exp(0) = %v, %v, want exactly 0, 1", Ln(1), Exp(0))
	}
}
