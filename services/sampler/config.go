package sampler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// Config is the settings of the sampler service. Its parts are embedded: a flag, a variable and a key of the file are
// named by the field alone.
type Config struct {
	Weights
	models.Compute
	engine.Server
	models.TorchOptions
	Requests
	Batching
	Process
}

// Weights say which weights the sampler begins with.
type Weights struct {
	weights.Own
	// Models are the families of image models that Model may belong to, Languages those of language models.
	Models    model.Registry `key:"-"`
	Languages lm.Registry    `key:"-"`
	// Loading is told how much of the model is read; nil: nothing is told.
	Loading model.Progress `key:"-"`
}

// Requests say which requests the sampler serves, under which name, and how often and how long it tries.
type Requests struct {
	Lane         schemas.Lane  `key:"lane" form:"token?" help:"request queue to serve; default the model's name"`
	Instance     string        `key:"instance" help:"name of this process in events; default random"`
	AckWait      time.Duration `key:"ack_wait" range:"1s.." help:"redelivery of a request whose sampler died"`
	MaxDeliver   int           `key:"max_deliver" range:"1.." help:"failures of a request before it becomes a dead letter; a killed or restarted process counts for a tenth of one"`
	DrainTimeout time.Duration `key:"drain_timeout" range:"(0.." help:"time for the samples in flight at shutdown; the rest is put back into the queue"`
}

// Batching says what is computed together, and what may wait to be stored.
type Batching struct {
	Batch            int  `key:"batch" range:"1..1024" help:"samples denoised together in one micro-batch"`
	Workers          int  `key:"workers" range:"0..256" help:"micro-batches running side by side; 0 for one per GPU, or per two cores"`
	SharePrefixes    bool `key:"share_prefixes" help:"of texts, compute the common beginning of a prompt's samples once; results do not depend on it"`
	PublishWindowMiB int  `key:"publish_window_mib" range:"1..16384" help:"MiB of step events that may wait to be stored"`
}

// Process is what the process around the sampler gives it. No flag sets it.
type Process struct {
	// DiskFree returns how many bytes of the server's disk are free; nil: that is not known.
	DiskFree func() (int64, error) `key:"-"`
	// Health adds a condition of readiness; nil: readiness is not served.
	Health func(name string, check func() error) `key:"-"`
	// Note adds lines to /readyz on work that waits on purpose; nil: readiness is not served.
	Note func(say func() []string) `key:"-"`
	// Announced is called once the model is loaded and announced; nil: nothing is called.
	Announced func() `key:"-"`
	// Metrics is where the service registers its metrics; nil: nowhere.
	Metrics prometheus.Registerer `key:"-"`
}

// DefaultConfig returns settings that fit a laptop: the model signs on whatever device there is.
func DefaultConfig() Config {
	return Config{
		Weights: Weights{
			Own:    weights.Own{Model: "signs", AdapterScale: 1, Resident: 2},
			Models: families.All(), Languages: languages.All(),
		},
		Compute:  models.Compute{Device: devices.Auto, DType: devices.Auto},
		Server:   engine.Server{EnginePatience: time.Minute, EngineConcurrency: 64},
		Requests: Requests{AckWait: 30 * time.Second, MaxDeliver: 10, DrainTimeout: 20 * time.Second},
		Batching: Batching{Batch: 8, SharePrefixes: true, PublishWindowMiB: 64},
	}
}

// Validate checks the settings of a sampler. It returns all faults joined, each with its field name.
func (c Config) Validate() error {
	err := errors.Join(schemas.CheckFields(&c), c.validateEngine())
	if c.Model == "" {
		err = errors.Join(errors.New("model: empty; must be synthetic, a folder, or ORG/NAME of the Hub"), err)
	}
	if c.WeightsDir != "" {
		err = errors.Join(err, checkFolder("weights_dir", c.WeightsDir))
	}
	return err
}

// torch returns the settings of workers that compute the network of an image model.
func (c Config) torch() models.Torch {
	return models.Torch{Server: engine.Server(c.server()), TorchOptions: c.TorchOptions, Compute: c.Compute}
}

// server returns the settings of a server that draws the samples.
func (c Config) server() models.Server {
	c.Server.Ready = c.ready()
	return models.Server(c.Server)
}

// ready is Health, where conditions say of which lane they are.
func (c Config) ready() func(name string, check func() error) {
	if c.Health == nil {
		return nil
	}
	lane := cmp.Or(c.Lane, schemas.Lane(model.NameOf(c.Model)))
	return func(name string, check func() error) {
		c.Health(name, func() error {
			if err := check(); err != nil {
				return fmt.Errorf("lane %s: %w", lane, err)
			}
			return nil
		})
	}
}

// checkFolder returns an error if the folder of a setting is not there.
func checkFolder(setting, dir string) error {
	f, err := os.Stat(dir)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", setting, err)
	case !f.IsDir():
		return fmt.Errorf("%s: %q; must be a folder", setting, dir)
	}
	return nil
}

