// Package safetensors reads and writes checkpoints in the safetensors format. An Archive is an open checkpoint of
// one or several files (shards); a Folder limits which files can be opened; Write and WriteFile write Tensors;
// Digest hashes the files of a model.
//
// Files are mapped into memory, not read: opening reads only the header, and a tensor is read when it is used.
// Files are not trusted, so every length is checked before it is used: tensors must fill the file exactly, without
// gap or overlap, and each must have the length that its dtype and shape give. Errors name the file and the tensor.
package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
)

const (
	fileSuffix  = ".safetensors"
	indexSuffix = ".safetensors.index.json"
)

// Archive is one checkpoint: a file, or the shards that an index lists. Its methods are safe for concurrent use,
// except Close.
type Archive struct {
	files   []file
	tensors map[string]located
	names   []string
	meta    map[string]string
}

type file struct {
	name   string
	info   fs.FileInfo // nil in memory
	bytes  []byte
	unmap  func() error
	mapped bool // bytes are of Map
	sums   *Sums
	data   int // where the data starts
}

type located struct {
	Info
	file int
}

// Open opens one file, or the shards of an index (a name that ends in .json).
func Open(name string) (*Archive, error) {
	folder, err := OpenFolder(filepath.Dir(name))
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %q: %w", name, err)
	}
	defer folder.Close()
	return folder.openCheckpoint(filepath.Base(name))
}

// usual returns the names under which transformers and diffusers look for a checkpoint of a variant, such as fp16, in
// the order in which each takes them. The last index is that of older ones of diffusers.
func usual(variant string) []string {
	v := "." + variant
	if variant == "" {
		v = ""
	}
	return []string{
		"model" + v + fileSuffix, "model" + fileSuffix + ".index" + v + ".json",
		diffusion + fileSuffix + ".index" + v + ".json", diffusion + fileSuffix + v + ".index.json",
		diffusion + v + fileSuffix,
	}
}

const diffusion = "diffusion_pytorch_model"

// ofVariant matches the names of usual that have a variant, shard those of files that an index names.
var (
	ofVariant = regexp.MustCompile(`^[^.]+(?:\.safetensors(?:\.index)?)?\.([^.]+)(?:\.index)?\.(?:json|safetensors)$`)
	shard     = regexp.MustCompile(`-\d{5}-of-\d{5}\.`)
)

// Archive opens the checkpoint in the folder dir below f, "." for f itself: the one of a usual name; else that of the
// only variant, such as fp16; else the shards of the only *.safetensors.index.json, or the only *.safetensors file.
// Links must stay inside f (see Folder). The caller closes it. No checkpoint (fs.ErrNotExist), several, shards without
// their index, and files that are not valid are errors.
func (f *Folder) Archive(dir string) (*Archive, error) {
	names, err := f.listNames(dir)
	if err != nil {
		return nil, err
	}
	chosen, err := chooseCheckpoint(names)
	if err != nil {
		return nil, fmt.Errorf("checkpoint folder %q (%s): %w", dir, f.where(dir), err)
	}
	return f.openCheckpoint(path.Join(dir, chosen))
}

// openCheckpoint opens a file, or the shards of an index.
func (f *Folder) openCheckpoint(name string) (*Archive, error) {
	if strings.HasSuffix(name, ".json") {
		return openIndex(f, name)
	}
	return openFiles(f, []string{name}, nil)
}

// chooseCheckpoint returns which of the files of a folder is its checkpoint, as Archive says.
func chooseCheckpoint(names []string) (string, error) {
	there := func(name string) bool { return slices.Contains(names, name) }
	variants := map[string]bool{}
	var indexes, whole []string
	for _, name := range slices.Sorted(slices.Values(names)) {
		m := ofVariant.FindStringSubmatch(name)
		if m != nil && !shard.MatchString(name) && slices.Contains(usual(m[1]), name) {
			variants[m[1]] = true
		}
		switch {
		case strings.HasSuffix(name, indexSuffix):
			indexes = append(indexes, name)
		case strings.HasSuffix(name, fileSuffix):
			whole = append(whole, name)
		}
	}
	if i := slices.IndexFunc(usual(""), there); i >= 0 {
		return usual("")[i], nil
	}
	switch found := slices.Sorted(maps.Keys(variants)); {
	case len(found) == 1:
		list := usual(found[0])
		return list[slices.IndexFunc(list, there)], nil
	case len(found) > 1:
		return "", fmt.Errorf("several variants and none without a name: %s; must be one: move the others away, or "+
			"name the file or the index itself", strings.Join(found, ", "))
	case len(indexes) == 1:
		return indexes[0], nil
	case len(indexes) > 1:
		return "", fmt.Errorf("several indexes: %s; must be one: move the others away", ListNames(indexes))
	case len(whole) == 1:
		return whole[0], nil
	case len(whole) > 1:
		return "", fmt.Errorf("several files and no index: %s; copy the *%s or *.safetensors.index.VARIANT.json that "+
			"was saved with them", ListNames(whole), indexSuffix)
	}
	return "", fmt.Errorf("no %s file: %w", fileSuffix, fs.ErrNotExist)
}

