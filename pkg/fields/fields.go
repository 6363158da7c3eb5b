// Package fields gives a struct whose fields have tags (see schemas.Field) to the command line, the environment, files
// and people. New makes flags of a struct of the contract, whose given values are an overlay over a prompt. Bind makes
// them of the settings of a program, into which flags, variables and a file write. Name, help, default, range and legal
// values stand in the tags alone. A Codec reads fields that are more than one number or word.
package fields

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
)

// Set is the flags of the fields of one struct, with the values that were given.
type Set struct {
	flags  []*flagValue
	at     string // the path of a Part: "rollout."
	prefix string // of variables; empty: there are none
}

// flagValue is one flag; it implements pflag.Value.
type flagValue struct {
	path  string // of the struct that has the field, below that of the Set: "rollout."
	field schemas.Field
	codec Codec
	help  string
	env   string          // the variable of a setting
	to    []reflect.Value // the settings that it sets
	added bool
	text  string
	given any // nil: not set
}

// New makes the flags of a struct, and of the structs in it. The help comes from a JSON Schema that has the struct at
// its root, and those in it by their names among the definitions. codecs, by path such as rollout.sde_window, read
// fields that have no standard form. New panics if a field has a flag but nothing reads it: then the struct is wrong.
func New(t reflect.Type, schema []byte, codecs map[string]Codec) *Set {
	s := &Set{}
	s.addAll("", t, documentOf(t, schema), codecs)
	return s
}

// addAll adds the flags of a struct at a path.
func (s *Set) addAll(path string, t reflect.Type, schema *document, codecs map[string]Codec) {
	for _, f := range schemas.Fields(t) {
		of := f.Type
		if of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		if f.Flag != "" {
			v := newFlag(t, f, codecs[path+f.Name])
			first, _, _ := strings.Cut(f.Phrase(schema.describe(t, f.Name)), ". ")
			v.path, v.text, v.help = path, f.Default, helpText(f, strings.TrimSuffix(first, "."), v.codec.Hint)
			s.flags = append(s.flags, v)
		} else if of.Kind() == reflect.Struct {
			s.addAll(path+f.Name+".", of, schema, codecs)
		}
	}
}

// Part returns the flags of the fields of one struct in that of New, by its path such as scheduled_sampling.ramp; "":
// of the outermost.
func (s *Set) Part(path string) *Set {
	if path != "" {
		path += "."
	}
	other := func(v *flagValue) bool { return v.path != path }
	return &Set{at: path, flags: slices.DeleteFunc(slices.Clone(s.flags), other)}
}

// Bind makes the flags of the settings of a program in a struct, given by its pointer. What is given is written to the
// struct, whose values are the defaults. Of several fields with one key the first one's help and default count, and
// all of its range get the value; one with another range is another setting, and keeps what it has. prefix begins the
// variables, such as MEANDER_INTAKE_; empty: there are none. Bind panics if the struct is wrong.
func Bind(prefix string, settings any) *Set {
	s := &Set{prefix: prefix}
	in := reflect.ValueOf(settings).Elem()
	for _, f := range schemas.Fields(in.Type()) {
		value := f.In(in)
		if v := s.named(f.Name); v != nil {
			if r := v.field.Range; r == nil || f.Range == nil || *r == *f.Range {
				v.to = append(v.to, value)
			}
			continue
		}
		v := newFlag(in.Type(), f, Codec{})
		v.to, v.text, v.help = []reflect.Value{value}, textOf(value), helpText(f, f.Help, "")
		if f.Secret == "true" && v.text != "" {
			v.text = secretMask
		}
		if v.env = f.Env; prefix != "" && v.env == "" {
			v.env = prefix + strings.ToUpper(strings.ReplaceAll(f.Name, ".", "__"))
		}
		if v.env != "" {
			v.help += " [$" + v.env + "]"
		}
		s.flags = append(s.flags, v)
	}
	return s
}

// newFlag returns the flag of a field, with its own codec where the standard one is not enough.
func newFlag(t reflect.Type, f schemas.Field, own Codec) *flagValue {
	standard, known := codecOf(f)
	switch {
	case f.Flag == "" || own.Parse == nil && !known:
		panic(fmt.Sprintf("fields: %s.%s: %v; must have a name, and a codec", t.Name(), f.GoName, f.Type))
	case own.Parse == nil:
		own.Kind, own.Parse = standard.Kind, standard.Parse
	}
	if own.Hint == "" {
		own.Hint = standard.Hint
	}
	return &flagValue{field: f, codec: own}
}

