package bus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// ErrBehind means that the lane has another policy than the one that the new one was to follow.
var ErrBehind = errors.New("the lane has moved on")

// SetPolicy makes p the current policy of its lane. It stores p in the history first (MDR_POLICIES, which keeps one
// order for all publishers), then in the bucket. after is the policy that p follows, nil for the first of a lane. It
// returns ErrBehind when the lane has another policy, or when p has other weights under a version that is not above
// the current one.
func (b *Bus) SetPolicy(ctx context.Context, p, after *schemas.Policy) error {
	if err := p.Validate(); err != nil {
		return fmt.Errorf("set policy: %w", err)
	}
	err := b.setPolicy(ctx, p, after)
	if err != nil {
		return fmt.Errorf("set policy of %q: %w", p.Lineage(), err)
	}
	return nil
}

// setPolicy is SetPolicy for a policy that is valid, with its errors.
func (b *Bus) setPolicy(ctx context.Context, p, after *schemas.Policy) error {
	current, last, err := b.currentPolicy(ctx, p.Lineage())
	if err != nil {
		return err
	}
	if after != nil && p.Epoch < after.Epoch {
		return fmt.Errorf("epoch: %d; must be at least %d: a trainer has taken the lane since", p.Epoch, after.Epoch)
	}
	if (current == nil) != (after == nil) ||
		current != nil && (!sameWeights(current, after) || current.Epoch != after.Epoch ||
			p.PolicyVersion <= current.PolicyVersion && !sameWeights(current, p) &&
				!(p.PolicyVersion == current.PolicyVersion && p.Continues(current))) {
		return ErrBehind
	}
	m, err := encode(ctx, p)
	if err != nil {
		return err
	}
	m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(last, 10))
	_, err = b.publish(ctx, m, publishOptions{})
	if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.ErrorCode == codeStreamWrongLastSeq {
		stored, lastErr := b.Last(ctx, schemas.StreamPolicies, p.Subject())
		if lastErr != nil || !slices.Equal(stored.Data, m.Data) {
			return ErrBehind // otherwise a try of ours stored it, and its answer was lost
		}
		err = nil
	}
	if err == nil {
		err = b.RaisePolicy(ctx, p.Lineage())
	}
	return err
}

// sameWeights reports whether two policies are one version with the same weights.
func sameWeights(a, b *schemas.Policy) bool {
	return a.PolicyVersion == b.PolicyVersion && a.WeightsDigest == b.WeightsDigest
}

// currentPolicy returns the newest policy of a lane, nil if there is none, and the sequence of the last message in
// its history, which the next publisher expects to find. It asks the history first: a publisher may have died before it
// wrote to the bucket of current policies.
func (b *Bus) currentPolicy(ctx context.Context, of schemas.Lineage) (p *schemas.Policy, last uint64, err error) {
	m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(of.Lane, of.Tenant))
	switch {
	case err == nil:
		last = m.Seq
		if p = b.decodePolicy(m); p != nil {
			return p, last, nil
		}
	case !errors.Is(err, ErrNotFound):
		return nil, 0, err
	}
	// The history was removed, or its last event is not a policy.
	m, err = b.Last(ctx, schemas.StreamPolicyBucket,
		schemas.BucketSubject(schemas.PolicyBucket, of.Key()))
	if errors.Is(err, ErrNotFound) {
		return nil, last, nil
	}
	if err == nil {
		p = b.decodePolicy(m)
	}
	return p, last, err
}

// decodePolicy decodes a stored policy. It returns nil for a removed entry, and for one that is not a policy, which
// it logs.
func (b *Bus) decodePolicy(m *Message) *schemas.Policy {
	p := &schemas.Policy{}
	if !b.decodeEntry(m, p, func() []string {
		return []string{p.Subject(), schemas.BucketSubject(schemas.PolicyBucket, p.Lineage().Key())}
	}) {
		return nil
	}
	return p
}

