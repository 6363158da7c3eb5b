package export

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// stateEnd ends the name of the state beside a file that was begun.
	stateEnd = PartEnd + ".json"
	// stateBytes is after how many bytes the state is written again: what a kill costs at most.
	stateBytes = 4 << 20
)

// state says how much of a begun file is on the disk, and how the export goes on.
type state struct {
	Run    schemas.Run       `json:"run"`
	Limits map[string]uint64 `json:"limits"` // see exporter
	// Created tells the store from others.
	Created map[string]time.Time `json:"created"`
	Bytes   int64                `json:"bytes"`
	SHA256  string               `json:"sha256"` // of these bytes
	// LeftOut and LeftOutNotes are Summary.LeftOut and its notes, up to the last file.
	LeftOut      int      `json:"left_out,omitempty"`
	LeftOutNotes []string `json:"left_out_notes,omitempty"`
}

// WriteArchiveFile writes an archive, as WriteArchive does, to a new file. The file is NAME.part until it is whole. If
// that was stopped, or its process killed, another call goes on behind what is on the disk, and comes to the same
// bytes: it adds the events up to the moment of the first call. The summary is nil if the file cannot be opened, or is
// in use.
func WriteArchiveFile(ctx context.Context, b *bus.Bus, run schemas.Run, name string) (*Summary, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(name+PartEnd, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // all of it is synchronised
	// Some file systems have no locks: there it goes on without.
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("%w: another process writes %s", ErrBegun, file.Name())
	}
	opened, err := file.Stat()
	if err != nil {
		return nil, err
	}
	// Another process may have ended the export before the lock.
	if onDisk, err := os.Stat(file.Name()); err != nil || !os.SameFile(opened, onDisk) {
		return nil, fmt.Errorf("%w: another process has ended or removed %s meanwhile", ErrBegun, file.Name())
	}
	f := &partFile{name: name, file: file}
	f.exporter = newExporter(b, run, f, sha256.New())
	f.added = f.saveSometimes
	if err := f.resume(ctx); err != nil {
		return f.summarize(), err
	}
	if err := f.write(ctx); err != nil {
		return f.summarize(), errors.Join(err, f.save())
	}
	if err := file.Sync(); err != nil {
		return f.summarize(), err
	}
	if err := os.Rename(file.Name(), name); err != nil {
		return f.summarize(), err
	}
	return f.summarize(), f.removeState()
}

// partFile is a file that is not whole yet.
type partFile struct {
	*exporter
	name         string
	file         *os.File
	bytes, saved int64
}

// Write writes to the file, and notes what is in it.
func (f *partFile) Write(p []byte) (int, error) {
	n, err := f.file.Write(p)
	f.bytes += int64(n)
	return n, err
}

// saveSometimes saves the state when enough has come since.
func (f *partFile) saveSometimes() error {
	if f.bytes-f.saved < stateBytes {
		return nil
	}
	return f.save()
}

// removeState removes the state, which may be absent.
func (f *partFile) removeState() error {
	if err := os.Remove(f.name + stateEnd); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// save makes what is written count for later calls. Before the first event outside of the work queues there is
// nothing that another call could compare with the store: it begins again.
func (f *partFile) save() error {
	if f.lastEvent == nil || f.files.Flush() != nil { // it ends within a file: the last state holds
		return nil
	}
	if err := f.file.Sync(); err != nil {
		return err
	}
	err := saveJSON(f.name+stateEnd, state{
		f.run, f.limits, f.created, f.bytes, hex.EncodeToString(f.sum.Sum(nil)), f.leftBefore.n, f.leftBefore.lines,
	})
	if err == nil {
		f.saved = f.bytes
	}
	return err
}

// saveJSON puts a value into a file in one step.
func saveJSON(name string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	next, err := os.Create(name + PartEnd)
	if err != nil {
		return err
	}
	_, err = next.Write(append(data, '\n'))
	if err := errors.Join(err, next.Sync(), next.Close()); err != nil {
		return err
	}
	return os.Rename(next.Name(), name)
}

// loadJSON reads what saveJSON has written.
func loadJSON(name string, v any) error {
	data, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(data, v)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// resume reads what earlier calls have written, and removes what is behind it.
func (f *partFile) resume(ctx context.Context) error {
	if info, err := f.file.Stat(); err != nil {
		return err
	} else if info.Size() == 0 {
		return f.removeState() // of a file that is gone
	}
	s := &state{}
	switch err := loadJSON(f.name+stateEnd, s); {
	case errors.Is(err, os.ErrNotExist):
		return f.file.Truncate(0)
	case err != nil:
		return fmt.Errorf("%w: %w; remove it to begin again", ErrBegun, err)
	case s.Run != f.run:
		return fmt.Errorf("%w: %s is of run %s; name another file, or remove it", ErrBegun, f.file.Name(), s.Run)
	}
	f.limits, f.created, f.leftOut = s.Limits, s.Created, notes{s.LeftOutNotes, s.LeftOut}
	changed := fmt.Errorf("%w: %s has changed since it was written; remove it and %s", ErrBegun, f.file.Name(),
		f.name+stateEnd)
	files := tar.NewReader(io.TeeReader(io.LimitReader(f.file, s.Bytes), f.sum))
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		var e *Entry
		if err == nil {
			e, err = readEntry(header, files)
		}
		if err != nil {
			return fmt.Errorf("%w: %w", changed, err)
		}
		if header.Name == notesFile {
			f.noteSum(notesFile, e.Data)
			continue
		}
		if e.Blob == "" {
			e.event, e.Invalid = decodeEvent(e.Subject, e.Data)
		}
		f.note(header.Name, e)
	}
	if f.lastEvent == nil || hex.EncodeToString(f.sum.Sum(nil)) != s.SHA256 {
		return changed
	}
	for _, stream := range exportOrder {
		info, err := f.bus.StreamInfo(ctx, stream)
		if err != nil {
			return err
		}
		if !info.Created.Equal(s.Created[stream]) {
			return fmt.Errorf("%w: %s is of another store, by when its stream %s was made; name another file, or the "+
				"server of that store", ErrBegun, f.file.Name(), stream)
		}
	}
	m, err := f.bus.Get(ctx, f.lastEvent.Stream, f.lastEvent.Seq)
	switch f.summary.Removed = errors.Is(err, bus.ErrNotFound); {
	case f.summary.Removed:
	case err != nil:
		return err
	case m.Subject != f.lastEvent.Subject || string(m.Data) != string(f.lastEvent.Data):
		return fmt.Errorf("%w: %s of %s in %s is not what is stored here; name another file", ErrBegun,
			f.lastEvent.Subject, f.lastEvent.Stream, f.file.Name())
	}
	f.bytes, f.saved, f.summary.Before = s.Bytes, s.Bytes, f.summary.Bytes
	if err := f.file.Truncate(s.Bytes); err != nil {
		return err
	}
	_, err = f.file.Seek(s.Bytes, io.SeekStart)
	return err
}

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
