// Package policyloss is the trainer's side of a rollout in plain float64: the policy
// loss of Flow-GRPO and its relatives with its metrics (PPO, Guard), other losses with their
// gradients (GSPO, DPPO, DPO, NFT), and the corrections for log-probs that another engine
// computed (Correction). It is a reference, small enough to read, to check a trainer's own
// loss against.
//
// A log-prob is of one step of one sample: the mean over the latent's elements, as in
// step events of kind density.
package policyloss

import (
	"errors"
	"fmt"
	"math"
	"strings"
)

// Config has the settings of the clipped loss.
type Config struct {
	// Clip is c >= 0: ratios beyond [1-c, 1+c] get no credit. It is small, because log-probs
	// are means over many elements.
	Clip float64
	// AdvClipMax > 0 clamps advantages to +-AdvClipMax.
	AdvClipMax float64
}

// DefaultConfig has the values of Flow-GRPO and verl-omni.
func DefaultConfig() Config { return Config{Clip: 1e-4, AdvClipMax: 5} }

// Validate checks the settings of a loss. It returns all faults, joined, each with the name of its field.
func (c Config) Validate() error {
	var errs []error
	if !(c.Clip >= 0) || math.IsInf(c.Clip, 1) {
		errs = append(errs, fmt.Errorf("clip: %v; must be a finite number of at least 0", c.Clip))
	}
	if !(c.AdvClipMax > 0) || math.IsInf(c.AdvClipMax, 1) {
		errs = append(errs, fmt.Errorf("adv_clip_max: %v; must be a finite number above 0", c.AdvClipMax))
	}
	return errors.Join(errs...)
}

// Loss is the outcome of one step over B samples.
type Loss struct {
	// Losses [B] and their mean; divide by the number of steps and micro-batches before the
	// gradients are summed.
	Losses []float64
	Mean   float64
	// Ratios [B] are exp(log_prob - old).
	Ratios []float64
	// PPOKL is mean(old - log_prob); ApproxKL mean((log_prob - old)^2)/2.
	PPOKL, ApproxKL float64
	// ClipFraction is the share of ratios outside of the clip, ClipFractionHigher of those above
	// and ClipFractionLower of those below it (verl's pg_clipfrac with _higher and _lower,
	// Flow-GRPO's clipfrac, clipfrac_gt_one and clipfrac_lt_one).
	ClipFraction, ClipFractionHigher, ClipFractionLower float64
	// RatioMean and RatioStd (unbiased; 0 for a single ratio) are of the ratios.
	RatioMean, RatioStd float64
}

// PPO is the clipped loss of Flow-GRPO (Liu et al. 2025, eq. 5): with A' the clamped
// advantage and r = exp(log_prob - old),
//
//	max(-A' r, -A' clamp(r, 1-c, 1+c))
//
// of each sample, times its weight where there are weights (see Correction).
func PPO(cfg Config, logProb, old, advantages, weights []float64) (*Loss, error) {
	ratios, err := Ratios(logProb, old)
	if err != nil {
		return nil, err
	}
	return cfg.clipped(ratios, logProb, old, advantages, weights)
}

// Guard is the loss of GRPO-Guard (Wang et al. 2025), to check a trainer's own loss against: its log-ratio has the bias
// of the mean added and is scaled by the step's noise,
//
//	r = exp((log_prob - old + mean((m - m_old)^2)/(2 n^2)) * n)
//
// and its loss, times its weight where there are weights, is divided by the length of the step. means and oldMeans
// [B][N] are the transition means of both policies, noiseStd n > 0 is Step.noise_std, and step is sigma - sigma_next >
// 0. It fails on settings or numbers that are not valid, and if the lengths differ.
func Guard(
	cfg Config, logProb, old, advantages, weights []float64, means, oldMeans [][]float64, noiseStd, step float64,
) (*Loss, error) {
	if !(noiseStd > 0) || !(step > 0) || !finite(noiseStd) || !finite(step) {
		return nil, fmt.Errorf("noise_std, step: %v, %v; must be finite numbers above 0", noiseStd, step)
	}
	if len(means) != len(logProb) || len(oldMeans) != len(logProb) {
		return nil, fmt.Errorf("%d and %d means; must be one per log-prob, %d", len(means), len(oldMeans), len(logProb))
	}
	if err := sameLength(logProb, old, "old"); err != nil {
		return nil, err
	}
	ratios := make([]float64, len(logProb))
	for i := range ratios {
		square, err := meanSquare(means[i], oldMeans[i])
		if err != nil {
			return nil, fmt.Errorf("means of sample %d: %w", i, err)
		}
		ratios[i] = math.Exp((logProb[i] - old[i] + square/(2*noiseStd*noiseStd)) * noiseStd)
	}
	l, err := cfg.clipped(ratios, logProb, old, advantages, weights)
	if err != nil {
		return nil, err
	}
	for i := range l.Losses {
		l.Losses[i] /= step
	}
	l.Mean /= step
	return l, nil
}

// Ratios returns exp(logProb - old), the probability of each sample's step under the new policy over that under the
// old one. It fails if the lengths differ or a number is not finite.
func Ratios(logProb, old []float64) ([]float64, error) {
	if err := sameLength(logProb, old, "old"); err != nil {
		return nil, err
	}
	out := make([]float64, len(logProb))
	for i := range out {
		out[i] = math.Exp(logProb[i] - old[i])
	}
	return out, nil
}

