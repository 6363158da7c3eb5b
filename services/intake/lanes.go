package intake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// viewAge is how old a view may be that a prompt is judged by.
const viewAge = 250 * time.Millisecond

// lanes looks up what samplers have announced, and which services run.
type lanes struct {
	bus *bus.Bus

	mu   sync.Mutex
	last *view
	at   time.Time
	// served are what lanes served last, whose newest version none of their samplers used.
	served map[schemas.Lane]*schemas.Policy
	// refusals are those of a lane's versions, as of asked.
	refusals map[schemas.Lane]map[int64]string
	asked    time.Time
}

// view is what was there at one moment.
type view struct {
	// policies are what is served of every lane that was ever announced, newest what was pushed last, live those with a
	// sampler now.
	policies map[schemas.Lane]*schemas.Policy
	newest   map[schemas.Lane]*schemas.Policy
	live     []schemas.Lane
	// scorers are the reward services.
	scorers []*schemas.Presence
	// rooms are what samplers claim of the stream of steps.
	rooms []*schemas.Room
}

// view returns one of at most viewAge, or a new one.
func (l *lanes) view(ctx context.Context, fresh bool) (*view, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last != nil && !fresh && time.Since(l.at) < viewAge {
		return l.last, nil
	}
	began := time.Now()
	policies, err := l.bus.Policies(ctx)
	if err != nil {
		return nil, fmt.Errorf("read announced models: %w", err)
	}
	present, err := l.bus.Present(ctx)
	if err != nil {
		return nil, err
	}
	v := &view{policies: map[schemas.Lane]*schemas.Policy{}, newest: map[schemas.Lane]*schemas.Policy{}}
	for _, p := range policies {
		v.newest[p.Lane] = p
		if v.policies[p.Lane], err = l.servedOf(ctx, p, present); err != nil {
			return nil, err
		}
	}
	for _, p := range present {
		if p.Room != nil {
			v.rooms = append(v.rooms, p.Room)
		}
		switch {
		case p.Service == schemas.ServiceReward:
			v.scorers = append(v.scorers, p)
		case p.Draining:
		case v.policies[p.Lane] != nil && !slices.Contains(v.live, p.Lane):
			v.live = append(v.live, p.Lane)
		}
	}
	slices.Sort(v.live)
	l.last, l.at = v, began
	return v, nil
}

// pick returns the policy of the named lane; no name means the first expected lane, or the
// only one that is served. waiting says what to wait for instead: a sampler of a lane that
// was announced or is expected, or of any. A name that others than those are served under
// is refused.
func (v *view) pick(name schemas.Lane, expected []schemas.Lane) (p *schemas.Policy, waiting string, err error) {
	if name == "" && len(expected) > 0 {
		name = expected[0]
	}
	if name == "" {
		switch len(v.live) {
		case 1:
			return v.policies[v.live[0]], "", nil
		case 0:
			return nil, "model: no sampler runs; start one" + before(slices.Sorted(maps.Keys(v.policies))), nil
		}
		return nil, "", bus.Terminal(schemas.CodeUnknownModel, fmt.Errorf("model: empty, and several are served; name one of %s", list(v.live)))
	}
	p = v.policies[name]
	switch {
	case p != nil && slices.Contains(v.live, name):
		return p, "", nil
	case p == nil && len(v.live) > 0 && !slices.Contains(expected, name):
		return nil, "", bus.Terminal(schemas.CodeUnknownModel, fmt.Errorf("model: %q is not served here; must be one of %s", name, list(v.live)))
	}
	if slices.Contains(expected, name) {
		return nil, fmt.Sprintf("model: the sampler of %q is not up yet", name), nil
	}
	waiting = fmt.Sprintf("model: no sampler serves %q now; start one", name)
	if p != nil {
		waiting += fmt.Sprintf(" (the last announced itself at %s)", time.Unix(0, p.Announced).UTC().Format(time.RFC3339))
	}
	if len(v.live) > 0 {
		waiting += ", or name one of " + list(v.live)
	}
	return nil, waiting, nil
}

