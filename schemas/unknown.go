package schemas

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// UnknownFields lists the fields of an encoded event that its type does not have, in the
// order of the bytes, each by its path in wire names and with what was probably meant, as
// in "rollout.noise_lvel: unknown field; did you mean noise_level?". Decode skips them:
// they may be of a later version. Data that Decode refuses gives nil.
func UnknownFields(data []byte, e Event) []string {
	if Precheck(data) != nil {
		return nil
	}
	root := reflect.TypeOf(e).Elem()
	u := &unknownFields{reader: reader{data: data}, root: root}
	u.value(root, "")
	return u.found
}

type unknownFields struct {
	reader
	root  reflect.Type
	found []string
}

// value steps over one value of a type.
func (u *unknownFields) value(t reflect.Type, path string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t.Kind() == reflect.Struct:
		u.fields(t, path)
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
		n, ok := u.listLen()
		if !ok {
			u.skip()
			return
		}
		for i := range n {
			u.value(t.Elem(), path+"["+strconv.Itoa(i)+"]")
		}
	default:
		u.skip()
	}
}

func (u *unknownFields) fields(t reflect.Type, path string) {
	n, ok := u.mapLen()
	if !ok {
		u.skip()
		return
	}
	for range n {
		name := string(u.text())
		if f, known := fieldNamed(t, name); known {
			u.value(f.Type, within(path, name))
			continue
		}
		u.skip()
		if len(u.found) == maxFaults {
			continue
		}
		text := within(path, quoteOdd(name)) + ": unknown field"
		if meant := u.meant(t, name); meant != "" {
			text += "; did you mean " + meant + "?"
		}
		u.found = append(u.found, text)
	}
}

// meant is the field of t that an unknown name is near to, or else the path of one that
// has the name elsewhere in the event.
func (u *unknownFields) meant(t reflect.Type, name string) string {
	if near := NearestWithin(min(3, len(name)/3), name, wireNames(t)); near != "" {
		return near
	}
	return pathOf(u.root, name, "")
}

// pathOf finds a field by its name in the maps of an event.
func pathOf(t reflect.Type, name, path string) string {
	if _, ok := fieldNamed(t, name); ok {
		return within(path, name)
	}
	for f := range t.Fields() {
		if s := f.Type; s.Kind() == reflect.Struct || s.Kind() == reflect.Pointer && s.Elem().Kind() == reflect.Struct {
			if s.Kind() == reflect.Pointer {
				s = s.Elem()
			}
			if found := pathOf(s, name, within(path, wireName(f))); found != "" {
				return found
			}
		}
	}
	return ""
}

func fieldNamed(t reflect.Type, name string) (reflect.StructField, bool) {
	for f := range t.Fields() {
		if wireName(f) == name {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

func wireNames(t reflect.Type) []string {
	var names []string
	for f := range t.Fields() {
		names = append(names, wireName(f))
	}
	return names
}

func wireName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("msgpack"), ",")
	return name
}

// FieldNames are the wire names of the fields of an event.
func FieldNames(e Event) []string { return wireNames(reflect.TypeOf(e).Elem()) }

func within(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// quoteOdd quotes a name that could not be one of a field.
func quoteOdd(name string) string {
	if name == "" || len(name) > MaxToken || !isToken(name) {
		return quote(name)
	}
	return name
}

// Nearest is the name that a misspelt word most likely meant; empty when none is near: more
// than three edits, or than half of its letters, are another word.
func Nearest(word string, names []string) string {
	return NearestWithin(min(3, len(word)/2), word, names)
}

// NearestWithin is Nearest with a bound on the edits.
func NearestWithin(most int, word string, names []string) string {
	best, distance := "", most+1
	for _, n := range names {
		if d := edits(word, n); d < distance {
			best, distance = n, d
		}
	}
	return best
}

// edits is the Levenshtein distance of two short names; long ones are far apart.
func edits(a, b string) int {
	if len(a) > 100 || len(b) > 100 {
		return 100
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := corner
			if a[i] != b[j] {
				cost++
			}
			corner = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// unknownError is the refusal of unknown fields, nil without any.
func unknownError(found []string) error {
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("%s; unknown_fields: %s takes the prompt without", strings.Join(slices.Compact(found), "\n"), UnknownWarn)
}

// CheckUnknown looks for fields that a prompt does not have. They are an error, or, where
// the prompt says unknown_fields: warn, warnings.
func (p *Prompt) CheckUnknown(data []byte) (warnings []string, err error) {
	found := UnknownFields(data, p)
	if p.UnknownFields == UnknownWarn {
		return found, nil
	}
	return nil, unknownError(found)
}
