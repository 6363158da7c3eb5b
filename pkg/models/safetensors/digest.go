package safetensors

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"path"
	"slices"
)

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
