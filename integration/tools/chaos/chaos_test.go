package chaos_test

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/chaos"
	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
)

var (
	seed    = flag.Uint64("seed", 0, "draws the faults; 0: another each time")
	faults  = flag.Int("faults", 24, "how many faults are injected")
	figures = flag.String("figures", "", "file that gets the figures of the run, as Markdown")
)

const (
	// ackWait is how soon another replica gets what a dead one had in hand.
	ackWait = time.Second
	// steps of each sample, and the samples of each group.
	steps, group = 20, 6
	// window is how many groups are open at any time: there is always work in hand.
	window = 6
)

// Faults of processes, network, disk and server, drawn from a seed, are injected while groups are
// published. Every group must come out once, complete, and equal to what it is without faults, bit
// for bit. With the guard off, the same audit finds events stored twice.
func TestChaos(t *testing.T) {
	if harness.Race {
		t.Skip("TestChaos: built with -race the programs start too slowly for faults three times a second; it runs " +
			"without")
	}
	// Not parallel: the clusters of the other tests would slow its programs, which are busy for as long as it takes.
	if *seed == 0 {
		*seed = rand.Uint64N(1_000_000) + 1
	}
	repeat := fmt.Sprintf("make chaos SEED=%d FAULTS=%d", *seed, *faults)
	s := newStage(t)
	s.say(t.Log, fmt.Sprintf("seed %d; `%s` injects the same faults", *seed, repeat))
	began := time.Now()
	plan := chaos.Plan(*seed, *faults, len(s.programs), ackWait, s.without...)
	f := publishing(t, s.bus, "chaos", 0)
	for _, fault := range plan {
		s.inject(t, fault)
	}
	f.stop()
	f.wait(t)
	redelivered := harness.AwaitIdle(t, s.bus)
	hurt := time.Since(began)

	r := report{
		seed: *seed, began: began, hurt: hurt, injected: s.injected, without: s.without,
		groups: len(f.asked), redelivered: redelivered, starts: s.starts(),
	}
	s.audit(t, &r, f)
	r.kept = s.bury(t)
	s.say(t.Log, &r)
	if r.doubledWithoutGuard = s.unguarded(t); r.doubledWithoutGuard == 0 {
		t.Error("with the guard off nothing was stored twice: these faults prove nothing")
	}
	r.enough(t, *faults, plan)
	r.write(t, *figures)
	if t.Failed() {
		t.Logf("to repeat it: %s", repeat)
	}
}

// audit holds what is stored against what was asked for, and against a calm run of the same prompts.
func (s *stage) audit(t *testing.T, r *report, f *feed) {
	t.Helper()
	got := f.books(t, s.bus)
	stored := harness.ReadSteps(t, s.bus, f.run)
	found := got.Faults(f.asked, steps)
	wrong, superseded := got.StepFaults(stored)
	found = append(found, wrong...)
	found = append(found, s.policies(t, got)...)
	found = append(found, f.batchFaults(got)...)
	found = append(found, got.Differs(f.calm(t))...)
	found = append(found, s.counts(t, f, got)...)
	slices.SortStableFunc(found, func(a, b harness.Fault) int { return cmp.Compare(a.UID, b.UID) })
	for _, fault := range found {
		s.say(t.Error, fault)
	}
	harness.NoDead(t, s.bus)
	harness.Verify(t, s.url, f.run, len(got.Trajectories))

	info, err := s.bus.JetStream().Stream(t.Context(), schemas.StreamSteps)
	if err != nil {
		t.Fatal(err)
	}
	r.found, r.superseded = found, superseded
	r.audited = map[string]int{
		"steps": len(stored) - superseded, "trajectories": len(got.Trajectories), "advantages": len(got.Advantages),
		"batches": len(got.Batches),
		"rewards": len(got.Digests) - len(got.Trajectories) - len(got.Advantages) - len(got.Batches),
	}
	r.policies = s.announced
	r.redone = int(info.CachedInfo().State.LastSeq) - r.audited["steps"]
	for _, tr := range got.Trajectories {
		if tr.Stage != schemas.StageMain {
			r.audited["trajectories of stages"]++
		}
	}
}

