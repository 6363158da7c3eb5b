package schemas

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"reflect"
)

// RewardDecoder decodes rewards, one after another. Rewards repeat each other, those of a
// group above all: what came shortly before is taken from there and not made again, so
// the groups and texts of several rewards may be the same memory and are not to be
// modified. The zero value is ready.
type RewardDecoder struct{ seen seen }

// Decode is DecodeValid of a reward.
func (d *RewardDecoder) Decode(data []byte, e *Reward) error {
	*e = Reward{}
	d.seen.last = nil
	r := reader{data: data, seen: &d.seen}
	if err := r.event(reflect.ValueOf(e).Elem()); err != nil {
		return fmt.Errorf("decode %s: %w", e.Type(), err)
	}
	var checked reflect.Type
	group := d.seen.last
	if group != nil && group.valid {
		checked = groupType
	}
	err := checkFields(e, checked)
	if group != nil && err == nil {
		group.valid = true
	}
	return err
}

// seen is what was decoded last, found by hash: what has the same one takes its place.
type seen struct {
	texts  [256]string
	groups [256]seenGroup
	last   *seenGroup // of the event
}

type seenGroup struct {
	raw   []byte
	value reflect.Value
	valid bool // as far as its own fields go
}

const (
	// maxSeenText and maxSeenGroup bound what is kept.
	maxSeenText  = 128
	maxSeenGroup = 4 << 10
	// groupStart is enough of a group to tell it from others, as a rule.
	groupStart = 64
	groupKey   = "group"
)

var seed = maphash.MakeSeed()

func (s *seen) text(b []byte) string {
	if s == nil || len(b) > maxSeenText {
		return string(b)
	}
	known := &s.texts[maphash.Bytes(seed, b)%uint64(len(s.texts))]
	if *known != string(b) {
		*known = string(b)
	}
	return *known
}

func (s *seen) slot(raw []byte) *seenGroup {
	return &s.groups[maphash.Bytes(seed, raw[:min(len(raw), groupStart)])%uint64(len(s.groups))]
}

// group returns the group that data begins with, nil if it was not seen. The beginning
// decides: no encoding of a value is the beginning of another's.
func (s *seen) group(data []byte) *seenGroup {
	if s == nil {
		return nil
	}
	if g := s.slot(data); len(g.raw) > 0 && bytes.HasPrefix(data, g.raw) {
		return g
	}
	return nil
}

func (s *seen) keepGroup(raw []byte, v reflect.Value) {
	if s == nil || len(raw) < groupStart || len(raw) > maxSeenGroup {
		return // shorter ones would have the hash of what follows them
	}
	value := reflect.New(groupType).Elem()
	value.Set(v)
	s.last = s.slot(raw)
	*s.last = seenGroup{raw: bytes.Clone(raw), value: value}
}
