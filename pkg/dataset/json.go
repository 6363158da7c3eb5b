package dataset

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// jsonStream yields the elements of one JSON array, or JSON values that follow each other over several lines. A syntax
// error ends it, since the next value cannot be found.
type jsonStream struct {
	name   string
	in     *limitedReader
	places *lineCounter
	dec    *json.Decoder
	array  bool
	begun  bool
}

func newJSONStream(name string, r io.Reader, array bool) *jsonStream {
	in := &limitedReader{r: r}
	places := &lineCounter{r: in, line: 1}
	return &jsonStream{name: name, in: in, places: places, dec: json.NewDecoder(places), array: array}
}

// next implements source. A syntax error ends the file, and names the line.
func (s *jsonStream) next() (int, any, error, error) {
	if s.array && !s.begun {
		if _, err := s.dec.Token(); err != nil {
			return 0, nil, nil, s.broken(err)
		}
	}
	s.begun = true
	s.in.reset()
	if !s.dec.More() {
		return 0, nil, nil, s.end()
	}
	var element json.RawMessage
	if err := s.dec.Decode(&element); err != nil {
		return 0, nil, nil, s.broken(err)
	}
	line := s.places.at(s.dec.InputOffset() - int64(len(element)))
	v, bad := parseElement(element)
	return line, v, bad, nil
}

// end returns io.EOF, or the fault of what follows the last value.
func (s *jsonStream) end() error {
	if s.array {
		if _, err := s.dec.Token(); err != nil {
			return s.broken(err)
		}
	}
	if _, err := s.dec.Token(); errors.Is(err, io.EOF) {
		return io.EOF
	} else if !s.array {
		return s.broken(err)
	}
	return s.faultAt(s.dec.InputOffset(), errors.New("more after the end of the array"))
}

// broken returns a syntax error with file and line.
func (s *jsonStream) broken(err error) error {
	offset := s.dec.InputOffset()
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err, offset = io.ErrUnexpectedEOF, s.places.offset
	}
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		offset = max(offset, syntax.Offset)
	}
	return s.faultAt(offset, fmt.Errorf("not JSON: %w", err))
}

func (s *jsonStream) faultAt(offset int64, err error) error {
	return (&Reader{name: s.name}).faultAt(s.places.at(offset), err)
}

// parseElement returns the value of one element of an array, with the checks that lines makes of a
// line: length and UTF-8. Errors name the field.
func parseElement(text []byte) (any, error) {
	if len(text) > MaxRecordBytes {
		return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
	}
	if err := checkText("", string(text)); err != nil {
		return nil, err
	}
	return ParseJSON(text)
}

// ParseJSON returns the value of a text of JSON: a line, an element of an array, a cell, another file of people. Names
// that repeat, and characters and numbers that could not be kept, are errors, which name the field.
func ParseJSON(text []byte) (any, error) {
	if at := strictjson.LoneSurrogate(text); at >= 0 {
		return nil, fault("", string(text[at:at+6]), "must be a whole character: half of a surrogate pair stands alone")
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	v, err := readValue(dec, "", 1)
	if err != nil {
		return nil, err
	}
	if dec.More() {
		return nil, fault("", missing{}, "must be one JSON value, not more")
	}
	return v, nil
}

// readValue reads one JSON value of a record; path names it in errors, depth counts the lists and
// objects around it. Unlike the standard library it refuses names that repeat, and values beyond
// the limits. Whole numbers are int64, others float64.
func readValue(dec *json.Decoder, path string, depth int) (any, error) {
	t, err := dec.Token()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, fault(path, missing{}, "not JSON: "+err.Error())
	}
	delim, nested := t.(json.Delim)
	if !nested {
		if n, ok := t.(json.Number); ok {
			return toNumber(path, n)
		}
		if s, ok := t.(string); ok {
			return s, checkText(path, s)
		}
		return t, nil
	}
	if depth > MaxDepth {
		return nil, fault(path, missing{}, fmt.Sprintf("must have at most %d levels of lists and objects", MaxDepth))
	}
	if delim == '[' {
		list := []any{}
		for dec.More() {
			if len(list) == MaxItems {
				return nil, fault(path, missing{}, fmt.Sprintf("must have at most %d items", MaxItems))
			}
			v, err := readValue(dec, fmt.Sprintf("%s[%d]", path, len(list)), depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, readEnd(dec, path)
	}
	object := map[string]any{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, fault(path, missing{}, "not JSON: "+err.Error())
		}
		name := t.(string) // the decoder takes nothing else for a name
		field := name
		if path != "" {
			field = path + "." + name
		}
		if err := checkText(path, name); err != nil {
			return nil, err
		}
		if _, twice := object[name]; twice {
			return nil, fault(shortPath(field), missing{}, "must come at most once")
		}
		if len(object) == MaxFields {
			return nil, fault(shortPath(path), missing{}, fmt.Sprintf("must have at most %d fields", MaxFields))
		}
		if object[name], err = readValue(dec, shortPath(field), depth+1); err != nil {
			return nil, err
		}
	}
	return object, readEnd(dec, path)
}

// readEnd reads the delimiter that closes a list or an object.
func readEnd(dec *json.Decoder, path string) error {
	if _, err := dec.Token(); err != nil {
		return fault(path, missing{}, "not JSON: "+err.Error())
	}
	return nil
}

// shortPath shortens a path for errors: names in a hostile file may be long.
func shortPath(path string) string {
	if len(path) > 100 {
		return path[:100] + "..."
	}
	return path
}

// toNumber returns an int64 for a whole number, a uint64 for one that is too large, else a float64. What neither holds
// is an error: another number would be stored in its place.
func toNumber(path string, n json.Number) (any, error) {
	if i, err := n.Int64(); err == nil {
		return i, nil
	}
	if u, err := strconv.ParseUint(n.String(), 10, 64); err == nil {
		return u, nil
	}
	f, err := n.Float64()
	if err != nil || f == math.Trunc(f) && math.Abs(f) >= 1<<63 && !bytes.ContainsAny([]byte(n), ".eE") {
		return nil, fault(path, bare(n), "must be a number that 64 bits hold; write it as a text")
	}
	return f, nil
}

// lineCounter turns byte offsets into line numbers. It keeps the line ends between the last offset asked for and the
// end of what was read.
type lineCounter struct {
	r      io.Reader
	offset int64
	ends   []int64
	line   int
}

// Read implements io.Reader: it reads on and notes where lines end.
func (p *lineCounter) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	for i, c := range b[:n] {
		if c == '\n' {
			p.ends = append(p.ends, p.offset+int64(i))
		}
	}
	p.offset += int64(n)
	return n, err
}

// at returns the line of an offset, for errors. Offsets must not go back: line ends before the last one are forgotten.
func (p *lineCounter) at(offset int64) int {
	i := 0
	for i < len(p.ends) && p.ends[i] < offset {
		i++
	}
	p.ends = p.ends[i:]
	p.line += i
	return p.line
}