// counts says where the counters of the run differ from a full reading.
func (s *stage) counts(t *testing.T, f *feed, k *harness.Books) (found []harness.Fault) {
	t.Helper()
	runs, err := counters.Look(t.Context(), s.bus, f.run)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]map[string]int64{
		// samples, whatever stages they have
		schemas.KindTrajectory: {schemas.StopCompleted: int64(len(f.asked) * group)},
		schemas.KindAdvantage:  {},
	}
	for _, a := range k.Advantages {
		want[schemas.KindAdvantage][a.Status]++
	}
	r := runs[f.run]
	if r == nil || r.Groups != int64(len(f.asked)) {
		return []harness.Fault{{Kind: harness.Wrong, What: fmt.Sprintf("counters of %d groups: %+v", len(f.asked), r)}}
	}
	for kind, outcomes := range want {
		counted := map[string]int64{}
		for _, o := range r.Outcomes {
			if o.Kind == kind {
				counted[o.Outcome] = o.N
			}
		}
		if !maps.Equal(counted, outcomes) {
			found = append(found, harness.Fault{
				Kind: harness.Wrong, What: fmt.Sprintf("counters of %s: %v; stored are %v", kind, counted, outcomes),
			})
		}
	}
	return found
}

// policies says which trajectories name weights that were never announced, and what was announced
// twice: samplers that start again with the same weights have nothing new to say.
func (s *stage) policies(t *testing.T, k *harness.Books) (found []harness.Fault) {
	t.Helper()
	type weights struct {
		lane    schemas.Lane
		version int64
		digest  string
	}
	known := map[weights]int{}
	harness.Each(t, s.bus, schemas.StreamPolicies, schemas.Address{Kind: schemas.KindPolicy}, func(p *schemas.Policy) {
		s.announced++
		known[weights{p.Lane, p.PolicyVersion, p.WeightsDigest}]++
	})
	for w, n := range known {
		if n > 1 {
			found = append(found, harness.Fault{
				Kind: harness.Doubled, What: fmt.Sprintf("policy %+v: announced %d times", w, n),
			})
		}
	}
	for key, tr := range k.Trajectories {
		if tr.Text != nil && tr.Text.SaidBy != "" { // what a judge says has no weights
			continue
		}
		for _, version := range []int64{tr.PolicyVersionMin, tr.PolicyVersionMax} {
			if w := (weights{tr.Lane, version, tr.WeightsDigest}); known[w] == 0 {
				found = append(found, harness.Fault{
					Kind: harness.Lost, UID: string(tr.UID),
					What: fmt.Sprintf("policy %+v of trajectory %s: never announced", w, key),
				})
				break
			}
		}
	}
	return found
}

// unguarded turns the guard off and hurts programs until something is stored twice: the audit can
// see it, and it is the guard that prevents it. It returns how many events are.
func (s *stage) unguarded(t *testing.T) (doubled int) {
	t.Helper()
	s.raise(t)
	f := publishing(t, s.bus, "unguarded", 0)
	bustest.Until(t, "all programs are up", func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.closed) == 0 {
			return errors.New("no group has closed")
		}
		return nil
	})
	s.guardOff(t)
	for i, fault := range chaos.Plan(*seed, 200, len(s.programs)-1, ackWait, chaos.ServerKill, chaos.ServerPause,
		chaos.ServerRestart, chaos.DiskFull) {
		// without the guard, groups may stay open until no new one is let in: there must be work
		if i > 0 && i%10 == 0 {
			f.abandon()
			f = publishing(t, s.bus, schemas.Run(fmt.Sprintf("unguarded-%d", i)), 0)
		}
		fault.Victim++ // the first is intake, which would refuse streams without a guard
		s.apply(t, fault)
		for _, n := range harness.ReadBooks(t, s.bus, f.run).Twice {
			doubled += n
		}
		if doubled > 0 {
			break
		}
	}
	f.abandon()
	return doubled
}

// bury ends the programs. They must end well, now and whenever they were asked to before, or say that
// they could not hand over what they had: the network was gone. It returns how many times they did.
func (s *stage) bury(t *testing.T) (kept int) {
	t.Helper()
	bustest.Until(t, "all programs have a connection", func() error {
		for i, p := range s.proxies {
			if !p.Open() {
				return fmt.Errorf("%s has none", s.programs[i].Name)
			}
		}
		return nil
	})
	for _, p := range s.programs {
		p.Bury(t)
		for _, death := range p.Deaths() {
			if death.Asked && (strings.Contains(death.Last, "not drained within") ||
				strings.Contains(death.Last, "did not drain in") ||
				strings.Contains(death.Last, ": connect to nats://")) {
				kept++
				continue
			}
			t.Errorf("%s %s", p.Name, death)
		}
	}
	for _, death := range s.server.Deaths() {
		t.Errorf("%s %s", s.server.Name, death)
	}
	return kept
}

// connect waits until the streams are set up.
func connect(t *testing.T, url string) *bus.Bus {
	t.Helper()
	b := bustest.Connect(t, bus.Config{URL: url, Name: "chaos"})
	bustest.Until(t, "the streams", func() error { return b.Ready(t.Context()) })
	return b
}
