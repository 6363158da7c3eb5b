package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// Formats of requests and replies.
const (
	FormatJSON    = "json"
	FormatMsgpack = "msgpack"
)

// maxDepth bounds how deep a reply nests; the reply itself is level 1.
const maxDepth = 16

// Decode reads a reply: one map, which must fill the whole body. Values are nil, bool, string, []byte, []any,
// map[string]any, float64, int64, uint64 or json.Number.
//
// Python's json writes the words NaN, Infinity and -Infinity, which are not JSON. They are read as texts, so that
// such a score fails only its own sample.
func Decode(format string, body []byte) (map[string]any, error) {
	if format == FormatMsgpack {
		return decodeMsgpack(body)
	}
	m, err := decodeJSON(body)
	if err != nil {
		if again, changed := quoteWords(body); changed {
			if m, err := decodeJSON(again); err == nil {
				return m, nil
			}
		}
	}
	return m, err
}

// decodeJSON reads one JSON map and nothing after it.
func decodeJSON(body []byte) (map[string]any, error) {
	if err := errors.Join(checkNesting(body), strictjson.Check(body)); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		return nil, err
	}
	if m == nil {
		return nil, errors.New("null, not a map")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("bytes after the map")
	}
	return m, nil
}

// checkNesting refuses a body that nests too deep, before the recursive decoder of the library reads it.
func checkNesting(body []byte) error {
	depth, inText := 0, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return fmt.Errorf("more than %d levels", maxDepth)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

// quoteWords puts the words NaN, Infinity and -Infinity outside of texts in quotes, and reports whether there were any.
func quoteWords(body []byte) ([]byte, bool) {
	words := [][]byte{[]byte("NaN"), []byte("-Infinity"), []byte("Infinity")}
	var out []byte
	from, inText := 0, false
	for i := 0; i < len(body); i++ {
		if body[i] == '"' {
			inText = !inText
		}
		if inText {
			if body[i] == '\\' {
				i++
			}
			continue
		}
		for _, w := range words {
			if bytes.HasPrefix(body[i:], w) {
				out = append(append(append(append(out, body[from:i]...), '"'), w...), '"')
				i += len(w) - 1
				from = i + 1
				break
			}
		}
	}
	return append(out, body[min(from, len(body)):]...), from > 0
}

// decodeMsgpack reads one msgpack map and nothing after it.
func decodeMsgpack(body []byte) (map[string]any, error) {
	r := reader{rest: body}
	v, err := r.readValue(1)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s, not a map", Show(v))
	}
	if len(r.rest) > 0 {
		return nil, fmt.Errorf("%d bytes after the map", len(r.rest))
	}
	return m, nil
}

// reader reads msgpack values (https://github.com/msgpack/msgpack/blob/master/spec.md).
type reader struct{ rest []byte }

var errShort = errors.New("msgpack ends early")

// nextBytes returns the next n bytes, or errShort if there are fewer.
func (r *reader) nextBytes(n uint64) ([]byte, error) {
	if n > uint64(len(r.rest)) {
		return nil, errShort
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken, nil
}

// readNumber reads a big-endian integer of 1, 2, 4 or 8 bytes.
func (r *reader) readNumber(size uint64) (uint64, error) {
	b, err := r.nextBytes(size)
	if err != nil {
		return 0, err
	}
	var wide [8]byte
	copy(wide[8-size:], b)
	return binary.BigEndian.Uint64(wide[:]), nil
}

// readValue reads one value at a depth. Extension types are errors.
func (r *reader) readValue(depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("more than %d levels", maxDepth)
	}
	head, err := r.nextBytes(1)
	if err != nil {
		return nil, err
	}
	c := head[0]
	switch {
	case c <= 0x7f:
		return int64(c), nil
	case c <= 0x8f:
		return r.readMap(uint64(c&0xf), depth)
	case c <= 0x9f:
		return r.readList(uint64(c&0xf), depth)
	case c <= 0xbf:
		return r.readText(uint64(c & 0x1f))
	case c >= 0xe0:
		return int64(int8(c)), nil
	}
	size := uint64(1) << (c & 3) // of the number that follows, for the codes in powers of two
	switch c {
	case 0xc0:
		return nil, nil
	case 0xc2, 0xc3:
		return c == 0xc3, nil
	case 0xc4, 0xc5, 0xc6: // bin
		n, err := r.readNumber(1 << (c - 0xc4))
		if err != nil {
			return nil, err
		}
		return r.nextBytes(n)
	case 0xca:
		n, err := r.readNumber(4)
		return float64(math.Float32frombits(uint32(n))), err
	case 0xcb:
		n, err := r.readNumber(8)
		return math.Float64frombits(n), err
	case 0xcc, 0xcd, 0xce, 0xcf: // uint
		return r.readNumber(size)
	case 0xd0, 0xd1, 0xd2, 0xd3: // int
		n, err := r.readNumber(size)
		shift := 64 - 8*size
		return int64(n<<shift) >> shift, err
	case 0xd9, 0xda, 0xdb: // str
		n, err := r.readNumber(1 << (c - 0xd9))
		if err != nil {
			return nil, err
		}
		return r.readText(n)
	case 0xdc, 0xdd:
		n, err := r.readNumber(2 << (c - 0xdc))
		if err != nil {
			return nil, err
		}
		return r.readList(n, depth)
	case 0xde, 0xdf:
		n, err := r.readNumber(2 << (c - 0xde))
		if err != nil {
			return nil, err
		}
		return r.readMap(n, depth)
	}
	return nil, fmt.Errorf("msgpack code 0x%02x; must be plain values", c)
}

// readText reads n bytes of UTF-8.
func (r *reader) readText(n uint64) (any, error) {
	b, err := r.nextBytes(n)
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(b) {
		return nil, errors.New("text that is not UTF-8")
	}
	return string(b), nil
}

// readList reads n values. Memory grows item by item: each item needs at least a byte of the body, so a false
// length cannot allocate much. readMap does the same.
func (r *reader) readList(n uint64, depth int) (any, error) {
	items := []any{}
	for range n {
		v, err := r.readValue(depth + 1)
		if err != nil {
			return nil, err
		}
		items = append(items, v)
	}
	return items, nil
}

// readMap reads n pairs of a text and a value; a key that repeats is an error.
func (r *reader) readMap(n uint64, depth int) (any, error) {
	m := map[string]any{}
	for range n {
		k, err := r.readValue(depth + 1)
		if err != nil {
			return nil, err
		}
		key, ok := k.(string)
		if !ok {
			return nil, fmt.Errorf("key %s; must be a text", Show(k))
		}
		if _, twice := m[key]; twice {
			return nil, fmt.Errorf("key %s comes twice", Quote(key))
		}
		if m[key], err = r.readValue(depth + 1); err != nil {
			return nil, err
		}
	}
	return m, nil
}
