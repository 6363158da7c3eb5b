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

	"github.com/meander-rl/meander/pkg/models/safetensors"
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

// pattern is an entry of rank_pattern or alpha_pattern.
type pattern struct {
	of    *regexp.Regexp
	value float64
}

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
		if names().unsupported.MatchString(key) {
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
	check(slices.Contains(names().PlainInits, string(c.Init)), "init_lora_weights: %s; not supported: the weights "+
		"beneath the adapter are changed too; save it as a plain LoRA, with PEFT's "+
		"path_initial_model_for_weight_conversion", c.Init)
	for _, k := range slices.Sorted(maps.Keys(plain)) {
		unset := slices.Contains([]string{"null", "false", `""`, "[]", "{}"}, string(plain[k]))
		_, harmless := names().FieldsWithoutEffect[k]
		check(unset || harmless || slices.Contains(names().UsedFields, k), "%s: not supported; must be unset: merge "+
			"the adapter with PEFT's merge_and_unload, and push the transformer with --full (push_weights)", k)
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

// readModules reads the two factors of all modules of an adapter, by the name of the module without what wrappers put
// before it, and returns what was taken off so. scale may be nil. A tensor that is not part of a LoRA, a factor without
// its other, shapes that do not fit and numbers that are not finite are errors.
func readModules(archive *safetensors.Archive, scale scaling) (_ map[string]*Product, off []string, err error) {
	type parts struct{ a, b, alpha string }
	found, refused := map[string]*parts{}, refusals{}
	for _, name := range archive.Names() {
		module, kind, taken, why := names().split(name)
		if why != "" {
			refused[why] = append(refused[why], name)
			continue
		}
		off = append(off, taken...)
		p := found[module]
		if p == nil {
			p = &parts{}
			found[module] = p
		}
		part := map[string]*string{"A": &p.a, "B": &p.b, "alpha": &p.alpha}[kind]
		if *part != "" {
			return nil, nil, fmt.Errorf("module %s: %s and %s; must be one of them", module, *part, name)
		}
		*part = name
	}
	if len(refused) > 0 {
		return nil, nil, errors.Join(refused.errors()...)
	}
	if len(found) == 0 {
		return nil, nil, errors.New("no tensors")
	}
	modules := make(map[string]*Product, len(found))
	for _, module := range slices.Sorted(maps.Keys(found)) {
		p := found[module]
		if p.a == "" || p.b == "" {
			return nil, nil, fmt.Errorf("module %s: lora_A or lora_B is missing", module)
		}
		a, _ := archive.Info(p.a)
		b, _ := archive.Info(p.b)
		if len(a.Shape) != 2 || len(b.Shape) != 2 || a.Shape[0] != b.Shape[1] || a.Shape[0] < 1 {
			return nil, nil, fmt.Errorf("module %s: lora_A %v and lora_B %v do not fit", module, a.Shape, b.Shape)
		}
		low := &Product{R: a.Shape[0], N: b.Shape[0], K: a.Shape[1], Scale: 1}
		if low.A, err = archive.Floats(p.a); err != nil {
			return nil, nil, err
		}
		if low.B, err = archive.Floats(p.b); err != nil {
			return nil, nil, err
		}
		switch {
		case p.alpha != "":
			alpha, err := archive.Floats(p.alpha)
			if err != nil {
				return nil, nil, err
			}
			if len(alpha) != 1 || !finite(float64(alpha[0])) {
				return nil, nil, fmt.Errorf("module %s: alpha is not a number", module)
			}
			low.Scale = float64(alpha[0]) / float64(low.R)
		case scale != nil:
			if low.Scale, err = scale(module, low.R); err != nil {
				return nil, nil, err
			}
		}
		if !allFinite(low.A, low.B) || !finite(low.Scale) {
			return nil, nil, fmt.Errorf("module %s: not finite; all numbers of lora_A and lora_B must be", module)
		}
		modules[module] = low
	}
	return modules, slices.Compact(slices.Sorted(slices.Values(off))), nil
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
