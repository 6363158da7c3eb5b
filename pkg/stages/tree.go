package stages

import (
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// StartAtParent sets a request's start at its branch point of a tree: its leaf is every-th sample of the group. It adds
// the states that the sample's own children start with to those that are stored, and removes those before the start.
func StartAtParent(r *schemas.Request, tree *schemas.Tree, every int64) {
	leaf := r.SampleIndex / every % tree.Leaves()
	path := tree.Path(leaf)
	begin := path[len(path)-1].Begin
	r.ReturnStepIndices = slices.DeleteFunc(slices.Clone(r.ReturnStepIndices), func(k int64) bool { return k < begin })
	for depth, b := range tree.Branches {
		if tree.SampleOf(leaf, depth) == leaf && !slices.Contains(r.ReturnStepIndices, b.StepIndex) {
			r.ReturnStepIndices = append(r.ReturnStepIndices, b.StepIndex)
		}
	}
	slices.Sort(r.ReturnStepIndices)
	r.CheckpointStepIndices = slices.DeleteFunc(slices.Clone(r.CheckpointStepIndices), func(k int64) bool {
		return k <= begin || slices.Contains(r.ReturnStepIndices, k)
	})
	if len(path) == 1 {
		return
	}
	at := &schemas.Branch{
		Run: r.Run, UID: r.UID, StepIndex: begin,
		SampleIndex: r.SampleIndex - (leaf-path[len(path)-2].SampleIndex)*every,
	}
	if r.Stage != schemas.StageMain {
		at.Stage = r.Stage
	}
	r.Start = &schemas.SegmentStart{StepIndex: begin, Branch: at}
}
