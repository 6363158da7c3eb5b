package chaos_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/chaos"
	"github.com/meander-rl/meander/integration/tools/harness"
)

// report is what a run of faults came to.
type report struct {
	seed     uint64
	began    time.Time
	hurt     time.Duration
	injected map[chaos.Kind]int
	without  []chaos.Kind

	groups, policies int
	audited          map[string]int // events by kind
	found            []harness.Fault
	redone           int // steps that were made and do not count
	superseded       int // of them, those that are still stored
	redelivered      int
	starts           int
	kept             int // ends of programs that could not hand over what they had

	doubledWithoutGuard int
}

// total is how many faults were injected.
func (r *report) total() (n int) {
	for _, times := range r.injected {
		n += times
	}
	return n
}

// of is how many faults of a kind the audit found.
func (r *report) of(kind string) (n int) {
	for _, f := range r.found {
		if f.Kind == kind {
			n++
		}
	}
	return n
}

func (r *report) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%d faults in %v:\n", r.total(), r.hurt.Round(time.Second))
	for _, k := range chaos.Kinds() {
		fmt.Fprintf(&s, "  %-22s %d\n", k, r.injected[k])
	}
	fmt.Fprintf(&s, "audited: %d groups", r.groups)
	for _, kind := range slices.Sorted(maps.Keys(r.audited)) {
		fmt.Fprintf(&s, ", %d %s", r.audited[kind], kind)
	}
	fmt.Fprintf(&s, ", %d announcements of policies: %d lost, %d doubled, %d wrong\n", r.policies, r.of(harness.Lost),
		r.of(harness.Doubled), r.of(harness.Wrong))
	fmt.Fprintf(&s, "%d deliveries were repeated; %d steps were made again or in vain (%.1f %%), %d of them are "+
		"still stored; programs were started %d times; asked to end, they could not hand over what they had %d times",
		r.redelivered, r.redone, r.share(), r.superseded, r.starts, r.kept)
	return s.String()
}

// share is how many steps were made that do not count, in percent of those that do.
func (r *report) share() float64 {
	return 100 * float64(r.redone) / float64(max(1, r.audited["steps"]))
}

// enough refuses a run that proves less than it was asked to.
func (r *report) enough(t *testing.T, asked int, plan []chaos.Fault) {
	t.Helper()
	if n := r.total(); n < asked || len(plan) < asked {
		t.Errorf("%d faults were injected, asked for %d", n, asked)
	}
	for _, f := range plan {
		if r.injected[f.Kind] == 0 {
			t.Errorf("none of the kind %q was injected", f.Kind)
		}
	}
	if r.groups == 0 || r.policies == 0 {
		t.Errorf("%d groups and %d announcements of policies were audited", r.groups, r.policies)
	}
	for _, kind := range []string{
		"steps", "trajectories", "trajectories of stages", "rewards", "advantages",
		"batches",
	} {
		if r.audited[kind] == 0 {
			t.Errorf("no %s were audited", kind)
		}
	}
}

// write makes the file of figures.
func (r *report) write(t *testing.T, path string) {
	t.Helper()
	if path == "" {
		return
	}
	var s strings.Builder
	fmt.Fprintf(&s, `# Faults under load

`+"`make chaos-long`"+` writes this file, as `+"`make chaos`"+` does with `+"`CHAOS='-figures FILE'`"+`. Four services as real programs
(one intake, two of each other, and a sampler of texts) around a real server, each through a TCP proxy of its own; the
closed-form model and the model sums; groups of %d samples of %d steps: a third in batches of two, a sixth of thoughts
painted twice each, a sixth of rounds with a judge; %d groups open at a time; an acknowledgement wait of %v.
Seed %d, %s, %v of faults; `+"`make chaos SEED=%d FAULTS=%d`"+` injects the same.
What TestChaos says of each figure is in `+"`integration/tools/chaos`"+`.

| fault | injected |
|---|---|
`, group, steps, window, ackWait, r.seed, r.began.UTC().Format("2006-01-02"), r.hurt.Round(time.Second), r.seed, r.total())
	for _, k := range chaos.Kinds() {
		what := fmt.Sprint(r.injected[k])
		if slices.Contains(r.without, k) {
			what = "cannot be injected on the machine that ran it"
		}
		fmt.Fprintf(&s, "| %s | %s |\n", k, what)
	}
	fmt.Fprintf(&s, "| **all** | **%d** |\n\n| events | expected and stored |\n|---|---|\n", r.total())
	for _, kind := range []string{
		"steps", "trajectories", "trajectories of stages", "rewards", "advantages",
		"batches",
	} {
		fmt.Fprintf(&s, "| %s | %d |\n", kind, r.audited[kind])
	}
	fmt.Fprintf(&s, `
| outcome | |
|---|---|
| lost | %d |
| doubled | %d |
| wrong: not what was asked for, or not the bits of a calm run of the same prompts | %d |
| doubled by the same programs with the guard off (negative control) | %d |
| steps made that do not count, of those that do | %.1f %% |
| of them still stored at the end | %d |
| deliveries beyond the first | %d |
| starts of programs and server | %d |
| ends that were asked for while work in flight could not be put back (exit status 1) | %d |
`, r.of(harness.Lost), r.of(harness.Doubled), r.of(harness.Wrong), r.doubledWithoutGuard, r.share(), r.superseded, r.redelivered, r.starts, r.kept)
	if err := os.WriteFile(path, []byte(s.String()), 0o600); err != nil {
		t.Fatal(err)
	}
}
