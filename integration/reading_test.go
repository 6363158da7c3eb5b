package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The examples of the README and of the guide's page on the contract do what they say against a pipeline.
func TestReading(t *testing.T) {
	t.Parallel()
	url := serve(t, t.TempDir()).URL
	meander(t, t.TempDir(), "publish", "--nats", url, "--run", "demo", "-n", "2", "--steps", "4", "--sde-steps", "1,2",
		"a red fox").must(t, 0)
	out := goExample(t, "deploy/guide/the-contract.md", "run", url)
	// 2 samples x 2 stochastic steps, each between states of 16 tokens x 64 channels
	if lines := strings.Split(strings.TrimSpace(out), "\n"); len(lines) != 4 ||
		!strings.HasSuffix(lines[0], " 1024 1024") {
		t.Errorf("the Go example prints\n%s", out)
	}
	for name, c := range map[string]struct {
		shape string
		times int
	}{
		"deploy/guide/the-contract.md": {"(16, 64)", 4},
		"README.md":                    {"(8, 10, 16, 64) (8, 10) (8, 10)", 1}, // 2 groups of 4 samples, 10 trained steps
	} {
		t.Run(name, func(t *testing.T) {
			python := pythonWith(t, "nats, msgpack, blake3, numpy")
			out, err := runPythonExample(t, python, name, url)
			if err != nil || strings.Count(string(out), c.shape) != c.times {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// runPythonExample runs the first Python example of a page that imports something, against the server at url, and
// returns what it prints.
func runPythonExample(t *testing.T, python, page, url string) ([]byte, error) {
	t.Helper()
	block := regexp.MustCompile("(?ms)^```python\n(import.*?)^```").FindStringSubmatch(read(t, page))
	if block == nil {
		t.Fatal("the page has no Python example")
	}
	run := exec.Command(python, "-c", strings.ReplaceAll(block[1], "nats://127.0.0.1:4222", url))
	run.Dir = t.TempDir()
	client, err := filepath.Abs(filepath.Join(root, "pkg/client/python"))
	if err != nil {
		t.Fatal(err)
	}
	run.Env = append(os.Environ(), "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1")
	return run.CombinedOutput()
}
