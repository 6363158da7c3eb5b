package lora

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// config is adapter_config.json as far as it changes results.
type config struct {
	Type          string             `json:"peft_type"`
	R             float64            `json:"r"`
	Alpha         *float64           `json:"lora_alpha"`
	AlphaPattern  map[string]float64 `json:"alpha_pattern"`
	RSLoRA        bool               `json:"use_rslora"`
	DoRA          bool               `json:"use_dora"`
	Bias          string             `json:"bias"`
	LoRABias      bool               `json:"lora_bias"`
	FanInFanOut   bool               `json:"fan_in_fan_out"`
	ModulesToSave []string           `json:"modules_to_save"`
}

// parseConfig returns the scale of a module of a rank, or nil when the file is empty.
func parseConfig(file []byte) (func(module string, r int) float64, error) {
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
	if err := json.Unmarshal(b, &c); err != nil {
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
	check(!c.DoRA, "use_dora: not supported")
	check(!c.LoRABias, "lora_bias: not supported")
	check(!c.FanInFanOut, "fan_in_fan_out: not supported")
	check(c.Bias == "" || c.Bias == "none", "bias: %q; must be none", c.Bias)
	check(len(c.ModulesToSave) == 0, "modules_to_save: not supported")
	patterns := slices.Sorted(maps.Keys(c.AlphaPattern))
	for _, k := range patterns {
		check(!strings.ContainsAny(k, `*+?()[]{}|^$\`), "alpha_pattern %q: patterns are not supported, only names", k)
		check(finite(c.AlphaPattern[k]), "alpha_pattern %q: %g; must be a number", k, c.AlphaPattern[k])
	}
	if err := errors.Join(faults...); err != nil {
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	return func(module string, r int) float64 {
		alpha := *c.Alpha
		for _, k := range patterns {
			if module == k || strings.HasSuffix(module, "."+k) {
				alpha = c.AlphaPattern[k]
			}
		}
		if c.RSLoRA {
			return alpha / math.Sqrt(float64(r))
		}
		return alpha / float64(r)
	}, nil
}

// loraSuffixes are the endings of tensor names: which matrix of a module they are.
var loraSuffixes = []struct{ suffix, kind string }{
	{".lora_A.weight", "a"},
	{".lora_B.weight", "b"},
	{".lora_A.default.weight", "a"},
	{".lora_B.default.weight", "b"},
	{".lora_down.weight", "a"},
	{".lora_up.weight", "b"},
	{".alpha", "alpha"},
}

// readProducts reads all modules and reports everything that does not belong.
func readProducts(archive *safetensors.Archive, scale func(string, int) float64) (map[string]*Product, error) {
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
			return nil, fmt.Errorf("module %s: rank %d; must be at most %d, the smaller side of its weight", module, a.Shape[0], min(a.Shape[1], b.Shape[0]))
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
			low.Scale = scale(module, low.R)
		}
		if !finiteAll(low.A, low.B) || !finite(low.Scale) {
			return nil, fmt.Errorf("module %s: not finite; all numbers of lora_A and lora_B must be", module)
		}
		modules[module] = low
	}
	return modules, nil
}

// finiteAll reports whether all are numbers.
func finiteAll(lists ...[]float32) bool {
	for _, x := range lists {
		for _, v := range x {
			if !finite(float64(v)) {
				return false
			}
		}
	}
	return true
}
