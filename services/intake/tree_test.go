package intake

import (
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// twos parts in two before each of the steps.
func twos(steps ...int64) *schemas.Tree {
	t := &schemas.Tree{}
	for _, s := range steps {
		t.Branches = append(t.Branches, schemas.BranchPoint{StepIndex: s, Width: 2})
	}
	return t
}

// The samples of a tree begin where they part from their parents, and keep what their children
// begin with; all else of the group is as without a tree.
func TestResolve_Tree(t *testing.T) {
	rs := resolved(t, &schemas.Prompt{
		UID: "u", Prompt: "a",
		ImageSettings: schemas.ImageSettings{Tree: twos(2, 5, 7), Rollout: schemas.Rollout{ReturnStepIndices: []int64{6}}},
	})
	flat := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"})
	if len(rs) != 8 {
		t.Fatalf("%d requests, want 8", len(rs))
	}
	steps := int64(0)
	for i, want := range []struct {
		begin, parent int64
		kept          []int64
	}{
		{0, -1, []int64{2, 5, 6, 7}},
		{7, 0, nil},
		{5, 0, []int64{6, 7}},
		{7, 2, nil},
		{2, 0, []int64{5, 6, 7}},
		{7, 4, nil},
		{5, 4, []int64{6, 7}},
		{7, 6, nil},
	} {
		r := rs[i]
		begin, end := r.Segment()
		steps += end - begin
		var start *schemas.SegmentStart
		if want.parent >= 0 {
			start = &schemas.SegmentStart{
				StepIndex: want.begin, Branch: &schemas.Branch{
					Run: "run", UID: "u", SampleIndex: want.parent, StepIndex: want.begin,
				},
			}
		}
		if (start == nil) != (r.Start == nil) || start != nil &&
			(*start.Branch != *r.Start.Branch || start.StepIndex != r.Start.StepIndex) {
			t.Errorf("sample %d starts %+v, want %+v", i, r.Start, start)
		}
		if !slices.Equal(r.ReturnStepIndices, want.kept) {
			t.Errorf("sample %d keeps %v, want %v", i, r.ReturnStepIndices, want.kept)
		}
		if r.SampleSeed != flat[i].SampleSeed || r.ScheduleDigest != flat[i].ScheduleDigest || r.GroupSize != 8 ||
			r.Group.Advantage.BranchScope != "siblings" {
			t.Errorf("sample %d: %+v", i, r)
		}
		if err := r.Validate(); err != nil {
			t.Errorf("sample %d: %v", i, err)
		}
	}
	if receipt := receiptOf(rs, nil); steps != 10+8+2*5+4*3 || receipt.AllSteps() != steps {
		t.Errorf("%d steps, the receipt says %d", steps, receipt.AllSteps())
	}
}

func TestResolve_TreeRefused(t *testing.T) {
	whole := resolved(t, &schemas.Prompt{UID: "u", Prompt: "a"})[0]
	for _, c := range []struct {
		name    string
		rollout schemas.Rollout
		change  func(p *schemas.Prompt)
		want    string
	}{
		{
			"ode",
			schemas.Rollout{SDEStepIndices: []int64{2}},
			nil,
			"tree.branches[1].step_index: 5; must be a stochastic step, and this one is ode: its children would be " +
				"equal",
		},
		{
			"validation",
			schemas.Rollout{},
			func(p *schemas.Prompt) { p.Validation = true },
			"tree.branches[0].step_index: 2; must be a stochastic step",
		},
		{
			"no noise",
			schemas.Rollout{SDEType: "cps", LogProbKind: "squared"},
			func(p *schemas.Prompt) { p.Tree = twos(9) },
			"tree.branches[0].step_index: 9; must be a step with noise, and cps has none there: its children would " +
				"be equal",
		},
		{
			"after the model's steps",
			schemas.Rollout{},
			func(p *schemas.Prompt) { p.Tree = twos(10) },
			"tree.branches[0].step_index: 10; must be below 10, the steps that run",
		},
		{
			"after the stop",
			schemas.Rollout{},
			func(p *schemas.Prompt) { p.Stop = &schemas.Stop{Sigma: new(float64(whole.Sigmas[4]))} },
			"tree.branches[1].step_index: 5; must be below 4, the steps that run",
		},
	} {
		p := &schemas.Prompt{UID: "u", Prompt: "a", ImageSettings: schemas.ImageSettings{
			Tree: twos(2, 5), Rollout: c.rollout,
		}}
		if c.change != nil {
			c.change(p)
		}
		if _, err := Resolve("run", p, qwen(),
			Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}}); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
}

// The noise of every step on the path to a leaf is that of noise.md, whether the leaf is made
// with the tree or alone.
func TestTree_Noise(t *testing.T) {
	data, err := os.ReadFile("../../schemas/testdata/noise.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct {
		Tree []struct {
			Base, UID string
			Branches  []struct {
				StepIndex int64 `json:"step_index"`
				Width     int64
			}
			Leaf  int64
			Seeds []string
		}
	}
	if err := json.Unmarshal(data, &vectors); err != nil || len(vectors.Tree) == 0 {
		t.Fatalf("%d vectors, %v", len(vectors.Tree), err)
	}
	for _, v := range vectors.Tree {
		tree := &schemas.Tree{}
		for _, b := range v.Branches {
			tree.Branches = append(tree.Branches, schemas.BranchPoint{StepIndex: b.StepIndex, Width: b.Width})
		}
		p := &schemas.Prompt{
			UID: schemas.UID(v.UID), Prompt: "a",
			ImageSettings: schemas.ImageSettings{Tree: tree, NumInferenceSteps: new(int64(len(v.Seeds)))},
		}
		run, named := strings.CutPrefix(v.Base, "run:")
		if !named {
			n, err := strconv.ParseInt(strings.TrimPrefix(v.Base, "seed:"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			run, p.Seed = "run", &n
		}
		resolve := func() []*schemas.Request {
			rs, err := Resolve(schemas.Run(run), p, qwen(),
				Origin{Created: time.Unix(1, 0), Reward: []string{"synthetic"}})
			if err != nil {
				t.Fatal(err)
			}
			return rs
		}
		whole := resolve()
		alone := *tree
		alone.Leaf, p.Tree = &v.Leaf, &alone
		leaf := resolve()
		if len(leaf) != 1 || leaf[0].NoiseSeed != whole[0].NoiseSeed || leaf[0].Group.Tree != nil {
			t.Errorf("leaf %d alone: %d samples, %+v", v.Leaf, len(leaf), leaf[0])
		}
		path := tree.Path(v.Leaf)
		for k, seed := range v.Seeds {
			at, byItself := int64(0), leaf[0].SampleSeed
			for _, s := range path {
				if s.Begin <= int64(k) {
					at = s.SampleIndex
				}
			}
			for _, s := range leaf[0].StepSeeds {
				if s.StepIndex <= int64(k) {
					byItself = s.Seed
				}
			}
			if got := strconv.FormatUint(whole[at].SampleSeed, 10); got != seed ||
				strconv.FormatUint(byItself, 10) != seed {
				t.Errorf("step %d of leaf %d: seed %s in the tree, %d alone, want %s", k, v.Leaf, got, byItself, seed)
			}
		}
	}
}
