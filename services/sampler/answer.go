package sampler

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// answers says what is wrong with a stored trajectory, as the answer to a request: it must
// have what the request says, and the steps that it names.
func (s *service) answers(ctx context.Context, t *schemas.Trajectory, r *schemas.Request) (fault, err error) {
	var faults []error
	same := func(field string, got, want any) {
		if got != want {
			faults = append(faults, fmt.Errorf("%s: %v; must be %v, as requested", field, got, want))
		}
	}
	same("group_size", t.GroupSize, r.GroupSize)
	same("lane", t.Lane, r.Lane)
	same("prompt", t.Prompt, r.Prompt)
	same("negative_prompt", t.NegativePrompt, r.NegativePrompt)
	same("height", t.Height, r.Height)
	same("width", t.Width, r.Width)
	same("true_cfg_scale", t.TrueCFGScale, r.TrueCFGScale)
	same("sample_seed", t.SampleSeed, r.SampleSeed)
	same("noise_seed", t.NoiseSeed, r.NoiseSeed)
	same("schedule_digest", t.ScheduleDigest, r.ScheduleDigest)
	if !t.Group.Same(&r.Group) {
		faults = append(faults, errors.New("group: must be that of the request"))
	}
	if t.StopReason == schemas.StopCompleted {
		same("steps", fmt.Sprint(len(t.Steps), " items"), fmt.Sprint(len(r.Transitions), " items"))
	}
	if len(faults) > 0 {
		return errors.Join(faults...), nil
	}
	return s.bus.CheckSteps(ctx, t)
}
