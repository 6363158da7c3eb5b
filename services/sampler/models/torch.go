package models

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// engineTorch is the name in --engine of workers that compute the network of an image model, and the beginning of
// their backends.
const engineTorch = "torch"

// IsTorch reports whether an address is that of workers: torch, or torch=ADDRESS.
func IsTorch(address string) bool {
	name, _, _ := strings.Cut(address, "=")
	return name == engineTorch
}

// TorchOptions are settings of workers that are started.
type TorchOptions struct {
	remote.Options
	// Spare keeps the worker that Inspect starts, for Open; nil: each starts its own.
	Spare *Spare `key:"-"`
}

// Torch is the settings of workers that compute the network of an image model. Its Engine is torch, which starts
// workers, or torch=ADDRESS, which joins one: see remote.Config.
type Torch struct {
	engine.Server
	TorchOptions
	// Compute is what started workers compute on. Device may name several, as cuda:0,cuda:1: each gets a worker.
	Compute Compute
	// Wait bounds how long a worker is waited for that is joined; 0: there is no bound.
	Wait time.Duration
	// Tested has Inspect wait until the weights are read and the model is tested.
	Tested bool
	// Adapter is a LoRA to add to the model; AdapterScale multiplies its changes, default 1.
	Adapter      string
	AdapterScale float64

	waits *atomic.Value // what was waited for last; nil: health is not asked for
}

// TorchAt returns the settings of workers by an --engine, its key, and what those compute on that it starts.
func TorchAt(at, key string, c Compute) Torch {
	return Torch{Server: engine.Server{Engine: at, EngineKey: key}, Compute: c}
}

// Spare keeps a worker that Inspect started, until Open takes it or it is closed.
type Spare = remote.Spare

// TorchOf returns the settings with which a sample was made that names its backend; ok is false where no worker
// computed it.
func TorchOf(backend string, c Compute) (t Torch, ok bool) {
	name, parts, _ := strings.Cut(backend, "-")
	if name != engineTorch {
		return Torch{}, false
	}
	for part := range strings.SplitSeq(parts, "/") {
		switch part {
		case dtypeF32, dtypeBF16, dtypeF16:
			if c.DType == "" || c.DType == devices.Auto {
				c.DType = part
			}
		case "deterministic":
			c.Deterministic = true
		case "vae-tiling":
			t.VAETiling = true
		case "generic":
			t.Generic = true
		case "trust-class":
			t.TrustClass = true
		}
		if strings.HasPrefix(part, "encoders-cpu") { // which GPU it was makes no difference
			t.TextEncoderDevice = devices.CPU
		}
		if strings.HasPrefix(part, "vllm-omni-") {
			t.Network = "vllm-omni"
		}
	}
	t.Engine, t.Compute = engineTorch, c
	return t, true
}

// configs returns the settings of each worker, one for each device.
func (t Torch) configs(log zerolog.Logger) (list []remote.Config) {
	_, address, _ := strings.Cut(t.Engine, "=")
	hashes := &safetensors.Hashes{}
	for device := range strings.SplitSeq(t.Compute.Device, ",") {
		list = append(list, remote.Config{
			Address: address, Token: t.EngineKey, Device: device, DType: t.Compute.DType,
			Deterministic: t.Compute.Deterministic, Threads: t.Compute.Threads, Options: t.Options,
			Patience: t.EnginePatience, Wait: t.Wait, Adapter: t.Adapter, AdapterScale: t.AdapterScale,
			Spare: t.Spare, Hashes: hashes, Tested: t.Tested, Log: func(e remote.Event) { t.logEvent(log, e) },
		})
	}
	return list
}

// logEvent logs what happens to a worker in Python, and what the worker writes. What is waited for is told to Waiting,
// too.
func (t Torch) logEvent(log zerolog.Logger, e remote.Event) {
	level := zerolog.InfoLevel
	if e.Err != nil || e.Waiting && t.Waiting == nil {
		level = zerolog.WarnLevel // it is shown nowhere else
	}
	if text := e.Text; e.Waiting {
		if e.Err != nil {
			text += ": " + e.Err.Error()
		}
		if t.Waiting != nil {
			t.Waiting(text)
		}
		if t.waits != nil && text != "" {
			t.waits.Store(text)
		}
	}
	switch {
	case e.Output != "":
		log.Info().Str("worker", e.Output).Msg("the worker writes")
	case e.Text != "": // else a wait is over
		log.WithLevel(level).Err(e.Err).Msg(e.Text)
	}
}

