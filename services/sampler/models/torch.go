package models

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/remote"
	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
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

// Torch is the settings of workers that compute the network of an image model.
type Torch struct {
	// Address is torch, which starts workers, or torch=ADDRESS, which joins one: see remote.Config.
	Address string
	// Compute is what started workers compute on. Device may name several, as cuda:0,cuda:1: each gets a worker.
	Compute Compute
	// Key is the token of a worker that is joined.
	Key string
	// Patience is the least time after which a call without an answer counts as lost.
	Patience time.Duration
	// Wait bounds how long a worker is waited for that is joined; 0: there is no bound.
	Wait time.Duration
	// Adapter is a LoRA to add to the model; AdapterScale multiplies its changes, default 1.
	Adapter      string
	AdapterScale float64
	// Ready adds a condition of readiness; nil: there is none.
	Ready func(name string, check func() error)
}

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
		}
	}
	return Torch{Address: engineTorch, Compute: c}, true
}

// configs returns the settings of each worker.
func (t Torch) configs(log zerolog.Logger) (list []remote.Config) {
	_, address, _ := strings.Cut(t.Address, "=")
	for device := range strings.SplitSeq(t.Compute.Device, ",") {
		list = append(list, remote.Config{
			Address: address, Token: t.Key, Device: device, DType: t.Compute.DType, Deterministic: t.Compute.Deterministic,
			Threads: t.Compute.Threads, Patience: t.Patience, Wait: t.Wait, Adapter: t.Adapter, AdapterScale: t.AdapterScale,
			Log: func(e remote.Event) { logEvent(log, e) },
		})
	}
	return list
}

// logEvent logs what happens to a worker, and what it writes.
func logEvent(log zerolog.Logger, e remote.Event) {
	switch {
	case e.Output != "":
		log.Info().Str("worker", e.Output).Msg("the worker writes")
	case e.Err != nil:
		log.Warn().Err(e.Err).Msg(e.Text)
	default:
		log.Info().Msg(e.Text)
	}
}

// Check joins the faults of the settings by field name.
func (t Torch) Check() error {
	if t.Address != engineTorch && strings.TrimPrefix(t.Address, engineTorch) == "=" {
		return fmt.Errorf("engine: %q; must be torch, torch=unix:/PATH, torch=HOST:PORT or torch=tls:HOST:PORT", t.Address)
	}
	var errs []error
	for _, c := range t.configs(zerolog.Nop()) {
		if c.Address == "" && c.Token != "" {
			errs = append(errs, errors.New("engine_key: set; must be absent where the worker is started here"))
		}
		errs = append(errs, c.Check())
	}
	return errors.Join(append(errs, t.Compute.validateThreads())...)
}

// folder returns the folder of the model called name, of whatever class.
func (t Torch) folder(name string) (string, error) {
	dir, tried := model.FindFolder(name, "model_index.json")
	if dir == "" {
		return "", model.Unknown(name, "model_index.json", tried)
	}
	return dir, nil
}

// Open starts a worker for each device, or joins one, and waits until the model is loaded. progress, which may be nil,
// is told how much of the weights is read for their digest.
func (t Torch) Open(
	ctx context.Context, name string, progress model.Progress, log zerolog.Logger,
) (_ *Devices, err error) {
	if err := t.Check(); err != nil {
		return nil, err
	}
	dir, err := t.folder(name)
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
	for _, c := range t.configs(log) {
		m, err := remote.Open(ctx, dir, c, progress)
		if ctx.Err() != nil {
			return p, ctx.Err()
		}
		if err != nil {
			return p, fmt.Errorf("engine: %w", err)
		}
		reached = append(reached, m)
		p.All = append(p.All, Device{devices.Device{ID: engineTorch + ":" + m.Device()}, &images.Network{Model: m}})
	}
	if t.Ready != nil {
		t.Ready("engine", func() error { return anyReached(reached) })
	}
	return p, nil
}

// anyReached returns why no worker can be called; nil: one can.
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

// Inspect describes the model called name by what a worker says of it, which does not wait for the weights.
func (t Torch) Inspect(ctx context.Context, name string) (dir string, info *model.Info, err error) {
	if err := t.Check(); err != nil {
		return "", nil, err
	}
	if dir, err = t.folder(name); err != nil {
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
