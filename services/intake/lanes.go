package intake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// lanes is what samplers have announced, kept current by a watch on the policy bucket.
type lanes struct {
	mu     sync.Mutex
	byName map[string]*schemas.Policy
	// changed is closed and replaced whenever byName changes.
	changed chan struct{}
}

// watchLanes returns once the lanes stored now are known; the watch ends with ctx.
func watchLanes(ctx context.Context, b *bus.Bus, log zerolog.Logger) (*lanes, error) {
	l := &lanes{byName: map[string]*schemas.Policy{}, changed: make(chan struct{})}
	policies, err := b.Policies(ctx)
	if err != nil {
		return nil, fmt.Errorf("read announced models: %w", err)
	}
	for _, p := range policies {
		l.set(p)
	}
	updates, err := b.WatchPolicies(ctx)
	if err != nil {
		return nil, fmt.Errorf("watch announced models: %w", err)
	}
	go func() {
		for p := range updates {
			l.set(p)
			log.Info().Str("lane", p.Lane).Str("model", p.Model).Int64("policy_version", p.PolicyVersion).Msg("model announced")
		}
	}()
	return l, nil
}

func (l *lanes) set(p *schemas.Policy) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byName[p.Lane] = p
	close(l.changed)
	l.changed = make(chan struct{})
}

// pick returns the policy of the named lane; no name means the first expected
// lane, or the only one announced. It waits for an expected lane (or for any, when
// none has been announced yet) until ctx ends, and refuses a name nobody serves.
func (l *lanes) pick(ctx context.Context, name string, expected []string) (*schemas.Policy, error) {
	if name == "" && len(expected) > 0 {
		name = expected[0]
	}
	for {
		l.mu.Lock()
		names := slices.Sorted(maps.Keys(l.byName))
		p, changed := l.byName[name], l.changed
		if name == "" && len(names) == 1 {
			p = l.byName[names[0]]
		}
		l.mu.Unlock()

		switch {
		case p != nil:
			return p, nil
		case name == "" && len(names) > 1:
			return nil, bus.Terminal(schemas.CodeUnknownModel, fmt.Errorf("model: empty, and several are served; name one of %s", strings.Join(names, ", ")))
		case name != "" && len(names) > 0 && !slices.Contains(expected, name):
			return nil, bus.Terminal(schemas.CodeUnknownModel, fmt.Errorf("model: %q is not served here; must be one of %s", name, strings.Join(names, ", ")))
		}
		zerolog.Ctx(ctx).Info().Str("model", name).Msg("waiting for a sampler to announce its model")
		select {
		case <-ctx.Done():
			return nil, errors.Join(errors.New("no sampler has announced a model"), ctx.Err())
		case <-changed:
		}
	}
}
