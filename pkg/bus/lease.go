package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// Trainer returns who has the lease of a tenant of a lane, the trainer that has it to itself; empty: none.
func (b *Bus) Trainer(ctx context.Context, of schemas.Lineage) (holder string, err error) {
	entry, err := b.getKey(ctx, schemas.LeaseBucket, of.Key())
	if errors.Is(err, ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("lease of lane %q: %w", of, err)
	}
	var lease struct{ Holder string }
	if json.Unmarshal(entry, &lease) != nil || lease.Holder == "" {
		return "somebody unknown", nil
	}
	return lease.Holder, nil
}
