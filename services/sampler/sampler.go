// Package sampler turns requests into step events and trajectories. Run opens the model and serves the lane. The
// handler (service.handle) owns a request from its delivery to its acknowledgement: it reserves space for the steps
// (makeWithSpace), makes the sample (makeSample, attemptOnce, denoise) and stores its trajectory.
//
// An attempt is one try at a sample, an episode the sample while it is made; an engine steps the episodes of a
// micro-batch together. Each worker is a device with a queue; its schedulers admit attempts, step a batch, record the
// events and remove what has ended, so samples join and leave at step boundaries. Controls stop samples whose run is
// paused or cancelled. A request that waits for something else, one of waits, is put back: it comes again later. A
// terminal error fails its sample; after any other it is delivered again.
//
// Package models opens the model, weights loads policies, engine joins networks and mathematics, recorder makes and
// publishes the events, and takes over those of earlier attempts.
package sampler

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/sampler/recorder"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// Summary is what the service does, for help and service discovery.
const Summary = "denoises requests into steps and trajectories"

// Run loads the model, announces it and serves its lane until ctx ends and the samples in flight are finished or put
// back. An error is one of the settings, the model or the server, or says that no device is left.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("sampler config: %w", err)
	}
	opened, err := cfg.openAnnounced(ctx, b, log)
	if err != nil {
		return err
	}
	can := opened.All[0].Network.Abilities()
	if can.Concurrency > 0 {
		cfg.Batch, cfg.Workers = can.Concurrency, 1 // one goroutine reads what the server sends
	}
	if cfg.Workers == 0 {
		cfg.Workers = opened.Workers()
	}
	if cfg.Workers < len(opened.All) {
		err = fmt.Errorf("workers: %d; must be at least %d, one for each of %s", cfg.Workers, len(opened.All),
			opened.IDs())
	} else if can.Fault != nil {
		err = fmt.Errorf("model %q: %w", opened.All[0].Network.Name(), can.Fault)
	} else {
		err = serve(ctx, cfg, opened, b, log)
	}
	return errors.Join(err, opened.Close())
}

// serve announces an open model, and serves its lane until ctx ends; a stop is no error.
func serve(ctx context.Context, cfg Config, opened *models.Devices, b *bus.Bus, log zerolog.Logger) error {
	network := opened.All[0].Network
	if cfg.Lane == "" {
		cfg.Lane = schemas.Lane(network.Name())
	}
	controls, err := b.Controls(ctx)
	if err != nil {
		return unlessStopped(ctx, err)
	}
	metrics := newInstruments(cfg.Metrics, cfg.Lane, network.Name())
	metrics.Places.Add(float64(cfg.Batch * cfg.Workers))
	defer metrics.Places.Sub(float64(cfg.Batch * cfg.Workers))
	publisher := b.NewPublisher(4096, cfg.PublishWindowMiB<<20)
	defer publisher.Close()
	s := &service{
		cfg: cfg, bus: b, devices: opened, network: network, metrics: metrics,
		token: strings.ToLower(rand.Text()[:8]), ended: make(chan error, 1), controls: newControls(controls),
		loading: make(chan struct{}, 1), making: newMaking(),
	}
	s.cfg.Instance = cmp.Or(cfg.Instance, s.defaultInstance())
	for i, p := range opened.All {
		s.workers = append(s.workers,
			&worker{id: p.ID, index: i, can: p.Network.Abilities(), queue: newQueue()})
	}
	can := s.workers[0].can
	logUnused(log, opened)
	key, err := weights.RetryLate(log.WithContext(ctx), b.SealKey)
	if err != nil {
		return unlessStopped(ctx, err)
	}
	s.recorders = &recorder.Store{
		Bus: b, Steps: b, Publisher: publisher, Sealer: recorder.NewSealer(key), Can: can,
		Instance: s.cfg.Instance,
		Metrics:  metrics.Recorder,
	}
	s.versions = weights.New(s.weightOptions())
	s.stopping = func() bool { return ctx.Err() != nil }
	s.onStop = func(f func()) func() bool { return context.AfterFunc(ctx, f) }
	s.space = b.NewStepSpace(s.presence, s.controls.news, cfg.DiskFree)
	defer metrics.show(opened, can.Servers, publisher, cfg.PublishWindowMiB<<20, s.space)()
	if err := s.versions.Begin(log.WithContext(ctx)); err != nil {
		return unlessStopped(ctx, fmt.Errorf("announce model %q: %w", network.Name(), err))
	}
	defer s.versions.Close()
	if cfg.Announced != nil {
		cfg.Announced()
	}
	if cfg.Note != nil {
		cfg.Note(s.otherBase.lines)
		cfg.Note(s.versions.Notes)
	}
	if can.Servers != nil {
		defer can.Servers.Watch(ctx)()
	}
	for _, note := range can.Notes {
		log.Warn().Str("model", network.Name()).Msg(note)
	}
	log.Info().Str("model", network.Name()).Str("lane", string(cfg.Lane)).Int64("policy_version",
		s.versions.Newest().Version()).Str("device", opened.IDs()).Str("backend", network.Backend()).Int("batch",
		cfg.Batch).Int("workers", cfg.Workers).Msg("model ready")
	return s.runLane(ctx, log)
}

