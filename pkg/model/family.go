package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Family is an architecture: how its checkpoints are told from others and opened.
type Family struct {
	// Name is the Card.Family of its models: the name of its package, with dashes.
	Name string
	// Class is the _class_name in the model_index.json of its folders, that of the
	// diffusers pipeline. A family without one needs no folder: its Name opens it.
	Class string
	// Open loads the checkpoint in a folder; "" where the family needs none.
	Open func(dir string, o Options) (Model, error)
	// Inspect describes the checkpoint in a folder without reading its weights. Whatever
	// Open would refuse is in Info.Problems; an error means that there is no checkpoint.
	Inspect func(dir string) (*Info, error)
	// Random writes a folder of the size of the published checkpoint with random weights, to
	// measure with; nil where a family needs no folder.
	Random func(dir string, r Random) error
}

// Random is how a folder of random weights differs from the published one. Zero fields
// leave it as it is.
type Random struct {
	Layers, TextLayers, Vocabulary int
	Size                           int    // height and width of images where a prompt names none, in pixels
	Seed                           uint64 // of the weights
	// Hollow leaves large tensors out of the files: zeros that take no disk.
	Hollow bool
	// Progress hears of every file that is about to be written.
	Progress func(file string, bytes int)
}

// Options change what a family opens. The zero value changes nothing.
type Options struct {
	// Device computes, and stays the caller's; default a CPU of Threads threads.
	Device tensor.Device
	// Threads is how many threads that CPU has; default GOMAXPROCS. Results do not depend on
	// it.
	Threads int
	// Adapter is a LoRA in PEFT's form to add, a file or a folder; AdapterScale how much of
	// it, default 1.
	Adapter      string
	AdapterScale float64
	// PromptCacheBytes bounds the conditionings that are kept; 0 is the family's default,
	// negative keeps none.
	PromptCacheBytes int
	// Progress hears of weights on their way to the device, while they are read: which network,
	// and how many of the bytes of its files. Several goroutines call it, one after the other.
	Progress Progress
}

// Progress is told how far the loading of one network is, in bytes.
type Progress func(part string, done, total int)

// Registry is the families that a program knows.
type Registry []Family

// ErrUnknown is wrapped by the errors for a name that is no model, and for a folder of no
// known family.
var ErrUnknown = errors.New("no such model")

// indexFile is the file of a folder by which its family is told.
const indexFile = "model_index.json"

// maxIndexFile bounds the file that a family is told by, in bytes.
const maxIndexFile = 1 << 20

// Find returns the folder of the model called name, "" for a family that needs none, and
// its family. A name is that of a family without folders, or of a folder with a
// model_index.json. One without a path separator is looked for in the working directory,
// in the folder that MEANDER_MODELS names, and in deploy/models of the project, seen from
// the working directory and from the program.
func (r Registry) Find(name string) (dir string, f Family, err error) {
	if i := slices.IndexFunc(r, func(f Family) bool { return f.Class == "" && f.Name == name }); i >= 0 {
		return "", r[i], nil
	}
	dir, tried := FindFolder(name, indexFile)
	if dir == "" {
		return "", f, Unknown(name, indexFile, tried, r.named()...)
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

// named lists the families that need no folder.
func (r Registry) named() (names []string) {
	for _, f := range r {
		if f.Class == "" {
			names = append(names, f.Name)
		}
	}
	return names
}

// classOf reads the class of the pipeline in a folder.
func classOf(dir string) (class string, err error) {
	var index struct {
		Class string `json:"_class_name"`
	}
	err = ReadIndex(dir, indexFile, &index)
	return index.Class, err
}

// ReadIndex reads the JSON file of a folder by which its family is told into a struct.
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
