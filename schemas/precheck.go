package schemas

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrMalformed is wrapped by every error of Precheck and by Decode's when the bytes
// are not a msgpack map that an event could be.
var ErrMalformed = errors.New("malformed event")

// msgpack codes, https://github.com/msgpack/msgpack/blob/master/spec.md.
const (
	codeFixMap   = 0x80
	codeFixArray = 0x90
	codeFixStr   = 0xa0
	codeNil      = 0xc0
	codeUnused   = 0xc1
	codeFalse    = 0xc2
	codeTrue     = 0xc3
	codeBin8     = 0xc4
	codeBin16    = 0xc5
	codeBin32    = 0xc6
	codeFloat32  = 0xca
	codeFloat64  = 0xcb
	codeUint8    = 0xcc
	codeUint16   = 0xcd
	codeUint32   = 0xce
	codeUint64   = 0xcf
	codeInt8     = 0xd0
	codeInt16    = 0xd1
	codeInt32    = 0xd2
	codeInt64    = 0xd3
	codeStr8     = 0xd9
	codeStr16    = 0xda
	codeStr32    = 0xdb
	codeArray16  = 0xdc
	codeArray32  = 0xdd
	codeMap16    = 0xde
	codeMap32    = 0xdf
	codeNegFix   = 0xe0
)

// Precheck walks the bytes of an event once, without allocating, and refuses what a
// decoder should never see: anything but one map, bytes after it, a declared length
// beyond the bytes left, more than MaxDepth levels, MaxElements values, MaxListItems
// or MaxMapKeys, extension types, keys that are not strings or come twice in a map,
// and strings that are not UTF-8. A byte string costs the same whatever its length.
func Precheck(data []byte) error { return precheck(&walker{data: data}) }

