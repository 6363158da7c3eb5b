package dataset

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// table yields the rows of a table as objects of its columns.
type table struct {
	d       *Reader
	columns []string
	row     func() (line int, cells []string, bad, err error)
}

// openTable begins to read a table with a header, whose text is line; an empty file has no rows. A header without the
// column of the prompt is an error of the file.
func (d *Reader) openTable(in *bufio.Reader, line []byte) error {
	comma, said := d.separator(line)
	t := &table{d: d}
	if d.Form = "columns with " + string(comma); comma == '\t' {
		d.Form = "columns with tabs"
		t.row = tabRows(in)
	} else {
		t.row = csvRows(in, comma)
	}
	d.values = t
	at, header, bad, err := t.row()
	if said && bad == nil && err == nil {
		at, header, bad, err = t.row()
	}
	switch {
	case errors.Is(err, io.EOF):
		t.row = func() (int, []string, error, error) { return 0, nil, nil, io.EOF }
		return nil
	case err != nil:
		return fmt.Errorf("read %s: header: %w", d.name, err)
	case bad != nil:
		return d.faultAt(at, bad)
	}
	if t.columns, err = d.parseHeader(header); err != nil {
		return d.faultAt(at, err)
	}
	return nil
}

// separator returns what stands between the cells of a table: of a CSV file the one that gives a column of the prompt,
// else that of the most columns. said: the line does nothing but say it, as Excel has it.
func (d *Reader) separator(header []byte) (comma rune, said bool) {
	if d.Format == TSV {
		return '\t', false
	}
	if text, sep := strings.CutPrefix(strings.Trim(string(header), "\r\""), "sep="); sep && len(text) == 1 {
		return rune(text[0]), true
	}
	best, most := ',', 0
	for _, comma := range ",;\t" {
		in := csv.NewReader(bytes.NewReader(header))
		in.Comma, in.LazyQuotes = comma, true
		cells, err := in.Read()
		if err != nil {
			continue
		}
		n := len(cells)
		if d.promptName(cells) != "" {
			n += MaxRecordBytes
		}
		if n > most {
			best, most = comma, n
		}
	}
	return best, false
}

// csvRows returns the rows of a CSV file.
func csvRows(r io.Reader, comma rune) func() (int, []string, error, error) {
	in := &limitedReader{r: r}
	rows := csv.NewReader(in)
	rows.Comma = comma
	rows.FieldsPerRecord = -1 // checked by table, so that the error has the same form as others
	return func() (int, []string, error, error) {
		in.reset()
		cells, err := rows.Read()
		if syntax, ok := errors.AsType[*csv.ParseError](err); ok {
			return syntax.StartLine, nil, fault("", missing{}, "not CSV: "+syntax.Err.Error()), nil
		}
		if err != nil {
			return 0, nil, nil, err
		}
		line, _ := rows.FieldPos(0)
		return line, cells, nil, nil
	}
}

// tabRows returns the rows of a TSV file, a line each. A line whose quotes are those of CSV is read as such, else its
// quotes are text.
func tabRows(in *bufio.Reader) func() (int, []string, error, error) {
	source := &lines{in: in, parse: func(line []byte) (any, error) { return string(line), nil }, keepSpace: true}
	return func() (int, []string, error, error) {
		line, v, bad, err := source.next()
		if bad != nil || err != nil {
			return line, nil, bad, err
		}
		text := strings.TrimSuffix(v.(string), "\r")
		if strings.Contains(text, `"`) {
			rows := csv.NewReader(strings.NewReader(text))
			rows.Comma = '\t'
			if cells, err := rows.Read(); err == nil {
				return line, cells, nil, nil
			}
		}
		return line, strings.Split(text, "\t"), nil, nil
	}
}

// promptName returns the name that holds the prompt, of those in a record or a header: Options.PromptColumn, however it
// is written if that is prompt; "" if none does.
func (d *Reader) promptName(names []string) string {
	want := d.options.PromptColumn
	if slices.Contains(names, want) || want != promptField {
		if !slices.Contains(names, want) {
			return ""
		}
		return want
	}
	for _, name := range names {
		if strings.EqualFold(strings.TrimSpace(name), want) {
			return name
		}
	}
	return ""
}

// parseHeader returns the names of the columns without space around them. The column of the prompt must be there; a
// name that repeats is an error. A column without a name has no values; in the first one pandas numbers rows.
func (d *Reader) parseHeader(header []string) ([]string, error) {
	if len(header) > MaxFields {
		return nil, fault("header", bare(fmt.Sprintf("%d columns", len(header))),
			fmt.Sprintf("must be at most %d", MaxFields))
	}
	columns := make([]string, len(header))
	for i, name := range header {
		name = strings.TrimSpace(name)
		if err := checkText("header", name); err != nil {
			return nil, err
		}
		switch {
		case strings.Contains(name, "\r"):
			return nil, fault("header", name, "must have lines that end with a line feed, not a carriage return")
		case name != "" && slices.Contains(columns[:i], name):
			return nil, fault("header", name, "must come at most once")
		}
		columns[i] = name
	}
	prompt := d.promptName(columns)
	if prompt == "" && !slices.Contains(columns, "messages") {
		return nil, fault("header", strings.Join(columns, ","),
			"must have a column "+d.options.PromptColumn+"; name the column of the prompts with --prompt-column")
	}
	for _, name := range columns {
		if err := d.checkName(name, bare("a column")); name != prompt && err != nil {
			return nil, err
		}
	}
	return columns, nil
}

