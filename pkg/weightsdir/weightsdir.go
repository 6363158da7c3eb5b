// Package weightsdir hands files of weights over by path: in a folder that those who push share with the samplers,
// which may have it in another place. A version of the weights names each file by its path from the folder on, its size
// and its SHA-256 (schemas.WeightsFile); nothing of the file goes through the server.
//
// Place names files for a push. Those that lie in the folder already stay where they are: they are their user's, and
// nothing here changes or removes them. Others it copies to a folder of the store, under their digest. Those are
// meander's, and Sweep removes them. Open opens a file for a sampler, which checks it.
package weightsdir

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

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

// Source is a file to push: that at Path or, where Path is empty, Bytes.
type Source struct {
	Path  string
	Bytes []byte
}

// open opens the source, whatever is in its place: it is the user's own.
func (s Source) open() (io.ReadCloser, error) {
	if s.Path == "" {
		return io.NopCloser(bytes.NewReader(s.Bytes)), nil
	}
	return os.Open(s.Path)
}

// folderOf returns the folder of the files that pushes to a store have copied.
func folderOf(store string) string { return "meander-" + store }

const (
	suffix = ".safetensors"
	// unfinished begins the names of files that are being copied, or removed.
	unfinished = ".part-"
)

// freshEvery is how often a push that copies says that it needs the copies before.
const freshEvery = 20 * time.Second

// isDigest matches the names of the files that pushes have copied, without their suffix.
var isDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Place names files of weights for a push, in their order. It copies those that lie elsewhere than in the folder, which
// takes no more memory for large files. store names the store that the event goes to: see bus.StoreID. The copies stay
// for the grace of Sweep, so the event is to be published at once.
func (d *Dir) Place(ctx context.Context, store string, files ...Source) ([]schemas.WeightsFile, error) {
	out := make([]schemas.WeightsFile, len(files))
	p := &placing{Dir: d, folder: folderOf(store), said: time.Now()}
	for i, f := range files {
		var err error
		if out[i], err = p.place(ctx, f); err != nil {
			return nil, fmt.Errorf("put the weights into the shared folder %s: %w", d.root.Name(), err)
		}
	}
	return out, p.keep()
}

// placing is a call of Place.
type placing struct {
	*Dir
	folder string
	copies []string // that it needs
	said   time.Time
}

// keep says that the copies are needed: by their times.
func (p *placing) keep() (err error) {
	p.said = time.Now()
	for _, name := range p.copies {
		err = errors.Join(err, p.root.Chtimes(name, p.said, p.said))
	}
	return err
}

// read is digestOf a source.
func (p *placing) read(ctx context.Context, from io.Reader, each func([]byte) error) (string, int64, error) {
	return digestOf(ctx, from, func(piece []byte) error {
		if time.Since(p.said) > freshEvery {
			if err := p.keep(); err != nil {
				return err
			}
		}
		if each == nil {
			return nil
		}
		return each(piece)
	})
}

// place names one file: where it is if it lies in the folder, else its copy, which it makes if need be. An error is of
// reading, of writing, or of ctx.
func (p *placing) place(ctx context.Context, s Source) (w schemas.WeightsFile, err error) {
	name, inside := p.inside(s.Path)
	from, err := s.open()
	if err != nil {
		return w, err
	}
	w.Digest, w.Size, err = p.read(ctx, from, nil)
	if err = errors.Join(err, from.Close()); err != nil {
		return w, err
	}
	if w.Path = name; inside && path.Dir(name) != p.folder {
		return w, nil
	}
	w.Path = path.Join(p.folder, w.Digest+suffix)
	p.copies = append(p.copies, w.Path)
	if p.has(ctx, w) {
		return w, nil
	}
	return w, p.copy(ctx, s, w)
}

// inside returns the path of a file from the folder on, and whether it lies there, wherever links lead.
func (p *placing) inside(file string) (name string, ok bool) {
	if file == "" {
		return "", false
	}
	dir, err := filepath.EvalSymlinks(p.root.Name())
	file, fileErr := filepath.EvalSymlinks(file)
	if err = errors.Join(err, fileErr); err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err == nil {
		file, err = filepath.Abs(file)
	}
	if err == nil {
		name, err = filepath.Rel(dir, file)
	}
	return filepath.ToSlash(name), err == nil && filepath.IsLocal(name)
}

