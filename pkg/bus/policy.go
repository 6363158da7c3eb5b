package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// ErrBehind says that a lane has another policy than the one that was to be followed.
var ErrBehind = errors.New("the lane has moved on")

// SetPolicy makes a policy the lane's current one: it goes to the history in MDR_POLICIES first,
// which keeps one order whoever publishes, then to the bucket. after is the version that it
// follows, nil for the first of a lane; ErrBehind where the lane has another, or other weights
// under a version that is not below this.
func (b *Bus) SetPolicy(ctx context.Context, p, after *schemas.Policy) error {
	if err := p.Validate(); err != nil {
		return fmt.Errorf("set policy: %w", err)
	}
	err := b.setPolicy(ctx, p, after)
	if err != nil {
		return fmt.Errorf("set policy of %q: %w", p.Lane, err)
	}
	return nil
}

func (b *Bus) setPolicy(ctx context.Context, p, after *schemas.Policy) error {
	current, last, err := b.currentPolicy(ctx, p.Lane)
	if err != nil {
		return err
	}
	same := func(a, b *schemas.Policy) bool {
		return a.PolicyVersion == b.PolicyVersion && a.WeightsDigest == b.WeightsDigest
	}
	if (current == nil) != (after == nil) || current != nil && (!same(current, after) || p.PolicyVersion <= current.PolicyVersion && !same(current, p)) {
		return ErrBehind
	}
	m, err := encode(ctx, p)
	if err != nil {
		return err
	}
	m.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(last, 10))
	_, err = b.publish(ctx, m, publishOptions{})
	if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.ErrorCode == codeStreamWrongLastSeq {
		if stored, lastErr := b.Last(ctx, schemas.StreamPolicies, p.Subject()); lastErr != nil || !slices.Equal(stored.Data, m.Data) {
			return ErrBehind // else it was stored by a try whose answer was lost
		}
		err = nil
	}
	if err == nil {
		err = b.RaisePolicy(ctx, p.Lane)
	}
	return err
}

// currentPolicy is the newest of a lane, nil for none, and the sequence of the last message of its
// history. Whoever published it may have died before it came to the bucket.
func (b *Bus) currentPolicy(ctx context.Context, lane schemas.Lane) (p *schemas.Policy, last uint64, err error) {
	m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(lane))
	switch {
	case err == nil:
		last = m.Seq
		if p = b.policy(m); p != nil {
			return p, last, nil
		}
	case !errors.Is(err, ErrNotFound):
		return nil, 0, err
	}
	// The history was removed, or its last event is none.
	m, err = b.Last(ctx, policyStream, schemas.BucketSubject(schemas.PolicyBucket, string(lane)))
	if errors.Is(err, ErrNotFound) {
		return nil, last, nil
	}
	if err == nil {
		p = b.policy(m)
	}
	return p, last, err
}

// policy reads a stored one; nil for an entry that was taken out, or is none.
func (b *Bus) policy(m *Message) *schemas.Policy {
	if len(m.Data) == 0 {
		return nil
	}
	p := &schemas.Policy{}
	err := schemas.DecodeValid(m.Data, p)
	if err == nil && p.Subject() != m.Subject && schemas.BucketSubject(schemas.PolicyBucket, string(p.Lane)) != m.Subject {
		err = fmt.Errorf("a policy of lane %q", p.Lane)
	}
	if err != nil {
		if b.waitLog.allow() {
			b.log.Warn().Err(err).Str("subject", m.Subject).Msg("policy not readable")
		}
		return nil
	}
	return p
}

// RaisePolicy makes the newest of a lane's history the one in the bucket: whoever published it may have
// died before it came to that. ErrStreamFull where the server has no room.
func (b *Bus) RaisePolicy(ctx context.Context, lane schemas.Lane) error {
	for {
		err := b.patiently(ctx, func(ctx context.Context) error {
			kv, err := b.bucket(ctx, schemas.PolicyBucket)
			if err != nil {
				return err
			}
			// The bucket first: what the history has afterwards is as new.
			e, err := kv.Get(ctx, string(lane))
			if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
				return err
			}
			m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(lane))
			switch {
			case errors.Is(err, ErrNotFound):
				return nil
			case err != nil:
				return err
			case b.policy(m) == nil, e != nil && slices.Equal(e.Value(), m.Data):
				return nil
			case e == nil:
				_, err = kv.Create(ctx, string(lane), m.Data)
			default:
				_, err = kv.Update(ctx, string(lane), m.Data, e.Revision())
			}
			return err
		})
		api, _ := errors.AsType[*jetstream.APIError](err)
		if errors.Is(err, jetstream.ErrKeyExists) || api != nil && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence {
			continue // somebody was first
		}
		if classify(err) == classFull {
			err = fmt.Errorf("%w: %w", ErrStreamFull, err)
		}
		return err
	}
}

// Policy is the current one of a lane, or ErrNotFound.
func (b *Bus) Policy(ctx context.Context, lane schemas.Lane) (*schemas.Policy, error) {
	p, _, err := b.currentPolicy(ctx, lane)
	if err == nil && p == nil {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("policy of lane %q: %w", lane, err)
	}
	return p, nil
}

// PolicyHistory is what a lane has served, the oldest first. Entries that cannot be read are left
// out, and logged.
func (b *Bus) PolicyHistory(ctx context.Context, lane schemas.Lane) ([]*schemas.Policy, error) {
	var out []*schemas.Policy
	for m, err := range b.Read(ctx, schemas.StreamPolicies, []string{schemas.PolicySubject(lane)}, ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("policies of lane %q: %w", lane, err)
		}
		if p := b.policy(m); p != nil {
			out = append(out, p)
		}
	}
	return out, ctx.Err()
}

