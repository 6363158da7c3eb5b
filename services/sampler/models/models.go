// Package models opens the model that a sampler serves: on local devices (Compute.Open), by workers that compute its
// network (Torch.Open), or at a server that draws its samples (Server.Dial). All return Devices. A Registry lists the
// model families that a program knows.
package models

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
)

// Compute is the settings of the devices that compute a model, here or in workers.
type Compute struct {
	Device        string `key:"device" help:"what computes: auto (GPUs if there are, else the CPU), cpu, cuda:0, or several GPUs as cuda:0,cuda:1; with --engine torch also mps or xpu"`
	DType         string `key:"dtype" help:"products on a GPU: f32, bf16 (tensor cores), auto (bf16 for models of a billion parameters and more); with --engine torch the whole network, also f16"`
	Deterministic bool   `key:"deterministic" help:"in bf16, fixed algorithms, so that bits do not depend on the batch; without it events of such a GPU say nondeterministic"`
	Threads       int    `key:"threads" range:"0..1024" help:"threads of the CPU; 0 for all cores; results do not depend on it"`
}

// Element types of Compute, besides auto.
const (
	dtypeF32  = "f32"
	dtypeBF16 = "bf16"
	dtypeF16  = "f16" // of workers only
)

// largeModel is the number of parameters from which on dtype auto is bf16.
const largeModel = 1_000_000_000

// Validate checks what no tag of the settings of local computing says. It returns all faults joined, each with its
// field name. A device that this machine does not have is a fault.
func (c Compute) Validate() error {
	err := devices.Available(c.Device)
	switch c.DType {
	case devices.Auto, dtypeF32:
	case dtypeBF16:
		if c.Device == devices.CPU {
			err = errors.Join(err, fmt.Errorf("dtype: %q; must be auto or f32: the CPU computes in float32", c.DType))
		}
	default:
		err = errors.Join(err, fmt.Errorf("dtype: %q; must be auto, f32 or bf16", c.DType))
	}
	return err
}

// Registry lists the model families that a program knows: of images, and of text.
type Registry struct {
	Images model.Registry
	Text   lm.Registry
}

// open opens the image model called name, or else the language model. model.ErrUnknown: there is neither.
func (r Registry) open(name string, o model.Options) (engine.Network, error) {
	image, err := r.Images.Open(name, o)
	if err == nil {
		return &images.Network{Model: image}, nil
	}
	if !errors.Is(err, model.ErrUnknown) || len(r.Text) == 0 {
		return nil, err
	}
	if _, _, found := r.Text.Find(name); found != nil {
		return nil, Unknown(err, found)
	}
	text, err := r.Text.Open(name, lm.Options{Options: o})
	if err != nil {
		return nil, err
	}
	return &texts.Network{Model: text}, nil
}

// Unknown joins the errors of a name that neither an image nor a language model has, and suggests the nearest.
func Unknown(images, text error) error {
	a, isA := errors.AsType[*model.UnknownError](images)
	b, isB := errors.AsType[*model.UnknownError](text)
	if !isA || !isB {
		return fmt.Errorf("%w; of text: %w", images, text)
	}
	both := a.And(b)
	if near := schemas.Nearest(both.Name, both.Known); near != "" {
		return fmt.Errorf("%w; did you mean %s?", both, near)
	}
	return both
}

// PolicyOf returns the policy that a sampler of a model would announce, without loading its weights; problems say why
// it could not be opened.
func (r Registry) PolicyOf(name string) (p *schemas.Policy, problems []string, err error) {
	info, err := r.Images.Inspect(name)
	if err == nil {
		return images.PolicyOf(info.Card), info.Problems, nil
	}
	if !errors.Is(err, model.ErrUnknown) || len(r.Text) == 0 {
		return nil, nil, err
	}
	if _, _, found := r.Text.Find(name); found != nil {
		return nil, nil, Unknown(err, found)
	}
	l, err := r.Text.Language(name)
	if err != nil {
		return nil, nil, err
	}
	return texts.PolicyOf(l.Card()), nil, nil
}

