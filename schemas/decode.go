package schemas

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"reflect"
	"strconv"
	"strings"
	"sync"
)

// FieldError is a value that its field cannot hold.
type FieldError struct {
	Path  string // the field in wire names, e.g. "latents[0].tensor.shape"
	Fault string // what came and what the field holds
}

func (e *FieldError) Error() string { return e.Path + ": " + e.Fault }

// prefixPath puts a field name or index in front of the path of a FieldError; other errors stay as they are.
func prefixPath(level string, err error) error {
	var fe *FieldError
	if !errors.As(err, &fe) {
		return err
	}
	if fe.Path != "" && !strings.HasPrefix(fe.Path, "[") {
		level += "."
	}
	fe.Path = level + fe.Path
	return fe
}

// decode decodes an event into the struct that e points to, see Decode.
func decode(data []byte, e Event) error {
	v := reflect.ValueOf(e)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return errors.New("must be a pointer to an event")
	}
	v.Elem().SetZero()
	_, err := decodeInto(data, v.Elem())
	return err
}

// decodeInto decodes an event in either encoding into the zero struct v, and returns the keys that it does not have.
func decodeInto(data []byte, v reflect.Value) ([]unknownKey, error) {
	r := &reader{data: data}
	err := r.readEvent(v)
	return r.unknown, err
}

// readEvent checks the structure of the bytes, in either encoding, and decodes them into v. After an error v is zero.
func (r *reader) readEvent(v reflect.Value) (err error) {
	if IsJSON(r.data) {
		if r.data, err = fromJSON(r.data, v.Type()); err != nil {
			return err
		}
	}
	if err := precheck(&walker{data: r.data, seen: r.seen}); err != nil {
		return err
	}
	if err := planOf(v.Type())(r, v); err != nil {
		v.SetZero()
		return err
	}
	if e, ok := v.Addr().Interface().(interface{ noteUnknown(keys []string) }); ok {
		e.noteUnknown(unknownTexts(r.unknown))
	}
	return nil
}

// plan decodes the next value into one of its type. The general msgpack decoder turns strings into
// bytes, wraps integers around and takes null for anything; the plan does not.
type plan func(r *reader, v reflect.Value) error

var plans sync.Map // reflect.Type -> plan

// planOf returns the plan of a type, which it makes once.
func planOf(t reflect.Type) plan {
	if p, ok := plans.Load(t); ok {
		return p.(plan)
	}
	p := newPlan(t)
	plans.Store(t, p)
	return p
}

var (
	metadataType = reflect.TypeFor[Metadata]()
	groupType    = reflect.TypeFor[Group]()
	truthType    = reflect.TypeFor[Truth]()
)

// plainPlans are those of values without parts, by their kinds.
var plainPlans = map[reflect.Kind]plan{
	reflect.Bool: decodeBool, reflect.Int64: decodeInt, reflect.Uint64: decodeUint, reflect.Float32: decodeFloat,
	reflect.Float64: decodeFloat, reflect.String: decodeString, reflect.Map: nullable(decodeTexts),
}

// newPlan makes the plan of a type. It panics for a type that has no form on the wire.
func newPlan(t reflect.Type) plan {
	switch p := plainPlans[t.Kind()]; {
	case t == metadataType:
		return nullable(decodeMetadata)
	case t == truthType:
		return decodeTruth
	case p != nil:
		return p
	case t.Kind() == reflect.Pointer:
		return nullable(pointerPlan(t.Elem()))
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8:
		return nullable(decodeBytes)
	case t.Kind() == reflect.Slice:
		return nullable(slicePlan(planOf(t.Elem())))
	case t == groupType:
		return newStructPlan(t).decodeGroup
	case t.Kind() == reflect.Struct:
		return newStructPlan(t).decode
	}
	panic("schemas: no wire form for " + t.String()) // a struct of this package is wrong
}

// nullable leaves a field as it is, nil or empty, where there is null.
func nullable(p plan) plan {
	return func(r *reader, v reflect.Value) error {
		if r.skipNull() {
			return nil
		}
		return p(r, v)
	}
}

// structPlan decodes a map into the fields of a struct.
type structPlan struct {
	of     reflect.Type
	fields []fieldPlan
	byName map[string]int
	needed uint64 // a bit for each field that must be there
}

