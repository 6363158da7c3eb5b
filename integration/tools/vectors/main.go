// Vectors writes the certification vectors of schemas/vectors that the Go packages compute: schedules, transitions,
// noise, guidance, advantages and log-probs of tokens. Those of losses are written by deploy/golden/make_losses.py. It
// takes the folder to write into:
//
//	go generate ./integration/tools/vectors
//
// Its output depends on nothing but the sources. The numbers are those of the pipeline; the Python client computes them
// a second time, in its tests.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/decoding"
)

//go:generate go run . ../../../schemas/vectors

func main() {
	files, err := Files()
	for name, data := range files {
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Args[1], name), data, 0o644)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "vectors:", err)
		os.Exit(1)
	}
}

// file is one file of vectors; schemas/vectors/README.md says what its fields mean.
type file struct {
	Kind  string `json:"kind"`
	About string `json:"about"`
	Sets  []set  `json:"sets"`
}

type set struct {
	Name      string             `json:"name"`
	Formula   string             `json:"formula"`
	Source    string             `json:"source"`
	Returns   string             `json:"returns"`
	Inputs    map[string]input   `json:"inputs"`
	Tolerance map[string]float64 `json:"tolerance"`
	Cases     []example          `json:"cases"`
}

type input struct {
	Shape   string   `json:"shape,omitempty"`
	Neutral *float64 `json:"neutral,omitempty"`
	Choices []string `json:"choices,omitempty"`
}

type example struct {
	Inputs   values `json:"inputs"`
	Expected values `json:"expected"`
}

type values map[string]any

// Files returns the files by name.
func Files() (map[string][]byte, error) {
	out := map[string][]byte{}
	for kind, make := range map[string]func() ([]set, error){
		"schedules": schedules, "transitions": transitions, "noise": noise, "guidance": guidance,
		"advantages": advantages, "tokens": tokens,
	} {
		sets, err := make()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", kind, err)
		}
		if out[kind+".json"], err = written(file{kind, "written by integration/tools/vectors", sets}); err != nil {
			return nil, fmt.Errorf("%s: %w", kind, err)
		}
	}
	return out, nil
}

// written is the file with one case a line.
func written(f file) ([]byte, error) {
	var b bytes.Buffer
	sets := f.Sets
	f.Sets = nil
	head, err := json.Marshal(f)
	fmt.Fprintf(&b, "%s[", strings.TrimSuffix(string(head), "null}"))
	for i, s := range sets {
		cases := s.Cases
		s.Cases = nil
		if head, err = marshal(s, err); err == nil {
			fmt.Fprintf(&b, "%s\n%s[\n", comma(i), strings.TrimSuffix(string(head), "null}"))
		}
		for j, c := range cases {
			if head, err = marshal(c, err); err == nil {
				b.WriteString(comma(j))
				if j > 0 {
					b.WriteByte('\n')
				}
				b.Write(head)
			}
		}
		b.WriteString("\n]}")
	}
	b.WriteString("\n]}\n")
	return b.Bytes(), err
}

func marshal(v any, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err = e.Encode(v)
	return bytes.TrimSpace(b.Bytes()), err
}

func comma(i int) string {
	if i == 0 {
		return ""
	}
	return ","
}

// exact is x as float64: JSON then has all its bits.
func exact(x []float32) []float64 {
	out := make([]float64, len(x))
	for i, v := range x {
		out[i] = float64(v)
	}
	return out
}

// draw returns n normals with ten bits behind the point, which every dtype but bfloat16 holds.
func draw(seed uint64, n int) []float32 {
	x := make([]float32, n)
	flow.InitialNoise(x, seed)
	for i := range x {
		x[i] = float32(math.Round(float64(x[i])*1024) / 1024)
	}
	return x
}

func shapes(of map[string]string) map[string]input {
	out := map[string]input{}
	for name, shape := range of {
		if rest, is := strings.CutPrefix(shape, "one of "); is {
			out[name] = input{Choices: strings.Split(rest, " ")}
			continue
		}
		out[name] = input{Shape: shape}
	}
	return out
}

