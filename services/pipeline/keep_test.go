package pipeline_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
)

// A sampler whose worker comes back with another model begins again, as long as it takes, and the pipeline goes on:
// readiness and presence say which lane waits, why and until when.
func TestRun_KeepsItsSampler(t *testing.T) {
	t.Parallel()
	const class = "StableDiffusion3Pipeline"
	plane, dir := bustest.New(t), remotetest.Folder(t, class, 1)
	w, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	var mu sync.Mutex
	checks := map[string]func() error{}
	c := pipeline.DefaultConfig()
	c.Keep, c.Sampler.Model, c.Sampler.Engine, c.Sampler.Lane = true, dir, "torch="+address, "lane"
	c.Health = func(name string, check func() error) {
		mu.Lock()
		defer mu.Unlock()
		if checks[name] != nil {
			t.Errorf("two conditions %s", name)
		}
		checks[name] = check
	}
	plane.Serve(t, func(ctx context.Context, b *bus.Bus) error { return pipeline.Run(ctx, b, c, zerolog.Nop()) })
	made := func(run schemas.Run) {
		t.Helper()
		p := &schemas.Prompt{UID: "u", Prompt: "red", GroupSize: new(int64(2))}
		if r, err := client.New(plane.Bus).Publish(t.Context(), run, p); err != nil || !r.Accepted {
			t.Fatalf("%+v, %v", r, err)
		}
		ctx, moved := bustest.WhileItMoves(t)
		for a, err := range client.New(plane.Bus).Groups(ctx, run, "") {
			moved()
			if err != nil || a.Status != schemas.StatusComplete {
				t.Errorf("%s: %+v, %v", run, a, err)
			}
			break
		}
	}
	made("before")

	socket := strings.TrimPrefix(address, "unix:")
	w.Stop()
	other, err := remotetest.New(remotetest.Options{Dir: remotetest.Folder(t, class, 2)})
	if err == nil {
		err = other.Listen("unix", socket)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &schemas.Prompt{UID: "w", Prompt: "blue", GroupSize: new(int64(2))}
	if r, err := client.New(plane.Bus).Publish(t.Context(), "before", p); err != nil || !r.Accepted {
		t.Fatalf("%+v, %v", r, err)
	}
	bustest.Until(t, "the lane is said to wait", func() error {
		mu.Lock()
		sampler := checks["sampler"]
		mu.Unlock()
		present, err := plane.Present(t.Context())
		if err != nil {
			return err
		}
		for _, at := range present {
			if at.Service == schemas.ServiceStarting && at.Lane == "lane" &&
				strings.Contains(at.Waiting, "other weights") &&
				sampler() != nil && strings.Contains(sampler().Error(),
				"lane lane is not served; the next try is at 20") {
				return nil
			}
		}
		return errors.New("not said")
	})
	other.Stop()
	if err := w.Listen("unix", socket); err != nil {
		t.Fatal(err)
	}
	made("after")
	bustest.Until(t, "it is ready", func() error {
		mu.Lock()
		defer mu.Unlock()
		return errors.Join(checks["sampler"](), checks["engine"]())
	})
}
