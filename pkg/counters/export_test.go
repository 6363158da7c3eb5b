package counters

import (
	"context"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Pack packs the records, however few have changed.
func Pack(ctx context.Context, b *bus.Bus) error { return (&book{b: b}).pack(ctx) }

// Begin looks, and returns a function that writes what was found, later: only so many records and no head if most is
// not negative, as one does that is killed.
func Begin(ctx context.Context, b *bus.Bus, run schemas.Run, most int) (write func(), err error) {
	k, err := look(ctx, b, run)
	return func() {
		if most < 0 {
			k.write(ctx)
			return
		}
		for _, name := range slices.Sorted(maps.Keys(k.runs)) {
			if r := k.runs[name]; r.changed && most > 0 {
				most--
				_ = k.swap(ctx, key(name), r, r.revision) // another may have been first
			}
		}
	}, err
}
