// Package reward scores trajectories as they land. A score that failed is a
// state, never a number: the sample's reward says failed, and its group can close.
//
// Every reward function has a pool of its own (pool.go), so that one which hangs or is
// away holds up only the samples that need it, and these wait in the stream and not
// here. What lacks a verdict from outside or the rest of its group waits there, too
// (waiting.go).
package reward

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Summary is what the service does, for help and service discovery.
const Summary = "scores the images of trajectories"

// Config of the reward service.
type Config struct {
	// Workers is how many samples are scored in this process at once.
	Workers int `koanf:"workers" help:"samples scored at once by functions that compute in this process"`
	// OCRWorkers is how many tesseract processes run at once.
	OCRWorkers int `koanf:"ocr_workers" help:"tesseract processes at once; 0: half the processors"`
	// Scorers is the file of functions that run elsewhere.
	Scorers string `koanf:"scorers" help:"YAML file of the reward functions http:NAME, onnx:NAME and nats:NAME"`
	// Require are functions without which the service does not start.
	Require []string `koanf:"require" help:"reward functions that must be there for the service to start, e.g. ocr"`
	// Linger is how long a sample waits for others to be scored with it in one call.
	Linger time.Duration `koanf:"linger" help:"time a sample waits for others, for functions that take several in one call"`
	// ScoreTimeout bounds one call of a reward function.
	ScoreTimeout time.Duration `koanf:"score_timeout" help:"time one call of a reward function may take"`
	// ScorePatience is how long a sample is tried again while a function does not answer.
	ScorePatience time.Duration `koanf:"score_patience" help:"time a sample is tried again while a reward function does not answer; then its score has failed"`
	// GroupWait is how long functions that rate a group as a whole wait for all of it.
	GroupWait time.Duration `koanf:"group_wait" help:"time that functions which rate a whole group wait for it, when its prompt has no deadline"`
	// MaxWaiting bounds the samples that wait, over all replicas.
	MaxWaiting int `koanf:"max_waiting" help:"samples that may wait for functions, groups and verdicts, over all replicas; with more, none is taken"`
	// ImageMiB bounds the memory of the images in hand, at 16 bytes a pixel; larger ones
	// are not scored.
	ImageMiB int `koanf:"image_mib" help:"MiB of images in memory at once, at 16 bytes a pixel; an image that is larger by itself is not scored"`
	// AckWait is how long the server waits for a heartbeat before it redelivers a trajectory.
	AckWait time.Duration `koanf:"ack_wait" help:"redelivery of a trajectory whose scorer died"`
	// DrainTimeout bounds the work in hand at shutdown.
	DrainTimeout time.Duration `koanf:"drain_timeout" help:"time for the work in hand at shutdown"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// DefaultConfig fits a laptop.
func DefaultConfig() Config {
	return Config{
		Workers: 8, Linger: 10 * time.Millisecond, ScoreTimeout: time.Minute, ScorePatience: 2 * time.Minute,
		GroupWait: time.Hour, MaxWaiting: 100_000, ImageMiB: 512, AckWait: 30 * time.Second, DrainTimeout: 10 * time.Second,
	}
}

// ocrTimeout bounds one process of tesseract.
const ocrTimeout = 20 * time.Second

func ocrWorkers(c Config) int {
	if c.OCRWorkers > 0 {
		return c.OCRWorkers
	}
	return max(1, runtime.GOMAXPROCS(0)/2)
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	count := func(field string, n, least, most int) {
		if n < least || n > most {
			errs = append(errs, fmt.Errorf("%s: %d; must be between %d and %d", field, n, least, most))
		}
	}
	positive := func(field string, d time.Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: %v; must be positive", field, d))
		}
	}
	count("workers", c.Workers, 1, 1024)
	count("ocr_workers", c.OCRWorkers, 0, 1024)
	for _, name := range c.Require {
		if _, _, err := scorer.SplitName(name); err != nil {
			errs = append(errs, fmt.Errorf("require: %w", err))
		}
	}
	if c.Linger < 0 || c.Linger > time.Second {
		errs = append(errs, fmt.Errorf("linger: %v; must be between 0s and 1s", c.Linger))
	}
	positive("score_timeout", c.ScoreTimeout)
	positive("score_patience", c.ScorePatience)
	positive("group_wait", c.GroupWait)
	count("max_waiting", c.MaxWaiting, 1000, 10_000_000)
	count("image_mib", c.ImageMiB, 16, 1<<20)
	if c.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("ack_wait: %v; must be at least 1s", c.AckWait))
	}
	positive("drain_timeout", c.DrainTimeout)
	return errors.Join(errs...)
}

// Run scores trajectories until ctx ends and the work in hand is finished.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	s, err := newService(ctx, cfg, b, log)
	if err != nil {
		if ctx.Err() != nil {
			return nil // stopped before it was up
		}
		return err
	}
	defer s.catalog.close()
	log.Info().Interface("scorers", s.catalog.versions()).Int("workers", cfg.Workers).Msg("scorers ready")
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.controls.Follow(ctx) })
	g.Go(func() error { return s.recalls(ctx) })
	instance := "reward-" + strings.ToLower(rand.Text()[:8])
	g.Go(func() error {
		return b.Announce(ctx, func() *schemas.Presence { return s.catalog.presence(instance) }, nil)
	})
	g.Go(func() error {
		consumer, handle := s.metrics.set.Count(bus.ConsumerConfig{
			Stream: schemas.StreamTrajectories, Durable: bus.RewardConsumer,
			AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: s.catalog.slots(),
			// What was put back still counts as in hand, and must not keep others out.
			MaxAckPending: cfg.MaxWaiting, MaxDeliver: maxFailures, OnGiveUp: s.fail,
		}, s.handle)
		return b.Consume(ctx, consumer, handle)
	})
	g.Go(func() error {
		consumer, handle := s.metrics.set.Count(bus.ConsumerConfig{
			Stream: schemas.StreamVerdicts, Durable: bus.VerdictConsumer,
			AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: verdictSlots,
			MaxAckPending: cfg.MaxWaiting, MaxDeliver: maxFailures,
		}, s.verdict)
		return b.Consume(ctx, consumer, handle)
	})
	return g.Wait()
}

const (
	// maxFailures is how often a sample may fail for reasons that are neither its own nor its
	// functions': the server is away, a stream is not there. Ten times as many deliveries
	// are for samples that wait, which look around every ten minutes.
	maxFailures  = 200
	verdictSlots = 64
)

type service struct {
	cfg     Config
	bus     *bus.Bus
	catalog *catalog
	metrics *instruments
	// controls are what operators asked of runs: what was cancelled is not scored.
	controls *bus.Controls
	memory   *memory
	away     *away
	room     *room
	// grouping is held by whoever rates a group as a whole.
	grouping chan struct{}
}

// newService opens the functions; ctx ends their waiting.
func newService(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) (*service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("reward config: %w", err)
	}
	metrics := newInstruments(cfg.Metrics)
	c, err := openCatalog(cfg, b.Conn(), metrics, ctx.Done(), log)
	if err != nil {
		return nil, err
	}
	controls, err := b.Controls(ctx)
	if err != nil {
		c.close()
		return nil, err
	}
	return &service{cfg: cfg, bus: b, catalog: c, controls: controls, metrics: metrics, memory: newMemory(), away: newAway(), room: newRoom(cfg.ImageMiB), grouping: make(chan struct{}, 1)}, nil
}

// handle scores one trajectory and publishes its reward, or puts it back.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var t schemas.Trajectory
	if err := bus.Fits(m, &t); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	s.away.here(group{t.Run, t.UID}, m.Seq)
	if s.controls.Of(t.Run, t.UID).Cancelled() != nil {
		return nil // its group has closed
	}
	if m.Delivered > 1 { // whoever had it before may have finished, or somebody else for it
		if _, err := s.stored(ctx, &t, m.Seq); !errors.Is(err, bus.ErrNotFound) {
			return err
		}
	}
	switch fault, err := s.check(ctx, &t); {
	case err != nil:
		return err
	case fault != nil:
		return bus.Garbage(schemas.CodeInvalid, fault)
	}
	p, err := s.advance(ctx, &t, m.Seq)
	if err == nil {
		err = putBack(ctx, m, p)
	}
	if err == nil && p.woken {
		s.away.add(&t, m)
		s.recall()
	}
	return err
}

// check says what is wrong with a trajectory: it must be one of the group that the prompt
// of its uid asked for, and its steps must be stored.
func (s *service) check(ctx context.Context, t *schemas.Trajectory) (fault, err error) {
	record, err := s.record(ctx, t.Run, t.UID)
	if err != nil {
		return nil, err
	}
	if record != nil {
		if fault := record.Holds(t.GroupSize, &t.Group); fault != nil {
			return fault, nil
		}
	}
	return s.bus.CheckSteps(ctx, t)
}

// record is that of a group; nil when no prompt asked for it.
func (s *service) record(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	if r := s.memory.record(run, uid); r != nil {
		return r, nil
	}
	r, err := s.bus.Group(ctx, run, uid)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.memory.keep(r)
	return r, nil
}

// pause says that a sample is not done.
type pause struct {
	// after is when to look again; 0: it is done.
	after time.Duration
	// woken: what it lacks is an event whose own handler completes the sample.
	woken bool
}

// putBack hands a message back that is to come again, which is no failure of its.
func putBack(ctx context.Context, m *bus.Message, p pause) error {
	if p.after <= 0 {
		return nil
	}
	zerolog.Ctx(ctx).Debug().Dur("delay", p.after).Msg("put back")
	if err := m.NakWithDelay(p.after); err != nil && !errors.Is(err, bus.ErrSettled) {
		return fmt.Errorf("put back: %w", err)
	}
	return nil
}

// fail publishes a failed reward, so that the group can close, before the
// trajectory goes to the dead letters.
func (s *service) fail(ctx context.Context, m *bus.Message, cause error) error {
	var t schemas.Trajectory
	if schemas.DecodeValid(m.Data, &t) != nil {
		return nil // nothing to name: the dead letter is all there is
	}
	return s.publish(ctx, failed(&t, m.Seq, cause.Error()))
}

// publish stores a reward, unless one of the same trajectory was first.
func (s *service) publish(ctx context.Context, r *schemas.Reward) error {
	r.Scored = time.Now().UnixNano()
	its := bus.Against(func(first *schemas.Reward) (fault, err error) { return sameSample(first, r), nil })
	ack, err := s.bus.Publish(ctx, r, its, bus.WaitForSpace()) // scored again it would fit no better
	if err != nil {
		return fmt.Errorf("publish reward: %w", err)
	}
	s.away.done(r)
	if ack.Duplicate {
		return nil // somebody was first
	}
	s.metrics.rewards.WithLabelValues(r.Status).Inc()
	for i := range r.Scores {
		s.metrics.scores.WithLabelValues(r.Scores[i].Name, r.Scores[i].Status).Inc()
	}
	event := zerolog.Ctx(ctx).Info().Str("run", string(r.Run)).Str("uid", string(r.UID)).Int64("sample_index", r.SampleIndex).Str("status", r.Status)
	if r.Reward != nil {
		event = event.Float64("reward", *r.Reward)
	}
	event.Msg("reward stored")
	return nil
}

// stored is the reward of a trajectory, or bus.ErrNotFound.
func (s *service) stored(ctx context.Context, t *schemas.Trajectory, seq uint64) (*schemas.Reward, error) {
	subject := schemas.StoredSubject(schemas.RewardSubject(t.Run, t.Group.Batch, t.UID, t.SampleIndex))
	r := &schemas.Reward{}
	_, err := s.bus.Claimed(ctx, schemas.StreamRewards, subject, r, func() (fault, err error) { return sameSample(r, outline(t, seq)), nil })
	if err != nil {
		return nil, fmt.Errorf("look up reward: %w", err)
	}
	return r, nil
}

// sameSample says in what a stored reward is not one of the trajectory that another is
// of. Scores may differ: whoever was first has scored it.
func sameSample(first, r *schemas.Reward) error {
	if got, want := first.GroupSize, r.GroupSize; got != want {
		return fmt.Errorf("group_size: %d; must be %d", got, want)
	}
	if got, want := first.TrajectorySeq, r.TrajectorySeq; got != want {
		return fmt.Errorf("trajectory_seq: %d; must be %d", got, want)
	}
	if !first.Group.Same(&r.Group) {
		return errors.New("group: must be that of the trajectory")
	}
	if !same(first.Tokens, r.Tokens) || first.TrainedSteps != r.TrainedSteps || first.ScheduleDigest != r.ScheduleDigest ||
		first.PolicyVersionMin != r.PolicyVersionMin || first.PolicyVersionMax != r.PolicyVersionMax {
		return errors.New("trained_steps, tokens, schedule_digest and policy versions: must be those of the trajectory")
	}
	return nil
}

// same says whether numbers that may be absent are equal.
func same(a, b *int64) bool { return a == nil && b == nil || a != nil && b != nil && *a == *b }

// failed is the reward of a trajectory that cannot be scored.
func failed(t *schemas.Trajectory, seq uint64, why string) *schemas.Reward {
	r := outline(t, seq)
	r.Status, r.Error = schemas.StatusFailed, why
	return r
}

// outline is the reward of a trajectory without its scores.
func outline(t *schemas.Trajectory, seq uint64) *schemas.Reward {
	r := &schemas.Reward{
		Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, GroupSize: t.GroupSize, Scores: []schemas.Score{},
		TrajectorySeq: seq, TrainedSteps: t.TrainedSteps(), ScheduleDigest: t.ScheduleDigest,
		PolicyVersionMin: t.PolicyVersionMin, PolicyVersionMax: t.PolicyVersionMax, Group: t.Group,
		SampleStarted: max(0, t.Timings.Started), SampleFinished: max(0, t.Timings.Finished),
	}
	if t.Text != nil {
		r.Tokens = new(t.Text.Generated())
	}
	return r
}
