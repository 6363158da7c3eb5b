package dataset

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// array reads the elements of one JSON array.
func (d *reader) array() error {
	in := &windowed{r: d.in}
	places := &places{r: in, line: 1}
	dec := json.NewDecoder(places)
	broken := func(err error) error {
		offset := dec.InputOffset()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err, offset = io.ErrUnexpectedEOF, places.offset
		}
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			offset = max(offset, syntax.Offset)
		}
		return d.at(places.at(offset), fmt.Errorf("not JSON: %w", err))
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
		r, err := d.element(element)
		if err := d.take(line, r, err); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return broken(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return d.at(places.at(dec.InputOffset()), errors.New("more after the end of the array"))
	}
	return nil
}

func (d *reader) element(text []byte) (*Record, error) {
	if len(text) > MaxRecordBytes {
		return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
	}
	if err := checkText("", string(text)); err != nil {
		return nil, err
	}
	return d.object(text)
}

// object makes a record of one JSON object.
func (d *reader) object(text []byte) (*Record, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	v, err := value(dec, "", 1)
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
	return d.record(fields)
}

// value reads one JSON value. Unlike the library it takes no name twice, and no more
// than the limits. Whole numbers are int64, others float64.
func value(dec *json.Decoder, path string, depth int) (any, error) {
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
			return number(n), nil
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
			v, err := value(dec, fmt.Sprintf("%s[%d]", path, len(list)), depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, end(dec, path)
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
			return nil, fault(short(field), missing{}, "must come once")
		}
		if len(object) == MaxFields {
			return nil, fault(short(path), missing{}, fmt.Sprintf("must have at most %d fields", MaxFields))
		}
		if object[name], err = value(dec, short(field), depth+1); err != nil {
			return nil, err
		}
	}
	return object, end(dec, path)
}

// end takes the delimiter that closes a list or an object.
func end(dec *json.Decoder, path string) error {
	if _, err := dec.Token(); err != nil {
		return fault(path, missing{}, "not JSON: "+err.Error())
	}
	return nil
}

// short keeps the names of a hostile file out of messages.
func short(path string) string {
	if len(path) > 100 {
		return path[:100] + "..."
	}
	return path
}

// number keeps whole numbers whole. One too large for a float64 is infinite: refused as
// such, by name, where the field is known.
func number(n json.Number) any {
	if i, err := n.Int64(); err == nil {
		return i
	}
	f, err := n.Float64()
	if err != nil {
		return math.Copysign(math.Inf(1), f)
	}
	return f
}

// places turns offsets into line numbers. It holds the line ends between the offset
// last asked for and what was read ahead.
type places struct {
	r      io.Reader
	offset int64
	ends   []int64
	line   int
}

func (p *places) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	for i, c := range b[:n] {
		if c == '\n' {
			p.ends = append(p.ends, p.offset+int64(i))
		}
	}
	p.offset += int64(n)
	return n, err
}

// at returns the line of an offset, which must not be before the one last asked for.
func (p *places) at(offset int64) int {
	i := 0
	for i < len(p.ends) && p.ends[i] < offset {
		i++
	}
	p.ends = p.ends[i:]
	p.line += i
	return p.line
}
