package command

import (
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/schemas"
)

// spareCount returns how many other prompts each prompt gets for its refills, for --refill-fresh; 0 without the flag.
// It is an error if no group would be refilled.
func (p *promptFlags) spareCount() (int, error) {
	if !p.refillFresh {
		return 0, nil
	}
	policy := p.policy.GivenValues()
	if policy["zero_std"] != schemas.GroupRefill && policy["failed"] != schemas.GroupRefill {
		return 0, errors.New("--refill-fresh: given; must be with --zero-std refill or --failed-groups refill, else " +
			"no group is refilled")
	}
	var defaults schemas.GroupPolicy
	schemas.SetDefaults(&defaults)
	rounds, set := policy["refill_rounds"].(int64)
	if !set {
		rounds = *defaults.RefillRounds
	}
	return int(rounds), nil
}

// setSubstitutes puts the spare prompts of a record into its prompt, for --refill-fresh. A spare without a text, or
// with a ground truth that no reward function uses, is an error.
func (p *promptFlags) setSubstitutes(q *prompt, r *dataset.Record) error {
	var list []any
	for _, spare := range r.Spares {
		text, ok := spare.Prompt()
		if !ok {
			return fmt.Errorf("prompt %d: no text; must have one, so that it can replace another prompt "+
				"(--refill-fresh)", spare.Index+1)
		}
		s := map[string]any{"prompt": text}
		for _, field := range []string{"negative_prompt", "metadata"} {
			if v, ok := spare.Fields[field]; ok {
				s[field] = v
			}
		}
		if truth := p.truthOf(&spare); truth != nil {
			if q.body["reward"] == nil {
				return fmt.Errorf("prompt %d: has a ground truth; name the reward function that uses it with "+
					"--reward (--refill-fresh)", spare.Index+1)
			}
			s["ground_truth"] = truth
		}
		list = append(list, s)
	}
	if list != nil {
		q.body["substitutes"] = list
	}
	return nil
}

// uidOfEpoch returns the uid of a prompt in a later pass over the prompts; the first pass is epoch 0.
func uidOfEpoch(uid string, epoch int) string {
	if epoch == 0 || uid == "" {
		return uid
	}
	return fmt.Sprintf("%s-e%d", uid, epoch)
}