func schedules() ([]set, error) {
	static := set{
		Name: "static",
		Formula: "sigma = s u / (1 + (s - 1) u), s = shift, then 0. u: linspace, T points from 1 to 1/T; " +
			"scheduler, T " +
			"points from 1 to the shifted 1/1000",
		Source: "FlowMatchEulerDiscreteScheduler of diffusers 0.42, as Stable Diffusion 3 (scheduler) and FLUX " +
			"(linspace) use it",
		Inputs:    shapes(map[string]string{"steps": "count", "shift": "[]", "grid": "one of linspace scheduler"}),
		Returns:   "sigmas",
		Tolerance: map[string]float64{"float64": 2e-7, "float32": 2e-7},
	}
	dynamic := set{
		Name: "dynamic",
		Formula: "sigma = s u / (1 + (s - 1) u), u = linspace(1, 1/T, T), mu = the line of tokens through " +
			"(base_tokens, base_shift) and (max_tokens, max_shift), s = e^mu (exponential) or mu (linear); then " +
			"sigma = " +
			"1 - (1 - sigma) (1 - terminal) / (1 - the last) where terminal is not 0; then 0",
		Source: "FlowMatchEulerDiscreteScheduler and calculate_shift of diffusers 0.42, as FLUX and Qwen-Image use it",
		Inputs: shapes(map[string]string{
			"steps": "count", "tokens": "count", "base_tokens": "count", "max_tokens": "count",
			"base_shift": "[]", "max_shift": "[]",
			"terminal": "[]", "time_shift": "one of exponential linear",
		}), Returns: "sigmas", Tolerance: map[string]float64{"float64": 2e-7, "float32": 2e-7},
	}
	zero := 0.0
	dynamic.Inputs["terminal"] = input{Shape: "[]", Neutral: &zero}
	for i, steps := range []int{4, 10, 28, 7} {
		s := flow.Schedule{NumTrainTimesteps: 1000, Shift: []float64{3, 1.15, 5, 1}[i], TimeShiftType: "exponential"}
		s.Grid = []flow.Grid{flow.GridLinspace, flow.GridScheduler}[i%2]
		s.BaseShift, s.MaxShift, s.BaseImageSeqLen, s.MaxImageSeqLen = 0.5, 1.15, 256, 4096
		sigmas, err := s.Sigmas(steps, 0)
		if err != nil {
			return nil, err
		}
		static.Cases = append(static.Cases, schedule(values{"steps": steps, "shift": s.Shift, "grid": s.Grid}, sigmas))

		tokens, terminal := []int{256, 1024, 4096, 900}[i], []float64{0, 0.02, 0.02, 0}[i]
		s.Grid, s.UseDynamicShifting, s.Shift = flow.GridLinspace, true, 1
		s.TimeShiftType = []string{"exponential", "exponential", "linear", "linear"}[i]
		if terminal != 0 {
			s.MaxShift, s.MaxImageSeqLen, s.ShiftTerminal = 0.9, 8192, &terminal
		}
		if sigmas, err = s.Sigmas(steps, tokens); err != nil {
			return nil, err
		}
		dynamic.Cases = append(dynamic.Cases, schedule(values{
			"steps": steps, "tokens": tokens, "base_shift": s.BaseShift, "max_shift": s.MaxShift, "terminal": terminal,
			"base_tokens": s.BaseImageSeqLen, "max_tokens": s.MaxImageSeqLen, "time_shift": s.TimeShiftType,
		}, sigmas))
	}
	return []set{static, dynamic}, nil
}

func schedule(inputs values, sigmas []float32) example {
	timesteps := make([]float64, len(sigmas)-1)
	for i := range timesteps {
		timesteps[i] = float64(flow.Timestep(sigmas[i]))
	}
	return example{inputs, values{"sigmas": exact(sigmas), "timesteps": timesteps}}
}

