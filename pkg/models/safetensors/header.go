package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
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
	if slices.Contains(shape, 0) {
		return 0, nil
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

// parser reads the JSON of headers and indexes. The standard decoder would ignore keys that repeat, and its tokens
// need much more memory than the result.
type parser struct {
	text []byte
	at   int
}

// peek skips white space and returns the next byte, 0 at the end.
func (p *parser) peek() byte {
	for ; p.at < len(p.text); p.at++ {
		switch c := p.text[p.at]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// expect skips the byte want.
func (p *parser) expect(want byte) error {
	if p.peek() != want {
		return p.unexpected(strconv.QuoteRune(rune(want)))
	}
	p.at++
	return nil
}

// unexpected returns the error for anything other than want.
func (p *parser) unexpected(want string) error {
	if p.peek() == 0 {
		return io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s; must be %s", p.nextWord(), want)
}

// nextWord returns the text up to the next white space, comma or closing bracket, without moving on: a number, or what
// an error shows. Text that begins with one of these has no word; the error shows it with what follows. Of more than
// 24 bytes it returns the first, and "...".
func (p *parser) nextWord() string {
	const most = 24
	rest := p.text[p.at:]
	if end := bytes.IndexAny(rest, " \t\r\n,]}"); end > 0 {
		rest = rest[:end]
	}
	if len(rest) > most {
		return string(bytes.ToValidUTF8(rest[:most], nil)) + "..."
	}
	return string(rest)
}

// readList reads a list or an object between begin and end: it calls item, which reads one element,
// for each. Errors are those of item and of syntax.
func (p *parser) readList(begin, end byte, item func() error) error {
	if err := p.expect(begin); err != nil {
		return err
	}
	if p.peek() == end {
		return p.expect(end)
	}
	for {
		if err := item(); err != nil {
			return err
		}
		if p.peek() != ',' {
			return p.expect(end)
		}
		p.at++
	}
}

// readObject reads an object: it calls field, which reads the value, after each key. A repeated key
// is an error, unlike in encoding/json, as two readers could take different ones.
func (p *parser) readObject(field func(key string) error) error {
	few := make([]string, 0, 4) // enough for the entry of a tensor, the most frequent object
	seen := map[string]bool(nil)
	return p.readList('{', '}', func() error {
		key, err := p.readString()
		if err != nil {
			return err
		}
		switch {
		case seen[key], slices.Contains(few, key):
			return fmt.Errorf("key %q appears twice", key)
		case len(few) < cap(few):
			few = append(few, key)
		case seen == nil:
			seen = map[string]bool{key: true}
		default:
			seen[key] = true
		}
		if err := p.expect(':'); err != nil {
			return err
		}
		return field(key)
	})
}

// readString reads a string. Anything else, a control character in it, and the end of the text are
// errors.
func (p *parser) readString() (string, error) {
	if p.peek() != '"' {
		return "", p.unexpected("a string")
	}
	begin := p.at
	for i := begin + 1; i < len(p.text); i++ {
		switch c := p.text[i]; {
		case c == '"':
			p.at = i + 1
			return string(p.text[begin+1 : i]), nil
		case c < ' ':
			return "", errors.New("control character in a string")
		case c == '\\':
			return p.escapedString()
		}
	}
	return "", io.ErrUnexpectedEOF
}

// escapedString is readString for a string with escapes, which are rare in headers. Escapes that
// are not valid are errors.
func (p *parser) escapedString() (s string, err error) {
	for i := p.at + 1; i < len(p.text); i++ {
		switch p.text[i] {
		case '\\':
			i++
		case '"':
			err = json.Unmarshal(p.text[p.at:i+1], &s)
			p.at = i + 1
			return s, err
		}
	}
	return "", io.ErrUnexpectedEOF
}

// readNumbers reads a list of at most most sizes: whole numbers of at least 0 that fit an int.
// Anything else is an error that names the field.
func (p *parser) readNumbers(field string, most int) ([]int, error) {
	ns := make([]int, 0, 4)
	err := p.readList('[', ']', func() error {
		if p.peek() == 0 {
			return io.ErrUnexpectedEOF
		}
		word := p.nextWord()
		n, err := strconv.ParseUint(word, 10, strconv.IntSize-1)
		if err != nil || len(word) > 1 && word[0] == '0' {
			return fmt.Errorf("%s is not a size", word)
		}
		if len(ns) == most {
			return fmt.Errorf("more than %d numbers", most)
		}
		p.at += len(word)
		ns = append(ns, int(n))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	return ns, nil
}

// skip steps over any value, of a key of an index that has no meaning here. What is no JSON is an
// error.
func (p *parser) skip() error {
	dec := json.NewDecoder(bytes.NewReader(p.text[p.at:]))
	var value json.RawMessage
	if err := dec.Decode(&value); err != nil {
		return err
	}
	p.at += int(dec.InputOffset())
	return nil
}

// maxShards bounds how many files an index may map.
const maxShards = 4096

// openIndex opens the shards of an index, a JSON object whose weight_map gives the file of every
// tensor. Shards are in the folder of the index. An index that is not valid, too many shards, and
// shards that do not match are errors.
func openIndex(folder *Folder, name string) (*Archive, error) {
	where := folder.where(name)
	text, err := folder.Read(name, MaxHeader)
	if err != nil {
		return nil, fmt.Errorf("open index %q: %w", where, err)
	}
	index, err := parseIndex(text)
	if err != nil {
		return nil, fmt.Errorf("index %q: %w", where, err)
	}
	var shards []string
	seen := map[string]bool{}
	for _, shard := range index {
		if !seen[shard] {
			seen[shard] = true
			shards = append(shards, path.Join(path.Dir(filepath.ToSlash(name)), shard))
		}
	}
	if len(shards) > maxShards {
		return nil, fmt.Errorf("index %q: %d shards, at most %d are allowed", where, len(shards), maxShards)
	}
	sort.Strings(shards)
	a, err := openFiles(folder, shards, index)
	if err != nil {
		return nil, fmt.Errorf("index %q: %w", where, err)
	}
	return a, nil
}

// parseIndex returns the weight_map of an index: the file of every tensor. A name that could lead
// out of the folder, no weight_map and faults of JSON are errors.
func parseIndex(text []byte) (map[string]string, error) {
	if len(text) > MaxHeader {
		return nil, fmt.Errorf("more than %d bytes", MaxHeader)
	}
	var index map[string]string
	if !utf8.Valid(text) {
		return nil, errors.New("not UTF-8")
	}
	p := parser{text: text}
	err := p.readObject(func(key string) error {
		switch key {
		case "metadata": // sizes, for people
			return p.skip()
		case "weight_map":
		default:
			return fmt.Errorf("%.40q: an unknown key; must be weight_map or metadata", key)
		}
		index = map[string]string{}
		return p.readObject(func(name string) error {
			shard, err := p.readString()
			if err != nil {
				return err
			}
			if !strings.HasSuffix(shard, fileSuffix) || strings.ContainsAny(shard, `/\`) || !filepath.IsLocal(shard) {
				return fmt.Errorf("tensor %q: %q is not the name of a shard", name, shard)
			}
			if len(index) == MaxTensors {
				return errTensors
			}
			index[name] = shard
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if len(index) == 0 {
		return nil, errors.New("no weight_map")
	}
	return index, nil
}
