package integration_test

import (
	"bufio"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// The commands and the Python example of the guide's page on teachers do what it says.
func TestTeachers_Guide(t *testing.T) {
	t.Parallel()
	const page = "deploy/guide/teachers.md"
	python := pythonWith(t, "nats, msgpack, blake3, numpy")
	dir := t.TempDir()
	url := serveModel(t, dir, sums(t)).URL
	meander(t, dir, "publish", "--nats", url, "--run", "demo", "-n", "4", "347+58=?").must(t, 0)
	teacher := exec.Command(program(t, "meander"), "teacher", "--nats", url, "--model", sums(t), "--name", "reference")
	teacher.Dir = dir
	says, err := teacher.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := teacher.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(says)
	for line := ""; !strings.Contains(line, "teacher reference answers on mdr.v1.teacher.reference"); {
		if line, err = lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	out, err := runPythonExample(t, python, page, url)
	if err != nil || !regexp.MustCompile(`^KL 0\.0\nsums \(\d+, 3\)\n$`).Match(out) {
		t.Errorf("%v\n%s", err, out)
	}
	if err := teacher.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	rest, _ := lines.ReadString(0)
	if err := teacher.Wait(); err != nil {
		t.Errorf("stopped with %v: %s", err, rest)
	}
}
