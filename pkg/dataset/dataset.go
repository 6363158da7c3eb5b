// Package dataset reads files of prompts as other projects write them, and chooses
// from them. It is pure: bytes in, records out.
//
// What it loads as it is:
//
//   - text, a prompt a line (Flow-GRPO's dataset/*/train.txt);
//   - CSV with a header;
//   - JSON objects, one a line or as elements of one array: prompts of this project, records
//     with metadata beside the prompt (Flow-GRPO's geneval files), and records in which the
//     prompt is a list of messages (verl's OCR set). They are told apart one by one.
//
// A record's Index is its place in the file whatever else is chosen, so that what is
// derived from it does not depend on filters, order or shards.
package dataset

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Format of a file, or of the objects in it.
type Format string

// The formats.
const (
	Auto     Format = "auto"     // by the file's extension and its first bytes
	Text     Format = "text"     // a prompt a line, literally
	CSV      Format = "csv"      // a header with at least prompt, then a record a line
	JSON     Format = "json"     // JSON objects, each of the kind that it looks like
	Meander  Format = "meander"  // JSON objects that are prompts of this project, unchanged
	Metadata Format = "metadata" // JSON objects of a prompt and metadata, as in geneval
	Verl     Format = "verl"     // JSON objects with messages, as in verl's OCR set
)

// Formats lists the formats that may be asked for.
func Formats() []Format { return []Format{Auto, Text, CSV, JSON, Meander, Metadata, Verl} }

// Limits on what is read.
const (
	MaxFileBytes   = 256 << 20 // of a file
	MaxRecords     = 1 << 20   // of a file
	MaxRecordBytes = 1 << 20   // of a record, as in the file
	MaxFields      = 128       // of a record, and of every object in it
	MaxItems       = 8192      // of a list in a record
	MaxDepth       = 8         // of lists and objects in a record
)

// Record is one prompt of a file.
type Record struct {
	// Index is its place in the file, from 0; records that cannot be used count too, empty
	// lines do not. Line is where it begins, from 1.
	Index, Line int
	// Epoch is how many passes over the records came before the one that it is of (Choice.Batches).
	Epoch int
	// Fields are those of a prompt event: prompt, negative_prompt, uid, seed, metadata, and
	// whatever else a prompt of this project sets.
	Fields map[string]any
	// Messages is the conversation that the prompt is the last message of, where the record has one with a system message: models of
	// images are given the prompt alone, language models all of it.
	Messages []any
	// GroundTruth is what images are to be compared with; empty: the record has none.
	GroundTruth string
	// Spares are records that may take its place (Choice.Spares).
	Spares []Record
}

// Prompt is the text, and whether there is one: a record may be a prompt of this project
// that its reader has yet to refuse.
func (r *Record) Prompt() (string, bool) {
	s, ok := r.Fields["prompt"].(string)
	return s, ok
}

// RecordError says what is wrong with a record.
type RecordError struct {
	// File and Line are where the record begins.
	File string
	Line int
	// Field is the column or the path in the object; empty when it is the record as a whole.
	Field string
	// Value is what was found, shortened; empty when nothing was. Rule is what is wanted.
	Value, Rule string
}

func (e *RecordError) Error() string {
	var b strings.Builder
	if e.Line > 0 {
		fmt.Fprintf(&b, "%s line %d: ", e.File, e.Line)
	}
	b.WriteString(e.Field)
	if e.Value != "" {
		if e.Field != "" {
			b.WriteString(": ")
		}
		b.WriteString(e.Value)
		b.WriteString("; ")
	} else if e.Field != "" {
		b.WriteString(": ")
	}
	b.WriteString(e.Rule)
	return b.String()
}

// fault is a RecordError that does not know its place yet.
func fault(field string, value any, rule string) *RecordError {
	return &RecordError{Field: field, Value: show(value), Rule: rule}
}

