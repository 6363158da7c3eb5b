package command

import (
	"context"
	"errors"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// latestRun returns the run for a command without --run: the latest one. An empty store is a usage error.
func latestRun(ctx context.Context, b *bus.Bus) (schemas.Run, error) {
	run, err := view.LatestRun(ctx, b)
	if errors.Is(err, bus.ErrNotFound) {
		err = usage(errors.New("nothing is stored yet; make a rollout first: meander run 'a red sign that says " +
			"\"OPEN\"'"))
	}
	return run, err
}
