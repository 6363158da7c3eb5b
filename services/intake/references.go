package intake

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// latents puts initial latents where each request can refer to them, and refuses those
// that are not where the prompt says: every sample would fail by itself.
func (s *service) latents(ctx context.Context, t *schemas.Tensor) error {
	if t == nil {
		return nil
	}
	if t.Ref == nil {
		ref, err := s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store initial latents: %w", err)
		}
		t.Ref, t.Data = &ref, nil
		return nil
	}
	switch err := s.bus.HasBlob(ctx, *t.Ref); {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("initial_latents.ref: %w; must be a blob that was stored before the prompt", err))
	case err != nil:
		return fmt.Errorf("initial latents: %w", err)
	}
	return nil
}
