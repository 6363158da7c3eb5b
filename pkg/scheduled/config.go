package scheduled

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
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