// RaisePolicy copies the newest policy of a lane's history to the bucket: its publisher may have died before it did
// so. It returns ErrStreamFull when the server has no space.
func (b *Bus) RaisePolicy(ctx context.Context, of schemas.Lineage) error {
	// The history is read after the bucket, and so at least as new.
	err := b.updateKey(ctx, schemas.PolicyBucket, of.Key(), func(ctx context.Context, old []byte) ([]byte, error) {
		m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(of.Lane, of.Tenant))
		switch {
		case errors.Is(err, ErrNotFound):
			return nil, nil
		case err != nil:
			return nil, err
		case b.decodePolicy(m) == nil, slices.Equal(old, m.Data):
			return nil, nil
		}
		return m.Data, nil
	})
	if classOf(err) == classFull {
		err = fmt.Errorf("%w: %w", ErrStreamFull, err)
	}
	return err
}

// Policy returns the current policy of a lane, or ErrNotFound.
func (b *Bus) Policy(ctx context.Context, of schemas.Lineage) (*schemas.Policy, error) {
	p, _, err := b.currentPolicy(ctx, of)
	if err == nil && p == nil {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("policy of lane %q: %w", of, err)
	}
	return p, nil
}

// policiesOf yields the policies that a tenant of a lane has had, oldest first, each with its message. It leaves out
// entries that cannot be read, and logs them. An error ends it.
func (b *Bus) policiesOf(ctx context.Context, of schemas.Lineage, each func(*schemas.Policy, *Message)) error {
	filters := []string{schemas.PolicySubject(of.Lane, of.Tenant)}
	for m, err := range b.Read(ctx, schemas.StreamPolicies, filters, ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("policies of lane %q: %w", of, err)
		}
		if p := b.decodePolicy(m); p != nil {
			each(p, m)
		}
	}
	return ctx.Err()
}

// PolicyHistory returns the policies that a tenant of a lane has had, oldest first. Of one that was announced again
// with the same weights it returns the last. It leaves out entries that cannot be read, and logs them.
func (b *Bus) PolicyHistory(ctx context.Context, of schemas.Lineage) (out []*schemas.Policy, err error) {
	err = b.policiesOf(ctx, of, func(p *schemas.Policy, _ *Message) {
		if last := len(out) - 1; last >= 0 && sameWeights(out[last], p) {
			out = out[:last]
		}
		out = append(out, p)
	})
	return out, err
}

// PolicyVersionAt returns the newest version that a lane had at a time of the server's clock, without those that are in
// refused; 0 when it had none, or when the history does not reach back so far.
func (b *Bus) PolicyVersionAt(
	ctx context.Context, of schemas.Lineage, at time.Time, refused map[int64]string,
) (version int64, err error) {
	note := func(p *schemas.Policy, m *Message) {
		if p != nil && !m.Time.After(at) && refused[p.PolicyVersion] == "" {
			version = p.PolicyVersion
		}
	}
	m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(of.Lane, of.Tenant))
	if errors.Is(err, ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("policy of lane %q: %w", of, err)
	}
	if note(b.decodePolicy(m), m); version == 0 { // else one request has told
		err = b.policiesOf(ctx, of, note)
	}
	return version, err
}

// FollowPolicy calls each with the current policy of each tenant of a lane, and again with each later one, in order,
// until ctx ends. When several come at once, it may skip all but the last. An entry that was removed or cannot be read
// is replaced by the newest policy of the history; gone is called with a tenant that has none. It returns nil.
func (b *Bus) FollowPolicy(ctx context.Context, lane schemas.Lane, each func(*schemas.Policy),
	gone func(schemas.Tenant),
) error {
	subject := schemas.BucketSubject(schemas.PolicyBucket, schemas.PolicyKey(lane, "*"))
	b.followEntries(ctx, schemas.StreamPolicyBucket, subject, func(m *Message) {
		if p := b.decodePolicy(m); p != nil {
			each(p)
			return
		}
		of := lane.Of(schemas.Tenant(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]))
		err := b.RaisePolicy(ctx, of)
		if err == nil {
			_, err = b.Policy(ctx, of)
		}
		switch {
		case errors.Is(err, ErrNotFound):
			gone(of.Tenant)
		case err != nil && ctx.Err() == nil:
			b.log.Warn().Err(err).Stringer("lane", of).Msg("policy not replaced")
		}
	})
	return nil
}

