package integration_test

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRun_GatedSteps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := meander(t, dir, "run", "--model", "synthetic", "--group-size", "8", "--sde-steps", "2,3", "--return-steps",
		"2,3,4", "--json",
		"a red fox", "a blue fox").must(t, 0)
	groups, sum := out.parse(t)
	if len(groups) != 2 || sum.Groups != 2 || sum.Complete != 2 || sum.Trajectories != 16 {
		t.Fatalf("got %d groups, summary %+v; want 2 groups complete, 16 trajectories", len(groups), sum)
	}
	steps := len(groups[0].Members[0].LogProbs)
	if steps < 5 || sum.StepsStored != 16*steps {
		t.Errorf("steps_stored = %d, want 16 x %d", sum.StepsStored, steps)
	}
	for _, g := range groups {
		total := 0.0
		for _, m := range g.Members {
			if m.Status != "scored" || m.Reward == nil || m.Advantage == nil {
				t.Fatalf("%s sample %d: %s, reward %v, advantage %v", g.UID, m.SampleIndex, m.Status, m.Reward,
					m.Advantage)
			}
			total += *m.Advantage
			for i, lp := range m.LogProbs {
				stochastic := i == 2 || i == 3
				if stochastic != (lp != nil) {
					t.Errorf("%s sample %d step %d (%s): log_prob null is %v", g.UID, m.SampleIndex, i,
						m.Transitions[i], lp == nil)
				}
				if lp != nil && (math.IsNaN(*lp) || math.IsInf(*lp, 0)) {
					t.Errorf("%s sample %d step %d: log_prob %v", g.UID, m.SampleIndex, i, *lp)
				}
			}
			if !slices.Equal(m.Latents, []int64{2, 3, 4}) {
				t.Errorf("%s sample %d: latents %v, want 2, 3, 4", g.UID, m.SampleIndex, m.Latents)
			}
			if _, err := os.Stat(filepath.Join(dir, m.Image)); err != nil {
				t.Errorf("image: %v", err)
			}
		}
		if math.Abs(total) > 1e-9 {
			t.Errorf("%s: advantages sum to %g, want 0", g.UID, total)
		}
		if _, err := os.Stat(filepath.Join(dir, "meander-out", sum.Run, g.UID+"-sheet.png")); err != nil {
			t.Errorf("contact sheet: %v", err)
		}
	}
}

// Equal seeds give equal results, however the work is packed and spread.
func TestRun_DigestDoesNotDependOnPacking(t *testing.T) {
	t.Parallel()
	common := []string{
		"run", "--model", "synthetic", "--json", "--seed", "11", "-n", "6", "--sde-window", "3:0-8",
		"--out", "-", "a red fox", "two owls", "rain",
	}
	var want string
	for _, packing := range [][]string{
		{"--batch", "1", "--workers", "1"},
		{"--batch", "8", "--workers", "2"},
		{"--batch", "3", "--workers", "2", "--replicas", "3"},
	} {
		_, sum := meander(t, t.TempDir(), append(slices.Clone(common), packing...)...).must(t, 0).parse(t)
		if want == "" {
			want = sum.Digest
		}
		if sum.Digest != want {
			t.Errorf("%v: digest %s, want %s", packing, sum.Digest, want)
		}
	}
	_, other := meander(t, t.TempDir(), append(slices.Clone(common), "--seed", "12")...).must(t, 0).parse(t)
	if other.Digest == want {
		t.Errorf("seed 12 gave the digest of seed 11")
	}
}
