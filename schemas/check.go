package schemas

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
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

// maxFaults bounds what one event's Validate reports.
const maxFaults = MaxWarnings

// faults collects what is wrong with an event. For a nested struct there is a child, which adds to
// its root under a longer path. A path is only built when there is a fault.
type faults struct {
	root   *faults
	parent *faults
	child  *faults // of which there is one at a time
	name   string
	index  int
	errs   []error
	count  int
	// checked is the type of the nested struct, if any, that passed before with the same value.
	checked reflect.Type
}

// inStruct returns the collector of a nested struct. It is valid until the next call of in or item.
func (f *faults) inStruct(name string) *faults { return f.inItem(name, -1) }

// inItem returns the collector of one item of a list, or of a nested struct if index is negative. It is valid until the
// next call of in or item.
func (f *faults) inItem(name string, index int) *faults {
	root := f.root
	if root == nil {
		root = f
	}
	if f.child == nil {
		f.child = &faults{root: root, parent: f}
	}
	f.child.name, f.child.index = name, index
	return f.child
}

// fullPath returns the full path of a field in wire names, such as "group.reward[1].name".
func (f *faults) fullPath(field string) string {
	for p := f; p.parent != nil; p = p.parent {
		level := p.name
		if p.index >= 0 {
			level += "[" + strconv.Itoa(p.index) + "]"
		}
		if field != "" {
			level += "."
		}
		field = level + field
	}
	return field
}

// add adds a fault: the value of a field breaks a rule.
func (f *faults) add(field, value, rule string) {
	f.addToRoot(f.fullPath(field) + ": " + value + "; " + rule)
}

// countFaults returns the number of faults of the event so far.
func (f *faults) countFaults() int {
	if f.root == nil {
		return f.count
	}
	return f.root.count
}

// addToRoot adds a fault to the root. Beyond maxFaults it is only counted.
func (f *faults) addToRoot(text string) {
	root := f.root
	if root == nil {
		root = f
	}
	if root.count++; root.count <= maxFaults {
		root.errs = append(root.errs, errors.New(text))
	}
}

func (f *faults) joined() error {
	if f.count > maxFaults {
		return errors.Join(append(f.errs, fmt.Errorf("and %d more faults", f.count-maxFaults))...)
	}
	return errors.Join(f.errs...)
}

func (f *faults) checkVersion(v int64) {
	if v != 0 && v != Version {
		f.add("v", strconv.FormatInt(v, 10), "must be "+strconv.Itoa(Version))
	}
}

func (f *faults) checkToken(field, s string) { f.checkShortToken(field, s, MaxToken) }

// checkShortToken is checkToken for a token of at most so many characters.
func (f *faults) checkShortToken(field, s string, most int) {
	if !legalToken(s) || len(s) > most {
		f.add(field, quote(s), fmt.Sprintf("must be 1 to %d characters of A-Z a-z 0-9 _ -", most))
	}
}

func legalToken(s string) bool { return s != "" && len(s) <= MaxToken && isToken(s) }

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return true
}

// checkSampleIndex checks that an index is below the size of its group. What the tags refuse already is not reported
// again.
func (f *faults) checkSampleIndex(index, size int64) {
	if size >= 1 && index >= size && index < MaxGroupSize {
		f.checkWithin("sample_index", index, 0, size-1)
	}
}

func (f *faults) checkWithin(field string, n, low, high int64) {
	if n < low || n > high {
		f.add(field, strconv.FormatInt(n, 10), fmt.Sprintf("must be between %d and %d", low, high))
	}
}

func formatFloat(x float64) string { return strconv.FormatFloat(x, 'g', -1, 64) }

func formatFloat32(x float32) string { return strconv.FormatFloat(float64(x), 'g', -1, 32) }

// requireText refuses an empty text.
func (f *faults) requireText(field, s string) {
	if s == "" {
		f.add(field, quote(s), "must not be empty")
	}
}