// transitionSets have the formula of noise and mean, with a = noise_level, s = sigmas[i], s' = sigmas[i+1], d = s' - s.
var transitionSets = []struct {
	of              flow.Transition
	formula, source string
}{
	{
		flow.SDE, "g = a sqrt(s / (1 - s)), of s = 1 with sigmas[1] in the denominator; n = g sqrt(-d), m = x + d " +
			"v + " +
			"d g^2 / (2 s) (x + (1 - s) v)", "Flow-GRPO, arXiv 2505.05470, eq. 9 and sd3_sde_with_logprob.py",
	},
	{
		flow.DanceSDE, "g = a, n = a sqrt(-d), m = x + d v + d g^2 / (2 s) (x + (1 - s) v)",
		"DanceGRPO, arXiv 2505.07818",
	},
	{
		flow.CPS, "n = g = s' sin(a pi/2), m = (1 - s') (x - s v) + sqrt(s'^2 - n^2) (x + (1 - s) v)",
		"coefficients-preserving sampling, arXiv 2509.05952",
	},
	{
		flow.DDIM, "n = g = a s' sqrt(1 - r^2), r = s' (1 - s) / (s (1 - s')), m = (1 - s') (x - s v) + sqrt(s'^2 " +
			"- n^2) " +
			"(x + (1 - s) v)", "DDIM with eta = a, arXiv 2010.02502, eq. 16; DDPO, arXiv 2305.13301",
	},
}

const logProbs = "; log_prob = -(next - m)^2 / (2 n^2) - ln n - ln(2 pi)/2 (density), without the logarithms " +
	"(scaled), " +
	"-(next - m)^2 (squared); reduced over all elements"

func transitions() ([]set, error) {
	sigmas := []float32{1, 0.9375, 0.78125, 0.5625, 0.3125, 0.125, 0}
	kinds, reduces := []flow.LogProbKind{flow.Density, flow.Scaled, flow.Squared}, []string{"mean", "sum"}
	var out []set
	for t, of := range transitionSets {
		s := set{
			Name: string(of.of), Formula: of.formula + logProbs, Source: of.source, Returns: "log_prob",
			Inputs: shapes(map[string]string{
				"x": "[N]", "v": "[N]", "next": "[N]", "sigmas": "[S]", "step": "index of sigmas", "noise_level": "[]",
				"log_prob_kind": "one of density scaled squared", "reduce": "one of mean sum",
			}),
			// Coefficients are float32 numbers, and so is the mean that is scored: 6e-8 of 3, over a noise of 0.1.
			Tolerance: map[string]float64{"float64": 1e-5, "float32": 1e-5, "bfloat16": 0.3},
		}
		for i := range 6 {
			step, level := []int{0, 1, 2, 3, 4, 2}[i], []float64{0.7, 0.5, 0.9, 0.7, 0.3, 1}[i]
			k, err := flow.NewStepTransition(of.of, level, sigmas, step)
			if err != nil {
				return nil, err
			}
			n := []int{12, 20, 35, 14, 22, 12}[i]
			x, v, eps := draw(uint64(100*t+3*i), n), draw(uint64(100*t+3*i+1), n), draw(uint64(100*t+3*i+2), n)
			next, mean := make([]float32, n), make([]float32, n)
			if err := k.Draw(next, mean, x, v, eps, "F32"); err != nil {
				return nil, err
			}
			lp, err := k.LogProb(kinds[i%3], x, v, next)
			if err != nil {
				return nil, err
			}
			value := []float64{lp.Mean, lp.Sum}[i/3]
			s.Cases = append(s.Cases, example{
				values{
					"x": exact(x), "v": exact(v), "next": exact(next), "sigmas": exact(sigmas), "step": step,
					"noise_level":   level,
					"log_prob_kind": kinds[i%3], "reduce": reduces[i/3],
				},
				values{"log_prob": value, "mean": exact(mean), "noise_std": k.NoiseStd, "std_dev_t": k.StdDevT},
			})
		}
		out = append(out, s)
	}
	return append(out, set{
		Name: "ode", Formula: "m = x + d v, no noise and no log-prob", Source: "Euler's step of a flow",
		Returns:   "mean",
		Inputs:    shapes(map[string]string{"x": "[N]", "v": "[N]", "sigmas": "[S]", "step": "index of sigmas"}),
		Tolerance: map[string]float64{"float64": 1e-6, "float32": 1e-6, "bfloat16": 0.05},
		Cases:     []example{euler(sigmas, 0), euler(sigmas, 3), euler(sigmas, 5)},
	}), nil
}

func euler(sigmas []float32, step int) example {
	x, v := draw(uint64(900+step), 12), draw(uint64(950+step), 12)
	mean := make([]float64, len(x))
	for i := range x {
		mean[i] = float64(x[i]) + float64(sigmas[step+1]-sigmas[step])*float64(v[i])
	}
	return example{values{"x": exact(x), "v": exact(v), "sigmas": exact(sigmas), "step": step}, values{"mean": mean}}
}

