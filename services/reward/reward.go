// Package reward scores trajectories as they land. A score that failed is a
// state, never a number: the sample's reward says failed, and its group can close.
package reward

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/png"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Config of the reward service.
type Config struct {
	// Workers is how many samples are scored at once.
	Workers int `koanf:"workers" help:"samples scored at once"`
	// ScoreTimeout bounds one scorer on one sample.
	ScoreTimeout time.Duration `koanf:"score_timeout" help:"time one reward function may take for one sample"`
	// AckWait is how long the server waits for a sign of life before it redelivers a trajectory.
	AckWait time.Duration `koanf:"ack_wait" help:"redelivery of a trajectory whose scorer died"`
	// DrainTimeout bounds the work in hand at shutdown.
	DrainTimeout time.Duration `koanf:"drain_timeout" help:"time for the work in hand at shutdown"`
}

// DefaultConfig fits a laptop.
func DefaultConfig() Config {
	return Config{Workers: 8, ScoreTimeout: time.Minute, AckWait: 30 * time.Second, DrainTimeout: 10 * time.Second}
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.Workers < 1 || c.Workers > 1024 {
		errs = append(errs, fmt.Errorf("workers: %d; must be between 1 and 1024", c.Workers))
	}
	if c.ScoreTimeout <= 0 {
		errs = append(errs, fmt.Errorf("score_timeout: %v; must be positive", c.ScoreTimeout))
	}
	if c.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("ack_wait: %v; must be at least 1s", c.AckWait))
	}
	if c.DrainTimeout <= 0 {
		errs = append(errs, fmt.Errorf("drain_timeout: %v; must be positive", c.DrainTimeout))
	}
	return errors.Join(errs...)
}

// Run scores trajectories until ctx ends and the work in hand is finished.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("reward config: %w", err)
	}
	s := &service{cfg: cfg, bus: b, scorers: map[string]scorer.Scorer{}}
	for _, name := range scorer.Names() {
		if scorer.NewGroup(name) != nil {
			continue
		}
		sc, err := scorer.New(name)
		if errors.Is(err, scorer.ErrNoTesseract) {
			log.Info().Msg(err.Error())
			continue
		}
		if err != nil {
			return fmt.Errorf("reward function %q: %w", name, err)
		}
		s.scorers[name] = sc
	}
	log.Info().Strs("scorers", scorer.Names()).Int("workers", cfg.Workers).Msg("scorers ready")
	return b.Consume(ctx, bus.ConsumerConfig{
		Stream: schemas.StreamTrajectories, Durable: "reward",
		AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: cfg.Workers,
		OnGiveUp: s.fail,
	}, s.handle)
}

type service struct {
	cfg     Config
	bus     *bus.Bus
	scorers map[string]scorer.Scorer
}

// handle scores one trajectory and publishes its reward.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var t schemas.Trajectory
	if err := schemas.DecodeValid(m.Data, &t); err != nil {
		return bus.Terminal(schemas.CodeDecode, err)
	}
	r := reward(&t, m.Seq)
	if t.StopReason != schemas.StopCompleted {
		r.Status, r.Error = schemas.StatusFailed, fmt.Sprintf("trajectory %s: %s", t.StopReason, t.Error)
	} else if err := s.score(ctx, &t, r); err != nil {
		return err
	}
	return s.publish(ctx, r)
}

// fail publishes a failed reward, so that the group can close, before the
// trajectory goes to the dead letters.
func (s *service) fail(ctx context.Context, m *bus.Message, cause error) error {
	var t schemas.Trajectory
	if schemas.DecodeValid(m.Data, &t) != nil {
		return nil // nothing to name: the dead letter is all there is
	}
	r := reward(&t, m.Seq)
	r.Status, r.Error = schemas.StatusFailed, cause.Error()
	return s.publish(ctx, r)
}

