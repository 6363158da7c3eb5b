package integration_test

import (
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// treeStage is a prompt whose thoughts are each the root of a tree of four signs, of three steps.
func treeStage(uid schemas.UID, size int64) *schemas.Prompt {
	p := thinkAndPaint(uid, size)
	paint := &p.Stages[1]
	paint.Children, paint.Rollout = nil, schemas.Rollout{}
	paint.Tree = &schemas.Tree{Branches: []schemas.BranchPoint{{StepIndex: 1, Width: 2}, {StepIndex: 2, Width: 2}}}
	return p
}

// Each thought has a tree of signs: its children begin with stored states of one another, each step is taken once, and
// the steps have the advantages of their segments.
func TestStages_Tree(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	receipt, err := c.client.Publish(limited(t), "r", treeStage("g", 8))
	if err != nil {
		t.Fatal(err)
	}
	if n := receipt.AllSteps(); n != 2*4+2*(3+1+2+1) {
		t.Errorf("%d steps, want 4 tokens of 2 thoughts and 7 steps of 2 trees", n)
	}
	a := c.advantages(t, "r", 1)["g"]
	if a.Status != schemas.StatusComplete || a.BranchScope != schemas.BranchSiblings || len(a.Credits) != 2 {
		t.Fatalf("group: %s, %s, %q, credits %+v", a.Status, a.Error, a.BranchScope, a.Credits)
	}
	credit := a.Credits[1]
	for i := range int64(8) {
		paint := c.stage(t, "r", "g", i, "paint")
		begin := []int64{0, 2, 1, 2}[i%4]
		if from, _ := paint.Segment(); from != begin || int64(len(credit.Steps[i].Advantages)) != 3-begin {
			t.Errorf("sample %d begins at step %d, its steps have %v; want %d", i, from, credit.Steps[i], begin)
		}
		path, err := c.client.Path(t.Context(), paint)
		if err != nil || len(path) != 3 || path[0].Trajectory.SampleIndex != i-i%4 {
			t.Errorf("path of sample %d: %v, %v", i, path, err)
		}
		if paint.Start != nil && (paint.Start.Branch.Stage != "paint" || paint.Start.Branch.SampleIndex/4 != i/4) {
			t.Errorf("sample %d begins with %+v", i, paint.Start.Branch)
		}
	}
	for k := range 2 { // children of a branch point are compared with each other: their advantages sum to 0
		for _, pair := range [][2]float64{
			{credit.Steps[4*k].Advantages[1], credit.Steps[4*k+2].Advantages[0]},
			{credit.Steps[4*k].Advantages[2], credit.Steps[4*k+1].Advantages[0]},
			{credit.Steps[4*k+2].Advantages[1], credit.Steps[4*k+3].Advantages[0]},
		} {
			if sum := pair[0] + pair[1]; sum > 1e-9 || sum < -1e-9 {
				t.Errorf("siblings of tree %d have %v", k, pair)
			}
		}
	}
	c.verified(t, "r", 2+8, 2*7)
	c.says(t, "show --run r g", "stage paint: image of lane synthetic")
	c.says(t, "show --run r g 3", "sample 2, at step 2")
	c.counted(t, "r", 8, 8, 0)
	harness.AwaitIdle(t, c.Bus)
}

// verified checks that all requests, tokens and trained steps of a run of two lanes follow from what is stored.
func (c *crew) verified(t *testing.T, run schemas.Run, requests, steps int) {
	t.Helper()
	r, err := verify.Run(t.Context(), c.Bus, run, verify.Options{Model: []string{"synthetic", sumsFolder(t)}})
	if err != nil || !r.OK(0) || r.Requests != requests || r.Steps != steps {
		t.Errorf("%d requests and %d steps verified, want %d and %d: %v, %v", r.Requests, r.Steps, requests, steps,
			r.Faults(0), err)
	}
}

// A stage begins with a state that a stage of another group stored, or with noise on an image, and stops early.
func TestStages_Segment(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	c.publish(t, "r", thinkAndPaint("g", 2))
	c.advantages(t, "r", 1)
	first, err := c.client.Medium(t.Context(), c.stage(t, "r", "g", 1, "paint"), schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	branch, image := thinkAndPaint("b", 2), thinkAndPaint("i", 2)
	branch.Stages[1].Start = &schemas.Start{Branch: &schemas.Branch{
		Run: "r", UID: "g", SampleIndex: 1, Stage: "paint", StepIndex: 1,
	}}
	image.Stages[1].Start = &schemas.Start{
		StepIndex: new(int64(1)), Data: &schemas.Data{Images: []schemas.DataImage{{Data: first}}},
	}
	image.Stages[1].Stop = &schemas.Stop{StepIndex: new(int64(2)), Decode: true}
	for _, p := range []*schemas.Prompt{branch, image} {
		p.Stages[1].Rollout = schemas.Rollout{}
		c.publish(t, "s", p)
	}
	c.advantages(t, "s", 2)
	for uid, end := range map[schemas.UID]int64{"b": 3, "i": 2} {
		paint := c.stage(t, "s", uid, 1, "paint")
		if from, to := paint.Segment(); from != 1 || to != end || len(paint.Media) == 0 {
			t.Errorf("group %s runs steps %d to %d, %d media", uid, from, to, len(paint.Media))
		}
	}
	c.verified(t, "s", 2*(1+2), 2*2+2)
}

// A sampler that is killed at every trajectory of a tree makes the same bits.
func TestStages_TreeKilled(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.config.sampler.AckWait = time.Second
	c.twoLanes(t)
	c.killedAlike(t, []string{"sampler"}, func() []*schemas.Prompt { return []*schemas.Prompt{treeStage("g", 8)} })
}