func (f *faults) checkEnum(field, s string, values []string) {
	if !slices.Contains(values, s) {
		f.add(field, quote(s), "must be one of "+strings.Join(values, ", "))
	}
}

// requireOneOf refuses an empty text where one of values is needed.
func (f *faults) requireOneOf(field, s string, values []string) {
	if s == "" {
		f.checkEnum(field, s, values)
	}
}

// isDigest reports whether a text is a SHA-256 or, where form allows it, a digest by another algorithm.
func isDigest(s, form string) bool {
	return SHA256.isDigest(s) || form == FormDigest && BLAKE3.isDigest(s)
}

// refuseDigest adds the fault of a text that is not a digest of the form.
func (f *faults) refuseDigest(field, s, form string) {
	rule := SHA256.rule()
	if form == FormDigest {
		rule = BLAKE3.rule() + ", or " + rule
	}
	f.add(field, quote(s), "must be "+rule)
}

// requireDigest refuses an empty text where a digest is needed.
func (f *faults) requireDigest(field, s, form string) {
	if s == "" {
		f.refuseDigest(field, s, form)
	}
}

// isPath reports whether s is a path below some folder: relative, clean, and the same on all systems.
func isPath(s string) bool {
	return len(s) <= MaxPath && s != "." && fs.ValidPath(s) &&
		!strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == '\\' })
}

// checkLength checks the number of items of a list, and reports whether it is legal.
func (f *faults) checkLength(field string, n, low, high int) bool {
	switch {
	case n != low && low == high:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d", low))
	case n < low:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at least %d", low))
	case n > high:
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be at most %d", high))
	default:
		return true
	}
	return false
}

// requireLength checks that a list has the length that another field gives; why is for the error.
func (f *faults) requireLength(field string, n, want int, why string) bool {
	if n != want {
		f.add(field, strconv.Itoa(n)+" items", fmt.Sprintf("must be %d, %s", want, why))
	}
	return n == want
}

// checkIndices reports the first index of a list that is not from first to last. Indices below 0 or above
// most are left out, as the check of the tag reports them.
func (f *faults) checkIndices(field string, list []int64, first, last, most int64) {
	for i, n := range list {
		if (n < first || n > last) && n >= 0 && n <= most {
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(n, 10),
				fmt.Sprintf("must be between %d and %d", first, max(last, 0)))
			return
		}
	}
}

func (f *faults) checkAscending(field string, list []int64) {
	for i := 1; i < len(list); i++ {
		if list[i] < list[i-1] { // one that comes twice is named by its tag
			f.add(field+"["+strconv.Itoa(i)+"]", strconv.FormatInt(list[i], 10), "must be above the one before it")
			return
		}
	}
}

// checkSigmas checks that a post-shift schedule [T+1] of legal sigmas falls, to 0 unless its end is open.
func (f *faults) checkSigmas(list []float32, open bool) {
	if len(list) < 2 || len(list) > MaxSteps+1 {
		return // their tag says so
	}
	for i, s := range list {
		last := i == len(list)-1
		field := "sigmas[" + strconv.Itoa(i) + "]"
		switch {
		case !(s >= 0 && s <= MaxSigma):
			return // its tag says so
		case last && s != 0 && !open:
			f.add(field, formatFloat32(s), "must be 0, the end of the schedule")
		case !last && s == 0:
			f.add(field, "0", "must be above 0 and at most 1")
		case i > 0 && !(s < list[i-1]):
			f.add(field, formatFloat32(s), "must be below the one before it")
		default:
			continue
		}
		return
	}
}

// checkPolicySpan checks a span of policy versions.
func (f *faults) checkPolicySpan(oldest, newest int64) {
	if newest < oldest && newest >= 0 {
		f.add("policy_version_max", strconv.FormatInt(newest, 10),
			fmt.Sprintf("must not be below policy_version_min, %d", oldest))
	}
}

func (f *faults) checkMetadata(m Metadata) {
	if err := m.Validate(); err != nil {
		f.addToRoot(f.fullPath("metadata") + ": " + err.Error())
	}
}
