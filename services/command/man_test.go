package command

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every command has a page, and equal programs write equal pages.
func TestMan(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	dir := t.TempDir()
	for _, folder := range []string{"one", "two"} {
		expect(t, exitOK, "", "man", filepath.Join(dir, folder, "man1"))
	}
	pages, err := filepath.Glob(filepath.Join(dir, "one", "man1", "*.1"))
	if err != nil || len(pages) < 50 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	for _, page := range pages {
		one, err := os.ReadFile(page)
		two, err2 := os.ReadFile(filepath.Join(dir, "two", "man1", filepath.Base(page)))
		if err != nil || err2 != nil || string(one) != string(two) || !strings.Contains(string(one), `"1" "Jan 1970"`) {
			t.Errorf("%s: %v, %v; want the same page twice, of that date", page, err, err2)
		}
	}
	run, err := os.ReadFile(filepath.Join(dir, "one", "man1", "meander-run.1"))
	if err != nil || !strings.Contains(string(run), "--group-size") || strings.Contains(string(run), "Auto generated") {
		t.Errorf("meander-run.1: %v\n%s", err, run)
	}
	expect(t, exitFailed, "man: ", "man", filepath.Join(dir, "one", "man1", "meander.1"))
	expect(t, exitUsage, "must be 'meander man FOLDER'", "man")
}
