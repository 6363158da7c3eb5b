package schemas

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"unicode/utf8"
)

// CheckFields returns all faults of a struct, joined: violations of the tags of its fields (see
// Field) and of the rules across fields, in the struct and in those nested in it. v is a pointer
// to the struct.
func CheckFields(v any) error { return checkFields(v, nil) }

// checkFields is CheckFields without the nested struct of type checked, which passed before; nil: all are checked.
func checkFields(v any, checked reflect.Type) error {
	f := collectors.Get().(*faults)
	defer collectors.Put(f)
	f.errs, f.count, f.checked = nil, 0, checked
	f.checkFields(reflect.ValueOf(v).Elem())
	return f.joined()
}

// collectors are made for one event after another: most have no fault.
var collectors = sync.Pool{New: func() any { return &faults{} }}

// ruled is a struct with rules across its fields, beyond those in the tags.
type ruled interface{ checkRules(f *faults) }

// checkFields checks each field of a struct by its tags, then the rules across them.
func (f *faults) checkFields(v reflect.Value) {
	fields := Fields(v.Type())
	for i := range fields {
		f.checkField(&fields[i], fields[i].In(v))
	}
	if e, ok := v.Addr().Interface().(ruled); ok {
		e.checkRules(f)
	}
}

// checkField checks the value of one field. Optional values that are absent or empty pass.
func (f *faults) checkField(c *Field, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			f.checkValue(c, v.Elem(), -1)
		}
	case reflect.Slice:
		f.checkList(c, v)
	case reflect.Map:
		if c.Size != nil {
			f.checkLength(c.Name, v.Len(), int(c.Size.Low), int(c.Size.High))
		}
	case reflect.String:
		if v.Len() > 0 || !c.Optional && !c.Empty {
			f.checkValue(c, v, -1)
		}
	default:
		f.checkValue(c, v, -1)
	}
}

// checkValue checks a value that is present; i is its index in a list, or negative.
func (f *faults) checkValue(c *Field, v reflect.Value, i int) {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() != f.checked {
			f.inItem(c.Name, i).checkFields(v)
		}
	case reflect.String:
		if t, ok := v.Interface().(Truth); ok && !t.isText() {
			if err := t.check(); err != nil {
				f.addToRoot(f.fullPath(c.Name) + ": " + err.Error())
			}
			return
		}
		f.checkText(c, v.String(), i)
	case reflect.Int, reflect.Int64:
		if c.Name == "v" {
			f.checkVersion(v.Int())
		}
		f.checkNumber(c, v, float64(v.Int()), i)
	case reflect.Uint64:
		f.checkNumber(c, v, float64(v.Uint()), i)
	case reflect.Float32, reflect.Float64:
		f.checkNumber(c, v, v.Float(), i)
	}
}

// checkList checks the number of items, then the items. Of numbers and texts that break a rule it
// reports only the first: the others are most likely wrong in the same way.
func (f *faults) checkList(c *Field, v reflect.Value) {
	if v.Type() == metadataType {
		f.checkMetadata(Metadata(v.Bytes()))
		return
	}
	elem := v.Type().Elem().Kind()
	switch {
	case v.IsNil() && (c.Optional || c.Absent != ""):
		return
	case elem == reflect.Uint8 && c.Size != nil && !c.Size.Contains(float64(v.Len())):
		f.add(c.Name, strconv.Itoa(v.Len())+" bytes", c.Size.Rule())
		return
	case elem == reflect.Uint8, c.Size != nil && !f.checkLength(c.Name, v.Len(), int(c.Size.Low), int(c.Size.High)):
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
		before := f.countFaults()
		f.checkValue(c, item, i)
		if item.Kind() != reflect.Struct && f.countFaults() > before {
			return
		}
	}
	if c.Unique {
		f.requireUnique(c, v)
	}
}

// itemName returns the name of the field, or of its item i unless i is negative.
func (c *Field) itemName(i int) string {
	if i < 0 {
		return c.Name
	}
	return c.Name + "[" + strconv.Itoa(i) + "]"
}

// requireUnique reports the first item that is equal to one before it.
func (f *faults) requireUnique(c *Field, v reflect.Value) {
	if isAscending(v) {
		return
	}
	seen := make(map[any]bool, v.Len())
	for i := range v.Len() {
		key := v.Index(i).Interface()
		if seen[key] {
			f.add(c.itemName(i), formatLiteral(v.Index(i)), "must come at most once")
			return
		}
		seen[key] = true
	}
}

