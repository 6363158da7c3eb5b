package scheduled

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/portable"
)

// Noise is what a scheduler_config.json of diffusers says of a model's noise.
type Noise struct {
	Class        string  `json:"_class_name"`
	Timesteps    int     `json:"num_train_timesteps"`
	Prediction   string  `json:"prediction_type"`
	BetaStart    float64 `json:"beta_start"`
	BetaEnd      float64 `json:"beta_end"`
	BetaSchedule string  `json:"beta_schedule"`
	FlowSigmas   bool    `json:"use_flow_sigmas"`
	ZeroSNR      bool    `json:"rescale_betas_zero_snr"`
	Trained      any     `json:"trained_betas"`
}

// class has the defaults of diffusers for a scheduler class, where its file leaves a key out.
type class struct {
	start, end float64
	schedule   string
	zeroSNR    bool // it has rescale_betas_zero_snr
}

var classes = map[string]class{
	"DDPMScheduler":                   {1e-4, 0.02, "linear", true},
	"DDPMParallelScheduler":           {1e-4, 0.02, "linear", true},
	"DDIMScheduler":                   {1e-4, 0.02, "linear", true},
	"DDIMParallelScheduler":           {1e-4, 0.02, "linear", true},
	"EulerDiscreteScheduler":          {1e-4, 0.02, "linear", true},
	"EulerAncestralDiscreteScheduler": {1e-4, 0.02, "linear", true},
	"DPMSolverMultistepScheduler":     {1e-4, 0.02, "linear", true},
	"UniPCMultistepScheduler":         {1e-4, 0.02, "linear", true},
	"DPMSolverSinglestepScheduler":    {1e-4, 0.02, "linear", false},
	"DEISMultistepScheduler":          {1e-4, 0.02, "linear", false},
	"LMSDiscreteScheduler":            {1e-4, 0.02, "linear", false},
	"PNDMScheduler":                   {1e-4, 0.02, "linear", false},
	"SASolverScheduler":               {1e-4, 0.02, "linear", false},
	"KDPM2DiscreteScheduler":          {0.00085, 0.012, "linear", false},
	"KDPM2AncestralDiscreteScheduler": {0.00085, 0.012, "linear", false},
	"LCMScheduler":                    {0.00085, 0.012, "scaled_linear", true},
	"TCDScheduler":                    {0.00085, 0.012, "scaled_linear", true},
}

// ParseNoise reads the scheduler_config.json of the model that scheduled sampling trains; intake
// calls it to plan, the image engine to roll. Keys left out have the defaults of the class in
// diffusers; a class whose name begins with FlowMatch, or none, is that of a flow model, as is any
// with use_flow_sigmas. What is no JSON or is not supported is an error that names the key.
func ParseNoise(config []byte) (Noise, error) {
	n := Noise{Timesteps: 1000}
	if err := json.Unmarshal(config, &n); err != nil {
		return Noise{}, fmt.Errorf("parse scheduler config: %w", err)
	}
	fault := func(format string, args ...any) (Noise, error) {
		return Noise{}, fmt.Errorf("scheduler config: "+format, args...)
	}
	if n.Timesteps < 2 || n.Timesteps > maxTimesteps {
		return fault("num_train_timesteps: %d; must be 2 to %d", n.Timesteps, maxTimesteps)
	}
	if n.Class == "" || strings.HasPrefix(n.Class, "FlowMatch") || n.FlowSigmas && n.Prediction == string(Flow) {
		n.Prediction = string(Flow)
		return n, nil
	}
	c, known := classes[n.Class]
	if !known {
		return fault("_class_name: %q; must be one of %s", n.Class,
			strings.Join(slices.Sorted(maps.Keys(classes)), ", "))
	}
	n.Prediction, n.BetaSchedule = cmp.Or(n.Prediction, string(Epsilon)), cmp.Or(n.BetaSchedule, c.schedule)
	n.BetaStart, n.BetaEnd = cmp.Or(n.BetaStart, c.start), cmp.Or(n.BetaEnd, c.end)
	switch p := Prediction(n.Prediction); {
	case p != Epsilon && p != V:
		return fault("prediction_type: %q; must be epsilon or v_prediction", n.Prediction)
	case n.FlowSigmas:
		return fault("use_flow_sigmas: true; must be false with prediction_type %s", n.Prediction)
	case n.BetaSchedule != "linear" && n.BetaSchedule != "scaled_linear":
		return fault("beta_schedule: %q; must be linear or scaled_linear", n.BetaSchedule)
	case n.Trained != nil:
		return fault("trained_betas: not supported; must be null")
	case n.ZeroSNR && !c.zeroSNR:
		return fault("rescale_betas_zero_snr: true; must be false with %s, which has none", n.Class)
	case n.ZeroSNR && p == Epsilon:
		return fault("rescale_betas_zero_snr: true; must be false with prediction_type epsilon: the last has no data")
	}
	return n, nil
}

// Levels returns the noise levels of the model's timesteps, which Roller steps through. A flow
// model can have any number of timesteps, the others only the number that they were trained with; 0
// is that number. Another number is an error.
func (n Noise) Levels(timesteps int) (*Levels, error) {
	if timesteps == 0 {
		timesteps = n.Timesteps
	}
	p := Prediction(n.Prediction)
	if p == Flow {
		return FlowLevels(timesteps)
	}
	if timesteps != n.Timesteps {
		return nil, fmt.Errorf("timesteps: %d; must be %d, those of a model that predicts %s", timesteps, n.Timesteps,
			p)
	}
	alphasCumprod := LinearAlphasCumprod(timesteps, n.BetaStart, n.BetaEnd)
	if n.BetaSchedule == "scaled_linear" {
		alphasCumprod = scaledAlphasCumprod(timesteps, n.BetaStart, n.BetaEnd)
	}
	if n.ZeroSNR {
		zeroSNR(alphasCumprod)
	}
	return VarianceLevels(p, alphasCumprod)
}

// zeroSNR moves the roots of alphas_cumprod evenly so that the last is 0 and the first stays (Lin et al. 2023,
// algorithm 1). It is 0 for all classes, as models are trained; some put 2^-24 there, which can be more than the one
// before has.
func zeroSNR(abar []float64) {
	first, last := math.Sqrt(abar[0]), math.Sqrt(abar[len(abar)-1])
	scale := first / (first - last)
	for t, v := range abar {
		root := float64((math.Sqrt(v) - last) * scale)
		abar[t] = float64(root * root)
	}
}

// scaledAlphasCumprod returns alphas_cumprod [n] of betas whose square roots rise linearly from
// that of first to that of last: the schedule scaled_linear (Rombach et al. 2022).
func scaledAlphasCumprod(n int, first, last float64) []float64 {
	a, b := math.Sqrt(first), math.Sqrt(last)
	alphasCumprod := make([]float64, n)
	product := 1.0
	for t := range alphasCumprod {
		root := a + float64((b-a)*float64(t))/float64(max(n-1, 1))
		product = float64(product * (1 - float64(root*root)))
		alphasCumprod[t] = product
	}
	return alphasCumprod
}

// Sigmas returns the levels of the timesteps N-1 to 0 as a schedule that falls to 0, in U: intake
// stores it with a sample as the sigmas of its steps. It has N values for a flow model, N+1 for the
// others, the last a 0 that no timestep has. Step N-1-t leads from t to t-1.
func (l *Levels) Sigmas() []float32 {
	var out []float32
	for t := len(l.levels) - 1; t >= 0; t-- {
		out = append(out, float32(l.levels[t].U))
	}
	if l.prediction != Flow {
		out = append(out, 0)
	}
	return out
}

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