// openFiles maps files of a folder and reads their headers. index, unless nil, gives the file of
// every tensor, and must be complete. On an error, which names the file, all are closed.
func openFiles(folder *Folder, names []string, index map[string]string) (*Archive, error) {
	a := &Archive{tensors: map[string]located{}, meta: map[string]string{}}
	for _, name := range names {
		if err := a.addFile(folder, name); err != nil {
			return nil, errors.Join(fmt.Errorf("open %q: %w", folder.where(name), err), a.Close())
		}
	}
	if index != nil {
		if err := a.checkIndex(index); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}
	a.names = make([]string, 0, len(a.tensors))
	for name := range a.tensors {
		a.names = append(a.names, name)
	}
	sort.Strings(a.names)
	return a, nil
}

// addFile maps a file of the folder and adds its tensors. On an error the caller closes the
// archive.
func (a *Archive) addFile(folder *Folder, name string) error {
	f, err := folder.Open(name)
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err // openFiles names the path, and the system's call says nothing to users
	}
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	b, unmap, err := mapFile(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	a.files = append(a.files, file{name: name, info: info, bytes: b, unmap: unmap, mapped: unmap != nil})
	return a.addTensors(len(a.files) - 1)
}

// addTensors reads the header of file i and adds its tensors and metadata. A header that is not
// valid, a tensor that another file has, and too many tensors are errors.
func (a *Archive) addTensors(i int) error {
	f := &a.files[i]
	h, err := f.header()
	if err != nil {
		return err
	}
	f.data = h.data
	if len(a.tensors)+len(h.tensors) > MaxTensors {
		return errTensors
	}
	for _, t := range h.tensors {
		if other, ok := a.tensors[t.Name]; ok {
			return fmt.Errorf("tensor %q is in %q too", t.Name, other.File)
		}
		t.File = f.name
		a.tensors[t.Name] = located{t, i}
	}
	for k, v := range h.metadata {
		if _, ok := a.meta[k]; !ok {
			a.meta[k] = v
		}
	}
	return nil
}

// header reads the header of a file.
func (f *file) header() (h header, err error) {
	head := f.bytes
	if f.sums != nil && len(head) >= 8 {
		if head, err = f.sums.copy(f.bytes, 0, 8); err != nil {
			return h, err
		}
		if n := binary.LittleEndian.Uint64(head); n <= min(MaxHeader, uint64(len(f.bytes)-8)) {
			if head, err = f.sums.copy(f.bytes, 0, 8+int(n)); err != nil {
				return h, err
			}
		}
	}
	return parseHeader(head, len(f.bytes))
}

// checkIndex returns an error that lists all faults unless every tensor is in the file that the
// index gives, and there are no others. openFiles calls it when all files are read.
func (a *Archive) checkIndex(index map[string]string) error {
	var faults []string
	for name, f := range index {
		switch t, ok := a.tensors[name]; {
		case !ok:
			faults = append(faults, fmt.Sprintf("%q is missing in %q", name, f))
		case path.Base(t.File) != f:
			faults = append(faults, fmt.Sprintf("%q is in %q, not in %q", name, path.Base(t.File), f))
		}
	}
	for name, t := range a.tensors {
		if _, ok := index[name]; !ok {
			faults = append(faults, fmt.Sprintf("%q of %q is not in the index", name, path.Base(t.File)))
		}
	}
	if len(faults) == 0 {
		return nil
	}
	sort.Strings(faults)
	const most = 10
	if n := len(faults); n > most {
		faults = append(faults[:most], fmt.Sprintf("and %d more", n-most))
	}
	return fmt.Errorf("shards do not match their index: %s", strings.Join(faults, "; "))
}

// Parse reads a file in memory; name is for messages. Slices that Bytes returns share b.
func Parse(name string, b []byte) (*Archive, error) { return ParseAll(Contents{Name: name, Bytes: b}) }

// ParseAll is Parse for several shards in memory, without an index; each has the name that errors
// show. Errors are those of Parse, and a tensor that is in two of them.
func ParseAll(files ...Contents) (*Archive, error) {
	a := &Archive{tensors: map[string]located{}, meta: map[string]string{}}
	for i, f := range files {
		a.files = append(a.files, file{name: f.Name, bytes: f.Bytes, mapped: f.Mapped, sums: f.Sums})
		if err := a.addTensors(i); err != nil {
			return nil, fmt.Errorf("parse %q: %w", f.Name, err)
		}
	}
	for n := range a.tensors {
		a.names = append(a.names, n)
	}
	sort.Strings(a.names)
	return a, nil
}

// Close unmaps the files. Slices from Bytes and Files must not be used afterwards: the process
// would crash. A second call does nothing.
func (a *Archive) Close() error {
	var err error
	for i := range a.files {
		if u := a.files[i].unmap; u != nil {
			err = errors.Join(err, u())
		}
	}
	a.files, a.tensors, a.names = nil, nil, nil
	return err
}

// Names returns the tensor names, sorted.
func (a *Archive) Names() []string { return slices.Clone(a.names) }