func noise() ([]set, error) {
	s := set{
		Name: "philox", Formula: "Philox4x32-10 of the counter (element / 4, step, stream, 0) under the seed, Box " +
			"and Muller; " +
			"step 4294967295 is x_T", Source: "schemas/noise.md, which fixes every bit; Salmon et al. 2011",
		Returns: "normals",
		Inputs:  shapes(map[string]string{"seed": "index", "step": "index", "count": "count"}),
		// Every bit is fixed.
		Tolerance: map[string]float64{"float64": 0, "float32": 0},
	}
	for i, seed := range []uint64{0, 42, 1<<63 + 12345} {
		for _, step := range []uint32{0, 7, flow.InitialStep} {
			x := make([]float32, 5+3*i)
			flow.Normal(x, seed, step, flow.StreamLatents)
			s.Cases = append(s.Cases, example{
				values{"seed": seed, "step": step, "count": len(x)},
				values{"normals": exact(x)},
			})
		}
	}
	return []set{s}, nil
}

func guidance() ([]set, error) {
	const comb = "c = negative + scale (positive - negative); "
	sets := []set{
		{Name: "plain", Formula: comb + "c", Source: "arXiv 2207.12598; StableDiffusion3Pipeline of diffusers"},
		{
			Name: "norm_of_tokens", Formula: comb + "c |positive| / |c|, norms over the channels of each token",
			Source: "QwenImagePipeline of diffusers",
		},
		{
			Name: "norm_clamped", Formula: comb + "c min(1, |positive| / |c|), norms over all elements",
			Source: "cfg_normalization of ZImagePipeline of diffusers",
		},
		{
			Name: "deviation", Formula: comb + "c (phi std(positive) / std(c) + 1 - phi)",
			Source: "rescale_noise_cfg of diffusers; arXiv 2305.08891, eq. 15 and 16",
		},
	}
	for g := range sets {
		s := &sets[g]
		s.Inputs, s.Returns = shapes(map[string]string{"positive": "[N,C]", "negative": "[N,C]", "scale": "[]"}),
			"velocity"
		s.Tolerance = map[string]float64{"float64": 1e-6, "float32": 1e-6, "bfloat16": 0.1}
		if s.Name == "deviation" {
			s.Inputs["phi"] = input{Shape: "[]"}
		}
		for i, scale := range []float64{1.5, 4, 7.5, 0.5} {
			n, channels := 3+i, 4
			p, q := draw(uint64(2000+10*g+i), n*channels), draw(uint64(3000+10*g+i), n*channels)
			dst, err, phi := make([]float32, len(p)), error(nil), 0.25*float64(i+1)
			in := values{"positive": rows(p, channels), "negative": rows(q, channels), "scale": scale}
			switch g {
			case 0, 3:
				err = flow.GuidePlain(dst, p, q, scale)
			case 1:
				err = flow.Guide(dst, p, q, scale, channels)
			case 2:
				err = flow.GuideClamped(dst, p, q, scale)
			}
			if g == 3 {
				flow.RescaleDeviation(dst, flow.Deviation(p), phi)
				in["phi"] = phi
			}
			if err != nil {
				return nil, err
			}
			s.Cases = append(s.Cases, example{in, values{"velocity": rows(dst, channels)}})
		}
	}
	return sets, nil
}

// rows is x as [len(x)/channels][channels].
func rows(x []float32, channels int) [][]float64 {
	var out [][]float64
	for ; len(x) > 0; x = x[channels:] {
		out = append(out, exact(x[:channels]))
	}
	return out
}

