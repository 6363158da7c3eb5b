package flow

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/portable"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Transition names how a step goes from sigma to the next sigma, written sigma'.
type Transition string

// The transitions. With a the noise level and d = sigma' - sigma < 0:
//
//	sde        Flow-GRPO (Liu et al. 2025): g = a*sqrt(sigma/(1-sigma)), n = g*sqrt(-d)
//	dance_sde  DanceGRPO (Xue et al. 2025): g = a, n = a*sqrt(-d)
//	cps        coefficients-preserving sampling (Wang and Yu 2025): n = g = sigma'*sin(a*pi/2)
//	ddim       DDIM with eta = a (Song et al. 2021, equation 16), the step of DDPO (Black et al. 2023):
//	           n = g = a*sigma'*sqrt(1 - r^2), r = sigma'*(1-sigma) / (sigma*(1-sigma'))
//	ode        no noise
//
// ddim is the published step in canonical states y = x/(a'+b'), of x = a' x0 + b' eps: with r the ratio of the two
// b'/a'. Its log-prob is that of x plus ln(a'+b') of the next state, a constant.
//
// With small steps sde, dance_sde and ode all sample the model's distribution. cps does
// not: it replaces a fixed share of the noise at every step, however small, which
// narrows the distribution; ddim at a = 1 is the ancestral step of DDPM.
const (
	SDE      Transition = "sde"
	CPS      Transition = "cps"
	DanceSDE Transition = "dance_sde"
	DDIM     Transition = "ddim"
	ODE      Transition = "ode"
)

// AllTransitions lists the transitions, in the order in which messages name them. Not to be modified.
var AllTransitions = []Transition{SDE, CPS, DanceSDE, DDIM, ODE}

// Valid reports whether t is one of the transitions.
func (t Transition) Valid() bool { return slices.Contains(AllTransitions, t) }

// Stochastic reports whether t draws noise. Only such a step has a log-prob.
func (t Transition) Stochastic() bool { return t != ODE && t.Valid() }

func transitionNames() string {
	names := make([]string, len(AllTransitions))
	for i, t := range AllTransitions {
		names[i] = string(t)
	}
	return strings.Join(names, ", ")
}

// nearOne is how close to 1 a sigma counts as 1 (torch.isclose's relative tolerance, as SGLang tests it):
// 1/(1-sigma) would be too large there.
const nearOne = 1e-5

// StepTransition is one step's Gaussian transition, the same for drawing and for scoring:
//
//	next[i] = mean[i] + NoiseStd*eps[i],  mean[i] = A*x[i] + B*v[i]
//
// A and B are computed in float64 and rounded to float32 once; elements are float32.
type StepTransition struct {
	Transition       Transition
	NoiseLevel       float64
	Sigma, SigmaNext float32
	A, B             float32
	// StdDevT is g: the diffusion coefficient of sde and dance_sde (without the square
	// root of the step), the full standard deviation of cps and ddim, 0 for ode.
	StdDevT float64
	// NoiseStd is n, the standard deviation of the transition; 0 for ode.
	NoiseStd float64
}

// Step returns the step of that index that makes next of x, both [S*C], with all that does not take the model: without
// a log-prob, mean, noise and velocity.
func (k StepTransition) Step(index int, x, next []float32) *Step {
	return &Step{
		Index: index, Transition: k.Transition, Sigma: k.Sigma, SigmaNext: k.SigmaNext, Timestep: Timestep(k.Sigma),
		StdDevT: k.StdDevT, NoiseStd: k.NoiseStd, X: x, Next: next,
	}
}

// NewStepTransition returns the transition of step index over the sigmas [T+1] of a rollout. It is
// for callers without a Plan (see Plan.StepTransition). If the sigma of an sde step is 1, its
// noise is that of sigmas[1], because the formula divides by 1 - sigma. Errors name the field, its
// value and the rule.
func NewStepTransition(t Transition, noiseLevel float64, sigmas []float32, index int) (StepTransition, error) {
	if err := checkSigmas(sigmas, false); err != nil {
		return StepTransition{}, err
	}
	if index < 0 || index >= len(sigmas)-1 {
		return StepTransition{}, fmt.Errorf("step_index: %d; must be 0 to %d", index, len(sigmas)-2)
	}
	if err := checkNoise(t, noiseLevel); err != nil {
		return StepTransition{}, err
	}
	return newStepTransition(t, noiseLevel, sigmas, index)
}

// levelIsShare reports whether the noise level is a share of the noise: at most 1.
func (t Transition) levelIsShare() bool { return t == CPS || t == DDIM }

