package flow

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/strictjson"
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

// Schedule computes sigmas as a pipeline of diffusers with a FlowMatchEulerDiscreteScheduler does. Its fields are the
// keys of scheduler_config.json, and Grid and Mu, which the pipeline decides.
type Schedule struct {
	// Grid is the T sigmas before the shift; empty is GridLinspace.
	Grid Grid `json:"-"`
	// MuRule says how dynamic shifting finds mu; empty is MuLinear. ConstantMu is that of MuConstant.
	MuRule     MuRule  `json:"-"`
	ConstantMu float64 `json:"-"`

	NumTrainTimesteps int `json:"num_train_timesteps"`
	// Shift s maps sigma to s*sigma/(1+(s-1)*sigma) when UseDynamicShifting is off.
	Shift float64 `json:"shift"`
	// UseDynamicShifting replaces Shift by e^mu, or mu itself, see Mu.
	UseDynamicShifting bool    `json:"use_dynamic_shifting"`
	BaseShift          float64 `json:"base_shift"`
	MaxShift           float64 `json:"max_shift"`
	BaseImageSeqLen    int     `json:"base_image_seq_len"`
	MaxImageSeqLen     int     `json:"max_image_seq_len"`
	// ShiftTerminal, when set and not 0, stretches the shifted sigmas so that the last
	// non-zero one is this, to the rounding of float32.
	ShiftTerminal *float64 `json:"shift_terminal"`
	// TimeShiftType of dynamic shifting: "exponential" or "linear".
	TimeShiftType string `json:"time_shift_type"`

	// Switches of diffusers that are not supported: true is an error.
	InvertSigmas         bool `json:"invert_sigmas"`
	UseKarrasSigmas      bool `json:"use_karras_sigmas"`
	UseExponentialSigmas bool `json:"use_exponential_sigmas"`
	UseBetaSigmas        bool `json:"use_beta_sigmas"`
	StochasticSampling   bool `json:"stochastic_sampling"`

	// Diffusion is that of a model that predicts something else than a velocity, in place of all above but Grid; nil:
	// it is a flow model.
	Diffusion *Diffusion `json:"-"`

	// Own lists the sigmas of a pipeline, in place of all above but Grid; nil: they follow from the settings above.
	Own *Own `json:"-"`

	// wide: the shift is computed in float64, as the solvers of diffusers do, instead of float32.
	float64Shift bool
}

// Classes of schedulers whose sigmas a Schedule computes. The two solvers get the grid of the pipeline too, although
// DPM-Solver++ in diffusers accepts none: its own begins at 0.999, where the noise of an sde step is thirty times that
// at 1, which has a value of its own.
const (
	classEuler = "FlowMatchEulerDiscreteScheduler"
	classUniPC = "UniPCMultistepScheduler"
	classDPM   = "DPMSolverMultistepScheduler"
)

// solverConfig holds the keys of scheduler_config.json that are not in Schedule: the class, and the settings of a
// solver.
type solverConfig struct {
	Class         string  `json:"_class_name"`
	Prediction    string  `json:"prediction_type"`
	UseFlowSigmas bool    `json:"use_flow_sigmas"`
	FlowShift     float64 `json:"flow_shift"`
	FinalSigmas   string  `json:"final_sigmas_type"`
	UseLuLambdas  bool    `json:"use_lu_lambdas"`
}

// scheduleUnused are the keys of a scheduler_config.json that change no sigma.
var scheduleUnused = func() strictjson.Unused {
	u := strictjson.Unused{
		"_diffusers_version": "who wrote the file", "_name_or_path": "where it was",
		"_use_default_values": "which settings the writer left out",
	}
	for _, key := range []string{
		"beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr", "timestep_spacing",
		"steps_offset", "sigma_min", "sigma_max",
	} {
		u[key] = "diffusers does not read it with use_flow_sigmas"
	}
	for _, key := range []string{
		"solver_order", "solver_type", "solver_p", "algorithm_type", "predict_x0", "lower_order_final",
		"disable_corrector", "euler_at_final", "thresholding", "dynamic_thresholding_ratio", "sample_max_value",
		"lambda_min_clipped", "variance_type",
	} {
		u[key] = "of a solver of diffusers: a prompt chooses the solver"
	}
	return u
}()

