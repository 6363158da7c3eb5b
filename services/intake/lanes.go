package intake

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// viewAge is how old a view may be when intake decides about a prompt.
const viewAge = 250 * time.Millisecond

// lanes looks up what samplers have announced, and which services run.
type lanes struct {
	bus *bus.Bus

	mu   sync.Mutex
	last *laneView
	at   time.Time
	// served caches the policy that each lane's samplers use; it may be older than the newest that was pushed.
	served map[schemas.Lineage]*schemas.Policy
	// refusals are the reasons why all samplers of a lane refused a version, read at asked.
	refusals map[schemas.Lineage]map[int64]string
	asked    time.Time
	// fits are the older versions that samplers can go back to, each with when that was asked.
	fits map[versionKey]time.Time
}

// laneView is what samplers and reward services had announced at one moment.
type laneView struct {
	// policies has what every lane serves of main that was ever announced, tenants what it serves of the others, newest
	// what was pushed last. live are the lanes that have a sampler now, sorted.
	policies        map[schemas.Lane]*schemas.Policy
	tenants, newest map[schemas.Lineage]*schemas.Policy
	live            []schemas.Lane
	// starting says of lanes what a sampler that starts waits for.
	starting map[schemas.Lane]string
	// scorers are the reward services.
	scorers []*schemas.Presence
	// samplerSpaces are what samplers reserve of the stream of steps, and what they wait for.
	samplerSpaces []*schemas.Room
}

// view returns what runs, as it was at most viewAge ago, or just now if fresh. An error is of the server.
func (l *lanes) view(ctx context.Context, fresh bool) (*laneView, error) {
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
	v := &laneView{
		policies: map[schemas.Lane]*schemas.Policy{}, newest: map[schemas.Lineage]*schemas.Policy{},
		tenants:  map[schemas.Lineage]*schemas.Policy{},
		starting: map[schemas.Lane]string{},
	}
	for _, p := range policies {
		v.newest[p.Lineage()] = p
		served, err := l.servedPolicy(ctx, p, present)
		if err != nil {
			return nil, err
		}
		if v.tenants[p.Lineage()] = served; p.Tenant == schemas.TenantMain {
			v.policies[p.Lane] = served
		}
	}
	maps.DeleteFunc(l.served, func(of schemas.Lineage, _ *schemas.Policy) bool { return v.newest[of] == nil })
	for _, p := range present {
		if p.Room != nil && p.Service == schemas.ServiceSampler {
			v.samplerSpaces = append(v.samplerSpaces, p.Room)
		}
		switch {
		case p.Service == schemas.ServiceReward:
			v.scorers = append(v.scorers, p)
		case p.Service == schemas.ServiceStarting:
			v.starting[p.Lane] = p.Waiting
		case p.Draining:
		case v.policies[p.Lane] != nil && !slices.Contains(v.live, p.Lane):
			v.live = append(v.live, p.Lane)
		}
	}
	slices.Sort(v.live)
	l.last, l.at = v, began
	return v, nil
}

// pickPolicy returns the policy of the named lane. Without a name it chooses the first expected lane, or the only lane
// that is served. If no sampler serves the lane, p is nil and waiting says what to wait for. The error is terminal: the
// name is unknown while other lanes are served, or no name is given and several lanes are served.
func (v *laneView) pickPolicy(name schemas.Lane,
	expected []schemas.Lane,
) (p *schemas.Policy, waiting wait, err error) {
	if name == "" && len(expected) > 0 {
		name = expected[0]
	}
	if name == "" {
		switch len(v.live) {
		case 1:
			return v.policies[v.live[0]], wait{}, nil
		case 0:
			for lane := range v.starting {
				return nil, v.whyNotUp(lane), nil
			}
			return nil, forModel.waits("model: no sampler runs; start one%s",
				formerLanes(slices.Sorted(maps.Keys(v.policies)))), nil
		}
		return nil, wait{}, bus.Terminal(schemas.CodeUnknownModel,
			fmt.Errorf("model: empty, and several lanes are served; must be one of %s (--lane)", joinLanes(v.live)))
	}
	p = v.policies[name]
	switch {
	case p != nil && slices.Contains(v.live, name):
		return p, wait{}, nil
	case p == nil && len(v.live) > 0 && !slices.Contains(expected, name) && v.starting[name] == "":
		return nil, wait{}, bus.Terminal(schemas.CodeUnknownModel,
			fmt.Errorf("model: %q is not served here; must be one of %s", name, joinLanes(v.live)))
	}
	if slices.Contains(expected, name) || v.starting[name] != "" {
		return nil, v.whyNotUp(name), nil
	}
	waiting = forModel.waits("model: no sampler serves %q now; start one", name)
	if p != nil {
		waiting.says += fmt.Sprintf(" (the last announced itself at %s)",
			time.Unix(0, p.Announced).UTC().Format(time.RFC3339))
	}
	if len(v.live) > 0 {
		waiting.says += ", or name one of " + joinLanes(v.live)
	}
	return nil, waiting, nil
}