// checkNoise returns an error if t is not a transition, or if its noise level a is negative, not
// finite, or above 1 where it is a share of the noise.
func checkNoise(t Transition, a float64) error {
	switch {
	case !t.Valid():
		return fmt.Errorf("transition: %q; must be one of %s", string(t), transitionNames())
	case !(a >= 0) || math.IsInf(a, 1):
		return fmt.Errorf("noise_level: %v; must be a finite number of at least 0", a)
	case t.levelIsShare() && a > 1:
		return fmt.Errorf("noise_level: %v; must be at most 1 for %s", a, string(t))
	}
	return nil
}

// newStepTransition is NewStepTransition for checked arguments: it computes the coefficients A and
// B of the mean and the noise of the step by the formulas at Transition. a is the noise level. It
// is an error if a is so large at this sigma that a coefficient overflows, or if sigmas[1] is too
// close to 1 for an sde step.
func newStepTransition(t Transition, a float64, sigmas []float32, index int) (StepTransition, error) {
	k := StepTransition{Transition: t, NoiseLevel: a, Sigma: sigmas[index], SigmaNext: sigmas[index+1]}
	s, p := float64(k.Sigma), float64(k.SigmaNext)
	d := p - s // exact enough: float64 holds the difference of two float32 sigmas
	k.A, k.B = 1, float32(d)
	switch t {
	case SDE, DanceSDE:
		k.StdDevT = a
		if t == SDE {
			patched := s
			if 1-s <= nearOne {
				patched = float64(sigmas[1])
			}
			if 1-patched <= nearOne {
				return StepTransition{}, fmt.Errorf("sigmas[1]: %v; must be less than %v for sde at sigma %v",
					sigmas[1], 1-nearOne, k.Sigma)
			}
			k.StdDevT = float64(a * math.Sqrt(s/(1-patched)))
		}
		k.NoiseStd = float64(k.StdDevT * math.Sqrt(-d))
		// The Euler step plus d*(g^2/2)*(noise estimate)/sigma, noise estimate x + (1-sigma)*v.
		c := float64(k.StdDevT*k.StdDevT) / float64(2*s)
		k.A = float32(1 + float64(c*d))
		k.B = float32(d * (1 + float64(c*(1-s))))
	case CPS, DDIM:
		sin, cos := portable.SincosQuarter(a)
		if t == DDIM {
			r := 0.0 // at sigma 1, where nothing of the data is left
			if s < 1 {
				r = float64(p*(1-s)) / float64(s*(1-p))
			}
			sin = float64(a * math.Sqrt(1-float64(r*r)))
			cos = math.Sqrt(1 - float64(sin*sin))
		}
		k.StdDevT = float64(p * sin)
		k.NoiseStd = k.StdDevT
		// (1-sigma')*data estimate + k*noise estimate, k = sqrt(sigma'^2 - n^2).
		keep := float64(p * cos)
		k.A = float32((1 - p) + keep)
		k.B = float32(float64(keep*(1-s)) - float64(s*(1-p)))
	}
	if !finite(k.NoiseStd) || !finite(float64(k.A)) || !finite(float64(k.B)) {
		return StepTransition{}, fmt.Errorf("noise_level: %v; must be smaller at sigma %v", a, k.Sigma)
	}
	return k, nil
}

// Draw computes the step: mean[i] = A*x[i] + B*v[i], next[i] = mean[i] + NoiseStd*eps[i], then it
// rounds next to the storage type. A rollout calls it at each stochastic step. eps is standard
// normal, or nil for an ode step. All slices are [S*C]. next may alias mean; neither may alias x or
// v. Slices that do not fit and a storage type that is no float are errors; nothing is written
// then.
func (k StepTransition) Draw(next, mean, x, v, eps []float32, storage tensor.DType) error {
	if err := sameLength(x, v, next, mean); err != nil {
		return err
	}
	if !storage.Float() {
		return fmt.Errorf("latents_dtype: %q; must be F32, F16 or BF16", string(storage))
	}
	a, b := k.A, k.B
	n := len(x)
	next, mean, v = next[:n], mean[:n], v[:n]
	if !k.Transition.Stochastic() {
		for i, xi := range x {
			mean[i] = float32(a*xi) + float32(b*v[i])
		}
		copy(next, mean)
		storage.Round(next)
		return nil
	}
	if len(eps) != n {
		return errors.New("draw a stochastic step: must have as much noise as latents")
	}
	std := float32(k.NoiseStd)
	for i, xi := range x {
		m := float32(a*xi) + float32(b*v[i])
		mean[i] = m
		next[i] = m + float32(std*eps[i])
	}
	storage.Round(next)
	return nil
}
