package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

// promptFlags are the fields of a Prompt as flags. They fill what a prompt of a
// JSONL file leaves out.
type promptFlags struct {
	file          string
	groupSize     int64
	seed          int64
	steps         int64
	height, width int64
	cfg           float64
	negative      string
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
	latents       string
	reward        []string
	groundTruth   string
	estimator     string
	std           string
	stdBasis      string
	epsilon       float64
	batch         string
	deadline      time.Duration
	priority      int64
	validate      bool

	set func(name string) bool
}

func (p *promptFlags) register(f *pflag.FlagSet) {
	p.set = f.Changed
	f.StringVarP(&p.file, "prompts", "f", "", "prompts from a file: one per line, or one JSON object per line (.jsonl); - is stdin")
	f.Int64VarP(&p.groupSize, "group-size", "n", 8, "samples per prompt")
	f.Int64Var(&p.seed, "seed", 0, "seed of all noise; default: derived from the run id")
	f.Int64Var(&p.steps, "steps", 0, "denoising steps T; default the model's")
	f.Int64Var(&p.height, "height", 0, "picture height in pixels; default the model's")
	f.Int64Var(&p.width, "width", 0, "picture width in pixels; default the model's")
	f.Float64Var(&p.cfg, "true-cfg-scale", 0, "classifier-free guidance scale, active above 1; default the model's")
	f.StringVar(&p.negative, "negative-prompt", "", "what guidance leads away from")
	f.StringVar(&p.sdeType, "sde-type", "sde", "stochastic transition: sde, cps, dance_sde, or ode for none")
	f.Float64Var(&p.noiseLevel, "noise-level", 0.7, "noise level a of stochastic steps")
	f.StringVar(&p.sdeSteps, "sde-steps", "", "steps that are stochastic, e.g. 2,3 or 0-4; none for none; default all")
	f.StringVar(&p.sdeWindow, "sde-window", "", "draw the stochastic steps: SIZE[:LOW-HIGH[:random|progressive|noncontiguous]], HIGH exclusive")
	f.StringVar(&p.returnSteps, "return-steps", "", "latents to keep, e.g. 2,3,4; T is the final one; default those around stochastic steps")
	f.StringVar(&p.logProbKind, "log-prob-kind", "density", "density, scaled or squared")
	f.StringVar(&p.solver, "solver", "euler", "solver of ode steps: euler, heun, unipc, dpm or rk4")
	f.StringVar(&p.dtype, "latents-dtype", "F32", "stored latents: F32, F16 or BF16")
	f.StringSliceVar(&p.debug, "debug", nil, "extra tensors per step: noise, mean, std, model_output")
	f.StringVar(&p.initialNoise, "initial-noise", "per_sample", "per_sample, or shared by the group")
	f.StringVar(&p.sigmas, "sigmas", "", "pre-shift sigmas, one per step, e.g. 1,0.75,0.5,0.25")
	f.StringVar(&p.latents, "initial-latents", "", "x_T from a safetensors file: one tensor, packed [n, S, C], for every prompt")
	f.StringSliceVar(&p.reward, "reward", nil, "reward functions NAME[=WEIGHT]; default jpeg_compressibility")
	f.StringVar(&p.groundTruth, "ground-truth", "", "what the picture is compared with, for scorers that compare")
	f.StringVar(&p.estimator, "estimator", "flow_grpo", "advantage estimator")
	f.StringVar(&p.std, "std", "group", "scale of advantages: group, global (over all prompts of the command), none (Dr.GRPO)")
	f.StringVar(&p.stdBasis, "std-basis", "sample", "sample, expanded or population")
	f.Float64Var(&p.epsilon, "epsilon", 1e-4, "added to the scale")
	f.StringVar(&p.batch, "batch-id", "", "join all prompts of the command into one batch of this name")
	f.DurationVar(&p.deadline, "deadline", 0, "close groups with what they have after this long")
	f.Int64Var(&p.priority, "priority", 0, "higher is sampled first")
	f.BoolVar(&p.validate, "validate", false, "evaluation: deterministic steps, no log-probs")
}

