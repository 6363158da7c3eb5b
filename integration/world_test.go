package integration_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

// world is a whole pipeline in this process: an embedded server and the services.
type world struct {
	*bus.Bus
	client *client.Client
}

// config of the services of a world.
type config struct {
	intake    intake.Config
	sampler   sampler.Config
	reward    reward.Config
	advantage advantage.Config
}

// defaults are the services' own, with the closed-form model.
func defaults() config {
	c := config{intake.DefaultConfig(), sampler.DefaultConfig(), reward.DefaultConfig(), advantage.DefaultConfig()}
	c.sampler.Model = "synthetic"
	return c
}

// start runs a pipeline for the length of the test.
func start(t *testing.T, change func(*config)) *world {
	t.Helper()
	server, err := natsd.Start(t.Context(), natsd.Options{StoreDir: t.TempDir(), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	b, err := bus.Connect(t.Context(), bus.Config{InProcess: server.InProcess(), Name: "test"}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := defaults()
	if change != nil {
		change(&c)
	}
	ctx, cancel := context.WithCancel(context.Background())
	g, ctx := errgroup.WithContext(ctx)
	log := zerolog.Nop()
	g.Go(func() error { return intake.Run(ctx, c.intake, b, log) })
	g.Go(func() error { return sampler.Run(ctx, c.sampler, b, log) })
	g.Go(func() error { return reward.Run(ctx, c.reward, b, log) })
	g.Go(func() error { return advantage.Run(ctx, c.advantage, b, log) })
	t.Cleanup(func() {
		cancel()
		// Cancelled is what a service says that was stopped before it was up.
		if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("services: %v", err)
		}
		if err := b.Close(); err != nil {
			t.Errorf("close bus: %v", err)
		}
		if err := server.Close(); err != nil {
			t.Errorf("close server: %v", err)
		}
	})
	return &world{Bus: b, client: client.New(b)}
}

// whileItMoves is a context that ends when moved has not been called for as long as a test
// has patience.
func whileItMoves(t *testing.T) (ctx context.Context, moved func()) {
	ctx, cancel := context.WithCancel(t.Context())
	timer := time.AfterFunc(patience, cancel)
	t.Cleanup(func() { timer.Stop(); cancel() })
	return ctx, func() { timer.Reset(patience) }
}

// advantages waits for n groups of a run.
func (w *world) advantages(t *testing.T, run string, n int) map[string]*schemas.Advantage {
	t.Helper()
	ctx, moved := whileItMoves(t)
	out := map[string]*schemas.Advantage{}
	for g, err := range w.client.Groups(ctx, run, "") {
		if err != nil {
			t.Fatalf("advantages: %v", err)
		}
		moved()
		if out[g.UID] = &g.Advantage; len(out) == n {
			return out
		}
	}
	t.Fatalf("%d groups of run %s closed, want %d", len(out), run, n)
	return nil
}

// dead waits for n dead letters.
func (w *world) dead(t *testing.T, n int) []*schemas.Dead {
	t.Helper()
	ctx, moved := whileItMoves(t)
	var out []*schemas.Dead
	for m, err := range w.Read(ctx, schemas.StreamDead, []string{schemas.Prefix + "dead.>"}, bus.ReadOptions{Live: true}) {
		if err != nil {
			t.Fatalf("dead letters: %v", err)
		}
		moved()
		var d schemas.Dead
		if err := schemas.Decode(m.Data, &d); err != nil {
			t.Fatalf("dead letter: %v", err)
		}
		if out = append(out, &d); len(out) == n {
			return out
		}
	}
	t.Fatalf("%d dead letters, want %d", len(out), n)
	return nil
}
