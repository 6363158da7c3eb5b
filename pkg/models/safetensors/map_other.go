//go:build !unix

package safetensors

import (
	"fmt"
	"io"
	"os"
)

// mapFile reads f whole on systems without mappings; there is nothing to unmap. What is no regular
// file is an error.
func mapFile(f *os.File) ([]byte, func() error, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, nil, fmt.Errorf("not a regular file: %v", st.Mode())
	}
	b, err := io.ReadAll(f)
	return b, nil, err
}

// release does nothing: the files are in memory.
func release([]byte) {}