func (s *service) publish(ctx context.Context, r *schemas.Reward) error {
	r.Scored = time.Now().UnixNano()
	if _, err := s.bus.Publish(ctx, r); err != nil {
		return fmt.Errorf("publish reward: %w", err)
	}
	event := zerolog.Ctx(ctx).Info().Str("run", r.Run).Str("uid", r.UID).Int64("sample_index", r.SampleIndex).Str("status", r.Status)
	if r.Reward != nil {
		event = event.Float64("reward", *r.Reward)
	}
	event.Msg("reward stored")
	return nil
}

// score fills in the scores and their weighted sum. A scorer's failure is part of
// the result; only a failure to fetch the picture is an error to retry.
func (s *service) score(ctx context.Context, t *schemas.Trajectory, r *schemas.Reward) error {
	picture, err := s.picture(ctx, t.Image)
	if err != nil {
		return fmt.Errorf("load picture: %w", err)
	}
	parts := make([]scorer.Part, len(t.Group.Reward))
	for i, spec := range t.Group.Reward {
		part := scorer.Part{Name: spec.Name, Weight: *spec.Weight, Required: *spec.Required}
		score := schemas.Score{Name: spec.Name, Weight: *spec.Weight}
		began := time.Now()
		if sc, ok := s.scorers[spec.Name]; ok {
			score.Version = sc.Version()
			part.Value, part.Err = s.call(ctx, sc, scorer.Input{
				Image: picture, Prompt: t.Prompt, GroundTruth: spec.GroundTruth, Params: spec.Params,
			})
		} else {
			part.Err = fmt.Errorf("reward function %q is not available here", spec.Name)
		}
		score.DurationNS = time.Since(began).Nanoseconds()
		parts[i] = part
		r.Scores = append(r.Scores, score)
	}
	sum, err := scorer.Combine(parts)
	for i, part := range parts { // after Combine, which fails values that are no numbers
		if part.Err != nil {
			r.Scores[i].Status, r.Scores[i].Error = schemas.StatusFailed, part.Err.Error()
		} else {
			r.Scores[i].Status, r.Scores[i].Value = schemas.StatusScored, new(part.Value)
		}
	}
	if err != nil {
		r.Status, r.Error = schemas.StatusFailed, err.Error()
		return nil
	}
	r.Status, r.Reward = schemas.StatusScored, &sum
	return nil
}

// call runs one scorer with a time limit; a panic is its failure, not the service's.
func (s *service) call(ctx context.Context, sc scorer.Scorer, in scorer.Input) (value float64, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("scorer %s panicked: %v", sc.Name(), p)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.ScoreTimeout)
	defer cancel()
	return sc.Score(ctx, in)
}

func (s *service) picture(ctx context.Context, im *schemas.Image) (*image.NRGBA, error) {
	data := im.Data
	if im.Ref != nil {
		var err error
		if data, err = s.bus.GetBlob(ctx, *im.Ref); err != nil {
			return nil, err
		}
	}
	conf, err := png.DecodeConfig(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if int64(conf.Width) != im.Width || int64(conf.Height) != im.Height {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %dx%d; the trajectory says %dx%d", conf.Width, conf.Height, im.Width, im.Height))
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeDecode, fmt.Errorf("picture: %w", err))
	}
	if n, ok := decoded.(*image.NRGBA); ok {
		return n, nil
	}
	n := image.NewNRGBA(decoded.Bounds())
	draw.Draw(n, n.Bounds(), decoded, decoded.Bounds().Min, draw.Src)
	return n, nil
}

func reward(t *schemas.Trajectory, seq uint64) *schemas.Reward {
	trained := int64(0)
	for _, tr := range t.Transitions {
		if tr != schemas.TransitionODE {
			trained++
		}
	}
	return &schemas.Reward{
		Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, GroupSize: t.GroupSize, Scores: []schemas.Score{},
		TrajectorySeq: seq, TrainedSteps: trained, ScheduleDigest: t.ScheduleDigest,
		PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax, Group: t.Group,
	}
}
