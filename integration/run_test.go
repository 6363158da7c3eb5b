package integration_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestRun_GatedSteps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := meander(t, dir, "run", "--model", "synthetic", "--group-size", "8", "--sde-steps", "2,3", "--return-steps", "2,3,4", "--json",
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
				t.Fatalf("%s sample %d: %s, reward %v, advantage %v", g.UID, m.SampleIndex, m.Status, m.Reward, m.Advantage)
			}
			total += *m.Advantage
			for i, lp := range m.LogProbs {
				stochastic := i == 2 || i == 3
				if stochastic != (lp != nil) {
					t.Errorf("%s sample %d step %d (%s): log_prob null is %v", g.UID, m.SampleIndex, i, m.Transitions[i], lp == nil)
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

func TestVerify_RatioIsOne(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--latents-dtype", "F32"},
		{"--latents-dtype", "F16"},
		{"--latents-dtype", "BF16"},
		{"--latents-dtype", "F16", "--sde-type", "cps", "--sde-steps", "0-8", "--solver", "heun"},
		{"--latents-dtype", "BF16", "--sde-type", "dance_sde", "--sde-window", "3:0-8:noncontiguous", "--solver", "unipc", "--log-prob-kind", "scaled"},
		{"--true-cfg-scale", "3", "--negative-prompt", "grey", "--log-prob-kind", "squared", "--sde-type", "cps", "--height", "96", "--width", "32"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			meander(t, dir, append([]string{"run", "--model", "synthetic", "-n", "3", "--json", "--batch", "2"}, append(args, "a red fox", "two owls")...)...).must(t, 0)
			var report struct {
				Trajectories int               `json:"trajectories"`
				Steps        int               `json:"steps"`
				Skipped      int               `json:"steps_skipped"`
				Max          float64           `json:"max_abs_ratio_minus_1"`
				Mismatches   []json.RawMessage `json:"mismatches"`
			}
			out := meander(t, dir, "verify", "--json").must(t, 0)
			if err := json.Unmarshal([]byte(out.stdout), &report); err != nil {
				t.Fatalf("verify: %v\n%s", err, out.stdout)
			}
			if report.Trajectories != 6 || report.Steps < 6 || report.Skipped != 0 {
				t.Errorf("verified %d trajectories, %d steps, %d skipped; want 6, some, none", report.Trajectories, report.Steps, report.Skipped)
			}
			if report.Max != 0 || len(report.Mismatches) != 0 {
				t.Errorf("max |ratio-1| = %g, mismatches %s; want 0, none", report.Max, report.Mismatches)
			}
		})
	}
}

// Equal seeds give equal results, however the work is packed and spread.
func TestRun_DigestDoesNotDependOnPacking(t *testing.T) {
	t.Parallel()
	common := []string{"run", "--model", "synthetic", "--json", "--seed", "11", "-n", "6", "--sde-window", "3:0-8", "--out", "-", "a red fox", "two owls", "rain"}
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

// A run that was killed goes on where it stopped, and ends as if nothing had happened.
func TestRun_KilledAndResumed(t *testing.T) {
	t.Parallel()
	args := func(run string) []string {
		return []string{
			"run", "--model", "synthetic", "--json", "--seed", "5", "--run", run, "--out", "-", "-n", "6",
			"--steps", "40", "--height", "256", "--width", "256", "--batch", "2", "--workers", "1", "--ack-wait", "1s", "--sde-steps", "0-9",
			"a red fox", "two owls", "rain", "the sea",
		}
	}
	_, calm := meander(t, t.TempDir(), args("calm")...).must(t, 0).parse(t)

	dir, kills := t.TempDir(), 0
	for have := 0; kills < 3; kills++ {
		x := background(t, dir, args("killed")...)
		if have = made(t, dir, "killed", have+2, x); have == 0 {
			t.Fatal("the run ended before it could be killed; make it longer")
		}
		x.signal(t, os.Kill)
		<-x.ended
	}
	groups, sum := meander(t, dir, args("killed")...).must(t, 0).parse(t)
	if sum.Digest != calm.Digest {
		t.Errorf("after %d kills the digest is %s, without kills %s", kills, sum.Digest, calm.Digest)
	}
	if len(groups) != 4 || sum.Complete != 4 || sum.Trajectories != 24 {
		t.Errorf("after %d kills: %d groups, summary %+v; want 4 complete groups, 24 trajectories", kills, len(groups), sum)
	}
	out := meander(t, dir, "show", "--run", "killed", "--json").must(t, 0)
	if n := strings.Count(out.stdout, "\n"); n != 4 {
		t.Errorf("%d advantages are stored, want exactly 4", n)
	}
}

// A run id names one set of prompts.
func TestRun_IDUsedForOtherPrompts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	meander(t, dir, "run", "--run", "x", "--model", "synthetic", "-n", "2", "--out", "-", "a red fox").must(t, 0)
	out := meander(t, dir, "run", "--run", "x", "--model", "synthetic", "-n", "2", "--out", "-", "another").must(t, 2)
	if !strings.Contains(out.stderr, "--run") {
		t.Errorf("the error does not name --run: %s", out.stderr)
	}
	meander(t, dir, "run", "--run", "x", "--model", "synthetic", "-n", "2", "--out", "-", "a red fox").must(t, 0)
}
