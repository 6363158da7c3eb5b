package dataset

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// readText reads a file with one prompt per line.
func (d *reader) readText() error {
	return d.readLines(func(line []byte) (*Record, error) {
		return &Record{Fields: map[string]any{"prompt": string(line)}}, nil
	})
}

// readLines calls parse for each line that is not blank and adds its record to the set. A line that
// is too long or no UTF-8 is a bad record; an error of reading ends it.
func (d *reader) readLines(parse func([]byte) (*Record, error)) error {
	for n := 1; ; n++ {
		line, err := nextLine(d.in)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, errLong) {
			return fmt.Errorf("read %s: %w", d.name, err)
		}
		if line = bytes.TrimSpace(line); len(line) == 0 && err == nil {
			continue
		}
		var r *Record
		if err != nil {
			err = fault("", missing{}, fmt.Sprintf("must be a line of at most %d bytes", MaxRecordBytes))
		} else if err = checkText("", string(line)); err == nil {
			r, err = parse(line)
		}
		if err := d.addRecord(n, r, err); err != nil {
			return err
		}
	}
}

// errLong is the error for a line that is too long and was skipped.
var errLong = errors.New("line too long")

// nextLine returns the next line without its end; it is valid until the next call. A line of more
// than MaxRecordBytes is skipped: errLong, and the next call goes on behind it. io.EOF ends the
// file.
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
