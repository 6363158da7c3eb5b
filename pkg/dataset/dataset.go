// Package dataset reads files of prompts as other projects write them, and chooses from them. It is pure: bytes in,
// records out. Open returns a Reader, whose Records come one by one; Choose applies a Choice (filters, order, batches,
// shards) to them, and a Template rewrites their prompts.
//
// It reads:
//
//   - text, a prompt a line (Flow-GRPO's dataset/*/train.txt);
//   - tables with a header, CSV, TSV and Parquet: a row is the JSON object of its columns;
//   - JSON objects or texts, one a line, one after the other, or as elements of one array: prompts of
//     this project, records with metadata beside the prompt (Flow-GRPO's geneval files), and records
//     in which the prompt is a list of messages (verl's OCR set). Each record may be of another kind.
//
// Every name in a record is a field of a prompt, metadata, without effect for a reason that Columns says, or a fault.
// The Index of a record is always its position in the file, so that what is derived from it does not depend on filters,
// order or shards. A fault is a RecordError: the field, the value that was found and the rule.
package dataset

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
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
	CSV      Format = "csv"      // a header with at least prompt, then a record a line; of Excel with ; for the comma
	TSV      Format = "tsv"      // the same with tabs
	Parquet  Format = "parquet"  // a table with types
	JSON     Format = "json"     // JSON objects or texts; the kind of each is detected
	Meander  Format = "meander"  // JSON objects that are prompts of this project, unchanged
	Metadata Format = "metadata" // JSON objects of a prompt and metadata, as in geneval
	Verl     Format = "verl"     // JSON objects with messages, as in verl's OCR set
)

// Formats lists the values of Options.Format.
func Formats() []Format {
	return []Format{Auto, Text, CSV, TSV, Parquet, JSON, Meander, Metadata, Verl}
}

