//go:build unix

package safetensors

import (
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// mapFile maps f read-only and returns its bytes and what unmaps them; both are nil for an empty
// file. If a file shrinks while it is mapped, its readers crash: replace checkpoints by renaming,
// never in place. What is no regular file, or cannot be mapped, is an error.
func mapFile(f *os.File) ([]byte, func() error, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	switch {
	case !st.Mode().IsRegular():
		return nil, nil, fmt.Errorf("not a regular file: %v", st.Mode())
	case st.Size() == 0:
		return nil, nil, nil
	case st.Size() > math.MaxInt:
		return nil, nil, fmt.Errorf("%d bytes are too many to map", st.Size())
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("map: %w", err)
	}
	return b, func() error { return unix.Munmap(b) }, nil
}

// release takes the pages of a mapping out of the process; they are read again when they are used. It does nothing
// where the system cannot.
func release(b []byte) {
	if len(b) > 0 {
		_ = unix.Madvise(b, unix.MADV_DONTNEED)
	}
}
