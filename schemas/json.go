package schemas

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/vmihailenco/msgpack/v5"
)

// JSON returns an event, or a part of one, as a value for a JSON encoder. It has the wire's keys.
// Binary data is replaced by its length and digest, and seeds are strings, since most readers of
// JSON round numbers above 2^53.
func JSON(v any) any {
	data, err := msgpack.Marshal(v)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	return JSONOfBytes(data)
}

// JSONOfBytes is JSON for an encoded event that was checked before.
func JSONOfBytes(data []byte) any {
	var v any
	if IsJSON(data) {
		return json.RawMessage(data)
	}
	if err := msgpack.Unmarshal(data, &v); err != nil {
		return map[string]any{"error": err.Error()}
	}
	return toJSONValue(v)
}

// EncodeAnswer is Encode of the answer to a message, in the encoding of that: who asks in JSON reads JSON.
func EncodeAnswer(to []byte, e Event) ([]byte, error) {
	data, err := Encode(e)
	if err != nil || !IsJSON(to) {
		return data, err
	}
	return json.Marshal(JSONOfBytes(data))
}

// toJSONValue replaces in a decoded value what JSON cannot hold. It changes maps and lists in place.
func toJSONValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if v[k] = toJSONValue(x); k == "sample_seed" || k == "noise_seed" {
				v[k] = fmt.Sprint(x)
			}
		}
	case []any:
		for i, x := range v {
			v[i] = toJSONValue(x)
		}
	case []byte:
		sum := sha256.Sum256(v)
		return map[string]any{"bytes": len(v), "sha256": hex.EncodeToString(sum[:])}
	case float64:
		switch {
		case math.IsNaN(v): // a number that is not there
			return nil
		case math.IsInf(v, 0):
			return fmt.Sprint(v)
		}
	case float32:
		return toJSONValue(float64(v))
	}
	return v
}

// JSON is a second encoding of events, so that prompts can be written by hand. It has the keys of the other one; byte
// strings are base64; a number that is not finite is the text NaN, Infinity or -Infinity, and null where it stands for
// one that is not there; fields go by their other names, too (Field.Aliases). What follows the first byte of an event
// tells which it is.

// IsJSON reports whether an event is JSON: a map of msgpack never begins with a brace or with white space.
func IsJSON(data []byte) bool { return len(data) > 0 && strings.IndexByte("{ \t\r\n", data[0]) >= 0 }

// fromJSON returns the event of a type that is JSON in the other encoding. Numbers are read as their fields have them,
// at once and exactly. What does not fit its field is left to Decode.
func fromJSON(data []byte, t reflect.Type) ([]byte, error) {
	if len(data) > MaxEventBytes {
		return nil, fmt.Errorf("%w: %d bytes; must be at most %d", ErrMalformed, len(data), MaxEventBytes)
	}
	if !utf8.Valid(data) {
		return nil, fmt.Errorf("%w: JSON that is not UTF-8", ErrMalformed)
	}
	w := &fromJSONWriter{dec: json.NewDecoder(bytes.NewReader(data))}
	w.dec.UseNumber()
	w.enc = msgpack.NewEncoder(&w.out)
	w.enc.UseCompactInts(true)
	w.replaced = bytes.Contains(data, []byte("\uFFFD")) || bytes.Contains(bytes.ToLower(data), []byte(`\ufffd`))
	err := w.writeValue(t, nil, MaxDepth)
	if err == nil {
		if _, end := w.dec.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("something follows the object")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: JSON at byte %d: %w", ErrMalformed, w.dec.InputOffset(), err)
	}
	return w.out.Bytes(), nil
}

type fromJSONWriter struct {
	dec *json.Decoder
	enc *msgpack.Encoder
	out bytes.Buffer
	// replaced: texts may have U+FFFD, which else stands for what is no character.
	replaced bool
}

