package dataset

import (
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/parquet-go/parquet-go"
)

// parquetRows yields the rows of a Parquet file as objects of their columns.
type parquetRows struct {
	d      *Reader
	schema *parquet.Schema
	groups []parquet.RowGroup
	rows   parquet.Rows // of the group that is read; nil: the next one
	buffer []parquet.Row
	have   []parquet.Row
	n      int
}

// openParquet begins to read a Parquet file. It needs access to any place of it.
func (d *Reader) openParquet(r io.Reader) (err error) {
	defer d.damaged(&err)
	file, ok := r.(interface {
		io.ReaderAt
		io.Seeker
	})
	var size int64
	if ok {
		size, err = file.Seek(0, io.SeekEnd)
	}
	if !ok || err != nil {
		return fmt.Errorf("read %s: Parquet is read from its end, so it must be a file, not a pipe", d.name)
	}
	f, err := parquet.OpenFile(file, size, parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return fmt.Errorf("read %s: not Parquet: %w", d.name, err)
	}
	p := &parquetRows{d: d, schema: f.Schema(), groups: f.RowGroups(), buffer: make([]parquet.Row, 64)}
	var names []string
	for _, column := range p.schema.Fields() {
		if slices.Contains(names, column.Name()) {
			return d.faultAt(1, fault("columns", column.Name(), "must come at most once"))
		}
		names = append(names, column.Name())
		if err := checkColumn(column.Name(), column, false); err != nil {
			return d.faultAt(1, err)
		}
	}
	if len(names) > MaxFields {
		return d.faultAt(1, fault("columns", len(names), fmt.Sprintf("must be at most %d", MaxFields)))
	}
	prompt := d.promptName(names)
	if prompt == "" && !slices.Contains(names, "messages") {
		return d.faultAt(1, fault("columns", strings.Join(names, ","),
			"must have a column "+d.options.PromptColumn+"; name the column of the prompts with --prompt-column"))
	}
	d.values, d.Form = p, fmt.Sprintf("%d rows", f.NumRows())
	return nil
}

// checkColumn refuses types of columns that have no form in JSON, and inside of columns those that toJSON converts.
func checkColumn(path string, node parquet.Node, inside bool) error {
	if !node.Leaf() {
		for _, field := range node.Fields() {
			if err := checkColumn(shortPath(path+"."+field.Name()), field, true); err != nil {
				return err
			}
		}
		return nil
	}
	name, _, _ := strings.Cut(node.Type().String(), "(")
	none := []string{"DECIMAL", "INT96", "TIME", "FLOAT16", "FIXED_LEN_BYTE_ARRAY", "UUID", "VARIANT"}
	if slices.Contains(none, name) || inside && toJSON(node, int64(-1)) != any(int64(-1)) {
		return fault(path, bare(node.Type().String()), "must be numbers, texts, times, lists or structs; write the "+
			"column as texts")
	}
	return nil
}

// damaged makes an error of a panic: the library trusts what a file says of itself.
func (d *Reader) damaged(err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("%s is a damaged Parquet file: %v", d.name, r)
	}
}

// next implements source. A row with a value that has no form in JSON, or is too large, is a bad value; a damaged file
// is an error.
func (p *parquetRows) next() (line int, value any, bad, err error) {
	defer p.d.damaged(&err)
	for len(p.have) == 0 {
		if p.rows == nil {
			if len(p.groups) == 0 {
				return 0, nil, nil, io.EOF
			}
			group := p.groups[0]
			if p.groups = p.groups[1:]; group.NumRows() == 0 { // the library cannot seek there
				continue
			}
			p.rows = group.Rows()
		}
		n, err := p.rows.ReadRows(p.buffer)
		p.have = p.buffer[:n]
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, nil, nil, fmt.Errorf("row %d: %w", p.n+1, err)
		}
		if n == 0 {
			if err := p.rows.Close(); err != nil {
				return 0, nil, nil, err
			}
			p.rows = nil
		}
	}
	row := p.have[0]
	p.have = p.have[1:]
	p.n++
	object := map[string]any{}
	if err := p.schema.Reconstruct(&object, row); err != nil {
		return 0, nil, nil, fmt.Errorf("row %d: %w", p.n, err)
	}
	size := 0
	for _, column := range p.schema.Fields() {
		name := column.Name()
		v, bad := fromParquet(name, toJSON(column, object[name]), 2, &size)
		if bad != nil {
			return p.n, nil, bad, nil
		}
		if object[name] = v; v == nil {
			delete(object, name) // a missing value, as an empty cell
		}
		if strings.HasPrefix(name, "__index_level_") { // pandas writes it
			if _, number := v.(int64); number {
				delete(object, name)
				p.d.take(name, UseNone, "row numbers, as pandas writes them")
			}
		}
	}
	return p.n, object, nil, nil
}

