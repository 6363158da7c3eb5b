package integration_test

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

// serveOtherLane starts a sampler of the lane synthetic beside the pipeline of a store.
func serveOtherLane(t *testing.T, dir string, info natsd.Info) {
	t.Helper()
	other := launch(t, dir, program(t, "meander-sampler"), "--model", "synthetic", "--nats-url", info.URL,
		"--nats-token",
		info.Token, "--health-addr", "")
	bustest.Until(t, "the other lane", func() error {
		if !strings.Contains(other.log.String(), "model ready") {
			return errors.New("not ready")
		}
		return nil
	})
}

// A worker that is killed six times, and a prompt that ends its worker each time, take neither the server nor another
// lane with them: the lane recovers, and of the prompt's group each sample has failed, with the reason.
func TestUp_FlappingWorker(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, "FluxPipeline", 1), t.TempDir()
	up := launch(t, dir, "env", "MEANDER_PYTHON="+harness.WorkerProgram(t),
		remotetest.FaultVariable+"="+remotetest.FaultPoison, program(t, "meander"), "up", "--model", folder, "--engine",
		"torch", "--listen", "127.0.0.1:0", "--metrics-addr", "127.0.0.1:0")
	info, health := running(t, dir), healthAddr(t, up.log)
	serveOtherLane(t, dir, info)
	b, err := bus.Connect(t.Context(), bus.Config{URL: info.URL, Token: info.Token, Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	c := client.New(b)
	group := func(run schemas.Run, lane, prompt string) {
		t.Helper()
		p := &schemas.Prompt{UID: "u", Prompt: prompt, GroupSize: new(int64(4))}
		p.Model = schemas.Lane(lane)
		if r, err := c.Publish(t.Context(), run, p); err != nil || !r.Accepted {
			t.Fatalf("%s: %+v, %v", run, r, err)
		}
	}
	complete := func(run schemas.Run) {
		t.Helper()
		if a := advantages(t, c, run, 1)["u"]; a.Status != schemas.StatusComplete {
			t.Errorf("%s: %+v", run, a)
		}
	}
	torch := filepath.Base(folder)
	for i := range 6 {
		var pids []int
		bustest.Until(t, "a worker", func() error {
			if pids = workers(t, up.log.String()); len(pids) <= i {
				return errors.New("none")
			}
			return nil
		})
		run := schemas.Run(fmt.Sprintf("killed-%d", i))
		group(run, torch, "red")
		if err := syscall.Kill(pids[i], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		complete(run)
		group("other-"+run, "synthetic", "red")
		complete("other-" + run)
	}

	group("good", torch, "blue")
	group("bad", torch, "poison")
	group("beside", torch, "green")
	complete("good")
	complete("beside")
	a := advantages(t, c, "bad", 1)["u"]
	if a.Status != schemas.StatusFailed {
		t.Fatalf("%+v; want a failed group", a)
	}
	for i := range int64(4) {
		tr, err := c.Trajectory(t.Context(), "bad", "u", i)
		if err != nil || tr.StopReason != schemas.StopFailed || !strings.Contains(tr.Error, "lost each time") ||
			!strings.Contains(tr.Error, "exit status 9") {
			t.Errorf("sample %d: %+v, %v", i, tr, err)
		}
	}
	if n := len(workers(t, up.log.String())); n > 7+4*5 {
		t.Errorf("%d workers were started; want a bounded number", n)
	}
	bustest.Until(t, "it is ready", func() error {
		r, err := http.Get("http://" + health + "/readyz")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return errors.New(r.Status)
		}
		return nil
	})
}
