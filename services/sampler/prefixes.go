package sampler

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/lm"
)

// keptPrefixes is how many prompts stay in the cache of a model for samples that are yet to come.
const keptPrefixes = 4

// prefixes are prompts that a model has seen: the samples of a group begin with one, which is computed once. Bits do not
// depend on it.
type prefixes struct {
	model lm.Model
	// makeRoom frees cache; false: there is none to free.
	makeRoom func() bool

	mu   sync.Mutex
	kept []*prefix // the last used at the end
}

type prefix struct {
	ids []int32
	// ready is closed when sequence and logits [V] are there, or err.
	ready    chan struct{}
	sequence lm.Sequence
	logits   []float32
	err      error
	users    int // that look at it, or wait for it
	dropped  bool
}

// fork is a sequence of the ids; logits are set to those behind them.
func (x *prefixes) fork(ctx context.Context, ids []int32, logits []float32) (lm.Sequence, error) {
	for {
		p, own := x.take(ids)
		if own {
			p.sequence, p.logits = x.model.NewSequence(), make([]float32, len(logits))
			p.err = guarded(func() error {
				return x.model.Forward(ctx, []lm.Row{{Sequence: p.sequence, IDs: ids, Logits: p.logits}})
			})
			close(p.ready)
		}
		select {
		case <-p.ready:
		case <-ctx.Done():
			x.release(p, false)
			return nil, ctx.Err()
		}
		if p.err == nil {
			s := p.sequence.Fork()
			copy(logits, p.logits)
			x.release(p, false)
			return s, nil
		}
		err := p.err
		x.release(p, true)
		switch {
		case own && errors.Is(err, lm.ErrFull) && x.makeRoom():
		case own || ctx.Err() != nil:
			return nil, err
		} // else another's, whose context may have ended: it is tried again
	}
}

// take finds the prefix, or makes one that is the caller's to fill.
func (x *prefixes) take(ids []int32) (p *prefix, own bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	i := slices.IndexFunc(x.kept, func(p *prefix) bool { return slices.Equal(p.ids, ids) })
	if i >= 0 {
		p = x.kept[i]
		x.kept = append(slices.Delete(x.kept, i, i+1), p)
	} else {
		p, own = &prefix{ids: slices.Clone(ids), ready: make(chan struct{})}, true
		x.kept = append(x.kept, p)
		if len(x.kept) > keptPrefixes {
			x.forget(x.kept[0])
		}
	}
	p.users++
	return p, own
}

// release ends a use; a prefix without use, for its error, is forgotten.
func (x *prefixes) release(p *prefix, faulty bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p.users--; faulty && !p.dropped && p.err != nil {
		x.forget(p)
	}
	p.close()
}

// drop makes room in the cache; false: there is nothing to forget.
func (x *prefixes) drop() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.kept) == 0 {
		return false
	}
	for len(x.kept) > 0 {
		x.forget(x.kept[0])
	}
	return true
}

// forget takes a prefix out; whoever uses it last closes it. Lock held.
func (x *prefixes) forget(p *prefix) {
	x.kept = slices.DeleteFunc(x.kept, func(o *prefix) bool { return o == p })
	p.dropped = true
	p.close()
}

// close gives the cache back where nobody needs it. Lock of prefixes held.
func (p *prefix) close() {
	if p.dropped && p.users == 0 && p.sequence != nil {
		p.sequence.Close()
	}
}
