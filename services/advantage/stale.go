package advantage

import (
	"context"
	"fmt"
	"time"
)

// setServedVersion sets which policy version the group's lane served when its last sample was scored, if the prompt
// limits the lag behind it (max_policy_lag). Versions that samplers refused were never served. A pass that scores
// stored trajectories again has no such limit.
func (w *worker) setServedVersion(ctx context.Context, g *group) (err error) {
	most := policyOf(g.spec).MaxPolicyLag
	if most == nil || g.spec.SourceRun != "" || len(g.samples) == 0 {
		return nil
	}
	last, oldest := int64(0), g.samples[0].policyMin
	for i := range g.samples {
		last, oldest = max(last, g.samples[i].stored), min(oldest, g.samples[i].policyMin)
	}
	if len(g.spec.Stages) > 0 {
		return w.setStaleStage(ctx, g, time.Unix(0, last), *most)
	}
	return w.setServed(ctx, g, time.Unix(0, last), oldest, *most)
}

// setServed sets which version the group's lane served at a time, and the versions that samplers refused if the oldest
// sample is further behind than most.
func (w *worker) setServed(ctx context.Context, g *group, at time.Time, oldest, most int64) (err error) {
	g.refusedVersions = nil
	g.served, err = w.bus.PolicyVersionAt(ctx, g.lane, at, nil)
	if err != nil || g.lag(oldest) <= most {
		return err
	}
	refused, err := w.bus.PolicyRefusals(ctx, g.lane)
	if err != nil {
		return err
	}
	g.refusedVersions = refused
	g.served, err = w.bus.PolicyVersionAt(ctx, g.lane, at, refused)
	return err
}

// lag returns by how many versions a version is behind the one that the group's lane served when its last sample was
// scored. A version that was left out counts: versions say how far weights have moved. One that samplers refused does
// not.
func (g *group) lag(version int64) int64 {
	n := g.served - version
	for refused := range g.refusedVersions {
		if version < refused && refused < g.served {
			n--
		}
	}
	return n
}

func (g *group) whyStale(oldest, lag int64) string {
	return fmt.Sprintf("policy version %d is %d behind version %d, which lane %q served by then; max_policy_lag is %d",
		oldest, g.lag(oldest), g.served, g.lane, lag)
}
