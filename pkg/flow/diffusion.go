package flow

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/portable"
	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// Diffusion is the schedule of a model that predicts epsilon, v or the sample, as the keys of scheduler_config.json say
// it. Its states x = a x0 + b eps are stored as those of a flow, y = x/(a+b), whose sigma is b/(a+b): DDIM without
// noise, and Euler over the sigmas b/a, are Euler steps of y with the velocity eps - x0.
//
// A step leads from one timestep of the grid to the next. DDIM of diffusers leads to t - 1000/T instead, which is
// another timestep with trailing or linspace where T does not divide 1000.
type Diffusion struct {
	Class             string          `json:"_class_name"`
	NumTrainTimesteps int             `json:"num_train_timesteps"`
	BetaStart         float64         `json:"beta_start"`
	BetaEnd           float64         `json:"beta_end"`
	BetaSchedule      string          `json:"beta_schedule"`
	TrainedBetas      json.RawMessage `json:"trained_betas"`
	PredictionType    string          `json:"prediction_type"`
	TimestepSpacing   string          `json:"timestep_spacing"`
	StepsOffset       int             `json:"steps_offset"`
	RescaleZeroSNR    bool            `json:"rescale_betas_zero_snr"`
	SNRShiftScale     float64         `json:"snr_shift_scale"` // of CogVideoX
	// SetAlphaToOne ends at the data; false: at the level of the first training timestep. DDPM and Euler have none.
	SetAlphaToOne bool `json:"set_alpha_to_one"`
	ClipSample    bool `json:"clip_sample"`
	Thresholding  bool `json:"thresholding"`

	// Of EulerDiscreteScheduler, and as far as there of DPMSolverMultistepScheduler.
	UseLuLambdas         bool     `json:"use_lu_lambdas"`
	LambdaMinClipped     any      `json:"lambda_min_clipped"`
	UseKarrasSigmas      bool     `json:"use_karras_sigmas"`
	UseExponentialSigmas bool     `json:"use_exponential_sigmas"`
	UseBetaSigmas        bool     `json:"use_beta_sigmas"`
	InterpolationType    string   `json:"interpolation_type"`
	TimestepType         string   `json:"timestep_type"`
	FinalSigmasType      string   `json:"final_sigmas_type"`
	SigmaMin             *float64 `json:"sigma_min"`
	SigmaMax             *float64 `json:"sigma_max"`
}

// Classes of schedulers whose grids a Diffusion computes. Of PNDM it is that of DDIM, which trainers run in its place:
// PNDM itself evaluates one timestep twice. Others have the levels of one of these: see sameGrid.
const (
	classDDIM     = "DDIMScheduler"
	classDDPM     = "DDPMScheduler"
	classPNDM     = "PNDMScheduler"
	classEulerEps = "EulerDiscreteScheduler"
	classCogVideo = "CogVideoXDDIMScheduler"
)

var diffusionClasses = []string{classDDIM, classDDPM, classPNDM, classEulerEps, classDPM, classCogVideo}

// sameGrid are the classes of solvers and samplers whose levels of noise are those of another class.
var sameGrid = map[string]string{
	"EulerAncestralDiscreteScheduler": classEulerEps, "LMSDiscreteScheduler": classEulerEps,
	"KDPM2DiscreteScheduler": classEulerEps, "KDPM2AncestralDiscreteScheduler": classEulerEps,
	classUniPC: classDPM, "DPMSolverSinglestepScheduler": classDPM,
	classDEIS: classDPM, classSA: classDPM, "CogVideoXDPMScheduler": classCogVideo,
}

// Solvers that end at the lowest level of training.
const (
	classDEIS = "DEISMultistepScheduler"
	classSA   = "SASolverScheduler"
)

// gridClass returns the class whose grid that of a scheduler is; empty: none here, or it is a flow's.
func (c solverConfig) gridClass() string {
	class := cmp.Or(sameGrid[c.Class], c.Class)
	flows := class == classDPM && (c.UseFlowSigmas || c.Prediction == flowPrediction)
	if flows || !slices.Contains(diffusionClasses, class) {
		return ""
	}
	return class
}

