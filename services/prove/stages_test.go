package prove_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/prove"
)

// A run of two stages, of children and of two rounds, whose last update learned from the second one, by the digest that
// Python has of it: tests/test_stages_prove.py makes it (KEEP_ARCHIVE=FILE).
const staged = "testdata/stages.tar"

// Each link of a run with stages is computed again, and a change of each is found.
func TestRun_Stages(t *testing.T) {
	every := func(kind string) string { return schemas.Address{Kind: kind, Run: "*"}.Filter() }
	result := func(change func(e *schemas.Advantage)) func(t *testing.T) []byte {
		return func(t *testing.T) []byte {
			return forgedOf(t, staged, schemas.StreamAdvantages, every(schemas.KindAdvantage), change)
		}
	}
	reward := func(change func(e *schemas.Reward)) func(t *testing.T) []byte {
		return func(t *testing.T) []byte {
			return forgedOf(t, staged, schemas.StreamRewards, every(schemas.KindReward), change)
		}
	}
	record := func(change func(e *schemas.GroupRecord)) func(t *testing.T) []byte {
		return func(t *testing.T) []byte {
			return forgedOf(t, staged, schemas.StreamGroups, every(schemas.KindGroup), func(e *schemas.GroupRecord) {
				change(e)
				e.PromptDigest, _ = e.StagesDigest()
			})
		}
	}
	for name, of := range map[string]struct {
		archive func(t *testing.T) []byte
		broken  string
		what    string
	}{
		"as it is":                  {func(t *testing.T) []byte { return read(t, staged) }, "", ""},
		"a credit":                  {result(func(e *schemas.Advantage) { *e.Credits[1].Values[0] += 1e-9 }), "batch", " for stage paint, "},
		"a credit of another stage": {result(func(e *schemas.Advantage) { *e.Credits[0].Values[0] += 1e-9 }), "advantages", "stages, tracks or"},
		"a sum":                     {reward(func(e *schemas.Reward) { *e.Reward += 1e-9 }), "sums", "its scores give"},
		"a weight":                  {reward(func(e *schemas.Reward) { e.Scores[1].Weight = 0.25 }), "sums", "its scores give nothing"},
		"scores of the same sum": {reward(func(e *schemas.Reward) {
			*e.Scores[0].Value += 0.25
			*e.Scores[1].Value -= 0.5
		}), "rewards", " gives "},
		"a request": {record(func(e *schemas.GroupRecord) { e.Stages[1].Prompt += "!" }), "trajectories", "request: not what follows"},
		"a setting": {record(func(e *schemas.GroupRecord) { e.Stages[1].NoiseLevel += 1e-9 }), "prompts", "its record has other"},
		"a trajectory that is gone": {func(t *testing.T) []byte {
			return forgedOf[schemas.Trajectory](t, staged, schemas.StreamTrajectories,
				every(schemas.KindTrajectory), nil)
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := options()
			o.All = true
			if of.broken != "" {
				o.Only = []string{"archive", "batch", "sums", of.broken}
			}
			r := run(t, of.archive(t), o)
			found, whole := "", name == "as it is"
			for _, l := range r.Links {
				if l.Verdict == prove.Broken && found == "" {
					found = l.Link
				}
			}
			said := slices.ContainsFunc(r.Links, func(l prove.Link) bool {
				return l.Link == of.broken && strings.Contains(l.What, of.what)
			})
			if found != of.broken || r.Proved != whole || !said && of.broken != "" {
				t.Errorf("%q is broken, proved %t; want %q: %q\n%+v", found, r.Proved, of.broken, of.what, r.Links)
			}
		})
	}
}