// next implements source. A row without a value is a blank line, as Excel writes it.
func (t *table) next() (int, any, error, error) {
	line, cells, bad, err := t.row()
	for len(cells) > 1 && strings.Join(cells, "") == "" {
		line, cells, bad, err = t.row()
	}
	if bad != nil || err != nil {
		return line, nil, bad, err
	}
	object, bad := t.object(cells)
	return line, object, bad, nil
}

// object makes the object of one row. An empty cell is a missing value. A cell of a field that is no text is read as
// JSON. A row of another length is an error.
func (t *table) object(cells []string) (any, error) {
	if len(cells) != len(t.columns) {
		return nil, fault("", bare(fmt.Sprintf("%d cells", len(cells))),
			fmt.Sprintf("must be %d, as the header has", len(t.columns)))
	}
	object := make(map[string]any, len(cells))
	size := 0
	for i, name := range t.columns {
		text := cells[i]
		if t.d.Format == TSV && strings.HasPrefix(text, `"`) && strings.Count(text, `"`) == 1 {
			return nil, fault(name, text, "must have a quote at its end, as at its begin, on the same line; write "+
				"texts of several lines as CSV or JSON lines")
		}
		if size += len(text); size > MaxRecordBytes {
			return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
		}
		if err := checkText(name, text); err != nil {
			return nil, err
		}
		if text == "" {
			continue
		}
		if name == "" {
			if _, err := strconv.ParseInt(text, 10, 64); err != nil || i > 0 {
				return nil, fault(fmt.Sprintf("column %d", i+1), text, "must have a name in the header; only the "+
					"row numbers of pandas may have none")
			}
			t.d.take("", UseNone, "row numbers, as pandas writes them")
			continue
		}
		value, err := t.d.cell(name, text)
		if err != nil {
			return nil, err
		}
		object[name] = value
	}
	return object, nil
}

// cell returns the value of a cell that is not empty, by the kind of the field that its column is.
func (d *Reader) cell(name, text string) (any, error) {
	kind, field := d.options.Fields[name]
	if !field || kind == KindText {
		return text, nil
	}
	trimmed := strings.TrimSpace(text)
	if kind == KindBool { // as Python writes it, too
		trimmed = strings.ToLower(trimmed)
	}
	v, err := ParseJSON([]byte(trimmed))
	switch bad, ok := errors.AsType[*RecordError](err); {
	case ok && kind == KindJSON:
		bad.Field = strings.Trim(name+"."+bad.Field, ".")
		return nil, bad
	case err != nil:
		return text, nil // the check of the field refuses it by name
	}
	return v, nil
}

// limitedReader limits how much is read for one record: a quote that is never closed would otherwise read the rest of
// the file. Call reset before each record.
type limitedReader struct {
	r io.Reader
	n int
}

func (w *limitedReader) reset() { w.n = 0 }

func (w *limitedReader) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	// Buffered readers read ahead, up to twice a record.
	if w.n += n; w.n > 4*MaxRecordBytes {
		return 0, fmt.Errorf("a record of more than %d bytes", MaxRecordBytes)
	}
	return n, err
}

// lines yields what parse makes of each line that is not blank.
type lines struct {
	in    *bufio.Reader
	parse func(line []byte) (any, error)
	// keepSpace leaves white space at the ends, which tabs are.
	keepSpace bool
	n         int
}

// next implements source. A line that is too long or no UTF-8 is a bad value.
func (l *lines) next() (int, any, error, error) {
	for {
		l.n++
		line, err := nextLine(l.in)
		long := errors.Is(err, errLong) || len(line) > MaxRecordBytes
		if err != nil && !errors.Is(err, errLong) {
			return 0, nil, nil, err
		}
		trimmed := bytes.TrimSpace(line)
		if len(trimmed) == 0 && !long {
			continue
		}
		if !l.keepSpace {
			line = trimmed
		}
		if long {
			rule := fmt.Sprintf("must be a line of at most %d bytes", MaxRecordBytes)
			return l.n, nil, fault("", missing{}, rule), nil
		}
		if err := checkText("", string(line)); err != nil {
			return l.n, nil, err, nil
		}
		v, bad := l.parse(line)
		return l.n, v, bad, nil
	}
}

// errLong is the error for a line that is too long and was skipped.
var errLong = errors.New("line too long")

// nextLine returns the next line without its end; it is valid until the next call. A line of more than MaxRecordBytes
// is skipped: errLong, and the next call goes on behind it. io.EOF ends the file.
func nextLine(in *bufio.Reader) ([]byte, error) {
	line, err := in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		long := bytes.Clone(line)
		over := false
		for errors.Is(err, bufio.ErrBufferFull) {
			line, err = in.ReadSlice('\n')
			if over = over || len(long)+len(line) > MaxRecordBytes; !over {
				long = append(long, line...)
			}
		}
		if over {
			if err == nil || errors.Is(err, io.EOF) {
				err = errLong
			}
			return nil, err
		}
		line = long
	}
	if errors.Is(err, io.EOF) && len(line) > 0 {
		err = nil
	}
	return bytes.TrimSuffix(line, []byte("\n")), err
}

// checkText returns an error that names the field for texts that no prompt may have: bytes that are
// not UTF-8, and zero bytes.
func checkText(field, s string) error {
	switch {
	case !utf8.ValidString(s):
		return fault(field, strings.ToValidUTF8(s, "�"), "must be UTF-8")
	case strings.IndexByte(s, 0) >= 0:
		return fault(field, s, "must be without zero bytes")
	}
	return nil
}
