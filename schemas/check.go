package schemas

import (
	"math"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"unicode/utf8"
)

// CheckFields joins every fault that the tags of a struct and of those in it tell (see
// Field), and those of the rules across the fields of each. The struct is given by its
// pointer.
func CheckFields(v any) error { return checkFields(v, nil) }

// checkFields is CheckFields but for the nested struct of one type that passed before.
func checkFields(v any, checked reflect.Type) error {
	f := collectors.Get().(*faults)
	defer collectors.Put(f)
	f.errs, f.count, f.checked = nil, 0, checked
	f.fields(reflect.ValueOf(v).Elem())
	return f.err()
}

// collectors are made for one event after another: most have no fault.
var collectors = sync.Pool{New: func() any { return &faults{} }}

// ruled is a struct with rules across its fields, beyond those in the tags.
type ruled interface{ rules(f *faults) }

// fields checks each field of a struct by its tags, then the rules across them.
func (f *faults) fields(v reflect.Value) {
	fields := Fields(v.Type())
	for i := range fields {
		f.field(&fields[i], v.Field(fields[i].Index))
	}
	if e, ok := v.Addr().Interface().(ruled); ok {
		e.rules(f)
	}
}

func (f *faults) field(c *Field, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			f.value(c, v.Elem(), -1)
		}
	case reflect.Slice:
		f.list(c, v)
	case reflect.Map:
		if c.Size != nil {
			f.length(c.Name, v.Len(), int(c.Size.Low), int(c.Size.High))
		}
	case reflect.String:
		if v.Len() > 0 || !c.Optional && !c.Empty {
			f.value(c, v, -1)
		}
	default:
		f.value(c, v, -1)
	}
}

// value checks a value that is there, item i of a list unless i is negative.
func (f *faults) value(c *Field, v reflect.Value, i int) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() != f.checked {
			f.item(c.Name, i).fields(v)
		}
	case reflect.String:
		f.text(c, v.String(), i)
	case reflect.Int64:
		if c.Name == "v" {
			f.version(v.Int())
		}
		f.number(c, v, float64(v.Int()), i)
	case reflect.Uint64:
		f.number(c, v, float64(v.Uint()), i)
	case reflect.Float32, reflect.Float64:
		f.number(c, v, v.Float(), i)
	}
}

// list checks how many items there are, and of the numbers and texts that break a rule
// names the first: the others are most likely wrong alike.
func (f *faults) list(c *Field, v reflect.Value) {
	if v.Type() == metadataType {
		f.metadata(Metadata(v.Bytes()))
		return
	}
	elem := v.Type().Elem().Kind()
	switch {
	case v.IsNil() && (c.Optional || c.Absent != ""):
		return
	case elem == reflect.Uint8 && c.Size != nil && !c.Size.Holds(float64(v.Len())):
		f.add(c.Name, strconv.Itoa(v.Len())+" bytes", c.Size.Rule())
		return
	case elem == reflect.Uint8, c.Size != nil && !f.length(c.Name, v.Len(), int(c.Size.Low), int(c.Size.High)):
		return
	}
	for i := range v.Len() {
		item := v.Index(i)
		if elem == reflect.Pointer {
			if item.IsNil() {
				continue
			}
			item = item.Elem()
		}
		before := f.total()
		f.value(c, item, i)
		if item.Kind() != reflect.Struct && f.total() > before {
			return
		}
	}
	if c.Unique {
		f.unique(c, v)
	}
}

// at is the name of the field, or of item i of it.
func (c *Field) at(i int) string {
	if i < 0 {
		return c.Name
	}
	return c.Name + "[" + strconv.Itoa(i) + "]"
}

// unique names the first item that came before.
func (f *faults) unique(c *Field, v reflect.Value) {
	if ascends(v) {
		return
	}
	seen := make(map[any]bool, v.Len())
	for i := range v.Len() {
		key := v.Index(i).Interface()
		if seen[key] {
			f.add(c.at(i), literal(v.Index(i)), "must come once")
			return
		}
		seen[key] = true
	}
}

// ascends says whether each text or integer of a list is above the one before it, as most
// writers have them.
func ascends(v reflect.Value) bool {
	for i := 1; i < v.Len(); i++ {
		a, b := v.Index(i-1), v.Index(i)
		if b.Kind() == reflect.String && b.String() <= a.String() || b.Kind() == reflect.Int64 && b.Int() <= a.Int() {
			return false
		}
	}
	return true
}

// number checks that x, the value of v, is in the range; without one it must be finite.
func (f *faults) number(c *Field, v reflect.Value, x float64, i int) {
	switch {
	case c.Range != nil && !c.Range.Holds(x):
		f.add(c.at(i), literal(v), c.Range.Rule())
	case math.IsNaN(x) || math.IsInf(x, 0):
		f.add(c.at(i), literal(v), "must be finite")
	}
}

// literal writes a number or a text as messages do.
func literal(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Int64:
		return strconv.FormatInt(v.Int(), 10)
	case reflect.Uint64:
		return strconv.FormatUint(v.Uint(), 10)
	case reflect.Float32:
		return formatFloat32(float32(v.Float()))
	case reflect.Float64:
		return formatFloat(v.Float())
	}
	return quote(v.String())
}

// text checks a text; the size of a list is that of the list, not of its texts.
func (f *faults) text(c *Field, s string, i int) {
	sized := c.Size != nil && i < 0
	switch {
	case c.Enum != nil:
		if !slices.Contains(c.Enum, s) {
			f.enum(c.at(i), s, c.Enum)
		}
	case c.Form == FormToken:
		if !legalToken(s) {
			f.token(c.at(i), s)
		}
	case c.Form == FormDigest:
		if !isDigest(s) {
			f.digest(c.at(i), s)
		}
	case c.Form == FormRewardName:
		if !isRewardName(s) {
			f.rewardName(c.at(i), s)
		}
	case sized && len(s) < int(c.Size.Low):
		f.filled(c.Name, s)
	case sized && len(s) > int(c.Size.High):
		f.add(c.Name, strconv.Itoa(len(s))+" bytes", "must be at most "+bound(c.Size.High))
	case !utf8.ValidString(s):
		f.add(c.at(i), quote(s), "must be UTF-8")
	}
}

// SetDefaults gives every absent field of a struct that has a default it, and so every
// struct in it that is there; those behind an absent pointer stay absent. The struct is
// given by its pointer. What pointers lead to is not changed: it may be shared.
func SetDefaults(e any) { setDefaults(reflect.ValueOf(e).Elem()) }

func setDefaults(v reflect.Value) {
	for _, f := range Fields(v.Type()) {
		field := v.Field(f.Index)
		elem := field.Type()
		pointer := elem.Kind() == reflect.Pointer
		if pointer {
			elem = elem.Elem()
		}
		switch {
		case elem.Kind() == reflect.Struct && pointer && !field.IsNil():
			own := reflect.New(elem)
			own.Elem().Set(field.Elem())
			setDefaults(own.Elem())
			field.Set(own)
		case elem.Kind() == reflect.Struct && !pointer:
			setDefaults(field)
		case f.Default != "" && field.IsZero():
			value, err := f.DefaultValue()
			if err != nil {
				panic("schemas: " + f.Name + ": " + err.Error()) // Fields read it before
			}
			given := reflect.ValueOf(value).Convert(elem)
			if pointer {
				field.Set(reflect.New(elem))
				field = field.Elem()
			}
			field.Set(given)
		}
	}
}
