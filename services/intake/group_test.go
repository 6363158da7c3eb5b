package intake

import (
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

const says = `a blue sign that says "4071"`

func groupOf(p *schemas.Prompt) (*schemas.Group, error) {
	policy := qwen()
	policy.Reward = []string{"glyph"}
	rs, err := Resolve("run", p, policy,
		Origin{Seq: 7, Created: time.Unix(100, 0), Reward: []string{"synthetic"}, ExternalWait: time.Hour})
	if err != nil {
		return nil, err
	}
	return &rs[0].Group, nil
}

// Every estimator can be had from a prompt.
func TestResolveGroup_Estimators(t *testing.T) {
	for _, name := range estimator.Names() {
		g, err := groupOf(&schemas.Prompt{
			UID: "u", Prompt: says, Advantage: schemas.AdvantageSpec{Estimator: name},
			Batch: &schemas.BatchSpec{ID: "b", Groups: 2},
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		def, err := estimator.Default(name)
		if err != nil {
			t.Fatal(err)
		}
		a := g.Advantage
		if a.Estimator != name || a.Std != def.Std || a.StdBasis != def.StdBasis || *a.Epsilon != def.Epsilon ||
			a.Mode != def.Mode || a.Singleton != def.Singleton {
			t.Errorf("%s: resolved %+v, want the defaults %+v", name, a, def)
		}
	}
}

// Rewards of an evaluation stand for no trained step, which only a basis that was asked for
// can mind.
func TestResolveGroup_BasisWithoutSteps(t *testing.T) {
	for _, name := range estimator.Names() {
		g, err := groupOf(&schemas.Prompt{
			UID: "u", Prompt: says, Validation: true, Advantage: schemas.AdvantageSpec{Estimator: name},
			Batch: &schemas.BatchSpec{ID: "b", Groups: 2},
		})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if want := map[bool]string{
			true: schemas.BasisPopulation, false: schemas.BasisSample,
		}[name == estimator.PerPrompt]; g.Advantage.StdBasis != want {
			t.Errorf("%s: std_basis %q, want %q", name, g.Advantage.StdBasis, want)
		}
	}
}

func TestResolveGroup_Defaults(t *testing.T) {
	g, err := groupOf(&schemas.Prompt{UID: "u", Prompt: says})
	if err != nil {
		t.Fatal(err)
	}
	if g.Reward[0].Name != "glyph" || g.GroupPolicy != nil || g.Deadline != 0 || g.Batch != "u" {
		t.Errorf("%+v", g)
	}
	g, err = groupOf(&schemas.Prompt{
		UID: "u", Prompt: "x", Reward: []schemas.RewardSpec{{Name: "synthetic"}, {Name: "external:human"}},
		GroupPolicy: &schemas.GroupPolicy{ZeroStd: "refill"},
		Batch:       &schemas.BatchSpec{ID: "b", Groups: 3, Step: new(int64(4))},
		Refill:      &schemas.Refill{Root: "r", Round: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	if p := g.GroupPolicy; p.ZeroStd != "refill" || p.Failed != "keep" || *p.RefillRounds != 3 ||
		*p.MaxPolicySpan != 1 {
		t.Errorf("policy %+v", p)
	}
	if g.Deadline != time.Unix(100, 0).Add(time.Hour).UnixNano() || *g.BatchStep != 4 || g.Refill.Root != "r" {
		t.Errorf("%+v", g)
	}
}

// The model's own reward function reads; a prompt that says nothing gets one that does not.
func TestResolveGroup_DefaultReward(t *testing.T) {
	for prompt, want := range map[string]string{says: "glyph", "a red fox": "synthetic"} {
		g, err := groupOf(&schemas.Prompt{UID: "u", Prompt: prompt})
		if err != nil || len(g.Reward) != 1 || g.Reward[0].Name != want {
			t.Errorf("%q: %+v, %v, want %s", prompt, g, err, want)
		}
	}
}

func TestResolveGroup_Refuses(t *testing.T) {
	batch := &schemas.BatchSpec{ID: "b", Groups: 2}
	for _, tt := range []struct {
		name   string
		prompt schemas.Prompt
		fault  string
	}{
		{
			"unknown reward",
			schemas.Prompt{Prompt: "x", Reward: []schemas.RewardSpec{{Name: "beauty"}}},
			`reward[0]: name: "beauty"; must be one of ` + strings.Join(scorer.Kinds(), ", "),
		},
		{
			"no target",
			schemas.Prompt{Prompt: "a red fox", Batch: batch},
			`reward[0] (the default of model "q"): ground_truth: empty, and the prompt has no text in double quotes; glyph needs one`,
		},
		{"params", schemas.Prompt{
			Prompt: says, Reward: []schemas.RewardSpec{{Name: "ocr", Params: map[string]string{"psm": "99"}}},
		}, `reward[0]: params: psm: "99"`},
		{
			"unknown estimator",
			schemas.Prompt{Prompt: says, Advantage: schemas.AdvantageSpec{Estimator: "ppo"}},
			`advantage.estimator: "ppo"; did you mean opo? must be one of dance_grpo`,
		},
		{"option of another", schemas.Prompt{
			Prompt: says, Advantage: schemas.AdvantageSpec{Estimator: "rloo", Gamma: new(0.5)},
		}, "advantage.gamma: 0.5; estimator rloo does not discount"},
		{"epsilon without a scale", schemas.Prompt{
			Prompt: says, Advantage: schemas.AdvantageSpec{Std: schemas.StdNone, Epsilon: new(0.5)},
		}, "advantage.epsilon: 0.5; std none divides by no standard deviation, leave it out"},
		{
			"without a batch",
			schemas.Prompt{Prompt: says, Advantage: schemas.AdvantageSpec{Estimator: "gpg"}},
			"batch: absent; must be there: gpg",
		},
		{"one reward in all", schemas.Prompt{
			Prompt: says, GroupSize: new(int64(1)), Batch: &schemas.BatchSpec{ID: "b", Groups: 1},
			Advantage: schemas.AdvantageSpec{Estimator: "reinforce_plus_plus", StdBasis: "sample"},
		}, "batch.groups: 1; must be above 1 with group_size 1"},
		{
			"a choice it has not",
			schemas.Prompt{Prompt: says, Advantage: schemas.AdvantageSpec{Singleton: "reward"}},
			`advantage.singleton: "reward"; estimator flow_grpo`,
		},
		{"discount without steps", schemas.Prompt{
			Prompt: says, Batch: batch, Validation: true,
			Advantage: schemas.AdvantageSpec{Estimator: "reinforce_plus_plus", Gamma: new(0.5)},
		}, `advantage.std_basis: "expanded"; must be sample or population: it counts trained steps`},
		{"no trained steps", schemas.Prompt{
			Prompt: says, Validation: true, Advantage: schemas.AdvantageSpec{StdBasis: "expanded"},
		}, `advantage.std_basis: "expanded"; must be sample or population: it counts trained steps`},
		{"gdpo with an optional reward", schemas.Prompt{
			Prompt: says, Batch: batch, Reward: []schemas.RewardSpec{
				{Name: "ocr"}, {Name: "synthetic", Required: new(false)},
			}, Advantage: schemas.AdvantageSpec{Estimator: "gdpo"},
		}, "reward[1].required: false; must be true: gdpo"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.prompt.UID = "u"
			_, err := groupOf(&tt.prompt)
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("error %v, want one about %q", err, tt.fault)
			}
		})
	}
}
