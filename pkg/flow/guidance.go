package flow

import (
	"fmt"
	"math"
)

// Guide is classifier-free guidance by a negative prompt ("true CFG") that keeps the norm of the prompt's own
// velocity. For each token of channels elements:
//
//	comb = neg + scale*(pos - neg),  dst = comb * |pos| / |comb|
//
// The norm is Euclidean, over the token: guidance turns the velocity but does not lengthen it. A token whose comb
// is 0 stays 0. All slices are [S*channels]; dst may alias pos or neg.
func Guide(dst, pos, neg []float32, scale float64, channels int) error {
	if err := checkGuidance(dst, pos, neg, scale); err != nil {
		return err
	}
	if channels < 1 || len(pos)%channels != 0 {
		return fmt.Errorf("guide %d elements by tokens of %d channels; must be whole tokens", len(pos), channels)
	}
	s := float32(scale)
	for i := 0; i < len(pos); i += channels {
		d, p, n := dst[i:i+channels], pos[i:i+channels], neg[i:i+channels]
		var pp, cc float64
		for j, pj := range p {
			c := n[j] + float32(s*(pj-n[j]))
			d[j] = c
			pp += float64(float64(pj) * float64(pj))
			cc += float64(float64(c) * float64(c))
		}
		if cc == 0 {
			continue
		}
		f := float32(math.Sqrt(pp) / math.Sqrt(cc))
		for j := range d {
			d[j] = float32(d[j] * f)
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
	s := float32(scale)
	for i, p := range pos {
		dst[i] = neg[i] + float32(s*(p-neg[i]))
	}
	return nil
}

// GuideClamped is GuidePlain, and then a result that is longer than pos is shortened to its length. The norms are
// Euclidean, over the whole sample. It is cfg_normalization of some pipelines of diffusers:
//
//	comb = neg + scale*(pos - neg),  dst = comb * min(1, |pos| / |comb|)
func GuideClamped(dst, pos, neg []float32, scale float64) error {
	if err := checkGuidance(dst, pos, neg, scale); err != nil {
		return err
	}
	s := float32(scale)
	var pp, cc float64
	for i, p := range pos {
		c := neg[i] + float32(s*(p-neg[i]))
		dst[i] = c
		pp += float64(float64(p) * float64(p))
		cc += float64(float64(c) * float64(c))
	}
	if cc <= pp {
		return nil
	}
	f := float32(math.Sqrt(pp) / math.Sqrt(cc))
	for i := range dst {
		dst[i] = float32(dst[i] * f)
	}
	return nil
}

// checkGuidance checks what all forms of guidance need: a finite scale and slices of one length.
func checkGuidance(dst, pos, neg []float32, scale float64) error {
	if !finite(scale) {
		return fmt.Errorf("true_cfg_scale: %v; must be a finite number", scale)
	}
	if len(pos) != len(neg) || len(dst) != len(pos) {
		return fmt.Errorf("guide velocities of %d and %d elements into %d; must be of equal lengths", len(pos), len(neg),
			len(dst))
	}
	return nil
}