// named returns the flag of a field; nil: there is none.
func (s *Set) named(field string) *flagValue {
	for _, v := range s.flags {
		if v.field.Name == field {
			return v
		}
	}
	return nil
}

// object is the part of a JSON Schema object that this package reads.
type object struct {
	Properties map[string]struct {
		Description string `json:"description"`
	} `json:"properties"`
}

// document is a JSON Schema: the object at its root, and its definitions by name.
type document struct {
	object
	Defs map[string]object `json:"$defs"`
}

// documents has the parsed schema of each struct.
var documents sync.Map

// documentOf parses the JSON Schema of a struct, once. One that does not parse panics: it is the program's own.
func documentOf(t reflect.Type, schema []byte) *document {
	parsed, ok := documents.Load(t)
	if !ok {
		doc := &document{}
		if err := json.Unmarshal(schema, doc); err != nil {
			panic("fields: schema: " + err.Error())
		}
		parsed, _ = documents.LoadOrStore(t, doc)
	}
	return parsed.(*document)
}

// describe returns the description of a field of t, by its wire name.
func (d *document) describe(t reflect.Type, field string) string {
	from, ok := d.Defs[t.Name()]
	if !ok {
		from = d.object
	}
	return from.Properties[field].Description
}

// helpText returns the help of a flag: a text, and what the field's tags say of unit, values, range and default. hint,
// unless empty, shows the form of the value.
func helpText(f schemas.Field, text, hint string) string {
	if f.Unit != "" && hint == "" {
		text += ", in " + f.Unit
	}
	if f.Enum != nil {
		text += ": " + strings.Join(f.Enum, ", ")
	}
	if r := f.Range; r != nil && !math.IsInf(r.Low, 0) && !math.IsInf(r.High, 0) && f.Type.Kind() != reflect.Slice {
		text += "; " + strings.TrimPrefix(r.Rule(), "must be ")
	}
	if hint != "" {
		text += "; " + hint
	}
	if f.Absent != "" {
		text += "; default " + f.Absent
	}
	return text
}

// Register adds the flags of the named fields to the flags f of a command, in the order of the names; without names,
// all that were not added yet. Commands call it with the groups of their help. It panics for a field that has no flag.
func (s *Set) Register(f *pflag.FlagSet, names ...string) {
	add := s.flags
	if len(names) > 0 {
		add = nil
		for _, name := range names {
			v := s.named(name)
			if v == nil {
				panic("fields: no field " + name)
			}
			add = append(add, v)
		}
	}
	for _, v := range add {
		if !v.added {
			v.register(f, v.field.Flag)
		}
	}
}

// As adds the flag of a field under another name.
func (s *Set) As(f *pflag.FlagSet, field, flag string) { s.named(field).register(f, flag) }

// register adds the flag under a name. It panics if there is such a flag.
func (v *flagValue) register(f *pflag.FlagSet, name string) {
	v.added = true
	flag := f.VarPF(v, name, v.field.Letter, v.help)
	if v.codec.Kind == "bool" {
		flag.NoOptDefVal = "true"
	}
	if len(v.to) > 0 && v.to[0].IsZero() {
		flag.DefValue = "" // the help says what it means
	}
}

// GivenValues returns the values of the flags that were given, by wire name, those of structs in maps of their own: as
// an overlay over a prompt. It is empty before f is parsed. Of a Part the values are those of its struct.
func (s *Set) GivenValues() map[string]any {
	out := map[string]any{}
	for _, v := range s.flags {
		if v.given == nil {
			continue
		}
		in := out
		for name := range strings.SplitSeq(strings.TrimPrefix(v.path, s.at), ".") {
			if name == "" {
				break
			}
			if in[name] == nil {
				in[name] = map[string]any{}
			}
			in = in[name].(map[string]any)
		}
		in[v.field.Name] = v.given
	}
	return out
}

// Given reports whether a setting was given: by a flag, a variable or a file.
func (s *Set) Given(field string) bool { return s.named(field).given != nil }

// Give sets a setting that the program makes up where it was not given.
func (s *Set) Give(field, text string) error { return s.named(field).Set(text) }

