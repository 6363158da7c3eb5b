package flow

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// LogProbKind names the formula of the log-prob that a step reports. With m the mean of the transition, n its
// standard deviation and x' the drawn value, per element:
//
//	density   -(x'-m)^2/(2 n^2) - ln n - ln(2 pi)/2   the Gaussian log-density
//	scaled    -(x'-m)^2/(2 n^2)                       without its normaliser
//	squared   -(x'-m)^2                               a score, not a density
//
// Flow-GRPO's cps and SGLang's rollout_log_prob_no_const report squared; verl-omni without
// include_logprob_normalizer reports scaled.
type LogProbKind string

// The kinds. density and scaled need n > 0.
const (
	Density LogProbKind = "density"
	Scaled  LogProbKind = "scaled"
	Squared LogProbKind = "squared"
)

// Valid reports whether k is one of the kinds.
func (k LogProbKind) Valid() bool { return k == Density || k == Scaled || k == Squared }

// LogProb is the log-prob of one step of one sample, in nats for Density and Scaled.
type LogProb struct {
	Sum   float64 // over all elements
	Count int     // elements, so that shards merge exactly
	Mean  float64 // Sum / Count: what trainers use
	// Tracks are those of the parts of the state, whose sum Sum is; nil: it has one part (see Plan.Tracks).
	Tracks []LogProb
}

var errNonFinite = errors.New("log_prob is not finite: the latents or the velocity hold NaN, Inf or huge values")

// LogProb scores observed latents: it returns the log-prob that this transition draws next from
// latents x with velocity v, all [S*C]. A rollout calls it on what it drew, an audit on what is
// stored. Equal arguments give equal bits. Errors: slices of different lengths, a kind that this
// transition does not have (see checkKind), and a result that is not finite.
func (k StepTransition) LogProb(kind LogProbKind, x, v, next []float32) (LogProb, error) {
	if err := sameLength(x, v, next); err != nil {
		return LogProb{}, err
	}
	if err := k.checkKind(kind); err != nil {
		return LogProb{}, err
	}
	count := len(x)
	sum := -k.squaredResidual(x, v, next)
	if kind != Squared {
		sum /= float64(2 * float64(k.NoiseStd*k.NoiseStd))
	}
	if kind == Density {
		sum -= float64(float64(count) * (portable.Ln(k.NoiseStd) + halfLn2Pi))
	}
	if !finite(sum) {
		return LogProb{}, errNonFinite
	}
	return LogProb{Sum: sum, Count: count, Mean: sum / float64(count)}, nil
}

// logProb scores a step of transition k as StepTransition.LogProb does; its errors are those, and tracks that do not
// make up the state. Of a state with several tracks it scores each in its own slice, and adds the sums in order: so
// each track has the bits of a state of its own.
func (p Plan) logProb(k StepTransition, x, v, next []float32) (LogProb, error) {
	if p.Tracks == nil {
		return k.LogProb(p.LogProb, x, v, next)
	}
	if err := cmp.Or(sameLength(x, v, next), p.checkTracks(len(x))); err != nil {
		return LogProb{}, err
	}
	whole, at := LogProb{Count: len(x)}, 0
	for i, n := range p.Tracks {
		lp, err := k.LogProb(p.LogProb, x[at:at+n], v[at:at+n], next[at:at+n])
		if err != nil {
			return LogProb{}, fmt.Errorf("track %d: %w", i, err)
		}
		whole.Sum += lp.Sum
		whole.Tracks = append(whole.Tracks, lp)
		at += n
	}
	if !finite(whole.Sum) {
		return LogProb{}, errNonFinite
	}
	whole.Mean = whole.Sum / float64(whole.Count)
	return whole, nil
}

// checkTracks returns an error unless the tracks are together a state of n elements.
func (p Plan) checkTracks(n int) error {
	sum := 0
	for _, t := range p.Tracks {
		if t < 1 || t > n-sum {
			return fmt.Errorf("tracks: %v elements; must be at least 1 each, and %d in all", p.Tracks, n)
		}
		sum += t
	}
	if p.Tracks != nil && sum != n {
		return fmt.Errorf("tracks: %v elements; must be %d in all", p.Tracks, n)
	}
	return nil
}

// squaredResidual is sum_i (next[i] - mean[i])^2 with the transition's mean = A*x + B*v: the
// exponent of LogProb without its factor. It adds in float64, in one fixed order, so that a stored
// step is scored with the same bits everywhere: four interleaved partial sums i mod 4, added as
// (0+1)+(2+3). The slices have equal lengths.
func (k StepTransition) squaredResidual(x, v, next []float32) float64 {
	a, b := k.A, k.B
	n := len(x)
	v, next = v[:n], next[:n]
	var s0, s1, s2, s3 float64
	i := 0
	for ; i+4 <= n; i += 4 {
		x, v, next := x[i:i+4:i+4], v[i:i+4:i+4], next[i:i+4:i+4]
		d0 := float64(next[0]) - float64(float32(a*x[0])+float32(b*v[0]))
		d1 := float64(next[1]) - float64(float32(a*x[1])+float32(b*v[1]))
		d2 := float64(next[2]) - float64(float32(a*x[2])+float32(b*v[2]))
		d3 := float64(next[3]) - float64(float32(a*x[3])+float32(b*v[3]))
		s0 += float64(d0 * d0)
		s1 += float64(d1 * d1)
		s2 += float64(d2 * d2)
		s3 += float64(d3 * d3)
	}
	tail := [3]*float64{&s0, &s1, &s2}
	for j := 0; i < n; i, j = i+1, j+1 {
		d := float64(next[i]) - float64(float32(a*x[i])+float32(b*v[i]))
		*tail[j] += float64(d * d)
	}
	return (s0 + s1) + (s2 + s3)
}

// checkKind returns an error if steps of this transition have no log-prob of that kind: an ode step
// has none, and where the step draws no noise only squared is defined. Plan.Validate calls it for
// each stochastic step, so that a prompt is refused before it is sampled.
func (k StepTransition) checkKind(kind LogProbKind) error {
	if !kind.Valid() {
		return fmt.Errorf("log_prob_kind: %q; must be density, scaled or squared", string(kind))
	}
	if !k.Transition.Stochastic() {
		return fmt.Errorf("transition: %q; must be stochastic to have a log_prob", string(k.Transition))
	}
	if kind != Squared && k.NoiseStd == 0 {
		return fmt.Errorf("log_prob_kind: %q; %s draws no noise at noise_level %v from sigma %v to %v; must be "+
			"squared or an ode step",
			string(kind), string(k.Transition), k.NoiseLevel, k.Sigma, k.SigmaNext)
	}
	return nil
}

// sameLength returns an error unless all slices of latents are as long as x and not empty. Draw and
// LogProb call it before they index.
func sameLength(x []float32, others ...[]float32) error {
	for _, y := range others {
		if len(y) != len(x) {
			return fmt.Errorf("latents of %d elements beside %d; must be of equal lengths", len(y), len(x))
		}
	}
	if len(x) == 0 {
		return errors.New("latents of 0 elements; must be at least 1")
	}
	return nil
}