// pick returns pickPolicy of a prompt's lane, that of its tenant. One that the lane does not have is terminal.
func (v *laneView) pick(p *schemas.Prompt, expected []schemas.Lane) (*schemas.Policy, wait, error) {
	policy, waiting, err := v.pickPolicy(p.Model, expected)
	if policy == nil || err != nil || p.Tenant == "" {
		return policy, waiting, err
	}
	if own := v.tenants[policy.Lane.Of(p.Tenant)]; own != nil {
		return own, waiting, nil
	}
	return nil, wait{}, bus.Terminal(schemas.CodeUnknownModel, NoTenant(policy.Lane.Of(p.Tenant), maps.Keys(v.tenants)))
}

// NoTenant refuses a tenant that a lane does not have. all are those of all lanes.
func NoTenant(of schemas.Lineage, all iter.Seq[schemas.Lineage]) error {
	names := []string{string(schemas.TenantMain)}
	for other := range all {
		if other.Lane == of.Lane && other.Tenant != schemas.TenantMain {
			names = append(names, string(other.Tenant))
		}
	}
	slices.Sort(names)
	return fmt.Errorf("tenant: %q has no weights on lane %q; must be one of %s, or be begun by 'meander policy push "+
		"--tenant'", of.Tenant, of.Lane, strings.Join(names, ", "))
}

// whyNotUp says that the sampler of a lane is not up yet, and what it waits for.
func (v *laneView) whyNotUp(lane schemas.Lane) wait {
	waiting := forModel.waits("model: the sampler of %q is not up yet", lane)
	if why := v.starting[lane]; why != "" {
		waiting.says += ": " + why
	}
	return waiting
}

// servedPolicy returns the policy that the samplers of p's lane use now; p is the newest that was pushed to the lane.
// It reads it from the server when their version has changed. The caller holds the lock.
func (l *lanes) servedPolicy(ctx context.Context, p *schemas.Policy,
	present []*schemas.Presence,
) (*schemas.Policy, error) {
	version := bus.ServedVersion(p, present)
	if last := l.served[p.Lineage()]; last != nil && last.PolicyVersion == version {
		return last, nil
	}
	served, err := l.bus.ServedPolicy(ctx, p, present)
	if err != nil {
		return nil, err
	}
	if l.served == nil {
		l.served = map[schemas.Lineage]*schemas.Policy{}
	}
	l.served[p.Lineage()] = served
	return served, nil
}

// refusalAge is how old the cached refusals may be.
const refusalAge = time.Second

// whyRefused returns why samplers have refused a policy that none has taken over, or "" if none has refused it. It asks
// the server again once its first answer is refusalAge old.
func (l *lanes) whyRefused(ctx context.Context, p *schemas.Policy) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.asked) > refusalAge {
		l.refusals, l.asked = map[schemas.Lineage]map[int64]string{}, time.Now()
	}
	if l.refusals[p.Lineage()] == nil {
		refusals, err := l.bus.PolicyRefusals(ctx, p.Lineage())
		if err != nil {
			return "", err
		}
		l.refusals[p.Lineage()] = refusals
	}
	return l.refusals[p.Lineage()][p.PolicyVersion], nil
}