// clipped returns PPO's clipped loss for given probability ratios, with all its metrics; PPO and Guard share it. It
// fails on settings that are not valid, lengths that differ or numbers that are not finite. weights may be nil.
func (c Config) clipped(ratios, logProb, old, advantages, weights []float64) (*Loss, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if err := sameLengths(logProb, advantages, weights); err != nil {
		return nil, err
	}
	n := float64(len(ratios))
	l := &Loss{Ratios: ratios, Losses: make([]float64, len(ratios))}
	for i, r := range ratios {
		a := clamp(advantages[i], -c.AdvClipMax, c.AdvClipMax)
		loss := max(-a*r, -a*clamp(r, 1-c.Clip, 1+c.Clip))
		if weights != nil {
			loss *= weights[i]
		}
		l.Losses[i] = loss
		l.Mean += loss / n
		d := logProb[i] - old[i]
		l.PPOKL -= d / n
		l.ApproxKL += d * d / (2 * n)
		l.RatioMean += r / n
		if r-1 > c.Clip {
			l.ClipFractionHigher += 1 / n
		}
		if 1-r > c.Clip {
			l.ClipFractionLower += 1 / n
		}
	}
	l.ClipFraction = l.ClipFractionHigher + l.ClipFractionLower
	if len(ratios) > 1 {
		for _, r := range ratios {
			l.RatioStd += (r - l.RatioMean) * (r - l.RatioMean) / (n - 1)
		}
		l.RatioStd = math.Sqrt(l.RatioStd)
	}
	return l, nil
}

// ImageKL returns mean((m - m_ref)^2) / (2 std^2) for each sample, the penalty for leaving the reference policy, as
// Flow-GRPO and verl compute it; means and reference are [B][N], std [B]. With the schedule's std_dev_t as std it is
// what they log. For the divergence of the two Gaussians give Step.noise_std. It fails if the shapes differ or a
// number is not finite.
func ImageKL(means, reference [][]float64, std []float64) ([]float64, error) {
	if len(reference) != len(means) || len(std) != len(means) {
		return nil, fmt.Errorf("%d references and %d std; must be one per mean, %d", len(reference), len(std),
			len(means))
	}
	out := make([]float64, len(means))
	for i := range means {
		if !(std[i] > 0) || !finite(std[i]) {
			return nil, fmt.Errorf("std[%d]: %v; must be a finite number above 0", i, std[i])
		}
		square, err := meanSquare(means[i], reference[i])
		if err != nil {
			return nil, fmt.Errorf("means of sample %d: %w", i, err)
		}
		out[i] = square / (2 * std[i] * std[i])
	}
	return out, nil
}

// Kinds of KL estimates from log-probs alone (Schulman 2020), as LLM trainers have them.
// In verl a suffix + keeps the value and uses the gradient of k2; here it changes nothing.
const (
	KLK1  = "k1"  // log_prob - reference
	KLAbs = "abs" // its magnitude
	KLK2  = "k2"  // half its square
	KLK3  = "k3"  // exp(d) - d - 1, at most 10, with d = reference - log_prob, within +-20
)

// KL returns one estimate of the divergence from the reference policy, of a log-prob and the reference policy's; kind
// is one of the KL constants, a "+" at its end is ignored. It fails on another kind, or a number that is not finite.
func KL(kind string, logProb, reference float64) (float64, error) {
	d := logProb - reference
	if !finite(d) {
		return 0, fmt.Errorf("log-probs %v and %v; must be finite numbers", logProb, reference)
	}
	switch strings.TrimSuffix(kind, "+") {
	case KLK1:
		return d, nil
	case KLAbs:
		return math.Abs(d), nil
	case KLK2:
		return d * d / 2, nil
	case KLK3:
		return min(k3(clampLog(-d)), maxK3), nil
	}
	return 0, fmt.Errorf("kind: %q; must be %s, %s, %s or %s", kind, KLK1, KLAbs, KLK2, KLK3)
}

const (
	maxLogRatio = 20 // bounds a log-ratio before its exponential
	maxK3       = 10 // bounds KLK3
)

func k3(d float64) float64 { return math.Expm1(d) - d }

func clamp(x, low, high float64) float64 { return min(max(x, low), high) }

// meanSquare returns the mean of the squared differences of two slices. It fails if their lengths differ or the
// result is not finite.
func meanSquare(a, b []float64) (float64, error) {
	if len(a) != len(b) || len(a) == 0 {
		return 0, fmt.Errorf("%d and %d elements; must be the same number, at least 1", len(a), len(b))
	}
	sum := 0.0
	for i := range a {
		sum += (a[i] - b[i]) * (a[i] - b[i])
	}
	if !finite(sum) {
		return 0, fmt.Errorf("sum of squares is %v; must be finite", sum)
	}
	return sum / float64(len(a)), nil
}

// sameLengths returns an error unless there is one finite advantage, and one weight where there are weights, for each
// sample.
func sameLengths(logProb, advantages, weights []float64) error {
	err := sameLength(logProb, advantages, "advantages")
	if err == nil && weights != nil {
		err = sameLength(logProb, weights, "weights")
	}
	return err
}

// sameLength returns an error unless both slices have one finite number for each sample.
func sameLength(logProb, other []float64, name string) error {
	if len(logProb) == 0 {
		return errors.New("log_prob: empty; must have at least one sample")
	}
	if len(other) != len(logProb) {
		return fmt.Errorf("%s: %d values; must be one per log-prob, %d", name, len(other), len(logProb))
	}
	for i := range logProb {
		if !finite(logProb[i]) {
			return fmt.Errorf("log_prob[%d]: %v; must be a finite number", i, logProb[i])
		}
		if !finite(other[i]) {
			return fmt.Errorf("%s[%d]: %v; must be a finite number", name, i, other[i])
		}
	}
	return nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
