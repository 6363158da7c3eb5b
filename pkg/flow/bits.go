package flow

// Ln returns the natural logarithm of a positive normal x, with the same bits on every architecture and in every
// language (schemas/noise.md).
func Ln(x float64) float64 { return ln(x) }

// SinQuarter returns sin(a*pi/2) for 0 <= a <= 1, exact at both ends, with the same bits on every architecture and
// in every language (schemas/noise.md).
func SinQuarter(a float64) float64 {
	sin, _ := sincosQuarter(a)
	return sin
}

// Exp returns e^x for |x| < 700, with the same bits on every architecture and in every language (schemas/noise.md).
func Exp(x float64) float64 { return exp(x) }
