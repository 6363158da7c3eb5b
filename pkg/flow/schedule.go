package flow

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// Limits of a schedule.
const (
	// MaxSteps bounds T, the number of denoising steps.
	MaxSteps = 1000
	// trainTimesteps is the only num_train_timesteps supported: timestep = 1000*sigma
	// is part of the event contract.
	trainTimesteps = 1000
	// maxConfigBytes bounds a scheduler_config.json; real ones are below 1 KiB.
	maxConfigBytes = 1 << 20
)

// Schedule makes sigmas as the FlowMatchEulerDiscreteScheduler of diffusers does. Its
// fields are the keys of scheduler_config.json.
type Schedule struct {
	NumTrainTimesteps int `json:"num_train_timesteps"`
	// Shift s maps sigma to s*sigma/(1+(s-1)*sigma) when UseDynamicShifting is off.
	Shift float64 `json:"shift"`
	// UseDynamicShifting replaces Shift by one that depends on the image size, see Mu.
	UseDynamicShifting bool    `json:"use_dynamic_shifting"`
	BaseShift          float64 `json:"base_shift"`
	MaxShift           float64 `json:"max_shift"`
	BaseImageSeqLen    int     `json:"base_image_seq_len"`
	MaxImageSeqLen     int     `json:"max_image_seq_len"`
	// ShiftTerminal, when set, stretches the shifted sigmas so that the last non-zero
	// one is exactly this.
	ShiftTerminal *float64 `json:"shift_terminal"`
	// TimeShiftType of dynamic shifting: "exponential" or "linear".
	TimeShiftType string `json:"time_shift_type"`

	// Switches of diffusers that are not supported: true is an error.
	InvertSigmas         bool `json:"invert_sigmas"`
	UseKarrasSigmas      bool `json:"use_karras_sigmas"`
	UseExponentialSigmas bool `json:"use_exponential_sigmas"`
	UseBetaSigmas        bool `json:"use_beta_sigmas"`
	StochasticSampling   bool `json:"stochastic_sampling"`
}

// QwenImage is the schedule of the Qwen-Image checkpoints.
func QwenImage() Schedule {
	terminal := 0.02
	return Schedule{
		NumTrainTimesteps: trainTimesteps, Shift: 1, UseDynamicShifting: true,
		BaseShift: 0.5, MaxShift: 0.9, BaseImageSeqLen: 256, MaxImageSeqLen: 8192,
		ShiftTerminal: &terminal, TimeShiftType: "exponential",
	}
}

// ParseSchedule reads a scheduler_config.json. Keys left out have the defaults of
// diffusers, unknown keys such as _class_name are ignored, and what is not supported
// is an error that names the key.
func ParseSchedule(config []byte) (Schedule, error) {
	s := Schedule{
		NumTrainTimesteps: trainTimesteps, Shift: 1, BaseShift: 0.5, MaxShift: 1.15,
		BaseImageSeqLen: 256, MaxImageSeqLen: 4096, TimeShiftType: "exponential",
	}
	if len(config) > maxConfigBytes {
		return Schedule{}, fmt.Errorf("parse scheduler config: %d bytes, want at most %d", len(config), maxConfigBytes)
	}
	if err := json.Unmarshal(config, &s); err != nil {
		return Schedule{}, fmt.Errorf("parse scheduler config: %w", err)
	}
	if err := s.Validate(); err != nil {
		return Schedule{}, fmt.Errorf("scheduler config: %w", err)
	}
	return s, nil
}

