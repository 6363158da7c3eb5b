// Package lora reads files that change the weights of a model while it runs, and checks them against the model. An
// Adapter is a LoRA (low-rank adaptation) in PEFT's form; Full is a whole transformer. A Table lists the
// projections (linear layers) of a model that adapters can change, Shapes the tensors of its transformer.
// WeightsDigest and FullDigest identify the changed weights. The package knows no network.
package lora

import (
	"cmp"
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

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Adapter is a LoRA. For some projections W [n, k] it holds two thin matrices whose product is added: W + scale * B
// A, with A [r, k] and B [n, r] (Hu et al. 2021, eq. 3). It is immutable and belongs to no model.
type Adapter struct {
	name         string
	digest       string
	file, config []byte
	modules      map[string]*Product
	off          []string
}

// Product is the change of one projection: A [R, K] and B [N, R], row-major.
type Product struct {
	A, B    []float32
	R, N, K int
	// Scale multiplies B A.
	Scale float64
}

// Weighted is an adapter with a factor for its changes; 1 is the strength that it was trained with.
type Weighted struct {
	Adapter *Adapter
	Weight  float64
}

// Files of an adapter folder, as PEFT and as diffusers name them.
const (
	PEFTWeights      = "adapter_model.safetensors"
	PEFTConfig       = "adapter_config.json"
	diffusersWeights = "pytorch_lora_weights.safetensors"
	// loraMetadata is the header entry in which diffusers keeps the configuration.
	loraMetadata = "lora_adapter_metadata"
)

// MaxFile and MaxConfig bound weights and configuration, in bytes.
const (
	MaxFile   = 16 << 30
	MaxConfig = 64 << 10
)

// Open reads a LoRA in PEFT's form from a safetensors file or a folder. The scale of a module is lora_alpha/r, or
// lora_alpha/sqrt(r) with use_rslora. It comes from adapter_config.json beside the weights, from the header of the
// file, or from alpha tensors; without any of them it is 1, as in diffusers. Of the keys of alpha_pattern and
// rank_pattern, regular expressions, the first in the file that matches counts. A configuration with other changes
// than scale * B A is an error that names the field. A name of the Hugging Face Hub is that of its folder in the cache.
func Open(name string) (*Adapter, error) {
	file, config, err := readFiles(Folder(name))
	if err == nil {
		var a *Adapter
		if a, err = Parse(nameOf(name), file, config); err == nil {
			return a, nil
		}
	}
	return nil, fmt.Errorf("open adapter %q: %w", name, err)
}

// Folder returns the path of the adapter called name: itself, or for ORG/NAME of the Hugging Face Hub the folder in the
// cache, where there is one.
func Folder(name string) string {
	if _, err := os.Stat(name); err != nil {
		return cmp.Or(hub.Local(name), name)
	}
	return name
}

// nameOf returns the last element of a path, without the extension of a file.
func nameOf(name string) string {
	return strings.TrimSuffix(filepath.Base(filepath.Clean(name)), ".safetensors")
}

// readFiles returns the bytes of the weights and of adapter_config.json of the adapter at name, a
// file or a folder. config is nil if there is none. Files that are missing or too large are errors.
func readFiles(name string) (weights, config []byte, err error) {
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
		for _, file = range []string{PEFTWeights, diffusersWeights} {
			if _, err := folder.Stat(file); err == nil {
				break
			}
		}
	}
	if weights, err = folder.Read(file, MaxFile); err != nil {
		return nil, nil, err
	}
	config, err = folder.Read(PEFTConfig, MaxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return weights, nil, nil
	}
	return weights, config, err
}

// Parse is Open for files in memory: adapter_model.safetensors, and adapter_config.json, which may
// be empty. Samplers call it on what they fetched. Both are not copied and must not be modified.
// name is for messages. Errors are those of Open.
func Parse(name string, file, config []byte) (*Adapter, error) {
	archive, err := safetensors.Parse(PEFTWeights, file)
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
	if a.modules, a.off, err = readModules(archive, scale); err != nil {
		return nil, err
	}
	d := safetensors.NewDigest()
	d.File(PEFTWeights, file)
	d.File(PEFTConfig, config)
	a.digest = d.Hex()
	return a, nil
}

// Name returns the last element of the path that it was read from, for messages.
func (a *Adapter) Name() string { return a.name }

// Digest returns the SHA-256 in hex of the weights and of the configuration that counts: Config, or that in the header
// of the weights where Config is empty.
func (a *Adapter) Digest() string { return a.digest }

// File returns the file of weights that it was read from. It must not be modified.
func (a *Adapter) File() []byte { return a.file }

// Config returns the configuration that it was read from; it may be empty and must not be modified.
func (a *Adapter) Config() []byte { return a.config }

// Note says what was taken off the names of its modules, such as base_model.model. and _orig_mod.; empty: nothing.
func (a *Adapter) Note() string {
	if len(a.off) == 0 {
		return ""
	}
	return fmt.Sprintf("adapter %s: names of modules are read without %s", a.name, strings.Join(a.off, ", "))
}

// Modules returns the names of the projections that it changes, sorted: as the file has them until Table.Fit.
func (a *Adapter) Modules() []string { return slices.Sorted(maps.Keys(a.modules)) }

// Product returns the change of a projection, nil if there is none.
func (a *Adapter) Product(module string) *Product { return a.modules[module] }

