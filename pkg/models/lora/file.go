package lora

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
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

// Save writes the adapter with its weight to a new folder, in the plainest form of PEFT, which every server takes:
// weights in float32, and a configuration without patterns. All modules get the largest rank, with rows of zeros, and
// the scale 1: the weight and the scale of a module are multiplied into its lora_B, each element rounded once. A
// product of a rank above the smaller side of its weight, which servers do not take, is written as its sum. The folder
// is there with both files or not at all; it is no error that it is there already.
func (a Weighted) Save(dir string) error {
	return saveFolder(dir, "adapter "+a.Adapter.name, func(made string) error {
		tensors, config, err := a.plain()
		if err != nil {
			return err
		}
		return errors.Join(
			safetensors.WriteFile(filepath.Join(made, PEFTWeights), tensors, map[string]string{"format": "pt"}),
			os.WriteFile(filepath.Join(made, PEFTConfig), config, 0o644),
		)
	})
}

// saveFolder has write write files to a new folder, which is there with all of them or not at all; it is no error that
// it is there already. All may be read by a server of another user, whatever the umask is.
func saveFolder(dir, what string, write func(made string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	made, err := os.MkdirTemp(filepath.Dir(dir), ".weights-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", what, err)
	}
	if err = errors.Join(os.Chmod(made, 0o755), write(made)); err == nil {
		var files []string
		files, err = filepath.Glob(filepath.Join(made, "*"))
		for _, file := range files {
			err = errors.Join(err, os.Chmod(file, 0o644))
		}
	}
	if err == nil {
		err = os.Rename(made, dir)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", what, err), os.RemoveAll(made))
	}
	return nil
}

// Zero returns an adapter of rank 1 for one projection of a model that adds zeros. A server that is asked for the model
// with it computes the model alone.
func (t Table) Zero() Weighted {
	name := slices.Min(slices.Collect(maps.Keys(t)))
	return Weighted{
		Adapter: &Adapter{name: "zero", modules: map[string]*Product{name: zeroProduct(t[name])}},
		Weight:  1,
	}
}

// Completed returns the adapter with zeros added, so that of the modules of t that differ in the parts at their ends
// alone it changes all or none: for servers that compute them as one, and do not take a part of them.
func (a Weighted) Completed(t Table, parts ...string) Weighted {
	all := maps.Clone(a.Adapter.modules)
	for name := range a.Adapter.modules {
		for _, part := range parts {
			stem, ok := strings.CutSuffix(name, part)
			for _, other := range parts {
				if shape, is := t[stem+other]; ok && is && all[stem+other] == nil {
					all[stem+other] = zeroProduct(shape)
				}
			}
		}
	}
	return Weighted{Adapter: &Adapter{name: a.Adapter.name, modules: all}, Weight: a.Weight}
}

func zeroProduct(shape [2]int) *Product {
	return &Product{
		A: make([]float32, shape[1]), B: make([]float32, shape[0]), R: 1, N: shape[0], K: shape[1],
		Scale: 1,
	}
}

// plain returns the tensors and the configuration that Save writes.
func (a Weighted) plain() (tensors []safetensors.Tensor, config []byte, err error) {
	rank, products := 0, make(map[string]*Product, len(a.Adapter.modules))
	for name, p := range a.Adapter.modules {
		products[name] = p.narrow()
		rank = max(rank, products[name].R)
	}
	targets := map[string]bool{}
	for _, name := range a.Adapter.Modules() {
		p := products[name]
		targets[name[strings.LastIndex(name, ".")+1:]] = true
		down := make([]float32, rank*p.K) // [rank, K]
		copy(down, p.A)
		up := make([]float32, p.N*rank) // [N, rank]
		for i := range p.N {
			for j := range p.R {
				up[i*rank+j] = float32(float64(p.B[i*p.R+j]) * p.Scale * a.Weight)
			}
		}
		for _, t := range []struct {
			kind  string
			shape []int
			x     []float32
		}{{"A", []int{rank, p.K}, down}, {"B", []int{p.N, rank}, up}} {
			full, err := safetensors.FloatTensor(
				fmt.Sprintf("base_model.model.%s.lora_%s.weight", name, t.kind), tensor.F32, t.shape, t.x)
			if err != nil {
				return nil, nil, err
			}
			tensors = append(tensors, full)
		}
	}
	config, err = json.Marshal(map[string]any{
		"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "lora_dropout": 0,
		"target_modules": slices.Sorted(maps.Keys(targets)),
	})
	return tensors, config, err
}

// narrow returns a product of the same sum whose rank is at most the smaller side of its weight: p itself, or one with
// the sum in one factor and ones in the other.
func (p *Product) narrow() *Product {
	if p.R <= min(p.N, p.K) {
		return p
	}
	sum := make([]float32, p.N*p.K)
	for i := range p.N {
		for j := range p.K {
			x := 0.0
			for r := range p.R {
				x += float64(float64(p.B[i*p.R+r]) * float64(p.A[r*p.K+j]))
			}
			sum[i*p.K+j] = float32(x)
		}
	}
	ones := func(n int) []float32 {
		x := make([]float32, n*n)
		for i := range n {
			x[i*n+i] = 1
		}
		return x
	}
	if p.N < p.K {
		return &Product{A: sum, B: ones(p.N), R: p.N, N: p.N, K: p.K, Scale: p.Scale}
	}
	return &Product{A: ones(p.K), B: sum, R: p.K, N: p.N, K: p.K, Scale: p.Scale}
}
