package boot

import (
	"encoding"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// field is one setting: a leaf of a configuration struct.
type field struct {
	path   string // "nats.url": the key in the file
	flag   string // "nats-url"
	env    string // "MEANDER_NATS_URL"
	help   string
	secret bool
	typ    reflect.Type
	// index leads to the struct fields that hold the setting. There is more than one
	// when two structs put side by side (squash) both have the key: they share its
	// value, and the first one's default and help count.
	index [][]int
}

// fieldsOf lists the settings of the struct type t in declaration order. The fields of an embedded struct without a
// key are settings of t. An error is a mistake in the struct: see AddFlags.
func fieldsOf(t reflect.Type, envPrefix string) ([]*field, error) {
	w := fieldCollector{byPath: map[string]*field{}, byName: map[string]string{}}
	if t.Kind() != reflect.Struct {
		return nil, fmt.Errorf("config type %v; must be a struct", t)
	}
	if err := w.walk(t, settingPath{env: envPrefix}); err != nil {
		return nil, err
	}
	return w.fields, nil
}

// settingPath is where the walk stands: the key and the variable so far, and the way to the struct field.
type settingPath struct {
	path, env string
	index     []int
}

// fieldCollector collects the settings of a configuration struct.
type fieldCollector struct {
	fields []*field
	byPath map[string]*field
	byName map[string]string // flags and variables taken -> path
}

// walk adds the settings of the struct type t, and of the structs in it; at is where t is in the whole configuration.
// A squashed struct has the keys of the struct around it. It fails for a field without a key, or of a type that no
// text can set.
func (w *fieldCollector) walk(t reflect.Type, at settingPath) error {
	for sf := range t.Fields() {
		if !sf.IsExported() {
			continue
		}
		key, options, _ := strings.Cut(sf.Tag.Get("koanf"), ",")
		index := append(append([]int(nil), at.index...), sf.Index...)
		section := sf.Type.Kind() == reflect.Struct && !isText(sf.Type)
		switch {
		case key == "-":
			continue
		case section && (options == "squash" || sf.Anonymous && key == ""):
			if err := w.walk(sf.Type, settingPath{path: at.path, env: at.env, index: index}); err != nil {
				return err
			}
			continue
		case key == "":
			return fmt.Errorf("config field %v.%s has no koanf key", t, sf.Name)
		}
		next := settingPath{path: join(at.path, ".", key), index: index}
		next.env = at.env + strings.ToUpper(key)
		if section {
			next.env += "__"
			if own := sf.Tag.Get("env"); own != "" {
				next.env = own
			}
			if err := w.walk(sf.Type, next); err != nil {
				return err
			}
			continue
		}
		if err := w.addField(sf, next); err != nil {
			return err
		}
	}
	return nil
}

// addField adds one setting. Two fields may share a key if their types are equal; two keys that would have one flag
// or variable are an error, as is a type that no text can set.
func (w *fieldCollector) addField(sf reflect.StructField, at settingPath) error {
	if elem := elemOf(sf.Type); !isText(elem) && !isScalar(elem) {
		return fmt.Errorf("config field %s has type %v, which no text can set", at.path, sf.Type)
	}
	if f, ok := w.byPath[at.path]; ok {
		if f.typ != sf.Type {
			return fmt.Errorf("config field %s is both %v and %v", at.path, f.typ, sf.Type)
		}
		f.index = append(f.index, at.index)
		return nil
	}
	f := &field{
		path: at.path, env: at.env, index: [][]int{at.index}, typ: sf.Type,
		flag: flagOf(at.path),
		help: sf.Tag.Get("help"), secret: sf.Tag.Get("secret") == "true",
	}
	for _, name := range []string{"--" + f.flag, "$" + f.env} {
		if other, ok := w.byName[name]; ok {
			return fmt.Errorf("config fields %s and %s would both be %s", other, f.path, name)
		}
		w.byName[name] = f.path
	}
	w.byPath[f.path] = f
	w.fields = append(w.fields, f)
	return nil
}

// flagOf returns the flag of a key: "nats.url" gives "nats-url".
func flagOf(path string) string { return strings.NewReplacer("_", "-", ".", "-").Replace(path) }

// get reads the setting from the struct v.
func (f *field) get(v reflect.Value) reflect.Value { return v.FieldByIndex(f.index[0]) }

// set writes the setting to every struct that has the key.
func (f *field) set(v, value reflect.Value) {
	for _, index := range f.index {
		v.FieldByIndex(index).Set(value)
	}
}

// list reports whether the setting is a list.
func (f *field) list() bool { return !isText(f.typ) && f.typ.Kind() == reflect.Slice }

// parse turns text, as flags and the environment have it, into a value of the setting's type. Elements of a list are
// separated by commas. The error names the setting and what it must be.
func (f *field) parse(text string) (reflect.Value, error) {
	if !f.list() {
		return f.parseOne(f.typ, text)
	}
	var parts []string
	if text != "" {
		parts = strings.Split(text, ",")
	}
	return f.parseList(parts)
}

// parseList parses the elements of a list, each as a value of the list's element type. The error is of the first bad
// one.
func (f *field) parseList(parts []string) (reflect.Value, error) {
	out := reflect.MakeSlice(f.typ, 0, len(parts))
	for _, p := range parts {
		v, err := f.parseOne(f.typ.Elem(), strings.TrimSpace(p))
		if err != nil {
			return reflect.Value{}, err
		}
		out = reflect.Append(out, v)
	}
	return out, nil
}

// decode turns a value of the YAML file, or one that mergeValue made, into the setting's type. The error names the
// setting, what was given and what it must be.
func (f *field) decode(raw any) (reflect.Value, error) {
	if parts, ok := raw.([]string); ok && f.list() {
		return f.parseList(parts)
	}
	if items, ok := raw.([]any); ok && f.list() {
		parts := make([]string, len(items))
		for i, item := range items {
			s, ok := scalarText(item)
			if !ok {
				return reflect.Value{}, fmt.Errorf("%s: element %d is %s; must be %s", f.path, i, yamlKind(item),
					f.kind())
			}
			parts[i] = s
		}
		return f.parseList(parts)
	}
	s, ok := scalarText(raw)
	if !ok || f.list() {
		return reflect.Value{}, fmt.Errorf("%s: %s; must be %s", f.path, yamlKind(raw), f.kind())
	}
	return f.parse(s)
}

// parseOne parses a value of type t. The error names the key, the text and what it must be.
func (f *field) parseOne(t reflect.Type, text string) (reflect.Value, error) {
	v := reflect.New(t).Elem()
	bad := fmt.Errorf("%s: %q; must be %s", f.path, text, kindOf(t))
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if err := u.UnmarshalText([]byte(text)); err != nil {
			return v, fmt.Errorf("%s: %w", f.path, err)
		}
		return v, nil
	}
	if t == reflect.TypeFor[time.Duration]() {
		d, err := time.ParseDuration(text)
		if err != nil {
			return v, bad
		}
		v.SetInt(int64(d))
		return v, nil
	}
	switch t.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return v, bad
		}
		v.SetBool(b)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		n, err := strconv.ParseInt(text, 10, t.Bits())
		if err != nil {
			return v, bad
		}
		v.SetInt(n)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		n, err := strconv.ParseUint(text, 10, t.Bits())
		if err != nil {
			return v, bad
		}
		v.SetUint(n)
	default:
		x, err := strconv.ParseFloat(text, t.Bits())
		if err != nil || x-x != 0 { // x-x is 0 for every finite x
			return v, bad
		}
		v.SetFloat(x)
	}
	return v, nil
}

