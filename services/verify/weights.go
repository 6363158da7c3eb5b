package verify

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// heldWeights is how many versions of the weights are in memory beside the model.
const heldWeights = 2

// version is weights that trajectories name.
type version struct {
	digest     string
	network    sampler.Network
	velocities *sampler.Velocities // nil of a language model
	err        error               // why they cannot be had
}

func newVersion(n sampler.Network) *version {
	v := &version{digest: n.WeightsDigest(), network: n}
	if n.Images != nil {
		v.velocities = sampler.NewVelocities(n.Images)
	}
	return v
}

// errUnknown says that neither the model nor a policy of the lane has the weights.
var errUnknown = errors.New("not those of the model, nor of a policy of the lane")

// weights returns those with a digest: the model's, or the version of a policy of the sample's lane, fetched and
// loaded. What keeps them from being had is in the version.
func (s *sample) weights(ctx context.Context, digest string) (*version, error) {
	o := s.made
	if i := slices.IndexFunc(o.versions, func(w *version) bool { return w.digest == digest }); i >= 0 {
		return o.versions[i], nil
	}
	p, err := s.policy(ctx, s.t.Lane, digest)
	if err != nil {
		return nil, err
	}
	w := &version{digest: digest, err: errUnknown}
	if p != nil {
		n, err := sampler.Policy(ctx, s.bus, o.network, p)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if w.err = err; err == nil {
			w = newVersion(n)
		}
	}
	if w.err == nil {
		if got := w.digest; got != digest {
			w.digest, w.err = digest, fmt.Errorf("version %d has %.16s", p.PolicyVersion, got)
		}
		s.report.Versions++
	}
	if len(o.versions) > heldWeights {
		o.versions[1].close(o.network) // the first is the model's own
		o.versions = slices.Delete(o.versions, 1, 2)
	}
	o.versions = append(o.versions, w)
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

func (w *version) close(opened sampler.Network) {
	if w.network != (sampler.Network{}) && w.network != opened {
		_ = w.network.Close()
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
		s.fault(step, "weights_digest: trajectory has %.16s, model %q has %.16s, and no policy of lane %s has those", w.digest, s.model.Name(), s.model.WeightsDigest(), s.t.Lane)
	default:
		s.fault(step, "weights_digest: %.16s: %v", w.digest, w.err)
	}
	return false
}
