package command

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
)

// promptFlags are the fields of a Prompt as flags. They fill what a prompt of a file
// leaves out.
type promptFlags struct {
	datasetFlags
	rewardFlags
	advantageFlags
	groupSize     int64
	seed          int64
	steps         int64
	height, width int64
	cfg           float64
	negative      string
	truncate      bool
	sdeType       string
	noiseLevel    float64
	sdeSteps      string
	sdeWindow     string
	returnSteps   string
	logProbKind   string
	solver        string
	dtype         string
	debug         []string
	initialNoise  string
	sigmas        string
	startLatents  string
	startStep     int64
	startSigma    float64
	stopStep      int64
	stopSigma     float64
	stopDecode    bool
	zeroStd       string
	failedGroups  string
	refillRounds  int64
	policySpan    int64
	mixed         bool
	batch         string
	step, epoch   int64
	deadline      time.Duration
	priority      int64
	validate      bool
	unknown       string

	// states are those of --start-latents; nil: none.
	states *states

	set func(name string) bool
	// flagOf names the flag behind each field of a prompt that one set.
	flagOf map[string]string
}

func (p *promptFlags) register(f *pflag.FlagSet) {
	p.set = f.Changed
	section(f, promptSection, p.datasetFlags.register)
	section(f, samplingSection, p.sampling)
	section(f, rewardSection, p.rewardFlags.register)
	section(f, advantageSection, p.advantageFlags.register)
	section(f, groupSection, p.grouping)
}

func (p *promptFlags) sampling(f *pflag.FlagSet) {
	f.Int64VarP(&p.groupSize, "group-size", "n", 8, "samples per prompt")
	f.Int64Var(&p.seed, "seed", 0, "seed of all noise; default: derived from the run id")
	f.Int64Var(&p.steps, "steps", 0, "denoising steps T; default the model's")
	f.Int64Var(&p.height, "height", 0, "picture height in pixels; default the model's")
	f.Int64Var(&p.width, "width", 0, "picture width in pixels; default the model's")
	f.Float64Var(&p.cfg, "true-cfg-scale", 0, "classifier-free guidance scale, active above 1; default the model's")
	f.StringVar(&p.negative, "negative-prompt", "", "what guidance leads away from")
	f.BoolVar(&p.truncate, "truncate-prompt", false, "cut prompts that are too long for the model, as diffusers does, instead of refusing them")
	f.StringVar(&p.sdeType, "sde-type", "sde", "stochastic transition: sde, cps, dance_sde, or ode for none")
	f.Float64Var(&p.noiseLevel, "noise-level", 0.7, "noise level a of stochastic steps")
	f.StringVar(&p.sdeSteps, "sde-steps", "", "steps that are stochastic, e.g. 2,3 or 0-4; none for none; default all")
	f.StringVar(&p.sdeWindow, "sde-window", "", "draw the stochastic steps: SIZE[:LOW-HIGH[:STRATEGY[:SEED]]], HIGH exclusive, STRATEGY random, progressive or noncontiguous; the same for all groups of a batch, SEED default --seed or the run")
	f.StringVar(&p.returnSteps, "return-steps", "", "latents to keep, e.g. 2,3,4; T is the final one; default those around stochastic steps")
	f.StringVar(&p.logProbKind, "log-prob-kind", "density", "density, scaled or squared")
	f.StringVar(&p.solver, "solver", "euler", "solver of ode steps: euler, heun, unipc, dpm or rk4")
	f.StringVar(&p.dtype, "latents-dtype", "F32", "stored latents: F32, F16 or BF16")
	f.StringSliceVar(&p.debug, "debug", nil, "extra tensors per step: noise, mean, std, model_output")
	f.StringVar(&p.initialNoise, "initial-noise", "per_sample", "per_sample, or shared by the group")
	f.StringVar(&p.sigmas, "sigmas", "", "pre-shift sigmas, one per step, e.g. 1,0.75,0.5,0.25")
	f.StringVar(&p.startLatents, "start-latents", "", "states to start with, from a safetensors file, packed [n, S, C] or [1, S, C] for all: what --save-latents wrote, or one tensor")
	f.Int64Var(&p.startStep, "start-step", 0, "first step to run, with those states; the schedule and its noise stay the whole ones")
	f.Float64Var(&p.startSigma, "start-sigma", 0, "the same by the sigma of the step, exactly one of the schedule's")
	f.Int64Var(&p.stopStep, "stop-step", 0, "first step not to run; default all run. What stops with noise in it has no image")
	f.Float64Var(&p.stopSigma, "stop-sigma", 0, "the same by the sigma of the step")
	f.BoolVar(&p.stopDecode, "stop-decode", false, "make an image all the same, noise and all")
	f.Int64Var(&p.priority, "priority", 0, "higher is sampled first")
	f.StringVar(&p.unknown, "unknown-fields", schemas.UnknownRefuse, "fields of a file that no prompt has: refuse, or warn and go on without")
	f.BoolVar(&p.validate, "validate", false, "evaluation: deterministic steps, no log-probs")
}

