package advantage

import (
	"context"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// setStale sets why samples of the group are too old for max_policy_lag: by the versions that their lane served when
// the last sample was scored. Versions that samplers refused were never served. A pass that scores stored trajectories
// again has no such limit.
func (w *worker) setStale(ctx context.Context, g *group) error {
	g.stale = ""
	most := policyOf(g.spec).MaxPolicyLag
	if most == nil || g.spec.SourceRun != "" || len(g.samples) == 0 {
		return nil
	}
	last := int64(0)
	for i := range g.samples {
		last = max(last, g.samples[i].stored)
	}
	for _, f := range g.lanes() {
		lag, served, err := w.lag(ctx, f.stage.Lineage(), f.oldest, time.Unix(0, last), *most)
		if err != nil {
			return err
		}
		if lag > *most {
			g.stale = f.says("policy version %d is %d behind version %d, which lane %q served by then; max_policy_lag "+
				"is %d", f.oldest, lag, served, f.stage.Lineage(), *most)
			return nil
		}
	}
	return nil
}

// lag returns by how many versions a version is behind the one that a tenant of a lane had at a time. A version that
// was left out counts: versions say how far weights have moved. One that samplers refused does not; they are asked for
// where that may make a difference to most.
func (w *worker) lag(ctx context.Context, of schemas.Lineage, version int64, at time.Time, most int64) (
	lag, served int64, err error,
) {
	served, err = w.bus.PolicyVersionAt(ctx, of, at, nil)
	if err != nil || served-version <= most {
		return served - version, served, err
	}
	refused, err := w.bus.PolicyRefusals(ctx, of)
	if err == nil {
		served, err = w.bus.PolicyVersionAt(ctx, of, at, refused)
	}
	lag = served - version
	for r := range refused {
		if version < r && r < served {
			lag--
		}
	}
	return lag, served, err
}
