package weights_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/tensor"
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

// Versions leave out the devices that are lost, known or found on the way; the first that lives computes the canary.
func TestVersions_LostDevices(t *testing.T) {
	t.Parallel()
	const dies, fails, known = "dies", "fails at the canary", "is known to be lost"
	for _, c := range []struct {
		devices []string // what each does; empty: it works
		lost    []int    // those that are told
		engines int
	}{
		{[]string{"", ""}, nil, 2},
		{[]string{"", dies}, []int{1}, 1},
		{[]string{dies, ""}, []int{0}, 1},
		{[]string{fails, "", dies, ""}, []int{0, 2}, 2},
		{[]string{known, "", known}, nil, 1},
		{[]string{dies, known, fails}, []int{0, 2}, 0},
		{[]string{known, known}, nil, 0},
	} {
		l := newLane(t)
		if err := l.sampler(weights.Own{}).Begin(t.Context()); err != nil { // the lane is there
			t.Fatal(err)
		}
		next := l.push(nil)
		var list []engine.Network
		var devices []*device
		for _, does := range c.devices {
			s := &script{}
			n := &device{network: &network{l.base.Network, l.base.digest, s}}
			switch does {
			case dies:
				s.with = func() error { return tensor.ErrDeviceLost }
			case fails:
				s.failed = tensor.ErrDeviceLost
			}
			list, devices = append(list, n), append(devices, n)
		}
		var mu sync.Mutex
		var lost []int
		v := weights.New(weights.Options{
			Source: weights.Source{Bus: l.Bus}, Lane: "synthetic", Networks: list, Instance: "s",
			IsLost: func(device int) bool { return c.devices[device] == known },
			Lost: func(_ context.Context, device int, err error) {
				mu.Lock()
				defer mu.Unlock()
				if lost = append(lost, device); !errors.Is(err, tensor.ErrDeviceLost) {
					t.Errorf("%q: device %d: %v", c.devices, device, err)
				}
			},
			Metrics: weights.Metrics{
				Version:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "version"}),
				Resident: prometheus.NewGauge(prometheus.GaugeOpts{Name: "resident"}),
				Updates:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "updates"}, []string{"state"}),
				Load:     prometheus.NewHistogram(prometheus.HistogramOpts{Name: "load"}),
			},
			Changed: func() {}, Drained: func() {},
		})
		err := v.Begin(t.Context())
		if !slices.Equal(lost, c.lost) {
			t.Errorf("%q: told that %v are lost; want %v", c.devices, lost, c.lost)
		}
		for i, d := range devices {
			if c.devices[i] == known && d.asked > 0 {
				t.Errorf("%q: device %d was asked", c.devices, i)
			}
		}
		if c.engines == 0 {
			if !errors.Is(err, tensor.ErrDeviceLost) {
				t.Errorf("%q: %v; want that no device is left", c.devices, err)
			}
			for i, d := range devices {
				if n := d.script.opened.Load(); n != 0 {
					t.Errorf("%q: device %d: %d networks are open", c.devices, i, n)
				}
			}
			continue
		}
		if err != nil || v.Newest().Version() != next.PolicyVersion {
			t.Fatalf("%q: %v", c.devices, err)
		}
		living := 0
		for i, e := range v.Newest().Engines {
			if works := c.devices[i] == ""; works != (e != nil) {
				t.Errorf("%q: device %d: engine %v", c.devices, i, e)
			} else if works {
				living++
			}
		}
		if living != c.engines || len(v.Newest().Engines) != len(list) {
			t.Errorf("%q: %d engines work, of %d; want %d", c.devices, living, len(v.Newest().Engines), c.engines)
		}
		if a := l.applied(next.PolicyVersion, "applied"); a.Canary == nil || a.Canary.Digest != next.WeightsDigest {
			t.Errorf("%q: canary %+v; want that of the weights", c.devices, a.Canary)
		}
		v.Close()
		for i, d := range devices {
			if n := d.script.opened.Load(); n != 0 {
				t.Errorf("%q: device %d: %d networks are open after the end", c.devices, i, n)
			}
		}
	}
}
