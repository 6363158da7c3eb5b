package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// heldWeights is how many versions of the weights are in memory beside the model.
const heldWeights = 2

// version is weights that trajectories name.
type version struct {
	digest     string
	model      model.Model
	velocities *sampler.Velocities
	err        error // why they cannot be had
}

// errUnknown says that neither the model nor a policy of the lane has the weights.
var errUnknown = errors.New("not those of the model, nor of a policy of the lane")

// weights returns those with a digest: the model's, or the version of a policy of the lane, fetched and
// loaded. What keeps them from being had is in the version.
func (v *verifier) weights(ctx context.Context, lane schemas.Lane, digest string) (*version, error) {
	if i := slices.IndexFunc(v.versions, func(w *version) bool { return w.digest == digest }); i >= 0 {
		return v.versions[i], nil
	}
	p, err := v.policy(ctx, lane, digest)
	if err != nil {
		return nil, err
	}
	w := &version{digest: digest, err: errUnknown}
	if p != nil {
		w.model, w.err = sampler.Policy(ctx, v.bus, v.model, p)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	if w.err == nil {
		w.velocities = sampler.NewVelocities(w.model)
		if got := w.model.Card().WeightsDigest; got != digest {
			w.err = fmt.Errorf("version %d has %.16s", p.PolicyVersion, got)
		}
		v.report.Versions++
	}
	if len(v.versions) > heldWeights {
		v.versions[1].close(v.model) // the first is the model's own
		v.versions = slices.Delete(v.versions, 1, 2)
	}
	v.versions = append(v.versions, w)
	return w, nil
}

// policy is one of the lane with those weights, nil for none.
func (v *verifier) policy(ctx context.Context, lane schemas.Lane, digest string) (*schemas.Policy, error) {
	history, ok := v.history[lane]
	if !ok {
		var err error
		if history, err = v.bus.PolicyHistory(ctx, lane); err != nil {
			return nil, err
		}
		v.history[lane] = history
	}
	for _, p := range history {
		if p.WeightsDigest == digest {
			return p, nil
		}
	}
	return nil, nil
}

func (w *version) close(opened model.Model) {
	if w.model != nil && w.model != opened {
		_ = w.model.Close()
	}
}

// known says whether a sample's weights, of a step or of the whole (-1), can be had: if not, that is a
// fault or, where their bytes are gone, counted.
func (s *sample) known(w *version, step int64) bool {
	switch {
	case w.err == nil:
		return true
	case errors.Is(w.err, bus.ErrNotFound):
		s.report.WeightsGone++
	case errors.Is(w.err, errUnknown):
		s.fault(step, "weights_digest: trajectory has %.16s, model %q has %.16s, and no policy of lane %s has those", w.digest, s.model.Card().Name, s.model.Card().WeightsDigest, s.t.Lane)
	default:
		s.fault(step, "weights_digest: %.16s: %v", w.digest, w.err)
	}
	return false
}
