package janitor

import (
	"context"

	"github.com/meander-rl/meander/pkg/bus"
)

// NewPasses returns what makes the passes of Run, one after the other. indexed says that the pass had an index of the
// named blobs.
func NewPasses() func(context.Context, Config, *bus.Bus) (r *Report, indexed bool, err error) {
	var s blobSweeps
	var steps readSteps
	return func(ctx context.Context, cfg Config, b *bus.Bus) (*Report, bool, error) {
		r, err := runPass(ctx, cfg, b, false, &s, &steps, nil)
		return r, s.index != nil, err
	}
}
