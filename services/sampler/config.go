package sampler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
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
	Models    model.Registry `koanf:"-"`
	Languages lm.Registry    `koanf:"-"`
	// Loading is told how much of the model is read; nil: nothing is told.
	Loading model.Progress `koanf:"-"`
}

// Requests say which requests the sampler serves, under which name, and how often and how long it tries.
type Requests struct {
	Lane       schemas.Lane  `koanf:"lane" help:"request queue to serve; default the model's name"`
	Instance   string        `koanf:"instance" help:"name of this process in events; default random"`
	AckWait    time.Duration `koanf:"ack_wait" help:"redelivery of a request whose sampler died"`
	MaxDeliver int           `koanf:"max_deliver" help:"failures of a request before it becomes a dead letter; a killed or restarted process counts for a tenth of one"`
	// DrainTimeout bounds the samples in flight at shutdown; what is not finished is put back.
	DrainTimeout time.Duration `koanf:"drain_timeout" help:"time for the samples in flight at shutdown; the rest is put back into the queue"`
}

// Batching says what is computed together, and what may wait to be stored.
type Batching struct {
	Batch            int  `koanf:"batch" help:"samples denoised together in one micro-batch"`
	Workers          int  `koanf:"workers" help:"micro-batches running side by side; 0 for one per GPU, or per two cores"`
	SharePrefixes    bool `koanf:"share_prefixes" help:"of texts, compute the common beginning of a prompt's samples once; results do not depend on it"`
	PublishWindowMiB int  `koanf:"publish_window_mib" help:"MiB of step events that may wait to be stored"`
}

// Process is what the process around the sampler gives it. No flag sets it.
type Process struct {
	// DiskFree returns how many bytes of the server's disk are free; nil: that is not known.
	DiskFree func() (int64, error) `koanf:"-"`
	// Health adds a condition of readiness; nil: readiness is not served.
	Health func(name string, check func() error) `koanf:"-"`
	// Note adds lines to /readyz on work that waits on purpose; nil: readiness is not served.
	Note func(say func() []string) `koanf:"-"`
	// Announced is called once the model is loaded and announced; nil: nothing is called.
	Announced func() `koanf:"-"`
	// Metrics is where the service registers its metrics; nil: nowhere.
	Metrics prometheus.Registerer `koanf:"-"`
}

// Help returns the help text of a field of Config, for flags of other commands. It panics on an unknown name.
func Help(field string) string {
	f, ok := reflect.TypeFor[Config]().FieldByName(field)
	if !ok {
		panic("sampler: no setting " + field)
	}
	return f.Tag.Get("help")
}

// DefaultConfig returns settings that fit a laptop: the model signs on whatever device there is.
func DefaultConfig() Config {
	return Config{
		Weights: Weights{
			Own: weights.Own{Model: "signs", AdapterScale: 1}, Models: families.All(), Languages: languages.All(),
		},
		Compute:  models.Compute{Device: devices.Auto, DType: devices.Auto},
		Server:   engine.Server{EnginePatience: time.Minute, EngineConcurrency: 64},
		Requests: Requests{AckWait: 30 * time.Second, MaxDeliver: 10, DrainTimeout: 20 * time.Second},
		Batching: Batching{Batch: 8, SharePrefixes: true, PublishWindowMiB: 64},
	}
}

// Validate checks the settings of a sampler. It returns all faults joined, each with its field name.
func (c Config) Validate() error {
	var errs []error
	if c.Model == "" {
		errs = append(errs, errors.New("model: empty; must be synthetic or a folder of a model"))
	}
	if math.IsNaN(c.AdapterScale) || math.IsInf(c.AdapterScale, 0) {
		errs = append(errs, fmt.Errorf("adapter_scale: %v; must be finite", c.AdapterScale))
	}
	if c.WeightsDir != "" {
		errs = append(errs, checkFolder("weights_dir", c.WeightsDir))
	}
	errs = append(errs, c.validateEngine())
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

// validateEngine joins the faults of the settings of what computes: devices, workers in Python, or a server that draws
// the samples.
func (c Config) validateEngine() error {
	var errs []error
	usual, torch, adapters := DefaultConfig(), models.IsTorch(c.Engine), c.EngineAdapters != ""
	// absent refuses a setting that has no effect.
	absent := func(set bool, setting, why string) {
		if set {
			errs = append(errs, fmt.Errorf("%s: set; must be absent %s", setting, why))
		}
	}
	if !torch {
		absent(c.Compile, "compile", "without --engine torch")
		absent(c.VAETiling, "vae_tiling", "without --engine torch")
		absent(c.TextEncoderDevice != "", "text_encoder_device", "without --engine torch")
	}
	if c.Engine == "" {
		absent(c.EngineKey != "", "engine_key", "without engine")
		absent(adapters, "engine_adapters", "without engine")
		return errors.Join(append(errs, c.Compute.Validate())...)
	}
	if c.EngineConcurrency < 1 || c.EngineConcurrency > 1024 {
		errs = append(errs, fmt.Errorf("engine_concurrency: %d; must be between 1 and 1024", c.EngineConcurrency))
	}
	if c.EnginePatience < time.Second {
		errs = append(errs, fmt.Errorf("engine_patience: %v; must be at least 1s", c.EnginePatience))
	}
	texts := !torch && c.server().DrawsTexts()
	if c.EngineConcurrency != usual.EngineConcurrency && !texts {
		errs = append(errs, fmt.Errorf("engine_concurrency: %d; must be absent but for a server of texts",
			c.EngineConcurrency))
	}
	if torch {
		absent(adapters, "engine_adapters", "with torch, whose workers get the weights without a folder")
		return errors.Join(append(errs, c.torch().Check())...)
	}
	if adapters {
		errs = append(errs, checkFolder("engine_adapters", c.EngineAdapters))
	}
	absent(c.WeightsDir != "" && !adapters, "weights_dir", "without engine_adapters: the server keeps its weights")
	errs = append(errs, c.Compute.Validate())
	if err := c.server().Check(); err != nil {
		errs = append(errs, fmt.Errorf("engine: %w", err))
	}
	absent(c.Batch != usual.Batch && texts, "batch", "beside a server of texts: engine_concurrency is for it")
	absent(c.Workers != usual.Workers && texts, "workers", "beside a server of texts: engine_concurrency is for it")
	const computes = "beside engine: the server computes"
	absent(c.Adapter != "" && !adapters, "adapter", computes)
	absent(c.Device != devices.Auto && c.Device != devices.CPU, "device", computes)
	absent(c.DType != devices.Auto, "dtype", computes)
	absent(c.Deterministic, "deterministic", computes)
	return errors.Join(errs...)
}

// openModel opens the model on the sampler's devices or by workers, or connects to the server that draws the samples.
// It waits until they are ready; the error names what is missing.
func (c Config) openModel(ctx context.Context, log zerolog.Logger) (*models.Devices, error) {
	known := models.Registry{Images: c.Models, Text: c.Languages}
	progress := progressLogger(c.Loading, log)
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
	return known.PolicyOf(c.Model)
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
