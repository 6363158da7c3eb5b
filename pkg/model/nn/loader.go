// Package nn is what the networks of several families are made of: weights by name from
// checkpoints, projections and convolutions, rotary positions, adapters, caches, and the
// checks of configurations. It knows no family.
package nn

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Loader takes the tensors of one checkpoint by name. It collects every missing and
// mis-shaped tensor and at the end everything unexpected, for one error. Shapes are
// compared before memory is taken, so what it allocates is bounded by the files.
type Loader struct {
	archive *safetensors.Archive
	device  tensor.Device   // takes what is read; nil in a dry run
	dry     bool            // only check, read nothing
	kept    int             // elements that stay in memory
	factors int             // those of them that a device may keep in its factor type
	used    map[string]bool // names in the files
	wanted  lora.Shapes     // what was asked for
	missing []string
	shapes  []string
	failed  error           // the first that could not be read, or put on the device
	read    func(bytes int) // hears of what is read; nil: nobody does
	// Narrow leaves weights in the type of their file where the device can: see tensor.Narrow.
	Narrow bool
	// Prefix goes before every name, to make it the one in the files.
	Prefix string
	// Ignored says which other names may be there; nil is none.
	Ignored func(name string) bool
}

// NewLoader loads onto a device; without one it only checks.
func NewLoader(a *safetensors.Archive, d tensor.Device) *Loader {
	return &Loader{archive: a, device: d, dry: d == nil, used: map[string]bool{}, wanted: lora.Shapes{}}
}

// Expect notes a tensor and reports whether it is there with that shape.
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

// Expected is what was asked for, in the files or not.
func (l *Loader) Expected() lora.Shapes { return l.wanted }

// Array returns a tensor as it is in the file; ok is false where Expect or a dry run says
// no. Its bytes are the file's: they hold until the archive is closed.
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
	data, err := l.archive.Bytes(l.Prefix + name)
	if l.fails(err) {
		return a, false
	}
	if l.read != nil {
		l.read(len(data))
	}
	a.Shape, a.Data = shape, data
	return a, true
}

// factor is Array of what products read.
func (l *Loader) factor(name string, shape ...int) (a tensor.Array, ok bool) {
	before := l.kept
	a, ok = l.Array(name, shape...)
	l.factors += l.kept - before
	return a, ok
}

// fails keeps the first error.
func (l *Loader) fails(err error) bool {
	if l.failed == nil {
		l.failed = err
	}
	return err != nil
}

func (l *Loader) weight(parts ...tensor.Array) tensor.Weight {
	put := l.device.Weight
	if n, ok := l.device.(tensor.Narrow); ok && l.Narrow {
		put = n.NarrowWeight
	}
	w, err := put(parts...)
	l.fails(err)
	return w
}

func (l *Loader) kernel(a tensor.Array) tensor.Kernel {
	k, err := l.device.Kernel(a)
	l.fails(err)
	return k
}

func (l *Loader) vector(a tensor.Array) tensor.Vector {
	v, err := l.device.Vector(a)
	l.fails(err)
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

// Holds reports whether what was asked for so far has been read: not in a dry run, nor
// when something was wrong.
func (l *Loader) Holds() bool {
	return !l.dry && !l.faulty()
}

// Has reports whether the files have a tensor, whatever its shape.
func (l *Loader) Has(name string) bool {
	_, ok := l.archive.Info(l.Prefix + name)
	return ok
}

// Table puts a matrix on the device, to gather rows from.
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
	l.fails(err)
	return t
}

// table puts rows of numbers that are in no file on the device.
func (l *Loader) table(x []float32, rows int) tensor.Matrix {
	t, err := l.device.Table(tensor.Floats(x, rows, len(x)/rows))
	l.fails(err)
	return t
}

// Bytes is the memory of what was asked for so far, on a device that keeps projections, and
// tables that the files have in bf16, in a type of factorBytes, and all else in float32.
func (l *Loader) Bytes(factorBytes int) int { return 4*(l.kept-l.factors) + factorBytes*l.factors }

func (l *Loader) faulty() bool {
	return len(l.missing) > 0 || len(l.shapes) > 0 || l.failed != nil
}

// Finish returns everything that was wrong.
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
			parts = append(parts, fmt.Sprintf("%d tensors %s: %s", len(p.names), p.what, safetensors.ListNames(p.names)))
		}
	}
	if len(parts) > 0 {
		return errors.New(strings.Join(parts, "; "))
	}
	return nil
}

// count returns the parameters of an archive by type.
func count(a *safetensors.Archive) (parameters int, types []string) {
	seen := map[string]bool{}
	for _, name := range a.Names() {
		info, _ := a.Info(name)
		parameters += info.Elements()
		seen[string(info.DType)] = true
	}
	return parameters, slices.Sorted(maps.Keys(seen))
}
