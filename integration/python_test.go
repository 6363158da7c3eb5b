package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The Python client, with its own tests, against a pipeline.
func TestPythonClient(t *testing.T) {
	python := pythonWith(t, "nats, msgpack, numpy, pytest")
	url := serve(t, t.TempDir()).URL
	tests := exec.Command(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
	tests.Dir = filepath.Join(root, "pkg/client/python")
	tests.Env = append(os.Environ(), "MEANDER_URL="+url, "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1")
	out, err := tests.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// pythonWith is a Python that can import what the client needs; the test is skipped
// where there is none.
func pythonWith(t *testing.T, needs string) string {
	t.Helper()
	python := os.Getenv("MEANDER_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.Command(python, "-c", "import "+needs).CombinedOutput(); err != nil {
		t.Skipf("the Python client is not tested: %s lacks some of %s (pip install nats-py msgpack numpy pytest; MEANDER_PYTHON names another Python): %s", python, needs, out)
	}
	return python
}
