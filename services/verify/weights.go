package verify

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/lm"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// heldWeights is how many versions of the weights are in memory besides those of the model.
const heldWeights = 2

// version is one version of a model's weights, or the reason why it is not available.
type version struct {
	digest     string
	network    engine.Network
	image      model.Model        // nil for a language model
	velocities *images.Velocities // of image
	text       lm.Model           // nil for an image model
	err        error              // why the weights cannot be loaded
}

// newVersion returns a version of an open model's weights, ready to compute with.
func newVersion(n engine.Network) *version {
	v := &version{digest: n.Digest(), network: n}
	switch n := n.(type) {
	case *images.Network:
		v.image, v.velocities = n.Model, images.NewVelocities(n.Model)
	case *texts.Network:
		v.text = n.Model
	}
	return v
}

// errUnknown means that neither the model nor a policy of the lane has the weights.
var errUnknown = errors.New("not those of the model, nor of a policy of the lane")

// versionWith returns the sample's model with the weights of a digest: those of the model, or of a policy of the
// sample's lane, which it fetches and loads. If that is not possible, the reason is in version.err. The newest
// heldWeights versions stay in memory. An error is of the server.
func (s *sample) versionWith(ctx context.Context, digest string) (*version, error) {
	o := s.opened
	if i := slices.IndexFunc(o.versions, func(w *version) bool { return w.digest == digest }); i >= 0 {
		return o.versions[i], nil
	}
	p, err := s.policyWith(ctx, s.t.Lane, digest)
	if err != nil {
		return nil, err
	}
	w := &version{digest: digest, err: errUnknown}
	if p != nil {
		n, err := weights.Apply(ctx, weights.Source{Bus: s.bus, Dir: s.options.WeightsDir}, o.network, p)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if w.err = err; err == nil {
			w = newVersion(n)
		}
	}
	if w.err == nil {
		if got := w.digest; got != digest && s.drawnBy() != nil {
			w.digest = digest // it counts from the name of the server's weights
		} else if got != digest {
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

// policyWith returns the policy of a lane that has the weights with a digest; nil if there is none. An error is of
// the server.
func (v *verifier) policyWith(ctx context.Context, lane schemas.Lane, digest string) (*schemas.Policy, error) {
	history, ok := v.policies[lane]
	if !ok {
		var err error
		if history, err = v.bus.PolicyHistory(ctx, lane); err != nil {
			return nil, err
		}
		v.policies[lane] = history
	}
	for _, p := range history {
		if p.WeightsDigest == digest {
			return p, nil
		}
	}
	return nil, nil
}

// close frees the weights, unless they are those of the open model.
func (w *version) close(opened engine.Network) {
	if w.network != nil && w.network != opened {
		_ = w.network.Close()
	}
}

// isAvailable reports whether the weights of a step, or of the whole sample (-1), could be loaded. If not, it reports
// a fault, or counts them as gone.
func (s *sample) isAvailable(w *version, step int64) bool {
	switch {
	case w.err == nil:
		return true
	case errors.Is(w.err, bus.ErrNotFound), errors.Is(w.err, fs.ErrNotExist):
		s.report.WeightsGone++
	case errors.Is(w.err, errUnknown):
		s.fault(step, "weights_digest: trajectory has %.16s, model %q has %.16s, and no policy of lane %s has those",
			w.digest, s.model.Name(), s.model.Digest(), s.t.Lane)
	default:
		s.fault(step, "weights_digest: %.16s: %v", w.digest, w.err)
	}
	return false
}

// guidedVelocity returns the output [S, C] of the model, with guidance, at a point, computed with some weights. The
// error is the model's, or of ctx.
func (s *sample) guidedVelocity(ctx context.Context, with *version, at images.Point) ([]float32, error) {
	given := images.Given{Velocities: with.velocities, Sampling: &s.t.Sampling, Conditionings: s.conds}
	return given.Velocity(ctx, at)
}
