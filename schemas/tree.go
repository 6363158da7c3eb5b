package schemas

import (
	"fmt"
	"slices"
	"strconv"
)

// Tree makes the samples of a prompt the leaves of one tree: all share the steps before the first
// branch point, the children of that one share the steps before the second, and so on. Leaf i is
// sample i. Its index has one digit for each branch point, the first one's first: the number of
// the child on its path. The first child of a branch point, digit 0, is the sample that came
// there, the parent; each other one is a sample that begins there, with the state that the parent
// stored. So every step of the tree runs once, in the lowest leaf behind it, with its noise.
type Tree struct {
	// Branches are where the paths branch, in the order of their steps, which must be stochastic.
	Branches []BranchPoint `msgpack:"branches" size:"1..MaxBranches" flag:"tree"`
	// Leaf asks for one leaf alone: a group of one sample, which runs all steps of its path and gets
	// the bits that this leaf has in the whole tree.
	Leaf *int64 `msgpack:"leaf,omitempty" range:"0..MaxGroupSize-1" absent:"all leaves" flag:"leaf"`
}

// BranchPoint is a step before which each path of a tree branches.
type BranchPoint struct {
	// StepIndex is the first step that each child runs for itself.
	StepIndex int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
	// Width is the number of children.
	Width int64 `msgpack:"width" range:"2..MaxGroupSize"`
}

// StepSeed is what keys the noise of the steps from StepIndex on.
type StepSeed struct {
	StepIndex int64 `msgpack:"step_index" range:"0..MaxSteps-1"`
	// Seed is the sample_seed of the sample that takes these steps in the whole tree.
	Seed uint64 `msgpack:"seed"`
}

// TreeSegment is the steps from Begin on that a sample of a path takes.
type TreeSegment struct {
	SampleIndex, Begin int64
}

// Leaves returns the number of leaves; MaxGroupSize+1 if there are more than a group can have.
func (t *Tree) Leaves() int64 { return t.LeavesBelow(0) }

// LeavesBelow returns the number of leaves of each subtree that begins after the first depth branch points; see Leaves
// for the largest value.
func (t *Tree) LeavesBelow(depth int) int64 {
	n := int64(1)
	for _, b := range t.Branches[depth:] {
		if n *= max(b.Width, 1); n > MaxGroupSize {
			return MaxGroupSize + 1
		}
	}
	return n
}

// depthOf returns how many branch points are on the way to a step, with that before it.
func (t *Tree) depthOf(step int64) (depth int) {
	for depth < len(t.Branches) && t.Branches[depth].StepIndex <= step {
		depth++
	}
	return depth
}

// SampleOf returns the sample that runs the steps before branch point depth (and after the one before it) on the path
// to a leaf. Depth 0 is the root.
func (t *Tree) SampleOf(leaf int64, depth int) int64 { return leaf - leaf%t.LeavesBelow(depth) }

// Path returns the samples whose steps lead to a leaf, from the root, sample 0, to the leaf itself. Each runs the steps
// from its Begin to that of the next.
func (t *Tree) Path(leaf int64) []TreeSegment {
	path := []TreeSegment{{}}
	for i, b := range t.Branches {
		if owner := t.SampleOf(leaf, i+1); owner != path[len(path)-1].SampleIndex {
			path = append(path, TreeSegment{owner, b.StepIndex})
		}
	}
	return path
}

// Samples returns the number of samples that the prompt asks for.
func (p *Prompt) Samples() int64 {
	switch {
	case p.Tree != nil && p.Tree.Leaf != nil:
		return 1
	case p.Tree != nil:
		return p.Tree.Leaves()
	case p.GroupSize != nil:
		return *p.GroupSize
	}
	var q Prompt
	SetDefaults(&q)
	return *q.GroupSize
}

