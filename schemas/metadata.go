package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

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
