package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/present"
)

// checkPolicies checks the weights of each lane, and whether the running samplers use them. A lane is the request
// queue of a model.
func checkPolicies(ctx context.Context, o *Options, say *notes) {
	lanes, err := o.Bus.Policies(ctx)
	if err != nil {
		say.addFailure("policies", err)
		return
	}
	running, err := o.Bus.Present(ctx)
	if err != nil {
		say.addFailure("samplers", err)
		return
	}
	for _, p := range lanes {
		answers, err := o.Bus.Applied(ctx, p.Lineage())
		if err != nil {
			say.addFailure(fmt.Sprintf("answers to policies of lane %s", p.Lineage()), err)
			continue
		}
		checkLane(p, running, answers, say)
	}
	if len(lanes) == 0 {
		say.add(Unchecked, "", "there are none yet: samplers announce their weights when they start")
	}
}

// checkLane reports which samplers of a lane use its current policy p. running are all services that run, answers what
// the samplers said to policies.
func checkLane(p *schemas.Policy, running []*schemas.Presence, answers []*schemas.Applied, say *notes) {
	slices.Reverse(answers) // the newest first
	samplers, current := 0, 0
	for _, s := range running {
		if s.Service != schemas.ServiceSampler || s.Lane != p.Lane || s.Draining {
			continue
		}
		samplers++
		serving := s.Serving(p.Tenant)
		i := slices.IndexFunc(answers, func(a *schemas.Applied) bool {
			return a.Instance == s.Instance && a.PolicyVersion == p.PolicyVersion
		})
		switch {
		case i >= 0 && answers[i].State == schemas.AppliedRefused:
			why, _, _ := strings.Cut(answers[i].Error, "\n")
			goesOn := answers[i].Serving
			say.add(Fault, fmt.Sprintf("push weights that it takes, or go back: meander policy rollback %d", goesOn),
				"%s refused version %d of lane %s and goes on with %d: %s", s.Instance, p.PolicyVersion, p.Lineage(),
				goesOn, why)
		case serving.PolicyVersion == nil || *serving.PolicyVersion == p.PolicyVersion:
			current++
		case serving.Loading != nil:
			current++
			say.ok("%s takes over version %d of lane %s", s.Instance, *serving.Loading, p.Lineage())
		default:
			say.add(Warning, "see its log: it has not answered to that version",
				"%s uses version %d of lane %s, and the current one is %d", s.Instance, *serving.PolicyVersion,
				p.Lineage(), p.PolicyVersion)
		}
	}
	switch {
	case samplers == 0:
		say.ok("lane %s: version %d, and no sampler runs", p.Lineage(), p.PolicyVersion)
	case current == samplers:
		say.ok("lane %s: version %d, used by %s", p.Lineage(), p.PolicyVersion, present.Count(samplers, "sampler"))
	}
}