// PolicyOf is models.PolicyOf for a model that is computed on these devices.
func (c Compute) PolicyOf(models Registry, name string) (p *schemas.Policy, problems []string, err error) {
	p, problems, err = models.PolicyOf(name)
	if err != nil || p.Text != nil {
		return p, problems, err
	}
	if c.Device == devices.Auto {
		if n, old, _ := devices.GPUs(); n == len(old) {
			c.Device = devices.CPU
		}
	}
	factors, err := c.factors(models, name)
	if factors == tensor.BF16 {
		p.LatentsDType = string(factors)
	}
	return p, problems, err
}

// Device is a device with a model on it.
type Device struct {
	devices.Device
	Network engine.Network
}

// Devices are the devices of one model. Note says why device auto chose the CPU; else it is empty. Skipped says of each
// GPU that auto left out beside others why it did.
type Devices struct {
	All     []Device
	Note    string
	Skipped []string
	set     *devices.Set
}

// Open opens a model on each device of c, or with one on the first only. The caller closes what it returns. It fails
// if there is no such model or device, or the model is computed elsewhere; nothing is left open then.
func (c Compute) Open(models Registry, name string, o model.Options, one bool) (_ *Devices, err error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	factors, err := c.factors(models, name)
	if err != nil {
		return nil, err
	}
	open := devices.Open
	if one {
		open = devices.One
	}
	set, err := open(c.Device, devices.Options{
		Threads: c.Threads, Factors: factors, Deterministic: c.Deterministic,
		Warn: o.Warn,
	})
	if err != nil {
		return nil, err
	}
	p := &Devices{set: set, Note: set.Note, Skipped: set.Skipped}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if set.Devices[0].ID == devices.CPU && c.DType == dtypeBF16 {
		return nil, fmt.Errorf("dtype: %q; must be auto or f32: the CPU computes in float32, and no GPU is used: %s",
			c.DType, cmp.Or(set.Note, "there is none"))
	}
	if p.All, err = c.openAll(models, name, o, set.Devices); err != nil {
		return nil, err
	}
	for i, d := range p.All {
		b := d.Network.Backend()
		if d.ID == devices.CPU || strings.HasPrefix(b, d.Name()) { // its text encoder may be elsewhere
			continue
		}
		if c.Device != devices.Auto {
			return nil, fmt.Errorf("device: %s; must be auto or cpu: the model %s is computed on %s only", d.ID,
				d.Network.Name(), b)
		}
		// The model computes elsewhere: more devices would not help.
		more := Devices{All: p.All[i+1:]}
		p.All = p.All[:i+1]
		if err := more.Close(); err != nil {
			return nil, err
		}
		break
	}
	return p, nil
}

// openAll opens the model called name on all devices side by side, its files being hashed once. On an error it returns
// the devices on which it is open.
func (c Compute) openAll(models Registry, name string, o model.Options, on []devices.Device) (all []Device, err error) {
	o.Threads, o.Hashes = c.Threads, &safetensors.Hashes{}
	opened, errs, progress := make([]Device, len(on)), make([]error, len(on)), furthestBehind(o.Progress, len(on))
	var wg sync.WaitGroup
	for i, d := range on {
		o := o
		o.Device, o.Progress = d.Device, progress(i)
		wg.Go(func() {
			opened[i].Device = d
			opened[i].Network, errs[i] = models.open(name, o)
		})
	}
	wg.Wait()
	for i, d := range opened {
		if errs[i] == nil {
			all = append(all, d)
		} else if !slices.ContainsFunc(errs[:i], func(e error) bool {
			return e != nil && e.Error() == errs[i].Error()
		}) {
			err = errors.Join(err, errs[i])
		}
	}
	return all, err
}

