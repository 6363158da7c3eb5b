package schemas

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// unknownKey is a key that a struct of an event does not have.
type unknownKey struct {
	path, name string
	of         reflect.Type
	value      string
}

// maxUnknownValue bounds the text of a value that messages repeat.
const maxUnknownValue = 40

// skipUnknown steps over the value of a key that the struct of a type does not have, and notes both.
func (r *reader) skipUnknown(name string, of reflect.Type) {
	begin := r.pos
	r.skipValue()
	if len(r.unknown) == maxFaults {
		return
	}
	var value any
	text := "..."
	if msgpack.Unmarshal(r.data[begin:r.pos], &value) == nil {
		if s := fmt.Sprint(value); len(s) <= maxUnknownValue {
			text = s
		}
	}
	r.unknown = append(r.unknown, unknownKey{quoteOdd(name), name, of, text})
}

// prefixUnknown puts the field or the index in which they are in front of the keys that were noted since.
func (r *reader) prefixUnknown(since int, level string) {
	for i := range r.unknown[since:] {
		k := &r.unknown[since+i]
		if k.path = within(level, k.path); strings.HasPrefix(k.path, level+".[") {
			k.path = level + k.path[len(level)+1:]
		}
	}
}

// unknownTexts returns unknown keys with their values, as in "start.phase=0.2".
func unknownTexts(keys []unknownKey) (list []string) {
	for _, k := range keys {
		list = append(list, k.path+"="+k.value)
	}
	return list
}

// UnknownFields returns a message for each field of an encoded event that its type does not
// have, in the order of the bytes, such as "rollout.noise_lvel: unknown field; did you mean
// noise_level?". Decode skips such fields, as they may be of a later version. For data that
// Decode refuses it has those before the fault.
func UnknownFields(data []byte, e Event) (found []string) {
	root := reflect.TypeOf(e).Elem()
	unknown, _ := decodeInto(data, reflect.New(root).Elem())
	for _, k := range unknown {
		text := k.path + ": unknown field"
		meant := NearestWithin(min(3, len(k.name)/3), k.name, wireNames(k.of))
		if meant == "" { // of a field elsewhere in the event
			meant = pathOf(root, k.name, "")
		}
		switch _, ofPrompt := FieldCalled(root, k.name); {
		case k.of == reflect.TypeFor[StageSpec]() && k.name == "reward":
			text += "; the prompt has it: each reward there may name its stage"
		case k.of == reflect.TypeFor[StageSpec]() && ofPrompt:
			text += "; the prompt has it, for all stages"
		case meant != "":
			text += "; did you mean " + meant + "?"
		}
		found = append(found, text)
	}
	return found
}

// pathOf returns the path of the first field with a name in a struct or the structs in it; "" if there is none.
func pathOf(t reflect.Type, name, path string) string {
	if f, ok := FieldCalled(t, name); ok {
		return within(path, f.Name)
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

// fieldNamed returns the field of a struct that has a name as its own; false: none has.
func fieldNamed(t reflect.Type, name string) (Field, bool) {
	list := Fields(t)
	for i := range list { // a field is large
		if list[i].Name == name {
			return list[i], true
		}
	}
	return Field{}, false
}

// FieldCalled returns the field of a struct that goes by a name: its own, or one of its Aliases.
func FieldCalled(t reflect.Type, name string) (Field, bool) {
	if f, ok := fieldNamed(t, name); ok {
		return f, true
	}
	for _, f := range Fields(t) {
		if slices.Contains(f.Aliases(), name) {
			return f, true
		}
	}
	return Field{}, false
}

// NameFields gives the fields in an object, which is to be the struct of a type, and in the objects in it their own
// names, where they have other ones (Field.Aliases). An error names a field that is there twice.
func NameFields(t reflect.Type, object map[string]any) error {
	for _, name := range slices.Sorted(maps.Keys(object)) {
		f, ok := FieldCalled(t, name)
		if !ok {
			continue
		}
		v := object[name]
		if f.Name != name {
			if _, twice := object[f.Name]; twice {
				return twiceGiven(name, f.Name)
			}
			delete(object, name)
			object[f.Name] = v
		}
		elem := f.Type
		if elem.Kind() == reflect.Pointer {
			elem = elem.Elem()
		}
		if inner, ok := v.(map[string]any); ok && elem.Kind() == reflect.Struct {
			if err := NameFields(elem, inner); err != nil {
				return err
			}
		}
	}
	return nil
}

// twiceGiven is the error of a field that is given by two of its names.
func twiceGiven(a, b string) error {
	return fmt.Errorf("%s and %s: both given; must be one: they are one field", a, b)
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
