package integration_test

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// otherWord is a word for something that has a name already, which CONTRIBUTING.md says.
type otherWord struct {
	word *regexp.Regexp
	name string
	in   string // folder; empty: everywhere
}

var otherWords = []otherWord{
	{regexp.MustCompile(`(?i)\bpictures?\b`), "image", ""},
	{regexp.MustCompile(`(?i)\bsigns? of life\b`), "heartbeat", ""},
	{regexp.MustCompile(`(?i)\bverdict(Retry|Refused|Full|Fatal)\b`), "class of an error", ""},
	{regexp.MustCompile(`(?i)\blanes?\b`), "pool; a lane is the request queue of a model", "services/reward/"},
	{regexp.MustCompile(`--plan\b`), "--dry-run; a plan is the sampling plan", ""},
	{regexp.MustCompile(`--validate\b`), "--validation", ""},
}

// privateWords need the code to be understood, or are out of use. They stand nowhere: not in comments, help or
// documents.
var privateWords = map[string]string{
	`owe[sd]?`: "lack", `ripe`: "ready to close", `vouch(es|ed)?`: "confirm", `of whom`: "whose",
	`the word to`: "the message to", `whosoever`: "anyone", `hitherto`: "so far", `whither`: "where to", `thereof`: "of it",
	`lest`: "so that ... not", `be they`: "whether they are",
	`reins`: "controls", `kin`: "families", `heed(s|ed|ing)?`: "obey, or on control", `unborn`: "pending",
	`seats?`: "worker, or slot", `erryoung`: "errPolicyPending", `what is none`: "what is invalid",
}

func TestDocs_OneWordForOneThing(t *testing.T) {
	sequential(t)
	kinds := []string{".go", ".md", ".py", ".yaml", ".yml"}
	// What says the other words on purpose; tests of readers have lanes of their own.
	spared := []string{"CHANGELOG.md", "integration/words_test.go", "services/command/help_test.go"}
	private := regexp.MustCompile(`(?i)\b(` + strings.Join(slices.Sorted(maps.Keys(privateWords)), "|") + `)\b`)
	walkFiles(t, func(name string) {
		if !slices.Contains(kinds, path.Ext(name)) || slices.Contains(spared, name) ||
			strings.Contains(name, "testdata/") {
			return
		}
		text := read(t, name)
		for _, at := range private.FindAllStringIndex(text, 1) {
			t.Errorf("%s:%d: %q is a private word; say %s", name, 1+strings.Count(text[:at[0]], "\n"),
				text[at[0]:at[1]],
				plain(text[at[0]:at[1]]))
		}
		for _, o := range otherWords {
			if o.in != "" && (!strings.HasPrefix(name, o.in) || strings.HasSuffix(name, "_test.go")) {
				continue
			}
			if at := o.word.FindStringIndex(text); at != nil {
				t.Errorf("%s:%d: %q; must be %s (see the words in CONTRIBUTING.md)", name,
					1+strings.Count(text[:at[0]], "\n"), text[at[0]:at[1]], o.name)
			}
		}
	})
}

// plain is what to say instead of a private word.
func plain(word string) string {
	for private, say := range privateWords {
		if regexp.MustCompile(`(?i)^(` + private + `)$`).MatchString(word) {
			return say
		}
	}
	return "it plainly"
}