// checkVersion refuses a version that the samplers of a lane cannot go back to from the policy that they serve. What
// fits is asked for again once the answer is refusalAge old.
func (l *lanes) checkVersion(ctx context.Context, served *schemas.Policy, version int64) error {
	key := versionKey{served.Lineage(), served.BaseDigest, version}
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.fits[key]) < refusalAge {
		return nil
	}
	_, unfit, err := l.bus.EarlierPolicy(ctx, served, version)
	if errors.Is(err, bus.ErrNotFound) {
		unfit, err = err, nil
	}
	if unfit != nil {
		err = bus.Terminal(schemas.CodeInvalid, fmt.Errorf("policy_version: %d; %w", version, unfit))
	}
	if err == nil {
		maps.DeleteFunc(l.fits, func(_ versionKey, at time.Time) bool { return time.Since(at) > refusalAge })
		l.fits[key] = time.Now()
	}
	return err
}

// versionKey is a version that a lane may go back to.
type versionKey struct {
	of      schemas.Lineage
	base    string
	version int64
}

// joinLanes lists lanes for a message, separated by commas.
func joinLanes(lanes []schemas.Lane) string {
	names := make([]string, len(lanes))
	for i, lane := range lanes {
		names[i] = string(lane)
	}
	return strings.Join(names, ", ")
}

// formerLanes returns a remark for messages on lanes that had samplers once; "" without any.
func formerLanes(names []schemas.Lane) string {
	if len(names) == 0 {
		return ""
	}
	return " (there were samplers of " + joinLanes(names) + ")"
}

// whyNotScorable returns what a prompt waits for before its rewards can be scored. Each running reward
// service must have all functions, as any of them may get the trajectory. If none has a function, the error is
// terminal. While no service runs, functions that every service has count as there. media are what they rate.
func (v *laneView) whyNotScorable(rewards []schemas.RewardSpec, media []scorer.Medium) (waiting wait, err error) {
	for i, r := range rewards {
		kind, _, err := scorer.SplitName(r.Name)
		if err != nil || kind == scorer.External || len(v.scorers) == 0 && scorer.Everywhere(r.Name) {
			continue // Resolve checks names
		}
		if len(v.scorers) == 0 {
			return forReward.waits("reward[%d]: no reward service runs to say whether it has %q; start one", i,
				r.Name), nil
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
			fit := slices.DeleteFunc(slices.Clone(v.scorers[0].Reward),
				func(name string) bool { return scorer.CheckMedium(name, media...) != nil })
			return wait{}, bus.Terminal(schemas.CodeUnknownReward,
				fmt.Errorf("reward[%d]: %s; must be one of %s, nats:NAME or external:NAME",
					i, whyMissing(lack, r.Name), strings.Join(fit, ", ")))
		default:
			return forReward.waits("reward[%d]: %q is missing at %s, one of %d reward services; give all of them the "+
				"same scorers file",
				i, r.Name, lack[0].Instance, len(v.scorers)), nil
		}
	}
	return wait{}, nil
}

// whyMissing returns the reason that one of the services gives for not having a function, or a general one.
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

// unserved returns a line for each lane that has requests and no sampler, and for each later service that has messages
// and no program, for the health check.
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
	streams, err := l.bus.Stats(ctx)
	if err != nil {
		return nil, err
	}
	backlog := bus.UnservedBacklog(streams)
	for _, service := range []string{schemas.ServiceReward, schemas.ServiceAdvantage} {
		if n := backlog[service]; n > 0 {
			out = append(out, fmt.Sprintf("%d messages wait for the %s service, and none runs", n, service))
		}
	}
	return out, nil
}

// whyStepsFull returns a wait if samples have waited for space in the stream of steps since before the given time.
// Prompts wait then: more requests would only wait behind those samples.
func (v *laneView) whyStepsFull(before time.Time) wait {
	samples := int64(0)
	first := before
	for _, r := range v.samplerSpaces {
		if since := time.Unix(0, r.Since); r.Waiting > 0 && since.Before(before) {
			samples += r.Waiting
			if since.Before(first) {
				first = since
			}
		}
	}
	if samples == 0 {
		return wait{}
	}
	return forSpace.waits("%s is full: %d samples wait for space, the first since %s; give it more with 'meander "+
		"streams limit --max-steps-bytes SIZE', or free what is not needed with 'meander gc' or 'meander runs rm RUN'",
		schemas.StreamSteps, samples, first.UTC().Format(time.RFC3339))
}
