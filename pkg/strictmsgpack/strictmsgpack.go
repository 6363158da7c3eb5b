// Package strictmsgpack reads msgpack that strangers wrote, such as answers of servers, as plain values.
package strictmsgpack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Bounds of what is read: how deep values nest, the outermost being level 1, and how many there are.
const (
	MaxDepth  = 16
	MaxValues = 1 << 16
)

// Decode reads one value, to which all of data must belong: nil, bool, int64, uint64, float64, string, []byte, []any or
// map[string]any. Memory grows with what is there, whatever lengths are said. An error says what is wrong; it is an
// error, too, where a map has a key twice or one that is no text, and where a text is not UTF-8. A value with bytes
// after it is returned beside the error.
func Decode(data []byte) (any, error) {
	in := bytes.NewReader(data)
	r := &reader{d: msgpack.NewDecoder(in)}
	v, err := r.value(1)
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil, errors.New("msgpack ends early")
	case err != nil:
		return nil, err
	case in.Len() > 0:
		return v, fmt.Errorf("%d bytes after the value", in.Len())
	}
	return v, nil
}

type reader struct {
	d      *msgpack.Decoder
	values int // read so far
}

// value reads one value at a depth. Extension types are errors.
func (r *reader) value(depth int) (any, error) {
	if depth > MaxDepth {
		return nil, fmt.Errorf("more than %d levels", MaxDepth)
	}
	if r.values++; r.values > MaxValues {
		return nil, fmt.Errorf("more than %d values", MaxValues)
	}
	code, err := r.d.PeekCode()
	if err != nil {
		return nil, err
	}
	switch {
	case msgpcode.IsFixedMap(code), code == msgpcode.Map16, code == msgpcode.Map32:
		return r.fields(depth)
	case msgpcode.IsFixedArray(code), code == msgpcode.Array16, code == msgpcode.Array32:
		return r.list(depth)
	case msgpcode.IsBin(code):
		return r.d.DecodeBytes()
	case msgpcode.IsExt(code), code == 0xc1: // which no type has
		return nil, fmt.Errorf("msgpack code 0x%02x; must be plain values", code)
	}
	v, err := r.d.DecodeInterfaceLoose()
	if text, ok := v.(string); ok && err == nil && !utf8.ValidString(text) {
		err = errors.New("text that is not UTF-8")
	}
	return v, err
}

// list reads the items of a list, whose header comes next, one level below depth. An error is that of an item.
func (r *reader) list(depth int) (any, error) {
	n, err := r.d.DecodeArrayLen()
	if err != nil {
		return nil, err
	}
	items := []any{}
	for range n {
		v, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		items = append(items, v)
	}
	return items, nil
}

// fields reads a map, whose header comes next, one level below depth. A key that is no text or comes twice is an error.
func (r *reader) fields(depth int) (any, error) {
	n, err := r.d.DecodeMapLen()
	if err != nil {
		return nil, err
	}
	m := map[string]any{}
	for range n {
		k, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		key, ok := k.(string)
		if !ok {
			return nil, fmt.Errorf("key %.40s; must be a text", fmt.Sprint(k))
		}
		if _, twice := m[key]; twice {
			return nil, fmt.Errorf("key %.40q comes twice", key)
		}
		if m[key], err = r.value(depth + 1); err != nil {
			return nil, err
		}
	}
	return m, nil
}
