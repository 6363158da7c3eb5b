package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/meander-rl/meander/schemas"
)

// SweepSample removes the stored steps of a sample that its trajectory t does not name: those of superseded attempts.
// It returns the number of messages removed, also beside an error.
func (b *Bus) SweepSample(ctx context.Context, t *schemas.Trajectory) (uint64, error) {
	subjects, err := b.Subjects(ctx, schemas.StreamSteps,
		schemas.StepsFilter(t.Run, t.UID, strconv.FormatInt(t.SampleIndex, 10), t.Stage))
	if err != nil {
		return 0, fmt.Errorf("sweep sample: %w", err)
	}
	named, attempts := map[string]bool{}, map[string]bool{}
	for i := range t.Steps {
		named[t.StepSubject(i)] = true
	}
	for _, attempt := range t.Attempts() {
		attempts[attempt] = true
	}
	removed, gone := uint64(0), map[string]bool{}
	purge := func(filter string) error {
		if gone[filter] {
			return nil
		}
		gone[filter] = true
		n, err := b.PurgeSubject(ctx, schemas.StreamSteps, filter)
		removed += n
		return err
	}
	for subject := range subjects {
		a, _ := schemas.ParseSubject(subject)
		step := subject
		if a.Part != "" {
			step = strings.TrimSuffix(subject, "."+a.Part)
		}
		if named[step] {
			continue
		}
		var err error
		if attempts[a.Attempt] {
			err = purge(subject)
		} else {
			err = purge(strings.TrimSuffix(step, a.Step) + ">") // all of the attempt at once
		}
		if err != nil {
			return removed, fmt.Errorf("sweep sample: %w", err)
		}
	}
	return removed, nil
}

// SweepDead removes the steps of attempts that no trajectory names, to make space. Call it only when no sampler works
// on any sample: a sample without a trajectory is then made again from its first step.
func (b *Bus) SweepDead(ctx context.Context) error {
	subjects, err := b.Subjects(ctx, schemas.StreamSteps, schemas.StepsFilter("*", "*", "*", "*"))
	if err != nil {
		return fmt.Errorf("sweep dead attempts: %w", err)
	}
	samples := map[string]schemas.Address{}
	for subject := range subjects {
		if a, ok := schemas.ParseSubject(subject); ok {
			samples[schemas.Address{
				Kind: schemas.KindTrajectory, Run: a.Run, UID: a.UID,
				Sample: a.Sample, Stage: a.Stage,
			}.Filter()] = a
		}
	}
	removed := uint64(0)
	for trajectory, a := range samples {
		n, err := b.sweepDeadSample(ctx, trajectory, a)
		if removed += n; err != nil {
			return fmt.Errorf("sweep dead attempts: %w", err)
		}
	}
	if removed > 0 {
		b.log.Warn().Uint64("messages",
			removed).Msg("removed the steps of attempts that ended without a trajectory, to make room")
	}
	return nil
}

// sweepDeadSample removes the steps of dead attempts at one sample: all of its steps when it has no valid trajectory.
// trajectory is the subject of that, a the address of a step.
func (b *Bus) sweepDeadSample(ctx context.Context, trajectory string, a schemas.Address) (uint64, error) {
	var t schemas.Trajectory
	m, err := b.Last(ctx, schemas.StreamTrajectories, trajectory)
	if err == nil && Fits(m, &t) == nil {
		return b.SweepSample(ctx, &t)
	}
	if err != nil && !errors.Is(err, ErrNotFound) {
		return 0, err
	}
	return b.PurgeSubject(ctx, schemas.StreamSteps, schemas.StepsFilter(a.Run, a.UID, a.Sample, a.Stage))
}
