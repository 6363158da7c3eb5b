package model

import (
	"crypto/sha256"
	"encoding/hex"
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

	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Adapter is a LoRA of the transformer: for each of some projections W [n, k] a product of
// two thin matrices that is added, W + scale * B A, with A [r, k] and B [n, r] (Hu et al.
// 2021, eq. 3). It is immutable and belongs to no model until WithAdapters.
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

	config, err := folder.Read(peftConfigFile, maxConfigFile)
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
	a := &Adapter{name: NameOf(name)}
	if a.modules, err = readLowRank(archive, scale); err != nil {
		return nil, err
	}
	d := &digest{sha256.New()}
	d.archive("", archive)
	d.file(peftConfigFile, config)
	a.digest = hex.EncodeToString(d.h.Sum(nil))
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
	var f faults
	f.check(c.Type == "" || c.Type == "LORA", "peft_type = %q: want LORA", c.Type)
	f.check(c.Alpha != nil && finite(*c.Alpha), "lora_alpha: want a number")
	f.check(!c.DoRA, "use_dora: not supported")
	f.check(!c.LoRABias, "lora_bias: not supported")
	f.check(!c.FanInFanOut, "fan_in_fan_out: not supported")
	f.check(c.Bias == "" || c.Bias == "none", "bias = %q: want none", c.Bias)
	f.check(len(c.ModulesToSave) == 0, "modules_to_save: not supported")
	for k, v := range sorted(c.AlphaPattern) {
		f.check(!strings.ContainsAny(k, `*+?()[]{}|^$\`), "alpha_pattern %q: patterns are not supported, only names", k)
		f.check(finite(v), "alpha_pattern %q: want a number", k)
	}
	if err := f.of("adapter configuration"); err != nil {
		return nil, err
	}
	return func(module string, r int) float64 {
		alpha := *c.Alpha
		for k, v := range sorted(c.AlphaPattern) {
			if module == k || strings.HasSuffix(module, "."+k) {
				alpha = v
			}
		}
		if c.RSLoRA {
			return alpha / math.Sqrt(float64(r))
		}
		return alpha / float64(r)
	}, nil
}

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

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
	for module, p := range sorted(found) {
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

// WithAdapters returns the model as it was opened plus the adapters, whatever adapters m
// has. No files are read: projections that no adapter touches are shared, as are text
// encoder, autoencoder, threads and conditionings. Its Card has a digest of its own. Both
// models stay usable and each must be closed. No adapters give the base again.
//
// An adapter that does not fit is an error that names all its wrong modules.
func (m *QwenImage) WithAdapters(adapters ...Weighted) (*QwenImage, error) {
	t, err := m.base.withAdapters(m.device, adapters)
	if err != nil {
		return nil, err
	}
	n := &QwenImage{qwenShared: m.qwenShared, card: m.card, transformer: t}
	n.modulations.limit = m.modulations.limit
	n.card.WeightsDigest = m.baseDigest
	if len(adapters) > 0 {
		d := &digest{sha256.New()}
		fmt.Fprintf(d.h, "%s\n", m.baseDigest)
		for _, a := range adapters {
			fmt.Fprintf(d.h, "%s %x\n", a.Adapter.digest, math.Float64bits(a.Weight))
		}
		n.card.WeightsDigest = d.hex()
	}
	m.users.Add(1)
	return n, nil
}

// place is where a projection of a checkpoint lies in a stacked linear.
type place struct {
	find func(*mmdit) *linear
	from int // first row
	n, k int
}

// places returns every projection by its name in a checkpoint.
func (m *mmdit) places() map[string]place {
	d := m.config.width()
	p := map[string]place{
		"img_in":          {func(m *mmdit) *linear { return &m.imgIn }, 0, d, m.config.In},
		"txt_in":          {func(m *mmdit) *linear { return &m.textIn }, 0, d, m.config.TextWidth},
		"norm_out.linear": {func(m *mmdit) *linear { return &m.modOut }, 0, 2 * d, d},
		"proj_out":        {func(m *mmdit) *linear { return &m.out }, 0, m.config.In, d},
		"time_text_embed.timestep_embedder.linear_1": {func(m *mmdit) *linear { return &m.time1 }, 0, d, timeChannels},
		"time_text_embed.timestep_embedder.linear_2": {func(m *mmdit) *linear { return &m.time2 }, 0, d, d},
	}
	for i := range m.blocks {
		stream := func(name string, get func(*mmdit) *mmditStream, attn [4]string) {
			block := fmt.Sprintf("transformer_blocks.%d.", i)
			for j, q := range attn[:3] {
				p[block+"attn."+q] = place{func(m *mmdit) *linear { return &get(m).qkv }, j * d, d, d}
			}
			p[block+"attn."+attn[3]] = place{func(m *mmdit) *linear { return &get(m).out }, 0, d, d}
			p[block+name+"_mod.1"] = place{func(m *mmdit) *linear { return &get(m).mod }, 0, 6 * d, d}
			p[block+name+"_mlp.net.0.proj"] = place{func(m *mmdit) *linear { return &get(m).up }, 0, 4 * d, d}
			p[block+name+"_mlp.net.2"] = place{func(m *mmdit) *linear { return &get(m).down }, 0, d, 4 * d}
		}
		stream("img", func(m *mmdit) *mmditStream { return &m.blocks[i].img }, [4]string{"to_q", "to_k", "to_v", "to_out.0"})
		stream("txt", func(m *mmdit) *mmditStream { return &m.blocks[i].txt }, [4]string{"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"})
	}
	return p
}

// withAdapters returns a transformer with sums of low-rank products added to the weights.
// A sum is accumulated in float64 and rounded once.
func (m *mmdit) withAdapters(d tensor.Device, adapters []Weighted) (*mmdit, error) {
	places := m.places()
	touched := map[string]bool{}
	var errs []error
	for i, a := range adapters {
		if a.Adapter == nil {
			return nil, fmt.Errorf("adapter %d: none", i)
		}
		var f faults
		f.check(finite(a.Weight), "weight %g", a.Weight)
		for module, low := range sorted(a.Adapter.modules) {
			p, ok := places[module]
			f.check(ok, "module %s: the transformer has none", module)
			f.check(!ok || low.n == p.n && low.k == p.k, "module %s: changes a weight of %d x %d, here %d x %d", module, low.n, low.k, p.n, p.k)
			touched[module] = true
		}
		errs = append(errs, f.of("adapter "+a.Adapter.name))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	n := *m
	n.blocks = slices.Clone(m.blocks)
	weights := map[*linear][]float32{} // of the new transformer
	for _, module := range slices.Sorted(maps.Keys(touched)) {
		p := places[module]
		l := p.find(&n)
		w := weights[l]
		if w == nil {
			w = make([]float32, l.w.N()*l.w.K())
			d.Read(w, l.w)
			weights[l] = w
		}
		sum := make([]float64, p.k)
		for row := range p.n {
			dst := w[(p.from+row)*p.k : (p.from+row+1)*p.k]
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
	for l, w := range weights {
		l.w = d.Weight(tensor.Floats(w, l.w.N(), l.w.K()))
	}
	return &n, nil
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
