package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The examples of schemas/README.md do what they say against a pipeline.
func TestReading(t *testing.T) {
	t.Parallel()
	url := serve(t, t.TempDir()).URL
	meander(t, t.TempDir(), "publish", "--nats", url, "--run", "demo", "-n", "2", "--steps", "4", "--sde-steps", "1,2", "a red fox").must(t, 0)
	out := goExample(t, "schemas/README.md", "run", url)
	// 2 samples x 2 stochastic steps, each between states of 16 tokens x 64 channels
	if lines := strings.Split(strings.TrimSpace(out), "\n"); len(lines) != 4 || !strings.HasSuffix(lines[0], " 1024 1024") {
		t.Errorf("the Go example prints\n%s", out)
	}
	t.Run("python", func(t *testing.T) {
		python := pythonWith(t, "nats, msgpack, numpy")
		block := regexp.MustCompile("(?ms)^```python\n(import.*?)^```").FindStringSubmatch(read(t, "schemas/README.md"))
		if block == nil {
			t.Fatal("schemas/README.md has no Python example")
		}
		c := exec.Command(python, "-c", block[1])
		c.Dir = t.TempDir()
		client, err := filepath.Abs(filepath.Join(root, "pkg/client/python"))
		if err != nil {
			t.Fatal(err)
		}
		c.Env = append(os.Environ(), "MEANDER_URL="+url, "PYTHONPATH="+client, "PYTHONDONTWRITEBYTECODE=1")
		out, err := c.CombinedOutput()
		if err != nil || strings.Count(string(out), "(16, 64)") != 4 {
			t.Errorf("%v\n%s", err, out)
		}
	})
}
