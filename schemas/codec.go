package schemas

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// ErrTooLarge is wrapped when an event encodes to more than MaxEventBytes, or to more
// values, items or levels than Decode accepts.
var ErrTooLarge = errors.New("event too large")

// Encode returns e as one msgpack map: keys in the order of Fields, integers as
// short as they go, Go maps sorted by key, V set to Version. Equal events give equal
// bytes. e is not modified; a V other than 0 or Version is refused.
//
// Encode does not call Validate, but it never returns bytes that Decode's structural
// check would refuse. Failures must always go out: the error of an event, and every
// text of a dead letter, is repaired instead, what is not UTF-8 with U+FFFD and what
// is beyond its limit by cutting it.
func Encode(e Event) ([]byte, error) {
	scratch := scratches.Get().(*[]byte)
	data, err := AppendEncode((*scratch)[:0], e)
	if cap(data) <= maxScratch {
		*scratch = data
		defer scratches.Put(scratch)
	}
	return bytes.Clone(data), err
}

// AppendEncode is Encode that appends to dst, the caller's memory. With an error it returns nil.
func AppendEncode(dst []byte, e Event) ([]byte, error) { return appendEncode(dst, e, nil) }

// appendEncode is AppendEncode; if bins is not nil, it collects there where the byte strings of the event are.
func appendEncode(dst []byte, e Event, bins *[]span) ([]byte, error) {
	v := reflect.ValueOf(e)
	switch {
	case v.Kind() != reflect.Pointer || v.Type().Elem().Kind() != reflect.Struct ||
		v.Type().Elem().Field(0).Name != "V":
		return nil, fmt.Errorf("encode %T: not an event of this contract", e)
	case v.IsNil():
		return nil, fmt.Errorf("encode %T: nil", e)
	}
	if n := v.Elem().Field(0).Int(); n != 0 && n != Version {
		return nil, fmt.Errorf("encode %s: v: %d; must be %d", e.Type(), n, Version)
	}
	w := encoders.Get().(*encoder)
	defer encoders.Put(w)
	w.to = dst
	err := w.enc.Encode(Legal(e))
	out := w.to
	w.to = nil
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Type(), err)
	}
	data := out[len(dst):]
	setVersion(data)
	if len(data) > MaxEventBytes {
		return nil, fmt.Errorf("encode %s: %w: %d bytes; must be at most %d", e.Type(), ErrTooLarge, len(data),
			MaxEventBytes)
	}
	if err := precheck(&walker{data: data, bins: bins}); err != nil {
		return nil, fmt.Errorf("encode %s: %w: %w", e.Type(), ErrTooLarge, err)
	}
	return out, nil
}

// setVersion sets the value of the first key of an encoded event, v, of which the event in memory may have none.
func setVersion(data []byte) {
	at := len("\x80\xa1v")
	if data[0] == codeMap16 {
		at += 2
	}
	data[at] = Version
}

// maxScratch is more than most events take: memory for larger ones is not kept.
const maxScratch = 2 << 20

var scratches = sync.Pool{New: func() any { return new([]byte) }}

// encoder is a msgpack encoder that appends to a slice; a pool keeps it for reuse.
type encoder struct {
	to  []byte
	enc *msgpack.Encoder
}

func (w *encoder) Write(p []byte) (int, error) {
	w.to = append(w.to, p...)
	return len(p), nil
}

func (w *encoder) WriteByte(c byte) error {
	w.to = append(w.to, c)
	return nil
}

var encoders = sync.Pool{New: func() any {
	w := &encoder{}
	w.enc = msgpack.NewEncoder(w)
	w.enc.UseCompactInts(true)
	w.enc.SetSortMapKeys(true)
	return w
}}

// Decode reads one event, msgpack or JSON, into e, which must be a pointer to one of the contract's
// structs. Whatever e held before is gone; on an error e is its zero value.
//
// The structure is checked first (Precheck). Then every value must have the type of
// its field: an integer for an integer and in its range, a string for a string, a map
// for a struct, and null only where a field is optional. Integers are accepted for
// floating-point fields. Fields that are not known are skipped, fields that are absent
// stay zero. An error names the field, as in "rollout.sde_step_indices[2]: ...".
//
// Byte strings (latents, images, a dead letter's data) alias data: they hold as
// long as data is not modified. Everything else is copied. Decode does not Validate.
func Decode(data []byte, e Event) error {
	if e == nil {
		return errors.New("decode into nil: must be a pointer to an event")
	}
	if err := decode(data, e); err != nil {
		return fmt.Errorf("decode %s: %w", e.Type(), err)
	}
	return nil
}

// DecodeValid is Decode and then Validate.
func DecodeValid(data []byte, e Event) error {
	if err := Decode(data, e); err != nil {
		return err
	}
	return e.Validate()
}

// New returns an empty event of a type name such as "step/1"; false for a type that
// this version does not know.
func New(typeName string) (Event, bool) {
	for _, e := range Events() {
		if e.Type() == typeName {
			return e, true
		}
	}
	return nil, false
}

// Events returns a new empty event of every type, in the order data flows.
func Events() []Event {
	return []Event{
		&Prompt{}, &GroupRecord{}, &Plan{}, &Request{}, &Step{}, &Tokens{}, &Trajectory{}, &Reward{}, &Verdict{},
		&Rating{}, &StepReward{}, &Selection{},
		&Advantage{}, &Batch{}, &Update{}, &Alarm{}, &Policy{}, &Applied{}, &Presence{}, &Dead{},
		&Receipt{}, &Control{}, &ControlReceipt{}, &ScoreRequest{}, &ScoreReply{}, &InteractRequest{}, &InteractReply{},
		&TeacherRequest{}, &TeacherReply{},
	}
}
