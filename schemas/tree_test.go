package schemas_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// twos is a tree that parts in two before each of the steps.
func twos(steps ...int64) *schemas.Tree {
	t := &schemas.Tree{}
	for _, s := range steps {
		t.Branches = append(t.Branches, schemas.BranchPoint{StepIndex: s, Width: 2})
	}
	return t
}

// treeGroup is that of a tree of eight leaves.
func treeGroup(t testing.TB) schemas.Group {
	g := fullGroup(t)
	g.Tree, g.Advantage.BranchScope = twos(1, 2, 3), "depth"
	return g
}

func treeSamples(t testing.TB) []sample {
	t.Helper()
	alone := twos(1, 3)
	alone.Leaf = new(int64(3))
	start := &schemas.SegmentStart{StepIndex: 2, Branch: &schemas.Branch{
		Run: "run-1", UID: "p17", SampleIndex: 4, StepIndex: 2,
	}}
	request, leaf, trajectory := fullRequest(t), fullRequest(t), segmentTrajectory(t)
	request.SampleIndex, request.Start, request.Group, request.ReturnStepIndices = 6, start, treeGroup(t), []int64{2, 3}
	leaf.SampleIndex, leaf.GroupSize, leaf.StepSeeds = 0, 1,
		[]schemas.StepSeed{{StepIndex: 1, Seed: 7}, {StepIndex: 3, Seed: 1 << 63}}
	trajectory.SampleIndex, trajectory.GroupSize, trajectory.Group, trajectory.Stop = 6, 8, treeGroup(t), nil
	trajectory.Start, trajectory.Media, trajectory.LatentStepIndices = start, completedTrajectory(t).Media,
		[]int64{2, 3}
	trajectory.LogProbs = []*float64{nil, nil, new(0.5), new(1.5)}
	return []sample{
		{"prompt-tree", &schemas.Prompt{
			Prompt:        "x",
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4)), Tree: twos(1, 3)},
			Advantage:     schemas.AdvantageSpec{BranchScope: "leaves"},
		}},
		{"prompt-leaf", &schemas.Prompt{Prompt: "x", GroupSize: new(int64(1)), ImageSettings: schemas.ImageSettings{Tree: alone}}},
		{"request-tree", request},
		{"request-leaf", leaf},
		{"trajectory-tree", trajectory},
		{"advantage-tree", &schemas.Advantage{
			Run: "run-1", UID: "p17", Batch: "p17", Status: "partial", GroupSize: 4, Mean: new(1.5), Std: new(0.5), Scale: "group", StdBasis: "sample",
			Estimator: "flow_grpo", Epsilon: 1e-4, TrainedSteps: 4, ScheduleDigest: digestOf("schedule"), Opened: 1, Closed: 2, BranchScope: "siblings",
			Members: []schemas.Member{
				{SampleIndex: 0, Reward: new(1.0), Advantage: new(-0.5), Status: "scored", TrajectorySeq: 1},
				{SampleIndex: 1, Reward: new(2.0), Advantage: new(0.5), Status: "scored", TrajectorySeq: 2},
				{SampleIndex: 2, Status: "failed", TrajectorySeq: 3},
				{SampleIndex: 3, Status: "missing"},
			},
			Branches: []schemas.BranchGroup{
				{StepIndex: 1, Mean: new(1.5), Std: new(0.0), Children: []schemas.BranchChild{{SampleIndex: 0, Leaves: 2, Reward: new(1.5), Advantage: new(0.0)}, {SampleIndex: 2}}},
				{StepIndex: 3, Mean: new(1.5), Std: new(0.5), Children: []schemas.BranchChild{
					{SampleIndex: 0, Leaves: 1, Reward: new(1.0), Advantage: new(-0.5)}, {SampleIndex: 1, Leaves: 1, Reward: new(2.0), Advantage: new(0.5)},
				}},
				{StepIndex: 3, Children: []schemas.BranchChild{{SampleIndex: 2}, {SampleIndex: 3}}},
			},
		}},
	}
}