// Validate joins all faults of s, each naming the key, the value and the rule.
func (s Schedule) Validate() error {
	var faults []error
	check := func(ok bool, key string, value any, rule string) {
		if !ok {
			faults = append(faults, fmt.Errorf("%s = %v: want %s", key, value, rule))
		}
	}
	check(s.NumTrainTimesteps == trainTimesteps, "num_train_timesteps", s.NumTrainTimesteps, "1000")
	check(positive(s.Shift), "shift", s.Shift, "a finite number above 0")
	if s.UseDynamicShifting {
		check(finite(s.BaseShift), "base_shift", s.BaseShift, "a finite number")
		check(finite(s.MaxShift), "max_shift", s.MaxShift, "a finite number")
		check(s.BaseImageSeqLen > 0, "base_image_seq_len", s.BaseImageSeqLen, "a number above 0")
		check(s.MaxImageSeqLen > s.BaseImageSeqLen, "max_image_seq_len", s.MaxImageSeqLen, "a number above base_image_seq_len")
		check(s.TimeShiftType == "exponential" || s.TimeShiftType == "linear", "time_shift_type", fmt.Sprintf("%q", s.TimeShiftType), "exponential or linear")
	}
	if t := s.ShiftTerminal; t != nil {
		check(*t > 0 && *t < 1, "shift_terminal", *t, "null or a number between 0 and 1")
	}
	for _, sw := range []struct {
		key string
		on  bool
	}{
		{"invert_sigmas", s.InvertSigmas},
		{"use_karras_sigmas", s.UseKarrasSigmas},
		{"use_exponential_sigmas", s.UseExponentialSigmas},
		{"use_beta_sigmas", s.UseBetaSigmas},
		{"stochastic_sampling", s.StochasticSampling},
	} {
		check(!sw.on, sw.key, sw.on, "false (not supported)")
	}
	return errors.Join(faults...)
}

// Mu is the dynamic shift of an image of imageSeqLen latent tokens: the straight
// line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).
func (s Schedule) Mu(imageSeqLen int) float64 {
	slope := (s.MaxShift - s.BaseShift) / float64(s.MaxImageSeqLen-s.BaseImageSeqLen)
	intercept := s.BaseShift - float64(slope*float64(s.BaseImageSeqLen))
	return float64(float64(imageSeqLen)*slope) + intercept
}

