package export

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// sealMark begins the line of SHA256SUMS with the digest of all that is before that file; sha256sum skips it.
const sealMark = "# archive "

// ErrUnsealed says that an archive has no digest of itself: an older version wrote it, or another program its tar.
var ErrUnsealed = errors.New("no digest of the whole archive is in it: the times of its files cannot be checked")

// CheckSeal checks each byte of an archive that is not content of its files, which CheckArchive checks: names, times
// and sizes, and what is between the files and behind them. An error names the place.
func CheckSeal(r io.Reader) error {
	var raw, again bytes.Buffer
	in := io.TeeReader(r, &raw)
	sum := sha256.New()
	files, w := tar.NewReader(in), tar.NewWriter(io.MultiWriter(&again, sum))
	newest, sealed, changed := time.Time{}, false, error(nil)
	same := func(where string) {
		if changed == nil && !bytes.Equal(raw.Bytes(), again.Bytes()) {
			changed = fmt.Errorf("archive: bytes %s are not those that were written", where)
		}
		raw.Reset()
		again.Reset()
	}
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("archive: %w", err)
		}
		if err := w.Flush(); err != nil {
			return err
		}
		before := fmt.Sprintf("%x", sum.Sum(nil))
		header = &tar.Header{
			Name: header.Name, Mode: 0o644, Size: header.Size, ModTime: header.ModTime, Format: tar.FormatPAX,
		}
		if err := w.WriteHeader(header); err != nil {
			return fmt.Errorf("archive: %q: %w", header.Name, err)
		}
		same(fmt.Sprintf("before %q", header.Name))
		data, err := io.ReadAll(files)
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			return fmt.Errorf("archive: %q: %w", header.Name, err)
		}
		if header.Name != sumsFile {
			if header.ModTime.After(newest) {
				newest = header.ModTime
			}
			continue
		}
		digest := ""
		if _, digest, sealed = strings.Cut(string(data), "\n"+sealMark); !sealed {
			return ErrUnsealed
		}
		if changed == nil && (strings.TrimSuffix(digest, "\n") != before || !header.ModTime.Equal(newest)) {
			changed = fmt.Errorf("archive: the time of a file is not that which was written")
		}
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	same("behind " + sumsFile)
	if !sealed {
		return ErrUnsealed
	}
	return changed
}
