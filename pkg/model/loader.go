package model

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/safetensors"
	"github.com/meander-rl/meander/pkg/tensor"
)

// loader takes the tensors of one checkpoint by name. It collects every missing and
// mis-shaped tensor and at the end everything unexpected, for one error. Shapes are
// compared before memory is taken, so what it allocates is bounded by the files.
type loader struct {
	archive *safetensors.Archive
	device  tensor.Device   // takes what is read; nil in a dry run
	prefix  string          // of the names in the files
	dry     bool            // only check, read nothing
	kept    int             // elements that stay in memory
	used    map[string]bool // names in the files
	missing []string
	shapes  []string
	failed  error // the first read that failed
	// ignored says which other names may be there; nil is none.
	ignored func(name string) bool
}

// newLoader loads onto a device; without one it only checks.
func newLoader(a *safetensors.Archive, d tensor.Device) *loader {
	return &loader{archive: a, device: d, dry: d == nil, used: map[string]bool{}}
}

// expect notes a tensor and reports whether it is there with that shape.
func (l *loader) expect(name string, shape ...int) bool {
	name = l.prefix + name
	l.used[name] = true
	info, ok := l.archive.Info(name)
	switch {
	case !ok:
		l.missing = append(l.missing, name)
	case !slices.Equal(info.Shape, shape):
		l.shapes = append(l.shapes, fmt.Sprintf("%s %v, want %v", name, info.Shape, shape))
	case !info.DType.Float():
		l.shapes = append(l.shapes, fmt.Sprintf("%s has type %s", name, info.DType))
	default:
		return true
	}
	return false
}

// array returns a tensor as it is in the file; ok is false where expect or a dry run says
// no. Its bytes are the file's: they hold until the archive is closed.
func (l *loader) array(name string, shape ...int) (a tensor.Array, ok bool) {
	if !l.expect(name, shape...) {
		return a, false
	}
	info, _ := l.archive.Info(l.prefix + name)
	l.kept += info.Elements()
	if l.dry {
		return a, false
	}
	data, err := l.archive.Bytes(l.prefix + name)
	if err != nil {
		if l.failed == nil {
			l.failed = err
		}
		return a, false
	}
	return tensor.Array{DType: info.DType, Shape: shape, Data: data}, true
}

// vector puts the n elements of a tensor of any shape on the device.
func (l *loader) vector(name string, shape ...int) tensor.Vector {
	a, ok := l.array(name, shape...)
	if !ok {
		return nil
	}
	return l.device.Vector(a)
}

// faulty reports whether something was wrong so far.
func (l *loader) faulty() bool {
	return len(l.missing) > 0 || len(l.shapes) > 0 || l.failed != nil
}

// linear is y = x w^T + bias.
type linear struct {
	w    tensor.Weight
	bias tensor.Vector // nil without one
}

func (l *linear) bytes() int {
	if l.w == nil {
		return 0
	}
	return l.w.Bytes() + vectorBytes(l.bias)
}

func vectorBytes(vs ...tensor.Vector) int {
	n := 0
	for _, v := range vs {
		if v != nil {
			n += v.Bytes()
		}
	}
	return n
}

// apply computes dst = x w^T + bias with the rest of an epilogue.
func (l *linear) apply(s tensor.Session, dst, x tensor.Matrix, e tensor.Epilogue) {
	e.Bias = l.bias
	s.Linear(dst, x, l.w, e)
}

// output is one of the projections that are stacked in a linear.
type output struct {
	name string // without .weight
	n    int
}

// linear reads projections of one input of k columns and stacks them.
func (l *loader) linear(k int, withBias bool, outs ...output) linear {
	var ws []tensor.Array
	var bias []float32
	whole := true
	for _, o := range outs {
		w, ok := l.array(o.name+".weight", o.n, k)
		whole = whole && ok
		ws = append(ws, w)
		if withBias {
			b, ok := l.array(o.name+".bias", o.n)
			if whole = whole && ok; ok {
				bias = append(bias, b.Decode()...)
			}
		}
	}
	if !whole {
		return linear{}
	}
	out := linear{w: l.device.Weight(ws...)}
	if withBias {
		out.bias = l.device.Vector(tensor.Floats(bias, len(bias)))
	}
	return out
}

// finish returns everything that was wrong.
func (l *loader) finish() error {
	var unexpected []string
	for _, name := range l.archive.Names() {
		if !l.used[name] && (l.ignored == nil || !l.ignored(name)) {
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
			parts = append(parts, fmt.Sprintf("%d tensors %s: %s", len(p.names), p.what, shorten(p.names)))
		}
	}
	if len(parts) > 0 {
		return errors.New(strings.Join(parts, "; "))
	}
	return nil
}

// shorten joins names, leaving out what no reader needs.
func shorten(names []string) string {
	const most = 12
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
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