func advantages() ([]set, error) {
	about := map[string][2]string{
		estimator.FlowGRPO: {
			"(r - mean of the group) / (std + epsilon); std of the group, of the batch, or none (then the divisor " +
				"is 1); " +
				"over n - ddof", "Flow-GRPO, arXiv 2505.05470, eq. 3; GRPO, arXiv 2402.03300; without std Dr. " +
				"GRPO, arXiv 2503.20783",
		},
		estimator.RLOO: {"r - mean of the others of the group", "RLOO, arXiv 2402.14740"},
		estimator.GPG: {
			"(r - mean of the group) times the share of all rewards over those that are not 0",
			"GPG, arXiv 2504.02546",
		},
	}
	var out []set
	for _, name := range []string{estimator.FlowGRPO, estimator.RLOO, estimator.GPG} {
		s := set{
			Name: name, Formula: about[name][0], Source: about[name][1], Returns: "advantages",
			Inputs: shapes(map[string]string{"rewards": "[G,n]"}), Tolerance: map[string]float64{
				"float64": 1e-9,
				"float32": 1e-4, "bfloat16": 0.1,
			},
		}
		if name == estimator.FlowGRPO {
			s.Inputs = shapes(map[string]string{
				"rewards": "[G,n]", "std": "one of group batch none",
				"ddof": "one of 0 1", "epsilon": "[]",
			})
		}
		for i := range 6 {
			cfg, err := estimator.Default(name)
			if err != nil {
				return nil, err
			}
			n := 4 + i
			rewards := rows(draw(uint64(4000+i), 3*n), n)
			if i == 2 {
				rewards[0][1], rewards[2][3] = 0, 0
			}
			in := values{"rewards": rewards}
			if name == estimator.FlowGRPO {
				cfg.Std, cfg.Epsilon = []string{"group", "global", "none"}[i%3], []float64{1e-4, 1e-6}[i/3]
				cfg.StdBasis = []string{"sample", "population"}[i/3]
				in["std"], in["epsilon"], in["ddof"] = []string{"group", "batch", "none"}[i%3], cfg.Epsilon,
					[]string{"1", "0"}[i/3]
			}
			groups := make([]estimator.Rewards, len(rewards))
			for g := range groups {
				groups[g].Values = rewards[g]
			}
			got, err := estimator.Estimate(cfg, groups)
			if err != nil {
				return nil, err
			}
			want := make([][]float64, len(got))
			for g := range got {
				want[g] = got[g].Advantages
			}
			s.Cases = append(s.Cases, example{in, values{"advantages": want}})
		}
		out = append(out, s)
	}
	return out, nil
}

func tokens() ([]set, error) {
	s := set{
		Name: "log_prob", Formula: "ln softmax(z)[token]: raw, z the logits; scaled, z = logits / temperature; " +
			"processed, of " +
			"the tokens that top_k, then top_p, then min_p keep. top_p keeps the smallest set of likeliest tokens " +
			"with this " +
			"share, min_p those with this share of the likeliest",
		Source:  "schemas/noise.md; raw and processed are vLLM's logprobs_mode, scaled is what SGLang returns",
		Returns: "log_prob",
		Inputs: shapes(map[string]string{
			"logits": "[V]", "token": "index of logits", "temperature": "[]", "top_k": "count", "top_p": "[]",
			"min_p":         "[]",
			"log_prob_kind": "one of raw scaled processed",
		}),
		Tolerance: map[string]float64{"float64": 1e-6, "float32": 1e-5, "bfloat16": 0.1},
	}
	one, zero := 1.0, 0.0
	s.Inputs["top_p"], s.Inputs["min_p"] = input{Shape: "[]", Neutral: &one}, input{Shape: "[]", Neutral: &zero}
	s.Inputs["top_k"] = input{Shape: "count", Neutral: &zero}
	for i := range 9 {
		logits := draw(uint64(5000+i), 17)
		p := decoding.Params{Temperature: []float64{0.7, 1.5, 1}[i/3], TopP: 1}
		kind := []string{"raw", "scaled", "processed"}[i%3]
		switch i {
		case 2:
			p.TopP = 0.8
		case 5:
			p.TopK = 5
		case 8:
			p.MinP, p.TopK = 0.2, 9
		}
		in := values{
			"logits": exact(logits), "temperature": p.Temperature, "top_k": p.TopK, "top_p": p.TopP, "min_p": p.MinP,
			"log_prob_kind": kind,
		}
		var d decoding.Distribution
		if err := d.Reset(logits, p); err != nil {
			return nil, err
		}
		id := decoding.Top(logits, 2)[1]
		value := d.At(id).Processed
		if kind == "raw" {
			value = d.At(id).LogProb
		}
		in["token"] = id
		s.Cases = append(s.Cases, example{in, values{"log_prob": float64(value)}})
	}
	return []set{s}, nil
}
