package integration_test

import (
	"context"
	"maps"
	"slices"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/reward"
	"github.com/meander-rl/meander/services/sampler"
)

// world is a whole pipeline in this process: an event plane and the services.
type world struct {
	*bustest.Plane
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

// run runs one of the services.
func (c config) run(name string) func(context.Context, *bus.Bus) error {
	return func(ctx context.Context, b *bus.Bus) error {
		log := zerolog.Nop()
		switch name {
		case "intake":
			return intake.Run(ctx, c.intake, b, log)
		case "sampler":
			return sampler.Run(ctx, c.sampler, b, log)
		case "reward":
			return reward.Run(ctx, c.reward, b, log)
		}
		return advantage.Run(ctx, c.advantage, b, log)
	}
}

// stages in the order in which data flows.
var stages = []string{"intake", "sampler", "reward", "advantage"}

// newWorld has an event plane and no services yet. In the short form the test is skipped.
func newWorld(t *testing.T, change ...func(*natsd.Options)) *world {
	t.Helper()
	skipShort(t)
	p := bustest.New(t, change...)
	return &world{Plane: p, client: client.New(p.Bus)}
}

// start runs a pipeline for the length of the test.
func start(t *testing.T, change func(*config)) *world {
	t.Helper()
	w := newWorld(t)
	c := defaults()
	if change != nil {
		change(&c)
	}
	for _, name := range stages {
		w.Serve(t, c.run(name))
	}
	return w
}

// advantages waits for n groups of a run.
func (w *world) advantages(t *testing.T, run schemas.Run, n int) map[schemas.UID]*schemas.Advantage {
	t.Helper()
	return advantages(t, w.client, run, n)
}

func advantages(t *testing.T, c *client.Client, run schemas.Run, n int) map[schemas.UID]*schemas.Advantage {
	t.Helper()
	ctx, moved := bustest.WhileItMoves(t)
	out := map[schemas.UID]*schemas.Advantage{}
	for g, err := range c.Groups(ctx, run, "") {
		if err != nil {
			t.Fatalf("advantages: %v", err)
		}
		moved()
		if out[g.UID] = &g.Advantage; len(out) == n {
			return out
		}
	}
	t.Fatalf("%d groups of run %s closed, want %d: %v", len(out), run, n, slices.Collect(maps.Keys(out)))
	return nil
}