// logUnused says which GPUs device auto does not use, and why. In a program that is built for them it warns.
func logUnused(log zerolog.Logger, opened *models.Devices) {
	if opened.Note != "" {
		level := zerolog.InfoLevel
		if devices.Built {
			level = zerolog.WarnLevel
		}
		log.WithLevel(level).Str("reason", opened.Note).Msg("no GPU; computes on the CPU")
	}
	for _, why := range opened.Skipped {
		log.Warn().Str("reason", why).Msg("GPU left out")
	}
}

// weightOptions returns the options of package weights for this sampler.
func (s *service) weightOptions() weights.Options {
	cfg := s.cfg
	o := weights.Options{
		Source: weights.Source{Bus: s.bus, Dir: cfg.WeightsDir}, Lane: cfg.Lane,
		Engine: engine.Options{
			Workers: cfg.Workers, Blobs: s.bus.GetBlob, SharePrefixes: cfg.SharePrefixes,
		},
		Instance: s.instance(), Own: cfg.Own, EngineMix: cfg.EngineMix,
		Metrics: s.metrics.Weights,
		Changed: s.controls.presenceChanged, Drained: s.reclaimMemory,
		IsLost: func(device int) bool { return s.workers[device].lost.Load() },
		Lost: func(ctx context.Context, device int, err error) {
			s.onDeviceLost(ctx, s.workers[device], err)
		},
	}
	for _, d := range s.devices.All {
		o.Networks = append(o.Networks, d.Network)
	}
	return o
}

// unlessStopped returns an error that kept the sampler from starting; nil where ctx has ended: the stop was asked for.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// reclaimMemory frees the memory that closed weights had on a GPU: it is freed with the Go objects, by the collector.
func (s *service) reclaimMemory() {
	for _, d := range s.devices.All {
		if _, ok := d.Device.Device.(tensor.Metered); ok {
			runtime.GC()
			return
		}
	}
}

// lastStep is how long the step in hand may go on when the time to drain is over.
const lastStep = 5 * time.Second

// runLane takes requests of the lane until ctx ends and the samples in flight are finished or put back.
func (s *service) runLane(ctx context.Context, log zerolog.Logger) error {
	cfg, metrics := s.cfg, s.metrics
	// The schedulers outlive ctx: samples in flight are finished while Consume drains.
	work, stop := context.WithCancel(log.WithContext(context.WithoutCancel(ctx)))
	var wg sync.WaitGroup
	for i := range cfg.Workers {
		c := s.workers[i%len(s.workers)]
		wg.Go(func() {
			(&scheduler{batch: cfg.Batch, queue: c.queue, metrics: metrics}).run(work)
		})
	}
	consumer, handle := metrics.set.Count(bus.ConsumerConfig{
		Durable: schemas.RequestsDurable(cfg.Lane),
		AckWait: cfg.AckWait, MaxDeliver: cfg.MaxDeliver, DrainTimeout: cfg.DrainTimeout,
		// Twice the batch: while one sample is decoded and stored, the next denoises.
		Slots:    2 * cfg.Batch * cfg.Workers,
		OnGiveUp: s.storeFailure, Families: familiesOf,
	}, s.handle)
	g, serving := errgroup.WithContext(ctx)
	g.Go(func() error { return s.space.Run(work) }) // as long as there are samples in flight
	g.Go(func() error { return s.controls.inForce.Follow(serving) })
	g.Go(func() error { return s.answerSeen(log.WithContext(serving)) })
	g.Go(func() error { return s.controls.applyControls(serving) })
	g.Go(func() error {
		return s.bus.FollowPolicy(serving, cfg.Lane, s.versions.Want,
			func(t schemas.Tenant) { s.versions.Forget(serving, t) })
	})
	g.Go(func() error { return s.versions.Follow(log.WithContext(serving)) })
	g.Go(func() error {
		defer stop() // nothing is in flight any more
		return s.bus.Consume(serving, consumer, handle)
	})
	g.Go(func() error { // handlers wait for a step, and a device that hangs never ends it
		<-serving.Done()
		select {
		case <-work.Done():
		case <-time.After(cfg.DrainTimeout + lastStep):
			stop()
		}
		return nil
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

// familiesOf returns the two families of a request for bus.Consume: its run, and its group.
func familiesOf(m *bus.Message) []string {
	a, _ := schemas.ParseSubject(m.Subject)
	return []string{string(a.Run), string(a.Run) + "." + string(a.UID)}
}
