package scheduled

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Level is the mix of a noisy latent, x = A*x0 + U*noise.
type Level struct{ U, A float64 }

// lambda is ln(A/U), half the log signal-to-noise ratio, which multistep samplers count as time. It
// is infinite at either end.
func (l Level) lambda() float64 {
	switch {
	case l.U == 0:
		return math.Inf(1)
	case l.A == 0:
		return math.Inf(-1)
	}
	return portable.Ln(l.A / l.U)
}

// Levels are the mixes of a model's training timesteps 0 .. N-1, from data to noise.
type Levels struct {
	prediction Prediction
	levels     []Level
}

// FlowLevels returns the levels of a flow model with n timesteps: U = t/(N-1), A = 1-U. An n
// outside 2 to 2^20 is an error.
func FlowLevels(n int) (*Levels, error) {
	if n < 2 || n > maxTimesteps {
		return nil, fmt.Errorf("timesteps: %d; must be 2 to %d", n, maxTimesteps)
	}
	l := &Levels{prediction: Flow, levels: make([]Level, n)}
	for t := range l.levels {
		u := float64(t) / float64(n-1)
		l.levels[t] = Level{U: u, A: 1 - u}
	}
	return l, nil
}

// VarianceLevels returns the levels of a variance-preserving model that predicts epsilon or v: A =
// sqrt(abar_t), U = sqrt(1 - abar_t), with abar the schedule's alphas_cumprod [N], strictly
// decreasing within (0, 1). The last may be 0, of a model that predicts v: a latent without data.
// Any other abar is an error.
func VarianceLevels(p Prediction, abar []float64) (*Levels, error) {
	if p != Epsilon && p != V {
		return nil, fmt.Errorf("prediction: %q; must be epsilon or v_prediction", string(p))
	}
	if len(abar) < 2 || len(abar) > maxTimesteps {
		return nil, fmt.Errorf("alphas_cumprod: %d values; must be 2 to %d", len(abar), maxTimesteps)
	}
	l := &Levels{prediction: p, levels: make([]Level, len(abar))}
	above := 1.0
	for t, v := range abar {
		if pure := v == 0 && t == len(abar)-1 && p == V; !(v > 0 && v < above || pure) {
			return nil, fmt.Errorf("alphas_cumprod[%d]: %v; must be above 0 and below %v, the one before", t, v, above)
		}
		l.levels[t] = Level{U: math.Sqrt(1 - v), A: math.Sqrt(v)}
		above = v
	}
	return l, nil
}

// LinearAlphasCumprod returns alphas_cumprod [n] of betas that rise linearly from first to last:
// the schedule linear (Ho et al. 2020: 1e-4 to 0.02 over 1000).
func LinearAlphasCumprod(n int, first, last float64) []float64 {
	alphasCumprod := make([]float64, n)
	product := 1.0
	for t := range alphasCumprod {
		beta := first + float64((last-first)*float64(t))/float64(max(n-1, 1))
		product = float64(product * (1 - beta))
		alphasCumprod[t] = product
	}
	return alphasCumprod
}

// CheckSampler returns an error for a sampler that cannot begin at a level without data: rk4, whose clock
// U/A is infinite there.
func (l *Levels) CheckSampler(s Sampler) error {
	if methods[s].fixed && l.prediction != Flow && l.levels[len(l.levels)-1].A == 0 {
		return fmt.Errorf("sampler: %s; must be euler, dpm, unipc or unip with rescale_betas_zero_snr: "+
			"the last timestep has no data", s)
	}
	return nil
}

// Timesteps returns N.
func (l *Levels) Timesteps() int { return len(l.levels) }

// Prediction returns what a model of these levels predicts.
func (l *Levels) Prediction() Prediction { return l.prediction }

// At is the level of timestep t, 0 <= t <= N-1, whole or not: the true noise level of a latent that
// was rolled down to t. Between two timesteps the clock of a rollout runs evenly: U of a flow
// model, U/A of the others. A t out of range panics.
func (l *Levels) At(t float64) Level {
	i := int(t)
	share := t - float64(i)
	if share == 0 || i == len(l.levels)-1 { // there is nothing noisier
		return l.levels[i]
	}
	low, high := l.levels[i], l.levels[i+1]
	if l.prediction == Flow {
		u := low.U + float64(share*(high.U-low.U))
		return Level{U: u, A: 1 - u}
	}
	if high.A == 0 {
		return high // at any share of the way, on a clock that has no end
	}
	clock := low.U / low.A
	clock += float64(share * (high.U/high.A - clock))
	length := math.Sqrt(1 + float64(clock*clock))
	return Level{U: clock / length, A: 1 / length}
}

// Noised sets dst = A*x0 + U*noise: the teacher-forced latent of a level. All have the same
// length; dst may be x0 or noise.
func Noised[T Float](dst, x0, noise []T, l Level) {
	a, u := T(l.A), T(l.U)
	x0, noise = x0[:len(dst)], noise[:len(dst)]
	for i := range dst {
		dst[i] = T(a*x0[i]) + T(u*noise[i])
	}
}

// Drift is how far a rolled latent lies from the teacher-forced one of the same sample, relative to
// its length: |rolled - teacher| / |teacher|. It is logged with each sample that rolls. Both have
// equal lengths. The result is not finite where teacher is all 0.
func Drift[T Float](rolled, teacher []T) float64 {
	var distance, length float64
	for i, y := range teacher[:len(rolled)] {
		d := float64(rolled[i]) - float64(y)
		distance += float64(d * d)
		length += float64(float64(y) * float64(y))
	}
	return math.Sqrt(distance) / math.Sqrt(length)
}