// Spacings of timesteps, and schedules of betas.
const (
	spacingLeading  = "leading"
	spacingTrailing = "trailing"
	spacingLinspace = "linspace"

	betasLinear = "linear"
	betasScaled = "scaled_linear"
	betasCosine = "squaredcos_cap_v2"
)

// diffusionUnused are the keys of a scheduler_config.json that change no grid.
var diffusionUnused = strictjson.Unused{
	"_diffusers_version": "who wrote the file", "_name_or_path": "where it was",
	"_use_default_values":        "which settings the writer left out",
	"clip_sample_range":          "of clip_sample, which must be false",
	"sample_max_value":           "of thresholding, which must be false",
	"dynamic_thresholding_ratio": "of thresholding, which must be false",
	"skip_prk_steps":             "of the steps of PNDM, which DDIM takes the place of",
	"variance_type":              "of the noise of DDPM: a prompt chooses the transition",
	"solver_order":               ofSolvers, "solver_type": ofSolvers, "solver_p": ofSolvers,
	"algorithm_type": ofSolvers, "predict_x0": ofSolvers, "lower_order_final": ofSolvers,
	"disable_corrector": ofSolvers, "euler_at_final": ofSolvers, "predictor_order": ofSolvers,
	"corrector_order": ofSolvers, "tau_func": ofSolvers, "use_flow_sigmas": "false here", "flow_shift": "of flows",
	"use_dynamic_shifting": "of flows", "time_shift_type": "of flows", "shift_terminal": "of flows",
}

const ofSolvers = "of a solver of diffusers: a prompt chooses the transition"

// readsIn says which classes read a key of their own. Others accept any value: files keep keys of former classes.
var readsIn = map[string][]string{
	"clip_sample": {classDDIM, classDDPM}, "thresholding": {classDDIM, classDDPM, classDPM},
	"rescale_betas_zero_snr": {classDDIM, classDDPM, classEulerEps, classDPM, classCogVideo},
	"set_alpha_to_one":       {classDDIM, classPNDM, classCogVideo},
}

func (d *Diffusion) reads(key string) bool { return slices.Contains(readsIn[key], d.Class) }

// parseDiffusion reads a scheduler_config.json of one of its classes. Missing keys have the defaults of the class.
func parseDiffusion(config []byte, class string) (*Diffusion, error) {
	d := &Diffusion{
		NumTrainTimesteps: trainTimesteps, BetaStart: 1e-4, BetaEnd: 0.02, BetaSchedule: betasLinear,
		PredictionType: "epsilon", TimestepSpacing: spacingLeading, InterpolationType: "linear",
		TimestepType: "discrete", FinalSigmasType: "zero", SetAlphaToOne: true,
		ClipSample: class == classDDIM || class == classDDPM,
	}
	switch class {
	case classEulerEps, classDPM:
		d.TimestepSpacing = spacingLinspace
	case classPNDM:
		d.SetAlphaToOne = false
	case classCogVideo:
		d.BetaStart, d.BetaEnd, d.BetaSchedule, d.SNRShiftScale = 0.00085, 0.012, betasScaled, 3
	}
	err := strictjson.Unmarshal(config, diffusionUnused, d)
	if d.Class == classDEIS || d.Class == classSA {
		d.FinalSigmasType = "sigma_min"
	}
	d.Class = class
	return d, err
}

