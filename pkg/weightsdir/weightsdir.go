// Package weightsdir hands files of weights over by path: in a folder that those who push share with the samplers,
// which may have it in another place. A version of the weights names each file by its path from the folder on, its size
// and its SHA-256 (schemas.WeightsFile); nothing of the file goes through the server.
//
// Place names files for a push. Those that lie in the folder already stay where they are: they are their user's, and
// nothing here changes or removes them. Others it copies to a folder of the store, under their digest. Those are
// meander's, and Sweep removes them. Open opens a file for a sampler, which checks it.
package weightsdir

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"syscall"

	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/schemas"
)

// Dir is a shared folder. Paths and symbolic links cannot leave it.
type Dir struct{ root *os.Root }

// Open opens a shared folder. The caller closes it.
func Open(dir string) (*Dir, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("shared folder of weights: %w", err)
	}
	return &Dir{root}, nil
}

// Close closes the folder; files that were opened stay open.
func (d *Dir) Close() error { return d.root.Close() }

// ErrUnfit says that a file is not there, or not the one that was pushed. Trying again does not help.
var ErrUnfit = errors.New("not the file that was pushed")

// File is an open file of weights.
type File struct {
	// Contents are mapped, and valid until Close. They have the sums of what the digest is of.
	safetensors.Contents

	file  *os.File
	as    os.FileInfo // when its digest was computed
	unmap func() error
}

// File opens a file of weights, and checks its size and digest. An error is ErrUnfit, unless the file cannot be read
// now. The caller closes it.
func (d *Dir) File(ctx context.Context, w schemas.WeightsFile) (_ *File, err error) {
	where := path.Join(d.root.Name(), w.Path)
	file, info, err := d.open(w.Path)
	if err != nil && mayPass(err) {
		return nil, fmt.Errorf("open %s: %w", where, bare(err))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrUnfit, where, bare(err))
	}
	f := &File{file: file, as: info}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if info.Size() != w.Size {
		return nil, fmt.Errorf("%w: %s: %d bytes; must be %d", ErrUnfit, where, info.Size(), w.Size)
	}
	sums := safetensors.NewSums()
	digest, size, err := digestOf(ctx, file, func(piece []byte) error {
		_, err := sums.Write(piece)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", where, err)
	}
	if size != w.Size || digest != w.Digest {
		return nil, fmt.Errorf("%w: %s: has another SHA-256 than %.16s, which was pushed: it was changed since",
			ErrUnfit, where, w.Digest)
	}
	f.Name, f.Mapped, f.Sums = w.Path, true, sums
	if f.Bytes, f.unmap, err = safetensors.Map(file); err != nil {
		return nil, fmt.Errorf("read %s: %w", where, err)
	}
	return f, nil
}

// open opens a regular file. It opens nothing else: a pipe without a writer would block its reader for ever.
func (d *Dir) open(name string) (*os.File, os.FileInfo, error) {
	info, err := d.root.Stat(name)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("not a regular file: %v", info.Mode())
	}
	if err != nil {
		return nil, nil, err
	}
	file, err := d.root.Open(name)
	if err != nil {
		return nil, nil, err
	}
	if info, err = file.Stat(); err != nil {
		return nil, nil, errors.Join(err, file.Close())
	}
	return file, info, nil
}

// mayPass reports whether a file may be opened later: the system is short of something, or a network disk is away.
func mayPass(err error) bool {
	return slices.ContainsFunc([]error{
		syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EIO, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EINTR,
		syscall.EAGAIN,
	}, func(e error) bool { return errors.Is(err, e) })
}

// bare returns an error without the operation and the path of which it is.
func bare(err error) error {
	if p, ok := errors.AsType[*os.PathError](err); ok {
		return p.Err
	}
	return err
}

// Unchanged returns ErrUnfit if the file was written to since its digest was computed.
func (f *File) Unchanged() error {
	now, err := f.file.Stat()
	if err == nil && now.Size() == f.as.Size() && now.ModTime().Equal(f.as.ModTime()) {
		return nil
	}
	return errors.Join(fmt.Errorf("%w: %s: was changed while it was loaded", ErrUnfit, f.file.Name()), err)
}

// Close unmaps and closes the file.
func (f *File) Close() error {
	err := f.file.Close()
	if f.unmap != nil {
		err = errors.Join(err, f.unmap())
	}
	return err
}

// readBytes is how much of a file is in memory at once.
const readBytes = 1 << 20

// digestOf reads r to its end and returns the SHA-256 in hex and the size. It calls each, unless it is nil, with each
// piece. An error is of r, of each, or of ctx.
func digestOf(ctx context.Context, r io.Reader, each func([]byte) error) (digest string, size int64, err error) {
	h, buffer := sha256.New(), make([]byte, readBytes)
	for {
		n, err := io.ReadFull(r, buffer)
		_, _ = h.Write(buffer[:n]) // never fails
		size += int64(n)
		if each != nil {
			if err := each(buffer[:n]); err != nil {
				return "", 0, err
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return hex.EncodeToString(h.Sum(nil)), size, nil
		case err != nil:
			return "", 0, err
		case ctx.Err() != nil:
			return "", 0, context.Cause(ctx)
		}
	}
}
