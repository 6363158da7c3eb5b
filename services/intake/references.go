package intake

import (
	"context"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// states puts those that a group starts with where each request can refer to them, and
// refuses what is not where the prompt says: every sample would fail by itself.
func (s *service) states(ctx context.Context, start *schemas.Start) error {
	if start == nil {
		return nil
	}
	t := start.Latents
	if t.Ref == nil {
		ref, err := s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store the states to start with: %w", err)
		}
		t.Ref, t.Data = &ref, nil
		return nil
	}
	switch err := s.bus.HasBlob(ctx, *t.Ref); {
	case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
		return bus.Terminal(schemas.CodeInvalid, fmt.Errorf("start.latents.ref: %w; must be a blob that was stored before the prompt", err))
	case err != nil:
		return fmt.Errorf("look up the states to start with: %w", err)
	}
	return nil
}
