// Package nn holds the parts that networks of several families share. A Loader reads weights
// by name from a checkpoint and makes Linears (projections), Convs and Decoders of them.
// Adapt adds LoRAs to projections. RopeTable holds rotary positions, LRU is a cache, Faults
// collects what is wrong in a configuration. It knows no family.
//
// A factor is a matrix that a device multiplies; devices may keep factors in bf16.
package nn

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Loader reads the tensors of one checkpoint by name. It collects every missing and mis-shaped tensor, and in
// Finish all unexpected ones, for one error. Shapes are compared before memory is allocated, so the files bound
// what it allocates.
type Loader struct {
	archive *safetensors.Archive
	device  tensor.Device   // of the weights; nil in a dry run
	dry     bool            // only check, read nothing
	kept    int             // elements that stay in memory
	factors int             // those of kept that a device may store in its factor type
	used    map[string]bool // names in the files
	wanted  lora.Shapes     // the tensors that were expected
	missing []string
	shapes  []string
	failed  error           // the first error of reading, or of copying to the device
	read    func(bytes int) // is called with how much was read; may be nil
	// FewRows says that products have few rows: see tensor.FewRowsPacker.
	FewRows bool
	// Prefix is put before every name: the result is the name in the files.
	Prefix string
	// Ignored reports whether a tensor of that name in the files may stay unused; for all others Finish fails.
	// nil: none may.
	Ignored func(name string) bool
}

// NewLoader returns a loader that loads onto a device. With a nil device it only checks (a dry run).
func NewLoader(a *safetensors.Archive, d tensor.Device) *Loader {
	return &Loader{archive: a, device: d, dry: d == nil, used: map[string]bool{}, wanted: lora.Shapes{}}
}

// Expect marks a tensor as used and reports whether it exists with that shape; if not, it notes the fault.
func (l *Loader) Expect(name string, shape ...int) bool {
	name = l.Prefix + name
	l.used[name], l.wanted[name] = true, shape
	info, ok := l.archive.Info(name)
	switch {
	case !ok:
		l.missing = append(l.missing, name)
	case !slices.Equal(info.Shape, shape):
		l.shapes = append(l.shapes, fmt.Sprintf("%s: %v; must be %v", name, info.Shape, shape))
	case !info.DType.Float():
		l.shapes = append(l.shapes, fmt.Sprintf("%s has type %s", name, info.DType))
	default:
		return true
	}
	return false
}

// Expected returns the shapes of all tensors that were expected so far, in the files or not.
func (l *Loader) Expected() lora.Shapes { return l.wanted }

// Array returns a tensor as it is in the file; ok is false if Expect reports false, and in a
// dry run. Its bytes are those of the file, valid until the archive is closed.
func (l *Loader) Array(name string, shape ...int) (a tensor.Array, ok bool) {
	if !l.Expect(name, shape...) {
		return a, false
	}
	info, _ := l.archive.Info(l.Prefix + name)
	l.kept += info.Elements()
	a.DType = info.DType
	if l.dry || l.failed != nil {
		return a, false
	}
	l.archive.Release() // what was read before is on the device
	data, err := l.archive.Bytes(l.Prefix + name)
	if l.noteError(err) {
		return a, false
	}
	if l.read != nil {
		l.read(len(data))
	}
	a.Shape, a.Data = shape, data
	return a, true
}

// factor is Array for a factor of matrix products.
func (l *Loader) factor(name string, shape ...int) (a tensor.Array, ok bool) {
	before := l.kept
	a, ok = l.Array(name, shape...)
	l.factors += l.kept - before
	return a, ok
}

// noteError keeps the first error and reports whether err is one.
func (l *Loader) noteError(err error) bool {
	if l.failed == nil {
		l.failed = err
	}
	return err != nil
}

// weight puts a weight, stacked of parts, on the device. An error is kept for the end of the load.
func (l *Loader) weight(parts ...tensor.Array) tensor.Weight {
	put := l.device.Weight
	if p, ok := l.device.(tensor.FewRowsPacker); ok && l.FewRows {
		put = p.WeightForFewRows
	}
	w, err := put(parts...)
	l.noteError(err)
	return w
}

func (l *Loader) filter(a tensor.Array) tensor.Filter {
	k, err := l.device.Filter(a)
	l.noteError(err)
	return k
}

func (l *Loader) vector(a tensor.Array) tensor.Vector {
	v, err := l.device.Vector(a)
	l.noteError(err)
	return v
}

// Vector puts the n elements of a tensor of any shape on the device.
func (l *Loader) Vector(name string, shape ...int) tensor.Vector {
	a, ok := l.Array(name, shape...)
	if !ok {
		return nil
	}
	return l.vector(a)
}

// Holds reports whether all tensors so far were read. It is false in a dry run and after a
// fault.
func (l *Loader) Holds() bool {
	return !l.dry && !l.hasFaults()
}

// Has reports whether the files have a tensor, of any shape.
func (l *Loader) Has(name string) bool {
	_, ok := l.archive.Info(l.Prefix + name)
	return ok
}

// Table puts a matrix on the device; sessions gather rows from it.
func (l *Loader) Table(name string, rows, cols int) tensor.Matrix {
	before := l.kept
	a, ok := l.Array(name, rows, cols)
	if a.DType == tensor.BF16 {
		l.factors += l.kept - before
	}
	if !ok {
		return tensor.Matrix{}
	}
	t, err := l.device.Table(a)
	l.noteError(err)
	return t
}

// table puts computed rows on the device.
func (l *Loader) table(x []float32, rows int) tensor.Matrix {
	t, err := l.device.Table(tensor.Floats(x, rows, len(x)/rows))
	l.noteError(err)
	return t
}

// Bytes returns the memory of the tensors so far on a device that stores factors, and tables
// that are bf16 in the files, with factorBytes per element, and all others in float32.
func (l *Loader) Bytes(factorBytes int) int { return 4*(l.kept-l.factors) + factorBytes*l.factors }

func (l *Loader) hasFaults() bool {
	return len(l.missing) > 0 || len(l.shapes) > 0 || l.failed != nil
}

// Finish returns one error for all faults; tensors in the files that were not used are faults, too.
func (l *Loader) Finish() error {
	var unexpected []string
	for _, name := range l.archive.Names() {
		if !l.used[name] && (l.Ignored == nil || !l.Ignored(name)) {
			unexpected = append(unexpected, name)
		}
	}
	if l.failed != nil {
		return l.failed
	}
	var parts []string
	for _, p := range []struct {
		what  string
		names []string
	}{{"missing", l.missing}, {"unexpected", unexpected}, {"of another shape", l.shapes}} {
		if len(p.names) > 0 {
			parts = append(parts, fmt.Sprintf("%d tensors %s: %s", len(p.names), p.what,
				safetensors.ListNames(p.names)))
		}
	}
	if len(parts) > 0 {
		return errors.New(strings.Join(parts, "; "))
	}
	return nil
}

// countParameters returns the number of parameters of an archive and their types, sorted.
func countParameters(a *safetensors.Archive) (parameters int, types []string) {
	seen := map[string]bool{}
	for _, name := range a.Names() {
		info, _ := a.Info(name)
		parameters += info.Elements()
		seen[string(info.DType)] = true
	}
	return parameters, slices.Sorted(maps.Keys(seen))
}

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
