package integration_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The examples of run and publish in their help work as they are: their plans have no prompt that would be refused.
// Those of documents are run by TestDocs_BlocksRun.
func TestExamples_Plan(t *testing.T) {
	sequential(t)
	t.Parallel()
	text := ""
	for _, command := range []string{"", "run", "publish", "verdict"} {
		args := []string{"--help"}
		if command != "" {
			args = []string{command, "--help"}
		}
		text += "\n" + meander(t, t.TempDir(), args...).must(t, 0).stdout
	}
	line := regexp.MustCompile(`(?m)^\s*(?:bin/)?meander ((?:run|publish) [^&\n]*?)\s*(?:#.*)?$`)
	repository, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	refused := regexp.MustCompile(`(?m)^refused|"refused":[1-9]`)
	tried := 0
	for _, m := range line.FindAllStringSubmatch(text, -1) {
		// What names a file, a folder or a server of one's own is not here.
		if regexp.MustCompile(`\bDIR\b|words\.csv|prompts\.(txt|jsonl)|--start-latents|--start-image|--nats|scorers\.yaml|ORG/NAME`).MatchString(m[1]) && !strings.Contains(m[1], "deploy/demo") {
			continue
		}
		tried++
		c := exec.Command("sh", "-c", program(t, "meander")+" "+m[1]+" --dry-run --store "+t.TempDir())
		c.Dir = repository
		if out, err := c.CombinedOutput(); err != nil || refused.Match(out) {
			t.Errorf("meander %s: %v\n%s", m[1], err, out)
		}
	}
	if tried < 6 {
		t.Errorf("tried %d examples; the pattern is broken", tried)
	}
}
