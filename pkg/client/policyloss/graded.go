package policyloss

import (
	"errors"
	"fmt"
	"math"
)

// Graded is the outcome of a loss over B samples or pairs, with its gradient.
type Graded struct {
	// Losses [B] and their mean.
	Losses []float64
	Mean   float64
	// Gradient is that of the mean, by what the function says; a row for each loss.
	Gradient [][]float64
}

// add appends a loss of n, and its gradient, that of the mean.
func (g *Graded) add(n int, loss float64, gradient ...float64) {
	g.Losses = append(g.Losses, loss)
	g.Mean += loss / float64(n)
	g.Gradient = append(g.Gradient, gradient)
}

// GSPO is the clipped loss of GSPO (Zheng et al. 2025) for trajectories of W steps, whose log-probs are [B][W]:
// with one ratio r = exp(mean of log_prob - old) for all steps,
//
//	max(-A r, -A clamp(r, 1-low, 1+high))
//
// The paper has low 3e-4 and high 4e-4. The gradient [B][W] is by logProb. It fails on numbers that are not valid, and
// if lengths differ.
func GSPO(logProb, old [][]float64, advantages []float64, low, high float64) (*Graded, error) {
	n := len(logProb)
	if n == 0 || len(old) != n || len(advantages) != n {
		return nil, fmt.Errorf("%d, %d log-probs and %d advantages; must be one each per trajectory", n, len(old),
			len(advantages))
	}
	if err := positive(field{"low", low}, field{"high", high}); err != nil {
		return nil, err
	}
	g := &Graded{}
	for i := range logProb {
		if err := sameLength(logProb[i], old[i], "old"); err != nil {
			return nil, fmt.Errorf("trajectory %d: %w", i, err)
		}
		a, w, sum := advantages[i], float64(len(logProb[i])), 0.0
		if !finite(a) {
			return nil, fmt.Errorf("advantages[%d]: %v; must be a finite number", i, a)
		}
		for j := range logProb[i] {
			sum += logProb[i][j] - old[i][j]
		}
		r := math.Exp(sum / w)
		loss, slope := -a*r, -a*r
		if clipped := -a * clamp(r, 1-low, 1+high); clipped > loss {
			loss, slope = clipped, 0
		}
		gradient := make([]float64, len(logProb[i]))
		for j := range gradient {
			gradient[j] = slope / w / float64(n)
		}
		g.add(n, loss, gradient...)
	}
	return g, nil
}

// DPPO is the loss of Flow-DPPO (2026): -A r of each sample, with r = exp(log_prob - old), times its weight; but 0
// where the ratio moves away from 1 in the advantage's direction although mean((m - m_old)^2)/(2 n^2), the divergence
// of the transition, has reached the threshold. verl-omni's is 1e-5. The gradient [B][1] is by logProb. It fails on
// numbers that are not valid, and if lengths differ. weights may be nil.
func DPPO(
	logProb, old, advantages, weights []float64, means, oldMeans [][]float64, noiseStd, threshold float64,
) (*Graded, error) {
	if err := positive(field{"noise_std", noiseStd}, field{"threshold", threshold}); err != nil {
		return nil, err
	}
	ratios, err := Ratios(logProb, old)
	if err != nil {
		return nil, err
	}
	if err := sameLengths(logProb, advantages, weights); err != nil {
		return nil, err
	}
	std := make([]float64, len(means))
	for i := range std {
		std[i] = noiseStd
	}
	drift, err := ImageKL(means, oldMeans, std)
	if err != nil {
		return nil, err
	}
	if len(drift) != len(ratios) {
		return nil, fmt.Errorf("%d means; must be one per log-prob, %d", len(drift), len(ratios))
	}
	g := &Graded{}
	for i, r := range ratios {
		loss := -advantages[i] * r
		if weights != nil {
			loss *= weights[i]
		}
		if away := (r-1)*advantages[i] > 0; away && drift[i] >= threshold {
			loss = 0
		}
		g.add(len(ratios), loss, loss/float64(len(ratios)))
	}
	return g, nil
}

// DPO is the loss of Diffusion-DPO (Wallace et al. 2023) on stored transitions, of pairs [best, worst] of log-probs
// and those of the base model:
//
//	-log sigmoid(beta ((log_prob - base)_best - (log_prob - base)_worst))
//
// verl-omni's beta is 2000. The gradient [B][2] is by logProb. It fails on numbers that are not valid, and if lengths
// differ.
func DPO(logProb, base [][2]float64, beta float64) (*Graded, error) {
	if len(logProb) == 0 || len(base) != len(logProb) {
		return nil, fmt.Errorf("%d pairs and %d of the base; must be the same number, at least 1", len(logProb),
			len(base))
	}
	if err := positive(field{"beta", beta}); err != nil {
		return nil, err
	}
	n, g := len(logProb), &Graded{}
	for i, p := range logProb {
		margin := beta * ((p[0] - base[i][0]) - (p[1] - base[i][1]))
		if !finite(margin) {
			return nil, fmt.Errorf("pair %d: the margin is %v; must be finite", i, margin)
		}
		slope := -beta / (1 + math.Exp(margin)) / float64(n)
		g.add(n, math.Log1p(math.Exp(-math.Abs(margin)))+max(-margin, 0), slope, -slope)
	}
	return g, nil
}