// toJSON returns integers that stand for dates, times and unsigned numbers as what they stand for; other values as they
// are.
func toJSON(node parquet.Node, v any) any {
	var n int64
	switch x := v.(type) {
	case int64:
		n = x
	case int32:
		n = int64(x)
	default:
		return v
	}
	kind := node.Type().String()
	switch {
	case kind == "DATE":
		return time.Unix(n*24*60*60, 0).UTC().Format(time.DateOnly)
	case kind == "INT(64,false)":
		return uint64(n)
	case kind == "INT(32,false)":
		return int64(uint32(n))
	case !strings.HasPrefix(kind, "TIMESTAMP"):
		return v
	case strings.Contains(kind, "NANOS"):
		return time.Unix(0, n).UTC().Format(time.RFC3339Nano)
	case strings.Contains(kind, "MICROS"):
		return time.UnixMicro(n).UTC().Format(time.RFC3339Nano)
	}
	return time.UnixMilli(n).UTC().Format(time.RFC3339Nano)
}

// fromParquet returns a value of a Parquet file as JSON has it, with the limits of other formats. size counts the bytes
// of the record.
func fromParquet(path string, v any, depth int, size *int) (_ any, err error) {
	if depth > MaxDepth {
		return nil, fault(path, missing{}, fmt.Sprintf("must have at most %d levels of lists and objects", MaxDepth))
	}
	if *size += 8; *size > MaxRecordBytes {
		return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
	}
	switch v := v.(type) {
	case nil, bool, int64:
		return v, nil
	case int32:
		return int64(v), nil
	case uint32:
		return int64(v), nil
	case uint64:
		if v <= math.MaxInt64 {
			return int64(v), nil
		}
		return v, nil
	case float32:
		return fromParquet(path, float64(v), depth, size)
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fault(path, v, "must be a number; a missing value is null")
		}
		return v, nil
	case time.Time:
		return v.UTC().Format(time.RFC3339Nano), nil
	case string:
		return fromParquet(path, []byte(v), depth, size)
	case []byte:
		if strings.HasSuffix(path, ".bytes") && !utf8.Valid(v) { // of an image, as datasets.Image has it
			if len(v) > MaxImageBytes {
				return nil, fault(path, v, fmt.Sprintf("must be an image of at most %d bytes", MaxImageBytes))
			}
			return v, nil
		}
		if *size += len(v); *size > MaxRecordBytes {
			return nil, fault(path, v, fmt.Sprintf("must be a record of at most %d bytes; leave out columns that no "+
				"reward function needs", MaxRecordBytes))
		}
		if utf8.Valid(v) {
			return string(v), checkText(path, string(v))
		}
		return v, nil
	case []any:
		if len(v) > MaxItems {
			return nil, fault(path, missing{}, fmt.Sprintf("must have at most %d items", MaxItems))
		}
		for i := range v {
			if v[i], err = fromParquet(shortPath(fmt.Sprintf("%s[%d]", path, i)), v[i], depth+1, size); err != nil {
				return nil, err
			}
		}
		return v, nil
	case map[string]any:
		for name, x := range v {
			if v[name], err = fromParquet(shortPath(path+"."+name), x, depth+1, size); err != nil {
				return nil, err
			}
		}
		if len(v) > MaxFields {
			return nil, fault(path, missing{}, fmt.Sprintf("must have at most %d fields", MaxFields))
		}
		return v, nil
	}
	if p := reflect.ValueOf(v); p.Kind() == reflect.Pointer { // what may be missing in a map
		if p.IsNil() {
			return nil, nil
		}
		return fromParquet(path, p.Elem().Interface(), depth, size)
	}
	return nil, fault(path, fmt.Sprintf("%T", v), "must be a number, a text, a time, a list or a struct")
}
