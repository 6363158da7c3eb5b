// Package strictjson decodes JSON that strangers wrote, and accounts for all of it: a key that no field takes, a key
// that repeats, and text that Go would replace by U+FFFD are errors that name the place. Package encoding/json passes
// over all three in silence.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"
)

// Unused names keys that nothing reads, each with the reason why it changes nothing. The name of a key is its path,
// such as rope_scaling.type; elements of a list add nothing to it, keys of a map add *. All below it is unused, too.
// The key * means all keys that no field takes: those of a file that others account for.
type Unused map[string]string

// With returns the keys of u and of more.
func (u Unused) With(more Unused) Unused {
	all := Unused{}
	maps.Copy(all, u)
	maps.Copy(all, more)
	return all
}

// Unmarshal decodes a document into each of the targets, as json.Unmarshal does. Beyond its errors, each key must be,
// by its exact name, a field of at least one target, unused, or null; none may repeat; and Check must pass. Whatever is
// below an interface or a json.RawMessage is its reader's to account for.
func Unmarshal(data []byte, unused Unused, into ...any) error {
	if err := Check(data); err != nil {
		return err
	}
	types := make([]reflect.Type, len(into))
	for i, v := range into {
		if err := json.Unmarshal(data, v); err != nil {
			return err
		}
		types[i] = reflect.TypeOf(v)
	}
	w := walk{unused: unused}
	w.value("", "", data, types)
	return errors.Join(w.faults...)
}

// walk goes through a document beside the types that take it.
type walk struct {
	unused Unused
	faults []error
}

// value checks a value: name is its path in Unused, place the one that errors show.
func (w *walk) value(name, place string, data []byte, types []reflect.Type) {
	types = slices.Clone(types)
	for i, t := range types {
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if types[i] = t; t.Kind() == reflect.Interface || t == reflect.TypeFor[json.RawMessage]() {
			return
		}
	}
	d := json.NewDecoder(bytes.NewReader(data))
	switch start, _ := d.Token(); start {
	case json.Delim('['):
		types = elements(types, reflect.Slice, reflect.Array)
		for i := 0; len(types) > 0 && d.More(); i++ {
			w.value(name, fmt.Sprintf("%s[%d]", place, i), next(d), types)
		}
	case json.Delim('{'):
		w.object(name, place, d, types)
	}
}

// object checks the keys of an object, whose opening bracket d has read.
func (w *walk) object(name, place string, d *json.Decoder, types []reflect.Type) {
	ofMap := elements(types, reflect.Map)
	if len(ofMap) == 0 && !slices.ContainsFunc(types, isStruct) {
		return // a type that reads it by itself, such as a list of ids that may be one
	}
	seen := map[string]bool{}
	for d.More() {
		token, _ := d.Token()
		key, _ := token.(string)
		below, at := join(name, key), join(place, key)
		value := next(d)
		switch taken := append(fields(types, key), ofMap...); {
		case seen[key]:
			w.faults = append(w.faults, fmt.Errorf("%.200s: stands there twice", at))
		case w.unused[below] != "":
		case len(taken) == len(ofMap) && w.unused[join(name, "*")] != "":
		case len(taken) == 0 && string(value) == "null": // sets nothing: libraries write what is unset so
		case len(taken) == 0:
			w.faults = append(w.faults, fmt.Errorf("%.200s: an unknown key; remove it, if nothing depends on it", at))
		default:
			if len(ofMap) > 0 {
				below = join(name, "*")
			}
			w.value(below, at, value, taken)
		}
		seen[key] = true
	}
}

// next returns the next value of a document that is known to be valid.
func next(d *json.Decoder) (raw json.RawMessage) {
	_ = d.Decode(&raw)
	return raw
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func isStruct(t reflect.Type) bool { return t.Kind() == reflect.Struct }

// elements returns the types of the elements of those types that are of one of these kinds.
func elements(types []reflect.Type, kinds ...reflect.Kind) (of []reflect.Type) {
	for _, t := range types {
		if slices.Contains(kinds, t.Kind()) {
			of = append(of, t.Elem())
		}
	}
	return of
}

// fields returns the types of the fields of that name.
func fields(types []reflect.Type, key string) (of []reflect.Type) {
	for _, t := range types {
		if !isStruct(t) {
			continue
		}
		for _, f := range reflect.VisibleFields(t) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name == key && key != "" && key != "-" {
				of = append(of, f.Type)
			}
		}
	}
	return of
}

// Check returns an error for JSON of which package encoding/json would silently replace text by U+FFFD: bytes that are
// not UTF-8, and a \u escape of half a surrogate pair. It does not check the syntax.
func Check(data []byte) error {
	if !utf8.Valid(data) {
		for at := 0; ; {
			if r, n := utf8.DecodeRune(data[at:]); r == utf8.RuneError && n == 1 {
				return fmt.Errorf("byte %d: not UTF-8", at)
			} else {
				at += n
			}
		}
	}
	if at := LoneSurrogate(data); at >= 0 {
		return fmt.Errorf("byte %d: %s: half a surrogate pair; it stands for no character", at, data[at:at+6])
	}
	return nil
}

// LoneSurrogate returns where the first \u escape of half a surrogate pair is that stands without its other half, of
// six bytes; -1 if there is none.
func LoneSurrogate(data []byte) int {
	for at := 0; ; {
		i := bytes.IndexByte(data[at:], '\\')
		if i < 0 {
			return -1
		}
		at += i
		switch unit := codeUnit(data[at:]); {
		case unit >= 0xd800 && unit < 0xdc00:
			if low := codeUnit(data[at+6:]); low < 0xdc00 || low >= 0xe000 {
				return at
			}
			at += 12
		case unit >= 0xdc00 && unit < 0xe000:
			return at
		default:
			at += min(2, len(data)-at)
		}
	}
}

// codeUnit returns the number in an escape of four hexadecimal digits at the start of data, such as \u00e9; -1 if
// there is none.
func codeUnit(data []byte) (unit int) {
	if len(data) < 6 || data[0] != '\\' || data[1] != 'u' {
		return -1
	}
	for _, c := range data[2:6] {
		switch {
		case c >= '0' && c <= '9':
			unit = unit<<4 | int(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			unit = unit<<4 | int(c|0x20-'a'+10)
		default:
			return -1
		}
	}
	return unit
}