// NFT has the settings of DiffusionNFT's loss.
type NFT struct {
	// MixBeta b > 0 says how far v+ and v- are from the old velocity.
	MixBeta float64
	// AdaptiveWeightMin > 0 is the least that a squared error is divided by.
	AdaptiveWeightMin float64
	// AdvClipMax > 0 multiplies the loss, as it divided the advantage that became a probability.
	AdvClipMax float64
}

// DefaultNFT has the values of verl-omni.
func DefaultNFT() NFT { return NFT{MixBeta: 0.5, AdaptiveWeightMin: 1e-5, AdvClipMax: 5} }

// Probability is how likely a sample is optimal (DiffusionNFT, section 3.3): its advantage, clamped to +-AdvClipMax and
// scaled to [0, 1]. The estimator diffusion_nft gives it in place of advantages.
func (c NFT) Probability(advantage float64) float64 {
	return clamp(advantage, -c.AdvClipMax, c.AdvClipMax)/c.AdvClipMax/2 + 0.5
}

// Noised is a clean sample that is noised again, with the velocities there; all [N].
type Noised struct {
	Clean, Noise, Velocity, OldVelocity []float64
	// Sigma in (0, 1]; Probability in [0, 1] that the sample is optimal.
	Sigma, Probability float64
}

// Loss is the loss of DiffusionNFT (Zheng et al. 2025): with x_t = (1-sigma) x0 + sigma noise, r the probability,
// v+ = b v + (1-b) v_old and v- = (1+b) v_old - b v, and e the mean distance of x_t - sigma v from x0,
//
//	AdvClipMax/b (r mean((x_t - sigma v+ - x0)^2)/e(v+) + (1-r) mean((x_t - sigma v- - x0)^2)/e(v-))
//
// The gradient [B][N] is by the velocity; e has none. It fails on settings or numbers that are not valid.
func (c NFT) Loss(samples []Noised) (*Graded, error) {
	err := positive(field{"mix_beta", c.MixBeta}, field{"adaptive_weight_min", c.AdaptiveWeightMin},
		field{"adv_clip_max", c.AdvClipMax})
	if err != nil {
		return nil, err
	}
	if len(samples) == 0 {
		return nil, errors.New("samples: none; must be at least one")
	}
	g := &Graded{}
	for i, s := range samples {
		if err := s.validate(); err != nil {
			return nil, fmt.Errorf("sample %d: %w", i, err)
		}
		gradient := make([]float64, len(s.Clean))
		loss := c.half(s, s.Probability, c.MixBeta, gradient) + c.half(s, 1-s.Probability, -c.MixBeta, gradient)
		for k := range gradient {
			gradient[k] /= float64(len(samples))
		}
		g.add(len(samples), loss, gradient...)
	}
	return g, nil
}

// half is the part of the loss of v+, or of v- if b is negative; it adds its gradient.
func (c NFT) half(s Noised, share, b float64, gradient []float64) float64 {
	n, distance, square := float64(len(s.Clean)), 0.0, 0.0
	off := make([]float64, len(s.Clean))
	for k := range off {
		v := b*s.Velocity[k] + (1-b)*s.OldVelocity[k]
		off[k] = s.Sigma * (s.Noise[k] - s.Clean[k] - v)
		distance += math.Abs(off[k]) / n
		square += off[k] * off[k] / n
	}
	scale := share * c.AdvClipMax / c.MixBeta / max(distance, c.AdaptiveWeightMin)
	for k := range off {
		gradient[k] -= scale * 2 * off[k] * s.Sigma * b / n
	}
	return scale * square
}

// validate returns an error naming what is not one finite number for each element of Clean, or out of its range.
func (s Noised) validate() error {
	for _, other := range []struct {
		name   string
		values []float64
	}{{"noise", s.Noise}, {"velocity", s.Velocity}, {"old_velocity", s.OldVelocity}} {
		if err := sameLength(s.Clean, other.values, other.name); err != nil {
			return err
		}
	}
	if !(s.Sigma > 0) || s.Sigma > 1 {
		return fmt.Errorf("sigma: %v; must be above 0, at most 1", s.Sigma)
	}
	if !(s.Probability >= 0) || s.Probability > 1 {
		return fmt.Errorf("probability: %v; must be from 0 to 1", s.Probability)
	}
	return nil
}

type field struct {
	name  string
	value float64
}

// positive returns an error naming the first field that is not a finite number above 0.
func positive(fields ...field) error {
	for _, f := range fields {
		if !(f.value > 0) || math.IsInf(f.value, 1) {
			return fmt.Errorf("%s: %v; must be a finite number above 0", f.name, f.value)
		}
	}
	return nil
}