// validateEngine joins the faults of what computes: devices, workers in Python, or a server that draws the samples.
// What one of them cannot obey must be absent.
func (c Config) validateEngine() (err error) {
	torch, usual := models.IsTorch(c.Engine), DefaultConfig()
	served := c.Engine != "" && !torch
	texts := served && c.server().DrawsTexts()
	for _, of := range []struct {
		name   string
		refuse bool
		why    string
	}{
		{"compile", c.Compile && !torch, "without --engine torch"},
		{"vae_tiling", c.VAETiling && !torch, "without --engine torch"},
		{"generic", c.Generic && !torch, "without --engine torch"},
		{"trust_class", c.TrustClass && !torch, "without --engine torch"},
		{"family", c.Family != "" && !torch, "without --engine torch"},
		{"network", c.Network != "" && !torch, "without --engine torch"},
		{"text_encoder_device", c.TextEncoderDevice != "" && !torch, "without --engine torch"},
		{"engine_key", c.EngineKey != "" && c.Engine == "", "without engine"},
		{"engine_adapters", c.EngineAdapters != "" && c.Engine == "", "without engine"},
		{"engine_adapters", c.EngineAdapters != "" && torch, "with torch, whose workers need no folder"},
		{
			"engine_concurrency", c.EngineConcurrency != usual.EngineConcurrency && c.Engine != "" && !texts,
			"but for a server of texts",
		},
		{
			"weights_dir", c.WeightsDir != "" && served && c.EngineAdapters == "",
			"without engine_adapters: the server keeps its weights",
		},
		{"batch", c.Batch != usual.Batch && texts, "beside a server of texts: engine_concurrency is for it"},
		{"workers", c.Workers != usual.Workers && texts, "beside a server of texts: engine_concurrency is for it"},
		{"adapter", c.Adapter != "" && served && c.EngineAdapters == "", "beside engine: the server computes"},
		{"device", served && c.Device != devices.Auto && c.Device != devices.CPU, "beside engine: the server computes"},
		{"dtype", served && c.DType != devices.Auto, "beside engine: the server computes"},
		{"deterministic", served && c.Deterministic, "beside engine: the server computes"},
	} {
		if of.refuse {
			err = errors.Join(err, fmt.Errorf("%s: set; must be absent %s", of.name, of.why))
		}
	}
	if c.EngineAdapters != "" && served {
		err = errors.Join(err, checkFolder("engine_adapters", c.EngineAdapters))
	}
	if torch {
		return errors.Join(err, c.torch().Check())
	}
	err = errors.Join(err, c.Compute.Validate())
	if served {
		if fault := c.server().Check(); fault != nil {
			err = errors.Join(err, fmt.Errorf("engine: %w", fault))
		}
	}
	return err
}

// openModel opens the model on the sampler's devices or by workers, or connects to the server that draws the samples.
// It waits until they are ready; the error names what is missing.
func (c Config) openModel(ctx context.Context, log zerolog.Logger) (*models.Devices, error) {
	known := models.Registry{Images: c.Models, Text: c.Languages}
	progress := progressLogger(c.Loading, log)
	if err := models.Fetch(ctx, c.Model, c.Adapter, models.Wanted(c.Engine), models.Logged(log)); err != nil {
		return nil, err
	}
	switch {
	case models.IsTorch(c.Engine):
		return c.torch().Open(ctx, c.Model, progress, log)
	case c.Engine != "":
		return c.server().Dial(ctx, known, c.Model, log)
	}
	slow := func(err error) { log.Warn().Err(err).Msg("a GPU is slower than it could be") }
	return c.Compute.Open(known, c.Model, model.Options{Progress: progress, Warn: slow}, false)
}

// PolicyOf returns the policy that the sampler would announce, without loading the model's weights. problems say why
// the model could not be opened.
func (c Config) PolicyOf(ctx context.Context) (p *schemas.Policy, problems []string, err error) {
	if models.IsTorch(c.Engine) {
		t := c.torch()
		t.Wait = askWithin
		return t.PolicyOf(ctx, c.Model)
	}
	known := models.Registry{Images: c.Models, Text: c.Languages}
	if c.Engine != "" {
		ctx, cancel := context.WithTimeout(ctx, askWithin)
		defer cancel()
		return c.server().PolicyOf(ctx, known, c.Model)
	}
	return c.Compute.PolicyOf(known, c.Model)
}

// askWithin is how long a worker that is joined, or a server, may take to be there, where only a description is wanted.
const askWithin = 10 * time.Second

// progressLogger returns a function that logs how much of a model is read, every five seconds, and calls other, if
// there is one.
func progressLogger(other model.Progress, log zerolog.Logger) model.Progress {
	const every = 5 * time.Second
	last := time.Now()
	return func(part string, done, total int) {
		if other != nil {
			other(part, done, total)
		}
		if now := time.Now(); now.Sub(last) >= every {
			last = now
			log.Info().Str("part", part).Int("done_mib", done>>20).Int("total_mib",
				total>>20).Msg("the model is loading")
		}
	}
}