// Policies returns the current policy of every tenant of every lane, sorted by lane; main is the first of each. As
// currentPolicy does, it believes the history first. Entries that cannot be read are logged and left out.
func (b *Bus) Policies(ctx context.Context) ([]*schemas.Policy, error) {
	current := map[schemas.Lineage]*schemas.Policy{}
	for _, of := range [][2]string{
		{schemas.StreamPolicyBucket, schemas.BucketSubject(schemas.PolicyBucket, ">")},
		{schemas.StreamPolicies, schemas.PolicySubject("*", "*")},
	} {
		stored, err := b.LastMany(ctx, of[0], of[1:])
		if err != nil {
			return nil, fmt.Errorf("policies: %w", err)
		}
		for _, m := range stored {
			if p := b.decodePolicy(m); p != nil {
				current[p.Lineage()] = p
			}
		}
	}
	place := func(p *schemas.Policy) string { return p.Lineage().String() } // that of main is a prefix of the others
	return slices.SortedFunc(maps.Values(current), func(a, b *schemas.Policy) int {
		return cmp.Or(cmp.Compare(a.Lane, b.Lane), cmp.Compare(place(a), place(b)))
	}), nil
}

// ServedVersion returns the policy version that the samplers of a lane use: the newest one that a sampler which takes
// requests reports. It returns the version of p, the newest policy of its tenant, when no sampler runs or one reports
// no version.
func ServedVersion(p *schemas.Policy, present []*schemas.Presence) int64 {
	served := int64(-1)
	for _, s := range present {
		switch {
		case s.Service != schemas.ServiceSampler || s.Lane != p.Lane || s.Draining:
		case s.Serving(p.Tenant).PolicyVersion == nil:
			return p.PolicyVersion
		default:
			served = max(served, *s.Serving(p.Tenant).PolicyVersion)
		}
	}
	if served < 0 {
		return p.PolicyVersion
	}
	return min(served, p.PolicyVersion)
}

// ServedPolicy returns the policy of ServedVersion. A version that samplers are still loading, or have refused, is
// not served.
func (b *Bus) ServedPolicy(ctx context.Context, p *schemas.Policy, present []*schemas.Presence) (*schemas.Policy,
	error,
) {
	version := ServedVersion(p, present)
	if version == p.PolicyVersion {
		return p, nil
	}
	older, err := b.PolicyOf(ctx, p.Lineage(), version)
	if errors.Is(err, ErrNotFound) {
		return p, nil
	}
	return older, err
}

// PolicyOf returns a version of a lane, the last with that number. ErrNotFound says which there are.
func (b *Bus) PolicyOf(ctx context.Context, of schemas.Lineage, version int64) (*schemas.Policy, error) {
	is := func(p *schemas.Policy) bool { return p != nil && p.Lineage() == of && p.PolicyVersion == version }
	key := fmt.Sprint(of.Key(), ".", version)
	if seq, ok := b.versions.Load(key); ok { // its place does not change once another has followed
		if m, err := b.Get(ctx, schemas.StreamPolicies, seq.(uint64)); err == nil && is(b.decodePolicy(m)) {
			return b.decodePolicy(m), nil
		}
	}
	var found *schemas.Policy
	var seq uint64
	var history []*schemas.Policy
	err := b.policiesOf(ctx, of, func(p *schemas.Policy, m *Message) {
		if history = append(history, p); is(p) {
			found, seq = p, m.Seq
		}
	})
	if found != nil && found != history[len(history)-1] {
		b.versions.Store(key, seq)
	}
	if found != nil || err != nil {
		return found, err
	}
	return nil, fmt.Errorf("version %d of lane %q: %w; must be one of %s", version, of, ErrNotFound,
		PolicyVersions(history))
}