// prompt is one prompt as a msgpack-shaped map. It is sent as it is: intake, not
// the command line, decides what is valid, so that every client hears the same.
type prompt struct {
	uid  string
	text string
	body map[string]any
}

// load reads the prompts of the command line and of the file and fills in the flags.
// With named it also fills in uids that depend on the place and the text alone, so that
// the same command asks for the same groups; else intake gives each a new one.
func (p *promptFlags) load(texts []string, stdin io.Reader, named bool) ([]prompt, error) {
	var bodies []map[string]any
	for _, t := range texts {
		bodies = append(bodies, map[string]any{"prompt": t})
	}
	if p.file != "" {
		more, err := readPrompts(p.file, stdin)
		if err != nil {
			return nil, usage(err)
		}
		bodies = append(bodies, more...)
	}
	if len(bodies) == 0 {
		return nil, usage(errors.New("no prompts; give some as arguments, or a file with --prompts"))
	}
	defaults, err := p.defaults(len(bodies))
	if err != nil {
		return nil, usage(err)
	}
	prompts := make([]prompt, len(bodies))
	uids := map[string]int{}
	for i, body := range bodies {
		merge(body, defaults)
		text, _ := body["prompt"].(string)
		uid, given := body["uid"].(string)
		if !given && body["uid"] == nil && named {
			uid = fmt.Sprintf("%04d-%s", i, slug(text))
			body["uid"] = uid
		}
		if first, twice := uids[uid]; twice && uid != "" {
			return nil, usage(fmt.Errorf("prompts %d and %d have the same uid %q; a uid names one group of a run", first+1, i+1, uid))
		}
		uids[uid] = i
		prompts[i] = prompt{uid: uid, text: text, body: body}
	}
	return prompts, nil
}

// defaults is the map of every flag that was set.
func (p *promptFlags) defaults(prompts int) (map[string]any, error) {
	var errs []error
	d := map[string]any{"v": int64(schemas.Version)}
	put := func(flag, key string, v any) {
		if p.set(flag) {
			d[key] = v
		}
	}
	put("group-size", "group_size", p.groupSize)
	put("seed", "seed", p.seed)
	put("steps", "num_inference_steps", p.steps)
	put("height", "height", p.height)
	put("width", "width", p.width)
	put("true-cfg-scale", "true_cfg_scale", p.cfg)
	put("negative-prompt", "negative_prompt", p.negative)
	put("initial-noise", "initial_noise", p.initialNoise)
	put("priority", "priority", p.priority)
	put("validate", "validate", p.validate)
	if p.set("sigmas") {
		values, err := floats("sigmas", p.sigmas)
		errs = append(errs, err)
		d["sigmas"] = values
	}
	if p.latents != "" {
		t, err := readLatents(p.latents)
		errs = append(errs, err)
		d["initial_latents"] = t
	}
	if p.deadline != 0 {
		d["deadline"] = time.Now().Add(p.deadline).UnixNano()
	}

	rollout := map[string]any{}
	nested := func(m map[string]any, flag, key string, v any) {
		if p.set(flag) {
			m[key] = v
		}
	}
	nested(rollout, "sde-type", "sde_type", p.sdeType)
	nested(rollout, "noise-level", "noise_level", p.noiseLevel)
	nested(rollout, "log-prob-kind", "log_prob_kind", p.logProbKind)
	nested(rollout, "solver", "solver", p.solver)
	nested(rollout, "latents-dtype", "latents_dtype", p.dtype)
	nested(rollout, "debug", "debug", p.debug)
	if p.set("sde-steps") {
		v, err := indices("sde-steps", p.sdeSteps)
		errs = append(errs, err)
		rollout["sde_step_indices"] = v
	}
	if p.set("return-steps") {
		v, err := indices("return-steps", p.returnSteps)
		errs = append(errs, err)
		rollout["return_step_indices"] = v
	}
	if p.set("sde-window") {
		w, err := window(p.sdeWindow)
		errs = append(errs, err)
		rollout["sde_window"] = w
	}
	if len(rollout) > 0 {
		d["rollout"] = rollout
	}

	if p.set("reward") {
		var specs []any
		for _, r := range p.reward {
			name, weight, weighted := strings.Cut(r, "=")
			spec := map[string]any{"name": name}
			if weighted {
				w, err := strconv.ParseFloat(weight, 64)
				if err != nil {
					errs = append(errs, fmt.Errorf("--reward: %q; the weight must be a number", r))
				}
				spec["weight"] = w
			}
			if p.groundTruth != "" {
				spec["ground_truth"] = p.groundTruth
			}
			specs = append(specs, spec)
		}
		d["reward"] = specs
	}
	adv := map[string]any{}
	nested(adv, "estimator", "estimator", p.estimator)
	nested(adv, "std", "std", p.std)
	nested(adv, "std-basis", "std_basis", p.stdBasis)
	nested(adv, "epsilon", "epsilon", p.epsilon)
	if len(adv) > 0 {
		d["advantage"] = adv
	}
	if id := p.batch; id != "" || p.std == "global" {
		if id == "" {
			id = "all"
		}
		d["batch"] = map[string]any{"id": id, "groups": int64(prompts)}
	}
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

// encode is the wire form; map keys are sorted, so equal prompts have equal bytes.
func (p prompt) encode() ([]byte, error) {
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.SetSortMapKeys(true)
	enc.UseCompactInts(true)
	if err := enc.Encode(p.body); err != nil {
		return nil, fmt.Errorf("encode prompt %q: %w", p.uid, err)
	}
	return buf.Bytes(), nil
}

// maxPromptLine bounds a line of a prompt file.
const maxPromptLine = 1 << 20

func readPrompts(path string, stdin io.Reader) ([]map[string]any, error) {
	r := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("open prompts: %w", err)
		}
		defer f.Close()
		r = f
	}
	var out []map[string]any
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxPromptLine)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "":
		case strings.HasPrefix(line, "{"):
			body, err := jsonObject(line)
			if err != nil {
				return nil, fmt.Errorf("%s line %d: %w", path, n, err)
			}
			out = append(out, body)
		default:
			out = append(out, map[string]any{"prompt": line})
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w (a line may have %d bytes)", path, err, maxPromptLine)
	}
	return out, nil
}

