package client_test

import (
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// Without a name the lane is the only one that there is, or the only one that samplers serve now.
func TestPolicy_OfOneLane(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	c := client.New(p.Bus)
	announce := func(lane schemas.Lane) {
		t.Helper()
		err := p.SetPolicy(t.Context(), &schemas.Policy{
			Lane: lane, Model: string(lane), Family: "synthetic", WeightsDigest: strings.Repeat("a", 64), Height: 64, Width: 64, NumInferenceSteps: 1,
			TrueCFGScale: 1, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	serve := func(lane schemas.Lane) {
		t.Helper()
		e := &schemas.Presence{Service: schemas.ServiceSampler, Instance: "sampler-" + string(lane), Lane: lane, At: time.Now().UnixNano()}
		p.Forge(t, schemas.PresenceSubject(e.Instance), bustest.Encode(t, e))
	}
	is := func(want, refusal string) {
		t.Helper()
		got, err := c.Policy(t.Context(), "")
		if refusal != "" {
			if err == nil || !strings.Contains(err.Error(), refusal) {
				t.Errorf("%v, %v; want %q", got, err, refusal)
			}
			return
		}
		if err != nil || got.Lane != schemas.Lane(want) {
			t.Errorf("%v, %v; want lane %s", got, err, want)
		}
	}
	is("", "no sampler has announced a model")
	announce("one")
	is("one", "")
	announce("two")
	is("", "lane: not given; must be one of one, two, of which samplers serve 0 now")
	serve("two")
	is("two", "")
	serve("one")
	is("", "samplers serve 2 now")
}
