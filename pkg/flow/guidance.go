package flow

import (
	"fmt"
	"math"
)

// Guide is classifier-free guidance by a negative prompt ("true CFG") that keeps the norm of the
// prompt's own velocity. The image engine calls it at each evaluation of a guided rollout, for
// families whose rule it is. pos is the velocity with the prompt, neg that with the negative
// prompt. For each token of channels elements:
//
//	comb = neg + scale*(pos - neg),  dst = comb * |pos| / |comb|
//
// The norm is Euclidean, over the token: guidance turns the velocity but does not lengthen it. A
// token whose comb is 0 stays 0. All slices are [S*channels]; dst may alias pos or neg. Unequal
// lengths and a scale that is not finite are errors; dst is then unchanged.
func Guide(dst, pos, neg []float32, scale float64, channels int) error {
	if err := checkGuidance(dst, pos, neg, scale); err != nil {
		return err
	}
	if channels < 1 || len(pos)%channels != 0 {
		return fmt.Errorf("guide %d elements by tokens of %d channels; must be whole tokens", len(pos), channels)
	}
	for i := 0; i < len(pos); i += channels {
		d, p := dst[i:i+channels], pos[i:i+channels]
		pp := sumSquares(p)
		combine(d, p, neg[i:i+channels], scale)
		if cc := sumSquares(d); cc != 0 {
			rescale(d, pp, cc)
		}
	}
	return nil
}

// GuidePlain is classifier-free guidance without a rescale, dst[i] = neg[i] +
// scale*(pos[i]-neg[i]), as Stable Diffusion 3 uses it. dst may alias pos or neg.
func GuidePlain(dst, pos, neg []float32, scale float64) error {
	if err := checkGuidance(dst, pos, neg, scale); err != nil {
		return err
	}
	combine(dst, pos, neg, scale)
	return nil
}

// GuideClamped is GuidePlain, and then a result that is longer than pos is shortened to its length.
// The norms are Euclidean, over the whole sample. It is cfg_normalization of some pipelines of
// diffusers; the image engine calls it at each evaluation for families that have it. Errors are
// those of Guide.
//
//	comb = neg + scale*(pos - neg),  dst = comb * min(1, |pos| / |comb|)
func GuideClamped(dst, pos, neg []float32, scale float64) error {
	if err := checkGuidance(dst, pos, neg, scale); err != nil {
		return err
	}
	pp := sumSquares(pos)
	combine(dst, pos, neg, scale)
	if cc := sumSquares(dst); !(cc <= pp) { // or not a number: then all of it is
		rescale(dst, pp, cc)
	}
	return nil
}

// RescaleDeviation brings v, a velocity under guidance, to the standard deviation own of the prompt's own velocity, in
// the share phi, 0 to 1. The image engine calls it after the rule of the model, where a sample asks for it. It is
// rescale_noise_cfg of diffusers (Lin et al., "Common Diffusion Noise Schedules and Sample Steps are Flawed", arXiv
// 2305.08891, equations 15 and 16):
//
//	v = v * (phi * own / Deviation(v) + 1 - phi)
//
// A velocity without deviation stays as it is.
func RescaleDeviation(v []float32, own, phi float64) {
	of := Deviation(v)
	if of == 0 {
		return
	}
	f := float32(float64(phi*(own/of)) + (1 - phi))
	for i := range v {
		v[i] = float32(v[i] * f)
	}
}

// Deviation returns the standard deviation of the elements of v, in float64 and in their order; 0 of none. It divides
// by their number, which is of no account to RescaleDeviation.
func Deviation(v []float32) float64 {
	if len(v) == 0 {
		return 0
	}
	n, sum := float64(len(v)), 0.0
	for _, x := range v {
		sum += float64(x)
	}
	mean, squares := sum/n, 0.0
	for _, x := range v {
		d := float64(x) - mean
		squares += float64(d * d)
	}
	return math.Sqrt(squares / n)
}

// combine sets dst to neg + scale*(pos - neg). dst may alias pos or neg.
func combine(dst, pos, neg []float32, scale float64) {
	s := float32(scale)
	for i, p := range pos {
		dst[i] = neg[i] + float32(s*(p-neg[i]))
	}
}

// sumSquares returns |x|^2.
func sumSquares(x []float32) (sum float64) {
	for _, v := range x {
		sum += float64(float64(v) * float64(v))
	}
	return sum
}

// rescale multiplies x, whose squares sum to from, so that they sum to to.
func rescale(x []float32, to, from float64) {
	f := float32(math.Sqrt(to) / math.Sqrt(from))
	for i := range x {
		x[i] = float32(x[i] * f)
	}
}

// checkGuidance refuses what no form of guidance can use: a scale that is NaN or infinite, and
// slices of different lengths. Guide, GuidePlain and GuideClamped call it before they write.
func checkGuidance(dst, pos, neg []float32, scale float64) error {
	if !finite(scale) {
		return fmt.Errorf("true_cfg_scale: %v; must be a finite number", scale)
	}
	if len(pos) != len(neg) || len(dst) != len(pos) {
		return fmt.Errorf("guide velocities of %d and %d elements into %d; must be of equal lengths", len(pos),
			len(neg), len(dst))
	}
	return nil
}
