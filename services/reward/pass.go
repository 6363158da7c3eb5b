package reward

import (
	"context"
	"fmt"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Pass scores stored trajectories again.
type Pass struct {
	Samples []PassSample
	// Change makes a trajectory one of the pass: its run, and its group with the new reward
	// functions and SourceRun, the run that made it.
	Change func(t *schemas.Trajectory)
	// Done is called after each sample, by one goroutine at a time; nil: not wanted.
	Done func()
}

// PassSample is one sample of a pass.
type PassSample struct {
	// Seq is the MDR_TRAJECTORIES sequence of its trajectory, or, for a sample that is Lost,
	// of another one of its group.
	Seq   uint64
	Index int64
	// Lost: no trajectory is stored, and its reward says so.
	Lost bool
}

// Rescore publishes the rewards of a pass, by the rules of the service, and returns when
// all are stored. Rewards that are there already stay.
func Rescore(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger, pass Pass) error {
	s, err := newService(ctx, cfg, b, log)
	if err != nil {
		return err
	}
	defer s.catalog.close()
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range done {
			if pass.Done != nil {
				pass.Done()
			}
		}
	}()
	g, work := errgroup.WithContext(log.WithContext(ctx))
	g.SetLimit(s.catalog.slots())
	for _, x := range pass.Samples {
		g.Go(func() error {
			if err := s.rescore(work, pass, x); err != nil {
				return err
			}
			done <- struct{}{}
			return nil
		})
	}
	err = g.Wait()
	close(done)
	<-ended
	return err
}

// rescore scores one sample of a pass, as often as it takes.
func (s *service) rescore(ctx context.Context, pass Pass, x PassSample) error {
	m, err := s.bus.Get(ctx, schemas.StreamTrajectories, x.Seq)
	if err != nil {
		return fmt.Errorf("read trajectory: %w", err)
	}
	t := &schemas.Trajectory{}
	if err := schemas.Decode(m.Data, t); err != nil {
		return fmt.Errorf("trajectory %s: %w", m.Subject, err)
	}
	pass.Change(t)
	if x.Lost {
		t.SampleIndex, t.StopReason, t.Error = x.Index, schemas.StopFailed, "it is not stored"
		m.Seq = 0
	}
	for {
		p, err := s.advance(ctx, t, m.Seq)
		if bus.Code(err) == schemas.CodeDecode { // the image is none
			return s.publish(ctx, failed(t, m.Seq, err.Error()))
		}
		if err != nil || p.after == 0 {
			return err
		}
		select {
		case <-time.After(p.after):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
