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
	v, err := withVersion(e)
	if err != nil {
		return nil, err
	}
	w := encoders.Get().(*encoder)
	defer encoders.Put(w)
	w.to = dst
	if _, ok := v.(keyed); ok {
		err = encodeKeyed(w.enc, reflect.ValueOf(v).Elem())
	} else {
		err = w.enc.Encode(v)
	}
	out := w.to
	w.to = nil
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Type(), err)
	}
	data := out[len(dst):]
	if len(data) > MaxEventBytes {
		return nil, fmt.Errorf("encode %s: %w: %d bytes; must be at most %d", e.Type(), ErrTooLarge, len(data),
			MaxEventBytes)
	}
	if err := precheck(&walker{data: data, bins: bins}); err != nil {
		return nil, fmt.Errorf("encode %s: %w: %w", e.Type(), ErrTooLarge, err)
	}
	return out, nil
}

// encodeKeyed encodes an event whose keys have an order of their own (keyed).
func encodeKeyed(enc *msgpack.Encoder, v reflect.Value) error {
	fields := Fields(v.Type())
	n := 0
	for i := range fields {
		if !fields[i].isOmitted(v) {
			n++
		}
	}
	err := enc.EncodeMapLen(n)
	for i := 0; i < len(fields) && err == nil; i++ {
		if fields[i].isOmitted(v) {
			continue
		}
		if err = enc.EncodeString(fields[i].Name); err == nil {
			err = enc.EncodeValue(fields[i].In(v))
		}
	}
	return err
}

// isOmitted reports whether the field of a struct is left out of its encoding: it is optional and empty.
func (f *Field) isOmitted(v reflect.Value) bool {
	if !f.Optional {
		return false
	}
	switch v = f.In(v); v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	}
	return v.IsZero()
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

// withVersion returns a shallow copy of e with its version set.
func withVersion(e Event) (any, error) {
	var v *int64
	var c any
	switch e := e.(type) {
	case *Prompt:
		v, c = copyWithVersion(e, func(c *Prompt) *int64 { return &c.V })
	case *Opening:
		return withVersion((*GroupRecord)(e))
	case *Parked:
		return withVersion((*Request)(e))
	case *GroupRecord:
		v, c = copyWithVersion(e, func(c *GroupRecord) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	case *Plan:
		v, c = copyWithVersion(e, func(c *Plan) *int64 { return &c.V })
	case *Request:
		v, c = copyWithVersion(e, func(c *Request) *int64 { return &c.V })
	case *Step:
		v, c = copyWithVersion(e, func(c *Step) *int64 { return &c.V })
	case *Tokens:
		v, c = copyWithVersion(e, func(c *Tokens) *int64 { return &c.V })
	case *Trajectory:
		v, c = copyWithVersion(e, (*Trajectory).repairTexts)
	case *Reward:
		v, c = copyWithVersion(e, func(c *Reward) *int64 {
			c.repairTexts()
			return &c.V
		})
	case *Verdict:
		v, c = copyWithVersion(e, func(c *Verdict) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	case *Advantage:
		v, c = copyWithVersion(e, func(c *Advantage) *int64 {
			c.repairTexts()
			return &c.V
		})
	case *Batch:
		v, c = copyWithVersion(e, func(c *Batch) *int64 { return &c.V })
	case *Policy:
		v, c = copyWithVersion(e, func(c *Policy) *int64 { return &c.V })
	case *Applied:
		v, c = copyWithVersion(e, (*Applied).repairTexts)
	case *Receipt:
		v, c = copyWithVersion(e, func(c *Receipt) *int64 {
			c.repairTexts()
			return &c.V
		})
	case *Presence:
		v, c = copyWithVersion(e, (*Presence).repairTexts)
	case *Control:
		v, c = copyWithVersion(e, (*Control).repairTexts)
	case *ControlReceipt:
		v, c = copyWithVersion(e, (*ControlReceipt).repairTexts)
	case *Dead:
		v, c = copyWithVersion(e, func(c *Dead) *int64 {
			c.repairTexts()
			return &c.V
		})
	default:
		v, c = callWithVersion(e)
	}
	if c == nil {
		return nil, fmt.Errorf("encode %T: not an event of this contract", e)
	}
	if v == nil {
		return nil, fmt.Errorf("encode %T: nil", e)
	}
	if *v != 0 && *v != Version {
		return nil, fmt.Errorf("encode %s: v: %d; must be %d", e.Type(), *v, Version)
	}
	*v = Version
	return c, nil
}

// callWithVersion is versioned for requests to workers and their replies, which are not stored.
func callWithVersion(e Event) (v *int64, c any) {
	switch e := e.(type) {
	case *ScoreRequest:
		v, c = copyWithVersion(e, func(c *ScoreRequest) *int64 { return &c.V })
	case *ScoreReply:
		v, c = copyWithVersion(e, func(c *ScoreReply) *int64 { return &c.V })
	case *InteractRequest:
		v, c = copyWithVersion(e, func(c *InteractRequest) *int64 { return &c.V })
	case *InteractReply:
		v, c = copyWithVersion(e, func(c *InteractReply) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	case *TeacherRequest:
		v, c = copyWithVersion(e, func(c *TeacherRequest) *int64 { return &c.V })
	case *TeacherReply:
		v, c = copyWithVersion(e, func(c *TeacherReply) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	}
	return v, c
}

// copyWithVersion returns a shallow copy of an event, and its version field as version returns it; nil for nil. version
// may also repair the copy.
func copyWithVersion[T any](e *T, version func(*T) *int64) (*int64, *T) {
	if e == nil {
		return nil, nil
	}
	c := *e
	return version(&c), &c
}

// Decode reads one event into e, which must be a pointer to one of the contract's
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
		&Advantage{}, &Batch{}, &Policy{}, &Applied{}, &Presence{}, &Dead{}, &Receipt{},
		&Control{}, &ControlReceipt{}, &ScoreRequest{}, &ScoreReply{}, &InteractRequest{}, &InteractReply{},
		&TeacherRequest{}, &TeacherReply{},
	}
}
