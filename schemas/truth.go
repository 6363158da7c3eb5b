package schemas

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

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
	return truthPlan{}.set(t, &reader{data: raw})
}

// truthPlan decodes a Truth.
type truthPlan struct{}

func (p truthPlan) decode(r *reader, v reflect.Value) error {
	return p.set(v.Addr().Interface().(*Truth), r)
}

// set reads the next value, whatever it is: a text as it is, null as none. A value beyond the limits of metadata is an
// error.
func (truthPlan) set(t *Truth, r *reader) error {
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
