package chaos_test

import (
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/chaos"
)

// A seed always draws the same, another seed something else; each kind and each program has its
// share, and what cannot be had is not drawn.
func TestPlan(t *testing.T) {
	t.Parallel()
	const n, programs = 200, 7
	draw := func(seed uint64, without ...chaos.Kind) []chaos.Fault {
		return chaos.Plan(seed, n, programs, time.Second, without...)
	}
	plan := draw(7)
	if !slices.Equal(plan, draw(7)) || slices.Equal(plan, draw(8)) {
		t.Error("a seed does not draw the same each time, or another draws it too")
	}
	kinds, victims := map[chaos.Kind]int{}, map[int]int{}
	for _, f := range plan {
		kinds[f.Kind]++
		if !f.Kind.OfServer() {
			victims[f.Victim]++
		}
		if pause := f.Kind == chaos.Pause || f.Kind == chaos.ServerPause; pause && f.Length <= time.Second {
			t.Errorf("%s: not longer than the ack wait", f)
		}
	}
	for _, k := range chaos.Kinds() {
		if kinds[k] < n/20 {
			t.Errorf("%q comes %d times of %d", k, kinds[k], n)
		}
	}
	for i := range programs {
		if victims[i] < n/2/programs {
			t.Errorf("program %d is hurt %d times of %d", i, victims[i], n)
		}
	}
	for _, f := range draw(7, chaos.DiskFull) {
		if f.Kind == chaos.DiskFull {
			t.Error("drawn, and cannot be had")
		}
	}
}
