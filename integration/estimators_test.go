package integration_test

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// Groups whose samples are all right, or all equally wrong, are replaced by fresh ones of
// the same prompt until the batch has its exact number of groups to learn from; the same
// seed asks for the same replacements.
func TestRefill_ToAnExactBatch(t *testing.T) {
	t.Parallel()
	prompts, err := filepath.Abs(filepath.Join(root, "deploy/demo/prompts.txt"))
	if err != nil {
		t.Fatal(err)
	}
	digest := ""
	for _, run := range []string{"one", "two"} {
		out := meander(t, t.TempDir(), "run", "--run", run, "--model", signs(t), "-n", "2", "--seed", "6", "--reward",
			"glyph", "--std", "global",
			"--zero-std", "refill", "--refill-rounds", "16", "--batch-size", "4", "-f", prompts, "--out", "-",
			"--json").must(t,
			0)
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

// An evaluation reports the mean, the best and the majority of the samples of a prompt.
func TestEvaluation_FromTheCommandLine(t *testing.T) {
	t.Parallel()
	args := []string{
		"run", "--model", signs(t), "-n", "4", "--seed", "3", "--reward", "glyph", "--validation", "--out",
		"-", `a black sign that says "SCHOOL"`,
	}
	groups, sum := meander(t, t.TempDir(), append(args, "--json")...).must(t, 0).parse(t)
	votes, mean := map[string]int{}, 0.0
	for _, m := range groups[0].Members {
		mean += *m.Reward / 4
		votes[m.Scores[0].Detail]++
	}
	if got := sum.Metrics["val-core/unknown/reward/mean@4"]; math.Abs(got-mean) > 1e-12 {
		t.Errorf("mean@4 %v, want %v", got, mean)
	}
	majority, ok := sum.Metrics["val-core/unknown/reward/maj@4/mean"]
	if best := sum.Metrics["val-core/unknown/reward/best@4/mean"]; !ok || votes["SCHOOL"] != 3 || majority <= mean ||
		majority > best {
		t.Errorf("maj@4 %v with readings %v, mean@4 %v, best@4 %v", majority, votes, mean, best)
	}
	out := meander(t, t.TempDir(), args...).must(t, 0)
	if want := fmt.Sprintf("evaluation unknown/reward: best@4 %.3f, maj@4 %.3f, mean@4 %.3f",
		sum.Metrics["val-core/unknown/reward/best@4/mean"], majority, mean); !strings.Contains(out.stdout, want) {
		t.Errorf("no %q in %s", want, out.stdout)
	}
}
