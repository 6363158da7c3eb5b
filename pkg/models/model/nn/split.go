package nn

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Split splits 0..n into as many parts as the device runs in parallel and runs f for each, in a session of its own.
// A panic of f is raised again in the caller.
func Split(ctx context.Context, d tensor.Device, n int, f func(s tensor.Session, from, to int) error) error {
	parts := min(n, d.Parallel())
	if parts <= 1 {
		return d.Run(ctx, false, func(s tensor.Session) error { return f(s, 0, n) })
	}
	errs, faults := make([]error, parts), make([]any, parts)
	var group sync.WaitGroup
	for i := range parts {
		from, to := i*n/parts, (i+1)*n/parts
		run := func() {
			defer func() { faults[i] = recover() }()
			errs[i] = d.Run(ctx, false, func(s tensor.Session) error { return f(s, from, to) })
		}
		if i == parts-1 {
			run()
			break
		}
		group.Go(run)
	}
	group.Wait()
	for _, f := range faults {
		if f != nil {
			panic(f)
		}
	}
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Indices is reusable memory for the lists of a pass. It grows to the largest pass and is kept.
type Indices struct {
	ints []int32
	used int
	// Sequences is a reusable list of lists.
	Sequences [][]int32
}

// Reset makes all memory free for the next pass.
func (x *Indices) Reset() { x.used, x.Sequences = 0, x.Sequences[:0] }

// Take returns n elements that are valid until Reset. They are not cleared.
func (x *Indices) Take(n int) []int32 {
	if x.used+n > len(x.ints) {
		// Earlier slices keep the old block alive.
		x.ints, x.used = make([]int32, max(2*len(x.ints), n, 256)), 0
	}
	s := x.ints[x.used : x.used+n : x.used+n]
	x.used += n
	return s
}