// Limits on what is read.
const (
	MaxFileBytes   = 16 << 30 // of a file
	MaxRecords     = 1 << 20  // of a file
	MaxRecordBytes = 1 << 20  // of a record, as in the file; images of Parquet do not count
	MaxImageBytes  = 32 << 20 // of an image in Parquet
	MaxFields      = 128      // of a record, and of every object in it
	MaxItems       = 8192     // of a list in a record
	MaxDepth       = 8        // of lists and objects in a record
	MaxBad         = 1000     // bad records that are listed; all are counted
	MaxColumns     = 1000     // names that Columns lists
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
	// GroundTruth is what samples are compared with, any JSON value; nil: the record has none.
	GroundTruth any
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

// Error returns "FILE line N: FIELD: VALUE; RULE", without the parts that are empty, for the author of the file.
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

// display formats a value that breaks a rule for an error: short, on one line. A value that is missing is "".
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
	case []byte:
		return fmt.Sprintf("%d bytes", len(v))
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

// Kind is what a field of a prompt holds. A cell of a table that is no text is read by it.
type Kind int

// The kinds.
const (
	KindText Kind = iota
	KindInteger
	KindNumber
	KindBool
	KindJSON // a list or an object
)

// Options of Open.
type Options struct {
	// Format; empty is Auto.
	Format Format
	// Fields are the fields of a prompt event. In objects of this project's form other names are metadata.
	Fields map[string]Kind
	// PromptColumn is the name that holds the prompt; empty: prompt.
	PromptColumn string
	// Misspelt returns the field that was probably meant by a name that is none; "" accepts the name as metadata. A
	// record with a misspelt name is bad; in the header of a table it is an error of the file. nil: no name is
	// misspelt.
	Misspelt func(name string) string
	// Prepare is called with each record before it is accepted, and may change it. An error makes the record a bad
	// one; a *RecordError gets the file and line.
	Prepare func(*Record) error
	// SkipBad leaves bad records out and lists them; else the first one is an error.
	SkipBad bool
}

// Reader reads a file, record by record.
type Reader struct {
	// Format is that of the file: Text, CSV, TSV, Parquet or a kind of JSON. Form says more about it, for people.
	Format Format
	Form   string
	// Total counts the records that were read, bad ones included, Skipped the bad ones; Bad are the faults of the first
	// MaxBad of these.
	Total, Skipped int
	Bad            []*RecordError

	name    string
	options Options
	values  source
	columns map[Column]int
	meant   map[string]string // what Misspelt said
}

// source yields the values of a file: objects and texts.
type source interface {
	// next returns the next value and the line where it begins. bad is a fault of this value alone; err ends the
	// file, with io.EOF at its end.
	next() (line int, value any, bad, err error)
}

// How a name in records is taken.
const (
	UsePrompt   = "prompt"
	UseField    = "field"
	UseTruth    = "ground truth"
	UseMetadata = "metadata"
	UseNone     = "not used"
)

// Column is a name in records: a column, or the path of a value in an object.
type Column struct {
	Name string `json:"name"`
	// Use is how it is taken, Note says more: the field that is set, or why it has no effect.
	Use  string `json:"use"`
	Note string `json:"note,omitempty"`
}

// ColumnCount is a Column with the number of records that had a value there.
type ColumnCount struct {
	Column
	Records int `json:"records"`
}

// Columns returns the names in the records that were read and how they were taken: prompt, fields, ground truth,
// metadata, then what is not used; each in the order of names.
func (d *Reader) Columns() []ColumnCount {
	out := make([]ColumnCount, 0, len(d.columns))
	for c, n := range d.columns {
		out = append(out, ColumnCount{c, n})
	}
	uses := []string{UsePrompt, UseField, UseTruth, UseMetadata, UseNone}
	slices.SortFunc(out, func(a, b ColumnCount) int {
		return cmp.Or(slices.Index(uses, a.Use)-slices.Index(uses, b.Use), strings.Compare(a.Name, b.Name),
			strings.Compare(a.Note, b.Note))
	})
	return out
}

// take notes how a name of a record was taken.
func (d *Reader) take(name, use, note string) {
	c := Column{name, use, note}
	if n, known := d.columns[c]; known || len(d.columns) < MaxColumns {
		d.columns[c] = n + 1
	}
}

// Open begins to read a file of prompts. name decides the format and appears in errors. Parquet needs an io.ReaderAt
// and io.Seeker. Errors: an unknown format, and a file that is not of the format.
func Open(r io.Reader, name string, o Options) (*Reader, error) {
	o.Format, o.PromptColumn = cmp.Or(o.Format, Auto), cmp.Or(o.PromptColumn, promptField)
	if !slices.Contains(Formats(), o.Format) {
		return nil, fmt.Errorf("format: %q; must be one of %s", o.Format, joinFormats(Formats()))
	}
	d := &Reader{name: name, options: o, columns: map[Column]int{}, meant: map[string]string{}}
	if err := d.open(r); err != nil {
		return nil, err
	}
	return d, nil
}

// Records yields the records of the file, once. An error ends it: a file that is not of its format, a limit, and a bad
// record (*RecordError) unless Options.SkipBad.
func (d *Reader) Records() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for {
			line, value, bad, err := d.values.next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err == nil && d.Total == MaxRecords {
				err = fmt.Errorf("more than %d records", MaxRecords)
			}
			if err != nil {
				if _, placed := errors.AsType[*RecordError](err); !placed {
					err = fmt.Errorf("read %s: %w", d.name, err)
				}
				yield(Record{}, err)
				return
			}
			r, bad := d.accept(line, value, bad)
			d.Total++
			if bad == nil {
				if !yield(*r, nil) {
					return
				}
				continue
			}
			placed := d.faultAt(line, bad)
			if !d.options.SkipBad {
				yield(Record{}, placed)
				return
			}
			if d.Skipped++; d.Skipped <= MaxBad {
				d.Bad = append(d.Bad, placed)
			}
		}
	}
}

// accept makes the record of a value, unless that is bad.
func (d *Reader) accept(line int, value any, bad error) (*Record, error) {
	if bad != nil {
		return nil, bad
	}
	r, err := d.newRecord(value)
	if err != nil {
		return nil, err
	}
	r.Index, r.Line = d.Total, line
	if d.options.Prepare != nil {
		err = d.options.Prepare(r)
	}
	return r, err
}

// faultAt returns an error with file and line.
func (d *Reader) faultAt(line int, err error) *RecordError {
	placed := &RecordError{Rule: err.Error()}
	if known, ok := errors.AsType[*RecordError](err); ok {
		*placed = *known
	}
	placed.File, placed.Line = d.name, line
	return placed
}

// joinFormats joins formats for messages.
func joinFormats(list []Format) string {
	out := make([]string, len(list))
	for i, f := range list {
		out[i] = string(f)
	}
	return strings.Join(out, ", ")
}
