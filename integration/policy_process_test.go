package integration_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// swapSamples and swapSteps are the group that is made while weights change.
const swapSamples, swapSteps = 8, 12

// A sampler that is killed while it takes a version over, with samples in hand: each sample is there once, with the
// digest that it has where no one disturbs it. Under finish and restart no sample has steps of two versions; under
// switch each step says which it has. Who is started again begins on the new version.
func TestPolicy_KilledInTheSwap(t *testing.T) {
	if raceEnabled {
		t.Skip("the networks take minutes under the race detector")
	}
	t.Parallel()
	for _, rule := range schemas.SwapRules {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			for tries := 1; !killedInTheSwap(t, rule); tries++ {
				if tries == 8 {
					t.Fatal("never killed in the swap, so this proves nothing")
				}
			}
		})
	}
}

// killedInTheSwap is false where the kill came too late, or no sample was made on both sides of the swap.
func killedInTheSwap(t *testing.T, rule string) bool {
	t.Helper()
	w := newWorld(t, bustest.TCP)
	w.Serve(t, defaults().run("intake"))
	a := signsProcess(t, w, "a")
	signsProcess(t, w, "b")
	base := served(t, w, 2, 0)
	swapGroup(t, w, "base")
	before := swapped(t, w, "base")

	swapGroup(t, w, "swap")
	bustest.Await(t, w.Bus, 2, schemas.StreamTrajectories, schemas.TrajectoryFilter("swap", "u"))
	d := widthOfSigns(t, w.Bus, base)
	pushed, err := w.client.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, 7, 0)),
		client.Push{Rule: rule})
	if err != nil {
		t.Fatal(err)
	}
	up := killWhenLoading(t, w, a, pushed)
	answers, err := w.Applied(t.Context(), pushed.Lineage())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range answers {
		if strings.HasPrefix(e.Instance, "a-") {
			return false
		}
	}
	up()
	after := served(t, w, 2, pushed.PolicyVersion)
	got := swapped(t, w, "swap")
	swapGroup(t, w, "calm")
	calm := swapped(t, w, "calm")
	if after.WeightsDigest != pushed.WeightsDigest {
		t.Errorf("serves %.12s, want %.12s", after.WeightsDigest, pushed.WeightsDigest)
	}
	sameCanaries(t, w, pushed)
	made := map[int64]int{} // samples by version, -1 of several
	for i, s := range got {
		switch {
		case s.min != s.max:
			if made[-1]++; rule != schemas.SwapSwitch {
				t.Errorf("sample %d has steps of the versions %d and %d", i, s.min, s.max)
			}
			continue
		case s.max == base.PolicyVersion && s.digest != before[i].digest, s.max == pushed.PolicyVersion &&
			s.digest != calm[i].digest:
			t.Errorf("sample %d, of version %d, has another digest than undisturbed", i, s.max)
		}
		made[s.max]++
	}
	t.Logf("samples by version: %v", made)
	verifySwapped(t, w, "")
	return (rule != schemas.SwapFinish || made[base.PolicyVersion] > 0) && made[pushed.PolicyVersion]+made[-1] > 0
}

// signsProcess is a sampler of signs as a process of its own.
func signsProcess(t *testing.T, w *world, instance string, more ...string) *harness.Process {
	t.Helper()
	folder, err := filepath.Abs(signsFolder)
	if err != nil {
		t.Fatal(err)
	}
	return harness.Raise(t, &harness.Process{
		Name: "sampler-" + instance, Path: program(t, "meander-sampler"),
		Dir: t.TempDir(), Args: append([]string{
			"--nats-url", w.Server.ClientURL(), "--health-addr", "", "--model", folder, "--instance", instance, "--threads", "1",
			"--ack-wait", "2s", "--drain-timeout", "10ms", "--batch", "2", "--workers", "1",
		}, more...),
	})
}

// served waits until so many samplers make samples with a version, and returns it.
func served(t *testing.T, w *world, samplers int, version int64) (p *schemas.Policy) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("version %d is served", version), func() (err error) {
		if p, err = w.client.Policy(t.Context(), schemas.Lineage{}); err != nil {
			return err
		}
		replicas, err := w.client.Replicas(t.Context(), p)
		n := 0
		for _, r := range replicas {
			if r.PolicyVersion != nil && *r.PolicyVersion == version {
				n++
			}
		}
		if err == nil && n < samplers {
			err = fmt.Errorf("by %d of %d samplers", n, samplers)
		}
		return err
	})
	return p
}