// ParseSchedule reads a scheduler_config.json of diffusers, which a model's folder or a prompt
// brings. Missing keys have the defaults of diffusers. For UniPC and
// DPM-Solver++ with use_flow_sigmas the shift is flow_shift. Their first sigma of 1 stays 1 here;
// diffusers subtracts 1e-6 so that its logarithms are finite. Errors: more than maxConfigBytes, no
// JSON, unknown keys, and settings that are not supported, each with its key.
func ParseSchedule(config []byte) (Schedule, error) {
	if last := lastParsed.Load(); last != nil && last.config == string(config) {
		return last.schedule, nil
	}
	s, err := parseSchedule(config)
	if err == nil {
		lastParsed.Store(&parsedSchedule{string(config), s})
	}
	return s, err
}

// parsedSchedule is the one that was parsed last: all prompts of a lane have the same.
type parsedSchedule struct {
	config   string
	schedule Schedule
}

var lastParsed atomic.Pointer[parsedSchedule]

// parseSchedule is ParseSchedule of a text that was not parsed just before.
func parseSchedule(config []byte) (Schedule, error) {
	s := Schedule{
		NumTrainTimesteps: trainTimesteps, Shift: 1, BaseShift: 0.5, MaxShift: 1.15,
		BaseImageSeqLen: 256, MaxImageSeqLen: 4096, TimeShiftType: "exponential",
	}
	c := solverConfig{FlowShift: 1, FinalSigmas: "zero"}
	if len(config) > maxConfigBytes {
		return Schedule{}, fmt.Errorf("parse scheduler config: %d bytes; must be at most %d", len(config),
			maxConfigBytes)
	}
	var kind solverConfig
	class := ""
	if json.Unmarshal(config, &kind) == nil {
		class = kind.gridClass()
	}
	if class != "" {
		d, err := parseDiffusion(config, class)
		if err != nil {
			return Schedule{}, fmt.Errorf("parse scheduler config: %w", err)
		}
		s = Schedule{Diffusion: d, Grid: GridDiffusion}
		if err := s.Validate(); err != nil {
			return Schedule{}, fmt.Errorf("scheduler config: %w", err)
		}
		return s, nil
	}
	if err := strictjson.Unmarshal(config, scheduleUnused, &s, &c); err != nil {
		return Schedule{}, fmt.Errorf("parse scheduler config: %w", err)
	}
	if err := errors.Join(c.applyTo(&s), s.Validate()); err != nil {
		return Schedule{}, fmt.Errorf("scheduler config: %w", err)
	}
	return s, nil
}

// applyTo sets in s what the class of the scheduler decides. It returns one joined error for all
// settings that this class has in diffusers and that are not supported here. Each names the key.
// ParseSchedule calls it on the JSON that it read.
func (c solverConfig) applyTo(s *Schedule) error {
	var faults []error
	check := func(ok bool, key string, value any, rule string) {
		if !ok {
			faults = append(faults, fmt.Errorf("%s: %#v; must be %s", key, value, rule))
		}
	}
	switch c.Class {
	case "", classEuler:
		check(c.Prediction == "" || c.Prediction == flowPrediction, "prediction_type", c.Prediction, flowPrediction)
	case classUniPC, classDPM:
		s.Shift, s.float64Shift = c.FlowShift, true
		check(c.UseFlowSigmas, "use_flow_sigmas", c.UseFlowSigmas, "true for "+c.Class)
		check(c.Prediction == flowPrediction, "prediction_type", c.Prediction, flowPrediction)
		check(positive(c.FlowShift), "flow_shift", c.FlowShift, "a finite number above 0")
		check(c.FinalSigmas == "zero", "final_sigmas_type", c.FinalSigmas, "zero")
		check(!c.UseLuLambdas, "use_lu_lambdas", c.UseLuLambdas, "false (not supported)")
		check(c.Class == classUniPC || s.terminal() == 0, "shift_terminal", s.terminal(), "null for "+c.Class)
		check(s.TimeShiftType != "linear" || c.Class == classUniPC, "time_shift_type", s.TimeShiftType, "exponential")
	default:
		check(false, "_class_name", c.Class, classEuler+", "+strings.Join(diffusionClasses, ", ")+", or "+classUniPC+
			" or "+classDPM+" with use_flow_sigmas")
	}
	return errors.Join(faults...)
}

