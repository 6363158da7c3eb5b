package sampling

import (
	"encoding/json"
	"fmt"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/schemas"
)

// Schedule returns the schedule of a lane of images: its scheduler_config.json with its grid and its rule for mu, or
// the sigmas that its pipeline lists. Intake makes a prompt's sigmas by it; a sampler tries it when its model is open.
// An error names what is not supported.
func Schedule(p *schemas.Policy) (flow.Schedule, error) {
	if p.Grid == schemas.GridPipeline {
		var says struct {
			flow.Own
			Order string `json:"random_access"`
		}
		if err := json.Unmarshal(p.Pipeline, &says); err != nil {
			return flow.Schedule{}, fmt.Errorf("pipeline: %w", err)
		}
		if says.Order == "" { // an estimate, before the pipeline is loaded
			return flow.ParseSchedule([]byte("{}"))
		}
		s := flow.Schedule{Grid: flow.GridPipeline, Own: &says.Own}
		return s, s.Validate()
	}
	s, err := flow.ParseSchedule(p.SchedulerConfig)
	if err != nil {
		return s, err
	}
	s.Grid, s.MuRule, s.ConstantMu = flow.Grid(p.Grid), flow.MuRule(p.Mu), p.MuConstant
	return s, s.Validate()
}
