package integration_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// The worker in Python that ships as an example answers a model like the built-in interaction.
func TestTurns_PythonExample(t *testing.T) {
	t.Parallel()
	python := pythonWith(t, "nats, msgpack, blake3, numpy")
	w := newWorld(t, func(o *natsd.Options) { o.Listen = "127.0.0.1:0" })
	services := defaults()
	services.sampler.Model = sumsFolder(t)
	for _, name := range stages {
		w.Serve(t, services.run(name))
	}
	listensIn(t, w, "tutor", python, "examples/interaction.py", "--url", w.Server.ClientURL())
	for _, name := range []string{"tutor", "sums"} {
		_, err := w.client.Publish(t.Context(), schemas.Run(name), &schemas.Prompt{
			UID: "g", Prompt: "512-798=?", Seed: new(int64(3)), GroupSize: new(int64(16)),
			Text: &schemas.Text{Interaction: &schemas.Interaction{Name: name}}, Reward: []schemas.RewardSpec{{Name: "turns"}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	w.advantages(t, "tutor", 1)
	w.advantages(t, "sums", 1)
	several := 0
	for i := range int64(16) {
		mine, builtin := w.trajectory(t, "tutor", "g", i).Text, w.trajectory(t, "sums", "g", i).Text
		if len(mine.Turns) != len(builtin.Turns) || mine.Conversation != builtin.Conversation ||
			mine.Answer() != builtin.Answer() {
			t.Errorf("sample %d: %+v, built in %+v", i, mine.Turns, builtin.Turns)
		}
		if len(mine.Turns) > 2 {
			several++
		}
	}
	if several == 0 {
		t.Error("no conversation has several turns; take another seed")
	}
}

// listensIn starts a worker of an interaction in Python, from the folder of the client, and waits until it listens.
func listensIn(t *testing.T, w *world, name, python string, args ...string) {
	t.Helper()
	c := exec.Command(python, args...)
	c.Dir = filepath.Join(root, "pkg/client/python")
	c.Env, c.Stderr = append(os.Environ(), "PYTHONPATH=.", "PYTHONDONTWRITEBYTECODE=1",
		"MEANDER_NATS_TOKEN="+w.Options.Token), os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil ||
		!strings.Contains(line, "listening on mdr.v1.interact."+name) {
		t.Fatalf("worker says %q, %v", line, err)
	}
}
