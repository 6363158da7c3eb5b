package nn

import (
	"errors"
	"fmt"
	"sync"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// LoadPart reads the checkpoint in a folder of a model onto a device and adds its files
// to the digest, both at once. What the checkpoint has otherwise than load asks for is an
// error. progress may be nil.
func LoadPart(folder *safetensors.Folder, device tensor.Device, part string, d *safetensors.Digest, progress model.Progress, load func(*Loader)) error {
	a, err := folder.Archive(part)
	if err != nil {
		return err
	}
	m := &meter{part: part, progress: progress}
	for _, f := range a.Files() {
		m.total += len(f.Bytes)
	}
	l := NewLoader(a, device)
	l.read = m.add
	hashed := make(chan struct{})
	go func() {
		defer close(hashed)
		d.Archive(part, a, m.add)
	}()
	func() {
		defer func() { <-hashed }() // whatever load does, the files stay open until then
		load(l)
	}()
	m.end()
	if err := errors.Join(l.Finish(), a.Close()); err != nil {
		return fmt.Errorf("load %s: %w", part, err)
	}
	return nil
}

// meter adds up what is read of a part, by its loader and for its digest.
type meter struct {
	part     string
	total    int // bytes of the files
	progress model.Progress

	mu   sync.Mutex
	read int
}

func (m *meter) add(bytes int) {
	if m.progress == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read += bytes
	m.progress(m.part, min(m.read/2, m.total), m.total)
}

// end tells that all is read: what nothing asked for was not.
func (m *meter) end() { m.add(2*m.total - m.read) }

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
