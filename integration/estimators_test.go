package integration_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
)

// Every estimator can be had from the command line, and another is refused with the list.
func TestEstimators_FromTheCommandLine(t *testing.T) {
	dir := t.TempDir()
	for _, name := range estimator.Names() {
		out := meander(t, dir, "run", "--run", name, "--estimator", name, "--model", "synthetic", "--reward", "synthetic", "-n", "3",
			"--steps", "2", "--out", "-", "--json", "a red fox", "a blue fox").must(t, 0)
		groups, sum := out.parse(t)
		if sum.Complete != 2 {
			t.Errorf("%s: %+v", name, sum)
		}
		for _, g := range groups {
			for _, m := range g.Members {
				if m.Advantage == nil {
					t.Errorf("%s: sample %d of %s has no advantage", name, m.SampleIndex, g.UID)
				}
			}
		}
	}
	out := meander(t, dir, "run", "--estimator", "ppo", "a red fox").must(t, 2)
	for _, name := range estimator.Names() {
		if !strings.Contains(out.stderr, name) {
			t.Errorf("the refusal does not list %s: %s", name, out.stderr)
		}
	}
}

// Groups whose samples are all right, or all equally wrong, are replaced by fresh ones of
// the same prompt until the batch has its exact number of groups to learn from; the same
// seed asks for the same replacements.
func TestRefill_ToAnExactBatch(t *testing.T) {
	models, err := filepath.Abs(filepath.Join(root, "deploy/models"))
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("MEANDER_MODELS", models)
	prompts, err := filepath.Abs(filepath.Join(root, "deploy/demo/prompts.txt"))
	if err != nil {
		t.Fatal(err)
	}
	digest := ""
	for _, run := range []string{"one", "two"} {
		out := meander(t, t.TempDir(), "run", "--run", run, "--model", "signs", "-n", "2", "--seed", "2", "--reward", "glyph", "--std", "global",
			"--zero-std", "refill", "--refill-rounds", "8", "--batch-size", "4", "-f", prompts, "--out", "-", "--json").must(t, 0)
		groups, sum := out.parse(t)
		if sum.Complete != 4 || sum.Refills == 0 {
			t.Errorf("summary %+v; want 4 groups to learn from, and refills", sum)
		}
		for _, g := range groups {
			if g.Std == nil || *g.Members[0].Reward == *g.Members[1].Reward || *g.Members[0].Advantage == 0 {
				t.Errorf("group %s: %+v", g.UID, g)
			}
		}
		if digest != "" && sum.Digest != digest {
			t.Errorf("digest %s, want %s as before", sum.Digest, digest)
		}
		digest = sum.Digest
	}
}
