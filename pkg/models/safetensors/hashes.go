package safetensors

import (
	"bytes"
	"encoding"
	"io/fs"
	"os"
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
