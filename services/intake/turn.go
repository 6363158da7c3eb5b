package intake

import (
	"context"
	"crypto/rand"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// turnKey is the entry of schemas.CountBucket, beside those of runs, that says whose turn it is: its name and until
// when, Unix nanoseconds.
const turnKey = "begins-batches"

// turn is the right to begin batches while space is short. One intake has it, from before it looks how much space there
// is until the requests of what it began are stored, where others count them. An intake that dies has it for the time
// that a batch counts as begun.
type turn struct {
	name string
	// by are the prompts, by their sequence, that begin batches in this turn.
	by map[uint64]bool
}

// take takes the turn for a prompt, and reports whether it could.
func (t *turn) take(ctx context.Context, b *bus.Bus, seq uint64) (bool, error) {
	if t.name == "" {
		t.name, t.by = rand.Text(), map[uint64]bool{}
	}
	e, err := b.Entry(ctx, schemas.CountBucket, turnKey)
	if err != nil {
		return false, err
	}
	holder, until, _ := strings.Cut(string(e.Value), " ")
	if end, _ := strconv.ParseInt(until, 10, 64); holder != t.name && time.Now().UnixNano() < end {
		return false, nil
	}
	if stored, err := t.store(ctx, b, time.Now().Add(announcing), e.Revision); err != nil || !stored {
		return false, err
	}
	t.by[seq] = true
	return true, nil
}

// give ends the turn of a prompt, and that of this intake with the last one.
func (t *turn) give(ctx context.Context, b *bus.Bus, seq uint64) {
	if !t.by[seq] {
		return
	}
	if delete(t.by, seq); len(t.by) > 0 {
		return
	}
	e, err := b.Entry(ctx, schemas.CountBucket, turnKey)
	if err == nil && strings.HasPrefix(string(e.Value), t.name+" ") {
		_, err = t.store(ctx, b, time.Unix(0, 0), e.Revision)
	}
	if err != nil { // it ends by itself
		zerolog.Ctx(ctx).Debug().Err(err).Msg("other intakes begin batches later")
	}
}

func (t *turn) store(ctx context.Context, b *bus.Bus, until time.Time, revision uint64) (stored bool, err error) {
	value := t.name + " " + strconv.FormatInt(until.UnixNano(), 10)
	return b.SwapEntry(ctx, schemas.CountBucket, turnKey, []byte(value), revision)
}

// endTurn is called when the requests of a prompt are stored, or could not be.
func (x *stepSpace) endTurn(ctx context.Context, b *bus.Bus, seq uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.turn.give(ctx, b, seq)
}
