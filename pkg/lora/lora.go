// Package lora reads what changes a model's weights while it is in use: LoRAs (low-rank adaptations) in PEFT's
// form, and whole transformers. It checks them against the projections and tensors of a model, and names the weights
// that they make. It knows no network.
package lora

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

	"github.com/meander-rl/meander/pkg/safetensors"
)

// Adapter is a LoRA: for each of some projections W [n, k] a product of two thin matrices
// that is added, W + scale * B A, with A [r, k] and B [n, r] (Hu et al. 2021, eq. 3). It is
// immutable and belongs to no model.
type Adapter struct {
	name         string
	digest       string
	file, config []byte
	modules      map[string]*Product
}

// Product is the change of one projection: A [R, K] and B [N, R], row-major.
type Product struct {
	A, B    []float32
	R, N, K int
	// Scale multiplies B A.
	Scale float64
}

// Weighted is an adapter and how much of it to take; 1 is what it was trained at.
type Weighted struct {
	Adapter *Adapter
	Weight  float64
}

// Files of an adapter folder, as PEFT and as diffusers name them.
const (
	peftWeights      = "adapter_model.safetensors"
	peftConfigFile   = "adapter_config.json"
	diffusersWeights = "pytorch_lora_weights.safetensors"
	// loraMetadata is the header entry in which diffusers keeps the configuration.
	loraMetadata = "lora_adapter_metadata"
)

// MaxFile and MaxConfig bound the two files, in bytes.
const (
	MaxFile   = 16 << 30
	MaxConfig = 64 << 10
)

// Open reads a LoRA in PEFT's form from a safetensors file or a folder. The scale of
// a module is lora_alpha/r, or lora_alpha/sqrt(r) with use_rslora, from adapter_config.json
// beside the weights, from the file's header, or from alpha tensors; a file that says
// nothing is taken at scale 1, as diffusers does. Of the keys of alpha_pattern and rank_pattern, regular
// expressions, the first in the file that matches counts. A configuration that asks for more is an error that
// names the field: what it adds to the weights is not scale * B A alone.
func Open(name string) (*Adapter, error) {
	file, config, err := read(name)
	if err == nil {
		var a *Adapter
		if a, err = Parse(nameOf(name), file, config); err == nil {
			return a, nil
		}
	}
	return nil, fmt.Errorf("open adapter %q: %w", name, err)
}

// nameOf is the last element of a path, without the ending of a file.
func nameOf(name string) string {
	return strings.TrimSuffix(filepath.Base(filepath.Clean(name)), ".safetensors")
}

// read returns the bytes of weights and configuration; that may be empty.
func read(name string) (weights, config []byte, err error) {
	dir, file := filepath.Split(filepath.Clean(name))
	if dir == "" {
		dir = "."
	}
	if info, err := os.Stat(name); err != nil {
		return nil, nil, errors.Unwrap(err)
	} else if info.IsDir() {
		dir, file = name, ""
	}
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	if file == "" {
		for _, file = range []string{peftWeights, diffusersWeights} {
			if _, err := folder.Stat(file); err == nil {
				break
			}
		}
	}
	if weights, err = folder.Read(file, MaxFile); err != nil {
		return nil, nil, err
	}
	config, err = folder.Read(peftConfigFile, MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return weights, nil, nil
	}
	return weights, config, err
}

// Parse is Open of files in memory: adapter_model.safetensors, and adapter_config.json, which
// may be empty. Both stay in use and must not be modified. name is for messages.
func Parse(name string, file, config []byte) (*Adapter, error) {
	archive, err := safetensors.Parse(peftWeights, file)
	if err != nil {
		return nil, err
	}
	a := &Adapter{name: name, file: file, config: config}
	if len(config) == 0 {
		config = []byte(archive.Metadata()[loraMetadata])
	}
	scale, err := parseConfig(config)
	if err != nil {
		return nil, err
	}
	if a.modules, err = readProducts(archive, scale); err != nil {
		return nil, err
	}
	d := safetensors.NewDigest()
	d.File(peftWeights, file)
	d.File(peftConfigFile, config)
	a.digest = d.Hex()
	return a, nil
}

