package integration_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Subjects are put together and taken apart in package schemas alone, so that nobody
// miscounts their tokens.
func TestContract_SubjectsAreMadeInSchemas(t *testing.T) {
	files := 0
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "schemas/") {
			return
		}
		files++
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, made := range []string{"schemas.Prefix", `"mdr.v1`, `"$KV.`, `Split(schemas.MessageID(`} {
			if strings.Contains(string(data), made) {
				t.Errorf("%s has %s: a subject is made or read there; use schemas.Address, or a function of schemas that returns it", name, made)
			}
		}
	})
	if files < 100 {
		t.Fatalf("found %d files; the walk is broken", files)
	}
}