// checkTree checks Tree against the number of steps, the group size and the other settings.
func (p *Prompt) checkTree(f *faults) {
	t := p.Tree
	if t == nil {
		if p.Advantage.BranchScope != "" &&
			!slices.ContainsFunc(p.Stages, func(s StageSpec) bool { return s.Tree != nil }) {
			f.inStruct("advantage").add("branch_scope", quote(p.Advantage.BranchScope), "must be absent without a tree")
		}
		return
	}
	if p.Start != nil {
		f.add("start", "given", "must be absent beside tree, whose samples begin with one another's states")
	}
	if p.ScheduledSampling != nil {
		f.add("scheduled_sampling", "given", "must be absent beside tree")
	}
	g := f.inStruct("tree")
	leaves := t.checkBranches(g, maxSteps(p.steps()))
	if leaves == 0 {
		return
	}
	if p.Stop != nil && p.Stop.StepIndex != nil {
		if last := t.Branches[len(t.Branches)-1].StepIndex; *p.Stop.StepIndex <= last && *p.Stop.StepIndex > 0 {
			f.inStruct("stop").add("step_index", strconv.FormatInt(*p.Stop.StepIndex, 10),
				fmt.Sprintf("must be above %d, the last branch point", last))
		}
	}
	want, why := leaves, fmt.Sprintf("the leaves of the tree, or absent; it has %s", t.formatWidths())
	if t.Leaf != nil {
		if s := p.Advantage.BranchScope; s != "" {
			f.inStruct("advantage").add("branch_scope", quote(s),
				"must be absent beside tree.leaf: one leaf has no siblings")
		}
		if *t.Leaf < MaxGroupSize {
			g.checkWithin("leaf", *t.Leaf, 0, leaves-1)
		}
		want, why = 1, "one leaf alone, or absent"
	}
	if n := p.GroupSize; n != nil && *n != want && *n >= 1 && *n <= MaxGroupSize {
		f.add("group_size", strconv.FormatInt(*n, 10), fmt.Sprintf("must be %d, %s", want, why))
	}
}

// checkBranches checks the branch points for a schedule of that many steps, and returns the number of leaves, 0
// where there is a fault.
func (t *Tree) checkBranches(f *faults, steps int64) int64 {
	if n := len(t.Branches); n == 0 || n > MaxBranches {
		return 0
	}
	before := f.countFaults()
	for i, b := range t.Branches {
		g := f.inItem("branches", i)
		switch {
		case b.StepIndex >= 0 && b.StepIndex < MaxSteps && b.StepIndex >= steps:
			g.checkWithin("step_index", b.StepIndex, 0, steps-1)
		case i > 0 && b.StepIndex <= t.Branches[i-1].StepIndex:
			g.add("step_index", strconv.FormatInt(b.StepIndex, 10),
				fmt.Sprintf("must be above %d, that of the branch point before", t.Branches[i-1].StepIndex))
		case b.Width < 2 || b.Width > MaxGroupSize || b.StepIndex < 0 || b.StepIndex >= MaxSteps:
			return 0 // reported by the check of the tag
		}
	}
	n := t.Leaves()
	if n > MaxGroupSize {
		f.add("branches", t.formatWidths()+" leaves", fmt.Sprintf("must be at most %d in all, the samples of a group",
			MaxGroupSize))
	}
	if f.countFaults() > before {
		return 0
	}
	return n
}

// formatWidths returns the widths of the branch points, such as "2 x 2 x 2".
func (t *Tree) formatWidths() string {
	s := ""
	for i, b := range t.Branches {
		if i > 0 {
			s += " x "
		}
		s += strconv.FormatInt(b.Width, 10)
	}
	return s
}

// checkTree checks the tree that the samples of a resolved group are the leaves of.
func (g *Group) checkTree(f *faults, groupSize int64) {
	if g.Tree == nil {
		return
	}
	t := f.inStruct("tree")
	if g.Tree.Leaf != nil {
		t.add("leaf", strconv.FormatInt(*g.Tree.Leaf, 10), "must be absent of a group, which has all")
	}
	if n := g.Tree.checkBranches(t, MaxSteps); n > 0 && n != groupSize && groupSize > 0 {
		t.add("branches", g.Tree.formatWidths()+" leaves", fmt.Sprintf("must be %d, the group_size", groupSize))
	}
}

// checkSeeds checks that the seeds of steps are in the order of their steps and within the schedule.
func (f *faults) checkSeeds(list []StepSeed, steps int) {
	for i := range list {
		n := list[i].StepIndex
		if i > 0 && n <= list[i-1].StepIndex {
			f.inItem("step_seeds", i).add("step_index", strconv.FormatInt(n, 10),
				"must be above that of the one before")
		} else if all := maxSteps(int64(steps)); n >= all && n < MaxSteps {
			f.inItem("step_seeds", i).checkWithin("step_index", n, 0, all-1)
		}
	}
}
