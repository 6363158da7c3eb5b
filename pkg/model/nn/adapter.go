package nn

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Adapter is a LoRA (low-rank adaptation): for each of some projections W [n, k] a product of
// two thin matrices that is added, W + scale * B A, with A [r, k] and B [n, r] (Hu et al.
// 2021, eq. 3). It is immutable and belongs to no model.
type Adapter struct {
	name    string
	digest  string
	modules map[string]*lowRank
}

// lowRank is the change of one projection.
type lowRank struct {
	a, b    []float32
	r, n, k int
	scale   float64
}

// Files of an adapter folder, as PEFT and as diffusers name them.
const (
	peftWeights      = "adapter_model.safetensors"
	peftConfigFile   = "adapter_config.json"
	diffusersWeights = "pytorch_lora_weights.safetensors"
	// loraMetadata is the header entry in which diffusers keeps the configuration.
	loraMetadata = "lora_adapter_metadata"
)

// OpenAdapter reads a LoRA in PEFT's form from a safetensors file or a folder. The scale of
// a module is lora_alpha/r, or lora_alpha/sqrt(r) with use_rslora, from adapter_config.json
// beside the weights, from the file's header, or from alpha tensors; a file that says
// nothing is taken at scale 1, as diffusers does. Other kinds of adapters are an error.
func OpenAdapter(name string) (*Adapter, error) {
	a, err := openAdapter(name)
	if err != nil {
		return nil, fmt.Errorf("open adapter %q: %w", name, err)
	}
	return a, nil
}

func openAdapter(name string) (_ *Adapter, err error) {
	dir, file := filepath.Split(filepath.Clean(name))
	if dir == "" {
		dir = "."
	}
	if info, err := os.Stat(name); err != nil {
		return nil, errors.Unwrap(err)
	} else if info.IsDir() {
		dir, file = name, ""
	}
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	if file == "" {
		for _, file = range []string{peftWeights, diffusersWeights} {
			if _, err := folder.Stat(file); err == nil {
				break
			}
		}
	}
	archive, err := safetensors.Open(filepath.Join(dir, file))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, archive.Close()) }()

	config, err := folder.Read(peftConfigFile, MaxConfigFile)
	if errors.Is(err, fs.ErrNotExist) {
		config, err = []byte(archive.Metadata()[loraMetadata]), nil
	}
	if err != nil {
		return nil, err
	}
	scale, err := parseLoRAConfig(config)
	if err != nil {
		return nil, err
	}
	a := &Adapter{name: model.NameOf(name)}
	if a.modules, err = readLowRank(archive, scale); err != nil {
		return nil, err
	}
	d := NewDigest()
	d.Archive("", archive, nil)
	d.File(peftConfigFile, config)
	a.digest = d.Hex()
	return a, nil
}

// Name returns the last element of the path it was read from.
func (a *Adapter) Name() string { return a.name }

// Digest returns the SHA-256 of weights and configuration in hex.
func (a *Adapter) Digest() string { return a.digest }

