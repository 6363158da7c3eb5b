package intake

import (
	"errors"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// errNoStages refuses prompts with stages.
var errNoStages = errors.New("stages: given; must be absent, this version makes none yet")

// checkStageRewards returns the reward functions of a prompt with stages, each checked against the text of the stage
// that it names, or of the last one that a lane makes.
func checkStageRewards(p *schemas.Prompt) (list []schemas.RewardSpec, err error) {
	for _, r := range p.Reward {
		last := 0
		for i, s := range p.Stages {
			if s.Interaction == nil && (r.Stage == "" || r.Stage == s.Name) {
				last = i
			}
		}
		q := p.Stages[last].AsPrompt()
		q.Reward = []schemas.RewardSpec{r}
		specs, fault := resolveRewards(q, &schemas.Policy{}, Origin{})
		list, err = slices.Concat(list, specs), errors.Join(err, fault)
	}
	if len(p.Reward) == 0 {
		err = errors.New("reward: absent; must name functions beside stages")
	}
	return list, err
}
