package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// Trainer returns who has the lease of a lane, the trainer that has it to itself; empty: none.
func (b *Bus) Trainer(ctx context.Context, lane schemas.Lane) (holder string, err error) {
	entry, err := b.getKey(ctx, schemas.LeaseBucket, schemas.PolicyKey(lane, schemas.TenantMain))
	if errors.Is(err, ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("lease of lane %q: %w", lane, err)
	}
	var lease struct{ Holder string }
	if json.Unmarshal(entry, &lease) != nil || lease.Holder == "" {
		return "somebody unknown", nil
	}
	return lease.Holder, nil
}
