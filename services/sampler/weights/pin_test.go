package weights_test

import (
	"errors"
	"strings"
	"testing"

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
		w, err := s.PinVersion(t.Context(), version)
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
	if _, err := s.PinVersion(t.Context(), 3); !errors.Is(err, weights.ErrPolicyPending) ||
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
	if _, err := s.PinVersion(t.Context(), 9); !engine.Refused(err) ||
		!strings.Contains(err.Error(), "must be one of 6, 5, 4") {
		t.Errorf("a version that is not there: %v", err)
	}
	l.script.set(func(s *script) { s.with = func() error { return engine.Refuse("no") } })
	if _, err := s.PinVersion(t.Context(), 4); !engine.Refused(err) {
		t.Errorf("a version that cannot be loaded: %v", err)
	}
}
