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

// text reads a prompt a line.
func (d *reader) text() error {
	return d.lines(func(line []byte) (*Record, error) {
		return &Record{Fields: map[string]any{"prompt": string(line)}}, nil
	})
}

// lines makes a record of each line that is not blank.
func (d *reader) lines(parse func([]byte) (*Record, error)) error {
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
		if err := d.take(n, r, err); err != nil {
			return err
		}
	}
}

// errLong is the error of a line that was passed over.
var errLong = errors.New("line too long")

// nextLine returns the next line without its end. It is valid until the next call. Of
// one that is too long nothing is kept.
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

// checkText refuses what no prompt may have.
func checkText(field, s string) error {
	switch {
	case !utf8.ValidString(s):
		return fault(field, strings.ToValidUTF8(s, "�"), "must be UTF-8")
	case strings.IndexByte(s, 0) >= 0:
		return fault(field, s, "must be without zero bytes")
	}
	return nil
}
