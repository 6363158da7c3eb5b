package schemas_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// TestPrune_Select checks which samples of a group end at a step, by the rewards of its samples: "-" is none.
func TestPrune_Select(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		rule    schemas.Prune
		rewards []float64
		none    int    // the sample without a reward; -1: all have one
		ends    string // x: it ends; a digit: it goes on from that one
	}{
		{"below", schemas.Prune{RewardBelow: new(0.5)}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "x.x."},
		{"highest", schemas.Prune{Keep: new(int64(2))}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "x.x."},
		{"equal ones: the first", schemas.Prune{Keep: new(int64(2))}, []float64{0.5, 0.5, 0.5, 0.5}, -1, "..xx"},
		{"spread", schemas.Prune{Keep: new(int64(2)), KeepBy: "spread"}, []float64{0.1, 0.5, 0.4, 0.9}, -1, ".xx."},
		{"spread, more high", schemas.Prune{Keep: new(int64(3)), KeepBy: "spread"}, []float64{0, 1, 1, 0.5}, -1, "...x"},
		{"spread, more low", schemas.Prune{Keep: new(int64(3)), KeepBy: "spread"}, []float64{0, 1, 0, 0.5}, -1, "...x"},
		{"as many", schemas.Prune{Keep: new(int64(4))}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "...."},
		{"without a reward", schemas.Prune{Keep: new(int64(1))}, []float64{0.1, 0, 0.4, 0.9}, 1, "x.x."},
		{"both", schemas.Prune{Keep: new(int64(1)), RewardBelow: new(0.2)}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "xxx."},
		{"unless std", schemas.Prune{Keep: new(int64(1)), UnlessStdAbove: new(0.28)}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "...."},
		{"branch", schemas.Prune{Keep: new(int64(2)), Then: "branch"}, []float64{0.1, 0.5, 0.4, 0.9, 0.2, 0.3}, -1, "3.1.31"},
		{"branch, without a reward", schemas.Prune{Keep: new(int64(1)), Then: "branch"}, []float64{0.1, 0, 0.4, 0.9}, 1, "3.3."},
		{"branch, none is chosen", schemas.Prune{RewardBelow: new(1.0), Then: "branch"}, []float64{0.1, 0.5}, -1, ".."},
		{"std below", schemas.Prune{Keep: new(int64(1)), UnlessStdAbove: new(0.29)}, []float64{0.1, 0.5, 0.4, 0.9}, -1, "xxx."},
	} {
		var members []schemas.SelectedMember
		for i, r := range c.rewards {
			m := schemas.SelectedMember{SampleIndex: int64(i), Reward: &r}
			if i == c.none {
				m.Reward = nil
			}
			members = append(members, m)
		}
		c.rule.StepIndex = 2
		c.rule.Select(members)
		ends := ""
		for _, m := range members {
			switch {
			case m.Parent != nil:
				ends += fmt.Sprint(*m.Parent)
			case m.Stopped == "":
				ends += "."
			default:
				ends += "x"
			}
		}
		if ends != c.ends {
			t.Errorf("%s: %s; must be %s", c.name, ends, c.ends)
		}
	}
}

// TestPrompt_JudgedSteps checks what a prompt is told that asks for rewards at steps where there are none.
func TestPrompt_JudgedSteps(t *testing.T) {
	t.Parallel()
	at := func(name string) []schemas.RewardSpec { return []schemas.RewardSpec{{Name: name, AtSteps: []int64{2}}} }
	keep := &schemas.Prune{StepIndex: 2, Keep: new(int64(2))}
	for want, p := range map[string]schemas.Prompt{
		"": {Reward: at("glyph"), ImageSettings: schemas.ImageSettings{Prune: keep}},
		"reward[0].at_steps: [2]; must be absent: verdicts": {Reward: at("external:human")},
		"must be absent beside stages":                      {Reward: at("glyph"), Stages: []schemas.StageSpec{{Name: "a"}}},
		"must be absent beside tree":                        {Reward: at("glyph"), ImageSettings: schemas.ImageSettings{Tree: &schemas.Tree{}}},
		"must be absent beside text":                        {Reward: at("glyph"), Text: &schemas.Text{}},
		"must be absent beside scheduled":                   {Reward: at("glyph"), ImageSettings: schemas.ImageSettings{ScheduledSampling: &schemas.ScheduledSampling{}}},
		"at_steps[0]: 0; must be":                           {Reward: []schemas.RewardSpec{{Name: "glyph", AtSteps: []int64{0}}}},
		"must come at most once":                            {Reward: []schemas.RewardSpec{{Name: "glyph", AtSteps: []int64{2, 2}}}},
		"must be absent without at_steps":                   {Reward: []schemas.RewardSpec{{Name: "nats:a", Latent: true}}},
		"workers of nats:NAME alone":                        {Reward: []schemas.RewardSpec{{Name: "glyph", AtSteps: []int64{2}, Latent: true}}},
		"keep_by: \"spread\"; must be absent":               {ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 1, RewardBelow: new(0.1), KeepBy: "spread"}}},
		"then: \"branch\"; must be end beside evaluations":  {ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 1, Evaluations: new(int64(9)), Then: "branch"}}},
		"then: \"branch\"; must be end unless rewards":      {ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 1, Keep: new(int64(1)), LogProbBelow: new(0.0), Then: "branch"}}},
		"then: \"branch\"; must be end beside start":        {ImageSettings: schemas.ImageSettings{Start: &schemas.Start{}, Prune: &schemas.Prune{StepIndex: 1, Keep: new(int64(1)), Then: "branch"}}},
		"no sample would be pruned":                         {ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 1}}},
		"unless_std_above: 0.1; must be":                    {ImageSettings: schemas.ImageSettings{Prune: &schemas.Prune{StepIndex: 1, RewardBelow: new(0.1), UnlessStdAbove: new(0.1)}}},
	} {
		p.V, p.Prompt = schemas.Version, "a"
		err := p.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q; must have %q", err, want)
		}
	}
	g := &schemas.Group{Reward: at("glyph")}
	for _, c := range []struct {
		begin, end int64
		fits       bool
	}{{0, 3, true}, {0, 2, false}, {2, 4, false}, {1, 4, true}} {
		if err := g.CheckJudgedSteps(c.begin, c.end); (err == nil) != c.fits {
			t.Errorf("steps [%d, %d): %v", c.begin, c.end, err)
		}
	}
}
