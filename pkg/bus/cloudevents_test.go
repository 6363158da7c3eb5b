package bus_test

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Events have the attributes that CloudEvents 1.0 requires, in headers, if they are asked for; the payload is the same.
func TestBus_CloudEvents(t *testing.T) {
	t.Parallel()
	e := newEnv(t, "tcp")
	e.setup(t)
	for uid, on := range map[string]bool{"with": true, "without": false} {
		b, err := bus.Connect(t.Context(), bus.Config{
			URL: e.Server.ClientURL(), Name: "meander-sampler host-1", CloudEvents: on,
		}, zerolog.Nop())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
		sent := trajectory(schemas.UID(uid), 0)
		if _, err := b.Publish(t.Context(), sent); err != nil {
			t.Fatal(err)
		}
		m, err := b.Last(t.Context(), schemas.StreamTrajectories, sent.Subject())
		if err != nil {
			t.Fatal(err)
		}
		of := map[string]string{}
		for name, v := range m.Header {
			if strings.HasPrefix(name, "ce-") {
				of[name] = v[0]
			}
		}
		if !on {
			if len(of) > 0 {
				t.Errorf("unasked: %v", of)
			}
			continue
		}
		at, timeErr := time.Parse(time.RFC3339Nano, of["ce-time"])
		_, uriErr := url.Parse(of["ce-source"])
		if timeErr != nil || uriErr != nil || time.Since(at).Abs() > time.Hour {
			t.Errorf("time and source: %v, %v, %v", of, timeErr, uriErr)
		}
		for name, want := range map[string]string{
			"ce-specversion": "1.0", "ce-type": "io.github.meander-rl.trajectory.v1", "ce-source": "/meander-sampler",
			"ce-id": "trajectory.r1.with.0.main", "ce-subject": "trajectory.r1.with.0.main", "ce-datacontenttype": "application/msgpack",
		} {
			if of[name] != want {
				t.Errorf("%s: %q, want %q", name, of[name], want)
			}
		}
		if err := schemas.Decode(m.Data, new(schemas.Trajectory)); err != nil {
			t.Error(err)
		}
	}
}