// kind says in words which values the setting allows.
func (f *field) kind() string {
	if f.list() {
		return "a list, each " + kindOf(f.typ.Elem())
	}
	return kindOf(f.typ)
}

// kindOf says in words which values a type allows, for errors.
func kindOf(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[time.Duration]():
		return `a duration with its unit, such as "30s"`
	case t == reflect.TypeFor[Bytes]():
		return `a size with its unit, such as "64MiB"`
	case t == reflect.TypeFor[Age]():
		return `a duration with its unit, such as "14d", or "forever"`
	}
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return fmt.Sprintf("an integer of %d bits", t.Bits())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return fmt.Sprintf("a non-negative integer of %d bits", t.Bits())
	case reflect.Float32, reflect.Float64:
		return "a finite number"
	default:
		return "a text"
	}
}

// typeName is the word for the values after the flag in --help.
func (f *field) typeName() string {
	if f.list() {
		return typeName(f.typ.Elem()) + "s"
	}
	return typeName(f.typ)
}

// typeName is the word for a type after its flag in --help.
func typeName(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return "duration"
	case reflect.TypeFor[Bytes]():
		return "size"
	case reflect.TypeFor[Age]():
		return "age"
	}
	switch t.Kind() {
	case reflect.Bool:
		return "bool"
	case reflect.Float32, reflect.Float64:
		return "float"
	case reflect.String:
		return "string"
	default:
		return "int"
	}
}

// mergeValue returns a value in the form in which koanf merges the sources: a string, or a []string for a list.
func (f *field) mergeValue(v reflect.Value) any {
	if !f.list() {
		return valueText(v)
	}
	parts := make([]string, v.Len())
	for i := range parts {
		parts[i] = valueText(v.Index(i))
	}
	return parts
}

// text prints a value so that parse reads the same value back.
func (f *field) text(v reflect.Value) string {
	if parts, ok := f.mergeValue(v).([]string); ok {
		return strings.Join(parts, ",")
	}
	return valueText(v)
}

// valueText prints a value so that parse reads the same value again. Print and mergeValue use it.
func valueText(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case encoding.TextMarshaler:
		b, err := x.MarshalText()
		if err != nil {
			return ""
		}
		return string(b)
	case time.Duration:
		return x.String()
	default:
		return fmt.Sprint(x)
	}
}

// elemOf returns the type of a list's elements; the type itself if it is not a list.
func elemOf(t reflect.Type) reflect.Type {
	if !isText(t) && t.Kind() == reflect.Slice {
		return t.Elem()
	}
	return t
}

// isText reports whether a type reads its values from text by itself (encoding.TextUnmarshaler).
func isText(t reflect.Type) bool {
	return reflect.PointerTo(t).Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

// isScalar reports whether a type is a text, a boolean or a number.
func isScalar(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Float32, reflect.Float64,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return true
	default:
		return false
	}
}

// scalarText returns the text of a scalar of the YAML file, as parse reads it; false for maps, lists and null.
func scalarText(raw any) (string, bool) {
	switch x := raw.(type) {
	case string:
		return x, true
	case bool, int, int64, uint64, float64:
		return fmt.Sprint(x), true
	default:
		return "", false
	}
}

// yamlKind says what a YAML value is, for errors.
func yamlKind(raw any) string {
	switch raw.(type) {
	case nil:
		return "null"
	case []any:
		return "a list"
	case map[string]any:
		return "a section"
	case string:
		return "a text"
	default:
		return fmt.Sprint(raw)
	}
}

// join joins a and b by sep; an empty a is left out.
func join(a, sep, b string) string {
	if a == "" {
		return b
	}
	return a + sep + b
}
