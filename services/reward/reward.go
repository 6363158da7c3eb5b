// Package reward scores trajectories as they land. A score that failed is a
// state, never a number: the sample's reward says failed, and its group can close.
//
// Every reward function has a lane of its own (lane.go), so that one which hangs or is
// away holds up nothing but the samples that need it, and those are put back rather
// than waited with. What waits for others, for a person's verdict or for the rest of
// its group, waits in the stream, not here (waiting.go).
package reward

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Config of the reward service.
type Config struct {
	// Workers is how many pictures are scored by this process at once.
	Workers int `koanf:"workers" help:"pictures scored at once by functions that run in this process"`
	// Slots is how many trajectories are in hand at once, those that wait for a server included.
	Slots int `koanf:"slots" help:"trajectories in hand at once, those that wait for a remote reward function included"`
	// Scorers is a YAML file that names remote reward functions.
	Scorers string `koanf:"scorers" help:"YAML file that configures http:NAME, onnx:NAME and nats:NAME reward functions"`
	// Require are reward functions without which the service does not start.
	Require []string `koanf:"require" help:"reward functions that must work for the service to start, e.g. ocr"`
	// ScoreTimeout bounds one reward function on one sample.
	ScoreTimeout time.Duration `koanf:"score_timeout" help:"time one reward function may take for one sample"`
	// ScorePatience is how long a sample is tried again when a reward function is away.
	ScorePatience time.Duration `koanf:"score_patience" help:"how long a sample is tried again while a reward function is not available; then its score has failed"`
	// GroupWait bounds how long functions that need the whole group wait for it.
	GroupWait time.Duration `koanf:"group_wait" help:"how long functions that need the whole group wait for it when the prompt has no deadline"`
	// AckWait is how long the server waits for a sign of life before it redelivers a trajectory.
	AckWait time.Duration `koanf:"ack_wait" help:"redelivery of a trajectory whose scorer died"`
	// DrainTimeout bounds the work in hand at shutdown.
	DrainTimeout time.Duration `koanf:"drain_timeout" help:"time for the work in hand at shutdown"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// DefaultConfig fits a laptop.
func DefaultConfig() Config {
	return Config{
		Workers: max(2, runtime.GOMAXPROCS(0)), Slots: 128, ScoreTimeout: time.Minute, ScorePatience: 2 * time.Minute,
		GroupWait: time.Hour, AckWait: 30 * time.Second, DrainTimeout: 10 * time.Second,
	}
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.Workers < 1 || c.Workers > 1024 {
		errs = append(errs, fmt.Errorf("workers: %d; must be between 1 and 1024", c.Workers))
	}
	if c.Slots < 8 || c.Slots > 65536 {
		errs = append(errs, fmt.Errorf("slots: %d; must be between 8 and 65536", c.Slots))
	}
	for _, name := range c.Require {
		if _, _, err := scorer.SplitName(name); err != nil {
			errs = append(errs, fmt.Errorf("require: %w", err))
		}
	}
	for field, d := range map[string]time.Duration{
		"score_timeout": c.ScoreTimeout, "score_patience": c.ScorePatience, "group_wait": c.GroupWait, "drain_timeout": c.DrainTimeout,
	} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: %v; must be positive", field, d))
		}
	}
	if c.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("ack_wait: %v; must be at least 1s", c.AckWait))
	}
	return errors.Join(errs...)
}

// Run scores trajectories until ctx ends and the work in hand is finished.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	s, err := newService(cfg, b, log)
	if err != nil {
		return err
	}
	defer s.catalog.close()
	log.Info().Interface("scorers", s.catalog.versions()).Int("workers", cfg.Workers).Msg("scorers ready")
	g, ctx := errgroup.WithContext(ctx)
	consumer := bus.ConsumerConfig{
		Stream: schemas.StreamTrajectories, Durable: "reward",
		AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: cfg.Slots,
		// Samples that wait are with the server, and any number may.
		MaxAckPending: maxWaiting, MaxDeliver: maxTries,
		OnGiveUp: s.fail,
	}
	verdicts := consumer
	verdicts.Stream, verdicts.Durable, verdicts.OnGiveUp = schemas.StreamVerdicts, "reward-verdicts", nil
	g.Go(func() error { return b.Consume(ctx, consumer, s.handle) })
	g.Go(func() error { return b.Consume(ctx, verdicts, s.verdict) })
	return g.Wait()
}

const (
	// maxWaiting bounds the samples that wait for others over all replicas.
	maxWaiting = 1_000_000
	// maxTries is how often a trajectory may fail for reasons that are not its scorers', such
	// as a picture that cannot be fetched.
	maxTries = 100
)

type service struct {
	cfg     Config
	bus     *bus.Bus
	catalog *catalog
	metrics *instruments
	tries   *tries
}

func newService(cfg Config, b *bus.Bus, log zerolog.Logger) (*service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("reward config: %w", err)
	}
	metrics := newInstruments(cfg.Metrics)
	c, err := openCatalog(cfg, b.Conn(), metrics, log)
	if err != nil {
		return nil, err
	}
	return &service{cfg: cfg, bus: b, catalog: c, metrics: metrics, tries: newTries()}, nil
}

// handle scores one trajectory and publishes its reward, or puts it back.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var t schemas.Trajectory
	if err := schemas.DecodeValid(m.Data, &t); err != nil {
		return bus.Terminal(schemas.CodeDecode, err)
	}
	return s.settle(ctx, m, func() (time.Duration, error) { return s.attempt(ctx, &t, m.Seq) })
}

// settle runs an attempt and puts the message back when it has to wait, which is no
// failure of its.
func (s *service) settle(ctx context.Context, m *bus.Message, attempt func() (time.Duration, error)) error {
	wait, err := attempt()
	if err != nil || wait == 0 {
		return err
	}
	if err := m.NakWithDelay(wait); err != nil {
		return fmt.Errorf("put back: %w", err)
	}
	zerolog.Ctx(ctx).Debug().Dur("delay", wait).Msg("put back")
	return nil
}

// fail publishes a failed reward, so that the group can close, before the
// trajectory goes to the dead letters.
func (s *service) fail(ctx context.Context, m *bus.Message, cause error) error {
	var t schemas.Trajectory
	if schemas.DecodeValid(m.Data, &t) != nil {
		return nil // nothing to name: the dead letter is all there is
	}
	r := rewardOf(&t, m.Seq)
	r.Status, r.Error = schemas.StatusFailed, cause.Error()
	return s.publish(ctx, r)
}

func (s *service) publish(ctx context.Context, r *schemas.Reward) error {
	r.Scored = time.Now().UnixNano()
	if _, err := s.bus.Publish(ctx, r); err != nil {
		return fmt.Errorf("publish reward: %w", err)
	}
	s.metrics.rewards.WithLabelValues(r.Status).Inc()
	event := zerolog.Ctx(ctx).Info().Str("run", r.Run).Str("uid", r.UID).Int64("sample_index", r.SampleIndex).Str("status", r.Status)
	if r.Reward != nil {
		event = event.Float64("reward", *r.Reward)
	}
	event.Msg("reward stored")
	return nil
}

// rewardOf is the reward of a trajectory without its scores.
func rewardOf(t *schemas.Trajectory, seq uint64) *schemas.Reward {
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
		SampleStarted: t.Timings.Started, SampleFinished: t.Timings.Finished,
	}
}