// servedOf is what a lane serves whose newest policy is p. Lock held.
func (l *lanes) servedOf(ctx context.Context, p *schemas.Policy, present []*schemas.Presence) (*schemas.Policy, error) {
	version := bus.ServedVersion(p, present)
	if last := l.served[p.Lane]; last != nil && last.PolicyVersion == version {
		return last, nil
	}
	served, err := l.bus.ServedPolicy(ctx, p, present)
	if err != nil {
		return nil, err
	}
	if l.served == nil {
		l.served = map[schemas.Lane]*schemas.Policy{}
	}
	l.served[p.Lane] = served
	return served, nil
}

// refusalAge is how old the answers of samplers may be that a waiting prompt is told of.
const refusalAge = time.Second

// refused says why samplers have refused a policy that none of them has taken, "" where that is not so.
func (l *lanes) refused(ctx context.Context, p *schemas.Policy) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.asked) > refusalAge {
		l.refusals, l.asked = map[schemas.Lane]map[int64]string{}, time.Now()
	}
	if l.refusals[p.Lane] == nil {
		refusals, err := l.bus.PolicyRefusals(ctx, p.Lane)
		if err != nil {
			return "", err
		}
		l.refusals[p.Lane] = refusals
	}
	return l.refusals[p.Lane][p.PolicyVersion], nil
}

func list(lanes []schemas.Lane) string {
	names := make([]string, len(lanes))
	for i, lane := range lanes {
		names[i] = string(lane)
	}
	return strings.Join(names, ", ")
}

func before(names []schemas.Lane) string {
	if len(names) == 0 {
		return ""
	}
	return " (there were samplers of " + list(names) + ")"
}

// able says whether the reward services that run have the functions. Any trajectory may go
// to any of them, so that a function which one lacks is waited for. While none runs,
// functions that each of them has are taken for granted, and others wait for one to say so. text is whether texts
// are rated, for the functions to name.
func (v *view) able(rewards []schemas.RewardSpec, text bool) (waiting string, err error) {
	for i, r := range rewards {
		kind, _, err := scorer.SplitName(r.Name)
		if err != nil || kind == scorer.External || len(v.scorers) == 0 && scorer.Everywhere(r.Name) {
			continue // resolve has its own word on names
		}
		if len(v.scorers) == 0 {
			return fmt.Sprintf("reward[%d]: no reward service runs to say whether it has %q; start one", i, r.Name), nil
		}
		var lack []*schemas.Presence
		for _, s := range v.scorers {
			if kind != scorer.NATS && !slices.Contains(s.Reward, r.Name) {
				lack = append(lack, s)
			}
		}
		switch len(lack) {
		case 0:
		case len(v.scorers):
			fit := slices.DeleteFunc(slices.Clone(v.scorers[0].Reward), func(name string) bool { return scorer.CheckMedium(name, text) != nil })
			return "", bus.Terminal(schemas.CodeUnknownReward, fmt.Errorf("reward[%d]: %s; must be one of %s, nats:NAME or external:NAME",
				i, whyMissing(lack, r.Name), strings.Join(fit, ", ")))
		default:
			return fmt.Sprintf("reward[%d]: %q is missing at %s, one of %d reward services; give all of them the same scorers file",
				i, r.Name, lack[0].Instance, len(v.scorers)), nil
		}
	}
	return "", nil
}

// whyMissing is what a service says of a function that it lacks.
func whyMissing(services []*schemas.Presence, name string) string {
	for _, s := range services {
		for _, m := range s.Missing {
			if m.Name == name {
				return fmt.Sprintf("%q cannot be scored here: %s", name, m.Reason)
			}
		}
	}
	return fmt.Sprintf("%q is not configured at the reward service (--scorers)", name)
}

// unserved names the lanes that have requests and no sampler.
func (l *lanes) unserved(ctx context.Context) ([]string, error) {
	v, err := l.view(ctx, false)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, lane := range slices.Sorted(maps.Keys(v.policies)) {
		if slices.Contains(v.live, lane) {
			continue
		}
		n, err := l.bus.LaneBacklog(ctx, lane)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			out = append(out, fmt.Sprintf("%d requests wait for a sampler of %q, and none runs", n, lane))
		}
	}
	return out, nil
}
