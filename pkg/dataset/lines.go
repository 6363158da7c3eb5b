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
