package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/models"
)

// opened is an open model, with the versions of its weights that are in memory.
type opened struct {
	devices *models.Devices
	network engine.Network
	// versions are the model's own weights first, then those of policies that were needed last.
	versions []*version
}

func (o *opened) close() {
	for _, w := range o.versions {
		w.close(o.network)
	}
	_ = o.devices.Close()
}

// openModel opens a model by folder or name and adds it to v.models. backend is what computed the sample which needs
// it. A failure is a ModelError, or a SettingError.
func (v *verifier) openModel(ctx context.Context, name, backend string) (*opened, error) {
	if v.options.Open.Adapter != "" && len(v.models) > 0 {
		return nil, &ModelError{fmt.Errorf("adapter: %q; %s and %s are two models: choose one with a lane",
			v.options.Open.Adapter, v.models[0].network.Name(), name)}
	}
	on, err := v.openOnDevices(ctx, name, backend)
	if _, ok := errors.AsType[*SettingError](err); ok {
		return nil, err
	}
	if err != nil {
		return nil, &ModelError{err}
	}
	o := &opened{devices: on, network: on.All[0].Network}
	o.versions = []*version{newVersion(o.network)}
	v.models = append(v.models, o)
	return o, nil
}

// openOnDevices opens a model on the devices of the options, or by the worker that the options or else the backend
// name. An error is about the options, the model or the worker.
func (v *verifier) openOnDevices(ctx context.Context, name, backend string) (*models.Devices, error) {
	c := v.options.Compute
	c.Device, c.DType = cmp.Or(c.Device, devices.Auto), cmp.Or(c.DType, devices.Auto)
	t, worker := models.TorchOf(backend, c)
	switch at := v.options.Engine; at {
	case "":
	case EngineNone:
		worker = false
	default:
		if !models.IsTorch(at) {
			return nil, fmt.Errorf(
				"engine: %q; must be none, torch or torch=ADDRESS: other servers draw samples, and compute none again",
				at)
		}
		// a worker that is joined has its own settings
		if _, joins := strings.CutPrefix(at, "torch="); joins || !worker {
			t = models.Torch{Compute: c}
		}
		t.Engine, t.EngineKey, worker = at, v.options.EngineKey, true
	}
	if err := checkFamily(v.options.Family, backend, worker, t.Engine == "torch"); err != nil {
		return nil, &SettingError{err}
	}
	if v.options.Network != "" && !worker {
		return nil, &SettingError{fmt.Errorf("network: %q; must be absent: no worker computes", v.options.Network)}
	}
	t.Network = cmp.Or(v.options.Network, t.Network)
	if t.Family = v.options.Family; worker {
		t.Wait, t.Adapter, t.AdapterScale = joinWithin, v.options.Open.Adapter, v.options.Open.AdapterScale
		return t.Open(ctx, name, v.options.Open.Progress, v.options.Log)
	}
	if err := c.Validate(); err != nil && !errors.Is(err, devices.ErrUnavailable) {
		return nil, &SettingError{err}
	}
	return c.Open(models.Registry{Images: v.options.Models, Text: v.options.Languages}, name, v.options.Open, true)
}

// checkFamily refuses a family where no worker computes, and none where one starts and the backend of the samples names
// one.
func checkFamily(family, backend string, worker, starts bool) error {
	_, made, _ := strings.Cut(backend, "/family-")
	name, _, _ := strings.Cut(made, "-")
	switch {
	case family != "" && !worker:
		return fmt.Errorf("family: %q; must be absent: no worker computes", family)
	case family == "" && name != "" && starts:
		return fmt.Errorf("family: empty; must be FILE.py:%s, the file that the samples were made with", name)
	}
	return nil
}

// joinWithin is how long a worker that is joined may take to be there.
const joinWithin = 10 * time.Second

// modelOf returns the open model that made a sample. It is the one with the sample's weights; otherwise the one with
// the checkpoint that a policy of its lane names for these weights; otherwise the one of that name. If the options
// name no models, the model is opened by its name. If it is not there, the sample is counted in report.Missing and
// the result is nil. An error is of the server, or a ModelError.
func (v *verifier) modelOf(ctx context.Context, s *sample) (*opened, error) {
	t := s.t
	p, err := v.policyWith(ctx, t.Lineage(), t.WeightsDigest)
	if err != nil {
		return nil, err
	}
	name, base, source := string(t.Lane), "", ""
	if p != nil {
		name, base, source = p.Model, p.BaseDigest, p.Source
	}
	for _, is := range []func(n engine.Network) bool{
		func(n engine.Network) bool { return n.Digest() == t.WeightsDigest },
		func(n engine.Network) bool { return base != "" && n.Policy().BaseDigest == base },
		func(n engine.Network) bool { return n.Name() == name },
	} {
		if i := slices.IndexFunc(v.models, func(o *opened) bool { return is(o.network) }); i >= 0 {
			return v.models[i], nil
		}
	}
	missing := slices.IndexFunc(v.report.Missing, func(m Missing) bool { return m.Lane == t.Lane && m.Model == name })
	if missing < 0 && len(v.options.Model) == 0 {
		at := name
		if hub.Local(source) != "" {
			at = source
		}
		if o, err := v.openModel(ctx, at, t.Backend); !errors.Is(err, model.ErrUnknown) {
			return o, err
		}
	}
	if missing < 0 {
		missing = len(v.report.Missing)
		v.report.Missing = append(v.report.Missing, Missing{
			Lane: t.Lane, Model: name, Source: source, WeightsDigest: t.WeightsDigest,
		})
	}
	v.report.Missing[missing].Trajectories++
	return nil, nil
}
