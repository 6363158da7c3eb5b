package weights_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// A sample has the version that it asks for beside the newest. Of those that were asked for, Own.Resident stay, and
// none goes that a sample uses.
func TestVersions_PinVersion(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{Resident: 2})
	for version := range int64(5) {
		l.push(nil)
		l.applied(version+1, schemas.AppliedApplied)
	}
	pin := func(version int64) *weights.Loaded {
		t.Helper()
		w, err := s.PinVersion(t.Context(), "", version)
		if err != nil || w.Version() != version {
			t.Fatalf("version %d: %+v, %v", version, w, err)
		}
		return w
	}
	opens := func(want int64) {
		t.Helper()
		if n := l.script.opened.Load(); n != want || value(s.resident) != float64(want) {
			t.Errorf("%d opened, %v resident; want %d", n, value(s.resident), want)
		}
	}
	newest, one, two := pin(5), pin(1), pin(2)
	if newest != s.Newest() || pin(1) != one {
		t.Error("a version that is in memory was loaded again")
	}
	opens(3)
	if _, err := s.PinVersion(t.Context(), "", 3); !errors.Is(err, weights.ErrPolicyPending) ||
		!strings.Contains(err.Error(), "--resident-versions") {
		t.Errorf("a third, while samples use two: %v", err)
	}
	s.Release(two)
	s.Release(one)
	three := pin(3) // in place of 2: a sample still uses 1
	opens(3)
	s.Release(one)
	if again := pin(2); again == two {
		t.Error("version 2 was not closed")
	}
	s.Release(three)
	l.push(nil)
	l.applied(6, schemas.AppliedApplied)
	if old := pin(5); old != newest {
		t.Error("version 5 was loaded again while a sample uses it")
	}
	opens(4)
	if _, err := s.PinVersion(t.Context(), "", 9); !engine.Refused(err) ||
		!strings.Contains(err.Error(), "must be one of 6, 5, 4") {
		t.Errorf("a version that is not there: %v", err)
	}
	l.script.set(func(s *script) { s.with = func() error { return engine.Refuse("no") } })
	if _, err := s.PinVersion(t.Context(), "", 4); !engine.Refused(err) {
		t.Errorf("a version that cannot be loaded: %v", err)
	}
}

// Each tenant has its newest version, which a sample of another never has. It waits for a place that samples use, and a
// version that is refused leaves the one before, also to samplers that start.
func TestVersions_Tenants(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{Resident: 1})
	main := s.Newest()
	pin := func(tenant schemas.Tenant, version int64) *weights.Loaded {
		t.Helper()
		w, err := s.Pin(t.Context(), tenant, version)
		if err != nil || w.Version() != version || w.Policy.Tenant != tenant {
			t.Fatalf("version %d of %s: %+v, %v", version, tenant, w, err)
		}
		return w
	}
	for _, tenant := range []schemas.Tenant{"a", "b"} {
		if _, err := s.Pin(t.Context(), tenant, 0); !errors.Is(err, weights.ErrPolicyPending) {
			t.Errorf("%s, which nobody began: %v", tenant, err)
		}
		for _, want := range []error{nil, bus.ErrBehind} { // the second time it is there
			if err := l.Bus.SetPolicy(t.Context(), main.Policy.Founding(tenant), nil); !errors.Is(err, want) {
				t.Fatalf("begun: %v; want %v", err, want)
			}
		}
		l.appliedFor(tenant, 0, schemas.AppliedApplied)
	}
	l.pushFor("a", nil)
	l.appliedFor("a", 1, schemas.AppliedApplied)
	one := pin("a", 1)
	l.pushFor("b", nil) // waits for the place of a
	if _, err := s.Pin(t.Context(), "b", 1); !errors.Is(err, weights.ErrPolicyPending) || s.Newest() != main {
		t.Errorf("b, while a sample of a has the place: %v", err)
	}
	s.Release(one)
	l.appliedFor("b", 1, schemas.AppliedApplied)
	s.Release(pin("b", 1))
	again := pin("a", 1) // loaded again
	if s.Release(again); again == one || s.NewestOf("a") != again {
		t.Error("version 1 of a was not closed, or is not its newest")
	}
	l.script.set(func(s *script) { s.with = func() error { return engine.Refuse("no") } })
	l.pushFor("a", nil)
	l.appliedFor("a", 2, schemas.AppliedRefused)
	l.script.set(func(s *script) { s.with = nil })
	l.instance = "late"
	late := l.serve(weights.Own{Resident: 2})
	if a := l.appliedFor("a", 2, schemas.AppliedRefused); a.Serving != 1 {
		t.Errorf("a goes on with %d", a.Serving)
	}
	bustest.Until(t, "the late sampler has both", func() error {
		_, _, tenants := late.Serving()
		if len(tenants) != 2 || tenants[0].PolicyVersion != 1 || tenants[1].PolicyVersion != 1 {
			return fmt.Errorf("it has %+v", tenants)
		}
		return nil
	})
	if notes := strings.Join(s.Notes(), "; "); !strings.Contains(notes, "version 2 of lane synthetic.a is refused") {
		t.Errorf("notes: %q", notes)
	}
	for i := range schemas.MaxTenants {
		s.Want(main.Policy.Founding(schemas.Tenant(fmt.Sprintf("more-%02d", i))))
	}
	notes := strings.Join(s.Notes(), "; ")
	if !strings.Contains(notes, "tenant more-63 of lane synthetic is left out: the sampler has 64") {
		t.Errorf("notes: %q", notes)
	}
}

