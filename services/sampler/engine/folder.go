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

// WeightsFolder is a folder in which servers find the weights of policies, by names that are this sampler's alone:
// another may have the same folder, or the same servers. nil: the servers keep the weights that they have.
type WeightsFolder struct {
	// Modules lists what adapters can change in the servers' model, Tensors what full weights replace; nil: nothing.
	Modules lora.Table
	Tensors lora.Shapes

	folder string
	owner  string
	saved  atomic.Int64 // how many; each has a name of its own, also two of the same digest
}

// NewWeightsFolder returns the folder, for a model of such modules and tensors; nil where its name is empty.
func NewWeightsFolder(folder string, modules lora.Table, tensors lora.Shapes) *WeightsFolder {
	if folder == "" {
		return nil
	}
	if full, err := filepath.Abs(folder); err == nil { // the servers have another working folder
		folder = full
	}
	return &WeightsFolder{
		Modules: modules, Tensors: tensors, folder: folder, owner: strings.ToLower(rand.Text()[:8]),
	}
}

// Fit returns a change with an adapter that fits the servers of n; a *Refusal: they do not take it.
func (f *WeightsFolder) Fit(n Network, c Change) (_ Change, err error) {
	switch {
	case f == nil:
		return c, Refuse("adapter: given, or weights; %s has those that it was started with", n.Backend())
	case c.Full != nil && f.Tensors == nil:
		return c, Refuse("weights: given; %s takes adapters only", n.Backend())
	case c.Full == nil && f.Modules == nil:
		return c, Refuse("adapter: given; %s takes whole weights only", n.Backend())
	case c.Full != nil:
		return c, refused(f.Tensors.Check(c.Full))
	case len(c.Adapters) > 1:
		return c, Refuse("adapter: %d; %s takes one", len(c.Adapters), n.Backend())
	}
	c.Adapters, err = f.Modules.Fit(c.Adapters...)
	return c, refused(err)
}

// Path returns the path of weights by their name.
func (f *WeightsFolder) Path(name string) string { return filepath.Join(f.folder, name) }

// SaveAdapter writes an adapter in PEFT's form, and returns its name, of which version is a part.
func (f *WeightsFolder) SaveAdapter(a lora.Weighted, version string) (name string, err error) {
	name = f.newName(version)
	return name, a.Save(f.Path(name))
}

// SaveFull writes a whole transformer into the folder of a model, to the file of a path there without its ending. It
// returns the name of the model's folder, of which version is a part.
func (f *WeightsFolder) SaveFull(w *lora.Full, version, file string) (name string, err error) {
	name = f.newName(version)
	if err := w.Save(filepath.Join(f.Path(name), file)); err != nil {
		return "", errors.Join(err, f.Remove(name))
	}
	return name, nil
}

func (f *WeightsFolder) newName(version string) string {
	return fmt.Sprintf("meander-%.12s-%s-%d", version, f.owner, f.saved.Add(1))
}

// Remove removes weights by their name.
func (f *WeightsFolder) Remove(name string) error { return os.RemoveAll(f.Path(name)) }
