package nn

import (
	"errors"
	"fmt"
	"sync"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// LoadPart loads the network in a folder of a model onto a device and adds its files to the digest at the same
// time. A tensor that is missing, unexpected or of another shape than load expects is an error. progress may be
// nil.
func LoadPart(folder *safetensors.Folder, device tensor.Device, part string, d *safetensors.Digest,
	progress model.Progress, load func(*Loader),
) error {
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
		defer func() { <-hashed }() // also if load panics, the files stay open until then
		load(l)
	}()
	m.finish()
	if err := errors.Join(l.Finish(), a.Close()); err != nil {
		return fmt.Errorf("load %s: %w", part, err)
	}
	return nil
}

// meter counts the bytes of a part that are read, once by the loader and once for the digest.
type meter struct {
	part     string
	total    int // bytes of the files
	progress model.Progress

	mu   sync.Mutex
	read int
}

// add counts bytes that were read, from several goroutines, and reports the progress. Each byte is
// read twice, for the digest and for the device, so it counts half.
func (m *meter) add(bytes int) {
	if m.progress == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.read += bytes
	m.progress(m.part, min(m.read/2, m.total), m.total)
}

// finish reports that all is read: tensors that are not used were not counted.
func (m *meter) finish() { m.add(2*m.total - m.read) }

// InspectPart adds the network in a folder of a model to info, with all problems for which LoadPart would fail.
// load runs without weights; it is nil if the configuration could not be read.
func InspectPart(info *model.Info, folder *safetensors.Folder, part, class string, load func(*Loader)) {
	a, err := folder.Archive(part)
	if err != nil {
		info.Problem(err)
		return
	}
	p := model.PartInfo{Name: part, Class: class}
	p.Parameters, p.DTypes = countParameters(a)
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