// Name is for messages: the last element of the path it was read from.
func (a *Adapter) Name() string { return a.name }

// Digest returns the SHA-256 of weights and configuration in hex.
func (a *Adapter) Digest() string { return a.digest }

// File and Config are the two files that it was read from; Config may be empty. They must not be
// modified.
func (a *Adapter) File() []byte { return a.file }

// Config is the other of the two files; see File.
func (a *Adapter) Config() []byte { return a.config }

// Modules lists the projections that it changes, sorted.
func (a *Adapter) Modules() []string { return slices.Sorted(maps.Keys(a.modules)) }

// Product is the change of a projection, nil for none.
func (a *Adapter) Product(module string) *Product { return a.modules[module] }

// WeightsDigest names the weights that adapters make of those named base: the SHA-256 in hex over
// base, a newline, and of each adapter its digest, a space, the bits of its weight in hex and a
// newline. None make base.
func WeightsDigest(base string, adapters ...Weighted) string {
	if len(adapters) == 0 {
		return base
	}
	d := safetensors.NewDigest()
	fmt.Fprintf(d, "%s\n", base)
	for _, a := range adapters {
		fmt.Fprintf(d, "%s %x\n", a.Adapter.Digest(), math.Float64bits(a.Weight))
	}
	return d.Hex()
}

// Table is the projections of a model that adapters can change: of each the shape [n, k] of its
// weight, by the name that it has in a checkpoint.
type Table map[string][2]int

// ParseTable reads what Encode of a table has written.
func ParseTable(data []byte) (Table, error) {
	var t Table
	if err := json.Unmarshal(data, &t); err != nil {
		return nil, fmt.Errorf("table of modules: %w", err)
	}
	for name, shape := range t {
		if name == "" || shape[0] < 1 || shape[1] < 1 {
			return nil, fmt.Errorf("table of modules: %q: %v; must be a name and a shape", name, shape)
		}
	}
	return t, nil
}

// Encode is the table as JSON, the same bytes for equal tables.
func (t Table) Encode() ([]byte, error) { return json.Marshal(t) }

// Check says which of the adapters' modules the model does not have, or has in another shape, and which adapter
// changes nothing.
func (t Table) Check(adapters ...Weighted) error {
	var errs []error
	for i, a := range adapters {
		if a.Adapter == nil {
			return fmt.Errorf("adapter %d: none", i)
		}
		var faults []error
		if !finite(a.Weight) {
			faults = append(faults, fmt.Errorf("scale: %g; must be a number", a.Weight))
		}
		if a.changesNothing() {
			faults = append(faults, errors.New("changes nothing: its scale, lora_alpha, lora_A or lora_B is 0 everywhere"))
		}
		for _, module := range a.Adapter.Modules() {
			p := a.Adapter.modules[module]
			shape, ok := t[module]
			switch {
			case !ok:
				faults = append(faults, fmt.Errorf("module %s: the transformer has none", module))
			case shape != [2]int{p.N, p.K}:
				faults = append(faults, fmt.Errorf("module %s: changes a weight of %d x %d, here %d x %d", module, p.N, p.K, shape[0], shape[1]))
			}
			if len(faults) == maxFaults {
				faults = append(faults, errors.New("and perhaps more"))
				break
			}
		}
		if len(faults) > 0 {
			errs = append(errs, fmt.Errorf("adapter %s: %w", a.Adapter.name, errors.Join(faults...)))
		}
	}
	return errors.Join(errs...)
}

// changesNothing reports whether all products are 0.
func (a Weighted) changesNothing() bool {
	zeros := func(x []float32) bool { return !slices.ContainsFunc(x, func(v float32) bool { return v != 0 }) }
	for _, p := range a.Adapter.modules {
		if a.Weight*p.Scale != 0 && !zeros(p.A) && !zeros(p.B) {
			return false
		}
	}
	return true
}

// maxFaults is how many modules an error names.
const maxFaults = 16

// finite reports whether v is a number.
func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
