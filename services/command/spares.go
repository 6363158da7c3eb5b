package command

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/dataset"
	"github.com/meander-rl/meander/schemas"
)

// spares is how many other prompts each gets for its refills.
func (p *promptFlags) spares() (int, error) {
	if !p.refillFresh {
		return 0, nil
	}
	policy := p.policy.Values()
	if policy["zero_std"] != schemas.GroupRefill && policy["failed"] != schemas.GroupRefill {
		return 0, errors.New("--refill-fresh: given; nothing is refilled without --zero-std refill or --failed-groups refill")
	}
	var defaults schemas.GroupPolicy
	schemas.SetDefaults(&defaults)
	rounds, set := policy["refill_rounds"].(int64)
	if !set {
		rounds = *defaults.RefillRounds
	}
	return int(rounds), nil
}

// substitutes puts the spares of a record into its prompt.
func (p *promptFlags) substitutes(q *prompt, r *dataset.Record) error {
	var list []any
	for _, spare := range r.Spares {
		text, ok := spare.Prompt()
		if !ok {
			return fmt.Errorf("prompt %d: no text; must have one to stand in for another (--refill-fresh)", spare.Index+1)
		}
		s := map[string]any{"prompt": text}
		for _, field := range []string{"negative_prompt", "metadata"} {
			if v, ok := spare.Fields[field]; ok {
				s[field] = v
			}
		}
		if truth := cmp.Or(spare.GroundTruth, p.groundTruth); truth != "" {
			if q.body["reward"] == nil {
				return fmt.Errorf("prompt %d: has a ground truth; name the reward function that compares with --reward (--refill-fresh)", spare.Index+1)
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

// passed makes a uid of a later pass over the prompts one of its own.
func passed(uid string, epoch int) string {
	if epoch == 0 || uid == "" {
		return uid
	}
	return fmt.Sprintf("%s-e%d", uid, epoch)
}
