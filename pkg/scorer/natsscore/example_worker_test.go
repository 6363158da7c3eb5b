package natsscore_test

import (
	"bufio"
	"context"
	"errors"
	"image"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/pkg/scorer"
)

// patience is for a busy machine: nothing takes that long otherwise.
const patience = 2 * time.Minute

// exampleWorker starts the worker in Python that ships as an example, on a server of its own, and waits until it
// listens. What it says on stderr goes to says.
func exampleWorker(t *testing.T, says io.Writer) (*natsd.Server, *exec.Cmd) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil || exec.CommandContext(t.Context(), python, "-c", "import nats, msgpack, PIL").Run() != nil {
		t.Skip("needs python3 with nats-py, msgpack and pillow (pip install -r deploy/scorers/requirements.txt): the " +
			"example worker did not run")
	}
	server, err := natsd.Start(context.Background(),
		natsd.Options{StoreDir: t.TempDir(), Listen: "127.0.0.1:0", Token: "s3cret"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	worker := exec.CommandContext(context.WithoutCancel(t.Context()), python,
		filepath.Join("..", "..", "..", "deploy", "scorers", "worker.py"),
		"--url", server.ClientURL(), "--name", "pickscore")
	worker.Env, worker.Stderr = append(os.Environ(), "MEANDER_NATS_TOKEN=s3cret"), says
	out, err := worker.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = worker.Process.Kill() }) // of a test that failed
	line, _ := bufio.NewReader(out).ReadString('\n')
	if strings.TrimSpace(line) != "listening on "+subject {
		t.Errorf("the worker says %q", line)
	}
	return server, worker
}

// A worker whose server is away ends as cleanly, and says so in one line.
func TestExampleWorker_ServerIsAway(t *testing.T) {
	says, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer says.Close()
	server, worker := exampleWorker(t, write)
	_ = write.Close()
	server.Close()
	lines := bufio.NewScanner(says)
	for lines.Scan() && !strings.Contains(lines.Text(), "Connect call failed") { // it has lost the server, and tries
	}
	if err := worker.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	var last []string
	for lines.Scan() {
		if !strings.Contains(lines.Text(), "Connect call failed") {
			last = append(last, lines.Text())
		}
	}
	if err := worker.Wait(); err != nil || len(last) != 1 || !strings.HasPrefix(last[0], "stopped while NATS is away") {
		t.Errorf("the worker ends with %v, and says\n%s", err, strings.Join(last, "\n"))
	}
}

// The worker in Python that ships as an example reads our requests, answers them, and
// leaves cleanly.
func TestExampleWorker(t *testing.T) {
	server, worker := exampleWorker(t, os.Stderr)
	nc, err := nats.Connect("", nats.InProcessServer(server.InProcess()), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	cfg := config()
	cfg.Timeout = patience
	s := open(t, nc, cfg)
	red := image.NewNRGBA(image.Rect(0, 0, 200, 100))
	for i := 0; i < len(red.Pix); i += 4 {
		red.Pix[i], red.Pix[i+3] = 255, 255
	}
	// One colour has no variance: 0.3 * |(255-0, (255+0)/2-0)| / 100.
	r := s.ScoreDetail(t.Context(), scorer.Input{Media: media.Of(red), Prompt: "red"})
	if want := 0.3 * math.Hypot(255, 127.5) / 100; r.Err != nil || math.Abs(r.Value-want) > 1e-12 ||
		r.Detail != "colourfulness 86" {
		t.Errorf("red: %+v, want %v", r, want)
	}
	cfg.Image = "jpeg"
	if v, err := open(t, nc, cfg).Score(t.Context(),
		scorer.Input{Media: media.Of(image.NewNRGBA(image.Rect(0, 0, 16, 16)))}); err != nil || v != 0 {
		t.Errorf("black as JPEG: %v, %v; want 0", v, err)
	}
	wide := image.NewNRGBA(image.Rect(0, 0, 9000, 1))
	if _, err := s.Score(t.Context(), scorer.Input{Media: media.Of(wide)}); err == nil ||
		errors.Is(err, scorer.ErrUnavailable) || !strings.Contains(err.Error(), "at most 8192 a side") {
		t.Errorf("an image that the worker refuses: %v", err)
	}
	if err := worker.Process.Signal(os.Interrupt); err != nil {
		t.Error(err)
	}
	if err := worker.Wait(); err != nil {
		t.Errorf("the worker ends with %v, want a clean exit", err)
	}
	if _, err := s.Score(t.Context(), scorer.Input{Media: media.Of(red)}); !errors.Is(err, scorer.ErrUnavailable) {
		t.Errorf("after it left: %v", err)
	}
}
