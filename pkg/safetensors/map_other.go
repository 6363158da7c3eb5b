//go:build !unix

package safetensors

import (
	"fmt"
	"io"
	"os"
)

// mapFile reads f on systems without mappings.
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
