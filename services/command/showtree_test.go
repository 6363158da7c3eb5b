package command

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func TestDrawTree(t *testing.T) {
	tree := &schemas.Tree{Branches: []schemas.BranchPoint{{StepIndex: 2, Width: 2}, {StepIndex: 11, Width: 3}}}
	child := func(sample, leaves int64, a *float64) schemas.BranchChild {
		return schemas.BranchChild{SampleIndex: sample, Leaves: leaves, Reward: a, Advantage: a}
	}
	adv := &schemas.Advantage{
		BranchScope: "siblings",
		Branches: []schemas.BranchGroup{
			{StepIndex: 2, Children: []schemas.BranchChild{child(0, 3, new(-0.5)), child(3, 2, new(0.5))}},
			{StepIndex: 11, Children: []schemas.BranchChild{child(0, 1, new(1.0)), child(1, 1, new(0.0)), child(2, 1, new(-1.0))}},
			{StepIndex: 11, Children: []schemas.BranchChild{child(3, 1, new(0.25)), child(4, 0, nil), child(5, 1, new(-0.25))}},
		},
	}
	for i, reward := range []float64{3, 2, 1, 5, 0, 4} {
		m := schemas.Member{SampleIndex: int64(i), Status: schemas.StatusScored, Reward: new(reward), Advantage: new(reward - 3)}
		if i == 4 {
			m = schemas.Member{SampleIndex: 4, Status: schemas.StatusFailed}
		}
		adv.Members = append(adv.Members, m)
	}
	for name, c := range map[string]struct {
		adv     *schemas.Advantage
		columns int
		want    string
	}{
		"closed": {adv, 80, `
   2 step    11
───┬ -0.50 ──┬ +1.00 ── #0  3.000  +0.000
   │         ├ +0.00 ── #1  2.000  -1.000
   │         └ -1.00 ── #2  1.000  -2.000
   └ +0.50 ──┬ +0.25 ── #3  5.000  +2.000
             ├───────── #4  failed
             └ -0.25 ── #5  4.000  +1.000`},
		"narrow": {adv, 50, `
   2  11
───┬──┬── #0  3.000  +0.000
   │  ├── #1  2.000  -1.000
   │  └── #2  1.000  -2.000
   └──┬── #3  5.000  +2.000
      ├── #4  failed
      └── #5  4.000  +1.000`},
		"open": {nil, 50, `
   2  11
───┬──┬── #0
   │  ├── #1
   │  └── #2
   └──┬── #3
      ├── #4
      └── #5`},
	} {
		if got := "\n" + strings.Join(drawTree(tree, c.adv, c.columns), "\n"); got != c.want {
			t.Errorf("%s:%s\nwant%s", name, got, c.want)
		}
	}
}
