// Package recorder turns what one attempt at a sample makes into events: it names, seals and publishes each step,
// makes the trajectory at the end, and finds the steps that earlier attempts have stored.
//
// A Recording digests, seals and publishes steps. A Recorder is the Recording of one attempt; the Store makes
// recorders and has what they share. A Sealer makes seals: codes that only samplers of this event plane can make,
// each over the seal of the step before. Recorder.Resume takes over the steps of an earlier attempt whose seals are
// right (resume.go). Rolled, of a latent or a sample, means made by scheduled sampling: the model stepped a noised
// latent down to the timestep of training.
//
// For each attempt the sampler calls New, Begin and Resume, then Record for each step, and at the end Finish, Pruned
// or Failed; AwaitStored when the request is put back. Unless a comment says more, an error is of the server, and the
// sample is made again.
package recorder

import (
	"context"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Recording is the steps of one attempt at a sample. Each step is digested, sealed after the one before it, and
// published without waiting until it is stored. One goroutine uses it.
type Recording struct {
	sealer    *Sealer
	publisher *bus.Publisher

	steps   []recorded
	content [][32]byte // content digests of the steps
	seal    seal       // of the last step
}

// recorded is a step of the sample: one that this attempt published, or one that it took over from an earlier attempt.
type recorded struct {
	future *bus.Future     // nil for a step that was taken over
	ref    schemas.StepRef // set for a step that was taken over
}

// NewRecording returns a Recording without steps that seals with key, the secret of the event plane (bus.SealKey).
func NewRecording(key []byte, p *bus.Publisher) *Recording {
	return &Recording{sealer: &Sealer{key: key}, publisher: p}
}

// Step seals and publishes a step, or tokens, that has its names already. It waits only for space in the publisher's
// window of unstored events. An error is of the server, or of ctx.
func (r *Recording) Step(ctx context.Context, e schemas.StepEvent) error {
	sums, err := e.TensorSums(schemas.BLAKE3)
	if err != nil {
		return fmt.Errorf("digest of step %d: %w", e.Place(), err)
	}
	digest := e.ContentDigestOf(sums)
	sealed := r.sealer.sealAfter(r.seal, digest, e, sums)
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

// Stored waits until every published step is stored, and returns where each is. An error means that one could not be
// stored: the sample must be made again.
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