func (p *promptFlags) grouping(f *pflag.FlagSet) {
	f.IntVar(&p.choice.BatchSize, "batch-size", 0, "join this many prompts, in order, to a batch; the last one may be smaller")
	f.StringVar(&p.batch, "batch-id", "", "join all prompts of the command into one batch of this name; with --batch-size what the names start with")
	f.Int64Var(&p.step, "step", 0, "the trainer's step, for the metrics of the batch; of several batches the first one's, the next has one more")
	f.Int64Var(&p.epoch, "epoch", 0, "the trainer's epoch, for the metrics of the batch")
	f.DurationVar(&p.deadline, "deadline", 0, "close groups with what they have after this long")
	f.StringVar(&p.zeroStd, "zero-std", schemas.GroupKeep, "groups whose rewards are all equal: keep, drop, or refill: drop, and make a fresh group of the prompt")
	f.StringVar(&p.failedGroups, "failed-groups", schemas.GroupKeep, "groups that failed or are stale: keep, or refill")
	f.Int64Var(&p.refillRounds, "refill-rounds", 3, "how often a group is replaced at most")
	f.Int64Var(&p.policySpan, "max-policy-span", 1, "versions of the weights that one group may have")
	f.BoolVar(&p.mixed, "mixed-schedules", false, "accept groups whose samples ran different schedules")
}

// defaults is the map of every flag that was set, but for the batch.
func (p *promptFlags) defaults() (map[string]any, error) {
	var errs []error
	d := map[string]any{"v": int64(schemas.Version)}
	p.flagOf = map[string]string{}
	put := func(flag, key string, v any) {
		if p.set(flag) {
			d[key], p.flagOf[key] = v, flag
		}
	}
	put("group-size", "group_size", p.groupSize)
	put("seed", "seed", p.seed)
	put("steps", "num_inference_steps", p.steps)
	put("height", "height", p.height)
	put("width", "width", p.width)
	put("true-cfg-scale", "true_cfg_scale", p.cfg)
	put("negative-prompt", "negative_prompt", p.negative)
	put("truncate-prompt", "truncate_prompt", p.truncate)
	put("initial-noise", "initial_noise", p.initialNoise)
	put("priority", "priority", p.priority)
	put("validate", "validate", p.validate)
	put("unknown-fields", "unknown_fields", p.unknown)
	if p.set("sigmas") {
		values, err := floats("sigmas", p.sigmas)
		errs = append(errs, err)
		put("sigmas", "sigmas", values)
	}
	if p.deadline != 0 {
		d["deadline"] = time.Now().Add(p.deadline).UnixNano()
	}

	nested := func(under string, flag, key string, v any) {
		if !p.set(flag) {
			return
		}
		m, ok := d[under].(map[string]any)
		if !ok {
			m = map[string]any{}
			d[under] = m
		}
		m[key], p.flagOf[under+"."+key] = v, flag
	}
	nested("rollout", "sde-type", "sde_type", p.sdeType)
	nested("rollout", "noise-level", "noise_level", p.noiseLevel)
	nested("rollout", "log-prob-kind", "log_prob_kind", p.logProbKind)
	nested("rollout", "solver", "solver", p.solver)
	nested("rollout", "latents-dtype", "latents_dtype", p.dtype)
	nested("rollout", "debug", "debug", p.debug)
	if p.set("sde-steps") {
		v, err := indices("sde-steps", p.sdeSteps)
		errs = append(errs, err)
		nested("rollout", "sde-steps", "sde_step_indices", v)
	}
	if p.set("return-steps") {
		v, err := indices("return-steps", p.returnSteps)
		errs = append(errs, err)
		nested("rollout", "return-steps", "return_step_indices", v)
	}
	if p.set("sde-window") {
		w, err := window(p.sdeWindow)
		errs = append(errs, err)
		if _, own := w["seed"]; err == nil && !own && p.set("seed") {
			w["seed"] = p.seed // else equal seeds would not make equal runs
		}
		nested("rollout", "sde-window", "sde_window", w)
	}

	errs = append(errs, p.openStates())
	if p.states != nil {
		nested("start", "start-latents", "latents", noStates)
	}
	nested("start", "start-step", "step_index", p.startStep)
	nested("start", "start-sigma", "sigma", p.startSigma)
	nested("stop", "stop-step", "step_index", p.stopStep)
	nested("stop", "stop-sigma", "sigma", p.stopSigma)
	nested("stop", "stop-decode", "decode", p.stopDecode)
	p.flagOf["start.latents"] = "start-latents"

	specs, err := p.rewards()
	errs = append(errs, err)
	if specs != nil {
		d["reward"] = specs
	}
	for _, o := range p.options() {
		nested("advantage", o.flag, o.key, o.value)
	}
	nested("group_policy", "zero-std", "zero_std", p.zeroStd)
	nested("group_policy", "failed-groups", "failed", p.failedGroups)
	nested("group_policy", "refill-rounds", "refill_rounds", p.refillRounds)
	nested("group_policy", "max-policy-span", "max_policy_span", p.policySpan)
	nested("group_policy", "mixed-schedules", "mixed_schedules", p.mixed)
	return d, errors.Join(errs...)
}