// jsonObject decodes one line; whole numbers stay integers, as on the wire.
func jsonObject(line string) (map[string]any, error) {
	dec := json.NewDecoder(strings.NewReader(line))
	dec.UseNumber()
	var body map[string]any
	if err := dec.Decode(&body); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	if dec.More() {
		return nil, errors.New("more than one JSON value in the line")
	}
	return numbers(body).(map[string]any), nil
}

func numbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			v[k] = numbers(x)
		}
	case []any:
		for i, x := range v {
			v[i] = numbers(x)
		}
	case json.Number:
		if i, err := v.Int64(); err == nil {
			return i
		}
		f, err := v.Float64()
		if err != nil {
			return math.Inf(1) // too large for a float64: refused as not finite, by name
		}
		return f
	}
	return v
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

// window reads SIZE[:LOW-HIGH[:STRATEGY]].
func window(s string) (map[string]any, error) {
	bad := fmt.Errorf("--sde-window: %q; must be SIZE[:LOW-HIGH[:STRATEGY]], e.g. 2:0-5:random", s)
	parts := strings.Split(s, ":")
	size, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil || len(parts) > 3 {
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
	if len(parts) > 2 {
		w["strategy"] = parts[2]
	}
	return w, nil
}

// slug makes a prompt readable in a uid: its first words, in the token alphabet.
func slug(text string) string {
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	s := strings.Join(words[:min(len(words), 6)], "-")
	if len(s) > 40 {
		s = strings.TrimRight(s[:40], "-")
	}
	if s == "" {
		s = "prompt"
	}
	return s
}

// uidsOf lists the uids in order.
func uidsOf(prompts []prompt) []string {
	out := make([]string, len(prompts))
	for i, p := range prompts {
		out[i] = p.uid
	}
	return slices.Clip(out)
}