type fieldPlan struct {
	Field
	plan plan
}

// newStructPlan makes the plan of a struct from its fields. The field v must not be 0 (decodeVersion).
func newStructPlan(t reflect.Type) *structPlan {
	s := &structPlan{of: t, byName: map[string]int{}}
	for i, f := range Fields(t) {
		s.byName[f.Name] = i
		p := planOf(f.Type)
		if f.Name == "v" {
			p = decodeVersion
		}
		if f.Needed {
			s.needed |= 1 << i
		}
		s.fields = append(s.fields, fieldPlan{f, p})
	}
	return s
}

// decode skips keys that the struct does not have. A needed field that is missing is an error.
func (s *structPlan) decode(r *reader, v reflect.Value) error {
	n, ok := r.readMapLen()
	if !ok {
		return r.typeError("a map")
	}
	missing := s.needed
	expect := 0 // writers keep the order of the fields, so the next one is usually it
	for range n {
		key := r.readText()
		i := expect
		if i >= len(s.fields) || s.fields[i].Name != string(key) {
			var known bool
			if i, known = s.byName[string(key)]; !known {
				r.skipUnknown(string(key), s.of)
				continue
			}
		}
		expect = i + 1
		missing &^= 1 << i
		f := &s.fields[i]
		if f.Optional && r.skipNull() { // left out when empty, so null is taken for absent
			continue
		}
		noted := len(r.unknown)
		err := f.plan(r, f.In(v))
		if r.prefixUnknown(noted, f.Name); err != nil {
			return prefixPath(f.Name, err)
		}
	}
	if missing != 0 {
		return &FieldError{
			Path:  s.fields[bits.TrailingZeros64(missing)].Name,
			Fault: "missing; must be there, if only empty",
		}
	}
	return nil
}

// decodeBool sets a field of type bool. Anything but true and false is an error.
func decodeBool(r *reader, v reflect.Value) error {
	switch r.peekCode() {
	case codeTrue, codeFalse:
		v.SetBool(r.peekCode() == codeTrue)
		r.pos++
		return nil
	}
	return r.typeError("true or false")
}

// decodeInt sets a field of a signed type. Anything but an integer, and one beyond int64, is an error.
func decodeInt(r *reader, v reflect.Value) error {
	n, negative, ok := r.readInteger()
	switch {
	case !ok:
		return r.typeError("an integer")
	case !negative && n > math.MaxInt64:
		return &FieldError{Fault: strconv.FormatUint(n, 10) + "; must be at most 9223372036854775807"}
	}
	v.SetInt(int64(n))
	return nil
}

// decodeVersion sets the version of an event. A 0 is an error: it is for events in memory, which have none
// until they are encoded.
func decodeVersion(r *reader, v reflect.Value) error {
	if err := decodeInt(r, v); err != nil {
		return err
	}
	if v.Int() == 0 {
		return &FieldError{Fault: "0; must be " + strconv.Itoa(Version)}
	}
	return nil
}

// decodeUint sets a field of an unsigned type. Anything but an integer, and a negative one, is an
// error.
func decodeUint(r *reader, v reflect.Value) error {
	n, negative, ok := r.readInteger()
	switch {
	case !ok:
		return r.typeError("an integer")
	case negative:
		return &FieldError{Fault: strconv.FormatInt(int64(n), 10) + "; must not be negative"}
	}
	v.SetUint(n)
	return nil
}

// decodeFloat sets a field of type float32 or float64; integers count as numbers. A number that does not
// fit is an error.
func decodeFloat(r *reader, v reflect.Value) error {
	f, ok := r.readFloat()
	if !ok {
		return r.typeError("a number")
	}
	if v.Kind() == reflect.Float32 && !math.IsInf(f, 0) && math.IsInf(float64(float32(f)), 0) {
		return &FieldError{Fault: fmt.Sprintf("%v; must fit 32 bits", f)}
	}
	v.SetFloat(f)
	return nil
}

// decodeString sets a field of type string. Anything but a text is an error. Texts that recur share their
// memory.
func decodeString(r *reader, v reflect.Value) error {
	if !r.isText() {
		return r.typeError("a string")
	}
	v.SetString(r.seen.cachedText(r.readText()))
	return nil
}

