package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// Metadata is a msgpack map that is carried through unread: the bytes of the map
// itself, embedded in the event as a map, not as a byte string. Nil is no map.
// It has at most MaxMetadataBytes and MaxMetadataDepth levels.
type Metadata []byte

// MetadataFrom encodes m with sorted keys; an empty or nil map gives nil.
func MetadataFrom(m map[string]any) (Metadata, error) {
	if len(m) == 0 {
		return nil, nil
	}
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.UseCompactInts(true)
	enc.SetSortMapKeys(true)
	if err := enc.EncodeMapSorted(m); err != nil {
		return nil, fmt.Errorf("encode metadata: %w", err)
	}
	md := Metadata(buf.Bytes())
	if err := md.Validate(); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	return md, nil
}

// MetadataFromJSON takes a JSON object. Numbers without a fraction or exponent
// become integers.
func MetadataFromJSON(data []byte) (Metadata, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var m map[string]any
	if err := dec.Decode(&m); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	if dec.More() {
		return nil, errors.New("metadata: more than one JSON value")
	}
	if err := convertNumbers(m); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	return MetadataFrom(m)
}

// convertNumbers replaces every json.Number below v by an int64 or a float64.
func convertNumbers(v any) error {
	replace := func(v any) (any, error) {
		n, ok := v.(json.Number)
		if !ok {
			return v, convertNumbers(v)
		}
		if i, err := n.Int64(); err == nil {
			return i, nil
		}
		if u, err := strconv.ParseUint(n.String(), 10, 64); err == nil {
			return u, nil
		}
		return n.Float64()
	}
	var err error
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if v[k], err = replace(e); err != nil {
				return err
			}
		}
	case []any:
		for i, e := range v {
			if v[i], err = replace(e); err != nil {
				return err
			}
		}
	}
	return nil
}

// Validate reports whether m is one msgpack map within the limits.
func (m Metadata) Validate() error {
	if m == nil {
		return nil
	}
	return (&walker{data: m}).checkOneMap(MaxMetadataBytes, MaxMetadataDepth)
}

// Map decodes m. Integers become int64, or uint64 beyond its range; other numbers
// float64; byte strings []byte. Nil for no metadata.
func (m Metadata) Map() (map[string]any, error) {
	if m == nil {
		return nil, nil
	}
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	r := reader{data: m}
	return r.readAny().(map[string]any), nil
}

// readAny takes a value whatever it is; byte strings are copied.
func (r *reader) readAny() any {
	if n, ok := r.readMapLen(); ok {
		m := make(map[string]any, n)
		for range n {
			key := string(r.readText())
			m[key] = r.readAny()
		}
		return m
	}
	if n, ok := r.readListLen(); ok {
		list := make([]any, n)
		for i := range list {
			list[i] = r.readAny()
		}
		return list
	}
	if b, ok := r.readBytes(); ok {
		return bytes.Clone(b)
	}
	switch c := r.peekCode(); {
	case c == codeNil, c == codeTrue, c == codeFalse:
		r.pos++
		if c == codeNil {
			return nil
		}
		return c == codeTrue
	case r.isText():
		return string(r.readText())
	}
	if n, negative, ok := r.readInteger(); ok {
		if negative || n <= math.MaxInt64 {
			return int64(n)
		}
		return n
	}
	f, _ := r.readFloat()
	return f
}

// MarshalJSON writes m as a JSON object, byte strings as base64; null for no metadata.
func (m Metadata) MarshalJSON() ([]byte, error) {
	v, err := m.Map()
	if err != nil {
		return nil, err
	}
	return json.Marshal(v)
}

// UnmarshalJSON is MetadataFromJSON; null gives nil.
func (m *Metadata) UnmarshalJSON(data []byte) error {
	v, err := MetadataFromJSON(data)
	if err != nil {
		return err
	}
	*m = v
	return nil
}

// EncodeMsgpack embeds the map.
func (m Metadata) EncodeMsgpack(enc *msgpack.Encoder) error {
	if m == nil {
		return enc.EncodeNil()
	}
	if err := m.Validate(); err != nil {
		return fmt.Errorf("metadata: %w", err)
	}
	return enc.Encode(msgpack.RawMessage(m))
}

// DecodeMsgpack takes the map as it is, so that foreign decoders of this struct
// work too; Decode does not need it.
func (m *Metadata) DecodeMsgpack(dec *msgpack.Decoder) error {
	raw, err := dec.DecodeRaw()
	if err != nil {
		return err
	}
	*m = nil
	if len(raw) == 1 && raw[0] == codeNil {
		return nil
	}
	*m = Metadata(raw)
	return m.Validate()
}

