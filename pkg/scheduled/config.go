package scheduled

import (
	"encoding/json"
	"fmt"
	"math"
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
}

// ParseNoise reads a scheduler_config.json. Keys left out have the defaults of diffusers; a
// class whose name begins with FlowMatch, or none, is that of a flow model, as is any with use_flow_sigmas.
func ParseNoise(config []byte) (Noise, error) {
	n := Noise{Timesteps: 1000, BetaStart: 1e-4, BetaEnd: 0.02, BetaSchedule: "linear"}
	if err := json.Unmarshal(config, &n); err != nil {
		return Noise{}, fmt.Errorf("parse scheduler config: %w", err)
	}
	flows := n.Class == "" || strings.HasPrefix(n.Class, "FlowMatch") || n.FlowSigmas && n.Prediction == string(Flow)
	switch {
	case n.Timesteps < 2 || n.Timesteps > maxTimesteps:
		return Noise{}, fmt.Errorf("scheduler config: num_train_timesteps: %d; must be 2 to %d", n.Timesteps, maxTimesteps)
	case flows:
		n.Prediction = string(Flow)
		return n, nil
	case n.Prediction == "":
		n.Prediction = string(Epsilon)
	}
	if n.FlowSigmas {
		return Noise{}, fmt.Errorf("scheduler config: use_flow_sigmas: true; must be false with prediction_type %s", n.Prediction)
	}
	if p := Prediction(n.Prediction); p != Epsilon && p != V {
		return Noise{}, fmt.Errorf("scheduler config: prediction_type: %q; must be epsilon or v_prediction", n.Prediction)
	}
	if n.BetaSchedule != "linear" && n.BetaSchedule != "scaled_linear" {
		return Noise{}, fmt.Errorf("scheduler config: beta_schedule: %q; must be linear or scaled_linear", n.BetaSchedule)
	}
	return n, nil
}

// Levels are those of the model's timesteps. A flow model has as many as are asked for, the
// others those that they were trained with: timesteps is that, or 0.
func (n Noise) Levels(timesteps int) (*Levels, error) {
	if timesteps == 0 {
		timesteps = n.Timesteps
	}
	p := Prediction(n.Prediction)
	if p == Flow {
		return FlowLevels(timesteps)
	}
	if timesteps != n.Timesteps {
		return nil, fmt.Errorf("timesteps: %d; must be %d, those of a model that predicts %s", timesteps, n.Timesteps, p)
	}
	if n.BetaSchedule == "scaled_linear" {
		return VarianceLevels(p, scaledAlphasCumprod(timesteps, n.BetaStart, n.BetaEnd))
	}
	return VarianceLevels(p, LinearAlphasCumprod(timesteps, n.BetaStart, n.BetaEnd))
}

// scaledAlphasCumprod is alphas_cumprod [n] of betas whose roots rise linearly (Rombach et al. 2022).
func scaledAlphasCumprod(n int, first, last float64) []float64 {
	a, b := math.Sqrt(first), math.Sqrt(last)
	abar := make([]float64, n)
	product := 1.0
	for t := range abar {
		root := a + float64((b-a)*float64(t))/float64(max(n-1, 1))
		product = float64(product * (1 - float64(root*root)))
		abar[t] = product
	}
	return abar
}

// Sigmas are the levels of the timesteps N-1 to 0 as a schedule that falls to 0, in U: of a flow
// model N, of the others N+1, the last a 0 that no timestep has. Step N-1-t leads from t to t-1.
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
