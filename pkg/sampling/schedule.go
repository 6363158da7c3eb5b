package sampling

import (
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/schemas"
)

// Schedule returns the schedule of a lane of images: its scheduler_config.json with its grid and its rule for mu.
// Intake makes a prompt's sigmas by it; a sampler tries it when its model is open. An error names what is not
// supported.
func Schedule(p *schemas.Policy) (flow.Schedule, error) {
	s, err := flow.ParseSchedule(p.SchedulerConfig)
	if err != nil {
		return s, err
	}
	s.Grid, s.MuRule, s.ConstantMu = flow.Grid(p.Grid), flow.MuRule(p.Mu), p.MuConstant
	return s, s.Validate()
}
