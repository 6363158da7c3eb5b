package advantage

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
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
			cfg.Weigh([]schemas.RewardSpec{{Name: "synthetic", Weight: new(2.0)}})
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

// A judge ended a sample after its text, which stands for it: its lane is another one than that of the others, with
// versions, schedules and lengths of its own.
func TestCredits_OtherLaneStands(t *testing.T) {
	cfg, err := estimator.Default(estimator.ReinforcePlusPlus)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Gamma = 0.5
	rewards := staged("g", []float64{1, 2, 3, 4}, nil, func(g *schemas.Group) {
		cfg.Resolve(&g.Advantage)
		g.GroupPolicy = &schemas.GroupPolicy{MaxPolicySpan: new(int64(1))}
	})
	for i, r := range rewards {
		plan := &r.Stages[0]
		if plan.PolicyVersionMin, plan.PolicyVersionMax, plan.TrainedSteps = 7, 7, 1; i < 2 {
			r.Stages, r.Trained = r.Stages[:1], plan.Trained
		}
	}
	a := closeGroup(t, rewards)
	if a.Status != schemas.StatusComplete {
		t.Fatalf("group is %s: %s", a.Status, a.Error)
	}
	if values, at := ofStage(t, a, "p2"); !slices.Equal(at, []int64{2, 3}) {
		t.Errorf("p2 has the advantages %v of the samples %v", values, at)
	}
}

// matrix gives rewards two scores, a and b.
func matrix(rewards []*schemas.Reward, a, b []float64, credit func(g *schemas.Group)) []*schemas.Reward {
	for i, r := range rewards {
		r.Group.Reward = []schemas.RewardSpec{
			{Name: "a", Weight: new(1.0), Required: new(true)}, {Name: "b", Weight: new(1.0), Required: new(false)},
		}
		r.Scores = []schemas.Score{{Name: "a", Weight: 1, Status: schemas.StatusScored, Value: &a[i]}}
		if b[i] == b[i] {
			r.Scores = append(r.Scores, schemas.Score{Name: "b", Weight: 1, Status: schemas.StatusScored, Value: &b[i]})
		}
		credit(&r.Group)
	}
	return rewards
}

// A credit is a matrix from rewards to tracks, of a sample without stages or of a stage, and each track is compared by
// itself. An optional reward that failed is left out of the sum.
func TestCredits_Tracks(t *testing.T) {
	a, b := []float64{1, 2, 3, 4}, []float64{5, 1, missing, 3}
	shares := []schemas.CreditShare{
		{Reward: "a", Track: "video", Weight: 2},
		{Reward: "a", Track: "sound", Weight: 0.5},
		{Reward: "b", Track: "sound", Weight: 3},
	}
	want := map[string][]float64{"video": {2, 4, 6, 8}, "sound": {0.5 + 15, 1 + 3, 1.5, 2 + 9}}
	for _, stages := range []bool{false, true} {
		rewards, stage := staged("g", a, nil, nil), schemas.Stage("p2")
		matrix(rewards, a, b, func(g *schemas.Group) {
			if stages {
				g.Stages = slices.Clone(g.Stages)
				g.Stages[3].Credit = shares
				return
			}
			g.Credit, g.Stages, g.Rounds, stage = shares, nil, 0, schemas.StageMain
		})
		for _, r := range rewards {
			if !stages {
				r.Stages = nil
			}
		}
		got := closeGroup(t, rewards)
		found := map[string]bool{}
		for _, c := range got.Credits {
			if c.Stage != stage {
				continue
			}
			groups, err := estimator.Estimate(estimator.DefaultConfig(), []estimator.Rewards{{Values: want[c.Track]}})
			if err != nil {
				t.Fatalf("track %q: %v", c.Track, err)
			}
			found[c.Track] = true
			for i, v := range c.Values {
				if v == nil || *v != groups[0].Advantages[i] {
					t.Errorf("stages %v, track %s, sample %d: %v, want %v", stages, c.Track, i, number(v),
						groups[0].Advantages[i])
				}
			}
		}
		if len(found) != 2 {
			t.Errorf("stages %v: tracks %v of %+v", stages, found, got.Credits)
		}
	}
}

