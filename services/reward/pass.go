package reward

import (
	"context"
	"fmt"
	"sync"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Pass is a set of stored trajectories to score again, and what to change in them.
type Pass struct {
	Samples []PassSample
	// Change makes a trajectory one of the pass: its run, and its group with the new reward
	// functions and SourceRun, the run that made it.
	Change func(t *schemas.Trajectory)
	// Done is called after each sample, by one goroutine at a time; it may be nil.
	Done func()
}

// PassSample is one sample of a pass.
type PassSample struct {
	// Seq is the sequence of its trajectory in MDR_TRAJECTORIES; of a Lost sample, that of another one of its group.
	Seq   uint64
	Index int64
	// Lost: its trajectory is not stored any more; its reward has the status failed.
	Lost bool
}

// Rescore scores the samples of a pass as the service would, and returns when all rewards are stored. Rewards that
// are stored already stay. It fails at the first sample that cannot be read or stored.
func Rescore(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger, pass Pass) error {
	s, err := newService(ctx, cfg, b, log)
	if err != nil {
		return err
	}
	defer s.catalog.close()
	var done sync.Mutex
	g, work := errgroup.WithContext(log.WithContext(ctx))
	g.SetLimit(s.catalog.slots())
	for _, x := range pass.Samples {
		g.Go(func() error {
			if err := s.rescore(work, pass, x); err != nil {
				return err
			}
			if pass.Done != nil {
				done.Lock()
				defer done.Unlock()
				pass.Done()
			}
			return nil
		})
	}
	return g.Wait()
}

// Judge has the functions of samples in the middle judge stored predictions again.
type Judge struct{ s *service }

// NewJudge opens the functions that the config has.
func NewJudge(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) (*Judge, error) {
	s, err := newService(ctx, cfg, b, log)
	if err != nil {
		return nil, err
	}
	return &Judge{s}, nil
}

// Close closes the functions.
func (j *Judge) Close() { j.s.catalog.close() }

// Again has the functions that judged a sample in the middle judge its stored prediction again. Nothing of the run is
// changed: what they say is of a run of its own.
func (j *Judge) Again(ctx context.Context, t *schemas.Trajectory, was *schemas.StepReward,
) (*schemas.StepReward, error) {
	midway := *t
	midway.Run, midway.Media, midway.ContentDigest = t.Run+"-judged-again", was.Media, was.ContentDigest
	q := &schemas.StepQuestion{StepIndex: was.StepIndex, Latents: was.Latents}
	if err := j.s.judgeStep(ctx, q, &midway); err != nil {
		return nil, err
	}
	now := &schemas.StepReward{}
	subject := schemas.StepRewardSubject(midway.Run, t.UID, t.SampleIndex, was.StepIndex)
	_, err := j.s.bus.StoredEvent(ctx, schemas.StreamVerdicts, subject, now, nil)
	return now, err
}

// rescore scores one sample of a pass, again and again until its reward is stored. A sample that cannot be read any
// more gets a failed reward. An error is of the server, or of ctx.
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
		p, err := s.completerOf(t)(ctx, t, m.Seq)
		if bus.Code(err) == schemas.CodeDecode { // the image cannot be read
			return s.publish(ctx, failed(t, m.Seq, err.Error()))
		}
		if err != nil || p.after == 0 {
			return err
		}
		if err := bus.Pause(ctx, p.after); err != nil {
			return err
		}
	}
}
