package remoteimage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
)

// Bounds of an answer's structure: servers nest a handful of levels, and lists of tensors are short.
const (
	maxDepth  = 16
	maxValues = 1 << 16
)

// reader decodes msgpack. Texts and bytes share the memory of data, so a false length costs no memory.
type reader struct {
	data   []byte
	values int // decoded so far
}

// decodeMsgpack decodes one value, to which all of data must belong: nil, bool, int64, uint64, float64, string, []byte,
// []any or map[string]any. An error says what is wrong; it is an error, too, where a map has a key twice.
func decodeMsgpack(data []byte) (any, error) {
	r := &reader{data: data}
	v, err := r.value(0)
	if err == nil && len(r.data) > 0 {
		err = fmt.Errorf("%d bytes after the answer", len(r.data))
	}
	return v, err
}

var errShort = errors.New("the answer ends early")

// next returns the next n bytes.
func (r *reader) next(n int) ([]byte, error) {
	if n < 0 || n > len(r.data) {
		return nil, errShort
	}
	b := r.data[:n:n]
	r.data = r.data[n:]
	return b, nil
}

// number returns the next n bytes as a big-endian number.
func (r *reader) number(n int) (uint64, error) {
	b, err := r.next(n)
	if err != nil {
		return 0, err
	}
	var wide [8]byte
	copy(wide[8-n:], b)
	return binary.BigEndian.Uint64(wide[:]), nil
}

// value decodes the next value, which is inside of depth lists and maps.
func (r *reader) value(depth int) (any, error) {
	if r.values++; r.values > maxValues || depth > maxDepth {
		return nil, fmt.Errorf("more than %d values, or %d levels", maxValues, maxDepth)
	}
	first, err := r.number(1)
	if err != nil {
		return nil, err
	}
	switch c := byte(first); {
	case c < 0x80:
		return int64(c), nil
	case c < 0x90:
		return r.fields(int(c&0xf), depth)
	case c < 0xa0:
		return r.list(int(c&0xf), depth)
	case c < 0xc0:
		return r.text(int(c & 0x1f))
	case c >= 0xe0:
		return int64(int8(c)), nil
	default:
		return r.typed(c, depth)
	}
}

// typed decodes a value whose first byte c names its type alone.
func (r *reader) typed(c byte, depth int) (any, error) {
	sized := func(bytes int, then func(n int) (any, error)) (any, error) {
		n, err := r.number(bytes)
		if err != nil || n > uint64(len(r.data)) { // every element has a byte at least
			return nil, errShort
		}
		return then(int(n))
	}
	signed := func(bytes int) (any, error) {
		n, err := r.number(bytes)
		return int64(n<<(64-8*bytes)) >> (64 - 8*bytes), err
	}
	switch c {
	case 0xc0:
		return nil, nil
	case 0xc2, 0xc3:
		return c == 0xc3, nil
	case 0xc4, 0xc5, 0xc6:
		return sized(1<<(c-0xc4), func(n int) (any, error) { return r.next(n) })
	case 0xca:
		n, err := r.number(4)
		return float64(math.Float32frombits(uint32(n))), err
	case 0xcb:
		n, err := r.number(8)
		return math.Float64frombits(n), err
	case 0xcc, 0xcd, 0xce, 0xcf:
		return r.number(1 << (c - 0xcc))
	case 0xd0, 0xd1, 0xd2, 0xd3:
		return signed(1 << (c - 0xd0))
	case 0xd9, 0xda, 0xdb:
		return sized(1<<(c-0xd9), r.text)
	case 0xdc, 0xdd:
		return sized(2<<(c-0xdc), func(n int) (any, error) { return r.list(n, depth) })
	case 0xde, 0xdf:
		return sized(2<<(c-0xde), func(n int) (any, error) { return r.fields(n, depth) })
	}
	return nil, fmt.Errorf("a value of type %#x; servers send none", c)
}

// text decodes a string of n bytes.
func (r *reader) text(n int) (any, error) {
	b, err := r.next(n)
	return strings.ToValidUTF8(string(b), "?"), err
}

// list decodes n values.
func (r *reader) list(n, depth int) (any, error) {
	out := make([]any, 0, min(n, len(r.data), maxValues))
	for range n {
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// fields decodes a map of n entries, whose keys must be strings.
func (r *reader) fields(n, depth int) (any, error) {
	out := map[string]any{}
	for range n {
		k, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		key, ok := k.(string)
		if _, twice := out[key]; !ok || twice {
			return nil, fmt.Errorf("a map with the key %.40v; must be a text, and there once", k)
		}
		if out[key], err = r.value(depth + 1); err != nil {
			return nil, err
		}
	}
	return out, nil
}
