// Package sampler turns requests into step events and trajectories: it encodes
// the prompt, denoises in micro-batches that requests join and leave at step
// boundaries, publishes one event per step as it happens, decodes the image and
// publishes the trajectory once all its steps are stored.
//
// It joins two packages that know nothing of each other: pkg/flow, the sampling
// mathematics, and pkg/model, the networks.
package sampler

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/lm"
	languages "github.com/meander-rl/meander/pkg/lm/families"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
)

// Summary is what the service does, for help and service discovery.
const Summary = "denoises requests into steps and trajectories"

// Config of the sampler service.
type Config struct {
	// Model is "synthetic", a folder in the diffusers layout or of a language model, or the name of a shipped one.
	Model string `koanf:"model" help:"synthetic, a folder in the diffusers layout or of a language model, or the name of a shipped model"`
	// Adapter is a LoRA in PEFT's form that is added to the model, AdapterScale how much of it.
	Adapter      string  `koanf:"adapter" help:"LoRA in PEFT's form to add to the model, a file or a folder"`
	AdapterScale float64 `koanf:"adapter_scale" help:"how much of the adapter; 1 is what it was trained at"`
	// Device is what computes: auto, cpu, or GPUs as cuda:0,cuda:1, a worker for each.
	Device string `koanf:"device" help:"what computes: auto (GPUs if there are, else the CPU), cpu, cuda:0, or several GPUs as cuda:0,cuda:1"`
	// DType is the element type in which factors meet on a GPU.
	DType string `koanf:"dtype" help:"products on a GPU: f32, bf16 (tensor cores), auto (bf16 for models of a billion parameters and more)"`
	// Deterministic is Compute.Deterministic.
	Deterministic bool `koanf:"deterministic" help:"in bf16, fixed algorithms, so that bits do not depend on the batch; without it events of such a GPU say nondeterministic"`
	// Threads is how many threads the model computes with; 0: all cores.
	Threads int `koanf:"threads" help:"threads of the CPU; 0 for all cores; results do not depend on it"`
	// Engine is a server that draws the tokens of a language model, whose folder gives the rest; empty: the sampler does.
	Engine string `koanf:"engine" help:"server that draws the tokens of --model, which is read for its tokenizer alone: vllm=URL or sglang=URL; default the sampler itself"`
	// EnginePatience is how long it may say nothing of a sample.
	EnginePatience time.Duration `koanf:"engine_patience" help:"how long the server of --engine may say nothing of a sample before that is asked for again"`
	// EngineKey is sent to it as a bearer token.
	EngineKey string `koanf:"engine_key" secret:"true" help:"API key of the server of --engine, where it wants one"`
	// Lane is the request queue to serve; empty: the model's name.
	Lane schemas.Lane `koanf:"lane" help:"request queue to serve; default the model's name"`
	// Batch is the most samples in one micro-batch, Workers how many micro-batches run side by side;
	// 0: one for each GPU, or for every two cores.
	Batch   int `koanf:"batch" help:"samples denoised together in one micro-batch"`
	Workers int `koanf:"workers" help:"micro-batches running side by side; 0 for one per GPU, or per two cores"`
	// SharePrefixes computes what samples of one prompt begin with once; bits do not depend on it.
	SharePrefixes bool `koanf:"share_prefixes" help:"of texts, compute what the samples of a prompt begin with once; results do not depend on it"`
	// PolicyVersion is the version of the weights that were loaded.
	PolicyVersion int64 `koanf:"policy_version" help:"version of the weights, stamped on every event"`
	// PublishWindowMiB bounds the step events that wait to be stored.
	PublishWindowMiB int `koanf:"publish_window_mib" help:"MiB of step events that may wait to be stored"`
	// Instance names this process in events and logs.
	Instance string `koanf:"instance" help:"name of this process in events; default random"`
	// AckWait is how long the server waits for a heartbeat before another sampler gets the request.
	AckWait time.Duration `koanf:"ack_wait" help:"redelivery of a request whose sampler died"`
	// MaxDeliver is how often a request may fail here before it fails for good. A killed or
	// restarted process costs a tenth of that.
	MaxDeliver int `koanf:"max_deliver" help:"failures of a request before it fails for good; a killed or restarted process counts for a tenth of one"`
	// DrainTimeout bounds the samples in hand at shutdown; what is not finished is handed back.
	DrainTimeout time.Duration `koanf:"drain_timeout" help:"time for the samples in hand at shutdown; the rest is handed back"`
	// Models is the families that Model may be of.
	Models model.Registry `koanf:"-"`
	// Languages is the families of language models that it may be of besides.
	Languages lm.Registry `koanf:"-"`
	// DiskFree says how many bytes of the server's disk are free, where that is known; nil: it is not.
	DiskFree func() (int64, error) `koanf:"-"`
	// Health adds a condition of readiness; nil: nobody asks.
	Health func(name string, check func() error) `koanf:"-"`
	// Note adds what /readyz says of work that waits on purpose; nil: nobody asks.
	Note func(say func() []string) `koanf:"-"`
	// BaseDigest is the checkpoint that the model must be; empty: any.
	BaseDigest string `koanf:"-"`
	// Announced is called once the model is loaded and announced; nil: nobody waits for it.
	Announced func() `koanf:"-"`
	// Loading hears of the model's weights while they are read; nil: nobody does.
	Loading model.Progress `koanf:"-"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// Help is that of a field of Config, by its name, for flags elsewhere.
func Help(field string) string {
	f, ok := reflect.TypeFor[Config]().FieldByName(field)
	if !ok {
		panic("sampler: no setting " + field)
	}
	return f.Tag.Get("help")
}

// DefaultConfig fits a laptop.
func DefaultConfig() Config {
	return Config{
		Model: "signs", AdapterScale: 1, Device: devices.Auto, DType: devices.Auto, Batch: 8, SharePrefixes: true, PublishWindowMiB: 64,
		EnginePatience: time.Minute, AckWait: 30 * time.Second, MaxDeliver: 10, DrainTimeout: 20 * time.Second,
		Models: families.All(), Languages: languages.All(),
	}
}

// Validate joins every fault by field name.
func (c Config) Validate() error {
	var errs []error
	if c.Model == "" {
		errs = append(errs, errors.New("model: empty; must be synthetic or a folder of a model"))
	}
	if math.IsNaN(c.AdapterScale) || math.IsInf(c.AdapterScale, 0) {
		errs = append(errs, fmt.Errorf("adapter_scale: %v; must be finite", c.AdapterScale))
	}
	errs = append(errs, c.compute().Validate(), c.served())
	if c.Lane != "" {
		errs = append(errs, schemas.CheckToken("lane", c.Lane))
	}
	if c.Batch < 1 || c.Batch > 1024 {
		errs = append(errs, fmt.Errorf("batch: %d; must be between 1 and 1024", c.Batch))
	}
	if c.Workers < 0 || c.Workers > 256 {
		errs = append(errs, fmt.Errorf("workers: %d; must be between 0 and 256", c.Workers))
	}
	if c.PolicyVersion < 0 {
		errs = append(errs, fmt.Errorf("policy_version: %d; must not be negative", c.PolicyVersion))
	}
	if c.PublishWindowMiB < 1 || c.PublishWindowMiB > 16384 {
		errs = append(errs, fmt.Errorf("publish_window_mib: %d; must be between 1 and 16384", c.PublishWindowMiB))
	}
	if c.AckWait < time.Second {
		errs = append(errs, fmt.Errorf("ack_wait: %v; must be at least 1s", c.AckWait))
	}
	if c.MaxDeliver < 1 {
		errs = append(errs, fmt.Errorf("max_deliver: %d; must be at least 1", c.MaxDeliver))
	}
	if c.DrainTimeout <= 0 {
		errs = append(errs, fmt.Errorf("drain_timeout: %v; must be positive", c.DrainTimeout))
	}
	return errors.Join(errs...)
}

// compute is the part of the settings that says what computes.
func (c Config) compute() Compute {
	return Compute{Device: c.Device, DType: c.DType, Deterministic: c.Deterministic, Threads: c.Threads}
}

// Run loads the model, announces it and serves its lane until ctx ends and the
// samples in hand are finished or handed back.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("sampler config: %w", err)
	}
	places, err := cfg.open(ctx, log)
	if err != nil {
		return err
	}
	if cfg.Workers == 0 {
		cfg.Workers = places.Workers()
	}
	if cfg.Workers < len(places.All) {
		err = fmt.Errorf("workers: %d; must be at least %d, one for each of %s", cfg.Workers, len(places.All), places.IDs())
	} else if err = checkSchedule(places.All[0].Network); err != nil {
		err = fmt.Errorf("model %q: %w", places.All[0].Network.Name(), err)
	} else {
		err = serve(ctx, cfg, places, b, log)
	}
	return errors.Join(err, places.Close())
}

func checkSchedule(n Network) error {
	if n.Images == nil {
		return nil
	}
	return CheckSchedule(n.Images.Card().SchedulerConfig)
}

// CheckSchedule refuses a scheduler_config.json that no request can be made by.
func CheckSchedule(config []byte) error {
	noise, err := scheduled.ParseNoise(config)
	if err == nil && noise.Prediction != string(scheduled.Flow) {
		return nil // it serves scheduled sampling alone
	}
	_, fault := flow.ParseSchedule(config)
	if fault == nil {
		return nil
	}
	return errors.Join(fault, err)
}

// loading logs how far a model is, for as long as it takes, and tells another, if there is one.
func loading(other model.Progress, log zerolog.Logger) model.Progress {
	const every = 5 * time.Second
	last := time.Now()
	return func(part string, done, total int) {
		if other != nil {
			other(part, done, total)
		}
		if now := time.Now(); now.Sub(last) >= every {
			last = now
			log.Info().Str("part", part).Int("done_mib", done>>20).Int("total_mib", total>>20).Msg("the model is loading")
		}
	}
}

func serve(ctx context.Context, cfg Config, places *Places, b *bus.Bus, log zerolog.Logger) error {
	network := places.All[0].Network
	if cfg.Lane == "" {
		cfg.Lane = schemas.Lane(network.Name())
	}
	controls, err := b.Controls(ctx)
	if err != nil {
		return unlessStopped(ctx, err)
	}
	metrics := newInstruments(cfg.Metrics)
	metrics.places.Add(float64(cfg.Batch * cfg.Workers))
	defer metrics.places.Sub(float64(cfg.Batch * cfg.Workers))
	publisher := b.NewPublisher(4096, cfg.PublishWindowMiB<<20)
	defer publisher.Close()
	defer metrics.watch(publisher, cfg.PublishWindowMiB<<20)()
	s := &service{
		cfg: cfg, bus: b, places: places, network: network, publisher: publisher, metrics: metrics,
		token: strings.ToLower(rand.Text()[:8]), ended: make(chan error, 1), reins: newReins(controls), loading: make(chan struct{}, 1),
	}
	s.cfg.Instance = cmp.Or(cfg.Instance, s.unnamed())
	s.versions = &versions{s: s, drained: make(chan struct{}, 1), news: make(chan struct{}, 1)}
	for i, p := range places.All {
		s.seats = append(s.seats, &seat{id: p.ID, index: i, joins: make(chan *attempt)})
	}
	defer metrics.compute(places)()
	if places.Note != "" {
		log.Info().Str("reason", places.Note).Msg("no GPU; computes on the CPU")
	}
	if s.sealer, err = inTime(log.WithContext(ctx), s.newSealer); err != nil {
		return unlessStopped(ctx, err)
	}
	s.room, s.stopping = b.NewRoom(s.presence, s.reins.obeyed, cfg.DiskFree), ctx
	defer metrics.watchRoom(s.room)()
	if err := s.first(log.WithContext(ctx)); err != nil {
		return unlessStopped(ctx, fmt.Errorf("announce model %q: %w", network.Name(), err))
	}
	defer s.versions.close()
	if cfg.Announced != nil {
		cfg.Announced()
	}
	if cfg.Note != nil {
		cfg.Note(s.otherBase.notes)
	}
	if e := network.Served; e != nil {
		go e.watch(ctx, log)
	}
	log.Info().Str("model", network.Name()).Str("lane", string(cfg.Lane)).Int64("policy_version", s.versions.newest().version()).Str("device", places.IDs()).Str("backend", network.Backend()).Int("batch", cfg.Batch).Int("workers", cfg.Workers).Msg("model ready")
	return s.run(ctx, log)
}

// run serves the lane until ctx ends and what is in hand is finished, or handed back.
func (s *service) run(ctx context.Context, log zerolog.Logger) error {
	cfg, metrics := s.cfg, s.metrics
	// The schedulers outlive ctx: samples in hand are finished while Consume drains.
	work, stop := context.WithCancel(log.WithContext(context.WithoutCancel(ctx)))
	var wg sync.WaitGroup
	for i := range cfg.Workers {
		c := s.seats[i%len(s.seats)]
		wg.Go(func() {
			(&scheduler{batch: cfg.Batch, joins: c.joins, metrics: metrics}).run(work)
		})
	}
	consumer, handle := metrics.set.Count(bus.ConsumerConfig{
		Stream: schemas.StreamRequests, Durable: bus.LaneConsumer(cfg.Lane),
		Filters: []string{schemas.Address{Kind: schemas.KindRequest, Lane: cfg.Lane}.Filter()},
		AckWait: cfg.AckWait, MaxDeliver: cfg.MaxDeliver, DrainTimeout: cfg.DrainTimeout,
		// Twice the batch: while one sample is decoded and stored, the next denoises.
		Slots:    2 * cfg.Batch * cfg.Workers,
		OnGiveUp: s.fail, Families: kin,
	}, s.handle)
	g, serving := errgroup.WithContext(ctx)
	g.Go(func() error { return s.room.Run(work) }) // as long as there are samples in hand
	g.Go(func() error { return s.reins.controls.Follow(serving) })
	g.Go(func() error { return s.reins.follow(serving) })
	g.Go(func() error { return s.bus.FollowPolicy(serving, cfg.Lane, s.versions.want) })
	g.Go(func() error { return s.versions.follow(log.WithContext(serving)) })
	g.Go(func() error {
		defer stop() // nothing is in hand any more
		return s.bus.Consume(serving, consumer, handle)
	})
	g.Go(func() error {
		select {
		case err := <-s.ended:
			return err
		case <-serving.Done():
			return nil
		}
	})
	err := g.Wait()
	stop()
	wg.Wait()
	return err
}

// kin are the run and the group of a request.
func kin(m *bus.Message) []string {
	a, _ := schemas.ParseSubject(m.Subject)
	return []string{string(a.Run), string(a.Run) + "." + string(a.UID)}
}

type service struct {
	cfg    Config
	bus    *bus.Bus
	places *Places
	seats  []*seat // one for each of places
	// network is the model of its files: without what policies add.
	network   Network
	bare      *schemas.Canary // of network, once a policy is loaded
	versions  *versions
	publisher *bus.Publisher
	sealer    *sealer
	metrics   *instruments
	ended     chan error // why no seat is left
	reins     *reins
	// room is this sampler's part of the space for steps; stopping ends the waiting for it.
	room     *bus.Room
	stopping context.Context
	// loading is held by whoever has the states that a group starts with in memory.
	loading chan struct{}
	texts   texts
	// otherBase says that requests wait for another checkpoint.
	otherBase otherBase
	// token and count make the attempt token: unique per process and delivery, so
	// that events of two attempts never share a subject.
	token string
	count atomic.Uint64
}

// PolicyOf is what a sampler of a model announces, in the lane of the model's name.
func PolicyOf(c model.Card) *schemas.Policy {
	return &schemas.Policy{
		Lane: schemas.Lane(c.Name), Model: c.Name, Family: c.Family, WeightsDigest: c.WeightsDigest, SchedulerConfig: c.SchedulerConfig,
		LatentChannels: int64(c.LatentChannels), PixelsPerToken: int64(c.PixelsPerToken),
		Height: int64(c.Height), Width: int64(c.Width), NumInferenceSteps: int64(c.NumInferenceSteps),
		TrueCFGScale: c.TrueCFGScale, NegativePrompt: c.NegativePrompt, MaxPixels: int64(c.MaxPixels), Reward: c.Reward,
		ConditioningBytes: c.ConditioningBytes, ConditioningTokenBytes: c.ConditioningTokenBytes,
	}
}

// handle makes one sample. Every error before the trajectory is stored leaves the
// request unacked, and its steps belong to an attempt no trajectory names.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	var req schemas.Request
	if err := bus.Fits(m, &req); err != nil {
		return bus.Garbage(schemas.CodeDecode, err)
	}
	switch record, err := s.bus.Group(ctx, req.Run, req.UID); {
	case errors.Is(err, bus.ErrNotFound): // nobody's prompt, and nobody's to refuse
	case err != nil:
		return err
	default:
		if fault := asked(record, &req); fault != nil {
			return bus.Garbage(schemas.CodeInvalid, fault)
		}
	}
	if base := s.versions.newest().policy.Checkpoint(); req.BaseDigest != "" && req.BaseDigest != base {
		return s.otherBase.putBack(ctx, m, &req, base)
	}
	var made schemas.Trajectory
	fits := func() (fault, err error) { return s.bus.Answers(ctx, &made, &req) }
	switch _, err := s.bus.Claimed(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(req.Run, req.UID, req.SampleIndex), &made, fits); {
	case err == nil:
		return s.sweepSteps(ctx, &made) // a former attempt got as far as the trajectory, only its ack was lost
	case !errors.Is(err, bus.ErrNotFound):
		return fmt.Errorf("look up trajectory: %w", err)
	}
	switch closed, err := s.bus.Result(ctx, req.Run, req.UID, req.GroupSize, req.Group.Batch); {
	case err == nil: // at its deadline for instance: nobody waits for the sample any more
		zerolog.Ctx(ctx).Info().Str("run", string(req.Run)).Str("uid", string(req.UID)).Int64("sample_index", req.SampleIndex).
			Str("status", closed.Status).Msg("let go: its group has its result")
		return nil
	case !errors.Is(err, bus.ErrNotFound):
		return err
	}
	work, release := s.reins.take(ctx, &req)
	defer release()
	t, leave, err := s.inRoom(ctx, work, &req)
	defer leave()
	var stored *schemas.Trajectory
	if err == nil {
		stored, err = s.store(ctx, work, t, &req)
	}
	if c := stoppedBy(work); c != nil && err != nil {
		return s.heed(ctx, m, &req, c)
	}
	if errors.Is(err, errUnborn) || errors.Is(err, errLeaving) || errors.Is(err, errYoung) || errors.Is(err, errAway) {
		return putBack(ctx, m, err)
	}
	if err != nil {
		return err
	}
	if err := s.sweep(ctx, m, t, stored); err != nil {
		return err
	}
	zerolog.Ctx(ctx).Info().Str("run", string(req.Run)).Str("uid", string(req.UID)).Int64("sample_index", req.SampleIndex).
		Dur("dur_ms", time.Duration(t.Timings.Finished-t.Timings.Started)).Msg("trajectory stored")
	return nil
}

// maxRestarts is how often a sample begins again for the sake of newer weights.
const maxRestarts = 3

// errRestart ends an attempt that is to begin again with newer weights.
var errRestart = errors.New("begins again with newer weights")

// make computes one sample and stores its steps, or lets it be at the next step boundary when
// work ends, which is a part of ctx.
func (s *service) make(ctx, work context.Context, c *seat, req *schemas.Request) (*schemas.Trajectory, error) {
	for restarts := 0; ; restarts++ {
		t, err := s.try(ctx, work, c, req, restarts < maxRestarts)
		if !errors.Is(err, errRestart) {
			return t, err
		}
		s.metrics.restarted.Inc()
	}
}

// try is one attempt. With restarts, it may end as errRestart.
func (s *service) try(ctx, work context.Context, c *seat, req *schemas.Request, restarts bool) (*schemas.Trajectory, error) {
	with, err := s.versions.pin(req.MinPolicyVersion)
	if err != nil {
		return nil, err
	}
	r := s.newRecorder(req, with)
	defer func() { s.versions.release(r.weights) }()
	engine := with.engines[c.index]
	r.backend = engine.Backend()
	episode, err := s.begin(work, engine, r)
	if err != nil {
		return nil, err
	}
	if held, ok := episode.(io.Closer); ok {
		defer func() { _ = held.Close() }()
	}
	r.encode = time.Since(r.received)
	a := &attempt{ctx: work, engine: engine, episode: episode, priority: req.Priority}
	a.record = func(step schemas.StepEvent, device time.Duration) error {
		if err := r.step(ctx, step, device); err != nil {
			return err
		}
		return r.judge(r.next())
	}
	a.between = func() error { return r.catchUp(a, c, restarts) }
	a.admitted = func() { r.renew(a, c) }
	err = r.judge(r.next())
	if err == nil {
		err = s.denoise(work, c, a, r)
	}
	switch {
	case err == nil:
		return r.finish(ctx, a)
	case errors.Is(err, errRestart):
		return nil, cmp.Or(r.undo(ctx), err)
	case work.Err() != nil:
		r.leave()
	}
	return r.pruned(ctx, a, err)
}

// denoise has a scheduler take all steps of an attempt; some samples have none to take, some wait for others in between.
func (s *service) denoise(work context.Context, c *seat, a *attempt, r *recorder) error {
	if a.episode.Done() {
		a.started = time.Now()
		return nil
	}
	for {
		if err := s.steps(work, c, a); err != nil || asks(a.episode) == nil {
			return err
		}
		if err := s.converse(work, r, a.episode.(Talker)); err != nil {
			return err
		}
		if a.episode.Done() {
			return nil
		}
	}
}

// steps has a scheduler step an attempt until it is done, or stands still.
func (s *service) steps(work context.Context, c *seat, a *attempt) error {
	a.finished, a.done = false, make(chan struct{})
	s.metrics.joining.Inc()
	select {
	case c.joins <- a:
		s.metrics.joining.Dec()
	case <-work.Done():
		s.metrics.joining.Dec()
		return work.Err()
	}
	<-a.done
	return a.err
}

// asked says what a request has otherwise than the prompt that has its uid.
func asked(record *schemas.GroupRecord, r *schemas.Request) error {
	if err := record.Holds(r.GroupSize, &r.Group); err != nil {
		return err
	}
	if r.Lane != record.Lane || r.Prompt != record.Prompt || r.NegativePrompt != record.NegativePrompt || r.ScheduleDigest != record.ScheduleDigest {
		return fmt.Errorf("lane, prompt and schedule_digest: not those of the prompt that has uid %s", r.UID)
	}
	return nil
}

// fail publishes a failed trajectory, so that the group can still close, before
// the request goes to the dead letters.
func (s *service) fail(ctx context.Context, m *bus.Message, cause error) error {
	var req schemas.Request
	if schemas.DecodeValid(m.Data, &req) != nil {
		return nil // nothing to name: the dead letter is all there is
	}
	stored, err := s.publish(ctx, s.newRecorder(&req, s.versions.newest()).failed(cause), &req)
	if err != nil {
		return err
	}
	return s.sweepSteps(ctx, stored)
}

// store publishes the trajectory of a sample, and waits for room until a control stops the sample: made again it
// would fit no better.
func (s *service) store(ctx, work context.Context, t *schemas.Trajectory, req *schemas.Request) (*schemas.Trajectory, error) {
	stored, err := s.publish(ctx, t, req)
	if errors.Is(err, bus.ErrStreamFull) {
		stored, err = s.publish(work, t, req, bus.WaitForSpace())
	}
	if err != nil {
		return nil, fmt.Errorf("publish trajectory: %w", err)
	}
	return stored, nil
}

// publish stores the trajectory that a request asked for, and returns the one that is stored:
// that of another attempt, where it was first.
func (s *service) publish(ctx context.Context, t *schemas.Trajectory, req *schemas.Request, opts ...bus.PublishOption) (*schemas.Trajectory, error) {
	its := bus.Against(func(made *schemas.Trajectory) (fault, err error) { return s.bus.Answers(ctx, made, req) })
	ack, err := s.bus.Publish(ctx, t, append(opts, its)...)
	if err != nil {
		return nil, err
	}
	if !ack.Duplicate {
		s.metrics.stored(t)
		return t, nil
	}
	first := &schemas.Trajectory{}
	return first, bus.Fits(ack.First, first)
}
