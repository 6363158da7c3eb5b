package remote

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// scratch is a temporary folder, locked while it is in use: a lock ends with its process, so others can clean up.
type scratch struct {
	path string
	lock *os.File
	once sync.Once
}

// scratchPrefix begins the names of scratch folders.
const scratchPrefix = "meander-worker-"

// makeScratch makes a folder in dir that only this user can enter, and removes those of processes that were killed.
func makeScratch(dir string) (*scratch, error) {
	left, _ := filepath.Glob(filepath.Join(dir, scratchPrefix+"*"))
	for _, path := range left {
		if s, err := lockScratch(path); err == nil {
			s.remove()
		}
	}
	for {
		path, err := os.MkdirTemp(dir, scratchPrefix)
		if err != nil {
			return nil, err
		}
		s, err := lockScratch(path)
		if err == nil {
			return s, nil
		}
		// Another process that cleans up may have had it first.
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, os.ErrNotExist) {
			return nil, errors.Join(err, os.Remove(path))
		}
	}
}

// lockScratch locks a folder that no process uses.
func lockScratch(path string) (*scratch, error) {
	f, err := os.OpenFile(path, syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	err = syscall.EINTR
	for errors.Is(err, syscall.EINTR) {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err == nil {
		_, err = os.Lstat(path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &scratch{path: path, lock: f}, nil
}

// remove removes the folder with all that is in it, once.
func (s *scratch) remove() {
	s.once.Do(func() {
		_ = os.RemoveAll(s.path)
		_ = s.lock.Close()
	})
}
