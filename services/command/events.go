package command

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// latestRun is the run of the newest trajectory, else of the newest prompt.
func latestRun(ctx context.Context, b *bus.Bus) (schemas.Run, error) {
	for _, stream := range []string{schemas.StreamTrajectories, schemas.StreamPrompts} {
		m, err := b.Newest(ctx, stream)
		if err == nil {
			return runOfSubject(m.Subject), nil
		}
	}
	return "", usage(fmt.Errorf("nothing is stored yet; make a rollout first: meander run 'a red sign that says \"OPEN\"'"))
}

// runOfSubject is the run token of an event's subject.
func runOfSubject(subject string) schemas.Run {
	run, _ := schemas.RunOf(subject)
	return run
}