// AddTenant gives a tenant of a lane its version 0, the lane's checkpoint, unless it has versions. ErrNotFound: no
// sampler has announced the lane. A *TerminalError says why it can have none.
func (b *Bus) AddTenant(ctx context.Context, of schemas.Lineage) error {
	if _, err := b.Policy(ctx, of); !errors.Is(err, ErrNotFound) {
		return err
	}
	p, err := b.Policy(ctx, of.Lane.Of(schemas.TenantMain))
	if err != nil {
		return err
	}
	all, err := b.Policies(ctx)
	if err != nil {
		return err
	}
	tenants := slices.DeleteFunc(all, func(p *schemas.Policy) bool { return p.Lane != of.Lane })
	switch {
	case p.Modules == nil && p.Tensors == nil:
		err = fmt.Errorf("tenant: %q; must be absent: the model %s of lane %q takes no other weights", of.Tenant,
			p.Model, of.Lane)
	case len(tenants) > schemas.MaxTenants:
		err = fmt.Errorf("tenant: %q; must be one of those that lane %q has, which are %d: as many as it may have",
			of.Tenant, of.Lane, schemas.MaxTenants)
	}
	if err != nil {
		return Terminal(schemas.CodeInvalid, err)
	}
	if err := b.SetPolicy(ctx, p.Founding(of.Tenant), nil); !errors.Is(err, ErrBehind) {
		return err
	}
	return nil // another has just done so
}

// TenantRuns returns the runs with a group or an update of a tenant of a lane, sorted.
func (b *Bus) TenantRuns(ctx context.Context, of schemas.Lineage) ([]schemas.Run, error) {
	runs := map[schemas.Run]bool{}
	told := schemas.Address{Kind: schemas.KindUpdate, Lane: of.Lane, Tenant: of.Tenant}.Filter()
	updates, err := b.Subjects(ctx, schemas.StreamUpdates, told)
	if err != nil {
		return nil, fmt.Errorf("runs of lane %q: %w", of, err)
	}
	for subject := range updates {
		a, _ := schemas.ParseSubject(subject)
		runs[a.Run] = true
	}
	for m, err := range b.Read(ctx, schemas.StreamGroups, []string{schemas.GroupSubject("*", "*")}, ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("runs of lane %q: %w", of, err)
		}
		g := &schemas.GroupRecord{}
		if Fits(m, g) == nil && (g.Lineage() == of ||
			slices.ContainsFunc(g.Group.Stages, func(s schemas.GroupStage) bool { return s.Lineage() == of })) {
			runs[g.Run] = true
		}
	}
	return slices.Sorted(maps.Keys(runs)), ctx.Err()
}

// RemoveTenant removes the versions of a tenant of a lane, and the samplers' answers to them, and returns how many
// versions there were. Files of weights that nothing else names go with the next sweep. See TenantRuns: what is stored
// of these can be recomputed no more.
func (b *Bus) RemoveTenant(ctx context.Context, of schemas.Lineage) (versions int, err error) {
	history, err := b.PolicyHistory(ctx, of)
	if err != nil {
		return 0, err
	}
	for stream, subject := range map[string]string{
		schemas.StreamPolicies: schemas.PolicySubject(of.Lane, of.Tenant),
		schemas.StreamApplied:  schemas.AppliedSubject(of.Lane, of.Tenant, "*"),
	} {
		if _, err := b.PurgeSubject(ctx, stream, subject); err != nil {
			return 0, err
		}
	}
	kv, err := b.bucket(ctx, schemas.PolicyBucket)
	if err == nil {
		err = kv.Delete(ctx, of.Key()) // a marker, which samplers follow: last, or the history would be raised again
	}
	return len(history), err
}

// PolicyVersions lists the version numbers of a lane's history for an error or a help text, the newest first; of many
// it lists the first and counts the rest.
func PolicyVersions(history []*schemas.Policy) string {
	const most = 16
	var names []string
	for _, p := range slices.Backward(history) {
		if len(names) == most {
			return fmt.Sprintf("%s, or one of %d older", strings.Join(names, ", "), len(history)-most)
		}
		names = append(names, strconv.FormatInt(p.PolicyVersion, 10))
	}
	return strings.Join(names, ", ")
}

