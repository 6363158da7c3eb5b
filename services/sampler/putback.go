package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// putBack puts a request that waits back into the queue, for an eighth of the time that it has waited so far: then the
// waits of a day are fewer than the deliveries that a request may have.
func putBack(ctx context.Context, m *bus.Message, why error) error {
	d := putBackDelay(m)
	zerolog.Ctx(ctx).Debug().Dur("delay", d).Msg("put back: " + why.Error())
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, bus.ErrAcknowledged) {
		return fmt.Errorf("put back: %w", err)
	}
	return nil
}

// putBackDelay returns after how long a request comes again: 200 ms, an eighth more for each delivery.
func putBackDelay(m *bus.Message) time.Duration {
	d := 200 * time.Millisecond
	for range min(m.Delivered, 90) {
		d += d / 8
	}
	return d
}

// takes reports whether the sampler makes the sample of a request, as far as the checkpoint decides it: also of a group
// that another engine has begun, if it is so set and the engine gives what the request asks for.
func (s *service) takes(ctx context.Context, p *schemas.Policy, req *schemas.Request) bool {
	makes, mixed := p.Makes(req.BaseDigest)
	if !mixed {
		return makes
	}
	err := p.Engine.Makes(req)
	if req.Text != nil {
		_, err = p.DrawnBy().Gives(req.Text)
	}
	if err == nil {
		s.mixing.Do(func() {
			zerolog.Ctx(ctx).Warn().Str("run", string(req.Run)).Str("begun", req.BaseDigest).
				Msg("makes samples of groups that another engine has begun (--engine-mix)")
		})
	}
	return err == nil
}

// otherBase notes which other checkpoints requests wait for: for the log and /readyz.
type otherBase struct {
	mu sync.Mutex
	// until has the notes, each with the time when its requests have come again, or are done.
	until map[string]time.Time
}

// putBack puts a request for another checkpoint than have back, and logs each kind of wait once.
func (o *otherBase) putBack(ctx context.Context, m *bus.Message, req *schemas.Request, have string) error {
	why := fmt.Sprintf("requests of lane %q wait for a sampler of the checkpoint %.16s; this one has %.16s", req.Lane,
		req.BaseDigest, have)
	if schemas.IsServed(req.BaseDigest) || schemas.IsServed(have) {
		why += ": another engine has begun their groups, and --engine-mix lets this one make the rest"
	}
	o.mu.Lock()
	if o.until == nil {
		o.until = map[string]time.Time{}
	}
	_, noted := o.until[why]
	o.until[why] = time.Now().Add(2 * putBackDelay(m))
	o.mu.Unlock()
	if !noted {
		zerolog.Ctx(ctx).Warn().Str("run", string(req.Run)).Msg(why)
	}
	return putBack(ctx, m, errors.New(why))
}

// lines returns for /readyz which requests wait for a sampler of another checkpoint, sorted.
func (o *otherBase) lines() (lines []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for why, until := range o.until {
		if time.Now().Before(until) {
			lines = append(lines, why)
		}
	}
	slices.Sort(lines)
	return lines
}