// validate joins all faults; each names the key of scheduler_config.json.
func (d *Diffusion) validate() error {
	var faults []error
	check := func(ok bool, key string, value any, rule string) {
		if !ok {
			faults = append(faults, fmt.Errorf("%s: %v; must be %s", key, value, rule))
		}
	}
	oneOf := func(key, value string, names ...string) {
		check(slices.Contains(names, value), key, fmt.Sprintf("%q", value), strings.Join(names, " or "))
	}
	if d.Class == classCogVideo {
		oneOf("beta_schedule", d.BetaSchedule, betasScaled)
		check(positive(d.SNRShiftScale), "snr_shift_scale", d.SNRShiftScale, "a finite number above 0")
	} else {
		oneOf("beta_schedule", d.BetaSchedule, betasLinear, betasScaled, betasCosine)
	}
	oneOf("prediction_type", d.PredictionType, "epsilon", "v_prediction", "sample")
	oneOf("timestep_spacing", d.TimestepSpacing, spacingLeading, spacingTrailing, spacingLinspace)
	check(d.NumTrainTimesteps >= 2 && d.NumTrainTimesteps <= MaxSteps, "num_train_timesteps", d.NumTrainTimesteps,
		"2 to 1000")
	check(d.BetaStart > 0 && d.BetaStart <= d.BetaEnd && d.BetaEnd < 1, "beta_start, beta_end",
		fmt.Sprint(d.BetaStart, ", ", d.BetaEnd), "above 0, ascending and below 1")
	check(d.StepsOffset >= 0 && d.StepsOffset < max(d.NumTrainTimesteps, 1), "steps_offset", d.StepsOffset,
		"at least 0 and below num_train_timesteps")
	check(len(d.TrainedBetas) == 0 || string(d.TrainedBetas) == "null", "trained_betas", "given",
		"null (not supported)")
	for key, on := range map[string]bool{"clip_sample": d.ClipSample, "thresholding": d.Thresholding} {
		check(!on || !d.reads(key), key, on, "false: the network's estimate of the data must stay as it is")
	}
	check(!d.zeroSNR() || d.PredictionType != "epsilon", "rescale_betas_zero_snr", true,
		"false with prediction_type epsilon: the last timestep has no data")
	if !d.bySigmas() {
		return errors.Join(faults...)
	}
	check(!d.UseLuLambdas, "use_lu_lambdas", true, "false (not supported)")
	none := fmt.Sprint(d.LambdaMinClipped)
	check(d.LambdaMinClipped == nil || none == "-Infinity" || none == "-inf", "lambda_min_clipped", none, "-Infinity")
	oneOf("interpolation_type", d.InterpolationType, "linear")
	oneOf("timestep_type", d.TimestepType, "discrete")
	oneOf("final_sigmas_type", d.FinalSigmasType, "zero", "sigma_min")
	check(!d.UseExponentialSigmas, "use_exponential_sigmas", true, "false (not supported)")
	check(!d.UseBetaSigmas, "use_beta_sigmas", true, "false (not supported)")
	for key, bound := range map[string]*float64{"sigma_min": d.SigmaMin, "sigma_max": d.SigmaMax} {
		check(bound == nil || positive(*bound), key, bound, "null or a finite number above 0")
	}
	return errors.Join(faults...)
}

// bySigmas says whether the scheduler has a table of sigmas b/a.
func (d *Diffusion) bySigmas() bool { return d.Class == classEulerEps || d.Class == classDPM }

func (d *Diffusion) zeroSNR() bool { return d.RescaleZeroSNR && d.reads("rescale_betas_zero_snr") }

// levels returns the shares of the data's variance [N]. Those of CogVideoX are float64, shifted by a factor of the
// signal-to-noise ratio.
func (d *Diffusion) levels() []float64 {
	var out []float64
	if d.Class != classCogVideo {
		for _, v := range d.alphasCumprod() {
			out = append(out, float64(v))
		}
		return out
	}
	abar := 1.0
	for _, root := range linspace(math.Sqrt(d.BetaStart), math.Sqrt(d.BetaEnd), d.NumTrainTimesteps) {
		abar = float64(abar * (1 - float64(root*root)))
		out = append(out, abar/(d.SNRShiftScale+float64((1-d.SNRShiftScale)*abar)))
	}
	if first, last := math.Sqrt(out[0]), math.Sqrt(out[len(out)-1]); d.zeroSNR() {
		for i, v := range out {
			root := float64((math.Sqrt(v) - last) * (first / (first - last)))
			out[i] = float64(root * root)
		}
	}
	return out
}

