package integration_test

import (
	"bufio"
	"bytes"
	"image"
	"image/png"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/integration/tools/harness"
)

// The Python client, with its own tests, against a pipeline.
func TestPythonClient(t *testing.T) {
	t.Parallel()
	python := pythonWith(t, "nats, msgpack, blake3, numpy, pytest")
	url := serve(t, t.TempDir()).URL
	tests := exec.Command(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
	tests.Dir = filepath.Join(root, "pkg/client/python")
	tests.Env = append(os.Environ(), "MEANDER_URL="+url, "MEANDER_BIN="+program(t, "meander"), "PYTHONPATH=.",
		"PYTHONDONTWRITEBYTECODE=1")
	out, err := tests.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// pythonWith is a Python that can import what is needed; the test is skipped where there
// is none.
func pythonWith(t *testing.T, needs string) string {
	t.Helper()
	python := os.Getenv("MEANDER_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.Command(python, "-c", "import "+needs).CombinedOutput(); err != nil {
		t.Skipf("Python is not tested: %s lacks some of %s (pip install 'nats-py[nkeys]' msgpack blake3 numpy pytest "+
			"pillow; MEANDER_PYTHON names another Python): %s", python, needs, out)
	}
	return python
}

// worker is the command of the example of a reward function, without the credentials of
// this process.
func worker(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	c := exec.Command(pythonWith(t, "nats, msgpack, PIL"),
		append([]string{filepath.Join(root, "deploy/scorers/worker.py")}, args...)...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MEANDER_NATS_") {
			c.Env = append(c.Env, v)
		}
	}
	return c
}

// startWorker runs the worker of nats:colour until the test ends; it listens when
// startWorker returns.
func startWorker(t *testing.T, args ...string) {
	t.Helper()
	startListening(t, worker(t, args...), "listening")
}

// startListening runs a worker until the test ends. Its first lines are what it says until it listens.
func startListening(t *testing.T, c *exec.Cmd, says ...string) {
	t.Helper()
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		if err := c.Wait(); err != nil {
			t.Errorf("worker: %v", err)
		}
	})
	lines := bufio.NewReader(out)
	for _, want := range says {
		if line, err := lines.ReadString('\n'); err != nil || !strings.Contains(line, want) {
			t.Fatalf("worker says %q, %v", line, err)
		}
	}
}

// The worker proves who it is with a file of credentials, and says so when that is not
// good enough, instead of trying for ever.
func TestPythonWorker_Credentials(t *testing.T) {
	t.Parallel()
	pythonWith(t, "nkeys")
	creds := "testdata/credentials/worker.creds"
	config, err := filepath.Abs("testdata/credentials/nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	url, _ := harness.Server(t, t.TempDir(), "-c", config)
	startWorker(t, "--url", url, "--creds", creds)
	nc, err := nats.Connect(url, nats.UserCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	var img bytes.Buffer
	if err := png.Encode(&img, image.NewGray(image.Rect(0, 0, 8, 8))); err != nil {
		t.Fatal(err)
	}
	request, err := msgpack.Marshal(map[string]any{
		"v": 1, "name": "colour", "prompt": "fog", "image": img.Bytes(),
		"image_format": "png",
	})
	if err != nil {
		t.Fatal(err)
	}
	m, err := nc.Request("mdr.v1.score.colour", request, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var reply map[string]any
	if err := msgpack.Unmarshal(m.Data, &reply); err != nil || reply["score"] != 0.0 {
		t.Errorf("%v, %v; a grey image scores 0", reply, err)
	}

	out, err := worker(t, "--url", url).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--creds") {
		t.Errorf("without credentials: %v\n%s", err, out)
	}
}
