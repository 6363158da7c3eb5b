package schemas

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"github.com/vmihailenco/msgpack/v5"
)

// ErrTooLarge is wrapped when an event encodes to more than MaxEventBytes, or to more
// values, items or levels than Decode accepts.
var ErrTooLarge = errors.New("event too large")

// Encode returns e as one msgpack map: keys in the order of the struct, integers as
// short as they go, Go maps sorted by key, V set to Version. Equal events give equal
// bytes. e is not modified; a V other than 0 or Version is refused.
//
// Encode does not call Validate, but it never returns bytes that Decode's structural
// check would refuse. Failures must always go out: the error of an event, and every
// text of a dead letter, is repaired instead, what is not UTF-8 with U+FFFD and what
// is beyond its limit by cutting it.
func Encode(e Event) ([]byte, error) {
	v, err := versioned(e)
	if err != nil {
		return nil, err
	}
	buf := encoders.Get().(*encoder)
	defer buf.release()
	if err := buf.enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Type(), err)
	}
	data := buf.buf.Bytes()
	if len(data) > MaxEventBytes {
		return nil, fmt.Errorf("encode %s: %w: %d bytes; must be at most %d", e.Type(), ErrTooLarge, len(data), MaxEventBytes)
	}
	if err := Precheck(data); err != nil {
		return nil, fmt.Errorf("encode %s: %w: %w", e.Type(), ErrTooLarge, err)
	}
	return bytes.Clone(data), nil
}

// encoder is reused: its buffer grows to the size of the largest recent event.
type encoder struct {
	buf bytes.Buffer
	enc *msgpack.Encoder
}

var encoders = sync.Pool{New: func() any {
	e := &encoder{}
	e.enc = msgpack.NewEncoder(&e.buf)
	e.enc.UseCompactInts(true)
	e.enc.SetSortMapKeys(true)
	return e
}}

// release gives e back, unless its buffer is one that few events need.
func (e *encoder) release() {
	if e.buf.Cap() > 2<<20 {
		return
	}
	e.buf.Reset()
	encoders.Put(e)
}

// versioned returns a shallow copy of e with its version set.
func versioned(e Event) (any, error) {
	var v *int64
	var c any
	switch e := e.(type) {
	case *Prompt:
		v, c = copied(e, func(c *Prompt) *int64 { return &c.V })
	case *Opening:
		return versioned((*GroupRecord)(e))
	case *Parked:
		return versioned((*Request)(e))
	case *GroupRecord:
		v, c = copied(e, func(c *GroupRecord) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	case *Plan:
		v, c = copied(e, func(c *Plan) *int64 { return &c.V })
	case *Request:
		v, c = copied(e, func(c *Request) *int64 { return &c.V })
	case *Step:
		v, c = copied(e, func(c *Step) *int64 { return &c.V })
	case *Trajectory:
		v, c = copied(e, func(c *Trajectory) *int64 {
			c.repair()
			return &c.V
		})
	case *Reward:
		v, c = copied(e, func(c *Reward) *int64 {
			c.repair()
			return &c.V
		})
	case *Verdict:
		v, c = copied(e, func(c *Verdict) *int64 {
			c.Error = legalText(c.Error, MaxText)
			return &c.V
		})
	case *Advantage:
		v, c = copied(e, func(c *Advantage) *int64 {
			c.repair()
			return &c.V
		})
	case *Batch:
		v, c = copied(e, func(c *Batch) *int64 { return &c.V })
	case *Policy:
		v, c = copied(e, func(c *Policy) *int64 { return &c.V })
	case *Receipt:
		v, c = copied(e, func(c *Receipt) *int64 {
			c.repair()
			return &c.V
		})
	case *Presence:
		v, c = copied(e, func(c *Presence) *int64 {
			c.repair()
			return &c.V
		})
	case *Control:
		v, c = copied(e, (*Control).repair)
	case *ControlReceipt:
		v, c = copied(e, (*ControlReceipt).repair)
	case *Dead:
		v, c = copied(e, func(c *Dead) *int64 {
			c.repair()
			return &c.V
		})
	case *ScoreRequest:
		v, c = copied(e, func(c *ScoreRequest) *int64 { return &c.V })
	case *ScoreReply:
		v, c = copied(e, func(c *ScoreReply) *int64 { return &c.V })
	default:
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

func copied[T any](e *T, version func(*T) *int64) (*int64, *T) {
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
		&Prompt{}, &GroupRecord{}, &Plan{}, &Request{}, &Step{}, &Trajectory{}, &Reward{}, &Verdict{}, &Advantage{}, &Batch{}, &Policy{}, &Presence{}, &Dead{}, &Receipt{},
		&Control{}, &ControlReceipt{}, &ScoreRequest{}, &ScoreReply{},
	}
}