// Truth is what samples are compared with: on the wire a text, or another value of JSON, which reward functions get as
// it is. Empty is none. Here it is the text itself; other values are their msgpack bytes after a zero byte, which no
// text has.
type Truth string

const valueMark = "\x00"

// NewTruth returns the truth that is a value of JSON; nil is none. The error says what it must be.
func NewTruth(v any) (Truth, error) {
	switch v := v.(type) {
	case nil:
		return "", nil
	case string:
		return Truth(v), nil
	}
	var buf bytes.Buffer
	enc := msgpack.NewEncoder(&buf)
	enc.UseCompactInts(true)
	enc.SetSortMapKeys(true)
	if err := enc.Encode(v); err != nil {
		return "", fmt.Errorf("%T; must be a value of JSON: %w", v, err)
	}
	t := Truth(valueMark + buf.String())
	return t, t.check()
}

func (t Truth) isText() bool { return !strings.HasPrefix(string(t), valueMark) }

// check returns what is wrong with a value that is no text.
func (t Truth) check() error {
	raw, other := strings.CutPrefix(string(t), valueMark)
	if !other {
		return nil
	}
	if len(raw) > MaxPromptBytes {
		return fmt.Errorf("%d bytes; must be at most %d", len(raw), MaxPromptBytes)
	}
	w := walker{data: []byte(raw), budget: MaxElements, top: MaxMetadataDepth}
	if !w.walkValue(MaxMetadataDepth) {
		return fmt.Errorf("%s at byte %d", w.fault, w.pos)
	}
	if w.pos != len(raw) {
		return fmt.Errorf("%d bytes after the value", len(raw)-w.pos)
	}
	return nil
}

// Value returns the truth as a value of JSON; nil if there is none.
func (t Truth) Value() any {
	raw, other := strings.CutPrefix(string(t), valueMark)
	switch {
	case t == "":
		return nil
	case !other:
		return string(t)
	case t.check() != nil:
		return nil
	}
	r := reader{data: []byte(raw)}
	return r.readAny()
}

// Text returns the truth as a text: of another value its JSON.
func (t Truth) Text() string {
	if t.isText() {
		return string(t)
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(t.Value()); err != nil {
		return fmt.Sprint(t.Value())
	}
	return strings.TrimSuffix(buf.String(), "\n")
}

// String is Text, for messages.
func (t Truth) String() string { return t.Text() }

// MarshalJSON writes the value.
func (t Truth) MarshalJSON() ([]byte, error) {
	if t == "" {
		return []byte(`""`), nil
	}
	return json.Marshal(t.Value())
}

// UnmarshalJSON takes any value.
func (t *Truth) UnmarshalJSON(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	v := []any{nil}
	if err := dec.Decode(&v[0]); err != nil {
		return err
	}
	err := convertNumbers(v)
	if err == nil {
		*t, err = NewTruth(v[0])
	}
	return err
}

// EncodeMsgpack writes the text or the value.
func (t Truth) EncodeMsgpack(enc *msgpack.Encoder) error {
	if raw, other := strings.CutPrefix(string(t), valueMark); other {
		if err := t.check(); err != nil {
			return fmt.Errorf("ground truth: %w", err)
		}
		return enc.Encode(msgpack.RawMessage(raw))
	}
	return enc.EncodeString(string(t))
}

// DecodeMsgpack takes any value, so that foreign decoders of structs work too; Decode does not need it.
func (t *Truth) DecodeMsgpack(dec *msgpack.Decoder) error {
	raw, err := dec.DecodeRaw()
	if err != nil {
		return err
	}
	return t.read(&reader{data: raw})
}

func decodeTruth(r *reader, v reflect.Value) error { return v.Addr().Interface().(*Truth).read(r) }

// read takes the next value, whatever it is: a text as it is, null as none. A value beyond the limits of metadata is an
// error.
func (t *Truth) read(r *reader) error {
	*t = ""
	if r.skipNull() {
		return nil
	}
	if r.isText() {
		*t = Truth(r.readText())
		return nil
	}
	start := r.pos
	r.skipValue()
	*t = Truth(valueMark + string(r.data[start:r.pos]))
	if err := t.check(); err != nil {
		return &FieldError{Fault: err.Error()}
	}
	return nil
}
