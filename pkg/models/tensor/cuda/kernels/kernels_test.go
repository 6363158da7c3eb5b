package kernels_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The PTX is that of the sources beside it, and neither was edited since.
func TestPTX_IsNotStale(t *testing.T) {
	var files []string
	for _, pattern := range []string{"*.cu", "*.cuh", "*.ptx"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	slices.Sort(files)
	want := ""
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want += fmt.Sprintf("%x  %s\n", sha256.Sum256(b), name)
	}
	got, err := os.ReadFile("SUMS")
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("the PTX is not of these sources: run make ptx (needs clang-19)\nSUMS:\n%s\nfiles:\n%s",
			strings.TrimSpace(string(got)), want)
	}
}