// writeValue writes the next value, of a field f of type t; nil: of any type.
func (w *fromJSONWriter) writeValue(t reflect.Type, f *Field, depth int) error {
	token, err := w.dec.Token()
	if err != nil {
		return err
	}
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == metadataType || t == truthType {
		t = nil
	}
	kind := reflect.Invalid
	if t != nil {
		kind = t.Kind()
	}
	switch v := token.(type) {
	case json.Delim:
		return w.writeNested(v, t, f, depth)
	case json.Number:
		return w.writeNumber(v.String(), kind)
	case string:
		return w.writeText(v, t)
	case nil:
		if f != nil && f.Range != nil && f.Range.Null && kind != reflect.Slice {
			return w.enc.EncodeFloat64(math.NaN())
		}
	}
	return w.enc.Encode(token)
}

// writeNested writes the map or the list that begins with a brace or a bracket. Its length is known once it has ended.
func (w *fromJSONWriter) writeNested(open json.Delim, t reflect.Type, f *Field, depth int) error {
	if depth == 0 {
		return errors.New("nested too deep")
	}
	code, at := byte(codeMap32), w.out.Len()
	if open == '[' {
		code = codeArray32
	}
	w.out.Write([]byte{code, 0, 0, 0, 0})
	n, given := uint32(0), map[string]string(nil) // fields by their names, as they are given
	for ; w.dec.More(); n++ {
		elem, of := reflect.Type(nil), f
		switch {
		case open == '{':
			key, err := w.dec.Token()
			if err != nil {
				return err
			}
			name := key.(string)
			if t != nil && t.Kind() == reflect.Struct {
				if known, ok := FieldCalled(t, name); ok {
					elem, of = known.Type, &known
					if first := given[known.Name]; first != "" && first != name {
						return twiceGiven(first, name)
					} else if given == nil {
						given = map[string]string{}
					}
					given[known.Name], name = name, known.Name
				}
			} else if t != nil && t.Kind() == reflect.Map {
				elem = t.Elem()
			}
			if err := w.writeText(name, nil); err != nil {
				return err
			}
		case t != nil && t.Kind() == reflect.Slice:
			elem = t.Elem()
		}
		if err := w.writeValue(elem, of, depth-1); err != nil {
			return err
		}
	}
	binary.BigEndian.PutUint32(w.out.Bytes()[at+1:], n)
	_, err := w.dec.Token() // the end
	return err
}

// writeNumber writes a number as a field of a kind has it; Invalid: an integer, if it is written as one, or a float.
func (w *fromJSONWriter) writeNumber(s string, kind reflect.Kind) error {
	if kind == reflect.Float32 {
		x, err := strconv.ParseFloat(s, 32)
		if err != nil {
			return fmt.Errorf("%.64s; must fit 32 bits", s)
		}
		return w.enc.EncodeFloat32(float32(x))
	}
	if kind != reflect.Float64 && !strings.ContainsAny(s, ".eE") {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil {
			return w.enc.EncodeInt(n)
		}
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			return fmt.Errorf("%.64s; must be an integer of at most 64 bits", s)
		}
		return w.enc.EncodeUint(n)
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return fmt.Errorf("%.64s; must fit 64 bits", s)
	}
	return w.enc.EncodeFloat64(x)
}

// writeText writes a text, or what it stands for in a field of type t: bytes, or a number that is not finite. What
// cannot be one is an error.
func (w *fromJSONWriter) writeText(s string, t reflect.Type) error {
	switch {
	case !w.replaced && strings.ContainsRune(s, utf8.RuneError):
		return fmt.Errorf("%s; must not have half of a surrogate pair", quote(s))
	case t != nil && t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8:
		data, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			return fmt.Errorf("%s; must be base64", quote(s))
		}
		return w.enc.EncodeBytes(data)
	case t != nil && (t.Kind() == reflect.Float64 || t.Kind() == reflect.Float32):
		if x, ok := map[string]float64{"NaN": math.NaN(), "Infinity": math.Inf(1), "-Infinity": math.Inf(-1)}[s]; ok {
			return w.enc.EncodeFloat64(x)
		}
	}
	return w.enc.EncodeString(s)
}