// Sigmas returns the T+1 sigmas of numInferenceSteps = T steps for an image of
// imageSeqLen latent tokens: strictly decreasing from at most 1, the last is 0.
//
// With dynamic shifting the grid is the Qwen-Image pipeline's, T points from 1 to
// 1/T. Without it is the scheduler's own, from 1 down to the already shifted
// smallest training sigma, so that its low end is shifted twice.
func (s Schedule) Sigmas(numInferenceSteps, imageSeqLen int) ([]float32, error) {
	if err := checkSteps(numInferenceSteps); err != nil {
		return nil, err
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	last := 1 / float64(numInferenceSteps)
	if !s.UseDynamicShifting {
		last = shiftBy(s.Shift, 1.0/trainTimesteps)
	}
	return s.finish(linspace(1, last, numInferenceSteps), imageSeqLen)
}

// Shifted turns a caller's T pre-shift sigmas, strictly decreasing in (0, 1], into the
// T+1 of a rollout: shift, terminal stretch, final 0.
func (s Schedule) Shifted(sigmas []float64, imageSeqLen int) ([]float32, error) {
	if err := checkSteps(len(sigmas)); err != nil {
		return nil, fmt.Errorf("sigmas: %w", err)
	}
	for i, sigma := range sigmas {
		if !(sigma > 0 && sigma <= 1) {
			return nil, fmt.Errorf("sigmas[%d] = %v: want a number in (0, 1]", i, sigma)
		}
		if i > 0 && sigma >= sigmas[i-1] {
			return nil, fmt.Errorf("sigmas[%d] = %v: want less than sigmas[%d] = %v", i, sigma, i-1, sigmas[i-1])
		}
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	return s.finish(append([]float64(nil), sigmas...), imageSeqLen)
}

// SolverSigmas returns the T+1 sigmas that diffusers' multistep schedulers use in
// flow mode, for side by side evaluation: UniPC starts at 1 - 1e-6, DPM at about
// 0.999. The other solvers use Sigmas.
func (s Schedule) SolverSigmas(solver Solver, numInferenceSteps, imageSeqLen int) ([]float32, error) {
	if solver != UniPC && solver != DPM {
		return s.Sigmas(numInferenceSteps, imageSeqLen)
	}
	if err := checkSteps(numInferenceSteps); err != nil {
		return nil, err
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	grid := linspace(1, 1.0/trainTimesteps, numInferenceSteps+1)
	if solver == UniPC {
		grid = grid[:numInferenceSteps]
	} else {
		reversed := make([]float64, numInferenceSteps)
		for i := range reversed {
			reversed[i] = 1 - grid[numInferenceSteps-i]
		}
		grid = reversed
	}
	if err := s.shift(grid, imageSeqLen); err != nil {
		return nil, err
	}
	if solver == UniPC && math.Abs(grid[0]-1) < 1e-6 {
		grid[0] -= 1e-6
	}
	return roundSigmas(grid)
}

func (s Schedule) finish(grid []float64, imageSeqLen int) ([]float32, error) {
	if err := s.shift(grid, imageSeqLen); err != nil {
		return nil, err
	}
	return roundSigmas(grid)
}

// shift applies the shift and the terminal stretch in place.
func (s Schedule) shift(grid []float64, imageSeqLen int) error {
	factor := s.Shift
	if s.UseDynamicShifting {
		if imageSeqLen <= 0 {
			return fmt.Errorf("image_seq_len = %d: want a number above 0 with use_dynamic_shifting", imageSeqLen)
		}
		mu := s.Mu(imageSeqLen)
		if math.Abs(mu) > 50 || s.TimeShiftType == "linear" && mu <= 0 {
			return fmt.Errorf("image_seq_len = %d: its %s shift mu = %v is out of range", imageSeqLen, s.TimeShiftType, mu)
		}
		factor = mu
		if s.TimeShiftType == "exponential" {
			factor = exp(mu)
		}
	}
	for i, sigma := range grid {
		grid[i] = shiftBy(factor, sigma)
	}
	// A grid of one sigma that is 1 has nothing to stretch.
	if last := grid[len(grid)-1]; s.ShiftTerminal != nil && last < 1 {
		scale := (1 - *s.ShiftTerminal) / (1 - last)
		for i, sigma := range grid {
			grid[i] = 1 - float64((1-sigma)*scale)
		}
	}
	return nil
}

// shiftBy is f*sigma / (1 + (f-1)*sigma), written with 1/sigma as upstream does.
func shiftBy(f, sigma float64) float64 { return f / (f + (1/sigma - 1)) }

// roundSigmas appends the terminal 0. Sigmas that are distinct in float64 may
// coincide in float32, which no step can cross.
func roundSigmas(grid []float64) ([]float32, error) {
	sigmas := make([]float32, 0, len(grid)+1)
	for _, sigma := range grid {
		sigmas = append(sigmas, float32(sigma))
	}
	sigmas = append(sigmas, 0)
	return sigmas, checkSigmas(sigmas)
}

// checkSigmas holds for every list of sigmas a rollout runs on.
func checkSigmas(sigmas []float32) error {
	n := len(sigmas)
	if n < 2 || n > MaxSteps+1 {
		return fmt.Errorf("sigmas: %d values, want 2 to %d", n, MaxSteps+1)
	}
	for i, sigma := range sigmas {
		if !(sigma >= 0 && sigma <= 1) {
			return fmt.Errorf("sigmas[%d] = %v: want a number in [0, 1]", i, sigma)
		}
		if i > 0 && sigma >= sigmas[i-1] {
			return fmt.Errorf("sigmas[%d] = %v: want less than sigmas[%d] = %v", i, sigma, i-1, sigmas[i-1])
		}
	}
	if sigmas[n-1] != 0 {
		return fmt.Errorf("sigmas[%d] = %v: want 0 at the end", n-1, sigmas[n-1])
	}
	return nil
}

func checkSteps(n int) error {
	if n < 1 || n > MaxSteps {
		return fmt.Errorf("num_inference_steps = %d: want 1 to %d", n, MaxSteps)
	}
	return nil
}

// linspace is n points from first to last, both included; n = 1 gives first.
func linspace(first, last float64, n int) []float64 {
	grid := make([]float64, n)
	for i := range grid {
		grid[i] = first
		if i > 0 {
			step := (last - first) / float64(n-1)
			grid[i] = first + float64(float64(i)*step)
		}
	}
	if n > 1 {
		grid[n-1] = last
	}
	return grid
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

func positive(x float64) bool { return x > 0 && !math.IsInf(x, 1) }
