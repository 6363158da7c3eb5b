package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/meander-rl/meander/pkg/models/strictjson"
	"github.com/meander-rl/meander/pkg/strictmsgpack"
)

// Formats of requests and replies.
const (
	FormatJSON    = "json"
	FormatMsgpack = "msgpack"
)

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
			if depth++; depth > strictmsgpack.MaxDepth {
				return fmt.Errorf("more than %d levels", strictmsgpack.MaxDepth)
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
	v, err := strictmsgpack.Decode(body)
	m, ok := v.(map[string]any)
	if !ok && (err == nil || v != nil) {
		err = fmt.Errorf("%s, not a map", Show(v))
	}
	return m, err
}
