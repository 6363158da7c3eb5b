package advantage

import (
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// staged has the rewards of a group whose stages are plan and, with two children each, p1 and p2. Samples that ended
// lists never ran p2.
func staged(uid schemas.UID, values []float64, ended map[int64]bool,
	change func(g *schemas.Group),
) (list []*schemas.Reward) {
	for i, v := range values {
		i := int64(i)
		list = append(list, made("r", uid, i, int64(len(values)), v, func(g *schemas.Group) {
			g.Rounds, g.Stages = 1, []schemas.GroupStage{
				{Name: "plan", Kind: schemas.StageText, Lane: "t", Every: 2},
				{Name: "p1", Kind: schemas.KindImage, Lane: "i", Every: 1},
				{Name: "judge", Kind: schemas.StageInteraction, Lane: "j", Every: 1},
				{Name: "p2", Kind: schemas.KindImage, Lane: "i", Every: 1, Credit: []schemas.CreditShare{{Reward: "synthetic", Weight: 2}}},
			}
			if change != nil {
				change(g)
			}
		}))
		r := list[len(list)-1]
		for _, s := range r.Group.Stages {
			if s.Name == "p2" && ended[i] {
				break
			}
			ran := schemas.StageScored{Lane: s.Lane, StageResult: schemas.StageResult{
				Stage: s.Name, SampleIndex: i - i%s.Every, TrajectorySeq: 1,
			}}
			if ran.TrainedSteps = 3; s.Kind == schemas.StageText {
				ran.Tokens = new(2 + i/2)
			}
			r.Stages = append(r.Stages, ran)
		}
	}
	return list
}

// ofStage returns the values of a stage's samples that have one, and where they are.
func ofStage(t *testing.T, a *schemas.Advantage, name schemas.Stage) (values []float64, at []int64) {
	t.Helper()
	for _, c := range a.Credits {
		if c.Stage != name {
			continue
		}
		for i, v := range c.Values {
			if v != nil {
				values, at = append(values, *v), append(at, int64(i)*max(c.Every, 1))
			}
		}
		return values, at
	}
	t.Fatalf("group %s: no credit of %s: %s", a.UID, name, a.Error)
	return nil, nil
}

// The advantages of a stage are those of its estimator over the samples that ran it, whoever did not.
func TestCredits_EndedEarly(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, name := range estimator.Names() {
		for range 40 {
			values, ended, ran, scored := make([]float64, 8), map[int64]bool{}, []float64(nil), 0
			for i := range values {
				values[i] = float64(rng.IntN(4))
				if rng.IntN(8) == 0 {
					values[i] = missing
				} else {
					scored++
				}
				if ended[int64(i)] = rng.IntN(2) == 0; !ended[int64(i)] && values[i] == values[i] {
					ran = append(ran, 2*values[i])
				}
			}
			cfg, err := estimator.Default(name)
			if err != nil {
				t.Fatal(err)
			}
			a := closeGroup(t, staged("g", values, ended, func(g *schemas.Group) {
				cfg.Resolve(&g.Advantage)
				g.Reward = []schemas.RewardSpec{{Name: "synthetic", Weight: new(1.0), Required: new(true)}}
			}))
			if scored < 2 {
				continue // the group itself may have nothing to compare
			}
			got, at := ofStage(t, a, "p2")
			set := estimator.Rewards{Values: ran}
			for _, v := range ran {
				set.Lengths, set.Scores = append(set.Lengths, 3), append(set.Scores, []float64{v / 2})
			}
			cfg.Weigh([]schemas.RewardSpec{{Name: "synthetic", Weight: new(1.0)}})
			var want []float64
			groups, err := estimator.Estimate(cfg, []estimator.Rewards{set})
			if len(ran) > 1 || len(ran) == 1 && !cfg.NeedsTwo() {
				if err != nil {
					t.Fatal(err)
				}
				want = groups[0].Advantages
			} else if len(ran) == 1 {
				want = []float64{0} // nothing to compare it with
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("%s: %v has advantages %v, want %v of %v", name, values, got, want, ran)
			}
			for _, i := range at {
				if ended[i] || a.Members[i].Advantage == nil {
					t.Errorf("%s: sample %d has an advantage of a stage that it did not run", name, i)
				}
			}
			if before, _ := ofStage(t, a, "p1"); len(before) < len(got) {
				t.Errorf("%s: %d samples of the stage before have an advantage, and %d of the last", name, len(before),
					len(got))
			}
		}
	}
}

// A stage that no sample ran has no advantage, and the other stages have theirs, also in a batch with a group that ran
// it.
func TestCredits_NoneRan(t *testing.T) {
	all := map[int64]bool{0: true, 1: true, 2: true, 3: true}
	p := newPlane(t)
	service := p.serve(t, testConfig())
	wide := func(g *schemas.Group) {
		g.Batch, g.BatchGroups, g.Advantage.Std = "b", 2, schemas.StdGlobal
	}
	p.put(t, staged("none", []float64{1, 2, 3, 4}, all, wide)...)
	p.put(t, staged("some", []float64{0, 0, 1, 1}, nil, wide)...)
	results := p.results(t, "r", 3)
	service.Stop()
	none, some := advantageOf(t, results, "r", "none"), advantageOf(t, results, "r", "some")
	if values, _ := ofStage(t, none, "p2"); len(values) > 0 {
		t.Errorf("no sample ran p2, and it has the advantages %v", values)
	}
	if values, _ := ofStage(t, none, "p1"); len(values) != 4 {
		t.Errorf("4 samples ran p1, and %d have an advantage", len(values))
	}
	set := estimator.Rewards{Values: []float64{0, 0, 2, 2}, Lengths: []int{3, 3, 3, 3}}
	cfg := estimator.DefaultConfig()
	cfg.Std, cfg.StdBasis, cfg.Epsilon = schemas.StdGlobal, some.StdBasis, some.Epsilon
	want, err := estimator.Estimate(cfg, []estimator.Rewards{set})
	if err != nil {
		t.Fatal(err)
	}
	if values, _ := ofStage(t, some, "p2"); !reflect.DeepEqual(values, want[0].Advantages) {
		t.Errorf("p2 has the advantages %v, want %v: of the group that ran it alone", values, want[0].Advantages)
	}
}

// The rules of a lane hold for those that ran there: a sample that ended before has no version and no schedule of it.
func TestCredits_LaneRules(t *testing.T) {
	for _, c := range []struct {
		ended map[int64]bool
		want  string
	}{
		{map[int64]bool{3: true}, ""},
		{nil, "stage p2: policy versions 0 to 9 are a span of 10; max_policy_span is 2"},
	} {
		rewards := staged("g", []float64{1, 2, 3, 4}, c.ended, func(g *schemas.Group) {
			g.GroupPolicy = &schemas.GroupPolicy{MaxPolicySpan: new(int64(2))}
		})
		if last := rewards[3].Stages; len(last) == 4 {
			last[3].PolicyVersionMin, last[3].PolicyVersionMax = 9, 9
		}
		if a := closeGroup(t, rewards); !strings.HasPrefix(a.Error, c.want) || (a.Error == "") != (c.want == "") {
			t.Errorf("ended %v: group is %s: %q, want %q", c.ended, a.Status, a.Error, c.want)
		}
	}
}