// WeightsDigest returns the digest of the weights with digest base after the adapters, which
// samples are stored with: the SHA-256 in hex over base, a newline and, for each adapter, its
// digest, a space, the bits of its weight in hex and a newline. Without adapters it is base.
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

// Table is the projections of a model that adapters can change: the shape [n, k] of each weight, by its name in a
// checkpoint.
type Table map[string][2]int

// ParseTable reads a table that Encode has written: samplers publish theirs, and clients check an
// adapter against it. An entry without name or shape is an error.
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

// Encode returns the table as JSON; equal tables give equal bytes.
func (t Table) Encode() ([]byte, error) { return json.Marshal(t) }

// Check returns the error of Fit. Clients call it before a push.
func (t Table) Check(adapters ...Weighted) error {
	_, err := t.Fit(adapters...)
	return err
}

// Fit returns the adapters with the names that the model has: trainers name the same modules in several ways, and as
// one what diffusers has as several. Samplers call it before they load. It returns an error, with the names, if the
// model does not have a module of an adapter, or has it in another shape, or if an adapter changes nothing.
func (t Table) Fit(adapters ...Weighted) ([]Weighted, error) {
	var errs []error
	fitting := make([]Weighted, len(adapters))
	resolver := t.resolver()
	for i, a := range adapters {
		if a.Adapter == nil {
			return nil, fmt.Errorf("adapter %d: none", i)
		}
		var faults []error
		if !finite(a.Weight) {
			faults = append(faults, fmt.Errorf("scale: %g; must be a number", a.Weight))
		}
		if a.changesNothing() {
			faults = append(faults,
				errors.New("changes nothing: its scale, lora_alpha, lora_A or lora_B is 0 everywhere"))
		}
		named, more := resolver.rename(a.Adapter)
		if faults = append(faults, more...); len(faults) > 0 {
			errs = append(errs, fmt.Errorf("adapter %s: %w", a.Adapter.name, errors.Join(faults...)))
		}
		fitting[i] = Weighted{named, a.Weight}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return fitting, nil
}

// rename returns an adapter with the names that the model has, and why it does not fit.
func (r *resolver) rename(a *Adapter) (named *Adapter, faults []error) {
	named = new(*a)
	named.modules = make(map[string]*Product, len(a.modules))
	for _, module := range a.Modules() {
		if err := r.add(named.modules, module, a.modules[module]); err != nil {
			faults = append(faults, fmt.Errorf("module %s: %w", module, err))
		}
		if len(faults) == maxFaults {
			return nil, append(faults, errors.New("and perhaps more"))
		}
	}
	return named, faults
}

// add adds the change of a module of a file to those of the model's.
func (r *resolver) add(all map[string]*Product, module string, p *Product) error {
	own, swap := r.resolve(module)
	if len(own) == 0 {
		return errors.New("the transformer has none")
	}
	parts, err := p.divide(own, swap, r.Table)
	if err != nil {
		return err
	}
	for name, part := range parts {
		if all[name] != nil {
			return fmt.Errorf("%s is changed under another name, too; must be one of them", name)
		}
		all[name] = part
	}
	return nil
}

// Fresh reports whether an adapter fits, and is as training begins with it: lora_A of each module is drawn and lora_B
// is 0, so that it adds nothing yet.
func (t Table) Fresh(a *Adapter) bool {
	for _, p := range a.modules {
		if zeros(p.A) || !zeros(p.B) {
			return false
		}
	}
	_, faults := t.resolver().rename(a)
	return len(faults) == 0
}

// changesNothing reports whether all products of the adapter are 0: pushing it is a mistake.
func (a Weighted) changesNothing() bool {
	for _, p := range a.Adapter.modules {
		if a.Weight*p.Scale != 0 && !zeros(p.A) && !zeros(p.B) {
			return false
		}
	}
	return true
}

// zeros reports whether all elements are 0.
func zeros(x []float32) bool { return !slices.ContainsFunc(x, func(v float32) bool { return v != 0 }) }

// maxFaults bounds how many faults of an adapter an error lists.
const maxFaults = 16

// finite reports whether v is neither NaN nor infinite.
func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// Mixer is a model whose calls take rows of other models, too, each with the bits that it has alone. In one call are
// models of equal values of Mix: with adapters of one checkpoint, or none.
type Mixer interface{ Mix() any }

// Adaptable is a model of type M to which LoRAs can be added, and whose weights can be replaced, while it is in use. A
// new model reads no files and shares with the old one what does not change, but no cache of tokens: a sequence belongs
// to the model that made it. Both models stay usable, and each must be closed.
type Adaptable[M any] interface {
	// BaseDigest returns the digest of the checkpoint, without adapters.
	BaseDigest() string
	// Modules returns the projections that adapters can change.
	Modules() Table
	// Adapted returns a model of the checkpoint plus exactly these adapters, also if there are none. An adapter that
	// does not fit is an error.
	Adapted(adapters ...Weighted) (M, error)
	// Tensors returns the shapes of the tensors that weights for Replaced must have: those of the trained network.
	Tensors() Shapes
	// Replaced returns a model of the checkpoint whose trained network is replaced by weights, without the adapters of
	// this model; digest is the digest of the new model. The weights are not used when it has returned. Tensors that do
	// not fit are an error.
	Replaced(weights *Full, digest string) (M, error)
}
