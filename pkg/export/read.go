package export

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"path"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
)

// ReadArchive yields the entries of an archive in order. An archive that is not as it was written ends with an error
// that names the file: a file with other bytes, an event that is not valid or of another run, a step that is not the
// one its trajectory names, a file that is neither event nor blob, or an archive that ends too early or goes on behind
// its end. A prompt or a control that is not valid is yielded with its Invalid.
func ReadArchive(r io.Reader) iter.Seq2[*Entry, error] { return readFiles(r, newCheck().addFile) }

// readFiles yields the entries of an archive, once check has accepted their files.
func readFiles(r io.Reader, check func(name string, e *Entry) error) iter.Seq2[*Entry, error] {
	return func(yield func(*Entry, error) bool) {
		in := bufio.NewReaderSize(r, 1<<16)
		begin, _ := in.Peek(tarMagicEnd) // what cannot be read fails below
		begin = bytes.Clone(begin)
		files, complete, last := tar.NewReader(in), false, ""
		for {
			header, err := files.Next()
			switch {
			case errors.Is(err, io.EOF):
				err = checkTrailer(in, complete)
				if err == nil {
					return
				}
			case err != nil && last == "":
				err = explainBegin(begin, err)
			case errors.Is(err, tar.ErrHeader):
				err = fmt.Errorf("damaged after %q: what follows is no file of a tar", last)
			}
			var e *Entry
			if err == nil {
				last = header.Name
				e, err = readEntry(header, files)
			}
			if err == nil {
				err = check(header.Name, e)
			}
			if errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: it was cut off", err)
			}
			if err != nil {
				yield(nil, fmt.Errorf("read export: %w", err))
				return
			}
			switch {
			case header.Name == sumsFile:
				complete = true
			case header.Name != notesFile && !yield(e, nil):
				return
			}
		}
	}
}

const (
	tarMagic    = "ustar"
	tarMagicEnd = 257 + len(tarMagic)
)

// compressors are programs by the first bytes of what they write.
var compressors = []struct{ magic, name string }{
	{"\x1f\x8b", "gzip"}, {"\x28\xb5\x2f\xfd", "zstd"}, {"\xfd7zXZ\x00", "xz"}, {"BZh", "bzip2"}, {"PK\x03\x04", "zip"},
}

// explainBegin returns what is wrong with a file that begins so, and in which no first file was found; err says why.
func explainBegin(begin []byte, err error) error {
	if len(begin) == tarMagicEnd && string(begin[tarMagicEnd-len(tarMagic):]) == tarMagic {
		return err
	}
	for _, c := range compressors {
		if bytes.HasPrefix(begin, []byte(c.magic)) {
			return fmt.Errorf("compressed with %s; unpack it first: must be the tar file that 'meander runs export' "+
				"wrote", c.name)
		}
	}
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("no tar file; must be one that 'meander runs export' wrote")
	}
	return err
}

// checkTrailer checks the end of an archive: the file of digests was there, and only zeros follow, with which tar
// programs fill up the last block.
func checkTrailer(r *bufio.Reader, complete bool) error {
	if !complete {
		return fmt.Errorf("it ends without %s: it was cut off", sumsFile)
	}
	for {
		b, err := r.ReadByte()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if b != 0 {
			return errors.New("bytes follow after its end")
		}
	}
}

// readEntry reads one file of an archive. It checks the digest of a blob, and takes stream, sequence and subject of
// an event from the file's name. ReadArchive ends with its error, which names the file.
func readEntry(header *tar.Header, r io.Reader) (*Entry, error) {
	if header.Typeflag != tar.TypeReg || header.Size > maxEntry {
		return nil, fmt.Errorf("%q: %d bytes of type %q; must be a file of at most %d", header.Name, header.Size,
			header.Typeflag, maxEntry)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", header.Name, err)
	}
	e := &Entry{Time: header.ModTime, Data: data}
	if header.Name == sumsFile || header.Name == notesFile {
		return e, nil
	}
	folder, name := path.Split(header.Name)
	if folder == blobFolder+"/" {
		sum := sha256.Sum256(data)
		if e.Blob = hex.EncodeToString(sum[:]); e.Blob != name {
			return nil, fmt.Errorf("%q: %w", header.Name, bus.ErrCorrupt)
		}
		return e, nil
	}
	e.Stream = strings.TrimSuffix(folder, "/")
	seq, subject, ok := strings.Cut(strings.TrimSuffix(name, eventEnd), "-")
	if e.Seq, err = strconv.ParseUint(seq, 10, 64); err != nil || !ok {
		return nil, fmt.Errorf("%q: no event; must be STREAM/NUMBER-SUBJECT%s", header.Name, eventEnd)
	}
	e.Subject = subject
	return e, nil
}