func TestAdvantage_Validate_tree(t *testing.T) {
	type A = schemas.Advantage
	faults(t, func() *A { return find[A](t, "advantage-tree") }, []fault[A]{
		{"no such sample", func(e *A) { e.Branches[2].Children[1].SampleIndex = 4 }, "branches[2].children[1].sample_index: 4; must be between 0 and 3"},
		{"a reward of nothing", func(e *A) { e.Branches[2].Children[1].Reward = new(1.0) }, "branches[2].children[1].reward: 1; must be a number exactly where there are scored leaves"},
		{"an advantage of nothing", func(e *A) { e.Branches[2].Children[1].Advantage = new(1.0) }, "branches[2].children[1].advantage: 1; must be null without a reward"},
		{"an only child", func(e *A) { e.Branches[2].Children = e.Branches[2].Children[:1] }, "branches[2].children: 1 items; must be at least 2"},
	})
}

// Every leaf of a tree has the path that its digits say, and each step of the tree belongs to one sample.
func TestTree_Path(t *testing.T) {
	tree := &schemas.Tree{Branches: []schemas.BranchPoint{
		{StepIndex: 1, Width: 2},
		{StepIndex: 4, Width: 3},
		{StepIndex: 5, Width: 2},
	}}
	const steps = 8
	if n := tree.Leaves(); n != 12 {
		t.Fatalf("%d leaves, want 12", n)
	}
	owners := map[string]int64{} // of a step and the choices before it
	taken := map[string]bool{}
	for leaf := range int64(12) {
		digits := []int64{leaf / 6, leaf / 2 % 3, leaf % 2}
		path := tree.Path(leaf)
		if path[0] != (schemas.TreeSegment{}) || path[len(path)-1].SampleIndex != leaf {
			t.Errorf("path %v of leaf %d", path, leaf)
		}
		for k := range int64(steps) {
			var choices []int64
			for j, b := range tree.Branches {
				if b.StepIndex <= k {
					choices = append(choices, digits[j])
				}
			}
			at := slices.IndexFunc(path, func(s schemas.TreeSegment) bool { return s.Begin > k })
			if at < 0 {
				at = len(path)
			}
			owner, node := path[at-1].SampleIndex, fmt.Sprint(k, choices)
			if first, ok := owners[node]; ok && first != owner {
				t.Errorf("step %d of leaf %d is taken by %d and %d", k, leaf, first, owner)
			}
			owners[node] = owner
			taken[fmt.Sprint(k, owner)] = true
		}
	}
	if want := 1 + 3*2 + 6 + 3*12; len(owners) != want || len(taken) != want {
		t.Errorf("%d steps in the tree, %d taken; want %d", len(owners), len(taken), want)
	}
}

