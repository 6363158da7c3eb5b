package dataset

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// extensions are the names of files whose format is known.
var extensions = map[string]Format{
	".txt": Text, ".csv": CSV, ".tsv": TSV, ".tab": TSV, ".parquet": Parquet, ".pq": Parquet,
	".json": JSON, ".jsonl": JSON, ".ndjson": JSON,
}

// foreign are files that are none of the formats, by their first bytes, with what to do.
var foreign = []struct{ start, what, fix string }{
	{"\x1f\x8b", "compressed by gzip", "unpack it with gunzip"},
	{"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it with unzstd"},
	{"BZh", "compressed by bzip2", "unpack it with bunzip2"},
	{"\xfd7zXZ", "compressed by xz", "unpack it with unxz"},
	{"PK\x03\x04", "a ZIP archive or an Excel workbook", "unpack it, or save the sheet as CSV in UTF-8"},
	{"\xd0\xcf\x11\xe0", "a workbook of an old Excel", "save the sheet as CSV in UTF-8"},
	{"\xff\xfe", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
	{"\xfe\xff", "UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
	{"ARROW1", "an Arrow file", "write it as Parquet"},
	{"SQLite format 3", "a database", "export a table as CSV"},
	{"%PDF-", "a PDF", "write its prompts as text, one a line"},
	{"\x89PNG", "an image", "write prompts as text, one a line"},
	{"\xff\xd8\xff", "an image", "write prompts as text, one a line"},
}

// formatHint ends refusals of files whose format is not clear.
func formatHint() string {
	return "the formats are text (.txt), csv, tsv, parquet and json (.json, .jsonl); --prompts-format says which one " +
		"a file has"
}

// open finds the format of a file and begins to read its values.
func (d *Reader) open(r io.Reader) error {
	in := bufio.NewReaderSize(&bounded{r: r, left: MaxFileBytes}, MaxRecordBytes+4096)
	head, err := in.Peek(16)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", d.name, err)
	}
	for _, f := range foreign {
		if strings.HasPrefix(string(head), f.start) {
			return fmt.Errorf("read %s: it is %s, not a file of prompts; %s", d.name, f.what, f.fix)
		}
	}
	if len(head) >= 4 && (head[0] != 0 && head[1] == 0 && head[3] == 0 ||
		head[0] == 0 && head[1] != 0 && head[2] == 0) {
		return fmt.Errorf("read %s: it is UTF-16, not UTF-8; convert it with iconv -f UTF-16 -t UTF-8", d.name)
	}
	if bytes.HasPrefix(head, []byte("\xef\xbb\xbf")) { // a byte order mark is not part of a prompt
		_, _ = in.Discard(3)
	}
	// A control character follows the mark, unlike in a text.
	columns := len(head) > 4 && string(head[:4]) == "PAR1" && head[4] < ' '
	if d.Format = d.options.Format; d.Format == Auto || (d.Format == Parquet) != columns {
		if err := d.detect(columns); err != nil {
			return err
		}
	}
	if d.Format == Parquet {
		return d.openParquet(r)
	}
	line, err := firstLine(in)
	if err != nil {
		return fmt.Errorf("read %s: %w", d.name, err)
	}
	looks := shapeOf(line)
	extension := strings.ToLower(filepath.Ext(d.name))
	if d.options.Format == Auto {
		switch {
		case d.Format == Auto && looks.json():
			d.Format = JSON
		case d.Format == Auto:
			d.Format = Text
		case d.Format != JSON && looks.json():
			return fmt.Errorf("read %s: it begins with JSON, and a %s file is read as %s; say --prompts-format json, "+
				"or %s", d.name, extension, d.Format, d.Format)
		}
		if d.Format == Text && looksTable(line, d.options.PromptColumn) {
			return fmt.Errorf("read %s: its first line looks like the header of a table, %s; say --prompts-format csv "+
				"or tsv, or text if it is a prompt", d.name, display(string(line)))
		}
		name := strings.TrimLeft(string(line), "- ")
		if at := strings.IndexAny(name, ":="); d.Format == Text && at >= 0 &&
			strings.TrimSpace(name[:at]) == d.options.PromptColumn {
			return fmt.Errorf("read %s: its first line looks like YAML or TOML, %s; write the records as JSON lines; "+
				"say --prompts-format text if it is a prompt", d.name, display(string(line)))
		}
	}
	switch d.Format {
	case Text:
		d.values, d.Form = &lines{in: in, parse: func(line []byte) (any, error) {
			if bytes.IndexByte(line, '\r') >= 0 {
				return nil, fault("", string(line), "must have lines that end with a line feed, not a carriage return")
			}
			return string(line), nil
		}}, "a prompt a line"
		return nil
	case CSV, TSV:
		return d.openTable(in, line)
	}
	switch looks {
	case shapeArray, shapeArrayBegun:
		d.values, d.Form = newJSONStream(d.name, in, true), "one array"
	case shapeObjectBegun:
		d.values, d.Form = newJSONStream(d.name, in, false), "objects over several lines"
	default:
		d.values, d.Form = &lines{in: in, parse: ParseJSON}, "one a line"
	}
	return nil
}

// detect sets the format by what is a Parquet file or not, and by the file's name; Auto, if its content decides. open
// calls it, for a format that was not asked for, or that contradicts the first bytes.
func (d *Reader) detect(parquet bool) error {
	extension := strings.ToLower(filepath.Ext(d.name))
	known, ok := extensions[extension]
	switch {
	case d.options.Format == Parquet || known == Parquet && d.options.Format == Auto && !parquet:
		return fmt.Errorf("read %s: no Parquet file: it does not begin with PAR1; %s", d.name, formatHint())
	case parquet && d.options.Format != Auto:
		return fmt.Errorf("read %s: it is a Parquet file, and --prompts-format says %s; leave that out", d.name,
			d.options.Format)
	case parquet && ok && known != Parquet:
		return fmt.Errorf("read %s: it is a Parquet file, and its name says %s; say --prompts-format parquet", d.name,
			known)
	case parquet:
		d.Format = Parquet
	case ok:
		d.Format = known
	case extension != "":
		return fmt.Errorf("read %s: %s files are not read; %s", d.name, extension, formatHint())
	}
	return nil
}

// shape is what the first line of a file may be.
type shape int

const (
	shapeOther       shape = iota
	shapeObject            // a JSON object on one line
	shapeObjectBegun       // the beginning of one over several lines
	shapeArray
	shapeArrayBegun
)

func (s shape) json() bool { return s != shapeOther }

// shapeOf returns what a line looks like. A line in braces or brackets that is no JSON is a text.
func shapeOf(line []byte) shape {
	line = bytes.TrimSpace(line)
	if len(line) == 0 || line[0] != '{' && line[0] != '[' {
		return shapeOther
	}
	whole, begun := shapeObject, shapeObjectBegun
	if line[0] == '[' {
		whole, begun = shapeArray, shapeArrayBegun
	}
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.UseNumber()
	depth := 0
	for {
		t, err := dec.Token()
		switch {
		case err != nil && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) && depth > 0:
			return begun
		case err != nil:
			return shapeOther
		case t == json.Delim('{') || t == json.Delim('['):
			depth++
		case t == json.Delim('}') || t == json.Delim(']'):
			if depth--; depth == 0 {
				return whole
			}
		}
	}
}

// looksTable reports whether a line is probably the header of a table: one of several cells is the name of the prompt.
func looksTable(line []byte, prompt string) bool {
	for _, comma := range ",;\t" {
		cells := strings.Split(string(line), string(comma))
		if len(cells) > 1 && slices.ContainsFunc(cells, func(s string) bool {
			return strings.EqualFold(strings.Trim(s, " \r\n\""), prompt)
		}) {
			return true
		}
	}
	return false
}

// firstLine returns the first line that is not blank, or as much of it as the buffer holds, without consuming it.
func firstLine(in *bufio.Reader) ([]byte, error) {
	for n := 256; ; n = min(4*n, in.Size()) {
		head, err := in.Peek(n)
		text := bytes.TrimLeft(head, " \t\r\n")
		end := bytes.IndexByte(text, '\n')
		switch {
		case end >= 0:
			return text[:end], nil
		case errors.Is(err, io.EOF), n == in.Size():
			return text, nil
		case err != nil:
			return nil, err
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
