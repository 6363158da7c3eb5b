package lora

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// config holds the fields of adapter_config.json that change results.
type config struct {
	Type          string          `json:"peft_type"`
	R             float64         `json:"r"`
	Alpha         *float64        `json:"lora_alpha"`
	RankPatterns  json.RawMessage `json:"rank_pattern"`
	AlphaPatterns json.RawMessage `json:"alpha_pattern"`
	RSLoRA        bool            `json:"use_rslora"`
	Bias          string          `json:"bias"`
	Init          json.RawMessage `json:"init_lora_weights"`
}

// Fields of LoraConfig. supportedFields are those of config. ignoredFields do not change results: they say how an
// adapter was trained, where it comes from, or which modules have one, which the tensors say too. All other fields,
// also future ones, must be unset.
var (
	supportedFields = []string{
		"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights",
	}
	ignoredFields = []string{
		"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
		"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core",
		"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
	}
)

// plainInits are the values of init_lora_weights that leave the weights below the adapter unchanged. With the
// others (pissa, olora, loftq, corda, lora_ga) the adapter holds a part of those weights, which PEFT subtracts from
// them.
var plainInits = []string{"", "null", "true", "false", `"gaussian"`, `"eva"`, `"orthogonal"`, `"mica"`}

// pattern is an entry of rank_pattern or alpha_pattern.
type pattern struct {
	of    *regexp.Regexp
	value float64
}

// unsupportedPattern matches forms of Python's regular expressions that Go does not have, or reads in another way.
var unsupportedPattern = regexp.MustCompile(`\{,|\[\[?:|\(\?[^:]|\\[^dDwWsSbB.\-_/\\|()\[\]{}^$*+?]`)