// alphasCumprod returns the levels of all but CogVideoX, with the bits of diffusers: elements are float32, and products
// are kept in float64.
func (d *Diffusion) alphasCumprod() []float32 {
	n := d.NumTrainTimesteps
	var betas []float64
	switch d.BetaSchedule {
	case betasLinear:
		betas = torchLinspace(float32(d.BetaStart), float32(d.BetaEnd), n)
	case betasScaled:
		betas = torchLinspace(float32(math.Sqrt(d.BetaStart)), float32(math.Sqrt(d.BetaEnd)), n)
		for i, root := range betas {
			betas[i] = float64(float32(root * root)) // exact before it is rounded
		}
	default:
		bar := func(i int) float64 {
			_, cos := portable.SincosQuarter((float64(i)/float64(n) + 0.008) / 1.008)
			return float64(cos * cos)
		}
		for i := range n {
			betas = append(betas, float64(float32(min(1-bar(i+1)/bar(i), 0.999))))
		}
	}
	alphas := make([]float32, n)
	for i, beta := range betas {
		alphas[i] = 1 - float32(beta)
	}
	abar := cumprod(alphas)
	if !d.zeroSNR() {
		return abar
	}
	roots := make([]float32, n)
	for i, v := range abar {
		roots[i] = float32(math.Sqrt(float64(v)))
	}
	first, last := roots[0], roots[n-1]
	scale := first / (first - last)
	before := float32(1)
	for i := range roots {
		root := float32((roots[i] - last) * scale)
		square := float32(root * root)
		alphas[i] = 1 - float32(1-square/before) // by way of betas
		before = square
	}
	abar = cumprod(alphas)
	if d.bySigmas() {
		abar[n-1] = 0x1p-24 // diffusers keeps sigma finite
	}
	return abar
}

func cumprod(list []float32) []float32 {
	out, product := make([]float32, len(list)), 1.0
	for i, v := range list {
		product = float64(product * float64(v))
		out[i] = float32(product)
	}
	return out
}

// timesteps returns those of T steps, falling. They are whole numbers but for Euler with linspace.
func (d *Diffusion) timesteps(steps int) ([]float64, error) {
	n := d.NumTrainTimesteps
	if steps > n {
		return nil, fmt.Errorf("num_inference_steps: %d; must be at most num_train_timesteps, %d", steps, n)
	}
	t := make([]float64, steps)
	parts, after := steps, 0 // a solver leads from the last timestep to one more
	if d.Class == classDPM {
		parts, after = steps+1, 1
	}
	switch d.TimestepSpacing {
	case spacingLinspace:
		t = linspace(0, float64(n-1), parts)[after:]
		slices.Reverse(t)
	case spacingLeading:
		for i := range t {
			t[i] = float64((parts-1-i)*(n/parts) + d.StepsOffset)
		}
		if t[0] > float64(n-1) {
			return nil, fmt.Errorf("num_inference_steps: %d; must be fewer: with steps_offset %d the first timestep "+
				"is %g, the last of training is %d", steps, d.StepsOffset, t[0], n-1)
		}
	default:
		ratio := float64(n) - (float64(n) - float64(n)/float64(steps)) // as numpy.arange finds it
		for i := range t {
			t[i] = math.RoundToEven(float64(n)-float64(float64(i)*ratio)) - 1
		}
	}
	for i := range t {
		if d.TimestepSpacing == spacingLinspace && d.Class != classEulerEps {
			t[i] = math.RoundToEven(t[i])
		}
		t[i] = float64(float32(t[i]))
	}
	return t, nil
}

