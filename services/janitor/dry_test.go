package janitor_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/janitor"
)

// A dry run estimates what it would free by the events of the run, not by larger ones of another.
func TestPass_DryBytes(t *testing.T) {
	t.Parallel()
	p := bustest.New(t)
	store(t, p, "u1", "u1")
	p.Forge(t, schemas.StepSubject("r2", "u1", 0, schemas.StageMain, "a", 0), make([]byte, 500_000))
	overGrace(t, p, 1)
	r, err := janitor.Pass(t.Context(), rule(), p.Bus, true)
	if n := r.Bytes[schemas.StreamSteps]; err != nil || n < 1000 || n > 1200 {
		t.Errorf("would free %d bytes of steps, %v; want a step of 1000", n, err)
	}
	lines := r.Lines(func(n uint64) string { return "few bytes" }, true)
	if lines[0] != "would free 1 group, about few bytes, and 0 blobs that nothing names" ||
		!strings.Contains(strings.Join(lines, "\n"), "1 event ") {
		t.Errorf("printed %q", lines)
	}
}