// show is a value for people: short, on one line.
func show(v any) string {
	const most = 60
	var s string
	switch v := v.(type) {
	case nil:
		return "null"
	case missing:
		return ""
	case string:
		if len(v) > most {
			return strconv.Quote(strings.ToValidUTF8(v[:most], "")) + "..."
		}
		return strconv.Quote(v)
	case map[string]any:
		s = fmt.Sprintf("an object of %s", strings.Join(slices.Sorted(maps.Keys(v)), ", "))
	case []any:
		s = fmt.Sprintf("a list of %d", len(v))
	default:
		s = fmt.Sprint(v)
	}
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

// missing stands for no value in a fault, bare for one that is shown as it is.
type (
	missing struct{}
	bare    string
)

// Options of Read.
type Options struct {
	// Format; empty is Auto.
	Format Format
	// Fields are the names that a prompt event has. In objects that are not of another kind,
	// other names are metadata.
	Fields []string
	// Misspelt says which field a name that would be metadata was probably meant for; empty:
	// none, and it is. Such a record is bad, or the whole table. nil: no name is misspelt.
	Misspelt func(name string) string
	// Prepare sees each record before it is taken and may change it; an error makes it a bad
	// one. A *RecordError gets the file and line.
	Prepare func(*Record) error
	// SkipBad leaves bad records out and lists them; else the first one is an error.
	SkipBad bool
}

// Dataset is what a file holds.
type Dataset struct {
	// Format is what the file was read as: Text, CSV or a kind of JSON.
	Format  Format
	Records []Record
	// Total counts the records of the file, those left out included.
	Total int
	// Bad are those left out, in the order of the file.
	Bad []*RecordError
}

// Read reads a whole file of prompts. name is for the format and for errors. Errors: a
// format that is not one, bytes that are not of it, a limit, and a bad record
// (*RecordError) unless those are skipped.
func Read(r io.Reader, name string, o Options) (*Dataset, error) {
	if o.Format == "" {
		o.Format = Auto
	}
	if !slices.Contains(Formats(), o.Format) {
		return nil, fmt.Errorf("format: %q; must be one of %s", o.Format, names(Formats()))
	}
	in := bufio.NewReaderSize(&bounded{r: r, left: MaxFileBytes}, 64<<10)
	head, err := in.Peek(3)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if bytes.Equal(head, []byte("\xef\xbb\xbf")) { // a byte order mark is no part of a prompt
		_, _ = in.Discard(3)
	}
	start, err := look(in)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	format, err := detect(name, start, o.Format)
	if err != nil {
		return nil, err
	}
	d := &reader{in: in, name: name, options: o, set: &Dataset{Format: format}}
	switch {
	case format == Text:
		err = d.text()
	case format == CSV:
		err = d.csv()
	case strings.HasPrefix(start, "["):
		err = d.array()
	default:
		err = d.lines(d.object)
	}
	if err != nil {
		return nil, err
	}
	return d.set, nil
}

// detect settles the format: as asked, else by the extension, else by how the file starts.
func detect(name, start string, asked Format) (Format, error) {
	extension := strings.ToLower(filepath.Ext(name))
	if extension == ".parquet" || start == "PAR1" && asked == Auto && extension != ".txt" {
		to := strings.TrimSuffix(name, filepath.Ext(name)) + ".jsonl"
		return "", fmt.Errorf("read %s: parquet is not read; make JSON lines of it: "+
			`python3 -c 'import sys, pandas; pandas.read_parquet(sys.argv[1]).to_json(sys.argv[2], orient="records", lines=True)' %s %s`, name, quote(name), quote(to))
	}
	if asked != Auto {
		return asked, nil
	}
	switch extension {
	case ".csv":
		return CSV, nil
	case ".json", ".jsonl", ".ndjson":
		return JSON, nil
	}
	if strings.HasPrefix(start, "{") || strings.HasPrefix(start, "[{") {
		return JSON, nil
	}
	return Text, nil
}

// quote makes a word of a shell of a file name.
func quote(s string) string {
	plain := func(r rune) bool {
		return strings.ContainsRune("/._-+", r) || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z'
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// look returns the first four bytes that are no space, without taking them; fewer where
// the buffer holds no more.
func look(in *bufio.Reader) (string, error) {
	for n := 64; ; n = min(2*n, in.Size()) {
		head, err := in.Peek(n)
		start := make([]byte, 0, 4)
		for _, c := range head {
			if !strings.ContainsRune(" \t\r\n", rune(c)) && len(start) < cap(start) {
				start = append(start, c)
			}
		}
		switch {
		case len(start) == cap(start), errors.Is(err, io.EOF), n == in.Size():
			return string(start), nil
		case err != nil:
			return "", err
		}
	}
}

// bounded refuses a file that is too large.
type bounded struct {
	r    io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if b.left -= n; b.left < 0 {
		return 0, fmt.Errorf("more than %d bytes", MaxFileBytes)
	}
	return n, err
}

// reader is one Read.
type reader struct {
	in      *bufio.Reader
	name    string
	options Options
	set     *Dataset
}

// take adds the record that begins at line, or notes why it is none.
func (d *reader) take(line int, r *Record, err error) error {
	index := d.set.Total
	if d.set.Total++; d.set.Total > MaxRecords {
		return fmt.Errorf("read %s: more than %d records", d.name, MaxRecords)
	}
	if err == nil {
		r.Index, r.Line = index, line
		if d.options.Prepare != nil {
			err = d.options.Prepare(r)
		}
	}
	if err == nil {
		d.set.Records = append(d.set.Records, *r)
		return nil
	}
	bad := &RecordError{Rule: err.Error()}
	if known, ok := errors.AsType[*RecordError](err); ok {
		*bad = *known
	}
	bad.File, bad.Line = d.name, line
	if !d.options.SkipBad {
		return bad
	}
	d.set.Bad = append(d.set.Bad, bad)
	return nil
}

// names joins formats for messages.
func names(list []Format) string {
	out := make([]string, len(list))
	for i, f := range list {
		out[i] = string(f)
	}
	return strings.Join(out, ", ")
}