// swapGroup publishes the group.
func swapGroup(t *testing.T, w *world, run schemas.Run) {
	t.Helper()
	publish(t, w, run, &schemas.Prompt{
		UID: "u", Prompt: `a sign that says "FOX"`, GroupSize: new(int64(swapSamples)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(swapSteps))},
		Seed:          new(int64(3)), Reward: []schemas.RewardSpec{{Name: "synthetic"}},
	})
}

// content is what a sample came to, and the versions of its steps.
type content struct {
	digest   [32]byte
	min, max int64
}

// swapped waits for the samples of the group.
func swapped(t *testing.T, w *world, run schemas.Run) map[int64]content {
	t.Helper()
	out := map[int64]content{}
	for _, m := range bustest.Await(t, w.Bus, swapSamples, schemas.StreamTrajectories,
		schemas.TrajectoryFilter(run, "u")) {
		tr := bustest.Decode[schemas.Trajectory](t, m)
		digest, err := schemas.ContentDigest(tr)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := w.client.Steps(t.Context(), tr)
		if err != nil || len(steps) != swapSteps {
			t.Fatalf("sample %d: %d steps, %v", tr.SampleIndex, len(steps), err)
		}
		c := content{digest, steps[0].PolicyVersion, steps[0].PolicyVersion}
		for _, s := range steps {
			c.min, c.max = min(c.min, s.PolicyVersion), max(c.max, s.PolicyVersion)
		}
		if c.min != tr.PolicyVersionMin || c.max != tr.PolicyVersionMax {
			t.Errorf("sample %d says versions %d to %d; its steps have %d to %d", tr.SampleIndex, tr.PolicyVersionMin,
				tr.PolicyVersionMax, c.min, c.max)
		}
		out[tr.SampleIndex] = c
	}
	return out
}

// killWhenLoading kills a sampler the moment it says that it loads a version; up starts it again.
func killWhenLoading(t *testing.T, w *world, v *harness.Process, p *schemas.Policy) (up func()) {
	t.Helper()
	ctx, _ := bustest.WhileItMoves(t)
	prefix := v.Args[slices.Index(v.Args, "--instance")+1] + "-"
	for ctx.Err() == nil {
		replicas, err := w.client.Replicas(ctx, p)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range replicas {
			if strings.HasPrefix(r.Instance, prefix) && (r.Loading != nil || r.PolicyVersion != nil &&
				*r.PolicyVersion == p.PolicyVersion) {
				return v.KillFor(t)
			}
		}
	}
	t.Fatal("it never loaded it")
	return nil
}

// sameCanaries holds the answers to a version against each other: samplers of one backend make the same of a fixed
// input.
func sameCanaries(t *testing.T, w *world, p *schemas.Policy) {
	t.Helper()
	var first *schemas.Applied
	bustest.Until(t, "two samplers have answered", func() error {
		answers, err := w.Applied(t.Context(), p.Lineage())
		if err != nil {
			return err
		}
		n := 0
		for _, a := range answers {
			if a.PolicyVersion != p.PolicyVersion {
				continue
			}
			if n++; first == nil {
				first = a
			}
			if a.State != schemas.AppliedApplied || a.Canary == nil || *a.Canary != *first.Canary {
				t.Fatalf("answers %+v and %+v, canaries %+v and %+v", first, a, first.Canary, a.Canary)
			}
		}
		if n < 2 {
			return fmt.Errorf("%d answers", n)
		}
		return nil
	})
}

// verifySwapped checks that each step of the run swap is stored once, nothing was given up, and the whole run verifies,
// with the weights by path in dir.
func verifySwapped(t *testing.T, w *world, dir string) {
	t.Helper()
	bustest.Until(t, "each step is there once", func() error {
		steps := harness.Subjects(t, w.Bus, schemas.StreamSteps, schemas.StepsFilter("swap", "*", "*", "*"))
		if len(steps) != swapSamples*swapSteps {
			return fmt.Errorf("%d steps, want %d", len(steps), swapSamples*swapSteps)
		}
		return nil
	})
	harness.NoDead(t, w.Bus)
	report, err := verify.Run(t.Context(), w.Bus, "swap", verify.Options{Model: []string{signsFolder}, WeightsDir: dir})
	if err != nil || report.Trajectories != swapSamples || report.MaxRatio != 0 || len(report.Mismatches) > 0 ||
		report.Unproven != "" {
		t.Errorf("verify: %+v, %v", report, err)
	}
}
