package dataset

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// readCSV reads a table with a header into d.set, row by row. An empty cell is a missing value. A
// header without prompt ends it, as does a bad row, unless Options.SkipBad notes it.
func (d *reader) readCSV() error {
	in := &limitedReader{r: d.in}
	table := csv.NewReader(in)
	table.FieldsPerRecord = -1 // checked here, so that the error has the same form as others
	header, err := table.Read()
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return fmt.Errorf("read %s: header: %w", d.name, err)
	}
	columns, err := parseHeader(header)
	for _, name := range columns {
		if err == nil {
			err = d.checkName(name, bare("a column"))
		}
	}
	if err != nil {
		return d.faultAt(1, err)
	}
	for {
		in.reset()
		cells, err := table.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		var line int
		var r *Record
		switch syntax, ok := errors.AsType[*csv.ParseError](err); {
		case ok:
			line, err = syntax.StartLine, fault("", missing{}, "not CSV: "+syntax.Err.Error())
		case err != nil:
			return fmt.Errorf("read %s: %w", d.name, err)
		default:
			line, _ = table.FieldPos(0)
			r, err = parseRow(columns, cells)
		}
		if err := d.addRecord(line, r, err); err != nil {
			return err
		}
	}
}

// faultAt adds file and line to an error of the file as a whole, which SkipBad does not skip.
func (d *reader) faultAt(line int, err error) error {
	if bad, ok := errors.AsType[*RecordError](err); ok {
		placed := *bad
		placed.File, placed.Line = d.name, line
		return &placed
	}
	return fmt.Errorf("%s line %d: %w", d.name, line, err)
}

// parseHeader returns the names of the columns without space around them. The column prompt must be there; a name
// that is empty or repeats is an error.
func parseHeader(header []string) ([]string, error) {
	if len(header) > MaxFields {
		return nil, fault("header", bare(fmt.Sprintf("%d columns", len(header))),
			fmt.Sprintf("must be at most %d", MaxFields))
	}
	columns := make([]string, len(header))
	seen := map[string]bool{}
	for i, name := range header {
		name = strings.TrimSpace(name)
		if err := checkText("header", name); err != nil {
			return nil, err
		}
		switch {
		case name == "":
			return nil, fault("header", header[i], fmt.Sprintf("must have a name for column %d", i+1))
		case seen[name]:
			return nil, fault("header", name, "must come at most once")
		}
		columns[i], seen[name] = name, true
	}
	if !seen["prompt"] {
		return nil, fault("header", strings.Join(columns, ","), "must have a column prompt")
	}
	return columns, nil
}

// parseRow makes a record of one row of the table. Columns with names of no other meaning become
// metadata. A row of another length, an empty prompt and a seed that is no number are errors.
func parseRow(columns, cells []string) (*Record, error) {
	if len(cells) != len(columns) {
		return nil, fault("", bare(fmt.Sprintf("%d cells", len(cells))),
			fmt.Sprintf("must be %d, as the header has", len(columns)))
	}
	r := &Record{Fields: map[string]any{}}
	metadata := map[string]any{}
	size := 0
	for i, name := range columns {
		value := cells[i]
		if size += len(value); size > MaxRecordBytes {
			return nil, fault("", missing{}, fmt.Sprintf("must be a record of at most %d bytes", MaxRecordBytes))
		}
		if err := checkText(name, value); err != nil {
			return nil, err
		}
		if value == "" {
			continue
		}
		switch name {
		case "prompt", "negative_prompt", "uid":
			r.Fields[name] = value
		case "ground_truth":
			r.GroundTruth = value
		case "seed":
			seed, err := strconv.ParseInt(value, 10, 64)
			if err != nil || seed < 0 {
				return nil, fault(name, value, "must be a whole number of at least 0")
			}
			r.Fields[name] = seed
		default:
			metadata[name] = value
		}
	}
	if prompt, _ := r.Prompt(); strings.TrimSpace(prompt) == "" {
		return nil, fault("prompt", prompt, "must be a text")
	}
	if len(metadata) > 0 {
		r.Fields["metadata"] = metadata
	}
	return r, nil
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
