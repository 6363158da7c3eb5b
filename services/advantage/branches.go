package advantage

import (
	"fmt"
	"math"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

// In a tree samples branch off from one another at branch points. Only leaves have rewards, and leaves share steps. A
// segment is the steps of one sample from a branch point to the next. Its reward is the mean of the rewards of the
// leaves behind it, as BranchGRPO averages them with equal weights (arXiv 2509.06040). The group's estimator, with all
// its options, computes its advantage among
//
//	siblings  the children of its branch point: A = (r - mean_siblings) / (std_siblings + eps) for
//	          flow_grpo
//	depth     all segments of its depth in the tree, BranchGRPO's depth-wise normalisation:
//	          A = (r - mean_depth) / (std_depth + eps)
//
// or, with leaves, the mean of the advantages of the leaves behind it, as TreeGRPO passes them up
// the tree (arXiv 2512.08153), again with equal weights. A scale over the batch is one over all
// segments of that depth in its trees.

// estimateBranches returns, for each of the groups at the given indices, its branch points with the advantages of
// their children; nil for a group that is no tree. estimateAlike calls it for groups of the same scale. results are
// what the estimator returned for their samples. The error is the estimator's: the groups fail.
func estimateBranches(
	cfg estimator.Config, groups []*group, at []int, results []estimator.Group,
) ([][]schemas.BranchGroup, error) {
	out := make([][]schemas.BranchGroup, len(at))
	for depth := range schemas.MaxBranches {
		c := compared{config: cfg}
		points := make([][]schemas.BranchGroup, len(at))
		for k, i := range at {
			g := groups[i]
			if g.spec.Tree == nil || depth >= len(g.spec.Tree.Branches) {
				continue
			}
			segments := g.segments(depth, results[k])
			points[k] = g.branchPoints(depth, segments)
			c.addBranchPoints(g.spec.Advantage.BranchScope, points[k], segments)
		}
		if len(c.sets) > 0 {
			if err := c.estimate(); err != nil {
				return nil, fmt.Errorf("branch points of depth %d: %w", depth+1, err)
			}
		}
		for k := range out {
			out[k] = append(out[k], points[k]...)
		}
	}
	return out, nil
}

// segment holds the means over the scored leaves behind a child of a branch point, or behind a sample of a stage, and
// how many there are. Until divide they are sums.
type segment struct {
	leaves            int64
	reward, advantage float64
	scores            []float64
}

// add adds the reward and the scores of a leaf.
func (x *segment) add(reward float64, scores []float64) {
	x.leaves++
	x.reward += reward
	x.scores = append(x.scores, make([]float64, len(scores)-len(x.scores))...)
	for i, score := range scores {
		x.scores[i] += score
	}
}

// divide makes means of the sums.
func (x *segment) divide() {
	n := float64(max(x.leaves, 1))
	x.reward, x.advantage = x.reward/n, x.advantage/n
	for k := range x.scores {
		x.scores[k] /= n
	}
}

// segments returns the segments of the children of all branch points of one depth, in order of their samples: each
// with the means over the leaves below it. result is what the estimator returned for the group.
func (g *group) segments(depth int, result estimator.Group) []segment {
	behind := g.spec.Tree.LeavesBelow(depth + 1)
	segments := make([]segment, g.size/behind)
	next := 0
	for _, s := range g.members() {
		if s.scored {
			x := &segments[s.index/behind]
			x.add(s.reward, s.scores)
			x.advantage += result.Advantages[next]
			next++
		}
	}
	for i := range segments {
		segments[i].divide()
	}
	return segments
}

// branchPoints returns the branch points of one depth of a tree, with the rewards of their children; segments are those
// of the children.
func (g *group) branchPoints(depth int, segments []segment) []schemas.BranchGroup {
	behind, b := g.spec.Tree.LeavesBelow(depth+1), g.spec.Tree.Branches[depth]
	points := make([]schemas.BranchGroup, int64(len(segments))/b.Width)
	for i, x := range segments {
		p := &points[int64(i)/b.Width]
		p.StepIndex = b.StepIndex
		child := schemas.BranchChild{SampleIndex: int64(i) * behind, Leaves: x.leaves}
		if x.leaves > 0 {
			child.Reward = new(x.reward)
			if g.spec.Advantage.BranchScope == schemas.BranchLeaves {
				child.Advantage = new(x.advantage)
			}
		}
		p.Children = append(p.Children, child)
	}
	for i := range points {
		rewards := make([]*float64, b.Width)
		for k, c := range points[i].Children {
			rewards[k] = c.Reward
		}
		if mean := meanOf(rewards); !math.IsNaN(mean) {
			points[i].Mean = &mean
		}
	}
	return points
}

// meanOf returns the mean of those values that are there; NaN: none is.
func meanOf(values []*float64) float64 {
	sum, n := 0.0, 0.0
	for _, v := range values {
		if v != nil {
			sum, n = sum+*v, n+1
		}
	}
	return sum / n
}

// addBranchPoints adds the segments of a tree's branch points to the sets: one set for each branch point, or one for
// all if scope is depth. With the scope leaves segments have their advantages already, and it adds nothing.
func (c *compared) addBranchPoints(scope string, points []schemas.BranchGroup, segments []segment) {
	if scope == schemas.BranchLeaves {
		return
	}
	var x comparedSet
	next := 0
	for i := range points {
		p := &points[i]
		for k := range p.Children {
			if s := &segments[next]; s.leaves > 0 {
				x.Values, x.Scores = append(x.Values, s.reward), append(x.Scores, s.scores)
				x.slots = append(x.slots, &p.Children[k].Advantage)
			}
			next++
		}
		if p.Mean != nil {
			x.points = append(x.points, p)
		}
		if len(x.slots) > 0 && (scope == schemas.BranchSiblings || i == len(points)-1) {
			c.sets, x = append(c.sets, x), comparedSet{}
		}
	}
}
