package schemas

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"reflect"
)

// GroupDecoder decodes the records and rewards of groups, one after another. Rewards repeat each
// other, those of a group above all: what came shortly before is taken from there and not made
// again, so the groups and texts of several events may be the same memory and are not to be
// modified. The zero value is ready.
type GroupDecoder struct{ seen seen }

// Reward is DecodeValid of a reward.
func (d *GroupDecoder) Reward(data []byte, e *Reward) error {
	*e = Reward{}
	return d.decode(data, e, e)
}

// Opening is DecodeValid of the record that opens a group.
func (d *GroupDecoder) Opening(data []byte, e *Opening) error {
	*e = Opening{}
	return d.decode(data, e, (*GroupRecord)(e))
}

// Group is that of the event decoded last, where it is kept. Events of one group mostly have one
// memory: the same pointer is the same group, another may be.
func (d *GroupDecoder) Group() *Group {
	if d.seen.last == nil {
		return nil
	}
	return d.seen.last.group
}

// decode takes the event and what has the rules for its fields.
func (d *GroupDecoder) decode(data []byte, e Event, rules any) error {
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
	err := checkFields(rules, checked)
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
	group *Group
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
	group := v.Interface().(Group)
	s.last = s.slot(raw)
	*s.last = seenGroup{raw: bytes.Clone(raw), group: &group}
}
