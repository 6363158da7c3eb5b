package sampler

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/devices"
	"github.com/meander-rl/meander/schemas"
)

// Compute says what a model is computed with.
type Compute struct {
	// Device is auto, cpu, or GPUs as cuda:0,cuda:1.
	Device string
	// DType is the element type in which factors meet on a GPU: f32, bf16, or auto.
	DType string
	// Deterministic has products in bf16 made in one order on a GPU, whatever the batch.
	Deterministic bool
	// Threads is how many threads the CPU has; 0: all cores.
	Threads int
}

// Element types of Compute, besides auto.
const (
	dtypeF32  = "f32"
	dtypeBF16 = "bf16"
)

// largeModel is the parameters from which on auto takes tensor cores.
const largeModel = 1_000_000_000

// Validate joins every fault by field name. A device that is not there is one.
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
	if c.Threads < 0 || c.Threads > 1024 {
		err = errors.Join(err, fmt.Errorf("threads: %d; must be between 0 and 1024", c.Threads))
	}
	return err
}

// Registry is the models that a program knows: of images, and of text.
type Registry struct {
	Images model.Registry
	Text   lm.Registry
}

// open opens the model called name. What is no model of images may be one of text.
func (r Registry) open(name string, o model.Options) (n Network, err error) {
	n.Images, err = r.Images.Open(name, o)
	if !errors.Is(err, model.ErrUnknown) || len(r.Text) == 0 {
		return n, err
	}
	if _, _, found := r.Text.Find(name); found != nil {
		return n, Unknown(err, found)
	}
	n.Images = nil
	n.Text, err = r.Text.Open(name, lm.Options{Device: o.Device, Threads: o.Threads, Adapter: o.Adapter, AdapterScale: o.AdapterScale, Progress: o.Progress})
	return n, err
}

// Unknown joins why a name is no model of images, and none of texts, and names the model that may have been meant.
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

// PolicyOf is what a sampler of the model called name would announce, without its weights; problems are for which
// it would not open.
func (r Registry) PolicyOf(name string) (p *schemas.Policy, problems []string, err error) {
	info, err := r.Images.Inspect(name)
	if err == nil {
		return PolicyOf(info.Card), info.Problems, nil
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
	return TextPolicyOf(l.Card()), nil, nil
}

// Place is a device with a model on it.
type Place struct {
	devices.Device
	Network Network
}

// Places are those of one model. Note says why auto took the CPU; empty where there is
// nothing to say.
type Places struct {
	All  []Place
	Note string
	set  *devices.Set
}

// Open opens a model on the devices of c; with one, on the first of them only.
func (c Compute) Open(models Registry, name string, o model.Options, one bool) (_ *Places, err error) {
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
	set, err := open(c.Device, devices.Options{Threads: c.Threads, Factors: factors, Deterministic: c.Deterministic})
	if err != nil {
		return nil, err
	}
	p := &Places{set: set, Note: set.Note}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for _, d := range set.Devices {
		o.Device, o.Threads = d.Device, c.Threads
		m, err := models.open(name, o)
		if err != nil {
			return nil, err
		}
		p.All = append(p.All, Place{d, m})
		if b := m.Backend(); d.ID != devices.CPU && !strings.HasPrefix(b, d.Name()) { // its text encoder may be elsewhere
			if c.Device != devices.Auto {
				return nil, fmt.Errorf("device: %s; must be auto or cpu: the model %s is computed on %s only", d.ID, m.Name(), b)
			}
			break // one is as good as many
		}
	}
	return p, nil
}

// factors is the element type of Options of devices.
func (c Compute) factors(models Registry, name string) (tensor.DType, error) {
	switch {
	case c.Device == devices.CPU, c.DType == dtypeF32:
		return tensor.F32, nil
	case c.DType == dtypeBF16:
		return tensor.BF16, nil
	}
	info, err := models.Images.Inspect(name)
	if errors.Is(err, model.ErrUnknown) {
		return tensor.F32, nil // of a language model, or of none, which Open says
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

// Workers is how many micro-batches are worth running side by side.
func (p *Places) Workers() int {
	if p.All[0].ID == devices.CPU {
		return max(1, runtime.NumCPU()/2)
	}
	return len(p.All)
}

// IDs names the devices, e.g. cuda:0,cuda:1.
func (p *Places) IDs() string {
	var ids []string
	for _, place := range p.All {
		ids = append(ids, place.ID)
	}
	return strings.Join(ids, ",")
}

// Close closes the models, then the devices.
func (p *Places) Close() error {
	var errs []error
	for _, place := range p.All {
		errs = append(errs, place.Network.Close())
	}
	if p.set != nil {
		errs = append(errs, p.set.Close())
	}
	return errors.Join(errs...)
}

// seat is where attempts are computed: a device, with the schedulers that take from joins.
type seat struct {
	id    string
	index int // of its engines
	joins chan *attempt
	load  atomic.Int64 // attempts that have it
	lost  atomic.Bool
}

// sit returns the seat with the fewest attempts of those whose device works, and what the
// attempt calls when it leaves it.
func (s *service) sit() (*seat, func(), error) {
	var best *seat
	for _, c := range s.seats {
		if !c.lost.Load() && (best == nil || c.load.Load() < best.load.Load()) {
			best = c
		}
	}
	if best == nil {
		return nil, nil, fmt.Errorf("no device is left: %w", tensor.ErrDeviceLost)
	}
	best.load.Add(1)
	return best, func() { best.load.Add(-1) }, nil
}

// lose takes a seat out of use when an error says that its device is lost. The service ends
// with the last one; what was in hand is handed back, here as there.
func (s *service) lose(ctx context.Context, c *seat, err error) {
	if !errors.Is(err, tensor.ErrDeviceLost) || c.lost.Swap(true) {
		return
	}
	s.metrics.lost.Inc()
	zerolog.Ctx(ctx).Error().Err(err).Str("device", c.id).Msg("device lost; its samples go elsewhere")
	for _, other := range s.seats {
		if !other.lost.Load() {
			return
		}
	}
	s.ended <- fmt.Errorf("no device is left: %w", err)
}