// Info returns the description of a tensor, and whether it exists.
func (a *Archive) Info(name string) (Info, bool) {
	t, ok := a.tensors[name]
	return t.Info, ok
}

// Metadata returns the free text of the headers by key. If shards repeat a key, the
// first one counts. It must not be modified.
func (a *Archive) Metadata() map[string]string { return a.meta }

// Contents is a whole file, header included.
type Contents struct {
	Name  string // relative to the folder opened
	Bytes []byte // read-only, valid until Close
	// Mapped says that the bytes are those of Map.
	Mapped bool
	// Sums, unless nil, are of the file when its digest was computed. What is read then is checked by them: it is
	// ErrChanged if the file is another one meanwhile.
	Sums *Sums
}

// Files returns the files in order, for digests.
func (a *Archive) Files() []Contents {
	out := make([]Contents, len(a.files))
	for i, f := range a.files {
		out[i] = Contents{Name: f.name, Bytes: f.bytes, Mapped: f.mapped, Sums: f.sums}
	}
	return out
}

// Release lets the system take back the memory of all that was read from mapped files so far. What is used again is
// read again.
func (a *Archive) Release() {
	for _, f := range a.files {
		if f.mapped {
			release(f.bytes)
		}
	}
}

// Bytes returns the little-endian data of a tensor, without copying unless its file has sums. It is read-only and valid
// until Close. The only errors are that the tensor does not exist, and ErrChanged.
func (a *Archive) Bytes(name string) ([]byte, error) {
	t, ok := a.tensors[name]
	if !ok {
		return nil, a.notFound(name)
	}
	f := &a.files[t.file]
	if f.sums != nil {
		b, err := f.sums.copy(f.bytes, f.data+t.begin, f.data+t.end)
		if err != nil {
			return nil, fmt.Errorf("%s: tensor %q: %w", t.File, name, err)
		}
		return b, nil
	}
	return f.bytes[f.data+t.begin : f.data+t.end : f.data+t.end], nil
}

// CopyTo writes a whole file, header included; i is its place in Files. Errors are of w, and ErrChanged.
func (a *Archive) CopyTo(w io.Writer, i int) error {
	f := &a.files[i]
	if f.sums == nil {
		_, err := w.Write(f.bytes)
		return err
	}
	for at := 0; at < len(f.bytes); at += 16 * sumBytes {
		b, err := f.sums.copy(f.bytes, at, min(len(f.bytes), at+16*sumBytes))
		if err == nil {
			_, err = w.Write(b)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return nil
}

// notFound returns the error for a tensor that does not exist; it wraps fs.ErrNotExist.
func (a *Archive) notFound(name string) error {
	var where []string
	for _, f := range a.files {
		where = append(where, f.name)
	}
	if len(where) > 3 {
		where = append(where[:3], "...")
	}
	return fmt.Errorf("tensor %q is not in %s: %w", name, strings.Join(where, ", "), fs.ErrNotExist)
}

// Map maps a file read-only; on systems without mappings it reads the file. The bytes are valid until unmap, which
// may be nil. If a file shrinks while it is mapped, its readers crash.
func Map(f *os.File) (data []byte, unmap func() error, err error) { return mapFile(f) }

// Floats returns a tensor as float32, newly allocated. F64 is rounded to nearest;
// integers and booleans must be exact in float32.
func (a *Archive) Floats(name string) ([]float32, error) {
	t, ok := a.tensors[name]
	if !ok {
		return nil, a.notFound(name)
	}
	dst := make([]float32, t.Elements())
	return dst, a.ReadFloats(dst, name)
}

// ReadFloats is Floats into dst, for callers that use one buffer for many tensors. dst must have
// exactly the tensor's elements, else it is an error, as is a tensor that does not exist or holds
// numbers that float32 cannot.
func (a *Archive) ReadFloats(dst []float32, name string) error {
	b, err := a.Bytes(name)
	if err != nil {
		return err
	}
	t := a.tensors[name]
	if n := t.Elements(); n != len(dst) {
		return fmt.Errorf("%s: tensor %q: %d elements (%v); must be %d", t.File, name, n, t.Shape, len(dst))
	}
	if err := decodeFloats(dst, t.DType, b); err != nil {
		return fmt.Errorf("%s: tensor %q: %w", t.File, name, err)
	}
	return nil
}

// Pieces calls piece with the elements of a tensor as float32, a part at a time in memory that is used again. Errors
// are those of Floats.
func (a *Archive) Pieces(name string, piece func([]float32)) error {
	b, err := a.Bytes(name)
	if err != nil {
		return err
	}
	t := a.tensors[name]
	size := t.DType.Size()
	x := make([]float32, min(t.Elements(), 1<<16))
	for part := range slices.Chunk(b, max(1, len(x))*size) {
		x = x[:len(part)/size]
		if err := decodeFloats(x, t.DType, part); err != nil {
			return fmt.Errorf("%s: tensor %q: %w", t.File, name, err)
		}
		piece(x)
	}
	return nil
}

// ListNames joins the first names of tensors for an error, and counts the others.
func ListNames(names []string) string {
	const most = 12
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
