// Package teacher answers for the log-probs of given samples under other weights. A teacher is an open model with a
// name; a reference model is one, too. A request names a stored sample; the reply has the log-prob of each token that
// was generated, with the likeliest tokens if they are asked for, or of each stochastic step of an image. Distillation,
// penalties of divergence and checks of off-policy samples ask for it, in any language.
//
// Run opens the model and answers until ctx ends: receive takes a request, answer has score load the sample and compute
// (score.go). It reads streams and stores nothing but large tensors, as blobs. Replicas of one name are a
// queue group. What evaluates the model is shared with verify: texts.Given and images.Given of the sampler's engines.
//
// A refusal is an error that the reply names by its code; of any other the requester may ask again.
package teacher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/instrument"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/models"
)

// Summary is what the service does, for help and service discovery.
const Summary = "gives the log-probs of stored samples under the weights of another model"

// Config of a teacher.
type Config struct {
	Model        string  `key:"model" help:"folder of a model, the name of a shipped one, or ORG/NAME[@REVISION] of the Hugging Face Hub"`
	Adapter      string  `key:"adapter" help:"LoRA in PEFT's form to add to the model: a file, a folder, or ORG/NAME[@REVISION] of the Hugging Face Hub"`
	AdapterScale float64 `key:"adapter_scale" help:"how much of the adapter; 1 is what it was trained at"`
	Name         string  `key:"name" form:"token?"` // that requests have for the teacher; empty: the model's
	// Engine is torch or torch=ADDRESS where a worker computes the network of an image model, with EngineKey as its
	// token; empty: this program does.
	Engine    string `key:"engine" help:"torch or torch=ADDRESS where a worker computes the model; default this program"`
	EngineKey string `key:"-"`
	models.Compute
	Workers int `key:"workers" range:"0..256" help:"samples that are scored at once; 0 for one per GPU, or per two cores"`
	// DrainTimeout bounds the requests in flight at shutdown; those that are left are told to ask again.
	DrainTimeout time.Duration `key:"drain_timeout" range:"(0.."`
	// Models and Languages are the known families of models.
	Models    model.Registry `key:"-"`
	Languages lm.Registry    `key:"-"`
	// Listening is called once the teacher takes requests; nil: nothing is called.
	Listening func(name string) `key:"-"`
}

// DefaultConfig returns settings that fit a laptop; Model is to be set.
func DefaultConfig() Config {
	return Config{
		AdapterScale: 1, Compute: models.Compute{Device: devices.Auto, DType: devices.Auto},
		DrainTimeout: 20 * time.Second,
		Models:       families.All(), Languages: languages.All(),
	}
}

// Validate checks the settings. It returns all faults joined, each with its field name.
func (c Config) Validate() error {
	err := schemas.CheckFields(&c)
	if c.Model == "" {
		err = errors.Join(errors.New("model: empty; must be a folder of a model, or the name of a shipped one"), err)
	}
	switch {
	case c.Engine == "":
		return errors.Join(err, c.Compute.Validate())
	case models.IsTorch(c.Engine):
		return errors.Join(err, c.torch().Check())
	}
	return errors.Join(err, fmt.Errorf("engine: %q; must be torch or torch=ADDRESS: other servers draw samples of "+
		"their own, and score none that are given", c.Engine))
}

func (c Config) torch() models.Torch {
	t := models.TorchAt(c.Engine, c.EngineKey, c.Compute)
	t.Adapter, t.AdapterScale = c.Adapter, c.AdapterScale
	return t
}

// open opens the model on all devices, or by workers.
func (c Config) open(ctx context.Context, log zerolog.Logger) (*models.Devices, error) {
	if models.IsTorch(c.Engine) {
		return c.torch().Open(ctx, c.Model, nil, log)
	}
	o := model.Options{Adapter: c.Adapter, AdapterScale: c.AdapterScale}
	return c.Compute.Open(models.Registry{Images: c.Models, Text: c.Languages}, c.Model, o, false)
}

// maxWaiting bounds the requests that wait for a worker; more are told to ask again.
const maxWaiting = 4096

// Run opens the model and answers requests until ctx ends and those in flight are answered. An error is one of the
// settings, the model or the server.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("teacher config: %w", err)
	}
	opened, err := cfg.open(ctx, log)
	if ctx.Err() != nil && err != nil {
		return nil // stopped before it was up
	}
	if err != nil {
		return err
	}
	err = serve(ctx, cfg, opened, b, log)
	return errors.Join(err, opened.Close())
}

// service is a teacher that answers.
type service struct {
	bus     *bus.Bus
	log     zerolog.Logger
	name    string
	files   *images.Files       // that samples are conditioned on
	idle    chan engine.Network // one for each sample that is computed at once
	waiting atomic.Int64        // requests that are not answered yet
	work    sync.WaitGroup
	ctx     context.Context // of the requests in flight: it ends after the drain timeout
	left    atomic.Int64    // networks whose device is not lost
	lost    chan error      // gets why the last one was given up
	counted *instrument.Work
}