// gdpo normalises each score by itself, with the weights of the part's credit.
func TestCredits_GDPO(t *testing.T) {
	a, b := []float64{1, 2, 3, 4}, []float64{5, 1, 2, 3}
	cfg, err := estimator.Default(estimator.GDPO)
	if err != nil {
		t.Fatal(err)
	}
	rewards := staged("g", a, map[int64]bool{0: true}, func(g *schemas.Group) { cfg.Resolve(&g.Advantage) })
	got := closeGroup(t, matrix(rewards, a, b, func(g *schemas.Group) {
		g.Stages = slices.Clone(g.Stages)
		g.Stages[3].Credit = []schemas.CreditShare{{Reward: "b", Weight: 3}, {Reward: "a", Weight: 1}}
	}))
	cfg.Weights = []float64{3, 1}
	want, err := estimator.Estimate(cfg, []estimator.Rewards{{
		Values: []float64{5, 9, 13}, Lengths: []int{3, 3, 3}, Scores: [][]float64{{1, 2}, {2, 3}, {3, 4}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if values, _ := ofStage(t, got, "p2"); !slices.Equal(values, want[0].Advantages) {
		t.Errorf("advantages %v, want %v", values, want[0].Advantages)
	}
}

// With gamma below 1 each token and each trained step has an advantage: those of a sample's rounds are one sequence, at
// whose end the reward comes.
func TestCredits_Gamma(t *testing.T) {
	cfg, err := estimator.Default(estimator.ReinforcePlusPlus)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Gamma = 0.5
	rewards := staged("g", []float64{1, 3, 6, 2}, nil, func(g *schemas.Group) {
		cfg.Resolve(&g.Advantage)
		g.Rounds = 2
	})
	for _, r := range rewards[2:] { // the thought of the last two goes on for a second round of one token
		again := r.Stages[0]
		again.Stage, again.Tokens = "plan-2", new(int64(1))
		r.Stages = append(r.Stages, again)
	}
	got := closeGroup(t, rewards)
	want, err := estimator.Estimate(cfg, []estimator.Rewards{{Values: []float64{2, 4}, Lengths: []int{2, 3 + 1}}})
	if err != nil {
		t.Fatal(err)
	}
	steps := got.Credits[0].Steps
	if len(steps) != 3 || steps[0].Stage != "plan" || steps[1].SampleIndex != 2 || steps[2].Stage != "plan-2" {
		t.Fatalf("steps %+v", steps)
	}
	if !slices.Equal(steps[0].Advantages, want[0].StepAdvantages[0]) ||
		!slices.Equal(slices.Concat(steps[1].Advantages, steps[2].Advantages), want[0].StepAdvantages[1]) {
		t.Errorf("steps %+v, want %v", steps, want[0].StepAdvantages)
	}
	if values, _ := ofStage(t, got, "plan"); !slices.Equal(values, want[0].Advantages) {
		t.Errorf("values %v, want %v", values, want[0].Advantages)
	}
	if n := len(got.Credits[1].Steps); n != 4 {
		t.Errorf("%d paintings have advantages of their steps, want 4", n)
	}
}

// The steps of a stage that is a tree have the advantages of their segments, worked out by hand. Those before the first
// branch point are compared with those of the other trees.
func TestCredits_Tree(t *testing.T) {
	const eps = 1e-4
	over := func(x, variance float64) float64 { return x / (math.Sqrt(variance) + eps) }
	root := over(0.5, 0.5) // of the means 3 and 2 of the two trees
	for scope, want := range map[string][][]float64{
		schemas.BranchSiblings: { // segments 2 and 4, 0 and 4
			{root, over(-1, 2), over(-1, 2)},
			{over(1, 2)},
			{over(1, 2), over(-2, 8)},
			{over(2, 8)},
			{-root, over(-2, 8), 0},
			{0},
			{over(2, 8), 0},
			{0},
		},
		schemas.BranchDepth: { // all of a depth: 11/3 and 32/7 are their variances
			{root, over(-0.5, 11.0/3), over(-1.5, 32.0/7)},
			{over(0.5, 32.0/7)},
			{over(1.5, 11.0/3), over(-0.5, 32.0/7)},
			{over(3.5, 32.0/7)},
			{-root, over(-2.5, 11.0/3), over(-2.5, 32.0/7)},
			{over(-2.5, 32.0/7)},
			{over(1.5, 11.0/3), over(1.5, 32.0/7)},
			{over(1.5, 32.0/7)},
		},
		schemas.BranchLeaves: { // means of those of the leaves
			{over(0.5, 32.0/7), over(-0.5, 32.0/7), over(-1.5, 32.0/7)},
			{over(0.5, 32.0/7)},
			{over(1.5, 32.0/7), over(-0.5, 32.0/7)},
			{over(3.5, 32.0/7)},
			{over(-0.5, 32.0/7), over(-2.5, 32.0/7), over(-2.5, 32.0/7)},
			{over(-2.5, 32.0/7)},
			{over(1.5, 32.0/7), over(1.5, 32.0/7)},
			{over(1.5, 32.0/7)},
		},
	} {
		t.Run(scope, func(t *testing.T) {
			rewards := staged("g", []float64{1, 3, 2, 6, 0, 0, 4, 4}, nil, func(g *schemas.Group) {
				g.Advantage.BranchScope, g.Stages[0].Every = scope, 4
				g.Stages[1].Tree = &schemas.Tree{Branches: []schemas.BranchPoint{
					{StepIndex: 1, Width: 2}, {StepIndex: 2, Width: 2},
				}}
			})
			for i, r := range rewards { // three steps, all trained; each is of the lowest leaf behind it
				r.Stages[1].Segments = [][]int64{{1, 1, 1}, {0, 0, 1}, {0, 1, 1}, {0, 0, 1}}[i%4]
			}
			a := closeGroup(t, rewards)
			if len(a.Credits) != 3 || a.Credits[1].Stage != "p1" || len(a.Credits[1].Steps) != len(want) {
				t.Fatalf("%s: credits %+v", a.Error, a.Credits)
			}
			for i, s := range a.Credits[1].Steps {
				if s.Stage != "p1" || s.SampleIndex != int64(i) || !slices.EqualFunc(s.Advantages, want[i],
					func(a, b float64) bool { return math.Abs(a-b) < 1e-12 }) {
					t.Errorf("sample %d: %+v, want %v", i, s, want[i])
				}
			}
		})
	}
}
