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
)

// Formats of requests and replies.
const (
	FormatJSON    = "json"
	FormatMsgpack = "msgpack"
)

// maxDepth is how deep a reply nests; the reply itself is level 1.
const maxDepth = 16

// Decode reads a reply, one map, from the whole of body. Values are nil, bool, string,
// []byte, []any, map[string]any, float64, int64, uint64 or json.Number.
//
// JSON with the words NaN, Infinity and -Infinity, which Python's json writes, is read
// with these words as texts, so that one of them fails its own sample alone.
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

func decodeJSON(body []byte) (map[string]any, error) {
	if err := checkNesting(body); err != nil {
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

// checkNesting bounds the depth before the library goes down it.
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

// quoteWords puts the words that Python's json writes for what is no number in quotes.
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

func decodeMsgpack(body []byte) (map[string]any, error) {
	r := reader{rest: body}
	v, err := r.value(1)
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

// reader walks msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md).
type reader struct{ rest []byte }

var errShort = errors.New("msgpack ends early")

func (r *reader) take(n uint64) ([]byte, error) {
	if n > uint64(len(r.rest)) {
		return nil, errShort
	}
	taken := r.rest[:n]
	r.rest = r.rest[n:]
	return taken, nil
}

// number reads a big-endian integer of 1, 2, 4 or 8 bytes.
func (r *reader) number(size uint64) (uint64, error) {
	b, err := r.take(size)
	if err != nil {
		return 0, err
	}
	var wide [8]byte
	copy(wide[8-size:], b)
	return binary.BigEndian.Uint64(wide[:]), nil
}

func (r *reader) value(depth int) (any, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("more than %d levels", maxDepth)
	}
	head, err := r.take(1)
	if err != nil {
		return nil, err
	}
	c := head[0]
	switch {
	case c <= 0x7f:
		return int64(c), nil
	case c <= 0x8f:
		return r.mapping(uint64(c&0xf), depth)
	case c <= 0x9f:
		return r.list(uint64(c&0xf), depth)
	case c <= 0xbf:
		return r.text(uint64(c & 0x1f))
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
		n, err := r.number(1 << (c - 0xc4))
		if err != nil {
			return nil, err
		}
		return r.take(n)
	case 0xca:
		n, err := r.number(4)
		return float64(math.Float32frombits(uint32(n))), err
	case 0xcb:
		n, err := r.number(8)
		return math.Float64frombits(n), err
	case 0xcc, 0xcd, 0xce, 0xcf: // uint
		return r.number(size)
	case 0xd0, 0xd1, 0xd2, 0xd3: // int
		n, err := r.number(size)
		shift := 64 - 8*size
		return int64(n<<shift) >> shift, err
	case 0xd9, 0xda, 0xdb: // str
		n, err := r.number(1 << (c - 0xd9))
		if err != nil {
			return nil, err
		}
		return r.text(n)
	case 0xdc, 0xdd:
		n, err := r.number(2 << (c - 0xdc))
		if err != nil {
			return nil, err
		}
		return r.list(n, depth)
	case 0xde, 0xdf:
		n, err := r.number(2 << (c - 0xde))
		if err != nil {
			return nil, err
		}
		return r.mapping(n, depth)
	}
	return nil, fmt.Errorf("msgpack code 0x%02x; must be plain values", c)
}

func (r *reader) text(n uint64) (any, error) {
	b, err := r.take(n)
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(b) {
		return nil, errors.New("text that is not UTF-8")
	}
	return string(b), nil
}

// list grows item by item, as mapping does: each costs a byte at least, so the bytes that
// are there bound it, whatever length is declared.
func (r *reader) list(n uint64, depth int) (any, error) {
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

func (r *reader) mapping(n uint64, depth int) (any, error) {
	m := map[string]any{}
	for range n {
		k, err := r.value(depth + 1)
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
		if m[key], err = r.value(depth + 1); err != nil {
			return nil, err
		}
	}
	return m, nil
}
