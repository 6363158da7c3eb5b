package boot

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

func TestScarce(t *testing.T) {
	stats := func(name, state string) *bus.StreamStats {
		return &bus.StreamStats{Name: name, State: state, Bytes: 85 << 20, MaxBytes: 100 << 20}
	}
	what, fix := Scarce(stats(schemas.StreamSteps, bus.StateNearlyFull))
	if what != "MDR_STEPS is nearly full: 85.0 MiB of 100.0 MiB" || !strings.Contains(fix, "meander streams limit --max-steps-bytes SIZE") {
		t.Errorf("%q, %q", what, fix)
	}
	for _, s := range []*bus.StreamStats{stats(schemas.StreamSteps, bus.StateOK), stats(schemas.StreamDead, bus.StateRolling), stats(schemas.StreamRequests, bus.StateNearlyFull)} {
		if what, fix := Scarce(s); what+fix != "" {
			t.Errorf("%s, %s: %q, %q", s.Name, s.State, what, fix)
		}
	}
}