// A tenant that was removed is let go of: its name, begun again, has other weights under the same numbers, also for a
// sampler that heard of neither.
func TestVersions_Removed(t *testing.T) {
	t.Parallel()
	l := newLane(t)
	s := l.serve(weights.Own{Resident: 2})
	l.instance = "deaf"
	deaf := l.sampler(weights.Own{Resident: 2})
	if err := deaf.Begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.Serve(t, func(ctx context.Context, _ *bus.Bus) error {
		return deaf.Follow(zerolog.New(&l.log).WithContext(ctx))
	})
	both := []*sampler{s, deaf}
	begin := func(file float32) *schemas.Policy {
		t.Helper()
		if err := l.Bus.SetPolicy(t.Context(), s.Newest().Policy.Founding("a"), nil); err != nil {
			t.Fatal(err)
		}
		ref, err := l.Bus.PutBlob(t.Context(), safetensors(file))
		if err != nil {
			t.Fatal(err)
		}
		p := l.pushFor("a", func(p *schemas.Policy) {
			p.Weights[0], p.WeightsDigest = schemas.FileOfBlob(ref), lora.FullDigest(p.BaseDigest, ref.Digest)
		})
		deaf.Want(p)
		bustest.Until(t, "both have version 1", func() error {
			for _, s := range both {
				if w := s.NewestOf("a"); w == nil || w.Policy.WeightsDigest != p.WeightsDigest {
					return fmt.Errorf("%+v", w)
				}
			}
			return nil
		})
		for _, s := range both {
			w, err := s.PinVersion(t.Context(), "a", 1)
			if err != nil || w.Policy.WeightsDigest != p.WeightsDigest {
				t.Fatalf("version 1: %+v, %v", w, err)
			}
			s.Release(w)
		}
		return p
	}
	begin(41)
	if n, err := l.Bus.RemoveTenant(t.Context(), s.Newest().Policy.Lane.Of("a")); err != nil || n != 2 {
		t.Errorf("%d versions removed, %v", n, err)
	}
	bustest.Until(t, "it is let go of", func() error {
		if s.NewestOf("a") != nil {
			return errors.New("it is there")
		}
		return nil
	})
	if _, err := s.Pin(t.Context(), "a", 0); !errors.Is(err, weights.ErrPolicyPending) {
		t.Errorf("a tenant that was removed: %v", err)
	}
	begin(42)
}
