package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// Folder is a folder that limits reading: no file outside it can be opened, not even through symbolic links. In a
// Hugging Face cache links may lead to other files of the same repository:
//
//	models--org--name/blobs/<digest>
//	models--org--name/snapshots/<revision>/vae/model.safetensors -> ../../../blobs/<digest>
type Folder struct {
	root *os.Root
	dir  string // below root
}

// OpenFolder opens a folder for files of a model; paths and links cannot leave it, except to the
// blobs of a Hugging Face cache. The caller closes it. A folder that is not there is an error.
func OpenFolder(dir string) (*Folder, error) {
	dir, err := Snapshot(dir)
	if err != nil {
		return nil, err
	}
	top, below, ok := SplitSnapshot(dir)
	if !ok {
		top, below = dir, "."
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return nil, err
	}
	return &Folder{root, filepath.ToSlash(below)}, nil
}

// Snapshot returns the folder that a path means. For a repository in a Hugging Face cache, models--ORG--NAME, or its
// folder snapshots, that is the snapshot which refs/main names, or the only one; another path means itself. Several
// snapshots of which refs/main names none are an error that names them.
func Snapshot(dir string) (string, error) {
	repository, snapshots := filepath.Clean(dir), filepath.Join(dir, "snapshots")
	if filepath.Base(repository) == "snapshots" {
		repository, snapshots = filepath.Dir(repository), repository
	}
	if blobs, err := os.Lstat(filepath.Join(repository, "blobs")); err != nil || !blobs.IsDir() {
		return dir, nil
	}
	entries, err := os.ReadDir(snapshots)
	if err != nil {
		return dir, nil // no cache
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	said, err := os.ReadFile(filepath.Join(repository, "refs", "main"))
	main := strings.TrimSpace(string(said))
	switch {
	case slices.Contains(names, main):
		return filepath.Join(snapshots, main), nil
	case err != nil && len(names) == 1:
		return filepath.Join(snapshots, names[0]), nil
	case err != nil:
		return "", fmt.Errorf("%s: it has no refs/main and the snapshots %s; name one: %s", repository,
			strings.Join(names, ", "), filepath.Join(snapshots, "REVISION"))
	}
	return "", fmt.Errorf("%s: refs/main names %.64q, there are the snapshots %s; name one: %s", repository, main,
		strings.Join(names, ", "), filepath.Join(snapshots, "REVISION"))
}

// SplitSnapshot splits the path of a folder in a Hugging Face cache into the folder of its
// repository and the rest, such as snapshots/<revision>: files there are links to blobs beside it.
// It follows links. ok is false for any other folder.
func SplitSnapshot(dir string) (repository, rest string, ok bool) {
	real, err := filepath.EvalSymlinks(dir)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return "", "", false
	}
	for at := real; ; {
		up := filepath.Dir(at)
		if up == at {
			return "", "", false
		}
		if filepath.Base(up) == "snapshots" {
			repository = filepath.Dir(up)
			info, err := os.Lstat(filepath.Join(repository, "blobs"))
			if err == nil && info.IsDir() {
				rest, err = filepath.Rel(repository, real)
				return repository, rest, err == nil
			}
		}
		at = up
	}
}

// Close closes the folder; archives that were opened from it stay usable.
func (f *Folder) Close() error { return f.root.Close() }

// Open opens a regular file of the folder; the caller closes it. It refuses anything else before
// opening it: a pipe without a writer would block its reader for ever.
func (f *Folder) Open(name string) (*os.File, error) {
	info, err := f.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fmt.Errorf("not a regular file: %v", info.Mode())}
	}
	return f.root.Open(path.Join(f.dir, filepath.ToSlash(name)))
}

// Stat describes the file of that name; it follows links.
func (f *Folder) Stat(name string) (fs.FileInfo, error) {
	info, err := f.root.Stat(path.Join(f.dir, filepath.ToSlash(name)))
	if err != nil && strings.Contains(err.Error(), "escapes from parent") { // os has no value for it
		err = &fs.PathError{Op: "stat", Path: name, Err: errors.New(
			"a link that leads out of the folder; copy the file itself there")}
	}
	return info, err
}

// Read returns the contents of a regular file of at most limit bytes. A file that is missing
// (fs.ErrNotExist) or longer is an error that names it.
func (f *Folder) Read(name string, limit int64) ([]byte, error) {
	file, err := f.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, errors.Unwrap(err))
	}
	b, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("longer than %d bytes", limit)
	}
	if err == nil {
		err = checkFetched(b)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return b, nil
}

// checkFetched returns an error if the contents of a file are only a pointer, as Git clones it without LFS.
func checkFetched(b []byte) error {
	if bytes.HasPrefix(b, []byte("version https://git-lfs")) {
		return errors.New("a pointer of Git LFS; fetch the file: `git lfs pull`")
	}
	return nil
}

// listNames returns the names in the folder dir below f, in no order. A folder that cannot be read
// is an error.
func (f *Folder) listNames(dir string) ([]string, error) {
	d, err := f.root.Open(path.Join(f.dir, filepath.ToSlash(dir)))
	if err != nil {
		return nil, fmt.Errorf("open checkpoint folder %q: %w", dir, err)
	}
	names, err := d.Readdirnames(-1)
	if err = errors.Join(err, d.Close()); err != nil {
		return nil, fmt.Errorf("list checkpoint folder %q: %w", dir, err)
	}
	return names, nil
}

// where returns the path of a name, for messages.
func (f *Folder) where(name string) string { return filepath.Join(f.root.Name(), f.dir, name) }
