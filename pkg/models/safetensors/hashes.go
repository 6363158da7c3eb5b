package safetensors

import (
	"bytes"
	"crypto/sha256"
	"encoding"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/maphash"
	"io/fs"
	"os"
	"path"
	"slices"
	"sync"
)

// Hashes lets digests share the work for files that are the same. The zero value knows none; it is safe for concurrent
// use.
type Hashes struct {
	mu  sync.Mutex
	all []*hashed
}

// hashed is files that were added to a digest, or are being added, and its state before and after.
type hashed struct {
	part   string
	files  []file
	before []byte
	done   chan struct{} // closed once after is set
	after  []byte
}

// Share has d add archives without reading them where a digest of h has, or is about to have, added the same files
// after the same contents. Files are the same where the system says so and neither length nor time of change differ.
func (d *Digest) Share(h *Hashes) { d.shared = h }

// find returns what h knows of files; first says that no digest has added them: the caller is to.
func (h *Hashes) find(part string, files []file, before []byte) (found *hashed, first bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, known := range h.all {
		if known.part == part && bytes.Equal(known.before, before) && slices.EqualFunc(known.files, files, sameFile) {
			return known, false
		}
	}
	found = &hashed{part: part, before: before, done: make(chan struct{})}
	for _, f := range files {
		found.files = append(found.files, file{name: f.name, info: f.info})
	}
	h.all = append(h.all, found)
	return found, true
}

func sameFile(a, b file) bool {
	same := func(x, y fs.FileInfo) bool {
		return x != nil && y != nil && os.SameFile(x, y) && x.Size() == y.Size() && x.ModTime().Equal(y.ModTime())
	}
	return a.name == b.name && same(a.info, b.info)
}

// sharedArchive is Archive for a digest that shares: add reads the files.
func (d *Digest) sharedArchive(part string, a *Archive, read func(bytes int), add func()) {
	before, err := d.h.(encoding.BinaryMarshaler).MarshalBinary()
	if err != nil {
		panic("safetensors: " + err.Error()) // of a hash of the standard library, which has a state
	}
	known, first := d.shared.find(part, a.files, before)
	if first {
		defer close(known.done)
		add()
		known.after, _ = d.h.(encoding.BinaryMarshaler).MarshalBinary() // as above
		return
	}
	<-known.done
	// Without a state: the digest that began did not get to the end.
	if d.h.(encoding.BinaryUnmarshaler).UnmarshalBinary(known.after) != nil {
		add()
		return
	}
	if read != nil {
		for _, f := range a.files {
			read(len(f.bytes))
		}
	}
}

// Digest is the SHA-256 of a model: name, length and contents of every file that its
// results depend on, in a fixed order.
type Digest struct {
	h      hash.Hash
	shared *Hashes
}

// NewDigest returns a digest without files.
func NewDigest() *Digest { return &Digest{h: sha256.New()} }

// Write adds bytes as they are. It never fails.
func (d *Digest) Write(b []byte) (int, error) { return d.h.Write(b) }

// File adds a file.
func (d *Digest) File(name string, b []byte) {
	fmt.Fprintf(d.h, "%s %d\n", name, len(b))
	d.h.Write(b)
}

// Files adds the files with these names, such as configurations of a model, that exist in the
// folder, each of at most limit bytes; missing ones count as empty. A file that is longer or cannot
// be read is an error.
func (d *Digest) Files(folder *Folder, limit int64, names ...string) error {
	for _, name := range names {
		b, err := folder.Read(name, limit)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		d.File(name, b)
	}
	return nil
}

// Archive adds the files of a checkpoint, headers included, under the name part of the model. read,
// unless nil, is called with the number of bytes of each piece, to report progress.
func (d *Digest) Archive(part string, a *Archive, read func(bytes int)) {
	add := func() { d.readArchive(part, a, read) }
	if d.shared != nil {
		d.sharedArchive(part, a, read, add)
		return
	}
	add()
}

// readArchive is Archive without what others have read.
func (d *Digest) readArchive(part string, a *Archive, read func(bytes int)) {
	for _, f := range a.Files() {
		fmt.Fprintf(d.h, "%s %d\n", path.Join(part, f.Name), len(f.Bytes))
		for piece := range slices.Chunk(f.Bytes, 16<<20) {
			d.h.Write(piece)
			if read != nil {
				read(len(piece))
			}
		}
	}
}

// Hex returns the digest of what was added so far.
func (d *Digest) Hex() string { return hex.EncodeToString(d.h.Sum(nil)) }

// Places of a file that a fingerprint has, and bytes of each.
const (
	samples     = 256
	sampleBytes = 1 << 10
)

// Fingerprint tells whether two folders have the same weights, without reading all of them: it is the SHA-256 in hex of
// the names and sizes of the files of some parts, and of bytes at 256 places of each.
func (f *Folder) Fingerprint(parts ...string) (string, error) {
	h := sha256.New()
	for _, part := range parts {
		a, err := f.Archive(part)
		if err != nil {
			return "", err
		}
		for _, file := range a.Files() {
			size := len(file.Bytes)
			fmt.Fprintf(h, "%s %d\n", file.Name, size)
			for i := range samples {
				at := size * i / samples
				h.Write(file.Bytes[at:min(size, at+sampleBytes)])
			}
		}
		if err := a.Close(); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// sumBytes is how much of a file one sum is of. A tensor is read with the pieces that it begins and ends in.
const sumBytes = 64 << 10

// ErrChanged says that a file is not what it was when its sums were made.
var ErrChanged = errors.New("the file was changed while it was loaded")

// Sums tell whether what is read of a mapped file is what was read of it before, for its digest: a file on a disk can
// be written to at any time, and its time set back. They are of the bytes that Write is given, the whole file in order.
type Sums struct {
	seed   maphash.Seed
	pieces []uint64
	last   maphash.Hash
	in     int // bytes of the last piece so far
}

// NewSums returns the sums of no bytes.
func NewSums() *Sums {
	s := &Sums{seed: maphash.MakeSeed()}
	s.last.SetSeed(s.seed)
	return s
}

// Write adds bytes of the file. It never fails.
func (s *Sums) Write(b []byte) (n int, err error) {
	n = len(b)
	for len(b) > 0 {
		take := min(len(b), sumBytes-s.in)
		_, _ = s.last.Write(b[:take]) // never fails
		if s.in == 0 {
			s.pieces = append(s.pieces, 0)
		}
		s.in += take
		s.pieces[len(s.pieces)-1] = s.last.Sum64()
		if s.in == sumBytes {
			s.last.Reset()
			s.in = 0
		}
		b = b[take:]
	}
	return n, nil
}

// copy returns a copy of bytes from to to of a mapped file, which cannot change any more. ErrChanged: they have.
func (s *Sums) copy(file []byte, from, to int) ([]byte, error) {
	first, end := from/sumBytes*sumBytes, min(len(file), (to+sumBytes-1)/sumBytes*sumBytes)
	b := make([]byte, end-first)
	for at := first; at < end; at += sumBytes {
		piece := b[at-first : min(at+sumBytes, end)-first]
		copy(piece, file[at:])
		if at/sumBytes >= len(s.pieces) || maphash.Bytes(s.seed, piece) != s.pieces[at/sumBytes] {
			return nil, ErrChanged
		}
	}
	return b[from-first : to-first : to-first], nil
}