func TestPrompt_Validate_tree(t *testing.T) {
	type P = schemas.Prompt
	points := func(list ...int64) (points []schemas.BranchPoint) {
		for i := 0; i < len(list); i += 2 {
			points = append(points, schemas.BranchPoint{Width: list[i], StepIndex: list[i+1]})
		}
		return points
	}
	faults(t, func() *P {
		return &P{Prompt: "x", ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(10)), Tree: twos(2, 5),
		}}
	}, []fault[P]{
		{"at the first step", func(p *P) { p.Tree = twos(0) }, ""},
		{"at the last step", func(p *P) { p.Tree = twos(9) }, ""},
		{"with its size", func(p *P) { p.GroupSize = new(int64(4)) }, ""},
		{"as many as a group has", func(p *P) { p.Tree.Branches = points(1024, 0) }, ""},
		{"a leaf", func(p *P) { p.Tree.Leaf = new(int64(3)) }, ""},
		{"stopped", func(p *P) { p.Stop = &schemas.Stop{StepIndex: new(int64(6))} }, ""},
		{"compared", func(p *P) { p.Advantage.BranchScope = "depth" }, ""},

		{"no branches", func(p *P) { p.Tree.Branches = nil }, "tree.branches: 0 items; must be at least 1"},
		{"too many", func(p *P) { p.Tree = twos(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10) }, "tree.branches: 11 items; must be at most 10"},
		{"one child", func(p *P) { p.Tree.Branches = points(1, 2) }, "tree.branches[0].width: 1; must be between 2 and 1024"},
		{"more than a group", func(p *P) { p.Tree.Branches = points(32, 1, 33, 2) }, "tree.branches: 32 x 33 leaves; must be at most 1024 in all, the samples of a group"},
		{"more than a number", func(p *P) { p.Tree.Branches = points(1024, 1, 1024, 2, 1024, 3, 1024, 4, 1024, 5, 1024, 6, 1024, 7) }, "tree.branches: 1024 x 1024 x 1024 x 1024 x 1024 x 1024 x 1024 leaves; must be at most 1024 in all, the samples of a group"},
		{"twice at a step", func(p *P) { p.Tree = twos(2, 2) }, "tree.branches[1].step_index: 2; must be above 2, that of the branch point before"},
		{"backwards", func(p *P) { p.Tree = twos(5, 2) }, "tree.branches[1].step_index: 2; must be above 5, that of the branch point before"},
		{"after the end", func(p *P) { p.Tree = twos(2, 10) }, "tree.branches[1].step_index: 10; must be between 0 and 9"},
		{"negative", func(p *P) { p.Tree = twos(-1) }, "tree.branches[0].step_index: -1; must be between 0 and 999"},
		{"another size", func(p *P) { p.GroupSize = new(int64(8)) }, "group_size: 8; must be 4, the leaves of the tree, or absent; it has 2 x 2"},
		{"no such leaf", func(p *P) { p.Tree.Leaf = new(int64(4)) }, "tree.leaf: 4; must be between 0 and 3"},
		{"several of a leaf", func(p *P) { p.Tree.Leaf, p.GroupSize = new(int64(3)), new(int64(4)) }, "group_size: 4; must be 1, one leaf alone, or absent"},
		{"a leaf compared", func(p *P) { p.Tree.Leaf, p.Advantage.BranchScope = new(int64(3)), "depth" }, `advantage.branch_scope: "depth"; must be absent beside tree.leaf: one leaf has no siblings`},
		{"started", func(p *P) { p.Start = &schemas.Start{Branch: &schemas.Branch{UID: "u"}} }, "start: given; must be absent beside tree, whose samples begin with one another's states"},
		{"stopped before", func(p *P) { p.Stop = &schemas.Stop{StepIndex: new(int64(5))} }, "stop.step_index: 5; must be above 5, the last branch point"},
		{"compared otherwise", func(p *P) { p.Advantage.BranchScope = "width" }, `advantage.branch_scope: "width"; must be one of siblings, depth, leaves`},
		{"compared without", func(p *P) { p.Tree, p.Advantage.BranchScope = nil, "depth" }, `advantage.branch_scope: "depth"; must be absent without a tree`},
	})
}

func TestRequest_Validate_tree(t *testing.T) {
	type R = schemas.Request
	faults(t, func() *R { return find[R](t, "request-tree") }, []fault[R]{
		{"of another size", func(r *R) { r.GroupSize = 9 }, "group.tree.branches: 2 x 2 x 2 leaves; must be 9, the group_size"},
		{"of a leaf", func(r *R) { r.Group.Tree.Leaf = new(int64(1)) }, "group.tree.leaf: 1; must be absent of a group, which has all"},
		{"from elsewhere", func(r *R) { b := *r.Start.Branch; b.StepIndex = 1; r.Start.Branch = &b }, "start.branch.step_index: 1; must be 2, where the sample begins"},
		{"from no run", func(r *R) { b := *r.Start.Branch; b.Run = ""; r.Start.Branch = &b }, "start.branch.run: \"\"; must be 1 to 64 characters of A-Z a-z 0-9 _ -"},
	})
	faults(t, func() *R { return find[R](t, "request-leaf") }, []fault[R]{
		{"seeds backwards", func(r *R) { r.StepSeeds[1].StepIndex = 1 }, "step_seeds[1].step_index: 1; must be above that of the one before"},
		{"seeds after the end", func(r *R) { r.StepSeeds[1].StepIndex = 4 }, "step_seeds[1].step_index: 4; must be between 0 and 3"},
	})
}