// Flags returns the names of the flags, all or those that were given, by the path of the field, such as
// "rollout.solver", so that an error about a field can name its flag.
func (s *Set) Flags(all bool) map[string]string {
	out := map[string]string{}
	for _, v := range s.flags {
		if all || v.given != nil {
			out[v.path+v.field.Name] = v.field.Flag
		}
	}
	return out
}

// NamesOf returns the flags of the fields that values, by wire name, has, in order: "--a, --b".
func (s *Set) NamesOf(values map[string]any) string {
	var names []string
	for _, v := range s.flags {
		if _, ok := values[v.field.Name]; ok {
			names = append(names, "--"+v.field.Flag)
		}
	}
	return strings.Join(names, ", ")
}

// Fill sets the fields of a struct, given by its pointer, whose flags were given as a number, a
// word or a list of them. Fields with a form of their own (see Codec) are left out: GivenValues has
// them.
func (s *Set) Fill(e any) {
	to := reflect.ValueOf(e).Elem()
	for _, v := range s.flags {
		field := v.field.In(to)
		elem := field.Type()
		if elem.Kind() == reflect.Pointer {
			elem = elem.Elem()
		}
		if v.given != nil && reflect.TypeOf(v.given) == elem {
			assign(field, v.given)
		}
	}
}

// assign sets a field to a value that a standard codec has read.
func assign(field reflect.Value, given any) {
	v := reflect.ValueOf(given)
	switch {
	case field.Kind() == reflect.Pointer:
		field.Set(reflect.New(field.Type().Elem()))
		assign(field.Elem(), given)
	case v.Type() != field.Type() && field.Kind() == reflect.Slice:
		field.Set(reflect.MakeSlice(field.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			assign(field.Index(i), v.Index(i).Interface())
		}
	default:
		field.Set(v.Convert(field.Type()))
	}
}

// Choices returns the legal values of a flag whose field has a list of them; nil for all other flags.
func Choices(f *pflag.Flag) []string {
	if v, ok := f.Value.(*flagValue); ok {
		return v.field.Enum
	}
	return nil
}

// Variable returns the variable of a flag whose field has one; "" for all other flags.
func Variable(f *pflag.Flag) string {
	if v, ok := f.Value.(*flagValue); ok {
		return v.env
	}
	return ""
}

// String returns the text that was given, or the default.
func (v *flagValue) String() string { return v.text }

// Type returns the word for the value in the help.
func (v *flagValue) Type() string { return v.codec.Kind }

// Set implements pflag.Value: it reads a text that was given; a list grows when its flag is
// repeated. An error, which pflag prints with the flag's name, says what the text must be.
func (v *flagValue) Set(text string) error {
	parsed, err := v.codec.Parse(text)
	if err != nil {
		return err
	}
	before, isList := v.given.([]string)
	if more, ok := parsed.([]string); ok && isList && v.field.Type.Kind() == reflect.Slice {
		text, parsed = v.text+","+text, append(before, more...)
	}
	v.give(text, parsed)
	return nil
}

// give notes a value that was given, and writes it to the settings.
func (v *flagValue) give(text string, value any) {
	v.text, v.given = text, value
	for _, to := range v.to {
		assign(to, value)
	}
}

// Args returns what the command line says of values, which are by wire name as those of GivenValues: --name and its
// text for each flag that reads the same value again. It takes these out of values, and leaves what no flag says.
func (s *Set) Args(values map[string]any) (args []string) {
	for _, v := range s.flags {
		at := values
		for name := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(v.path, s.at), "."), ".") {
			if name != "" {
				at, _ = at[name].(map[string]any)
			}
		}
		value, there := at[v.field.Name]
		if !there || value == nil {
			continue
		}
		format := v.codec.Text
		if format == nil {
			format = func(value any) string { return textOf(reflect.ValueOf(value)) }
		}
		text := format(value)
		parsed, err := v.codec.Parse(text)
		if err != nil || !sameJSON(parsed, value) {
			continue
		}
		args = append(args, "--"+v.field.Flag+"="+text)
		delete(at, v.field.Name)
	}
	prune(values)
	return args
}

// sameJSON reports whether two values are equal as JSON, where numbers have one type.
func sameJSON(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

// prune removes empty maps of maps.
func prune(values map[string]any) {
	for name, value := range values {
		if inner, ok := value.(map[string]any); ok {
			if prune(inner); len(inner) == 0 {
				delete(values, name)
			}
		}
	}
}