// Check checks the settings of workers in Python. It returns all faults joined, each with its field name.
func (t Torch) Check() error {
	if t.Engine != engineTorch && strings.TrimPrefix(t.Engine, engineTorch) == "=" {
		return fmt.Errorf("engine: %q; must be torch, torch=unix:/PATH, torch=HOST:PORT or torch=tls:HOST:PORT",
			t.Engine)
	}
	var errs []error
	for _, c := range t.configs(zerolog.Nop()) {
		if c.Address == "" && c.Token != "" {
			errs = append(errs, errors.New("engine_key: set; must be absent where the worker is started here"))
		}
		errs = append(errs, c.Check())
	}
	return errors.Join(errs...)
}

// torchFolder returns the folder of a diffusers pipeline called name. Which class it is of, the worker says.
func torchFolder(name string) (string, error) {
	dir, tried, err := model.FindFolder(name, "model_index.json")
	if err != nil {
		return "", fmt.Errorf("model %q: %w", name, err)
	}
	if dir == "" {
		return "", model.Unknown(name, "model_index.json", tried)
	}
	return dir, nil
}

// Open starts a worker in Python for each device, or joins one, and waits until the model is loaded. progress, which
// may be nil, is told how much of the weights is read for their digest. It fails if a worker cannot be started or
// joined, or cannot load the model; nothing is left running then.
func (t Torch) Open(ctx context.Context, name string, progress model.Progress, log zerolog.Logger,
) (_ *Devices, err error) {
	if err := t.Check(); err != nil {
		return nil, err
	}
	dir, err := torchFolder(name)
	if err != nil {
		return nil, err
	}
	p := &Devices{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	var reached []*remote.Model
	opened := t.readiness(func() error { return anyReached(reached) })
	for _, c := range t.configs(log) {
		m, err := remote.Open(ctx, dir, c, progress)
		if ctx.Err() != nil {
			return p, ctx.Err()
		}
		if err != nil {
			return p, fmt.Errorf("engine: %w", err)
		}
		if differs := images.ScheduleDiffers(m.Card()); differs != "" {
			log.Warn().Str("model", name).Str("schedule", differs).Msg("diffusers has another schedule for the model")
		}
		reached = append(reached, m)
		p.All = append(p.All, Device{devices.Device{ID: engineTorch + ":" + m.Device()}, &images.Network{Model: m}})
	}
	opened()
	return p, nil
}

// readiness adds the condition engine: what a worker is waited for, and once opened is called what check says.
func (t *Torch) readiness(check func() error) (opened func()) {
	if t.Ready == nil {
		return func() {}
	}
	var open atomic.Bool
	t.waits = &atomic.Value{}
	t.waits.Store("the torch worker starts")
	waits := t.waits
	t.Ready("engine", func() error {
		if !open.Load() {
			return errors.New(waits.Load().(string))
		}
		return check()
	})
	return func() { open.Store(true) }
}

// anyReached is the health check of workers: it returns why none can be called; nil: one can.
func anyReached(workers []*remote.Model) error {
	var errs []error
	for _, w := range workers {
		err := w.Away()
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Inspect describes the model called name by what a worker says of it, which waits for the weights where Tested says
// so. The error is of the settings, the folder or the worker.
func (t Torch) Inspect(ctx context.Context, name string) (dir string, info *model.Info, err error) {
	if err := t.Check(); err != nil {
		return "", nil, err
	}
	if dir, err = torchFolder(name); err != nil {
		return "", nil, err
	}
	if info, err = remote.Inspect(ctx, dir, t.configs(zerolog.Nop())[0]); err != nil {
		return dir, nil, fmt.Errorf("engine: %w", err)
	}
	return dir, info, nil
}

// PolicyOf is Registry.PolicyOf for a model that a worker computes.
func (t Torch) PolicyOf(ctx context.Context, name string) (p *schemas.Policy, problems []string, err error) {
	_, info, err := t.Inspect(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	return images.PolicyOf(info.Card), info.Problems, nil
}

// Reference has Python make a sample of the model called name by the pipeline of diffusers itself, see
// remote.Reference.
func Reference(ctx context.Context, name, out string, args ...string) ([]byte, error) {
	dir, err := torchFolder(name)
	if err != nil {
		return nil, err
	}
	return remote.Reference(ctx, dir, out, args...)
}

// Module runs a module of meander's Python package, see remote.Module.
func Module(ctx context.Context, stdout, stderr io.Writer, module string, args ...string) (int, error) {
	return remote.Module(ctx, stdout, stderr, module, args...)
}
