package nn

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// LoadPart reads the checkpoint in a folder of a model onto a device and adds its files
// to the digest. What the checkpoint has otherwise than load asks for is an error.
func LoadPart(folder *safetensors.Folder, device tensor.Device, part string, d *Digest, load func(*Loader)) error {
	a, err := folder.Archive(part)
	if err != nil {
		return err
	}
	d.Archive(part, a)
	l := NewLoader(a, device)
	load(l)
	if err := errors.Join(l.Finish(), a.Close()); err != nil {
		return fmt.Errorf("load %s: %w", part, err)
	}
	return nil
}

// InspectPart adds the checkpoint in a folder of a model to its description, with all for
// which LoadPart would fail. load is asked what it reads, without weights; it is nil where
// the configuration does not say.
func InspectPart(info *model.Info, folder *safetensors.Folder, part, class string, load func(*Loader)) {
	a, err := folder.Archive(part)
	if err != nil {
		info.Problem(err)
		return
	}
	p := model.PartInfo{Name: part, Class: class}
	p.Parameters, p.DTypes = count(a)
	for _, f := range a.Files() {
		p.Files++
		p.FileBytes += len(f.Bytes)
	}
	if load != nil {
		l := NewLoader(a, nil)
		load(l)
		p.MemoryBytes, p.FactorBytes = l.Bytes(4), l.Bytes(2)
		info.Problem(l.Finish())
	}
	info.Problem(a.Close())
	info.Parts = append(info.Parts, p)
}
