package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// storeStart stores the tensor or images that a group starts with as blobs, and replaces them in p by references that
// all requests share. It refuses (a terminal error) a reference to a missing blob and an image that is no PNG of the
// right size: every sample would fail.
func (s *service) storeStart(ctx context.Context, p *schemas.Prompt, put putBlob) error {
	switch {
	case p.Start == nil || p.Start.Branch != nil:
		return nil
	case p.Start.Data == nil:
		return s.storeTensor(ctx, "start.latents", p.Start.Latents, put)
	case p.Start.Data.Latents != nil:
		return s.storeTensor(ctx, "start.data.latents", p.Start.Data.Latents, put)
	}
	for i := range p.Start.Data.Images {
		field := fmt.Sprintf("start.data.images[%d]", i)
		if err := s.storeImage(ctx, field, &p.Start.Data.Images[i], p, put); err != nil {
			return err
		}
	}
	return nil
}

// storeTensor stores the data of a tensor as a blob and makes the tensor refer to it. If it refers to a blob already,
// that must be stored. field is for the error.
func (s *service) storeTensor(ctx context.Context, field string, t *schemas.Tensor, put putBlob) error {
	if t.Ref == nil {
		ref, err := put(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store %s: %w", field, err)
		}
		t.Ref, t.Data = &ref, nil
		return nil
	}
	return blobError(field, s.bus.HasBlob(ctx, *t.Ref))
}

// blobError turns the error of looking up a blob that the prompt names in a field into that of the prompt: terminal
// if the blob is missing or corrupt, or its reference not valid; retryable if the server did not say. nil stays nil.
func blobError(field string, err error) error {
	switch {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return bus.Terminal(schemas.CodeInvalid,
			fmt.Errorf("%s.ref: %w; must be a blob that was stored before the prompt", field, err))
	case err != nil:
		return fmt.Errorf("look up %s: %w", field, err)
	}
	return nil
}

// checkBranch refuses (a terminal error) a start from a stored state that the samples cannot use: every one would
// fail. The state must be stored still, and its sample must have the same weights, size and schedule as the prompt.
func (s *service) checkBranch(ctx context.Context, r *schemas.Request, policy *schemas.Policy) error {
	if r.Start == nil || r.Start.Branch == nil {
		return nil
	}
	at := *r.Start.Branch
	const otherwise = "; to begin with it anyway give its latents (start.latents)"
	refuse := func(field, format string, args ...any) error {
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.branch"+field+": "+format, args...))
	}
	t, err := s.bus.BranchTrajectory(ctx, at)
	if errors.Is(err, bus.ErrNotFound) {
		g, err := s.bus.Group(ctx, at.Run, at.UID)
		if err == nil && len(g.Stages) > 0 && at.Stage == "" {
			return refuse(".stage", "absent; must be the one that stored the state: group %s of run %s has several",
				at.UID, at.Run)
		}
	}
	switch {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrFailed):
		return refuse("", "%w; must be a sample that was completed and is still stored", err)
	case err != nil:
		return fmt.Errorf("look up the sample to branch from: %w", err)
	case t.WeightsDigest != policy.WeightsDigest:
		return refuse("", "a state of model %q, weights %.12s; must be of those that lane %q serves, %.12s%s", t.Lane,
			t.WeightsDigest, policy.Lane, policy.WeightsDigest, otherwise)
	case sampling.SizeOf(&t.Sampling) != sampling.SizeOf(&r.Sampling):
		return refuse("", "a state of %v; must be of the prompt's size, %v", sampling.SizeOf(&t.Sampling),
			sampling.SizeOf(&r.Sampling))
	case !slices.Equal(t.Sigmas, r.Sigmas):
		return refuse(".step_index", "%d; must be of the same schedule: the sample has %d steps, its step %d at "+
			"sigma %v, and the prompt %d, at sigma %v%s",
			at.StepIndex, len(t.Transitions), at.StepIndex, sigmaAt(t.Sigmas,
				at.StepIndex), len(r.Transitions), sigmaAt(r.Sigmas, at.StepIndex), otherwise)
	}
	switch _, err := s.bus.LoadState(ctx, t, at.StepIndex); {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return refuse(".step_index", "%d; must be of a state that is stored: %w", at.StepIndex, err)
	case err != nil:
		return fmt.Errorf("look up the state to branch from: %w", err)
	}
	return nil
}

// sigmaAt returns the sigma of a step, 0 after the last.
func sigmaAt(sigmas []float32, step int64) float32 {
	if step < int64(len(sigmas)) {
		return sigmas[step]
	}
	return 0
}

// maxImage bounds the file of an image in bytes: it is read whole.
const maxImage = 32 << 20

// storeImage checks the format and size of an image, or of a video in an animated PNG, that samples start with, and
// stores it as a blob, if it is not one. A prompt without frames, width or height gets those of its first image. field
// names the image in a refusal, which is a terminal error.
func (s *service) storeImage(
	ctx context.Context, field string, im *schemas.DataImage, p *schemas.Prompt, put putBlob,
) error {
	refuse := func(format string, args ...any) error {
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf(field+format, args...))
	}
	data := im.Data
	if im.Ref != nil {
		if im.Ref.Size > maxImage {
			return refuse(".ref.size: %d; must be at most %d", im.Ref.Size, maxImage)
		}
		var err error
		if data, err = s.bus.GetBlob(ctx, *im.Ref); err != nil {
			return blobError(field, err)
		}
	}
	size, err := media.ReadSize(data)
	if err != nil {
		return refuse(": %v; must be a PNG", err)
	}
	frames, width, height := int64(size.Frames), int64(size.Width), int64(size.Height)
	if width > schemas.MaxSide || height > schemas.MaxSide {
		return refuse(": %d x %d pixels; must be at most %d x %d", width, height, schemas.MaxSide, schemas.MaxSide)
	}
	if p.Frames == nil {
		p.Frames = &frames
	}
	if p.Width == nil {
		p.Width = &width
	}
	if p.Height == nil {
		p.Height = &height
	}
	if want := (media.Size{Frames: int(*p.Frames), Height: int(*p.Height), Width: int(*p.Width)}); size != want {
		return refuse(": %v; must be %v, the size of the samples", size, want)
	}
	if im.Ref != nil {
		return nil
	}
	ref, err := put(ctx, data)
	if err != nil {
		return fmt.Errorf("store %s: %w", field, err)
	}
	im.Ref, im.Data = &ref, nil
	return nil
}