// precheck is Precheck with the options of a walker: it skips a group that passed before (seen), or collects byte
// strings.
func precheck(w *walker) error {
	if err := w.checkOneMap(MaxEventBytes, MaxDepth); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

// checkOneMap returns an error unless the bytes are exactly one map of at most limit bytes and depth levels.
func (w *walker) checkOneMap(limit, depth int) error {
	data := w.data
	if len(data) == 0 {
		return errors.New("empty; must be a map")
	}
	if len(data) > limit {
		return fmt.Errorf("%d bytes; must be at most %d", len(data), limit)
	}
	switch c := data[0]; {
	case c&0xf0 == codeFixMap, c == codeMap16, c == codeMap32:
	case ' ' < c && c <= '~': // a number of msgpack, which no program sends alone
		return fmt.Errorf("starts with the text %s; must be a map of msgpack, or JSON: {\"name\": value}",
			quote(string(data[:min(len(data), maxUnknownValue)])))
	default:
		return fmt.Errorf("starts with 0x%02x; must be a map", c)
	}
	w.budget, w.top = MaxElements, depth
	if !w.walkValue(depth) {
		return fmt.Errorf("%s at byte %d", w.fault, w.pos)
	}
	if w.pos != len(data) {
		return fmt.Errorf("%d bytes after the map", len(data)-w.pos)
	}
	return nil
}

// walker steps over msgpack values and checks their structure. Its methods return false after setting fault. It holds
// no error value: building one would make it escape to the heap.
type walker struct {
	data   []byte
	pos    int
	budget int
	fault  string
	seen   *seen   // nil: everything is walked
	top    int     // depth of the whole
	bins   *[]span // collects where the byte strings are; nil: not asked for
}

// span is where a byte string is.
type span struct{ start, end int }

func (w *walker) fail(fault string) bool {
	w.fault = fault
	return false
}

// walkValue steps over one value, in which at most depth levels may be nested.
func (w *walker) walkValue(depth int) bool {
	if w.budget--; w.budget < 0 {
		return w.fail("too many values")
	}
	if w.pos >= len(w.data) {
		return w.fail("ends within a value")
	}
	c := w.data[w.pos]
	switch {
	case c < codeFixMap || c >= codeNegFix || c == codeNil || c == codeTrue || c == codeFalse:
		w.pos++
		return true
	case c < codeFixArray:
		w.pos++
		return w.walkMap(int(c&0x0f), depth)
	case c < codeFixStr:
		w.pos++
		return w.walkList(int(c&0x0f), depth)
	case c < codeNil:
		w.pos++
		return w.walkText(int(c & 0x1f))
	}
	switch c {
	case codeUint8, codeInt8:
		return w.skipBytes(2)
	case codeUint16, codeInt16:
		return w.skipBytes(3)
	case codeUint32, codeInt32, codeFloat32:
		return w.skipBytes(5)
	case codeUint64, codeInt64, codeFloat64:
		return w.skipBytes(9)
	case codeBin8, codeBin16, codeBin32:
		n, ok := w.readLength(1 << (c - codeBin8))
		if ok = ok && w.skipBytes(n); ok && w.bins != nil {
			*w.bins = append(*w.bins, span{w.pos - n, w.pos})
		}
		return ok
	case codeStr8, codeStr16, codeStr32:
		n, ok := w.readLength(1 << (c - codeStr8))
		return ok && w.walkText(n)
	case codeArray16, codeArray32:
		n, ok := w.readLength(2 << (c - codeArray16))
		return ok && w.walkList(n, depth)
	case codeMap16, codeMap32:
		n, ok := w.readLength(2 << (c - codeMap16))
		return ok && w.walkMap(n, depth)
	case codeUnused:
		return w.fail("code 0xc1, which is never used")
	}
	return w.fail("extension type")
}

// readLength reads the big-endian length of size bytes behind the code, and steps over both.
func (w *walker) readLength(size int) (int, bool) {
	rest := w.data[w.pos+1:]
	if len(rest) < size {
		return 0, w.fail("ends within a length")
	}
	w.pos += 1 + size
	switch size {
	case 1:
		return int(rest[0]), true
	case 2:
		return int(binary.BigEndian.Uint16(rest)), true
	}
	n := binary.BigEndian.Uint32(rest)
	if uint64(n) > uint64(len(w.data)) {
		return 0, w.fail("length beyond the bytes left")
	}
	return int(n), true
}

// skipBytes steps over n bytes.
func (w *walker) skipBytes(n int) bool {
	if n > len(w.data)-w.pos {
		return w.fail("length beyond the bytes left")
	}
	w.pos += n
	return true
}

// walkText steps over the n bytes of a string, which must be UTF-8.
func (w *walker) walkText(n int) bool {
	if n > len(w.data)-w.pos {
		return w.fail("length beyond the bytes left")
	}
	if !utf8.Valid(w.data[w.pos : w.pos+n]) {
		return w.fail("string that is not UTF-8")
	}
	w.pos += n
	return true
}

// walkList steps over the n items of a list.
func (w *walker) walkList(n, depth int) bool {
	switch {
	case depth == 0:
		return w.fail("nested too deep")
	case n > len(w.data)-w.pos:
		return w.fail("length beyond the bytes left")
	case n > MaxListItems:
		return w.fail("list too long")
	}
	for range n {
		if !w.walkValue(depth - 1) {
			return false
		}
	}
	return true
}

// walkMap steps over a map with n keys.
func (w *walker) walkMap(n, depth int) bool {
	switch {
	case depth == 0:
		return w.fail("nested too deep")
	case n > (len(w.data)-w.pos)/2:
		return w.fail("length beyond the bytes left")
	case n > MaxMapKeys:
		return w.fail("map with too many keys")
	}
	if n <= smallMap {
		var slots [2 * smallMap]keySlot
		return w.walkEntries(n, depth, slots[:])
	}
	return w.walkLargeMap(n, depth)
}

// walkLargeMap is walkMap for more than smallMap keys. It is a function of its own so that only large maps pay for
// clearing a large array on the stack.
func (w *walker) walkLargeMap(n, depth int) bool {
	var slots [2 * MaxMapKeys]keySlot
	return w.walkEntries(n, depth, slots[:])
}

// walkEntries steps over the n keys and values of a map and refuses a key that comes twice. A group that was seen
// before is skipped.
func (w *walker) walkEntries(n, depth int, seen keySet) bool {
	for range n {
		start := w.pos
		key, ok := w.walkKey()
		if !ok {
			return false
		}
		if !seen.add(w.data, w.pos-len(key), w.pos) {
			w.pos = start
			return w.fail("key that came before")
		}
		if w.seen != nil && depth == w.top && string(key) == groupKey {
			if g := w.seen.cachedGroup(w.data[w.pos:]); g != nil {
				w.pos += len(g.raw)
				continue
			}
		}
		if !w.walkValue(depth - 1) {
			return false
		}
	}
	return true
}

// walkKey steps over a map key and returns its text.
func (w *walker) walkKey() ([]byte, bool) {
	if w.pos >= len(w.data) {
		return nil, w.fail("ends within a map")
	}
	start, header := w.pos, 1
	switch c := w.data[w.pos]; {
	case c&0xe0 == codeFixStr:
	case c >= codeStr8 && c <= codeStr32:
		header += 1 << (c - codeStr8)
	default:
		return nil, w.fail("key that is not a string")
	}
	if !w.walkValue(0) {
		return nil, false
	}
	if w.pos-start-header > MaxKeyBytes {
		w.pos = start
		return nil, w.fail("key too long")
	}
	return w.data[start+header : w.pos], true
}

// smallMap is a number of keys that most maps do not exceed.
const smallMap = 32

// keySet is a hash set of the keys of one map, with twice as many slots as keys. A
// slot holds where its key is in the event; an unused slot has end 0.
type keySet []keySlot

type keySlot struct{ start, end uint32 }

// add adds the key data[start:end] and reports whether it is new. The range has no
// length header, as one text has several encodings.
func (s keySet) add(data []byte, start, end int) bool {
	key := data[start:end]
	// The length and the last eight bytes tell nearly all field names apart; keys that
	// collide on purpose cost MaxMapKeys comparisons each.
	tail := uint64(len(key))
	if len(key) >= 8 {
		tail ^= binary.LittleEndian.Uint64(key[len(key)-8:])
	} else {
		for _, b := range key {
			tail = tail<<8 ^ uint64(b)
		}
	}
	const golden = 0x9e3779b97f4a7c15 // 2^64 over the golden ratio, for multiplicative hashing
	mask := uint64(len(s) - 1)        // the length is a power of two
	for i := tail * golden >> 32 & mask; ; i = (i + 1) & mask {
		slot := &s[i]
		if slot.end == 0 {
			slot.start, slot.end = uint32(start), uint32(end)
			return true
		}
		if string(data[slot.start:slot.end]) == string(key) {
			return false
		}
	}
}
