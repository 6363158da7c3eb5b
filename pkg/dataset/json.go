package dataset

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// readArray reads the elements of one JSON array into d.set. A syntax error ends it even with
// SkipBad, since the next element cannot be found; it names the line.
func (d *reader) readArray() error {
	in := &limitedReader{r: d.in}
	places := &lineCounter{r: in, line: 1}
	dec := json.NewDecoder(places)
	broken := func(err error) error {
		offset := dec.InputOffset()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err, offset = io.ErrUnexpectedEOF, places.offset
		}
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			offset = max(offset, syntax.Offset)
		}
		return d.faultAt(places.at(offset), fmt.Errorf("not JSON: %w", err))
	}
	if _, err := dec.Token(); err != nil {
		return broken(err)
	}
	for dec.More() {
		in.reset()
		var element json.RawMessage
		if err := dec.Decode(&element); err != nil {
			return broken(err)
		}
		line := places.at(dec.InputOffset() - int64(len(element)))
		r, err := d.parseElement(element)
		if err := d.addRecord(line, r, err); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return broken(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return d.faultAt(places.at(dec.InputOffset()), errors.New("more after the end of the array"))
	}
	return nil
}

// parseElement makes a record of one element of an array, with the checks that readLines makes of a
// line: length and UTF-8. Errors name the field.
func (d *reader) parseElement(text []byte) (*Record, error) {
	if len(text) > MaxRecordBytes {
		return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
	}
	if err := checkText("", string(text)); err != nil {
		return nil, err
	}
	return d.parseObject(text)
}

// parseObject makes a record of the text of one JSON object: a line, or an element of an array.
// What is no object, or not one of the format, is an error that names the field.
func (d *reader) parseObject(text []byte) (*Record, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	v, err := readValue(dec, "", 1)
	if err != nil {
		return nil, err
	}
	if dec.More() {
		return nil, fault("", missing{}, "must be one JSON value, not more")
	}
	fields, ok := v.(map[string]any)
	if !ok {
		return nil, fault("", v, "must be a JSON object")
	}
	return d.newRecord(fields)
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
			return toNumber(n), nil
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

// toNumber returns an int64 for a whole number, else a float64. A number beyond float64 becomes
// infinite; the check of the field refuses it by name later.
func toNumber(n json.Number) any {
	if i, err := n.Int64(); err == nil {
		return i
	}
	f, err := n.Float64()
	if err != nil {
		return math.Copysign(math.Inf(1), f)
	}
	return f
}

// lineCounter turns byte offsets into line numbers. It keeps the line ends between the last offset asked for and the
// end
// of what was read.
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

// at returns the line of an offset, for errors. Offsets must not go back: line ends before the last
// one are forgotten.
func (p *lineCounter) at(offset int64) int {
	i := 0
	for i < len(p.ends) && p.ends[i] < offset {
		i++
	}
	p.ends = p.ends[i:]
	p.line += i
	return p.line
}