// isAscending reports whether each text or integer of a list is above the one before it, which is the
// usual case and needs no map to check uniqueness.
func isAscending(v reflect.Value) bool {
	for i := 1; i < v.Len(); i++ {
		a, b := v.Index(i-1), v.Index(i)
		if b.Kind() == reflect.String && b.String() <= a.String() || b.Kind() == reflect.Int64 && b.Int() <= a.Int() {
			return false
		}
	}
	return true
}

// checkNumber checks that x, the value of v, is in the range; without one it must be finite.
func (f *faults) checkNumber(c *Field, v reflect.Value, x float64, i int) {
	switch {
	case c.Range != nil && !c.Range.Contains(x):
		f.add(c.itemName(i), formatLiteral(v), c.Range.Rule())
	case math.IsNaN(x) && c.Range != nil && c.Range.Null: // a number that is not there
	case math.IsNaN(x) || math.IsInf(x, 0):
		f.add(c.itemName(i), formatLiteral(v), "must be finite")
	}
}

// formatLiteral formats a number or a text for an error.
func formatLiteral(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Int, reflect.Int64:
		return fmt.Sprint(v.Interface()) // a duration with its unit
	case reflect.Uint64:
		return strconv.FormatUint(v.Uint(), 10)
	case reflect.Float32:
		return formatFloat32(float32(v.Float()))
	case reflect.Float64:
		return formatFloat(v.Float())
	}
	return quote(v.String())
}

// checkText checks a text, item i of a list unless i is negative. The size tag of a list is not about its texts.
func (f *faults) checkText(c *Field, s string, i int) {
	sized := c.Size != nil && i < 0
	switch {
	case c.Enum != nil:
		if !slices.Contains(c.Enum, s) {
			f.checkEnum(c.itemName(i), s, c.Enum)
		}
	case c.Form == FormToken && sized:
		f.checkShortToken(c.itemName(i), s, int(c.Size.High))
	case c.Form == FormToken:
		if !legalToken(s) {
			f.checkToken(c.itemName(i), s)
		}
	case c.Form == FormSHA256, c.Form == FormDigest:
		if !isDigest(s, c.Form) {
			f.refuseDigest(c.itemName(i), s, c.Form)
		}
	case c.Form == FormPath:
		if !isPath(s) {
			f.add(c.itemName(i), quote(s), "must be a relative path of at most "+strconv.Itoa(MaxPath)+
				" bytes, with slashes and without . or ..")
		}
	case c.Form == FormRewardName:
		if !isRewardName(s) {
			f.checkRewardName(c.itemName(i), s)
		}
	case sized && len(s) < int(c.Size.Low):
		f.requireText(c.Name, s)
	case sized && len(s) > int(c.Size.High):
		f.add(c.Name, strconv.Itoa(len(s))+" bytes", "must be at most "+formatBound(c.Size.High))
	case !utf8.ValidString(s):
		f.add(c.itemName(i), quote(s), "must be UTF-8")
	}
}

// SetDefaults sets every absent field of a struct that has a default, also in structs nested in
// it; a struct behind an absent pointer stays absent. e is a pointer to the struct. Nested structs
// behind pointers are copied before they change, as they may be shared.
func SetDefaults(e any) { setDefaults(reflect.ValueOf(e).Elem()) }

// setDefaults is SetDefaults for the value of a struct.
func setDefaults(v reflect.Value) {
	for _, f := range Fields(v.Type()) {
		field := f.In(v)
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

// Fill sets fields of the struct to from other structs that have a field with the same key and type, or a pointer to
// that type. The first of them in which the field is set counts. All arguments are pointers. Intake uses it to take
// each setting of a sample from the prompt, or else from the policy of the lane.
func Fill(to any, from ...any) {
	v := reflect.ValueOf(to).Elem()
	for _, f := range Fields(v.Type()) {
		for _, source := range from {
			given, ok := fieldValue(reflect.ValueOf(source).Elem(), f)
			if ok {
				f.In(v).Set(given)
				break
			}
		}
	}
}

// fieldValue returns the value that a struct has for a field of another struct; false if it has no such field, or the
// field is not set.
func fieldValue(v reflect.Value, of Field) (reflect.Value, bool) {
	f, ok := fieldNamed(v.Type(), of.Name)
	if !ok || !f.isSet(f.In(v)) {
		return reflect.Value{}, false
	}
	given := f.In(v)
	if given.Kind() == reflect.Pointer && given.Type() != of.Type {
		given = given.Elem()
	}
	return given, given.Type() == of.Type
}