// serve answers requests with an open model until ctx ends.
func serve(ctx context.Context, cfg Config, opened *models.Devices, b *bus.Bus, log zerolog.Logger) error {
	network, workers := opened.All[0].Network, cmp.Or(cfg.Workers, opened.Workers())
	s := &service{
		bus: b, log: log, name: cmp.Or(cfg.Name, network.Name()), idle: make(chan engine.Network, workers),
		lost: make(chan error, 1), files: images.NewFiles(b.GetBlob),
	}
	s.counted = instrument.New(nil, "teacher").Work(s.name, schemas.TeacherSubject(s.name), s.name)
	s.left.Store(int64(workers))
	for i := range workers {
		s.idle <- opened.All[i%len(opened.All)].Network
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	s.ctx = work
	subscription, err := b.Conn().QueueSubscribe(schemas.TeacherSubject(s.name), s.name, s.receive)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", schemas.TeacherSubject(s.name), err)
	}
	ended := make(chan struct{})
	subscription.SetClosedHandler(func(string) { close(ended) })
	if err := b.Conn().Flush(); err != nil {
		return fmt.Errorf("listen on %s: %w", schemas.TeacherSubject(s.name), err)
	}
	log.Info().Str("model", network.Name()).Str("teacher", s.name).Str("weights_digest", network.Digest()).
		Str("device", opened.IDs()).Str("backend", network.Backend()).Int("workers", workers).Msg("teacher ready")
	if cfg.Listening != nil {
		cfg.Listening(s.name)
	}
	var lost error
	select {
	case <-ctx.Done():
	case lost = <-s.lost:
	}
	late := time.AfterFunc(cfg.DrainTimeout, stop)
	defer late.Stop()
	if err := subscription.Drain(); err == nil {
		select {
		case <-ended:
		case <-work.Done():
		}
	}
	s.work.Wait()
	return lost
}

// receive takes a request and has it answered once a worker is idle.
func (s *service) receive(m *nats.Msg) {
	if s.waiting.Add(1) > maxWaiting {
		s.waiting.Add(-1)
		s.respond(m, &schemas.TeacherReply{
			Error: fmt.Sprintf("busy: %d requests wait", maxWaiting), Code: schemas.CodeFailed, Retry: true,
		})
		return
	}
	s.work.Go(func() {
		defer s.waiting.Add(-1)
		select {
		case network := <-s.idle:
			began := time.Now()
			reply, err := s.answer(network, m.Data)
			s.counted.Done(s.ctx, began, err)
			switch {
			case !errors.Is(err, tensor.ErrDeviceLost):
				s.idle <- network
			case s.left.Add(-1) == 0:
				s.lost <- fmt.Errorf("no device is left: %w", err)
			}
			s.respond(m, reply)
		case <-s.ctx.Done():
			s.respond(m, &schemas.TeacherReply{Error: "the teacher stops", Code: schemas.CodeFailed, Retry: true})
		}
	})
}

// refusal says by its code why a request gets no log-probs, and will not get them later.
type refusal struct {
	code string
	err  error
}

func (r *refusal) Error() string { return r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func refuse(code, format string, args ...any) error {
	return &refusal{code, fmt.Errorf(format, args...)}
}

// answer returns the reply to a request, and the error that it says.
func (s *service) answer(network engine.Network, data []byte) (reply *schemas.TeacherReply, err error) {
	began, r := time.Now(), &schemas.TeacherRequest{}
	err = engine.Guarded(func() (err error) {
		if err := schemas.DecodeValid(data, r); err != nil {
			return refuse(schemas.CodeInvalid, "%w", err)
		}
		reply, err = s.score(network, r)
		return err
	})
	log := s.log.With().Str("run_id", string(r.Run)).Str("uid", string(r.UID)).Int64("sample_index", r.SampleIndex).
		Dur("dur_ms", time.Since(began)).Logger()
	if err == nil {
		reply.Model, reply.WeightsDigest, reply.Backend = network.Name(), network.Digest(), network.Backend()
		log.Debug().Msg("sample scored")
		return reply, nil
	}
	reply = &schemas.TeacherReply{Error: err.Error(), Code: schemas.CodeFailed, Retry: true}
	var terminal *bus.TerminalError
	if refused, ok := errors.AsType[*refusal](err); ok {
		reply.Code, reply.Retry = refused.code, false
	} else if errors.As(err, &terminal) {
		reply.Retry = false
		reply.Error, _, _ = strings.Cut(reply.Error, "\n") // the stack of a panic is for the log
	}
	log.Warn().Err(err).Str("code", reply.Code).Bool("retry", reply.Retry).Msg("sample not scored")
	return reply, err
}

// respond sends a reply to the client that asked.
func (s *service) respond(m *nats.Msg, reply *schemas.TeacherReply) {
	data, err := schemas.Encode(reply)
	if err == nil && m.Reply != "" {
		err = m.Respond(data)
	}
	if err != nil {
		s.log.Warn().Err(err).Msg("no reply sent")
	}
}

// score loads the sample that a request names, and computes its log-probs. An error is a refusal, or may pass.
func (s *service) score(network engine.Network, r *schemas.TeacherRequest) (*schemas.TeacherReply, error) {
	what := fmt.Sprintf("sample %d of group %s of run %s", r.SampleIndex, r.UID, r.Run)
	m, err := s.bus.Last(s.ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(r.Run, r.UID, r.SampleIndex, r.Stage))
	if errors.Is(err, bus.ErrNotFound) {
		return nil, refuse(schemas.CodeUnknownSample, "%s: no trajectory is stored; it is not made yet, or was removed",
			what)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	t := &schemas.Trajectory{}
	if err := bus.Fits(m, t); err != nil {
		return nil, refuse(schemas.CodeUnknownSample, "%s: what is stored is no trajectory: %w", what, err)
	}
	reply, err := s.scoreSample(network, t, r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if err := reply.Validate(); err != nil {
		return nil, refuse(schemas.CodeFailed, "%s: %w", what, err)
	}
	return reply, nil
}

// gone makes a refusal of the error that something is no longer stored, or is not what its digest says; other errors
// stay as they are, and may pass.
func gone(err error) error {
	if errors.Is(err, bus.ErrNotFound) || errors.Is(err, bus.ErrCorrupt) {
		return refuse(schemas.CodeGone, "%w", err)
	}
	return err
}
