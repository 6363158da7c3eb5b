package modeltest

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// StrangeKey is the key that Unread puts into files.
const StrangeKey = "strange_key"

// Unread puts a key that nothing knows into each object of each JSON file of a model's folder, one at a time, and fails
// where open does not refuse the folder with an error that names the key. free are the places, file:path, below which
// keys change nothing, with the reason; one that ends in $ is free itself, and not what is below.
func Unread(t *testing.T, dir string, free map[string]string, open func(dir string) error) {
	t.Helper()
	tried := 0
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".json" {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var whole any
		if err := json.Unmarshal(data, &whole); err != nil {
			return err
		}
		file, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		objects(filepath.ToSlash(file)+":", whole, func(place string, object map[string]any) {
			for at := range free {
				if exact, ok := strings.CutSuffix(at, "$"); strings.HasPrefix(place, at) || ok && place == exact {
					return
				}
			}
			object[StrangeKey] = 1
			defer delete(object, StrangeKey)
			changed, err := json.Marshal(whole)
			if err != nil {
				t.Fatal(err)
			}
			tried++
			copied := filepath.Join(t.TempDir(), filepath.Base(dir))
			copyFolder(t, dir, copied, file, changed)
			if err := open(copied); err == nil || !strings.Contains(err.Error(), StrangeKey) {
				t.Errorf("%s: a key that nothing knows: %v; want an error that names it", place, err)
			}
		})
		return nil
	})
	if err != nil || tried == 0 {
		t.Fatalf("%d keys tried in %s: %v", tried, dir, err)
	}
}

// objects calls f for each object of a document; of the elements of a list, for the first.
func objects(place string, node any, f func(place string, object map[string]any)) {
	switch n := node.(type) {
	case []any:
		for _, item := range n[:min(1, len(n))] {
			objects(place+"[]", item, f)
		}
	case map[string]any:
		f(place, n)
		for key, value := range n {
			objects(place+"."+key, value, f)
		}
	}
}

// copyFolder copies a folder with other contents of one file; large files become links.
func copyFolder(t *testing.T, from, to, file string, contents []byte) {
	t.Helper()
	err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		switch target := filepath.Join(to, name); {
		case entry.IsDir():
			return os.MkdirAll(target, 0o700)
		case name == file:
			return os.WriteFile(target, contents, 0o600)
		default:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return os.WriteFile(target, data, 0o600)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}
