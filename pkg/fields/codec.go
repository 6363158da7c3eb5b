package fields

import (
	"encoding"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// Codec reads the text of a flag whose field is not a single number or word.
type Codec struct {
	// Kind is the word for the value in the help, Hint ends the help.
	Kind, Hint string
	// Parse returns the field's value on the wire. Its error says only what is wrong: the
	// flag's name and text are put before it.
	Parse func(text string) (any, error)
	// Text is the inverse of Parse; nil: the standard one.
	Text func(value any) string
}

// codecOf returns the standard codec of a field's type: numbers, words, switches, durations, what reads itself from
// text, and lists of them; false if there is none, then New needs one of its caller.
func codecOf(f schemas.Field) (Codec, bool) {
	t := f.Type
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if _, ok := reflect.New(t).Interface().(encoding.TextUnmarshaler); ok {
		return textCodec(t), true
	}
	switch t.Kind() {
	case reflect.Int, reflect.Int64:
		if t == reflect.TypeFor[time.Duration]() {
			return Codec{Kind: "duration", Parse: parseDuration}, true
		}
		return Codec{Kind: "int", Parse: parseInteger}, true
	case reflect.Float64:
		return Codec{Kind: "float", Parse: parseNumber}, true
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
			if f.Enum == nil && f.Form == "" { // free texts: a comma may be in one
				return Codec{
					Kind: "stringArray", Hint: "may be given more than once, each one text with its commas",
					Parse: func(s string) (any, error) { return []string{s}, nil },
				}, true
			}
			return Codec{Kind: "strings", Parse: parseWords}, true
		case reflect.Int64:
			return Codec{Kind: "indices", Hint: "e.g. 2,3 or 0-4, or none", Parse: Indices}, true
		case reflect.Float64:
			return Codec{Kind: "floats", Hint: "e.g. 1,0.75,0.5,0.25", Parse: parseFloats}, true
		}
	}
	return Codec{}, false
}

// textCodec is the codec of a type that reads itself from text. Its method Type, as pflag.Value has it, names it.
func textCodec(t reflect.Type) Codec {
	c := Codec{Kind: "int", Parse: func(s string) (any, error) {
		v := reflect.New(t)
		err := v.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s))
		return v.Elem().Interface(), err
	}}
	if named, ok := reflect.Zero(t).Interface().(interface{ Type() string }); ok {
		c.Kind = named.Type()
	}
	return c
}

func parseInteger(s string) (any, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 0, 64)
	if err != nil {
		return nil, fmt.Errorf("%q; must be an integer", s)
	}
	return n, nil
}

func parseNumber(s string) (any, error) {
	x, err := strconv.ParseFloat(strings.TrimSpace(s), 64)
	if err != nil {
		return nil, fmt.Errorf("%q; must be a number", s)
	}
	return x, nil
}

// parseDuration reads a duration. The error of a bare number shows it with units.
func parseDuration(s string) (any, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		number := "30"
		if _, err := strconv.ParseUint(s, 10, 32); err == nil {
			number = s
		}
		return nil, fmt.Errorf("%q; must be a duration with its unit, such as %ss or %sm", s, number, number)
	}
	return d, nil
}

// parseWords reads words with commas between them.
func parseWords(s string) (any, error) {
	if s == "" {
		return []string{}, nil
	}
	words := strings.Split(s, ",")
	for i := range words {
		words[i] = strings.TrimSpace(words[i])
	}
	return words, nil
}

// Indices reads step numbers as "2,3", "0-4" or "none" into []int64. Anything else is an error
// with these forms.
func Indices(s string) (any, error) {
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
		out = append(out, x.(float64))
	}
	return out, nil
}

// textOf prints a value so that its codec reads the same value again.
func textOf(v reflect.Value) string {
	if v.Kind() == reflect.Interface {
		v = v.Elem()
	}
	if _, own := v.Interface().(encoding.TextMarshaler); v.Kind() == reflect.Slice && !own {
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = textOf(v.Index(i))
		}
		return strings.Join(parts, ",")
	}
	return fmt.Sprint(v.Interface())
}
