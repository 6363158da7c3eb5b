package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Family is an architecture: how its checkpoints are recognised and opened.
type Family struct {
	// Name is the Card.Family of its models: the name of its package, with dashes added.
	Name string
	// Class is the _class_name in the model_index.json of its folders, which is the class of
	// the diffusers pipeline. A family without one needs no folder: its Name opens it.
	Class string
	// Open loads the checkpoint in a folder; dir is "" if the family needs none.
	Open func(dir string, o Options) (Model, error)
	// Inspect describes the checkpoint in a folder without reading its weights. Whatever Open would refuse is in
	// Info.Problems; an error means that there is no checkpoint.
	Inspect func(dir string) (*Info, error)
}

// Options change what a family opens. The zero value changes nothing.
type Options struct {
	// Device computes; the caller closes it. Default: a CPU of Threads threads.
	Device tensor.Device
	// Threads is the number of threads of that CPU; default GOMAXPROCS. Results do not depend on
	// it.
	Threads int
	// Adapter is a LoRA in PEFT's form to add, a file or a folder; AdapterScale multiplies its
	// changes, default 1.
	Adapter      string
	AdapterScale float64
	// PromptCacheBytes bounds the memory of cached conditionings; 0 is the default of the family,
	// a negative number disables the cache.
	PromptCacheBytes int
	// Warn, where set, is told what makes a device slower than it could be, at any time. Whoever opens the device hears
	// it: with Device set it is not used.
	Warn func(error)
	// Progress is called while the networks are loaded. Several goroutines call it, one at a time.
	Progress Progress
	// Hashes, where set, has the digests of files that others with the same Hashes read, too, computed once.
	Hashes *safetensors.Hashes
}

// Progress is called while a network is loaded: done of total bytes of its files are read.
type Progress func(part string, done, total int)

// Registry lists the families that a program can open.
type Registry []Family

// ErrUnknown is wrapped by the errors for a name of no model, and for a folder of an unknown
// family.
var ErrUnknown = errors.New("no such model")

// IndexFile is the file of a folder in the layout of diffusers that names its family, its parts and their classes.
const IndexFile = "model_index.json"

// maxIndexFile bounds the file that names the family, in bytes.
const maxIndexFile = 1 << 20

// Find returns the folder and the family of the model called name; the folder is "" for a family that needs none. A
// name is the name of a family without folders, or of a folder with a model_index.json. A name without a path
// separator is looked for in the working directory, in the folder that MEANDER_MODELS names, and among the models
// that ship inside the program.
func (r Registry) Find(name string) (dir string, f Family, err error) {
	if i := slices.IndexFunc(r, func(f Family) bool { return f.Class == "" && f.Name == name }); i >= 0 {
		return "", r[i], nil
	}
	dir, tried, err := FindFolder(name, IndexFile)
	if err != nil {
		return "", f, fmt.Errorf("model %q: %w", name, err)
	}
	if dir == "" {
		return "", f, Unknown(name, IndexFile, tried, r.folderless()...)
	}
	class, err := classOf(dir)
	if err != nil {
		return "", f, fmt.Errorf("model %q: %w", name, err)
	}
	var known []string
	for _, f := range r {
		if f.Class == class && class != "" {
			return dir, f, nil
		}
		if f.Class != "" {
			known = append(known, f.Class)
		}
	}
	return "", f, fmt.Errorf("model %q: %w: model_index.json: _class_name: %.80q; must be one of %s",
		name, ErrUnknown, class, strings.Join(known, ", "))
}

// folderless returns the names of the families that need no folder.
func (r Registry) folderless() (names []string) {
	for _, f := range r {
		if f.Class == "" {
			names = append(names, f.Name)
		}
	}
	return names
}

// classOf returns the class of the pipeline in a folder.
func classOf(dir string) (class string, err error) {
	var index struct {
		Class string `json:"_class_name"`
	}
	err = ReadIndex(dir, IndexFile, &index)
	return index.Class, err
}

// ReadIndex decodes the JSON file of a folder that names its family into a struct.
func ReadIndex(dir, file string, into any) (err error) {
	folder, err := safetensors.OpenFolder(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	b, err := folder.Read(file, maxIndexFile)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	return nil
}

// Open returns the model called name, as Find finds it. The caller closes it.
func (r Registry) Open(name string, o Options) (Model, error) {
	dir, f, err := r.Find(name)
	if err != nil {
		return nil, err
	}
	m, err := f.Open(dir, o)
	if err != nil {
		return nil, err
	}
	if err := m.Card().Validate(); err != nil {
		return nil, errors.Join(fmt.Errorf("model %q: card: %w", name, err), m.Close())
	}
	return m, nil
}

// Inspect describes the model called name without reading its weights.
func (r Registry) Inspect(name string) (*Info, error) {
	dir, f, err := r.Find(name)
	if err != nil {
		return nil, err
	}
	return f.Inspect(dir)
}

// Info describes a model without loading it.
type Info struct {
	// Card is the card of the opened model, without the digest of the weights and the
	// backend. Fields whose configuration cannot be read are zero.
	Card
	// Parts are the networks that could be read.
	Parts []PartInfo `json:"parts"`
	// CountTokens counts the tokens of a prompt as MaxPromptTokens does; nil where it cannot without the weights.
	CountTokens func(prompt string) (int, error) `json:"-"`
	// Vocabulary is the number of token ids of the tokenizer, 0 where it cannot be read.
	Vocabulary int `json:"vocabulary"`
	// Problems lists why the model would not open: files, tensors and fields that are
	// missing, mis-shaped, unexpected or not supported. Without problems it opens.
	Problems []string `json:"problems"`
	// Pass returns the most memory in bytes that a device needs besides the weights for a call
	// of Velocity with so many rows (two per image with guidance) or of Decode for one image.
	// factorBytes is 4 or 2, the size of a factor of matrix products on the device. nil if the
	// configurations cannot be read.
	Pass func(size Size, rows, factorBytes int) int `json:"-"`
	// LoRA returns the memory in bytes that a LoRA of that rank on all projections takes on a GPU; nil as Pass is.
	LoRA func(rank, factorBytes int) int `json:"-"`
}

// PartInfo describes the checkpoint of one network.
type PartInfo struct {
	Name  string `json:"name"`
	Class string `json:"class"`
	// Parameters is the number of elements of all tensors in the files, used or not.
	Parameters int `json:"parameters"`
	// DTypes are the element types in the files, sorted.
	DTypes []string `json:"dtypes"`
	// Files is the number of files and FileBytes their size.
	Files     int `json:"files"`
	FileBytes int `json:"file_bytes"`
	// MemoryBytes is the memory of the loaded weights in float32, FactorBytes that with factors and tables in bf16.
	MemoryBytes int `json:"memory_bytes"`
	FactorBytes int `json:"memory_bytes_bf16"`
}

// Problem adds an error to Problems, joined errors one by one. It ignores nil.
func (i *Info) Problem(err error) {
	if err == nil {
		return
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range many.Unwrap() {
			i.Problem(e)
		}
		return
	}
	i.Problems = append(i.Problems, err.Error())
}
