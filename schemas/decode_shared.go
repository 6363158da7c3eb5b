package schemas

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"reflect"
)

// GroupDecoder decodes the records and rewards of groups, one after another. Most rewards of a group
// repeat the same Group and texts. What came shortly before is not decoded again but shared, so
// several events may share memory, and callers must not modify them. The zero value is ready.
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

// Group returns the shared Group of the event that was decoded last, nil if it is not shared. Equal pointers mean equal
// groups; different pointers may mean equal groups too.
func (d *GroupDecoder) Group() *Group {
	if d.seen.last == nil {
		return nil
	}
	return d.seen.last.group
}

// decode decodes and validates an event; rules is the struct whose rules apply to it. A group that was valid before is
// not validated again.
func (d *GroupDecoder) decode(data []byte, e Event, rules any) error {
	d.seen.last = nil
	r := reader{data: data, seen: &d.seen}
	if err := r.readEvent(reflect.ValueOf(e).Elem()); err != nil {
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

// seen is a small cache of texts and groups that were decoded before, by hash. An entry replaces another with the same
// hash.
type seen struct {
	texts  [256]string
	groups [256]seenGroup
	last   *seenGroup // the group of the event that was decoded last
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

// cachedText returns b as a string, the cached one if it is there.
func (s *seen) cachedText(b []byte) string {
	if s == nil || len(b) > maxSeenText {
		return string(b)
	}
	known := &s.texts[maphash.Bytes(seed, b)%uint64(len(s.texts))]
	if *known != string(b) {
		*known = string(b)
	}
	return *known
}

func (s *seen) cacheSlot(raw []byte) *seenGroup {
	return &s.groups[maphash.Bytes(seed, raw[:min(len(raw), groupStart)])%uint64(len(s.groups))]
}

// cachedGroup returns the cached group that data begins with, nil if there is none. To compare the
// beginning is enough: no encoding of a value is the beginning of another one.
func (s *seen) cachedGroup(data []byte) *seenGroup {
	if s == nil {
		return nil
	}
	if g := s.cacheSlot(data); len(g.raw) > 0 && bytes.HasPrefix(data, g.raw) {
		return g
	}
	return nil
}

// keepGroup caches a group with the bytes that it was decoded from.
func (s *seen) keepGroup(raw []byte, v reflect.Value) {
	if s == nil || len(raw) < groupStart || len(raw) > maxSeenGroup {
		return // shorter ones would have the hash of what follows them
	}
	group := v.Interface().(Group)
	s.last = s.cacheSlot(raw)
	*s.last = seenGroup{raw: bytes.Clone(raw), group: &group}
}