// decodeBytes sets a field of bytes, which then are part of the message. Anything else is an error.
func decodeBytes(r *reader, v reflect.Value) error {
	b, ok := r.readBytes()
	if !ok {
		return r.typeError("bytes")
	}
	v.SetBytes(b)
	return nil
}

// pointerPlan returns the plan of a field that may be absent: a value of type t.
func pointerPlan(t reflect.Type) plan {
	of := planOf(t)
	return func(r *reader, v reflect.Value) error {
		elem := reflect.New(t)
		if err := of(r, elem.Elem()); err != nil {
			return err
		}
		v.Set(elem)
		return nil
	}
}

// slicePlan returns the plan of a field that is a list. An error names the index of its element.
func slicePlan(elem plan) plan {
	return func(r *reader, v reflect.Value) error {
		n, ok := r.readListLen()
		if !ok {
			return r.typeError("a list")
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			noted := len(r.unknown)
			err := elem(r, v.Index(i))
			if err == nil && len(r.unknown) == noted {
				continue
			}
			level := "[" + strconv.Itoa(i) + "]"
			if r.prefixUnknown(noted, level); err != nil {
				return prefixPath(level, err)
			}
		}
		return nil
	}
}

// decodeTexts sets a field that is a map of texts. A value that is no text is an error that names its key.
func decodeTexts(r *reader, v reflect.Value) error {
	n, ok := r.readMapLen()
	if !ok {
		return r.typeError("a map")
	}
	m := make(map[string]string, n)
	for range n {
		key := string(r.readText())
		if !r.isText() {
			return prefixPath(key, r.typeError("a string"))
		}
		m[key] = string(r.readText())
	}
	v.Set(reflect.ValueOf(m))
	return nil
}

// decodeGroup sets a field that is a Group, or copies the one that was decoded from the same bytes before (see
// GroupDecoder): the steps of one group repeat it.
func (s *structPlan) decodeGroup(r *reader, v reflect.Value) error {
	start := r.pos
	if g := r.seen.cachedGroup(r.data[start:]); g != nil {
		r.pos += len(g.raw)
		r.seen.last = g
		v.Set(reflect.ValueOf(g.group).Elem())
		return nil
	}
	if err := s.decode(r, v); err != nil {
		return err
	}
	r.seen.keepGroup(r.data[start:r.pos], v)
	return nil
}

// decodeMetadata copies: metadata outlives the message it came with.
func decodeMetadata(r *reader, v reflect.Value) error {
	start := r.pos
	if _, ok := r.readMapLen(); !ok {
		return r.typeError("a map")
	}
	r.pos = start
	r.skipValue()
	m := Metadata(append([]byte(nil), r.data[start:r.pos]...))
	if err := m.Validate(); err != nil {
		return &FieldError{Fault: err.Error()}
	}
	v.SetBytes(m)
	return nil
}

// reader reads values from bytes that Precheck accepted, so it need not check lengths again. Its methods report false,
// and read nothing, if the next value has another type.
type reader struct {
	data    []byte
	pos     int
	seen    *seen        // nil: nothing is shared
	unknown []unknownKey // the keys that were skipped, at most maxFaults
}

func (r *reader) peekCode() byte { return r.data[r.pos] }

// skipNull steps over a null and reports whether it was one.
func (r *reader) skipNull() bool {
	if r.peekCode() != codeNil {
		return false
	}
	r.pos++
	return true
}

// skipValue steps over a value.
func (r *reader) skipValue() {
	w := walker{data: r.data, pos: r.pos, budget: MaxElements}
	w.walkValue(MaxDepth)
	r.pos = w.pos
}

// readBigEndian reads a big-endian number of size bytes after the code, and steps over both.
func (r *reader) readBigEndian(size int) uint64 {
	b := r.data[r.pos+1 : r.pos+1+size]
	r.pos += 1 + size
	switch size {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	}
	return binary.BigEndian.Uint64(b)
}