// parsePatterns reads rank_pattern or alpha_pattern of an adapter: an object of numbers whose keys
// are Python regular expressions for names of modules. The order of the keys is kept, because the
// first that matches counts. A form of Python's that Go has not is an error.
func parsePatterns(data json.RawMessage) (list []pattern, err error) {
	if len(data) == 0 || string(data) == "null" {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, _ := d.Token(); t != json.Delim('{') {
		return nil, fmt.Errorf("%s; must be an object", data)
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		key, _ := t.(string)
		if unsupportedPattern.MatchString(key) {
			return nil, fmt.Errorf("%q: a form of Python's regular expressions that is not supported", key)
		}
		var x pattern
		if x.of, err = regexp.Compile(`^(.*\.)?(` + key + `)$`); err != nil {
			return nil, fmt.Errorf("%q: %w", key, err)
		}
		var value *float64
		if err := d.Decode(&value); err != nil || value == nil {
			return nil, fmt.Errorf("%q: must be a number", key)
		}
		x.value = *value
		list = append(list, x)
	}
	return list, nil
}

// patternValue returns the value of the first pattern that matches the end of the name of a module, as
// get_pattern_key of PEFT does; otherwise if none matches.
func patternValue(list []pattern, module string, otherwise float64) float64 {
	for _, x := range list {
		if x.of.MatchString(module) {
			return x.value
		}
	}
	return otherwise
}

// scaling returns the scale of a module of rank r.
type scaling func(module string, r int) (float64, error)

// parseConfig returns the scaling that adapter_config.json defines; nil if the file is empty, then
// Parse takes alpha tensors or 1. Every setting that changes results and is not supported is an
// error that names it.
func parseConfig(file []byte) (scaling, error) {
	if len(file) == 0 {
		return nil, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(file, &fields); err != nil {
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	// diffusers prefixes the fields with the component they are for.
	plain := make(map[string]json.RawMessage, len(fields))
	for k, v := range fields {
		plain[strings.TrimPrefix(k, "transformer.")] = v
	}
	b, err := json.Marshal(plain)
	if err != nil {
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	var c config
	if err := errors.Join(json.Unmarshal(b, &plain), json.Unmarshal(b, &c)); err != nil { // without spaces
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	var faults []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	check(c.Type == "" || c.Type == "LORA", "peft_type: %q; must be LORA", c.Type)
	check(c.Alpha != nil, "lora_alpha: missing; must be a number")
	check(c.Bias == "" || c.Bias == "none", "bias: %q; must be none", c.Bias)
	check(slices.Contains(plainInits, string(c.Init)), "init_lora_weights: %s; not supported: the weights beneath "+
		"the adapter are changed too; save it as a plain LoRA, with PEFT's path_initial_model_for_weight_conversion",
		c.Init)
	for _, k := range slices.Sorted(maps.Keys(plain)) {
		unset := slices.Contains([]string{"null", "false", `""`, "[]", "{}"}, string(plain[k]))
		check(unset || slices.Contains(supportedFields, k) || slices.Contains(ignoredFields, k), "%s: not supported", k)
	}
	ranks, err := parsePatterns(c.RankPatterns)
	check(err == nil, "rank_pattern: %w", err)
	alphas, err := parsePatterns(c.AlphaPatterns)
	check(err == nil, "alpha_pattern: %w", err)
	if err := errors.Join(faults...); err != nil {
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	return func(module string, r int) (float64, error) {
		if of := patternValue(ranks, module, c.R); of != 0 && of != float64(r) {
			return 0, fmt.Errorf("module %s: rank %d; the adapter configuration has %g", module, r, of)
		}
		alpha := patternValue(alphas, module, *c.Alpha)
		if c.RSLoRA {
			return alpha / math.Sqrt(float64(r)), nil
		}
		return alpha / float64(r), nil
	}, nil
}

// loraSuffixes map the ending of the name of a tensor to the matrix of a module that it is.
var loraSuffixes = []struct{ suffix, kind string }{
	{".lora_A.weight", "a"},
	{".lora_B.weight", "b"},
	{".lora_A.default.weight", "a"},
	{".lora_B.default.weight", "b"},
	{".lora_down.weight", "a"},
	{".lora_up.weight", "b"},
	{".alpha", "alpha"},
}

// readModules reads the two factors of all modules of an adapter, by the name of the module without
// the prefixes of PEFT and diffusers. scale may be nil. A tensor that is not part of a LoRA, a
// factor without its other, shapes that do not fit and numbers that are not finite are errors.
func readModules(archive *safetensors.Archive, scale scaling) (map[string]*Product, error) {
	type parts struct{ a, b, alpha string }
	found := map[string]*parts{}
	var unexpected []string
	for _, name := range archive.Names() {
		module, kind := "", ""
		for _, s := range loraSuffixes {
			if m, ok := strings.CutSuffix(name, s.suffix); ok {
				module, kind = m, s.kind
			}
		}
		for _, prefix := range []string{"base_model.model.", "transformer.", "diffusion_model."} {
			module = strings.TrimPrefix(module, prefix)
		}
		if module == "" {
			unexpected = append(unexpected, name)
			continue
		}
		p := found[module]
		if p == nil {
			p = &parts{}
			found[module] = p
		}
		part := map[string]*string{"a": &p.a, "b": &p.b, "alpha": &p.alpha}[kind]
		if *part != "" {
			return nil, fmt.Errorf("module %s: %s and %s; must be one of them", module, *part, name)
		}
		*part = name
	}
	if len(unexpected) > 0 {
		return nil, fmt.Errorf("%d tensors that are no LoRA: %s", len(unexpected), safetensors.ListNames(unexpected))
	}
	if len(found) == 0 {
		return nil, errors.New("no tensors")
	}
	modules := make(map[string]*Product, len(found))
	for _, module := range slices.Sorted(maps.Keys(found)) {
		p := found[module]
		if p.a == "" || p.b == "" {
			return nil, fmt.Errorf("module %s: lora_A or lora_B is missing", module)
		}
		a, _ := archive.Info(p.a)
		b, _ := archive.Info(p.b)
		if len(a.Shape) == 2 && len(b.Shape) == 2 && a.Shape[0] > min(a.Shape[1], b.Shape[0]) {
			return nil, fmt.Errorf("module %s: rank %d; must be at most %d, the smaller side of its weight", module,
				a.Shape[0], min(a.Shape[1], b.Shape[0]))
		}
		if len(a.Shape) != 2 || len(b.Shape) != 2 || a.Shape[0] != b.Shape[1] || a.Shape[0] < 1 {
			return nil, fmt.Errorf("module %s: lora_A %v and lora_B %v do not fit", module, a.Shape, b.Shape)
		}
		low := &Product{R: a.Shape[0], N: b.Shape[0], K: a.Shape[1], Scale: 1}
		var err error
		if low.A, err = archive.Floats(p.a); err != nil {
			return nil, err
		}
		if low.B, err = archive.Floats(p.b); err != nil {
			return nil, err
		}
		switch {
		case p.alpha != "":
			alpha, err := archive.Floats(p.alpha)
			if err != nil {
				return nil, err
			}
			if len(alpha) != 1 || !finite(float64(alpha[0])) {
				return nil, fmt.Errorf("module %s: alpha is not a number", module)
			}
			low.Scale = float64(alpha[0]) / float64(low.R)
		case scale != nil:
			if low.Scale, err = scale(module, low.R); err != nil {
				return nil, err
			}
		}
		if !allFinite(low.A, low.B) || !finite(low.Scale) {
			return nil, fmt.Errorf("module %s: not finite; all numbers of lora_A and lora_B must be", module)
		}
		modules[module] = low
	}
	return modules, nil
}

// allFinite reports whether all values are finite.
func allFinite(lists ...[]float32) bool {
	for _, x := range lists {
		for _, v := range x {
			if !finite(float64(v)) {
				return false
			}
		}
	}
	return true
}
