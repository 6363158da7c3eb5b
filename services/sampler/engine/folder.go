package engine

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/meander-rl/meander/pkg/models/lora"
)

// WeightsFolder is a folder in which servers find the weights of policies, those of each policy in a folder of its own.
// The names are this sampler's alone: another sampler with the same folder, or the same servers, has others.
type WeightsFolder struct {
	folder string
	owner  string
	saved  atomic.Int64 // how many; each has a name of its own, also two of the same digest
}

// NewWeightsFolder returns the folder; nil where its name is empty.
func NewWeightsFolder(folder string) *WeightsFolder {
	if folder == "" {
		return nil
	}
	if full, err := filepath.Abs(folder); err == nil { // the servers have another working folder
		folder = full
	}
	return &WeightsFolder{folder: folder, owner: strings.ToLower(rand.Text()[:8])}
}

// Path returns the path of weights by their name.
func (f *WeightsFolder) Path(name string) string { return filepath.Join(f.folder, name) }

// SaveAdapter writes an adapter in PEFT's form, and returns its name, of which version is a part.
func (f *WeightsFolder) SaveAdapter(a lora.Weighted, version string) (name string, err error) {
	name = f.newName(version)
	return name, a.Save(f.Path(name))
}

// SaveFull writes a whole transformer as a model of diffusers has it, and returns its name, of which version is a part.
func (f *WeightsFolder) SaveFull(w *lora.Full, version string) (name string, err error) {
	name = f.newName(version)
	if err := w.Save(filepath.Join(f.Path(name), "transformer")); err != nil {
		return "", errors.Join(err, f.Remove(name))
	}
	return name, nil
}

func (f *WeightsFolder) newName(version string) string {
	return fmt.Sprintf("meander-%.12s-%s-%d", version, f.owner, f.saved.Add(1))
}

// Remove removes weights by their name.
func (f *WeightsFolder) Remove(name string) error { return os.RemoveAll(f.Path(name)) }
