package verify

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/weightsdir"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/engine/texts"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// heldWeights is how many versions of the weights are in memory besides those of the model: as many as a worker takes.
const heldWeights = 2

// version is one version of a model's weights, or the reason why it is not available.
type version struct {
	digest     string
	number     int64 // the version of the policy that has them; 0 for those of the model
	network    engine.Network
	image      model.Model        // nil for a language model
	velocities *images.Velocities // of image
	text       lm.Model           // nil for an image model
	err        error              // why there are no such weights: they are gone, or others
}

// WeightsError says that the model does not load the weights of a version, at first or once more. That says nothing
// about the samples.
type WeightsError struct {
	Version int64
	Err     error
}

func (e *WeightsError) Error() string {
	return fmt.Sprintf("the weights of version %d cannot be loaded: %v", e.Version, e.Err)
}

func (e *WeightsError) Unwrap() error { return e.Err }

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
// sample's lane, which it fetches and loads. If there are no such weights, the reason is in version.err. The newest
// heldWeights versions stay in memory, and s.version does in any case. An error is of the server, or a WeightsError.
func (s *sample) versionWith(ctx context.Context, digest string) (*version, error) {
	o := s.opened
	if i := slices.IndexFunc(o.versions, func(w *version) bool { return w.digest == digest }); i >= 0 {
		return o.versions[i], nil
	}
	p, err := s.policyWith(ctx, s.t.Lineage(), digest)
	if err != nil {
		return nil, err
	}
	w := &version{digest: digest, err: errUnknown}
	if p != nil {
		if w, err = s.loadVersion(ctx, p); err != nil {
			return nil, err
		}
	}
	o.versions = append(o.versions, w)
	return w, nil
}

// loadVersion fetches and loads the weights of a policy, whose digest they have. It makes room first: a worker takes no
// more.
func (s *sample) loadVersion(ctx context.Context, p *schemas.Policy) (*version, error) {
	o := s.opened
	o.makeRoom(s.version)
	n, err := weights.Apply(ctx, weights.Source{Bus: s.bus, Dir: s.options.WeightsDir}, o.network, p)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, fs.ErrNotExist), errors.Is(err, bus.ErrCorrupt),
		errors.Is(err, weightsdir.ErrUnfit):
		return &version{digest: p.WeightsDigest, err: err}, nil
	default:
		return nil, &WeightsError{p.PolicyVersion, err}
	}
	s.report.Versions++
	w := newVersion(n)
	w.number = p.PolicyVersion
	if got := w.digest; got != p.WeightsDigest && s.drawnBy() == nil {
		w.close(o.network)
		w = &version{err: fmt.Errorf("version %d has %.16s", p.PolicyVersion, got)}
	}
	w.digest = p.WeightsDigest // a server counts from the name of its weights
	return w, nil
}

// makeRoom closes the oldest version, but not the one in use, if no other may be loaded beside those in memory.
func (o *opened) makeRoom(inUse *version) {
	var held, unused []*version
	for _, w := range o.versions {
		if w.network == nil || w.network == o.network {
			continue
		}
		if held = append(held, w); w != inUse {
			unused = append(unused, w)
		}
	}
	if len(held) < heldWeights {
		return
	}
	oldest := unused[0]
	o.versions = slices.DeleteFunc(o.versions, func(w *version) bool { return w == oldest })
	oldest.close(o.network)
}

// policyWith returns the policy of a tenant of a lane that has the weights with a digest; nil if there is none. An
// error is of the server.
func (v *verifier) policyWith(ctx context.Context, of schemas.Lineage, digest string) (*schemas.Policy, error) {
	history, ok := v.policies[of]
	if !ok {
		var err error
		if history, err = v.bus.PolicyHistory(ctx, of); err != nil {
			return nil, err
		}
		v.policies[of] = history
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
			w.digest, s.model.Name(), s.model.Digest(), s.t.Lineage())
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

// endsRun returns the error that ends the whole run after an error of the model, computed with some weights, that says
// nothing about the sample: the end of ctx, a lost device, or weights that cannot be loaded again. nil: it is a fault.
func (s *sample) endsRun(ctx context.Context, with *version, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, model.ErrWeights):
		return &WeightsError{with.number, err}
	case errors.Is(err, tensor.ErrDeviceLost):
		return err
	}
	return nil
}
