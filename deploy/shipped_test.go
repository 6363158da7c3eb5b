package deploy_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/deploy"
)

// A model that ships is a folder with the bytes of the repository, whatever somebody has done to it since.
func TestFolder(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, name := range []string{"signs", "sums", "signs-flow-grpo"} {
		dir, err := deploy.Folder(name)
		if err != nil || filepath.Base(dir) != name {
			t.Fatalf("%s: %q, %v", name, dir, err)
		}
		found := 0
		err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			found++
			of, _ := filepath.Rel(dir, path)
			want, err := os.ReadFile(filepath.Join("models", name, of))
			if err != nil {
				return err
			}
			if have, err := os.ReadFile(path); err != nil || !bytes.Equal(have, want) {
				t.Errorf("%s: %v; want the bytes of the repository", path, err)
			}
			return os.WriteFile(path, want[:len(want)/2], 0o600) // as a disk that was full leaves it
		})
		if err != nil || found == 0 {
			t.Fatalf("%s: %d files, %v", name, found, err)
		}
		again, err := deploy.Folder(name)
		if differ, err2 := deploy.Differing(filepath.Dir(again), deploy.Models()); err != nil || err2 != nil ||
			len(differ) > 0 {
			t.Errorf("%s: %v, %v; %q are not mended", name, err, err2, differ)
		}
	}
}

func TestFolder_none(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, name := range []string{"", ".", "..", "../models", "/signs", "nobody", "signs/README.md", "SIGNS"} {
		if dir, err := deploy.Folder(name); dir != "" || err != nil {
			t.Errorf("%q: %q, %v; want none", name, dir, err)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", file)
	if _, err := deploy.Folder("signs"); err == nil || !strings.Contains(err.Error(), "set XDG_CACHE_HOME") {
		t.Errorf("a cache that is a file: %v; want what to do", err)
	}
}
