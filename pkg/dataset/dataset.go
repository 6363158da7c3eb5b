// Package dataset reads files of prompts as other projects write them, and chooses
// from them. It is pure: bytes in, records out. Read returns a Dataset of Records, Choose
// applies a Choice (filters, order, batches, shards) to them, and a Template rewrites
// their prompts.
//
// It reads:
//
//   - text, a prompt a line (Flow-GRPO's dataset/*/train.txt);
//   - CSV with a header;
//   - JSON objects, one a line or as elements of one array: prompts of this project, records
//     with metadata beside the prompt (Flow-GRPO's geneval files), and records in which the
//     prompt is a list of messages (verl's OCR set). Each record may be of another kind.
//
// The Index of a record is always its position in the file, so that what is derived from
// it does not depend on filters, order or shards. A fault is a RecordError: the field, the
// value that was found and the rule.
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
	JSON     Format = "json"     // JSON objects; the kind of each is detected
	Meander  Format = "meander"  // JSON objects that are prompts of this project, unchanged
	Metadata Format = "metadata" // JSON objects of a prompt and metadata, as in geneval
	Verl     Format = "verl"     // JSON objects with messages, as in verl's OCR set
)

// Formats lists the values of Options.Format.
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
	// Index is its position in the file, from 0. Bad records count too, empty lines do not. Line is where it
	// begins, from 1.
	Index, Line int
	// Epoch is the number of the pass over the records that it belongs to, from 0 (Choice.Batches).
	Epoch int
	// Fields are the fields of a prompt event: prompt, negative_prompt, uid, seed, metadata, and any other field
	// that a prompt of this project sets.
	Fields map[string]any
	// Messages is the whole conversation, if the record has one with a system message; the prompt is its last
	// message. Models of images get the prompt alone, language models all messages.
	Messages []any
	// GroundTruth is the text that images are compared with; empty: the record has none.
	GroundTruth string
	// Spares are records that may replace this one (Choice.Spares).
	Spares []Record
}

// Prompt returns the text of the prompt and whether there is one. A record may have a prompt that is no text; then
// the reader of the event refuses it.
func (r *Record) Prompt() (string, bool) {
	s, ok := r.Fields["prompt"].(string)
	return s, ok
}

// RecordError says what is wrong with a record.
type RecordError struct {
	// File and Line are where the record begins.
	File string
	Line int
	// Field is the column or the path in the object; empty for the record as a whole.
	Field string
	// Value is what was found, shortened; empty if nothing was. Rule is what it must be.
	Value, Rule string
}

// Error returns "FILE line N: FIELD: VALUE; RULE", without the parts that are empty, for the author
// of the file.
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

// fault returns a RecordError without file and line. accept adds them.
func fault(field string, value any, rule string) *RecordError {
	return &RecordError{Field: field, Value: display(value), Rule: rule}
}

// display formats a value that breaks a rule for an error: short, on one line. A value that is
// missing is "".
func display(v any) string {
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

// missing stands for no value in a fault; a bare text is shown without quotes.
type (
	missing struct{}
	bare    string
)

// Options of Read.
type Options struct {
	// Format; empty is Auto.
	Format Format
	// Fields are the names of the fields of a prompt event. In objects of this project's form
	// other names are metadata.
	Fields []string
	// Misspelt returns the field that was probably meant by a name that is none; "" accepts the name as metadata. A
	// record with a misspelt name is bad; in a CSV header it is an error of the file. nil: no name is misspelt.
	Misspelt func(name string) string
	// Prepare is called with each record before it is accepted, and may change it. An error makes the record a bad
	// one; a *RecordError gets the file and line.
	Prepare func(*Record) error
	// SkipBad leaves bad records out and lists them; else the first one is an error.
	SkipBad bool
}

// Dataset is the content of a file.
type Dataset struct {
	// Format is the format that the file was read in: Text, CSV or a kind of JSON.
	Format  Format
	Records []Record
	// Total counts all records of the file, bad ones included.
	Total int
	// Bad are the faults of the records that were left out, in the order of the file.
	Bad []*RecordError
}

// Read reads a whole file of prompts. name decides the format and appears in errors. Errors: an unknown format, a
// file that is not of the format, a limit, and a bad record (*RecordError) unless Options.SkipBad.
func Read(r io.Reader, name string, o Options) (*Dataset, error) {
	if o.Format == "" {
		o.Format = Auto
	}
	if !slices.Contains(Formats(), o.Format) {
		return nil, fmt.Errorf("format: %q; must be one of %s", o.Format, joinFormats(Formats()))
	}
	in := bufio.NewReaderSize(&bounded{r: r, left: MaxFileBytes}, 64<<10)
	head, err := in.Peek(3)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if bytes.Equal(head, []byte("\xef\xbb\xbf")) { // a byte order mark is not part of a prompt
		_, _ = in.Discard(3)
	}
	start, err := firstCharacters(in)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	format, err := detectFormat(name, start, o.Format)
	if err != nil {
		return nil, err
	}
	d := &reader{in: in, name: name, options: o, set: &Dataset{Format: format}}
	switch {
	case format == Text:
		err = d.readText()
	case format == CSV:
		err = d.readCSV()
	case strings.HasPrefix(start, "["):
		err = d.readArray()
	default:
		err = d.readLines(d.parseObject)
	}
	if err != nil {
		return nil, err
	}
	return d.set, nil
}

// detectFormat returns the format of a file: the one that was asked for, else by the extension,
// else by start, its first characters. Parquet is an error that says how to convert it.
func detectFormat(name, start string, asked Format) (Format, error) {
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

// quote quotes a file name for a shell, if it needs that, for commands in messages.
func quote(s string) string {
	plain := func(r rune) bool {
		return strings.ContainsRune("/._-+", r) || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z'
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// firstCharacters returns the first four bytes that are not white space, without consuming them,
// for detectFormat; fewer if the file or the buffer has no more. The error is that of reading.
func firstCharacters(in *bufio.Reader) (string, error) {
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

// bounded is a reader that fails after MaxFileBytes.
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

// reader holds the state of one call of Read.
type reader struct {
	in      *bufio.Reader
	name    string
	options Options
	set     *Dataset
}

// addRecord adds the record r that begins at line to the set. If err, the reader's, or
// Options.Prepare refuses it, addRecord returns that as an error, or notes it and goes on with
// SkipBad. Too many records are an error, too.
func (d *reader) addRecord(line int, r *Record, err error) error {
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

// joinFormats joins formats for messages.
func joinFormats(list []Format) string {
	out := make([]string, len(list))
	for i, f := range list {
		out[i] = string(f)
	}
	return strings.Join(out, ", ")
}
