package weights_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// working is an engine of a device.
type working struct{ engine.Engine }

// device is a network of a lane that has engines, and says when weights are asked of it.
type device struct {
	*network
	asked int
}

func (d *device) With(ctx context.Context, c engine.Change) (engine.Network, error) {
	d.asked++
	n, err := d.network.With(ctx, c)
	if err != nil || n == engine.Network(d.network) {
		return d, err
	}
	return &device{network: n.(*network)}, nil
}

func (d *device) Engine(engine.Options) engine.Engine { return working{} }

// What a device does in the test; empty: it works.
const dies, fails, known = "dies", "fails at the canary", "is known to be lost"

// withDevices returns versions of a lane on devices that do as they are told, and tells of each loss.
func withDevices(l *lane, does []string, lost func(device int, err error)) (*weights.Versions, []*device) {
	var networks []engine.Network
	var devices []*device
	for _, what := range does {
		s := &script{}
		switch what {
		case dies:
			s.with = func() error { return tensor.ErrDeviceLost }
		case fails:
			s.failed = tensor.ErrDeviceLost
		}
		d := &device{network: &network{l.base.Network, l.base.digest, s, ""}}
		networks, devices = append(networks, d), append(devices, d)
	}
	return weights.New(weights.Options{
		Source: weights.Source{Bus: l.Bus}, Lane: "synthetic", Networks: networks, Instance: "s",
		IsLost: func(device int) bool { return does[device] == known },
		Lost:   func(_ context.Context, device int, err error) { lost(device, err) },
		Metrics: weights.Metrics{
			Version:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "version"}),
			Resident: prometheus.NewGauge(prometheus.GaugeOpts{Name: "resident"}),
			Updates:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "updates"}, []string{"state"}),
			Load:     prometheus.NewHistogram(prometheus.HistogramOpts{Name: "load"}),
		},
		Changed: func() {}, Drained: func() {},
	}), devices
}

// Versions leave out the devices that are lost, known or found on the way; the first that lives computes the canary.
func TestVersions_LostDevices(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		devices []string
		lost    []int // those that are told
		lives   bool
	}{
		{[]string{"", ""}, nil, true},
		{[]string{"", dies}, []int{1}, true},
		{[]string{dies, ""}, []int{0}, true},
		{[]string{fails, "", dies, ""}, []int{0, 2}, true},
		{[]string{known, "", known}, nil, true},
		{[]string{dies, known, fails}, []int{0, 2}, false},
		{[]string{known, known}, nil, false},
	} {
		l := newLane(t)
		if err := l.sampler(weights.Own{}).Begin(t.Context()); err != nil { // the lane is there
			t.Fatal(err)
		}
		next := l.push(nil)
		var lost []int
		v, devices := withDevices(l, c.devices, func(device int, err error) {
			if lost = append(lost, device); !errors.Is(err, tensor.ErrDeviceLost) {
				t.Errorf("%q: device %d: %v", c.devices, device, err)
			}
		})
		err := v.Begin(t.Context())
		if !slices.Equal(lost, c.lost) {
			t.Errorf("%q: told that %v are lost; want %v", c.devices, lost, c.lost)
		}
		if !c.lives && !errors.Is(err, tensor.ErrDeviceLost) || c.lives && err != nil {
			t.Fatalf("%q: %v", c.devices, err)
		}
		if c.lives {
			for i, e := range v.Newest().Engines {
				if (c.devices[i] == "") != (e != nil) {
					t.Errorf("%q: device %d: engine %v", c.devices, i, e)
				}
			}
			a := l.applied(next.PolicyVersion, "applied")
			if n := len(v.Newest().Engines); n != len(devices) || v.Newest().Version() != 1 || a.Canary == nil ||
				a.Canary.Digest != next.WeightsDigest {
				t.Errorf("%q: %d engines, version %d, canary %+v", c.devices, n, v.Newest().Version(), a.Canary)
			}
		}
		v.Close()
		for i, d := range devices {
			if n := d.script.opened.Load(); n != 0 || c.devices[i] == known && d.asked > 0 {
				t.Errorf("%q: device %d: %d networks are open after the end; asked %d times", c.devices, i, n, d.asked)
			}
		}
	}
}