// flowPrediction is the prediction_type of a flow model.
const flowPrediction = "flow_prediction"

// Validate joins all faults of s. Each names the key of scheduler_config.json, the value and the
// rule. All that computes sigmas calls it first; so must a caller that changed a parsed schedule.
func (s Schedule) Validate() error {
	var faults []error
	check := func(ok bool, key string, value any, rule string) {
		if !ok {
			faults = append(faults, fmt.Errorf("%s: %v; must be %s", key, value, rule))
		}
	}
	check((s.Diffusion != nil) == (s.Grid == GridDiffusion), "grid", fmt.Sprintf("%q", string(s.Grid)),
		"diffusion with "+strings.Join(diffusionClasses, ", ")+", and with no other")
	check((s.Own != nil) == (s.Grid == GridPipeline), "grid", fmt.Sprintf("%q", string(s.Grid)),
		"pipeline where the pipeline lists its sigmas, and nowhere else")
	if s.Own != nil {
		return errors.Join(append(faults, s.Own.validate())...)
	}
	if s.Diffusion != nil {
		return errors.Join(append(faults, s.Diffusion.validate())...)
	}
	linear := s.Grid == "" || s.Grid == GridLinspace || s.Grid == GridTorch // its sigmas do not depend on the number
	check(s.NumTrainTimesteps == trainTimesteps || s.NumTrainTimesteps == 1 && linear, "num_train_timesteps",
		s.NumTrainTimesteps, "1000, or 1 with grid linspace")
	check(s.Grid.valid(), "grid", fmt.Sprintf("%q", string(s.Grid)),
		"linspace, linspace_torch, scheduler, uni_flow, diffusion or pipeline")
	check(s.Grid != GridUniFlow || s.float64Shift, "grid", GridUniFlow,
		"linspace or scheduler with "+classEuler)
	check(s.Grid != GridScheduler || !s.float64Shift, "grid", GridScheduler,
		"linspace or uni_flow with "+classUniPC+" or "+classDPM)
	check(s.MuRule.valid(), "mu", fmt.Sprintf("%q", string(s.MuRule)), "linear, none, flux2 or constant")
	check(finite(s.ConstantMu) && (s.ConstantMu == 0 || s.MuRule == MuConstant), "mu_constant", s.ConstantMu,
		"a finite number with mu constant, else 0")
	// else flow_shift is checked
	check(positive(s.Shift) || s.float64Shift, "shift", s.Shift, "a finite number above 0")
	if s.UseDynamicShifting {
		check(s.MuRule != MuNone, "mu", MuNone, "linear, flux2 or constant with use_dynamic_shifting")
		check(finite(s.BaseShift), "base_shift", s.BaseShift, "a finite number")
		check(finite(s.MaxShift), "max_shift", s.MaxShift, "a finite number")
		check(s.BaseImageSeqLen > 0, "base_image_seq_len", s.BaseImageSeqLen, "a number above 0")
		check(s.MaxImageSeqLen > s.BaseImageSeqLen, "max_image_seq_len", s.MaxImageSeqLen,
			"a number above base_image_seq_len")
		check(s.TimeShiftType == "exponential" || s.TimeShiftType == "linear", "time_shift_type",
			fmt.Sprintf("%q", s.TimeShiftType), "exponential or linear")
	}
	if t := s.ShiftTerminal; t != nil {
		check(*t >= 0 && *t < 1, "shift_terminal", *t, "null, or a number from 0 to below 1")
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

// Sigmas returns the T+1 sigmas of numInferenceSteps = T steps for an image of imageSeqLen latent
// tokens: strictly decreasing from about 1, the last is 0. They have the bits of a diffusers
// pipeline: T points by Grid, shifted and stretched. Under some static shifts, such as 4.03,
// rounding moves the first sigma above 1; if a terminal stretch moves it beyond MaxSigma, it is set
// to 1. Errors: a number of steps that is out of range, an invalid s, a mu out of range, and a
// shift so strong that neighbours round to one sigma.
func (s Schedule) Sigmas(numInferenceSteps, imageSeqLen int) ([]float32, error) {
	if err := checkSteps(numInferenceSteps); err != nil {
		return nil, err
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if s.Diffusion != nil {
		sigmas, _, err := s.Diffusion.grid(numInferenceSteps)
		return sigmas, err
	}
	if s.Own != nil {
		return s.Own.sigmas(numInferenceSteps, imageSeqLen)
	}
	return s.finishGrid(s.grid(numInferenceSteps), imageSeqLen)
}

// Timesteps returns the timesteps [T] that the network of a Diffusion knows the states of a rollout by, and the
// standard deviation of its first state, which is drawn; nil and 1 of a flow model, whose timesteps are 1000*sigma.
// Errors are those of Sigmas.
func (s Schedule) Timesteps(numInferenceSteps int) (timesteps []float32, initialStd float64, err error) {
	if s.Diffusion == nil {
		return nil, 1, nil
	}
	if err := errors.Join(checkSteps(numInferenceSteps), s.Validate()); err != nil {
		return nil, 0, err
	}
	sigmas, timesteps, err := s.Diffusion.grid(numInferenceSteps)
	if err != nil {
		return nil, 0, err
	}
	return timesteps, s.Diffusion.initialStd(sigmas[0]), nil
}

// Shifted applies the schedule to a caller's own T sigmas, strictly decreasing in (0, 1], and
// returns the T+1 sigmas of a rollout: shifted, stretched to the terminal, with a final 0. Intake
// calls it for a prompt that lists its sigmas. Errors are those of Sigmas, and sigmas out of range
// or order.
func (s Schedule) Shifted(sigmas []float64, imageSeqLen int) ([]float32, error) {
	if err := checkSteps(len(sigmas)); err != nil {
		return nil, fmt.Errorf("sigmas: %w", err)
	}
	for i, sigma := range sigmas {
		if !(sigma > 0 && sigma <= 1) {
			return nil, fmt.Errorf("sigmas[%d]: %v; must be a number in (0, 1]", i, sigma)
		}
		if i > 0 && sigma >= sigmas[i-1] {
			return nil, fmt.Errorf("sigmas[%d]: %v; must be below the one before it, %v", i, sigma, sigmas[i-1])
		}
	}
	if s.Diffusion != nil {
		return nil, fmt.Errorf("sigmas: given; must be absent: the network knows the timesteps of %s alone",
			s.Diffusion.Class)
	}
	if s.Own != nil {
		return nil, errors.New("sigmas: given; must be absent: the pipeline has a shift of its own")
	}
	s.Grid = GridLinspace // the caller's stand in for those of the grid
	if err := s.Validate(); err != nil {
		return nil, err
	}
	return s.finishGrid(slices.Clone(sigmas), imageSeqLen)
}

// finishGrid makes the T+1 sigmas of a rollout of a grid of T sigmas [float64], which it may
// change: it shifts them, rounds to float32 and appends the final 0. As in diffusers, a grid that
// the pipeline gives is rounded before the shift; one of the scheduler's own is after it. Errors: a
// dynamic shift out of range, and sigmas that are no longer distinct.
func (s Schedule) finishGrid(grid []float64, imageSeqLen int) ([]float32, error) {
	var sigmas []float32
	if s.float64Shift || s.Grid == GridScheduler {
		if err := applyShift(s, grid, imageSeqLen); err != nil {
			return nil, err
		}
		sigmas = float32s(grid)
	} else {
		sigmas = float32s(grid)
		if err := applyShift(s, sigmas, imageSeqLen); err != nil {
			return nil, err
		}
	}
	if sigmas[0] > MaxSigma {
		sigmas[0] = 1
	}
	return terminate(sigmas)
}

// applyShift applies the static or dynamic shift and then the terminal stretch of s to grid in
// place, with the same order of operations as diffusers. As in NumPy 2, arithmetic is in the type
// of the array: constants are computed in float64, then rounded to F. It fails where dynamicShift
// does; grid is then unchanged.
func applyShift[F float32 | float64](s Schedule, grid []F, imageSeqLen int) error {
	if s.UseDynamicShifting {
		factor, err := s.dynamicShift(len(grid), imageSeqLen)
		if err != nil {
			return err
		}
		for i, sigma := range grid {
			grid[i] = F(factor) / (F(factor) + (1/sigma - 1))
		}
	} else {
		shiftBy(grid, s.Shift)
	}
	// A grid of one sigma that is 1 has nothing to stretch; diffusers divides 0 by 0 there.
	if last := grid[len(grid)-1]; s.terminal() > 0 && last < 1 {
		scale := (1 - last) / F(1-s.terminal())
		for i, sigma := range grid {
			grid[i] = 1 - (1-sigma)/scale
		}
	}
	return nil
}

// terminal returns the shift_terminal, 0 if there is none.
func (s Schedule) terminal() float64 {
	if s.ShiftTerminal == nil {
		return 0
	}
	return *s.ShiftTerminal
}

// Timestep returns 1000*sigma as a float32 product, 0 to 1000, which diffusers' schedulers call the timestep of
// sigma. Trainers find a step by its exact value.
func Timestep(sigma float32) float32 { return float32(trainTimesteps * sigma) }

// float32s rounds grid to float32. The result has capacity for the final 0.
func float32s(grid []float64) []float32 {
	sigmas := make([]float32, len(grid), len(grid)+1)
	for i, sigma := range grid {
		sigmas[i] = float32(sigma)
	}
	return sigmas
}

// terminate appends the final 0 and checks the result: sigmas that differ in float64 may be equal in float32, and
// no step leads from a sigma to the same sigma.
func terminate(sigmas []float32) ([]float32, error) {
	sigmas = append(sigmas, 0)
	return sigmas, checkSigmas(sigmas, false)
}

// MaxSigma is the largest sigma of a rollout: 1 plus the rounding errors of a schedule. Packages schemas and model
// define the same value.
const MaxSigma = 1 + 1.0/(1<<19)

// checkSigmas returns an error unless these can be the sigmas of a rollout: 2 to MaxSteps+1 values,
// strictly decreasing, at most MaxSigma, the last 0 unless the end is open. It names the first that breaks a rule.
func checkSigmas(sigmas []float32, open bool) error {
	n := len(sigmas)
	if n < 2 || n > MaxSteps+1 {
		return fmt.Errorf("sigmas: %d values; must be 2 to %d", n, MaxSteps+1)
	}
	for i, sigma := range sigmas {
		if !(sigma >= 0 && sigma <= MaxSigma) {
			return fmt.Errorf("sigmas[%d]: %v; must be a number in [0, 1]", i, sigma)
		}
		if i > 0 && sigma >= sigmas[i-1] {
			return fmt.Errorf("sigmas[%d]: %v; must be below the one before it, %v", i, sigma, sigmas[i-1])
		}
	}
	if sigmas[n-1] != 0 && !open {
		return fmt.Errorf("sigmas[%d]: %v; must be 0 at the end", n-1, sigmas[n-1])
	}
	return nil
}

func checkSteps(n int) error {
	if n < 1 || n > MaxSteps {
		return fmt.Errorf("num_inference_steps: %d; must be 1 to %d", n, MaxSteps)
	}
	return nil
}

// linspace returns n points from first to last, both included, with the bits of numpy.linspace; n =
// 1 gives first.
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