// merge fills what body leaves out, one level deep into maps.
func merge(body, defaults map[string]any) {
	for k, v := range defaults {
		have, ok := body[k]
		if !ok {
			body[k] = v
			continue
		}
		inner, a := have.(map[string]any)
		more, b := v.(map[string]any)
		if a && b {
			merge(inner, more)
		}
	}
}

// indices reads "2,3", "0-4" or "none".
func indices(flag, s string) ([]int64, error) {
	out := []int64{}
	if s == "none" || s == "" {
		return out, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		low, high, ranged := part, part, false
		if i := strings.IndexByte(part[min(1, len(part)):], '-'); i >= 0 {
			low, high, ranged = part[:i+1], part[i+2:], true
		}
		a, err1 := strconv.ParseInt(low, 10, 64)
		b, err2 := strconv.ParseInt(high, 10, 64)
		if err1 != nil || err2 != nil || ranged && (b < a || b-a > schemas.MaxSteps) {
			return nil, fmt.Errorf("--%s: %q; must be step numbers such as 2,3 or 0-4, or none", flag, s)
		}
		for i := a; i <= b; i++ {
			out = append(out, i)
		}
	}
	return out, nil
}

func floats(flag, s string) ([]float64, error) {
	var out []float64
	for part := range strings.SplitSeq(s, ",") {
		v, err := strconv.ParseFloat(strings.TrimSpace(part), 64)
		if err != nil {
			return nil, fmt.Errorf("--%s: %q is not a number", flag, part)
		}
		out = append(out, v)
	}
	return out, nil
}

// window reads SIZE[:LOW-HIGH[:STRATEGY[:SEED]]]; parts in the middle may be empty.
func window(s string) (map[string]any, error) {
	bad := fmt.Errorf("--sde-window: %q; must be SIZE[:LOW-HIGH[:STRATEGY[:SEED]]], e.g. 2:0-5:random:7", s)
	parts := strings.Split(s, ":")
	size, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil || len(parts) > 4 {
		return nil, bad
	}
	w := map[string]any{"size": size}
	if len(parts) > 1 && parts[1] != "" {
		low, high, ok := strings.Cut(parts[1], "-")
		a, err1 := strconv.ParseInt(low, 10, 64)
		b, err2 := strconv.ParseInt(high, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			return nil, bad
		}
		w["range"] = []int64{a, b}
	}
	if len(parts) > 2 && parts[2] != "" {
		w["strategy"] = parts[2]
	}
	if len(parts) > 3 {
		seed, err := strconv.ParseInt(parts[3], 10, 64)
		if err != nil || seed < 0 {
			return nil, bad
		}
		w["seed"] = seed
	}
	return w, nil
}