// has reports whether a whole copy is there already, and says that it is needed.
func (p *placing) has(ctx context.Context, w schemas.WeightsFile) bool {
	now := time.Now()
	if p.root.Chtimes(w.Path, now, now) != nil {
		return false
	}
	f, _, err := p.open(w.Path)
	if err != nil {
		return false
	}
	digest, size, err := p.read(ctx, f, nil)
	return errors.Join(err, f.Close()) == nil && digest == w.Digest && size == w.Size
}

// copy copies a source to the path of w, where it is whole or not at all. All may read it: samplers may be other users.
func (p *placing) copy(ctx context.Context, s Source, w schemas.WeightsFile) (err error) {
	p.copies = p.copies[:len(p.copies)-1] // until it is there
	err = p.root.Mkdir(p.folder, 0o755)
	if err == nil {
		err = p.root.Chmod(p.folder, 0o755) // whatever the umask is
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	from, err := s.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	part := path.Join(p.folder, unfinished+rand.Text())
	to, err := p.root.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	digest, _, err := p.read(ctx, from, func(piece []byte) error {
		_, err := to.Write(piece)
		return err
	})
	if err == nil && digest != w.Digest {
		err = fmt.Errorf("%s: was changed while it was copied", s.Path)
	}
	if err = errors.Join(err, to.Chmod(0o644), to.Sync(), to.Close()); err == nil {
		err = p.root.Rename(part, w.Path)
	}
	if err != nil {
		return errors.Join(err, p.root.Remove(part))
	}
	p.copies = append(p.copies, w.Path)
	return nil
}

// Sweep removes the files that pushes to a store have copied, if they were copied or said to be needed before a time
// and are not needed, by their digest. It returns their number and bytes; with dry it only counts them. All other files
// stay.
func (d *Dir) Sweep(store string, before time.Time, needed func(digest string) bool, dry bool,
) (n int, size uint64, err error) {
	folder := folderOf(store)
	names, err := d.names(folder)
	for _, name := range names {
		digest, whole := strings.CutSuffix(name, suffix)
		if whole = whole && isDigest.MatchString(digest); whole && needed(digest) ||
			!whole && !strings.HasPrefix(name, unfinished) {
			continue
		}
		bytes, removed, failed := d.removeOld(path.Join(folder, name), before, dry)
		if err = errors.Join(err, failed); removed {
			n, size = n+1, size+bytes
		}
	}
	if err != nil {
		err = fmt.Errorf("sweep weights: %w", err)
	}
	return n, size, err
}

// names returns the names in a folder; none where it is not there.
func (d *Dir) names(folder string) ([]string, error) {
	opened, err := d.root.Open(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names, err := opened.Readdirnames(-1)
	return names, errors.Join(err, opened.Close())
}

// removeOld removes a file that is older than a time. A push may say at any moment that it needs the file, so its time
// is looked at again when it has another name.
func (d *Dir) removeOld(name string, before time.Time, dry bool) (size uint64, removed bool, err error) {
	old, err := d.isOld(name, before)
	if old == nil || err != nil || dry {
		return sizeOf(old), old != nil, err
	}
	away := path.Join(path.Dir(name), unfinished+rand.Text())
	if err := d.root.Rename(name, away); err != nil {
		return 0, false, err
	}
	if old, err = d.isOld(away, before); old == nil || err != nil {
		return 0, false, errors.Join(err, d.root.Rename(away, name))
	}
	return sizeOf(old), true, d.root.Remove(away)
}

// isOld returns a regular file if it is older than a time, else nil.
func (d *Dir) isOld(name string, before time.Time) (fs.FileInfo, error) {
	info, err := d.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) { // another one removed it
		return nil, nil
	}
	if err != nil || !info.Mode().IsRegular() || !info.ModTime().Before(before) {
		return nil, err
	}
	return info, nil
}

func sizeOf(info fs.FileInfo) uint64 {
	if info == nil {
		return 0
	}
	return uint64(info.Size())
}
