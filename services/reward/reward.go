// Package reward scores trajectories as they are stored, and publishes one reward for each. A score is the value of one
// reward function, a reward the weighted sum of a sample's scores. If a score fails, the reward has the status failed
// and no number, and the sample's group can still close.
//
// For each trajectory the service calls handle, which calls advance, which calls complete. A sample that cannot be
// completed yet is put back: the server delivers its message again later, so samples wait in the stream and not in
// memory. It may wait for three things:
//
//   - A reward function that is busy or away. Each function has a pool of its own (pool.go), which bounds the calls to
//     it, so a slow function delays only the samples that need it.
//   - A verdict, which is a score from outside, such as from a person (verdict.go).
//   - The rest of its group, if a function rates the group as a whole (waiting.go).
//
// The functions are in a catalog (catalog.go). A breaker of each pool stops the calls to a function that does not
// answer, and lets one sample through as a probe from time to time. A memo keeps the scores that a sample has so far.
// A pass scores the samples of a run again (pass.go).
//
// Errors: one marked terminal makes the message a dead letter; after any other the server delivers it again. Of a
// pool, score is what complete calls; join, dispatch, run and endCall follow from it.
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
	"golang.org/x/sync/semaphore"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/schemas"
)

// Summary is what the service does, for help and service discovery.
const Summary = "scores the images of trajectories"

