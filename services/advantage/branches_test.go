package advantage

import (
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// treeOf is the rewards of a tree of two branch points, of two and width children; NaN is a
// sample that failed.
func treeOf(scope string, width int64, change func(a *schemas.AdvantageSpec), values ...float64) []*schemas.Reward {
	var rewards []*schemas.Reward
	for i, v := range values {
		value := &v
		if math.IsNaN(v) {
			value = nil
		}
		r := rewardOf(int64(i), int64(len(values)), value)
		r.Group.Tree = &schemas.Tree{Branches: []schemas.BranchPoint{
			{StepIndex: 2, Width: 2}, {StepIndex: 5, Width: width},
		}}
		r.Group.Advantage.BranchScope = scope
		if change != nil {
			change(&r.Group.Advantage)
		}
		rewards = append(rewards, r)
	}
	return rewards
}

// The advantages of segments are those of the formulas, worked out by hand.
func TestBranches(t *testing.T) {
	root2 := math.Sqrt2
	eps := 1e-4
	nan := math.NaN()
	for _, c := range []struct {
		name   string
		scope  string
		width  int64
		change func(a *schemas.AdvantageSpec)
		values []float64
		want   [][]float64 // of each branch point: step, mean, std, then the advantages of its children
	}{
		// Rewards of segments: 2 and 4 behind the first branch point, then the leaves' own.
		{"siblings", "siblings", 2, nil, []float64{1, 3, 2, 6}, [][]float64{
			{2, 3, root2, -1 / (root2 + eps), 1 / (root2 + eps)},
			{5, 2, root2, -1 / (root2 + eps), 1 / (root2 + eps)},
			{5, 4, 2 * root2, -2 / (2*root2 + eps), 2 / (2*root2 + eps)},
		}},
		{"depth, as BranchGRPO", "depth", 2, nil, []float64{1, 3, 2, 6}, [][]float64{
			{2, 3, root2, -1 / (root2 + eps), 1 / (root2 + eps)},
			{5, 2, math.Sqrt(14.0 / 3), -2 / (math.Sqrt(14.0/3) + eps), 0},
			{5, 4, math.Sqrt(14.0 / 3), -1 / (math.Sqrt(14.0/3) + eps), 3 / (math.Sqrt(14.0/3) + eps)},
		}},
		{"leaves, as TreeGRPO", "leaves", 2, nil, []float64{1, 3, 2, 6}, [][]float64{
			{2, 3, nan, -1 / (math.Sqrt(14.0/3) + eps), 1 / (math.Sqrt(14.0/3) + eps)},
			{5, 2, nan, -2 / (math.Sqrt(14.0/3) + eps), 0},
			{5, 4, nan, -1 / (math.Sqrt(14.0/3) + eps), 3 / (math.Sqrt(14.0/3) + eps)},
		}},
		{"the estimator's options", "siblings", 2, func(a *schemas.AdvantageSpec) {
			a.StdBasis, a.Epsilon, a.AdvClipMax = "population", new(0.5), new(0.75)
		}, []float64{1, 3, 2, 6}, [][]float64{
			{2, 3, 1, -1 / 1.5, 1 / 1.5}, {5, 2, 1, -1 / 1.5, 1 / 1.5}, {5, 4, 2, -0.75, 0.75},
		}},
		{"without division", "siblings", 3, func(a *schemas.AdvantageSpec) {
			a.Estimator, a.Std, a.Epsilon = "dr_grpo", "none", new(0.0)
		}, []float64{1, 2, 6, 0, 0, 0}, [][]float64{
			{2, 1.5, 1.5 * root2, 1.5, -1.5}, {5, 3, math.Sqrt(7), -2, -1, 3}, {5, 0, 0, 0, 0, 0},
		}},
		{"leave one out", "siblings", 3, func(a *schemas.AdvantageSpec) {
			a.Estimator, a.Std, a.Epsilon, a.Singleton = "rloo", "none", new(0.0), "zero"
		}, []float64{1, 2, 6, 0, 0, 3}, [][]float64{
			{2, 2, root2, 2, -2}, {5, 3, math.Sqrt(7), -3, -1.5, 4.5}, {5, 1, math.Sqrt(3), -1.5, -1.5, 3},
		}},
		// A leaf that failed is left out of the mean of its segment, a segment without leaves of its
		// branch point; a child that is left alone has nothing to differ from.
		{"failed leaves", "siblings", 2, nil, []float64{1, nan, 2, 6}, [][]float64{
			{2, 2.5, 1.5 * root2, -1.5 / (1.5*root2 + eps), 1.5 / (1.5*root2 + eps)},
			{5, 1, 0, 0, nan},
			{5, 4, 2 * root2, -2 / (2*root2 + eps), 2 / (2*root2 + eps)},
		}},
		{"a failed subtree", "depth", 2, nil, []float64{1, 3, nan, nan}, [][]float64{
			{2, 2, 0, 0, nan}, {5, 2, root2, -1 / (root2 + eps), 1 / (root2 + eps)}, {5, nan, nan, nan, nan},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := closeGroup(t, treeOf(c.scope, c.width, c.change, c.values...))
			if a.BranchScope != c.scope || len(a.Branches) != len(c.want) {
				t.Fatalf("scope %q, %d branch points: %s", a.BranchScope, len(a.Branches), a.Error)
			}
			for i, b := range a.Branches {
				got := []float64{float64(b.StepIndex), number(b.Mean), number(b.Std)}
				for k, child := range b.Children {
					got = append(got, number(child.Advantage))
					behind := int64(1)
					if i == 0 {
						behind = c.width
					}
					if want := int64(max(0, i-1))*c.width + int64(k)*behind; child.SampleIndex != want {
						t.Errorf("branch point %d: child %d is sample %d, want %d", i, k, child.SampleIndex, want)
					}
				}
				if !slices.EqualFunc(got, c.want[i], func(x, y float64) bool {
					return math.IsNaN(x) && math.IsNaN(y) || math.Abs(x-y) <= 1e-12*max(1, math.Abs(y))
				}) {
					t.Errorf("branch point %d: step, mean, std, advantages %v, want %v", i, got, c.want[i])
				}
			}
		})
	}
}

func number(p *float64) float64 {
	if p == nil {
		return math.NaN()
	}
	return *p
}

// Every estimator compares segments, and a group that is no tree has none, with the same
// advantages.
func TestBranches_Estimators(t *testing.T) {
	for _, name := range estimator.Names() {
		change := func(a *schemas.AdvantageSpec) {
			c, err := estimator.Default(name)
			if err != nil {
				t.Fatal(err)
			}
			*a = schemas.AdvantageSpec{
				Estimator: name, Std: c.Std, StdBasis: c.StdBasis, Epsilon: &c.Epsilon, Mode: c.Mode,
				Singleton: c.Singleton, BranchScope: a.BranchScope,
			}
			if c.AdvClipMax > 0 {
				a.AdvClipMax = &c.AdvClipMax
			}
		}
		score := func(rewards []*schemas.Reward) []*schemas.Reward {
			for _, r := range rewards {
				r.Scores = []schemas.Score{
					{Name: "synthetic", Weight: 1, Status: schemas.StatusScored, Value: r.Reward},
				}
			}
			return rewards
		}
		rewards := score(treeOf("siblings", 2, change, 1, 3, 2, 6))
		tree := closeGroup(t, rewards)
		if tree.Status != schemas.StatusComplete || len(tree.Branches) != 3 ||
			tree.Branches[2].Children[1].Advantage == nil {
			t.Errorf("%s: %s %s, %+v", name, tree.Status, tree.Error, tree.Branches)
			continue
		}
		for _, r := range rewards {
			r.Group.Tree, r.Group.Advantage.BranchScope = nil, ""
		}
		flat := closeGroup(t, rewards)
		if flat.Branches != nil || flat.BranchScope != "" {
			t.Errorf("%s: %d branch points without a tree", name, len(flat.Branches))
		}
		for i := range flat.Members {
			if *flat.Members[i].Advantage != *tree.Members[i].Advantage {
				t.Errorf("%s: sample %d has advantage %v in a tree, %v without", name, i, *tree.Members[i].Advantage,
					*flat.Members[i].Advantage)
			}
		}
	}
}
