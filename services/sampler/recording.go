package sampler

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Recording is the steps of one attempt at a sample: each is digested, sealed after the one before
// it, and published without waiting for it to be stored. It is for one goroutine.
type Recording struct {
	sealer    *sealer
	publisher *bus.Publisher

	steps   []recorded
	content [][32]byte // content digests of the steps
	seal    seal       // of the last step
}

// recorded is a step of the sample: one on its way to be stored, or one of an earlier attempt.
type recorded struct {
	future *bus.Future // nil for the latter
	ref    schemas.StepRef
}

// NewRecording begins with no steps, and seals with the secret of the event plane (bus.SealKey).
func NewRecording(key []byte, p *bus.Publisher) *Recording {
	return &Recording{sealer: &sealer{key: key}, publisher: p}
}

// Step publishes a step, or tokens, that has its names. It waits only for room in the publisher's window.
func (r *Recording) Step(ctx context.Context, e schemas.StepEvent) error {
	sums, err := e.TensorSums()
	if err != nil {
		return fmt.Errorf("digest of step %d: %w", e.Place(), err)
	}
	digest := e.ContentDigestOf(sums)
	sealed := r.sealer.next(r.seal, digest, e, sums)
	e.Sealed(sealed.String())
	future, err := r.publisher.PublishStep(ctx, e, sums)
	if err != nil {
		return fmt.Errorf("publish step %d: %w", e.Place(), err)
	}
	r.content = append(r.content, digest)
	r.steps = append(r.steps, recorded{future: future})
	r.seal = sealed
	return nil
}

// Stored waits until every step is stored, and says where.
func (r *Recording) Stored(ctx context.Context) ([]schemas.StepRef, error) {
	var refs []schemas.StepRef
	for i, step := range r.steps {
		if step.future != nil {
			ack, err := step.future.Wait(ctx)
			if err != nil {
				return nil, fmt.Errorf("store step %d of %d: %w", i+1, len(r.steps), err)
			}
			step.ref = schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest}
		}
		refs = append(refs, step.ref)
	}
	return refs, nil
}
