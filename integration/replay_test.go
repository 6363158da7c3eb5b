package integration_test

import (
	"bufio"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// A viewer plays a run to stdout, and on a server of his own. On the pipeline's he may not publish, and is told what to
// do; the admin may.
func TestReplay_Viewer(t *testing.T) {
	t.Parallel()
	g := servers()["up"](t)
	meander(t, t.TempDir(), append([]string{"run", "--run", "a", "-n", "2", "--steps", "3", "--out", "-", "a red fox"},
		g.flags("trainer")...)...).must(t, 0)
	play := func(user string, args ...string) output {
		return meander(t, t.TempDir(), append(append([]string{"runs", "replay", "a", "--speed", "max"}, args...),
			g.flags(user)...)...)
	}
	if out := play("viewer").must(t, 0); strings.Count(out.stdout, "  step ") != 6 ||
		!strings.Contains(out.stdout, "  advantage ") {
		t.Errorf("a viewer sees\n%s%s", out.stdout, out.stderr)
	}
	if out := play("viewer", "--subject", "replay").must(t, 1); !strings.Contains(out.stderr, "ermissions") ||
		!strings.Contains(out.stderr, "a server of your own with --to") {
		t.Errorf("publishing by a viewer: %s", out.stderr)
	}
	own := bustest.Bare(t, bustest.TCP)
	heard, err := own.Conn().SubscribeSync("replay.>")
	if err == nil {
		err = own.Conn().Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	play("viewer", "--subject", "replay", "--to", own.Server.ClientURL()).must(t, 0)
	if m, err := heard.NextMsgWithContext(t.Context()); err != nil || m.Subject != "replay.prompt.a" {
		t.Errorf("%+v, %v", m, err)
	}
	admin := g.user(t, "admin")
	heard, err = admin.nc.SubscribeSync("replay.advantage.>")
	if err == nil {
		err = admin.nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	play("admin", "--subject", "replay").must(t, 0)
	if m, err := heard.NextMsgWithContext(t.Context()); err != nil || m.Subject != "replay.advantage.a.0000-a-red-fox" {
		t.Errorf("%+v, %v", m, err)
	}
	// A trainer may not read controls.
	meander(t, t.TempDir(), append([]string{"cancel", "a"}, g.flags("admin")...)...).must(t, 0)
	if out := play("trainer").must(t, 0); !strings.Contains(out.stderr, "left out: 1 event of MDR_CONTROL") ||
		!strings.Contains(out.stdout, "  advantage ") {
		t.Errorf("a trainer: %s%s", out.stderr, out.stdout)
	}
}

// The reader of the guide reads a run that is played.
func TestReplay_Document(t *testing.T) {
	t.Parallel()
	python := pythonWith(t, "nats, msgpack")
	dir := t.TempDir()
	url := serve(t, dir).URL
	meander(t, dir, "run", "--run", "night", "-n", "2", "--steps", "3", "--out", "-", "a red fox").must(t, 0)
	block := regexp.MustCompile("(?ms)^<!-- run by: TestReplay_Document " +
		"-->\n```python\n(.*?)^```").FindStringSubmatch(read(t, "deploy/guide/publish-and-subscribe.md"))
	if block == nil {
		t.Fatal("the page has no reader")
	}
	reader := exec.Command(python, "-c", strings.ReplaceAll(block[1], "nats://127.0.0.1:4222", url))
	reader.Stderr = os.Stderr
	stdout, err := reader.StdoutPipe()
	if err == nil {
		err = reader.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reader.Process.Kill() })
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening") {
		t.Fatalf("the reader says %q, %v", lines.Text(), lines.Err())
	}
	meander(t, dir, "runs", "replay", "night", "--subject", "replay").must(t, 0)
	var said []string
	for lines.Scan() {
		said = append(said, lines.Text())
	}
	if err := reader.Wait(); err != nil || len(said) != 1 || !strings.Contains(said[0], "0000-a-red-fox [") {
		t.Errorf("%v, %q", err, said)
	}
}
