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
	if what != "MDR_STEPS is nearly full: 85.0 MiB of 100.0 MiB" ||
		!strings.Contains(fix, "meander streams limit --max-steps-bytes 200MiB") {
		t.Errorf("%q, %q", what, fix)
	}
	for _, s := range []*bus.StreamStats{
		stats(schemas.StreamSteps, bus.StateOK),
		stats(schemas.StreamDead, bus.StateRolling), stats(schemas.StreamRequests, bus.StateNearlyFull),
	} {
		if what, fix := Scarce(s); what+fix != "" {
			t.Errorf("%s, %s: %q, %q", s.Name, s.State, what, fix)
		}
	}
}

// A full object store has a way out of its own: images and weights go by what names them.
func TestAdvice_Blobs(t *testing.T) {
	full := bus.StreamStats{Name: schemas.StreamBlobBucket, State: bus.StateFull, Bytes: 6 << 30, MaxBytes: 8 << 30}
	says := Advice(bus.Fault{StreamStats: full, Refused: 3 << 30})
	for _, want := range []string{
		"OBJ_mdr-blobs is full: 6.0 GiB of 8.0 GiB, and 3.0 GiB are to be stored; samples wait, and nothing is lost",
		"meander streams limit --max-blobs-bytes 19GiB", "meander gc --blobs", "meander runs rm RUN",
	} {
		if !strings.Contains(says, want) {
			t.Errorf("%q does not say %q", says, want)
		}
	}
}