// PolicyVersionAt is the version that a lane had at a time of the server's clock; 0 where it had none, or the history
// does not reach back so far.
func (b *Bus) PolicyVersionAt(ctx context.Context, lane schemas.Lane, at time.Time) (version int64, err error) {
	m, err := b.Last(ctx, schemas.StreamPolicies, schemas.PolicySubject(lane))
	if errors.Is(err, ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("policy of lane %q: %w", lane, err)
	}
	if p := b.policy(m); p != nil && !m.Time.After(at) { // the usual case, told by one request
		return p.PolicyVersion, nil
	}
	for m, err := range b.Read(ctx, schemas.StreamPolicies, []string{schemas.PolicySubject(lane)}, ReadOptions{}) {
		if err != nil {
			return 0, fmt.Errorf("policies of lane %q: %w", lane, err)
		}
		if m.Time.After(at) {
			break
		}
		if p := b.policy(m); p != nil {
			version = p.PolicyVersion
		}
	}
	return version, ctx.Err()
}

// FollowPolicy calls each with the current policy of a lane, and again with each that follows, until ctx
// ends. It is called in order; of several that came meanwhile the last may be the only one.
func (b *Bus) FollowPolicy(ctx context.Context, lane schemas.Lane, each func(*schemas.Policy)) error {
	key := []string{schemas.BucketSubject(schemas.PolicyBucket, string(lane))}
	for ctx.Err() == nil && !b.nc.IsClosed() {
		for m, err := range b.Read(ctx, policyStream, key, ReadOptions{Live: true, lastPerSubject: true}) {
			if err != nil {
				if b.waitLog.allow() {
					b.log.Warn().Err(err).Str("lane", string(lane)).Msg("policies not followed, trying again")
				}
				break
			}
			if p := b.policy(m); p != nil {
				each(p)
			}
		}
		_ = pause(ctx, rebindPause)
	}
	return nil
}

// Policies returns the current policy of every lane, sorted by lane.
func (b *Bus) Policies(ctx context.Context) ([]*schemas.Policy, error) {
	stored, err := b.LastMany(ctx, policyStream, []string{schemas.BucketSubject(schemas.PolicyBucket, ">")})
	if err != nil {
		return nil, fmt.Errorf("policies: %w", err)
	}
	out := make([]*schemas.Policy, 0, len(stored))
	for _, m := range stored {
		if p := b.policy(m); p != nil {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *schemas.Policy) int { return cmp.Compare(a.Lane, b.Lane) })
	return out, nil
}

// ServedVersion is the version that samplers which take requests use of a lane whose newest policy is p: the newest
// that
// one of them says, or that of p where none runs, or one does not say.
func ServedVersion(p *schemas.Policy, present []*schemas.Presence) int64 {
	served := int64(-1)
	for _, s := range present {
		switch {
		case s.Service != schemas.ServiceSampler || s.Lane != p.Lane || s.Draining:
		case s.PolicyVersion == nil:
			return p.PolicyVersion
		default:
			served = max(served, *s.PolicyVersion)
		}
	}
	if served < 0 {
		return p.PolicyVersion
	}
	return min(served, p.PolicyVersion)
}

// ServedPolicy is the policy of ServedVersion: a version that samplers are still loading, or have refused, is not
// served.
func (b *Bus) ServedPolicy(ctx context.Context, p *schemas.Policy, present []*schemas.Presence) (*schemas.Policy,
	error,
) {
	version := ServedVersion(p, present)
	if version == p.PolicyVersion {
		return p, nil
	}
	history, err := b.PolicyHistory(ctx, p.Lane)
	for _, older := range slices.Backward(history) {
		if older.PolicyVersion == version {
			return older, err
		}
	}
	return p, err
}

// CurrentPolicy is the newest policy of a lane that its samplers have not refused, or ErrNotFound.
func (b *Bus) CurrentPolicy(ctx context.Context, lane schemas.Lane) (*schemas.Policy, error) {
	newest, err := b.Policy(ctx, lane)
	if err != nil || newest.Bare() {
		return newest, err
	}
	refused, err := b.PolicyRefusals(ctx, lane)
	if err != nil || refused[newest.PolicyVersion] == "" {
		return newest, err
	}
	history, err := b.PolicyHistory(ctx, lane)
	for _, p := range slices.Backward(history) {
		if p.Bare() && p.BaseDigest == newest.BaseDigest || refused[p.PolicyVersion] == "" {
			return p, err
		}
	}
	return newest, err
}

// PolicyRefusals are the versions of a lane that samplers have refused and none has taken over, with the reason of the
// last: they are never what the lane serves. The checkpoint alone is always served again.
func (b *Bus) PolicyRefusals(ctx context.Context, lane schemas.Lane) (map[int64]string, error) {
	answers, err := b.Applied(ctx, lane)
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

// Applied are the samplers' answers to the policies of a lane, the oldest first.
func (b *Bus) Applied(ctx context.Context, lane schemas.Lane) ([]*schemas.Applied, error) {
	var out []*schemas.Applied
	for m, err := range b.Read(ctx, schemas.StreamApplied, []string{schemas.AppliedSubject(lane, "*")}, ReadOptions{}) {
		if err != nil {
			return nil, fmt.Errorf("answers to policies of lane %q: %w", lane, err)
		}
		a := &schemas.Applied{}
		if err := Fits(m, a); err == nil {
			out = append(out, a)
		}
	}
	return out, ctx.Err()
}
