package safetensors

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sort"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// MaxHeader is the longest header accepted, in bytes, the limit of the reference
// implementation.
const MaxHeader = 100_000_000

// MaxTensors is the most tensors of a checkpoint, over all its files: each needs memory
// when the checkpoint is opened. Networks have a few thousand.
const MaxTensors = 1 << 17

var errTensors = fmt.Errorf("more than %d tensors", MaxTensors)

// maxMetadata bounds the entries of the free text.
const maxMetadata = 1 << 14

// maxRank bounds the dimensions of a tensor; real checkpoints have at most five.
const maxRank = 32

// metadataKey is the reserved header entry with free text.
const metadataKey = "__metadata__"

// Info describes a tensor of an Archive.
type Info struct {
	Name  string
	DType tensor.DType
	Shape []int  // empty for a scalar
	File  string // the file that holds it, relative to the folder opened

	begin, end int // in the data of its file
}

// Elements returns the number of elements.
func (i Info) Elements() int {
	n := 1
	for _, d := range i.Shape {
		n *= d
	}
	return n
}

// Bytes returns the size of the data.
func (i Info) Bytes() int { return i.end - i.begin }

// header is the parsed start of a file.
type header struct {
	tensors  []Info // in the order of their data
	metadata map[string]string
	data     int // where the data starts
}

// parseHeader reads and checks the header of a file with contents b. What breaks the format or a
// limit is an error:
//
//	8 bytes   n, little-endian
//	n bytes   JSON object: name -> {dtype, shape, data_offsets [begin, end]}
//	the rest  data, which the tensors fill without gap or overlap
func parseHeader(b []byte, size int) (header, error) {
	var h header
	if len(b) < 8 {
		return h, fmt.Errorf("file of %d bytes has no header length", len(b))
	}
	if err := checkFetched(b); err != nil {
		return h, err
	}
	n := binary.LittleEndian.Uint64(b)
	if n > MaxHeader {
		return h, fmt.Errorf("header of %d bytes, at most %d are allowed", n, MaxHeader)
	}
	if n > uint64(size-8) {
		return h, fmt.Errorf("header of %d bytes in a file of %d: truncated", n, size)
	}
	h.data = 8 + int(n)
	text := b[8:h.data]
	if len(text) == 0 || text[0] != '{' {
		return h, errors.New("header does not start with '{'")
	}
	if !utf8.Valid(text) {
		return h, errors.New("header is not UTF-8")
	}
	p := parser{text: text}
	if err := p.readHeader(&h); err != nil {
		return h, fmt.Errorf("header: %w", err)
	}
	if p.peek(); p.at < len(text) {
		return h, errors.New("header: text after the JSON object")
	}
	return h, h.checkLayout(size - h.data)
}

// checkLayout sorts the tensors by their data and returns an error, which names the tensor, unless
// they fill size bytes without gap or overlap.
func (h *header) checkLayout(size int) error {
	sort.SliceStable(h.tensors, func(i, j int) bool {
		a, b := &h.tensors[i], &h.tensors[j]
		if a.begin != b.begin {
			return a.begin < b.begin
		}
		return a.end < b.end
	})
	at := 0
	for _, t := range h.tensors {
		switch {
		case t.end > size:
			return fmt.Errorf("tensor %q ends at byte %d of %d: truncated", t.Name, t.end, size)
		case t.begin < at:
			return fmt.Errorf("tensor %q at byte %d overlaps the one before, which ends at %d", t.Name, t.begin, at)
		case t.begin > at:
			return fmt.Errorf("tensor %q at byte %d leaves a gap from %d", t.Name, t.begin, at)
		}
		at = t.end
	}
	if at != size {
		return fmt.Errorf("%d bytes of data belong to no tensor", size-at)
	}
	return nil
}

// readHeader reads the JSON object of a header into h: the metadata and an entry for each tensor.
// Faults of JSON, and too many of either, are errors.
func (p *parser) readHeader(h *header) error {
	return p.readObject(func(name string) error {
		if name == metadataKey {
			h.metadata = map[string]string{}
			err := p.readObject(func(key string) error {
				v, err := p.readString()
				if len(h.metadata) == maxMetadata {
					return fmt.Errorf("more than %d entries", maxMetadata)
				}
				h.metadata[key] = v
				return err
			})
			if err != nil {
				return fmt.Errorf("%s: %w", metadataKey, err)
			}
			return nil
		}
		if len(h.tensors) == MaxTensors {
			return errTensors
		}
		t, err := p.readTensor(name)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		h.tensors = append(h.tensors, t)
		return nil
	})
}

// readTensor reads the entry of a tensor in a header. An unknown field or dtype, a missing field,
// and data of another size than dtype and shape give are errors.
func (p *parser) readTensor(name string) (Info, error) {
	t := Info{Name: name}
	var dtype, shape, offsets bool
	err := p.readObject(func(key string) error {
		switch key {
		case "dtype":
			s, err := p.readString()
			if err != nil {
				return err
			}
			t.DType, dtype = tensor.DType(s), true
			if !t.DType.Valid() {
				return fmt.Errorf("unknown dtype %q", s)
			}
			return nil
		case "shape":
			dims, err := p.readNumbers("shape", maxRank)
			t.Shape, shape = dims, true
			return err
		case "data_offsets":
			o, err := p.readNumbers("data_offsets", 2)
			if err != nil {
				return err
			}
			if len(o) != 2 || o[0] > o[1] {
				return fmt.Errorf("data_offsets %v; must be a begin and an end", o)
			}
			t.begin, t.end, offsets = o[0], o[1], true
			return nil
		}
		return fmt.Errorf("unknown field %q", key)
	})
	if err != nil {
		return t, err
	}
	if !dtype || !shape || !offsets {
		return t, errors.New("needs dtype, shape and data_offsets")
	}
	size, err := byteSize(t.DType, t.Shape)
	if err != nil {
		return t, err
	}
	if size != t.end-t.begin {
		return t, fmt.Errorf("shape %v of %s is %d bytes, its data %d", t.Shape, t.DType, size, t.end-t.begin)
	}
	return t, nil
}

// byteSize returns the size of a tensor in bytes; one that overflows an int is an error. d is a
// valid type.
func byteSize(d tensor.DType, shape []int) (int, error) {
	for _, n := range shape {
		if n == 0 {
			return 0, nil
		}
	}
	size := d.Size()
	for _, n := range shape {
		if n > math.MaxInt/size {
			return 0, fmt.Errorf("shape %v overflows", shape)
		}
		size *= n
	}
	return size, nil
}
