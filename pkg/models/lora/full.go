package lora

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Full is the weights of a whole transformer, in one file or in shards, which replace those of a checkpoint. It is
// immutable and belongs to no model.
type Full struct {
	archive *safetensors.Archive
	files   [][]byte
	paths   []string // of files that were opened by name
}

// OpenFull opens whole weights to push: a safetensors file, or a folder with the file or the shards
// of a transformer. In the folder of a model it opens the subfolder transformer. The caller closes
// it: the files are in use until then. What is not there or no safetensors is an error with its
// name.
func OpenFull(name string) (*Full, error) {
	open, dir := safetensors.Open, filepath.Dir(name)
	if isFolder(name) {
		var err error
		if name, err = safetensors.Snapshot(name); err != nil {
			return nil, fmt.Errorf("open weights: %w", err)
		}
		if dir = name; isFolder(filepath.Join(dir, "transformer")) {
			dir = filepath.Join(dir, "transformer")
		}
		open = func(string) (*safetensors.Archive, error) {
			folder, err := safetensors.OpenFolder(dir)
			if err != nil {
				return nil, err
			}
			a, err := folder.Archive(".")
			return a, errors.Join(err, folder.Close())
		}
	}
	a, err := open(name)
	if err != nil {
		return nil, fmt.Errorf("open weights %q: %w", name, err)
	}
	f := newFull(a)
	for _, c := range a.Files() {
		f.paths = append(f.paths, filepath.Join(dir, c.Name))
	}
	return f, nil
}

func isFolder(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.IsDir()
}

// ParseFull is OpenFull for files in memory, in the order of Files: samplers call it on what they
// fetched. They are not copied and must not be modified. What is no safetensors is an error.
func ParseFull(files ...[]byte) (*Full, error) {
	contents := make([]safetensors.Contents, len(files))
	for i, f := range files {
		contents[i] = safetensors.Contents{Name: fmt.Sprintf("file %d of the weights", i+1), Bytes: f}
	}
	return FullOf(contents...)
}

// FullOf is ParseFull for files that may be mapped.
func FullOf(files ...safetensors.Contents) (*Full, error) {
	a, err := safetensors.ParseAll(files...)
	if err != nil {
		return nil, err
	}
	return newFull(a), nil
}

// newFull returns an archive as Full, with the bytes of its files.
func newFull(a *safetensors.Archive) *Full {
	f := &Full{archive: a}
	for _, c := range a.Files() {
		f.files = append(f.files, c.Bytes)
	}
	return f
}

// Archive returns the archive with the tensors.
func (f *Full) Archive() *safetensors.Archive { return f.archive }

// Files returns the bytes of the file, or of the shards in order. They must not be modified. Copies are made by CopyTo.
func (f *Full) Files() [][]byte { return f.files }

// CopyTo writes the file of a place in Files to a new file. It is an error if it was changed since its digest was
// computed.
func (f *Full) CopyTo(name string, i int, mode os.FileMode) error {
	to, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	return errors.Join(f.archive.CopyTo(to, i), to.Close())
}

// Paths returns where Files are; none for files in memory.
func (f *Full) Paths() []string { return f.paths }

// Table returns the projections of the transformer, which adapters can change: its matrices.
func (f *Full) Table() Table {
	t := Table{}
	for name, shape := range f.Shapes() {
		if module, ok := strings.CutSuffix(name, ".weight"); ok && len(shape) == 2 {
			t[module] = [2]int(shape)
		}
	}
	return t
}

// Shapes returns the shapes of the tensors.
func (f *Full) Shapes() Shapes {
	s := Shapes{}
	for _, name := range f.archive.Names() {
		info, _ := f.archive.Info(name)
		s[name] = info.Shape
	}
	return s
}

// Save writes the files to a new folder in one that it makes if need be, under the names that diffusers and
// transformers give them; path is that of the only file without its ending. The folder is there with all of them or not
// at all; it is no error that it is there already.
func (f *Full) Save(path string) error {
	dir, stem := filepath.Split(path)
	dir = filepath.Clean(dir)
	parent := filepath.Dir(dir)
	if err := errors.Join(os.MkdirAll(parent, 0o755), os.Chmod(parent, 0o755)); err != nil {
		return fmt.Errorf("write weights: %w", err)
	}
	return saveFolder(dir, "weights", func(made string) error { return f.write(made, stem) })
}

// write writes the files to a folder, and where there are several the index of their tensors.
func (f *Full) write(dir, stem string) error {
	if len(f.files) == 1 {
		return f.CopyTo(filepath.Join(dir, stem+".safetensors"), 0, 0o644)
	}
	shards := map[string]string{} // their new names
	for i, file := range f.archive.Files() {
		name := fmt.Sprintf("%s-%05d-of-%05d.safetensors", stem, i+1, len(f.files))
		shards[file.Name] = name
		if err := f.CopyTo(filepath.Join(dir, name), i, 0o644); err != nil {
			return err
		}
	}
	files := map[string]string{} // by tensor
	for _, tensor := range f.archive.Names() {
		info, _ := f.archive.Info(tensor)
		files[tensor] = shards[info.File]
	}
	index, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": files})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, stem+".safetensors.index.json"), index, 0o644)
}

// Close closes the files.
func (f *Full) Close() error { return f.archive.Close() }

// FullDigest returns the digest of a checkpoint with digest base and another transformer: the SHA-256 in hex over
// base, a newline and, for each file of the transformer, "full ", the SHA-256 of its bytes in hex and a newline.
func FullDigest(base string, files ...string) string {
	d := safetensors.NewDigest()
	fmt.Fprintf(d, "%s\n", base)
	for _, f := range files {
		fmt.Fprintf(d, "full %s\n", f)
	}
	return d.Hex()
}

// Shapes are the shapes of the tensors of a transformer, by their names in a checkpoint.
type Shapes map[string][]int

// ParseShapes reads shapes that Encode has written.
func ParseShapes(data []byte) (Shapes, error) {
	var s Shapes
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("table of tensors: %w", err)
	}
	return s, nil
}

// Encode returns the shapes as JSON; equal shapes give equal bytes.
func (s Shapes) Encode() ([]byte, error) { return json.Marshal(s) }

// Check returns an error that names the tensors of f that are missing, unexpected, of another
// shape, or not finite: these weights do not fit the model. Clients call it before a push, samplers
// before they load.
func (s Shapes) Check(f *Full) error {
	var missing, unexpected, shapes, values []string
	for name, shape := range s {
		info, ok := f.archive.Info(name)
		switch {
		case !ok:
			missing = append(missing, name)
		case !slices.Equal(info.Shape, shape):
			shapes = append(shapes, fmt.Sprintf("%s: %v; must be %v", name, info.Shape, shape))
		default:
			finite := true
			if err := f.archive.Pieces(name, func(x []float32) { finite = finite && allFinite(x) }); err != nil {
				return err
			}
			if !finite {
				values = append(values, name)
			}
			f.archive.Release()
		}
	}
	for _, name := range f.archive.Names() {
		if _, ok := s[name]; !ok {
			unexpected = append(unexpected, name)
		}
	}
	var faults []error
	for _, of := range []struct {
		what  string
		names []string
	}{{"missing", missing}, {"unexpected", unexpected}, {"of another shape", shapes}, {"not finite", values}} {
		if slices.Sort(of.names); len(of.names) > 0 {
			faults = append(faults, fmt.Errorf("%d tensors %s: %s", len(of.names), of.what,
				safetensors.ListNames(of.names)))
		}
	}
	return errors.Join(faults...)
}
