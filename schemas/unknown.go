package schemas

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// UnknownFields returns a message for each field of an encoded event that its type does not
// have, in the order of the bytes, such as "rollout.noise_lvel: unknown field; did you mean
// noise_level?". Decode skips such fields, as they may be of a later version. For data that
// Decode refuses the result is nil.
func UnknownFields(data []byte, e Event) []string {
	root := reflect.TypeOf(e).Elem()
	if isJSON(data) {
		data, _ = fromJSON(data, root) // nil is refused below
	}
	if Precheck(data) != nil {
		return nil
	}
	u := &unknownFields{reader: reader{data: data}, root: root}
	u.walkValue(root, "")
	return u.found
}

// unknownFields walks an encoded event beside its type and collects messages, at most maxFaults.
type unknownFields struct {
	reader
	root  reflect.Type
	found []string
}

// walkValue steps over one value of a type.
func (u *unknownFields) walkValue(t reflect.Type, path string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t.Kind() == reflect.Struct:
		u.walkFields(t, path)
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
		n, ok := u.readListLen()
		if !ok {
			u.skipValue()
			return
		}
		for i := range n {
			u.walkValue(t.Elem(), path+"["+strconv.Itoa(i)+"]")
		}
	default:
		u.skipValue()
	}
}

// walkFields walks a map beside the struct t; path is where the map is in the event.
func (u *unknownFields) walkFields(t reflect.Type, path string) {
	n, ok := u.readMapLen()
	if !ok {
		u.skipValue()
		return
	}
	for range n {
		name := string(u.readText())
		if f, known := fieldNamed(t, name); known {
			u.walkValue(f.Type, within(path, name))
			continue
		}
		u.skipValue()
		if len(u.found) == maxFaults {
			continue
		}
		text := within(path, quoteOdd(name)) + ": unknown field"
		if meant := u.suggestField(t, name); meant != "" {
			text += "; did you mean " + meant + "?"
		}
		u.found = append(u.found, text)
	}
}

// suggestField returns the field of t whose name is similar to an unknown one; otherwise the path of a
// field with that name elsewhere in the event; otherwise "".
func (u *unknownFields) suggestField(t reflect.Type, name string) string {
	if near := NearestWithin(min(3, len(name)/3), name, wireNames(t)); near != "" {
		return near
	}
	return pathOf(u.root, name, "")
}

// pathOf returns the path of the first field with a name in a struct or the structs in it; "" if there is none.
func pathOf(t reflect.Type, name, path string) string {
	if _, ok := fieldNamed(t, name); ok {
		return within(path, name)
	}
	for _, f := range Fields(t) {
		if s := f.Type; s.Kind() == reflect.Struct || s.Kind() == reflect.Pointer && s.Elem().Kind() == reflect.Struct {
			if s.Kind() == reflect.Pointer {
				s = s.Elem()
			}
			if found := pathOf(s, name, within(path, f.Name)); found != "" {
				return found
			}
		}
	}
	return ""
}

func fieldNamed(t reflect.Type, name string) (Field, bool) {
	for _, f := range Fields(t) {
		if f.Name == name {
			return f, true
		}
	}
	return Field{}, false
}

func wireNames(t reflect.Type) []string {
	var names []string
	for _, f := range Fields(t) {
		names = append(names, f.Name)
	}
	return names
}

// FieldNames returns the wire names of the fields of an event.
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

// Nearest returns the name that a misspelt word most likely means; "" if none is similar, that
// is, within three edits and half of the word's letters.
func Nearest(word string, names []string) string {
	return NearestWithin(min(3, len(word)/2), word, names)
}

// NearestWithin is Nearest with a bound on the edits.
func NearestWithin(most int, word string, names []string) string {
	best, distance := "", most+1
	for _, n := range names {
		if d := editDistance(word, n); d < distance {
			best, distance = n, d
		}
	}
	return best
}

// editDistance returns the Levenshtein distance of two short names, and 100 for long ones.
func editDistance(a, b string) int {
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

// unknownError returns the error of a prompt with unknown fields; nil without any.
func unknownError(found []string) error {
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("%s; unknown_fields: %s takes the prompt without", strings.Join(slices.Compact(found), "\n"),
		UnknownWarn)
}

// CheckUnknown looks for unknown fields in an encoded prompt. They are an error, or warnings if
// the prompt says unknown_fields: warn.
func (p *Prompt) CheckUnknown(data []byte) (warnings []string, err error) {
	found := UnknownFields(data, p)
	if p.UnknownFields == UnknownWarn {
		return found, nil
	}
	return nil, unknownError(found)
}