// loraConfig is adapter_config.json as far as it changes results.
type loraConfig struct {
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

// parseLoRAConfig returns the scale of a module of a rank, or nil when config is empty.
func parseLoRAConfig(config []byte) (func(module string, r int) float64, error) {
	if len(config) == 0 {
		return nil, nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(config, &fields); err != nil {
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
	var c loraConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("adapter configuration: %w", err)
	}
	var f Faults
	f.Check(c.Type == "" || c.Type == "LORA", "peft_type: %q; must be LORA", c.Type)
	f.Check(c.Alpha != nil, "lora_alpha: missing; must be a number")
	f.Check(!c.DoRA, "use_dora: not supported")
	f.Check(!c.LoRABias, "lora_bias: not supported")
	f.Check(!c.FanInFanOut, "fan_in_fan_out: not supported")
	f.Check(c.Bias == "" || c.Bias == "none", "bias: %q; must be none", c.Bias)
	f.Check(len(c.ModulesToSave) == 0, "modules_to_save: not supported")
	patterns := slices.Sorted(maps.Keys(c.AlphaPattern))
	for _, k := range patterns {
		f.Check(!strings.ContainsAny(k, `*+?()[]{}|^$\`), "alpha_pattern %q: patterns are not supported, only names", k)
		f.Check(finite(c.AlphaPattern[k]), "alpha_pattern %q: %g; must be a number", k, c.AlphaPattern[k])
	}
	if err := f.Of("adapter configuration"); err != nil {
		return nil, err
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

// readLowRank reads all modules and reports everything that does not belong.
func readLowRank(archive *safetensors.Archive, scale func(string, int) float64) (map[string]*lowRank, error) {
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
		switch kind {
		case "a":
			p.a = name
		case "b":
			p.b = name
		default:
			p.alpha = name
		}
	}
	if len(unexpected) > 0 {
		return nil, fmt.Errorf("%d tensors that are no LoRA: %s", len(unexpected), shorten(unexpected))
	}
	if len(found) == 0 {
		return nil, errors.New("no tensors")
	}
	modules := make(map[string]*lowRank, len(found))
	for _, module := range slices.Sorted(maps.Keys(found)) {
		p := found[module]
		if p.a == "" || p.b == "" {
			return nil, fmt.Errorf("module %s: lora_A or lora_B is missing", module)
		}
		a, _ := archive.Info(p.a)
		b, _ := archive.Info(p.b)
		if len(a.Shape) != 2 || len(b.Shape) != 2 || a.Shape[0] != b.Shape[1] || a.Shape[0] < 1 {
			return nil, fmt.Errorf("module %s: lora_A %v and lora_B %v do not fit", module, a.Shape, b.Shape)
		}
		low := &lowRank{r: a.Shape[0], n: b.Shape[0], k: a.Shape[1], scale: 1}
		var err error
		if low.a, err = archive.Floats(p.a); err != nil {
			return nil, err
		}
		if low.b, err = archive.Floats(p.b); err != nil {
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
			low.scale = float64(alpha[0]) / float64(low.r)
		case scale != nil:
			low.scale = scale(module, low.r)
		}
		modules[module] = low
	}
	return modules, nil
}

// Weighted is an adapter and how much of it to take; 1 is what it was trained at.
type Weighted struct {
	Adapter *Adapter
	Weight  float64
}

// Place is where a projection of a checkpoint lies in a stacked Linear: rows From to
// From+N-1 of In, with K columns.
type Place struct {
	In         *Linear
	From, N, K int
}

// Adapt adds sums of low-rank products to the weights at places, by the names of modules
// in a checkpoint. It replaces the weights of the Linears that an adapter touches and
// leaves the others alone. A sum is accumulated in float64 and rounded once. An adapter
// that does not fit is an error that names all its wrong modules.
func Adapt(d tensor.Device, places map[string]Place, adapters []Weighted) error {
	touched := map[string]bool{}
	var errs []error
	for i, a := range adapters {
		if a.Adapter == nil {
			return fmt.Errorf("adapter %d: none", i)
		}
		var f Faults
		f.Check(finite(a.Weight), "weight %g", a.Weight)
		for _, module := range slices.Sorted(maps.Keys(a.Adapter.modules)) {
			low := a.Adapter.modules[module]
			p, ok := places[module]
			f.Check(ok, "module %s: the transformer has none", module)
			f.Check(!ok || low.n == p.N && low.k == p.K, "module %s: changes a weight of %d x %d, here %d x %d", module, low.n, low.k, p.N, p.K)
			touched[module] = true
		}
		errs = append(errs, f.Of("adapter "+a.Adapter.name))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	stacked := map[*Linear][]string{} // the modules of each
	for _, module := range slices.Sorted(maps.Keys(touched)) {
		stacked[places[module].In] = append(stacked[places[module].In], module)
	}
	for l, modules := range stacked { // one after the other, so that the host holds one of them
		w := make([]float32, l.W.N()*l.W.K())
		if err := d.Read(w, l.W); err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		for _, module := range modules {
			places[module].add(w, module, adapters)
		}
		adapted, err := d.Weight(tensor.Floats(w, l.W.N(), l.W.K()))
		if err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		l.W = adapted
	}
	return nil
}

// add adds what the adapters have for a module to its rows of w.
func (p Place) add(w []float32, module string, adapters []Weighted) {
	sum := make([]float64, p.K)
	for row := range p.N {
		dst := w[(p.From+row)*p.K : (p.From+row+1)*p.K]
		for j, v := range dst {
			sum[j] = float64(v)
		}
		for _, a := range adapters {
			if low := a.Adapter.modules[module]; low != nil {
				low.addRow(sum, row, a.Weight)
			}
		}
		for j, v := range sum {
			dst[j] = float32(v)
		}
	}
}

// addRow adds row of weight * scale * B A to sum.
func (low *lowRank) addRow(sum []float64, row int, weight float64) {
	for i := range low.r {
		c := weight * low.scale * float64(low.b[row*low.r+i])
		for j, v := range low.a[i*low.k : (i+1)*low.k] {
			sum[j] += float64(c * float64(v)) // not fused: the same bits on every machine
		}
	}
}
