package schemas_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func TestPrompt_Substitute(t *testing.T) {
	p := schemas.Prompt{
		Prompt:        "a",
		ImageSettings: schemas.ImageSettings{NegativePrompt: new("n"), Prompt2: "a2", Prompt3: "a3"},
		Reward:        []schemas.RewardSpec{{Name: "ocr", GroundTruth: "A"}, {Name: "diversity"}},
		GroupPolicy:   &schemas.GroupPolicy{ZeroStd: schemas.GroupRefill},
		Substitutes:   []schemas.Substitute{{Prompt: "b", GroundTruth: "B"}, {Prompt: "c", NegativePrompt: new("m")}},
	}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	q := p
	if q.Substitute(1); q.Prompt2+q.Prompt3 != "" {
		t.Errorf("further texts of the prompt that is gone: %q and %q", q.Prompt2, q.Prompt3)
	}
	before := p.Reward
	for round, want := range []string{"a n A", "b n B", "c m ", "a n A"} {
		q := p
		q.Substitute(int64(round))
		if got := strings.Join([]string{q.Prompt, *q.NegativePrompt, q.Reward[0].GroundTruth.Text()},
			" "); got != want || q.Reward[1].GroundTruth != "" {
			t.Errorf("round %d: %q, want %q", round, got, want)
		}
	}
	if before[0].GroundTruth != "A" {
		t.Error("the prompt's own reward functions were changed")
	}
	for what, change := range map[string]func(*schemas.Prompt){
		"substitutes: 2; must be absent unless": func(p *schemas.Prompt) { p.GroupPolicy = nil },
		"substitutes[0].ground_truth":           func(p *schemas.Prompt) { p.Reward = p.Reward[1:] },
		"substitutes[1].prompt":                 func(p *schemas.Prompt) { p.Substitutes[1].Prompt = "\xff" },
		"substitutes: 2; must be absent beside conditions": func(p *schemas.Prompt) {
			p.Stages = []schemas.StageSpec{{Name: "think", ImageSettings: schemas.ImageSettings{
				Conditions: []schemas.Condition{{Name: "image", DataImage: schemas.DataImage{Data: []byte("x")}}},
			}}}
		},
		"substitutes[0].negative_prompt: given; must be absent beside stages": func(p *schemas.Prompt) {
			p.Stages, p.Substitutes[0].NegativePrompt = []schemas.StageSpec{{Name: "think"}}, new("blur")
		},
	} {
		q := p
		q.Substitutes = append([]schemas.Substitute{}, p.Substitutes...)
		change(&q)
		if err := q.Validate(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %s", err, what)
		}
	}
}