// grid returns the sigmas [T+1] of y and the timesteps [T] of the network.
func (d *Diffusion) grid(steps int) (sigmas, timesteps []float32, err error) {
	t, err := d.timesteps(steps)
	if err != nil {
		return nil, nil, err
	}
	if d.bySigmas() {
		sigmas, t = d.eulerGrid(d.alphasCumprod(), t)
	} else {
		abar := d.levels()
		level := func(abar float64) float32 {
			b := math.Sqrt(1 - abar)
			return float32(b / (math.Sqrt(abar) + b))
		}
		for _, at := range t {
			sigmas = append(sigmas, level(abar[int(at)]))
		}
		last := float32(0)
		if !d.SetAlphaToOne && d.reads("set_alpha_to_one") {
			last = level(abar[0])
		}
		sigmas = append(sigmas, last)
	}
	if n := len(sigmas) - 1; sigmas[n] == sigmas[n-1] {
		return nil, nil, errors.New("set_alpha_to_one, final_sigmas_type: the last step begins at timestep 0 and " +
			"ends there; must be true or zero, or steps_offset above 0")
	}
	return sigmas, float32s(t), checkSigmas(sigmas, true)
}

// eulerGrid returns the sigmas of y and the timesteps of schedulers whose own sigmas are b/a. With
// use_karras_sigmas the timesteps are between those of training, by the logarithms of float32 sigmas, which numpy
// rounds in another way: to 1e-3 of a timestep.
func (d *Diffusion) eulerGrid(abar []float32, t []float64) (sigmas []float32, timesteps []float64) {
	table := make([]float64, len(abar))
	for i, v := range abar {
		table[i] = float64(float32(math.Sqrt(float64((1 - v) / v))))
	}
	grid := make([]float64, len(t))
	for i, at := range t {
		low := int(at)
		grid[i] = table[low]
		if share := at - float64(low); share > 0 {
			grid[i] += float64((table[low+1] - table[low]) * share)
		}
	}
	if d.UseKarrasSigmas {
		high, low := grid[0], grid[len(grid)-1]
		if d.Class == classDPM {
			high, low = table[len(table)-1], table[0]
		}
		grid = d.karras(high, low, len(grid))
		for i, sigma := range grid {
			if t[i] = timestepOf(table, sigma); d.Class == classDPM {
				t[i] = math.RoundToEven(t[i])
			}
		}
	}
	last := 0.0
	if d.FinalSigmasType == "sigma_min" {
		last = table[0]
	}
	for _, sigma := range append(grid, last) {
		sigma = float64(float32(sigma))
		sigmas = append(sigmas, float32(sigma/(1+sigma)))
	}
	return sigmas, t
}

// karras returns n sigmas from high to low, or between the bounds of the config, whose seventh roots are evenly spaced
// (Karras et al. 2022, equation 5).
func (d *Diffusion) karras(high, low float64, n int) []float64 {
	if d.SigmaMax != nil {
		high = *d.SigmaMax
	}
	if d.SigmaMin != nil {
		low = *d.SigmaMin
	}
	root := func(x float64) float64 { return portable.Exp(portable.Ln(x) / 7) }
	first, last := root(high), root(low)
	out := make([]float64, n)
	for i, share := range linspace(0, 1, n) {
		r := first + float64(share*(last-first))
		cube := float64(float64(r*r) * r)
		out[i] = float64(float64(cube*cube) * r)
	}
	return out
}

// timestepOf returns the timestep of a sigma by the logarithms of the ascending table.
func timestepOf(table []float64, sigma float64) float64 {
	log := func(x float64) float64 { return float64(float32(portable.Ln(x))) }
	at := portable.Ln(sigma)
	low := 0
	for i := range table[:len(table)-1] {
		if log(table[i]) <= at {
			low = i
		}
	}
	below, above := log(table[low]), log(table[low+1])
	w := min(max((below-at)/(below-above), 0), 1)
	return float64((1-w)*float64(low)) + float64(w*float64(low+1))
}

// initialStd is the standard deviation of y at the first sigma, where x is drawn as a pipeline draws its latents.
func (d *Diffusion) initialStd(sigma float32) float64 {
	s := float64(sigma)
	if d.Class == classEulerEps && d.TimestepSpacing != spacingLeading {
		return s // latents times the first sigma, as x/(1+sigma)
	}
	return math.Sqrt(float64((1-s)*(1-s)) + float64(s*s))
}
