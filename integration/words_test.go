package integration_test

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// otherWords are words for what has a name already, which CONTRIBUTING.md says.
var otherWords = []struct {
	word *regexp.Regexp
	name string
	in   string // folder; empty: everywhere
}{
	{regexp.MustCompile(`(?i)\bpictures?\b`), "image", ""},
	{regexp.MustCompile(`(?i)\bsigns? of life\b`), "heartbeat", ""},
	{regexp.MustCompile(`(?i)\bverdict(Retry|Refused|Full|Fatal)\b`), "class of an error", ""},
	{regexp.MustCompile(`(?i)\blanes?\b`), "pool; a lane is the request queue of a model", "services/reward/"},
	{regexp.MustCompile(`--plan\b`), "--dry-run; a plan is the sampling plan", ""},
	{regexp.MustCompile(`--validate\b`), "--validation", ""},
}

func TestDocs_OneWordForOneThing(t *testing.T) {
	sequential(t)
	kinds := []string{".go", ".md", ".py", ".yaml", ".yml"}
	// What says the other words on purpose; tests of readers have lanes of their own.
	spared := []string{"CHANGELOG.md", "integration/words_test.go", "services/command/help_test.go"}
	walkFiles(t, func(name string) {
		if !slices.Contains(kinds, path.Ext(name)) || slices.Contains(spared, name) || strings.Contains(name, "testdata/") {
			return
		}
		text := read(t, name)
		for _, o := range otherWords {
			if o.in != "" && (!strings.HasPrefix(name, o.in) || strings.HasSuffix(name, "_test.go")) {
				continue
			}
			if at := o.word.FindStringIndex(text); at != nil {
				t.Errorf("%s:%d: %q; must be %s (see the words in CONTRIBUTING.md)", name, 1+strings.Count(text[:at[0]], "\n"), text[at[0]:at[1]], o.name)
			}
		}
	})
}
