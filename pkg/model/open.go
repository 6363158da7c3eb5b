package model

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// SyntheticName is the name under which Open and every Card know the closed-form model.
const SyntheticName = "synthetic"

// ErrUnknown is returned by Open for a name that is no model.
var ErrUnknown = errors.New("no such model")

// OpenOptions change what Open loads. The zero value changes nothing.
type OpenOptions struct {
	// Threads is how many threads compute; default GOMAXPROCS. Results do not depend on it.
	Threads int
	// Adapter is a LoRA in PEFT's form to add, a file or a folder; AdapterScale how much of
	// it, default 1.
	Adapter      string
	AdapterScale float64
}

// Open returns the model called name: SyntheticName, a folder in the diffusers layout,
// or the name of a folder that Find knows. The caller closes it.
func Open(name string, o OpenOptions) (Model, error) {
	if name == SyntheticName {
		if o.Adapter != "" {
			return nil, fmt.Errorf("adapter %q: the %s model takes none", o.Adapter, SyntheticName)
		}
		return NewSynthetic(), nil
	}
	dir, err := Find(name)
	if err != nil {
		return nil, err
	}
	base, err := OpenQwenImage(dir, QwenImageOptions{Threads: o.Threads})
	if err != nil {
		return nil, err
	}
	if o.Adapter == "" {
		return base, nil
	}
	defer func() { _ = base.Close() }() // the adapted model keeps what both share
	adapter, err := OpenAdapter(o.Adapter)
	if err != nil {
		return nil, err
	}
	if o.AdapterScale == 0 {
		o.AdapterScale = 1
	}
	adapted, err := base.WithAdapters(Weighted{adapter, o.AdapterScale})
	if err != nil {
		return nil, err
	}
	return adapted, nil
}

// Find returns the folder of a model. A name without a path separator is looked for in
// the working directory, in the folder that MEANDER_MODELS names, and in deploy/models
// of the project, seen from the working directory and from the program.
func Find(name string) (string, error) {
	tried := []string{name}
	if name != "" && !strings.ContainsAny(name, `/\`) {
		if dir := os.Getenv("MEANDER_MODELS"); dir != "" {
			tried = append(tried, filepath.Join(dir, name))
		}
		tried = append(tried, filepath.Join("deploy", "models", name))
		if program, err := os.Executable(); err == nil {
			tried = append(tried, filepath.Join(filepath.Dir(program), "..", "deploy", "models", name))
		}
	}
	for _, dir := range tried {
		if info, err := os.Stat(filepath.Join(dir, "model_index.json")); err == nil && info.Mode().IsRegular() {
			return dir, nil
		}
	}
	return "", fmt.Errorf("model %q: %w: want %q or a folder with a model_index.json; looked in %s",
		name, ErrUnknown, SyntheticName, strings.Join(tried, ", "))
}

// NameOf returns the name that the model at a path has in events: the last element
// of the path, with every character outside A-Z a-z 0-9 _ - replaced by -. In a Hugging
// Face cache, models--ORG--NAME/snapshots/REVISION, it is NAME.
func NameOf(path string) string {
	path = filepath.Clean(path)
	name := filepath.Base(path)
	if up := filepath.Dir(path); filepath.Base(up) == "snapshots" {
		if repository, ok := strings.CutPrefix(filepath.Base(filepath.Dir(up)), "models--"); ok {
			parts := strings.Split(repository, "--")
			name = parts[len(parts)-1]
		}
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '-'
	}, name)
}
