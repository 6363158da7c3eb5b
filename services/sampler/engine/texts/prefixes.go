package texts

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// keptPrefixes is how many prompts stay in the cache of a model for later samples.
const keptPrefixes = 4

// prefixes are the last prompts in a model's cache, which the samples of a group share. Bits do not depend on it.
type prefixes struct {
	model lm.Model
	// freeCache frees memory of the model's cache, and reports whether there was any to free.
	freeCache func() bool

	mu   sync.Mutex
	kept []*prefix // the last used at the end
}

// prefix is one prompt. The episode that makes it evaluates it; others wait until ready is closed.
type prefix struct {
	ids []int32
	// ready is closed when sequence and logits [V] are set, or err.
	ready    chan struct{}
	sequence lm.Sequence
	logits   []float32
	err      error
	users    int  // episodes that copy it, or wait for it
	dropped  bool // not kept any more: the last user closes it
}

// forkSequence returns a new sequence that begins with ids, and copies the logits [V] after them. The first episode
// that asks for ids evaluates them; others wait and copy its part of the cache. lm.ErrFull: nothing in it can be freed.
func (x *prefixes) forkSequence(ctx context.Context, ids []int32, logits []float32) (lm.Sequence, error) {
	for {
		p, own := x.findOrCreate(ids)
		if own {
			p.sequence, p.logits = x.model.NewSequence(), make([]float32, len(logits))
			p.err = engine.Guarded(func() error {
				return x.model.Forward(ctx, []lm.Row{{Sequence: p.sequence, IDs: ids, Logits: p.logits}})
			})
			close(p.ready)
		}
		select {
		case <-p.ready:
		case <-ctx.Done():
			x.release(p)
			return nil, ctx.Err()
		}
		if p.err == nil {
			s := p.sequence.Fork()
			copy(logits, p.logits)
			x.release(p)
			return s, nil
		}
		err := p.err
		x.discard(p)
		switch {
		case own && errors.Is(err, lm.ErrFull) && x.freeCache():
		case own || ctx.Err() != nil:
			return nil, err
		} // else the error is another episode's, whose context may have ended: try again
	}
}

// findOrCreate returns the prefix of ids, to release or discard; own: it is new, and the caller evaluates it.
func (x *prefixes) findOrCreate(ids []int32) (p *prefix, own bool) {
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

// release ends the use of a prefix, which stays for later episodes.
func (x *prefixes) release(p *prefix) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p.users--
	p.close()
}

// discard ends the use of a prefix whose evaluation failed; the next episode that asks for it evaluates it anew.
func (x *prefixes) discard(p *prefix) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p.users--
	x.forget(p)
}

// forgetAll frees the prefixes that no episode uses any more, and reports whether any were kept.
func (x *prefixes) forgetAll() bool {
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

// forget stops keeping a prefix; its last user closes it. Lock held.
func (x *prefixes) forget(p *prefix) {
	x.kept = slices.DeleteFunc(x.kept, func(o *prefix) bool { return o == p })
	p.dropped = true
	p.close()
}

// close frees the cache of a prefix that is not kept and has no user. Lock of prefixes held.
func (p *prefix) close() {
	if p.dropped && p.users == 0 && p.sequence != nil {
		p.sequence.Close()
	}
}