// readInteger returns the two's complement bits of an integer, and whether it is negative.
func (r *reader) readInteger() (n uint64, negative, ok bool) {
	c := r.peekCode()
	switch {
	case c < codeFixMap:
		r.pos++
		return uint64(c), false, true
	case c >= codeNegFix:
		r.pos++
		return uint64(int64(int8(c))), true, true
	case c >= codeUint8 && c <= codeUint64:
		return r.readBigEndian(1 << (c - codeUint8)), false, true
	}
	var i int64
	switch c {
	case codeInt8:
		i = int64(int8(r.readBigEndian(1)))
	case codeInt16:
		i = int64(int16(r.readBigEndian(2)))
	case codeInt32:
		i = int64(int32(r.readBigEndian(4)))
	case codeInt64:
		i = int64(r.readBigEndian(8))
	default:
		return 0, false, false
	}
	return uint64(i), i < 0, true
}

// readFloat reads a number; integers are accepted too.
func (r *reader) readFloat() (float64, bool) {
	switch r.peekCode() {
	case codeFloat32:
		return float64(math.Float32frombits(uint32(r.readBigEndian(4)))), true
	case codeFloat64:
		return math.Float64frombits(r.readBigEndian(8)), true
	}
	n, negative, ok := r.readInteger()
	if negative {
		return float64(int64(n)), ok
	}
	return float64(n), ok
}

func (r *reader) isText() bool {
	c := r.peekCode()
	return c&0xe0 == codeFixStr || c >= codeStr8 && c <= codeStr32
}

// readText reads a string; the caller knows that the next value is one. The bytes alias the message.
func (r *reader) readText() []byte {
	c := r.peekCode()
	if c&0xe0 == codeFixStr {
		r.pos++
		return r.takeBytes(int(c & 0x1f))
	}
	return r.takeBytes(int(r.readBigEndian(1 << (c - codeStr8))))
}

// readBytes reads a byte string, which aliases the message.
func (r *reader) readBytes() ([]byte, bool) {
	c := r.peekCode()
	if c < codeBin8 || c > codeBin32 {
		return nil, false
	}
	return r.takeBytes(int(r.readBigEndian(1 << (c - codeBin8)))), true
}

// takeBytes returns the next n bytes without spare capacity, so that appending to them cannot write into the message.
func (r *reader) takeBytes(n int) []byte {
	b := r.data[r.pos : r.pos+n : r.pos+n]
	r.pos += n
	return b
}

// readListLen steps over the header of a list and returns its length.
func (r *reader) readListLen() (int, bool) { return r.readLen(codeFixArray, codeArray16) }

// readMapLen steps over the header of a map and returns its number of keys.
func (r *reader) readMapLen() (int, bool) { return r.readLen(codeFixMap, codeMap16) }

// readLen reads a length that is in the code short, or follows the code long or the one after it.
func (r *reader) readLen(short, long byte) (int, bool) {
	switch c := r.peekCode(); {
	case c&0xf0 == short:
		r.pos++
		return int(c & 0x0f), true
	case c == long || c == long+1:
		return int(r.readBigEndian(2 << (c - long))), true
	}
	return 0, false
}

// typeError returns the error of a value that has the wrong type: what came, and what must be there.
func (r *reader) typeError(want string) error {
	came := "null"
	switch c := r.peekCode(); {
	case c == codeTrue || c == codeFalse:
		came = strconv.FormatBool(c == codeTrue)
	case c == codeFloat32 || c == codeFloat64:
		f, _ := r.readFloat()
		came = "the float " + strconv.FormatFloat(f, 'g', -1, 64)
	case c >= codeBin8 && c <= codeBin32:
		came = "bytes"
	case r.isText():
		came = quote(string(r.readText()))
	case c&0xf0 == codeFixArray || c == codeArray16 || c == codeArray32:
		came = "a list"
	case c&0xf0 == codeFixMap || c == codeMap16 || c == codeMap32:
		came = "a map"
	case c != codeNil:
		n, negative, _ := r.readInteger()
		came = strconv.FormatUint(n, 10)
		if negative {
			came = strconv.FormatInt(int64(n), 10)
		}
	}
	return &FieldError{Fault: came + "; must be " + want}
}

// quote returns s in Go syntax, cut after 64 bytes, as errors travel in dead letters.
func quote(s string) string {
	const limit = 64
	if len(s) <= limit {
		return strconv.Quote(s)
	}
	return strconv.Quote(legalText(s, limit)) + "..."
}
