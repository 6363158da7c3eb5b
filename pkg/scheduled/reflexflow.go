package scheduled

import (
	"errors"
	"fmt"
	"math"
)

// ReflexFlow is the settings of ReflexFlow's loss of flow models under scheduled sampling (arXiv 2512.04904, as the
// public trainer has it since it corrected the signs). Sums are float64, without gradients: a reference to check a
// trainer's own against.
type ReflexFlow struct {
	Alpha float64 `key:"reflexflow.alpha"`             // strength of the weight; beyond 1 weights can be negative
	Beta1 float64 `key:"reflexflow.beta1" range:"0.."` // of the anti-drift term
	Beta2 float64 `key:"reflexflow.beta2" range:"0.."` // of the weighted loss
}

// DefaultReflexFlow is 1, 10, 1. The public trainer reads settings of null as 0, 0, 1: the
// plain loss.
func DefaultReflexFlow() ReflexFlow { return ReflexFlow{Alpha: 1, Beta1: 10, Beta2: 1} }

// Predictions are what one sample's loss is made of, each [D], one latent's elements.
type Predictions struct {
	// Clean is the model's output for the teacher-forced latent at its own timestep, Biased
	// that for the rolled latent at the target; the same where the sample did not roll. Both
	// may be nil: then nothing is weighted.
	Clean, Biased []float64
	Pred, Target  []float64 // the training prediction and what it should be, noise - x0
	Noisy, X0     []float64 // the latent Pred was made of, and the data
	// Loss, if it is not nil, takes the place of the elements' squared errors.
	Loss []float64
	// Mask, if it is not nil, multiplies the weighted elements. The anti-drift term is not masked.
	Mask []float64
}

// Terms are the loss of one sample.
type Terms struct {
	FC  float64 // beta2 * mean(w * element loss * mask)
	ADR float64 // |pred/|pred| - d/|d||^2 with d = Noisy - X0, 0 to 4
	// Exposure is sum |E|, E = Clean - Biased. The weights lie between WeightMin and WeightMax.
	Exposure, WeightMin, WeightMax float64
}

// minLength keeps divisors above 0, as torch's normalize does.
const minLength = 1e-6

// Weights are w = 1 + alpha E / max(sum |E|, 1e-6), [D], with E = clean - biased: an
// element counts more where the model's output fell when it ran on its own state. This is
// what the method calls frequency compensation; there is no transform in it. The mean of
// |w - 1| is alpha/D, so at the size of real latents it is little against the anti-drift term.
func (r ReflexFlow) Weights(clean, biased []float64) []float64 {
	total := max(exposure(clean, biased), minLength)
	w := make([]float64, len(clean))
	for i := range w {
		w[i] = 1 + float64(r.Alpha*(clean[i]-biased[i]))/total
	}
	return w
}

func exposure(clean, biased []float64) float64 {
	var total float64
	for i, c := range clean {
		total += math.Abs(c - biased[i])
	}
	return total
}

// AntiDriftLoss is the anti-drift term of one sample in ReflexFlow (arXiv 2512.04904), |pred/|pred|
// - d/|d||^2 with d = noisy - x0, which is 2 - 2 cos(pred, d). It pulls the prediction towards the
// line from the data to the latent, and applies to every sample, rolled or not. Lengths are at
// least 1e-6, so that a zero vector divides by no zero. All slices have the length of pred.
func AntiDriftLoss(pred, noisy, x0 []float64) float64 {
	var ofPred, ofLine float64
	for i, p := range pred {
		d := noisy[i] - x0[i]
		ofPred += float64(p * p)
		ofLine += float64(d * d)
	}
	ofPred, ofLine = max(math.Sqrt(ofPred), minLength), max(math.Sqrt(ofLine), minLength)
	var sum float64
	for i, p := range pred {
		d := p/ofPred - (noisy[i]-x0[i])/ofLine
		sum += float64(d * d)
	}
	return sum
}

// Terms returns the two parts of one sample's loss, which is FC + Beta1*ADR: the
// frequency-compensated error of the prediction (weighted where p has a clean and a biased
// prediction) and the anti-drift term. The image engine stores them for samples that are scored
// only. It fails where the slices of p do not fit (see validate).
func (r ReflexFlow) Terms(p Predictions) (Terms, error) {
	if err := p.validate(); err != nil {
		return Terms{}, err
	}
	t := Terms{ADR: AntiDriftLoss(p.Pred, p.Noisy, p.X0), WeightMin: 1, WeightMax: 1}
	var weights []float64
	if p.Clean != nil {
		weights = r.Weights(p.Clean, p.Biased)
		t.Exposure = exposure(p.Clean, p.Biased)
		t.WeightMin, t.WeightMax = math.Inf(1), math.Inf(-1)
	}
	var sum float64
	for i, pred := range p.Pred {
		e := pred - p.Target[i]
		e = float64(e * e)
		if p.Loss != nil {
			e = p.Loss[i]
		}
		if weights != nil {
			e = float64(e * weights[i])
			t.WeightMin, t.WeightMax = min(t.WeightMin, weights[i]), max(t.WeightMax, weights[i])
		}
		if p.Mask != nil {
			e = float64(e * p.Mask[i])
		}
		sum += e
	}
	t.FC = float64(r.Beta2 * sum / float64(len(p.Pred)))
	return t, nil
}

// validate returns an error that names the slice unless all slices of p that are there have the
// length of Pred and finite values. Clean and Biased are both there or neither. Terms calls it
// first.
func (p Predictions) validate() error {
	n := len(p.Pred)
	if n == 0 {
		return errors.New("pred: no elements; must have at least one")
	}
	if (p.Clean == nil) != (p.Biased == nil) {
		return errors.New("clean, biased: one of them; must be both or neither")
	}
	for _, f := range []struct {
		name     string
		values   []float64
		optional bool
	}{
		{"pred", p.Pred, false},
		{"target", p.Target, false},
		{"noisy", p.Noisy, false},
		{"x0", p.X0, false},
		{"clean", p.Clean, true},
		{"biased", p.Biased, true},
		{"loss", p.Loss, true},
		{"mask", p.Mask, true},
	} {
		if f.optional && f.values == nil {
			continue
		}
		if len(f.values) != n {
			return fmt.Errorf("%s: %d elements; must be %d, as pred has", f.name, len(f.values), n)
		}
		for i, x := range f.values {
			if !finite(x) {
				return fmt.Errorf("%s[%d]: %v; must be a finite number", f.name, i, x)
			}
		}
	}
	return nil
}
