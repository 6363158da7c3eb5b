package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Tensor is a tensor to write.
type Tensor struct {
	Name  string
	DType tensor.DType
	Shape []int
	Data  []byte // little-endian
	// Source writes the data if Data is nil, for tensors that do not fit in memory.
	Source func(io.Writer) error
}

// Bytes returns the size of the data.
func (t Tensor) Bytes() (int, error) { return byteSize(t.DType, t.Shape) }

// FloatTensor returns a tensor with x rounded to dtype, a float type of at least 16 bits.
func FloatTensor(name string, dtype tensor.DType, shape []int, x []float32) (Tensor, error) {
	if !dtype.Float() {
		return Tensor{}, fmt.Errorf("tensor %q: dtype %q does not take floats", name, string(dtype))
	}
	return Tensor{Name: name, DType: dtype, Shape: shape, Data: dtype.AppendFloats(nil, x)}, nil
}

// Write writes a safetensors file to w. Its bytes do not depend on the order of tensors: data is
// ordered by element size, largest first, then by name, and starts at a multiple of 8, as in the
// reference implementation. Tensors that are not valid, and errors of w or of a Source, end it.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	tensors = slices.Clone(tensors)
	sort.SliceStable(tensors, func(i, j int) bool {
		a, b := tensors[i], tensors[j]
		if x, y := a.DType.Size(), b.DType.Size(); x != y {
			return x > y
		}
		return a.Name < b.Name
	})
	head, err := appendHeader(make([]byte, 8), tensors, metadata)
	if err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	if _, err := w.Write(head); err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	for _, t := range tensors {
		if err := t.write(w); err != nil {
			return fmt.Errorf("write tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

// write writes the data of a tensor.
func (t Tensor) write(w io.Writer) error {
	if t.Data != nil || t.Source == nil {
		_, err := w.Write(t.Data)
		return err
	}
	return t.Source(w)
}

// appendHeader appends the header of a file to b, whose first 8 bytes get its length. tensors are
// in the order of their data. Names that repeat or are no UTF-8, tensors whose data does not fit,
// and a header beyond MaxHeader are errors.
func appendHeader(b []byte, tensors []Tensor, metadata map[string]string) ([]byte, error) {
	b = append(b, '{')
	if len(metadata) > 0 {
		for k, v := range metadata {
			if !utf8.ValidString(k) || !utf8.ValidString(v) {
				return nil, fmt.Errorf("metadata %q is not UTF-8", k)
			}
		}
		text, err := marshal(metadata)
		if err != nil {
			return nil, err
		}
		b = append(append(append(b, `"`+metadataKey+`":`...), text...), ',')
	}
	seen := map[string]bool{metadataKey: true}
	at := 0
	for _, t := range tensors {
		if seen[t.Name] || !utf8.ValidString(t.Name) {
			return nil, fmt.Errorf("tensor %q: name is reserved, repeated or not UTF-8", t.Name)
		}
		seen[t.Name] = true
		if err := t.validate(); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		name, err := marshal(t.Name)
		if err != nil {
			return nil, err
		}
		size, err := t.Bytes()
		if err != nil {
			return nil, err
		}
		entry, err := marshal(struct {
			DType   tensor.DType `json:"dtype"`
			Shape   []int        `json:"shape"`
			Offsets [2]int       `json:"data_offsets"`
		}{t.DType, append([]int{}, t.Shape...), [2]int{at, at + size}})
		if err != nil {
			return nil, err
		}
		b = append(append(append(append(b, name...), ':'), entry...), ',')
		at += size
	}
	b = append(bytes.TrimSuffix(b, []byte{','}), '}')
	for len(b)%8 != 0 {
		b = append(b, ' ')
	}
	if len(b)-8 > MaxHeader {
		return nil, fmt.Errorf("%d bytes, at most %d are allowed", len(b)-8, MaxHeader)
	}
	binary.LittleEndian.PutUint64(b, uint64(len(b)-8))
	return b, nil
}

// validate returns an error unless dtype and shape are valid and Data, unless Source writes it, has
// their length.
func (t Tensor) validate() error {
	if !t.DType.Valid() {
		return fmt.Errorf("unknown dtype %q", string(t.DType))
	}
	if len(t.Shape) > maxRank {
		return fmt.Errorf("%d dimensions, at most %d are allowed", len(t.Shape), maxRank)
	}
	for _, n := range t.Shape {
		if n < 0 {
			return fmt.Errorf("shape %v", t.Shape)
		}
	}
	size, err := byteSize(t.DType, t.Shape)
	if err != nil {
		return err
	}
	if size != len(t.Data) && (t.Data != nil || t.Source == nil) {
		return fmt.Errorf("shape %v of %s is %d bytes, have %d", t.Shape, t.DType, size, len(t.Data))
	}
	return nil
}

// marshal is json.Marshal without escapes for HTML; it sorts the keys of maps.
func marshal(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimSuffix(buf.Bytes(), []byte{'\n'}), err
}

// WriteFile writes a safetensors file: a temporary one in the same folder, which it renames to
// name, so that readers of an older file keep their mapping. On an error nothing of it stays.
func WriteFile(name string, tensors []Tensor, metadata map[string]string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".tmp-*")
	if err != nil {
		return fmt.Errorf("write checkpoint %q: %w", name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write checkpoint %q: %w", name, err), os.Remove(f.Name()))
		}
	}()
	if err := errors.Join(Write(f, tensors, metadata), f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
