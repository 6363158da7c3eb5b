package client_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
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
			Tenant: schemas.TenantMain,
			Lane:   lane, Model: string(lane), Family: "synthetic", WeightsDigest: strings.Repeat("a", 64), Height: 64, Width: 64, NumInferenceSteps: 1,
			TrueCFGScale: 1, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
		}, nil)
		if err != nil {
			t.Fatal(err)
		}
	}
	serve := func(lane schemas.Lane) {
		t.Helper()
		e := &schemas.Presence{
			Service: schemas.ServiceSampler, Instance: "sampler-" + string(lane), Lane: lane, At: time.Now().UnixNano(),
		}
		p.Forge(t, schemas.PresenceSubject(e.Instance), bustest.Encode(t, e))
	}
	is := func(want, refusal string) {
		t.Helper()
		got, err := c.Policy(t.Context(), schemas.Lineage{})
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

// A lane that a trainer has to itself takes no push of others, and what was made before the trainer took it comes too
// late: the newest version has a higher epoch. Without a trainer pushes go on, under that epoch.
func TestPolicy_Lease(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	c := client.New(p.Bus)
	base := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "one", Model: "one", Family: "synthetic", WeightsDigest: "base", BaseDigest: "base", Height: 64, Width: 64,
		NumInferenceSteps: 1, TrueCFGScale: 1, LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
	}
	adapted := *base
	adapted.PolicyVersion, adapted.WeightsDigest = 1, "adapted"
	adapted.Adapter = &schemas.PolicyAdapter{Scale: 1, File: schemas.Ref{
		Bucket: schemas.BlobBucket, Digest: strings.Repeat("a", 64), Size: 1,
	}}
	taken := adapted
	taken.Epoch = 1
	for _, next := range [][2]*schemas.Policy{{base, nil}, {&adapted, base}, {&taken, &adapted}} {
		if err := p.SetPolicy(t.Context(), next[0], next[1]); err != nil {
			t.Fatal(err)
		}
	}
	late := adapted
	late.PolicyVersion, late.WeightsDigest = 2, "late"
	if err := p.SetPolicy(t.Context(), &late, &adapted); !errors.Is(err, bus.ErrBehind) {
		t.Errorf("a push that follows the version before it was taken: %v", err)
	}
	if err := p.SetPolicy(t.Context(), &late, &taken); err == nil ||
		!strings.Contains(err.Error(), "epoch: 0; must be at least 1") {
		t.Errorf("a push of an older epoch: %v", err)
	}
	history, err := p.PolicyHistory(t.Context(), schemas.Lane("one").Of(""))
	if err != nil || len(history) != 2 || history[1].Epoch != 1 {
		t.Errorf("history %v, %v; want each version once", history, err)
	}
	lease := schemas.BucketSubject(schemas.LeaseBucket, schemas.PolicyKey("one", schemas.TenantMain))
	p.Forge(t, lease, []byte(`{"holder": "a of run x", "since": 1, "mark": "m"}`))
	back, err := c.PushPolicy(t.Context(), nil, client.Push{})
	if refused, ok := errors.AsType[*client.RefusedError](err); !ok || !strings.Contains(refused.Error(), `lane "one": a of run x trains it`) {
		t.Errorf("a push beside the trainer: %v, %v", back, err)
	}
	bustest.Free(t, p.Bus, schemas.StreamLeaseBucket, lease)
	if back, err = c.PushPolicy(t.Context(), nil, client.Push{}); err != nil || back.PolicyVersion != 2 ||
		back.Epoch != 1 {
		t.Errorf("a push after the trainer: %+v, %v", back, err)
	}
}
