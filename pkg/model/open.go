package model

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// SyntheticName is the name under which Open and every Card know the closed-form model.
const SyntheticName = "synthetic"

// ErrUnknown is returned by Open for a name that is no model.
var ErrUnknown = errors.New("no such model")

// Open returns the model called name: SyntheticName, or a folder in the diffusers
// layout. The caller closes it.
func Open(name string) (Model, error) {
	if name == SyntheticName {
		return NewSynthetic(), nil
	}
	return nil, fmt.Errorf("model %q: %w: want %q", name, ErrUnknown, SyntheticName)
}

// NameOf returns the name that the model at a path has in events: the last element
// of the path, with every character outside A-Z a-z 0-9 _ - replaced by -.
func NameOf(path string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '_', r == '-':
			return r
		}
		return '-'
	}, filepath.Base(filepath.Clean(path)))
}