// EarlierPolicy returns a version of the lane of a policy. unfit says why its samplers cannot use it: they refused it,
// it is of another checkpoint, or its files are no longer stored. ErrNotFound: the lane has no such version.
func (b *Bus) EarlierPolicy(ctx context.Context, current *schemas.Policy, version int64) (p *schemas.Policy,
	unfit, err error,
) {
	if p, err = b.PolicyOf(ctx, current.Lineage(), version); err != nil {
		return nil, nil, err
	}
	refused, err := b.PolicyRefusals(ctx, current.Lineage())
	if err != nil {
		return nil, nil, err
	}
	switch why := refused[version]; {
	case why != "" && !p.IsCheckpoint():
		return p, fmt.Errorf("was refused by the samplers (%s); must be one that was taken over, see 'meander policy "+
			"ls'", why), nil
	case p.BaseDigest != current.BaseDigest:
		return p, fmt.Errorf("must be of the checkpoint that lane %q serves, %.16s", current.Lane,
			current.BaseDigest), nil
	}
	for _, file := range p.Files() {
		if file.Path != "" {
			continue // samplers look at it
		}
		if err := b.HasBlob(ctx, file.Blob()); err != nil {
			return p, fmt.Errorf("its weights are not stored any more: %w", err), nil
		}
	}
	return p, nil, nil
}

// StoreID names the store of the server, as long as it keeps the history of its policies: the digits of when that
// began. Folders that several stores share have a folder for each.
func (b *Bus) StoreID(ctx context.Context) (string, error) {
	info, err := b.StreamInfo(ctx, schemas.StreamPolicies)
	if err != nil {
		return "", fmt.Errorf("name of the store: %w", err)
	}
	return strings.Map(func(r rune) rune {
		if r < '0' || r > '9' {
			return -1
		}
		return r
	}, info.Created.UTC().Format(time.RFC3339Nano)), nil
}

// CurrentPolicy returns the newest policy of a lane that its samplers have not refused, or ErrNotFound.
func (b *Bus) CurrentPolicy(ctx context.Context, of schemas.Lineage) (*schemas.Policy, error) {
	newest, err := b.Policy(ctx, of)
	if err != nil || newest.IsCheckpoint() {
		return newest, err
	}
	refused, err := b.PolicyRefusals(ctx, of)
	if err != nil || refused[newest.PolicyVersion] == "" {
		return newest, err
	}
	history, err := b.PolicyHistory(ctx, of)
	for _, p := range slices.Backward(history) {
		if p.IsCheckpoint() && p.BaseDigest == newest.BaseDigest || refused[p.PolicyVersion] == "" {
			return p, err
		}
	}
	return newest, err
}

// PolicyRefusals returns the versions of a lane that samplers have refused and none has applied, each with the last
// reason. The lane never serves them.
func (b *Bus) PolicyRefusals(ctx context.Context, of schemas.Lineage) (map[int64]string, error) {
	answers, err := b.Applied(ctx, of)
	refused := map[int64]string{}
	for _, a := range answers {
		if a.State == schemas.AppliedRefused {
			refused[a.PolicyVersion] = a.Error
		}
	}
	for _, a := range answers {
		if a.State == schemas.AppliedApplied {
			delete(refused, a.PolicyVersion)
		}
	}
	return refused, err
}

// Applied returns the samplers' answers to the policies of a lane (applied or refused), oldest first.
func (b *Bus) Applied(ctx context.Context, of schemas.Lineage) ([]*schemas.Applied, error) {
	var out []*schemas.Applied
	filters := []string{schemas.AppliedSubject(of.Lane, of.Tenant, "*")}
	for m, err := range b.Read(ctx, schemas.StreamApplied, filters, ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("answers to policies of lane %q: %w", of, err)
		}
		a := &schemas.Applied{}
		if err := Fits(m, a); err == nil {
			out = append(out, a)
		}
	}
	return out, ctx.Err()
}

// Trainer returns who has the lease of a tenant of a lane, the trainer that has it to itself; empty: none.
func (b *Bus) Trainer(ctx context.Context, of schemas.Lineage) (holder string, err error) {
	entry, err := b.getKey(ctx, schemas.LeaseBucket, of.Key())
	if errors.Is(err, ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("lease of lane %q: %w", of, err)
	}
	var lease struct{ Holder string }
	if json.Unmarshal(entry, &lease) != nil || lease.Holder == "" {
		return "somebody unknown", nil
	}
	return lease.Holder, nil
}
