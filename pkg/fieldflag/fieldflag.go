// Package fieldflag makes command-line flags from the fields of a struct of the contract. Name, help, default and
// range of a flag are those of its field (see schemas.Field). A Set holds the flags of one struct and the values that
// were given; a Codec reads fields that are more than one number or word.
package fieldflag

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/schemas"
)

// Codec reads the text of a flag whose field is not a single number or word.
type Codec struct {
	// Kind is the word for the value in the help, Hint ends the help.
	Kind, Hint string
	// Parse returns the field's value on the wire. Its error says only what is wrong: the
	// flag's name and text are put before it.
	Parse func(text string) (any, error)
}

// Set is the flags of the fields of one struct, with the values that were given.
type Set struct {
	flags []*flagValue
}

// flagValue is one flag; it implements pflag.Value.
type flagValue struct {
	field schemas.Field
	codec Codec
	list  bool // a repeated flag adds values
	added bool
	text  string
	given any // nil: not set
}

// New makes the flags of a struct. The help comes from a JSON Schema that has the struct at its root, or by its name
// among the definitions. codecs, by wire name, read fields that have no standard form. New panics if a field has a
// flag but nothing reads it: then the struct is wrong.
func New(t reflect.Type, schema []byte, codecs map[string]Codec) *Set {
	s := &Set{}
	described := fieldDescriptions(t, schema)
	for _, f := range schemas.Fields(t) {
		if f.Flag == "" {
			continue
		}
		codec := codecs[f.Name]
		standard, known := codecOf(f)
		switch {
		case codec.Parse == nil && !known:
			panic(fmt.Sprintf("fieldflag: %s.%s: %v; must have a codec", t.Name(), f.GoName, f.Type))
		case codec.Parse == nil:
			codec.Kind, codec.Parse = standard.Kind, standard.Parse
		}
		if codec.Hint == "" {
			codec.Hint = standard.Hint
		}
		v := &flagValue{field: f, codec: codec, text: f.Default, list: f.Type == reflect.TypeFor[[]string]()}
		v.codec.Hint = helpText(f, described[f.Name], codec.Hint)
		s.flags = append(s.flags, v)
	}
	return s
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

// documents caches parsed schemas by their text: a command has flags of many structs of one schema.
var documents sync.Map

// fieldDescriptions returns the descriptions of the fields of t, by wire name, from a JSON Schema
// of the contract, for the help of flags. A schema that does not parse panics: it is the program's
// own.
func fieldDescriptions(t reflect.Type, schema []byte) map[string]string {
	parsed, ok := documents.Load(string(schema))
	if !ok {
		doc := &document{}
		if err := json.Unmarshal(schema, doc); err != nil {
			panic("fieldflag: schema: " + err.Error())
		}
		parsed, _ = documents.LoadOrStore(string(schema), doc)
	}
	doc := parsed.(*document)
	from, ok := doc.Defs[t.Name()]
	if !ok {
		from = doc.object
	}
	out := map[string]string{}
	for name, p := range from.Properties {
		out[name] = p.Description
	}
	return out
}

// helpText returns the help of a flag: the first sentence of its field's description, and what the
// field's tags say of unit, values, range and default. hint, unless empty, shows the form of the
// value.
func helpText(f schemas.Field, description, hint string) string {
	text, _, _ := strings.Cut(f.Phrase(description), ". ")
	text = strings.TrimSuffix(text, ".")
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

// Register adds the flags of the named fields to the flags f of a command; without names, all that
// were not added yet. Commands call it with the groups of their help.
func (s *Set) Register(f *pflag.FlagSet, names ...string) {
	for _, v := range s.flags {
		if v.added || len(names) > 0 && !slices.Contains(names, v.field.Name) {
			continue
		}
		v.added = true
		flag := f.VarPF(v, v.field.Flag, v.field.Letter, v.codec.Hint)
		if v.codec.Kind == "bool" {
			flag.NoOptDefVal = "true"
		}
	}
}

// GivenValues returns the values of the flags that were given, by wire name: as an overlay over a
// prompt. It is empty before f is parsed.
func (s *Set) GivenValues() map[string]any {
	out := map[string]any{}
	for _, v := range s.flags {
		if v.given != nil {
			out[v.field.Name] = v.given
		}
	}
	return out
}

// GivenFlags returns the names of the flags that were given, by prefix and wire name, such as
// "rollout.solver", so that an error about a field can name the flag that set it.
func (s *Set) GivenFlags(prefix string) map[string]string {
	out := map[string]string{}
	for _, v := range s.flags {
		if v.given != nil {
			out[prefix+v.field.Name] = v.field.Flag
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

// All returns the names of all flags, given or not, as Flags does.
func (s *Set) All(prefix string) map[string]string {
	out := map[string]string{}
	for _, v := range s.flags {
		out[prefix+v.field.Name] = v.field.Flag
	}
	return out
}

// Fill sets the fields of a struct, given by its pointer, whose flags were given as a number, a
// word or a list of them. Fields with a form of their own (see Codec) are left out: GivenValues has
// them.
func (s *Set) Fill(e any) {
	to := reflect.ValueOf(e).Elem()
	for _, v := range s.flags {
		if v.given == nil {
			continue
		}
		field, given := v.field.In(to), reflect.ValueOf(v.given)
		switch {
		case given.Type() == field.Type():
			field.Set(given)
		case field.Kind() == reflect.Pointer && given.Type() == field.Type().Elem():
			field.Set(reflect.New(given.Type()))
			field.Elem().Set(given)
		}
	}
}

// Is reports whether a flag belongs to a Set.
func Is(f *pflag.Flag) bool {
	_, ok := f.Value.(*flagValue)
	return ok
}

// Choices returns the legal values of a flag whose field has a list of them; nil for all other flags.
func Choices(f *pflag.Flag) []string {
	if v, ok := f.Value.(*flagValue); ok {
		return v.field.Enum
	}
	return nil
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
	if before, ok := v.given.([]string); ok && v.list {
		text, parsed = v.text+","+text, append(before, parsed.([]string)...)
	}
	v.text, v.given = text, parsed
	return nil
}

// codecOf returns the standard codec of a field's type: numbers, words, switches and lists of them;
// false if there is none, then New needs one of its caller.
func codecOf(f schemas.Field) (Codec, bool) {
	t := f.Type
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Int64:
		return Codec{Kind: "int", Parse: func(s string) (any, error) { return parseInteger(s) }}, true
	case reflect.Float64:
		return Codec{Kind: "float", Parse: func(s string) (any, error) { return parseNumber(s) }}, true
	case reflect.Bool:
		return Codec{Kind: "bool", Parse: func(s string) (any, error) {
			b, err := strconv.ParseBool(s)
			if err != nil {
				return nil, fmt.Errorf("%q; must be true or false", s)
			}
			return b, nil
		}}, true
	case reflect.String:
		return Codec{Kind: "string", Parse: func(s string) (any, error) { return s, nil }}, true
	case reflect.Slice:
		switch t.Elem().Kind() {
		case reflect.String:
			if f.Enum == nil { // free texts: a comma may be in one
				return Codec{
					Kind: "stringArray", Hint: "may be given more than once, each one text with its commas",
					Parse: func(s string) (any, error) { return []string{s}, nil },
				}, true
			}
			return Codec{Kind: "strings", Parse: func(s string) (any, error) {
				return strings.Split(s, ","), nil
			}}, true
		case reflect.Int64:
			return Codec{Kind: "indices", Hint: "e.g. 2,3 or 0-4, or none", Parse: parseIndices}, true
		case reflect.Float64:
			return Codec{Kind: "floats", Hint: "e.g. 1,0.75,0.5,0.25", Parse: parseFloats}, true
		}
	}
	return Codec{}, false
}

func parseInteger(s string) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 0, 64)
	if err != nil {
		return 0, fmt.Errorf("%q; must be an integer", s)
	}
	return n, nil
}

func parseNumber(s string) (float64, error) {
	x, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil {
		return 0, fmt.Errorf("%q; must be a number", s)
	}
	return x, nil
}

// parseIndices reads step numbers as "2,3", "0-4" or "none" into []int64. Anything else is an error
// with these forms.
func parseIndices(s string) (any, error) {
	out := []int64{}
	if s == "none" || s == "" {
		return out, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		part = strings.TrimSpace(part)
		low, high, ranged := part, part, false
		if i := strings.IndexByte(part[min(1, len(part)):], '-'); i >= 0 {
			low, high, ranged = part[:i+1], part[i+2:], true
		}
		a, err1 := strconv.ParseInt(low, 10, 64)
		b, err2 := strconv.ParseInt(high, 10, 64)
		if err1 != nil || err2 != nil || ranged && (b < a || b-a > schemas.MaxSteps) {
			return nil, fmt.Errorf("%q; must be step numbers such as 2,3 or 0-4, or none", s)
		}
		for i := a; i <= b; i++ {
			out = append(out, i)
		}
	}
	return out, nil
}

// parseFloats reads numbers separated by commas into []float64. What is no number is an error that
// names it.
func parseFloats(s string) (any, error) {
	var out []float64
	for part := range strings.SplitSeq(s, ",") {
		x, err := parseNumber(part)
		if err != nil {
			return nil, err
		}
		out = append(out, x)
	}
	return out, nil
}