// Config of the reward service. The help of its fields says what they are.
type Config struct {
	Workers       int           `key:"workers" range:"1..1024" help:"samples scored at once by functions that compute in this process"`
	OCRWorkers    int           `key:"ocr_workers" range:"0..1024" help:"tesseract processes at once; 0: half the processors"`
	Scorers       string        `key:"scorers" help:"YAML file of the reward functions http:NAME and nats:NAME"`
	Require       []string      `key:"require" form:"reward_name" help:"reward functions that must be there for the service to start, such as ocr"`
	Linger        time.Duration `key:"linger" range:"0s..1s" help:"time a sample waits for others, for functions that take several in one call"`
	ScoreTimeout  time.Duration `key:"score_timeout" range:"(0.." help:"time one call of a reward function may take"`
	ScorePatience time.Duration `key:"score_patience" range:"(0.." help:"time a sample is tried again while a reward function does not answer; then its score has failed"`
	GroupWait     time.Duration `key:"group_wait" range:"(0.." help:"time that functions which rate a whole group wait for it, when its prompt has no deadline"`
	MaxWaiting    int           `key:"max_waiting" range:"1000..10000000" help:"samples that may wait for functions, groups and verdicts, over all replicas; with more, no trajectory is read"`
	ImageMiB      int           `key:"image_mib" range:"16..1048576" help:"MiB of images in memory at once, at 16 bytes a pixel; an image that is larger by itself is not scored"`
	AckWait       time.Duration `key:"ack_wait" range:"1s.." help:"redelivery of a trajectory whose scorer died"`
	DrainTimeout  time.Duration `key:"drain_timeout" range:"(0.." help:"time for the work in flight at shutdown"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `key:"-"`
}

// DefaultConfig returns settings for a laptop.
func DefaultConfig() Config {
	return Config{
		Workers: 8, Linger: 10 * time.Millisecond, ScoreTimeout: time.Minute, ScorePatience: 2 * time.Minute,
		GroupWait: time.Hour, MaxWaiting: 100_000, ImageMiB: 512, AckWait: 30 * time.Second,
		DrainTimeout: 10 * time.Second,
	}
}

// ocrTimeout bounds one process of tesseract.
const ocrTimeout = 20 * time.Second

// ocrWorkers returns how many tesseract processes run at once: as configured, or half the processors.
func ocrWorkers(c Config) int {
	if c.OCRWorkers > 0 {
		return c.OCRWorkers
	}
	return max(1, runtime.GOMAXPROCS(0)/2)
}

// Validate checks the settings of the service. It returns all faults joined, each with its field name.
func (c Config) Validate() error { return schemas.CheckFields(&c) }

// Run scores trajectories, and handles verdicts, until ctx ends and the work in flight is finished. It fails if the
// settings or the scorers file are not valid, a required function is missing, or the server cannot be used.
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
	g.Go(func() error { return s.followControls(ctx) })
	g.Go(func() error { return s.scoreLost(ctx) })
	g.Go(func() error { return s.answerSteps(log.WithContext(ctx)) })
	instance := "reward-" + strings.ToLower(rand.Text()[:8])
	g.Go(func() error {
		return b.Announce(ctx, func() *schemas.Presence { return s.catalog.presence(instance) }, nil)
	})
	g.Go(func() error {
		consumer, handle := s.metrics.set.Count(bus.ConsumerConfig{
			Durable: schemas.TrajectoriesDurable(),
			AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: s.catalog.slots(),
			// Samples that were put back still count as in flight, and must not keep others out.
			MaxAckPending: cfg.MaxWaiting, MaxDeliver: maxFailures, OnGiveUp: s.fail,
		}, s.handle)
		return b.Consume(ctx, consumer, handle)
	})
	g.Go(func() error {
		consumer, handle := s.metrics.set.Count(bus.ConsumerConfig{
			Durable: schemas.VerdictsDurable(),
			AckWait: cfg.AckWait, DrainTimeout: cfg.DrainTimeout, Slots: verdictSlots,
			MaxAckPending: cfg.MaxWaiting, MaxDeliver: maxFailures,
		}, s.handleVerdict)
		return b.Consume(ctx, consumer, handle)
	})
	return g.Wait()
}

const (
	// maxFailures is how often a sample may fail for reasons outside of it and its functions: the server is away, a
	// stream is missing. Samples that wait may be delivered ten times as often.
	maxFailures  = 200
	verdictSlots = 64
)

type service struct {
	cfg     Config
	bus     *bus.Bus
	catalog *catalog
	metrics *instruments
	// controls are what operators asked of runs: samples of cancelled groups are not scored.
	controls *bus.Controls
	cache    *sampleCache
	// putBackSamples wait for another event, pausedSamples for their run to be resumed.
	putBackSamples, pausedSamples *putBackSamples
	images                        *imageMemory
	news                          *stepNews
	// requests bounds the memory of requests for whole groups.
	requests *semaphore.Weighted
}

// newService opens the reward functions and reads the controls in force, for Run and Rescore. When ctx ends, samples
// stop waiting for functions. It fails if the settings or the scorers file are not valid, or the server does not
// answer.
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
	return &service{
		cfg: cfg, bus: b, catalog: c, controls: controls, metrics: metrics, cache: newSampleCache(),
		putBackSamples: newPutBackSamples(), pausedSamples: newPutBackSamples(), news: newStepNews(),
		images: newImageMemory(cfg.ImageMiB), requests: semaphore.NewWeighted(int64(cfg.ImageMiB) << 20),
	}, nil
}

// handle scores one trajectory and publishes its reward, or puts it back to wait. A trajectory that is not valid is a
// dead letter; after other errors it is delivered again.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var t schemas.Trajectory
	if err := bus.Fits(m, &t); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	s.putBackSamples.remove(groupKey{t.Run, t.UID}, m.Seq)
	s.pausedSamples.remove(groupKey{t.Run, t.UID}, m.Seq)
	if s.controls.Of(t.Run, t.UID).Cancelled() != nil {
		return nil // its group has closed
	}
	if m.Delivered > 1 && len(t.Group.Stages) == 0 { // an earlier delivery, or another handler, may have finished it
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
	p, err := s.completerOf(&t)(ctx, &t, m.Seq)
	if err == nil {
		err = putBack(ctx, m, p)
	}
	if err == nil && (p.completedByOther || p.paused) {
		if p.paused {
			s.pausedSamples.add(&t, m.Seq, m.Recall())
		} else {
			s.putBackSamples.add(&t, m.Seq, m.Withdrawal())
		}
		s.takeControlled()
	}
	return err
}

// completerOf returns what has a trajectory scored.
func (s *service) completerOf(t *schemas.Trajectory) func(context.Context, *schemas.Trajectory, uint64) (delay, error) {
	if len(t.Group.Stages) > 0 {
		return s.goOn
	}
	return s.advance
}

// check returns in fault what is wrong with a trajectory, nil if nothing is: it must belong to the group that the
// prompt of its uid asked for, and its steps must be stored. err: the server did not say.
func (s *service) check(ctx context.Context, t *schemas.Trajectory) (fault, err error) {
	record, err := s.record(ctx, t.Run, t.UID)
	if err != nil {
		return nil, err
	}
	if record != nil {
		if fault := record.CheckGroup(t.GroupSize, &t.Group); fault != nil {
			return fault, nil
		}
	}
	return s.bus.CheckSteps(ctx, t)
}

// record returns the record that intake stored of a group, from the cache if it is there; nil if there is none. A
// trajectory is checked against it. An error is of the server.
func (s *service) record(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	if r := s.cache.record(run, uid); r != nil {
		return r, nil
	}
	r, err := s.bus.Group(ctx, run, uid)
	if errors.Is(err, bus.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s.cache.putRecord(r)
	return r, nil
}

// delay is when a sample must be delivered again.
type delay struct {
	// after is how long it waits before; 0: it is done.
	after time.Duration
	// completedByOther: it lacks a verdict or other samples of its group; the handler of that event completes it.
	completedByOther bool
	// paused: its run is, and it goes on when that is resumed.
	paused bool
}

// putBack asks the server to deliver a sample's message again after the delay, if there is one. That does not count
// as a failure.
func putBack(ctx context.Context, m *bus.Message, p delay) error {
	if p.after <= 0 {
		return nil
	}
	zerolog.Ctx(ctx).Debug().Dur("delay", p.after).Msg("put back")
	if err := m.NakWithDelay(p.after); err != nil && !errors.Is(err, bus.ErrAcknowledged) {
		return fmt.Errorf("put back: %w", err)
	}
	return nil
}

// fail publishes a failed reward, so that the group can close, before the trajectory goes to the dead letters; of a
// stage, those of all samples that it leads to.
func (s *service) fail(ctx context.Context, m *bus.Message, cause error) error {
	var t schemas.Trajectory
	if schemas.DecodeValid(m.Data, &t) != nil {
		return nil // it names no sample, so only the dead letter remains
	}
	if len(t.Group.Stages) > 0 {
		_, err := s.endSamples(ctx, []bus.Made{{Trajectory: &t, Seq: m.Seq}}, t.Place(),
			&stages.Fault{Stage: t.Stage, Err: cause})
		return err
	}
	return s.publish(ctx, failed(&t, m.Seq, cause.Error()))
}

// publish stores a reward, and withdraws the sample's message if it was put back. If a reward of the same trajectory
// is stored already, that one stays. An error is of the server; the sample comes again.
func (s *service) publish(ctx context.Context, r *schemas.Reward) error {
	r.Scored = time.Now().UnixNano()
	its := bus.Against(func(first *schemas.Reward) (fault, err error) { return sameSample(first, r), nil })
	ack, err := s.bus.Publish(ctx, r, its, bus.WaitForSpace()) // a second try would need as much space
	if err != nil {
		return fmt.Errorf("publish reward: %w", err)
	}
	s.putBackSamples.withdraw(r)
	if ack.Duplicate {
		return nil // another replica was first
	}
	s.metrics.Rewards.WithLabelValues(r.Status).Inc()
	for i := range r.Scores {
		s.metrics.Scores.WithLabelValues(r.Scores[i].Name, r.Scores[i].Status).Inc()
	}
	event := zerolog.Ctx(ctx).Info().Str("run", string(r.Run)).Str("uid", string(r.UID)).
		Int64("sample_index", r.SampleIndex).Str("status", r.Status)
	if r.Reward != nil {
		event = event.Float64("reward", *r.Reward)
	}
	event.Msg("reward stored")
	return nil
}

// stored returns the reward of the trajectory at a sequence; bus.ErrNotFound if there is none, or one of another
// trajectory of the sample, which the next publish displaces.
func (s *service) stored(ctx context.Context, t *schemas.Trajectory, seq uint64) (*schemas.Reward, error) {
	subject := schemas.StoredSubject(schemas.RewardSubject(t.Run, t.Group.Batch, t.UID, t.SampleIndex))
	r := &schemas.Reward{}
	_, err := s.bus.StoredEvent(ctx, schemas.StreamRewards, subject, r,
		func() (fault, err error) { return sameSample(r, outline(t, seq)), nil })
	if err != nil {
		return nil, fmt.Errorf("look up reward: %w", err)
	}
	return r, nil
}

// sameSample returns an error if two rewards are of different trajectories, and nil otherwise. Their scores may differ:
// the reward that is stored first counts.
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
	if !equalOptional(first.Tokens, r.Tokens) || first.TrainedSteps != r.TrainedSteps ||
		first.ScheduleDigest != r.ScheduleDigest ||
		first.PolicyVersionMin != r.PolicyVersionMin || first.PolicyVersionMax != r.PolicyVersionMax {
		return errors.New("trained_steps, tokens, schedule_digest and policy versions: must be those of the trajectory")
	}
	return nil
}

// equalOptional reports whether two optional numbers are equal; nil equals nil.
func equalOptional(a, b *int64) bool { return a == nil && b == nil || a != nil && b != nil && *a == *b }

// failed returns the reward of a trajectory that cannot be scored, with the reason.
func failed(t *schemas.Trajectory, seq uint64, why string) *schemas.Reward {
	r := outline(t, seq)
	r.Status, r.Error = schemas.StatusFailed, why
	return r
}

// outline returns the reward of the trajectory at a sequence as far as the trajectory decides it: without status and
// scores.
func outline(t *schemas.Trajectory, seq uint64) *schemas.Reward {
	r := &schemas.Reward{
		Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, GroupSize: t.GroupSize, Scores: []schemas.Score{},
		TrajectorySeq: seq, Trained: t.Facts(), Group: t.Group,
		SampleStarted: max(0, t.Timings.Started), SampleFinished: max(0, t.Timings.Finished),
	}
	return r
}