// furthestBehind returns the progress of each of several openings side by side; told hears of the one that is furthest
// behind.
func furthestBehind(told model.Progress, openings int) (of func(opening int) model.Progress) {
	if told == nil || openings == 1 {
		return func(int) model.Progress { return told }
	}
	var mu sync.Mutex
	read := map[string][]int{} // bytes by part and opening
	return func(opening int) model.Progress {
		return func(part string, done, total int) {
			mu.Lock()
			defer mu.Unlock()
			if read[part] == nil {
				read[part] = make([]int, openings)
			}
			before := slices.Min(read[part])
			read[part][opening] = done
			if least := slices.Min(read[part]); least > before {
				told(part, least, total)
			}
		}
	}
}

// factors returns the element type in which products are computed: for dtype auto it depends on the model's size. It
// fails if the model's files cannot be read.
func (c Compute) factors(models Registry, name string) (tensor.DType, error) {
	switch {
	case c.Device == devices.CPU, c.DType == dtypeF32:
		return tensor.F32, nil
	case c.DType == dtypeBF16:
		return tensor.BF16, nil
	}
	info, err := models.Images.Inspect(name)
	if errors.Is(err, model.ErrUnknown) {
		return tensor.F32, nil // a language model; or no model, which Open reports
	}
	if err != nil {
		return "", err
	}
	parameters := 0
	for _, p := range info.Parts {
		parameters += p.Parameters
	}
	if parameters >= largeModel {
		return tensor.BF16, nil
	}
	return tensor.F32, nil
}

// Workers returns how many micro-batches are worth running side by side.
func (p *Devices) Workers() int {
	if p.All[0].ID == devices.CPU {
		return max(1, runtime.NumCPU()/2)
	}
	return len(p.All)
}

// IDs returns the names of the devices, e.g. cuda:0,cuda:1.
func (p *Devices) IDs() string {
	var ids []string
	for _, d := range p.All {
		ids = append(ids, d.ID)
	}
	return strings.Join(ids, ",")
}

// Close closes the models, then the devices. It joins all errors.
func (p *Devices) Close() error {
	var errs []error
	for _, d := range p.All {
		errs = append(errs, d.Network.Close())
	}
	if p.set != nil {
		errs = append(errs, p.set.Close())
	}
	return errors.Join(errs...)
}

// Fetch downloads what the cache lacks of a model and an adapter that names of the Hugging Face Hub stand for; a path
// and an empty name need nothing. The error is that of hub.Fetch.
func Fetch(ctx context.Context, name, adapter string, want hub.Want, watch hub.Watcher) error {
	for _, of := range []struct {
		setting, name string
		want          hub.Want
	}{{"model", name, want}, {"adapter", adapter, hub.Adapter}} {
		_, err := hub.Fetch(ctx, of.name, of.want, watch)
		if err != nil {
			return fmt.Errorf("%s: %w", of.setting, err)
		}
	}
	return nil
}

// Logged tells of downloads in the log.
func Logged(log zerolog.Logger) hub.Watcher {
	const every = 5 * time.Second
	var plan hub.Plan
	var done int64
	var last time.Time
	return hub.Watcher{
		Plan: func(p hub.Plan) {
			plan, done, last = p, p.Have, time.Now()
			log.Info().Str("name", p.Name).Int("files", p.Files).Int64("mib", p.Bytes>>20).Int64("done_mib",
				p.Have>>20).Str("to", p.To).Msg("downloads from the Hugging Face Hub")
		},
		Got: func(n int64) {
			done += n
			if now := time.Now(); now.Sub(last) >= every {
				last = now
				log.Info().Str("name", plan.Name).Int64("done_mib", done>>20).Int64("total_mib",
					plan.Bytes>>20).Msg("downloading")
			}
		},
		Say: func(line string) { log.Warn().Msg(line) },
	}
}

// Wanted is what a sampler needs of a model: a server that draws has the weights.
func Wanted(engine string) hub.Want {
	if engine != "" && !IsTorch(engine) {
		return hub.Description
	}
	return hub.Model
}
