package integration_test

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// The Python client, with its own tests, against a pipeline.
func TestPythonClient(t *testing.T) {
	const needs = "nats, msgpack, numpy, pytest"
	python := os.Getenv("MEANDER_PYTHON")
	if python == "" {
		python = "python3"
	}
	if out, err := exec.Command(python, "-c", "import "+needs).CombinedOutput(); err != nil {
		t.Skipf("the Python client is not tested: %s lacks some of %s (pip install nats-py msgpack numpy pytest; MEANDER_PYTHON names another Python): %s", python, needs, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	up := exec.Command(program(t, "meander"), "up", "--model", "synthetic", "--store", filepath.Join(t.TempDir(), "store"), "--listen", addr)
	up.Stderr = os.Stderr
	if testing.Verbose() {
		up.Stdout = os.Stdout
	}
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = up.Process.Signal(os.Interrupt)
		_ = up.Wait()
	})
	eventually(t, 20*time.Second, "the pipeline", func() error {
		nc, err := nats.Connect("nats://" + addr)
		if err == nil {
			nc.Close()
		}
		return err
	})
	tests := exec.Command(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
	tests.Dir = filepath.Join(root, "pkg/client/python")
	tests.Env = append(os.Environ(), "MEANDER_URL=nats://"+addr, "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1")
	out, err := tests.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
