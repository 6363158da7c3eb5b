package bus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// minStreamBytes is the least a stream is scaled down to.
	minStreamBytes = 1 << 20
	// mostGrownBlobs bounds the quarter of what is left of the server's storage that the object store gets.
	mostGrownBlobs = 24 << 30
	// readyTimeout bounds Ready, and the waits for servers of a cluster.
	readyTimeout = 2 * time.Minute
)

// Setup creates the contract's streams and buckets, or brings them up to date; only the admin role may. Repeating it
// changes nothing. The limits (bytes, count, age, replicas) of existing streams belong to the operator and stay. What
// the contract relies on (subjects, retention, guard, direct gets) is corrected if the server can do that; otherwise
// Setup returns ErrIncompatible. New streams get their limits from the registry, all divided by the same factor when
// the server's storage is smaller than their sum. Of what a larger storage has left, the stream of steps gets half and
// the object store a quarter; the rest stays free for streams whose limits are raised. A stream of steps of a version
// that gave it the registry's limit on every disk is widened once.
//
// When servers of a cluster are not up yet, Setup waits for them for two minutes. A single server has as long to
// answer: its disk may be busy.
func (b *Bus) Setup(ctx context.Context, opts ...SetupOption) error {
	var o setupOptions
	for _, opt := range opts {
		opt(&o)
	}
	for end := time.Now().Add(readyTimeout); ; {
		err := b.retryWhileAway(ctx, func(ctx context.Context) error { return b.setupOnce(ctx, o) })
		b.setUp.Store(b.setUp.Load() || err == nil)
		if !errors.Is(err, ErrTooFewServers) || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
		if b.waitLog.allow(logEvery) {
			b.log.Warn().Err(err).Msg("streams cannot be set up yet, trying again")
		}
		if Pause(ctx, rebindPause) != nil {
			return err
		}
	}
}

// setupOnce is one try of Setup. It divides the limits of new streams by 2, 4, 8, ... until they fit.
func (b *Bus) setupOnce(ctx context.Context, o setupOptions) error {
	if !b.clustered() { // else a request may be lost, and has the library's time limit
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, readyTimeout)
		defer stop()
	}
	var missing []jetstream.StreamConfig
	for _, spec := range schemas.Streams() {
		s, err := b.js.Stream(ctx, spec.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			missing = append(missing, streamConfig(spec, o.replicas))
			continue
		}
		if err == nil && s.CachedInfo().Config.Mirror == nil { // a mirror of another account is what its owner made it
			err = b.updateStream(ctx, s.CachedInfo().Config, streamConfig(spec, o.replicas))
		}
		if err != nil {
			return fmt.Errorf("set up stream %s: %w", spec.Name, noJetStream(err))
		}
	}
	for scale := int64(1); ; scale *= 2 {
		err := b.createMissing(ctx, missing, scale, max(1, o.replicas))
		if err == nil {
			break
		}
		if classOf(err) != classFull || scale > 1<<16 {
			return replicasError(o.replicas, err)
		}
		if scale == 1 {
			b.log.Info().Msg("the server's storage is smaller than the streams' limits; scaling them down")
		}
	}
	isNew := slices.ContainsFunc(missing, func(c jetstream.StreamConfig) bool { return c.Name == schemas.StreamSteps })
	if err := b.growLimits(ctx, isNew); err != nil {
		return err
	}
	return b.setReplicas(ctx, o.replicas)
}

// createMissing creates the missing streams, and the buckets that are not there, with limits divided by scale.
// An error may be that the server has no space for all of that.
func (b *Bus) createMissing(
	ctx context.Context, missing []jetstream.StreamConfig, scale int64, replicas int,
) error {
	for _, c := range missing {
		if c.MaxBytes > 0 {
			c.MaxBytes = scaled(c.MaxBytes, scale)
		}
		if _, err := b.js.CreateOrUpdateStream(ctx, c); err != nil {
			return fmt.Errorf("set up stream %s: %w", c.Name, err)
		}
	}
	return b.createBuckets(ctx, scale, replicas)
}

func scaled(limit, scale int64) int64 { return max(minStreamBytes, limit/scale) }

// createBuckets creates the buckets that are not there, with limits divided by scale.
func (b *Bus) createBuckets(ctx context.Context, scale int64, replicas int) error {
	for _, bucket := range schemas.Buckets() {
		if err := b.createBucket(ctx, bucket, scaled(bucket.MaxBytes, scale), replicas); err != nil {
			return fmt.Errorf("set up bucket %s: %w", bucket.Name, err)
		}
	}
	return nil
}

// createBucket creates a bucket if it is not there, and describes it. It forbids roll-ups in the bucket of runs: a user
// who may write the spec of one run could remove the specs of all runs with such a header.
func (b *Bus) createBucket(ctx context.Context, of schemas.BucketSpec, limit int64, replicas int) error {
	s, err := b.js.Stream(ctx, of.Stream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if of.Objects {
			_, err = b.js.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{
				Bucket: of.Name, Storage: jetstream.FileStorage, Replicas: replicas, MaxBytes: limit,
			})
		} else {
			_, err = b.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
				Bucket: of.Name, Storage: jetstream.FileStorage, Replicas: replicas, MaxBytes: limit,
				History: of.History, TTL: of.TTL,
			})
		}
		if err == nil || errors.Is(err, jetstream.ErrBucketExists) {
			s, err = b.js.Stream(ctx, of.Stream())
		}
	}
	if err != nil || s.CachedInfo().Config.Mirror != nil {
		return err
	}
	have := s.CachedInfo().Config
	next, changed := described(have, of.Purpose, of.Metadata())
	next.AllowRollup = have.AllowRollup && of.Name != schemas.RunBucket
	if changed || next.AllowRollup != have.AllowRollup {
		_, err = b.js.UpdateStream(ctx, next)
	}
	return err
}

// withKeys returns metadata with these keys; others in it stay.
func withKeys(metadata, keys map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, metadata)
	maps.Copy(all, keys)
	return all
}

// described returns the settings of a stream with that description and metadata, and whether they differ.
func described(
	have jetstream.StreamConfig, purpose string, metadata map[string]string,
) (next jetstream.StreamConfig, changed bool) {
	next = have
	next.Description, next.Metadata = purpose, withKeys(have.Metadata, metadata)
	return next, have.Description != purpose || !maps.Equal(have.Metadata, next.Metadata)
}

// streamConfig returns the settings of a stream of the contract in the form of the client library.
func streamConfig(s schemas.StreamSpec, replicas int) jetstream.StreamConfig {
	c := jetstream.StreamConfig{
		Name: s.Name, Description: s.Purpose, Metadata: s.Metadata(), Subjects: s.Subjects,
		Storage:  jetstream.FileStorage,
		Replicas: max(1, replicas),
		MaxMsgs:  cmp.Or(s.MaxMsgs, -1), MaxBytes: cmp.Or(s.MaxBytes, -1), MaxAge: s.MaxAge,
		Duplicates: schemas.DedupWindow, AllowDirect: true,
	}
	if s.WorkQueue {
		c.Retention = jetstream.WorkQueuePolicy
	}
	if s.DiscardNew || s.Guarded {
		c.Discard = jetstream.DiscardNew
	}
	if s.Guarded || s.WorkQueue {
		c.MaxMsgsPerSubject, c.DiscardNewPerSubject = 1, true
	}
	if s.TransformSource != "" {
		c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: s.TransformSource, Destination: s.TransformDest}
	}
	return c
}

// incompatibilities returns the settings of a stream that break the contract and cannot be changed; none: it can be
// used.
func incompatibilities(have, want jetstream.StreamConfig) (faults []string) {
	differ := func(setting string, have, want any) {
		if have != want {
			faults = append(faults, fmt.Sprintf("%s is %v, must be %v", setting, have, want))
		}
	}
	differ("retention", have.Retention, want.Retention)
	differ("storage", have.Storage, want.Storage)
	differ("discard", have.Discard, want.Discard)
	differ("max_msgs_per_subject", max(0, have.MaxMsgsPerSubject), want.MaxMsgsPerSubject)
	differ("discard_new_per_subject", have.DiscardNewPerSubject, want.DiscardNewPerSubject)
	differ("subject_transform", transformText(have), transformText(want))
	for _, subject := range have.Subjects {
		same := func(other string) bool { return schemas.Matches(subject, strings.ReplaceAll(other, "*", "x")) }
		if tail, ours := schemas.SubjectTail(subject); ours && !slices.Contains(want.Subjects, subject) &&
			!slices.ContainsFunc(want.Subjects, same) && slices.ContainsFunc(want.Subjects, func(other string) bool {
			return strings.HasPrefix(other, schemas.KindPrefix(strings.SplitN(tail, ".", 2)[0]))
		}) {
			faults = append(faults, "subject "+subject+": this store was written by a version before v1, which alone "+
				"can read its runs")
		}
	}
	return faults
}

// withContract returns the settings of an existing stream with what the contract needs, and a text for each change.
func withContract(have, want jetstream.StreamConfig) (next jetstream.StreamConfig, changes []string) {
	next = have
	for _, subject := range want.Subjects {
		if !slices.Contains(next.Subjects, subject) {
			next.Subjects, changes = append(slices.Clone(next.Subjects), subject), append(changes,
				"it lacks the subjects "+subject)
		}
	}
	if !have.AllowDirect {
		next.AllowDirect, changes = true, append(changes, "it answers no direct gets")
	}
	if have.Duplicates != want.Duplicates {
		next.Duplicates, changes = want.Duplicates, append(changes,
			fmt.Sprintf("its deduplication window is %v, must be %v", have.Duplicates, want.Duplicates))
	}
	return next, changes
}

// updateStream gives an existing stream what the contract needs, or returns ErrIncompatible.
func (b *Bus) updateStream(ctx context.Context, have, want jetstream.StreamConfig) error {
	if faults := incompatibilities(have, want); len(faults) > 0 {
		return fmt.Errorf("%w: %s; remove the stream, or use another account or store", ErrIncompatible,
			strings.Join(faults, "; "))
	}
	next, changes := withContract(have, want)
	next, renamed := described(next, want.Description, want.Metadata)
	if len(changes) == 0 && !renamed {
		return nil
	}
	_, err := b.js.UpdateStream(ctx, next)
	return err
}

func transformText(c jetstream.StreamConfig) string {
	if c.SubjectTransform == nil {
		return "none"
	}
	return c.SubjectTransform.Source + " -> " + c.SubjectTransform.Destination
}

// Ready waits until every stream and bucket exists, which Setup creates, and in a cluster until each has a leader:
// without one it takes and gives nothing. After two minutes, or when ctx ends, it returns an error that names what is
// missing; at once, where none can be created.
func (b *Bus) Ready(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, readyTimeout)
	defer stop()
	var told limiter
	for {
		var missing string
		err := b.retryWhileAway(ctx, func(ctx context.Context) (err error) {
			missing, err = b.firstMissing(ctx)
			return err
		})
		if err == nil && missing == "" {
			b.setUp.Store(true)
			return nil
		}
		if errors.Is(err, ErrPermission) || errors.Is(err, ErrNoJetStream) {
			return fmt.Errorf("wait for set-up: %w", err)
		}
		if told.allow(logEvery) {
			b.log.Info().Str("missing", missing).AnErr("err", err).Msg("waiting for the streams to be set up")
		}
		if waitErr := Pause(ctx, rebindPause); waitErr != nil {
			if missing != "" {
				return fmt.Errorf("wait for set-up: %s is missing: %w", missing, waitErr)
			}
			return fmt.Errorf("wait for set-up: %w", errors.Join(err, waitErr))
		}
	}
}

// firstMissing returns the name of the first stream that does not exist, or has no leader in a cluster; "": all can be
// used. Buckets are streams, too.
func (b *Bus) firstMissing(ctx context.Context) (string, error) {
	list, there := b.js.StreamNames(ctx), map[string]bool{}
	for name := range list.Name() {
		there[name] = true
	}
	if err := list.Err(); err != nil {
		return "", fmt.Errorf("names of the streams: %w", noJetStream(err))
	}
	for _, name := range schemas.StreamNames() {
		if !there[name] {
			return name, nil
		}
	}
	for _, name := range schemas.StreamNames() {
		if !b.clustered() {
			break
		}
		// Only a leader answers, or a server that knows of none.
		stream, err := b.js.Stream(ctx, name)
		silent := errors.Is(err, context.DeadlineExceeded) && b.nc.IsConnected()
		if silent || errors.Is(noLeader(err), ErrNoLeader) {
			return "the leader of " + name, nil
		} else if err != nil {
			return "", fmt.Errorf("leader of %s: %w", name, err)
		}
		if c := stream.CachedInfo().Cluster; c == nil || c.Leader == "" {
			return "the leader of " + name, nil
		}
	}
	return "", nil
}

// withStream calls f with a stream, and again while the server is away. What the stream has cached may be old: only the
// first call of each asks the server for it. That one gets what the server said, later ones nil.
func (b *Bus) withStream(
	ctx context.Context, name string, f func(context.Context, jetstream.Stream, *jetstream.StreamInfo) error,
) error {
	return b.retryWhileAway(ctx, func(ctx context.Context) (err error) {
		if known, ok := b.streams.Load(name); ok {
			return f(ctx, known.(jetstream.Stream), nil)
		}
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return err
		}
		info := s.CachedInfo()
		b.streams.Store(name, s)
		return f(ctx, s, info)
	})
}

// StreamInfo returns the state and the limits of a stream of the contract, or of one behind a bucket.
func (b *Bus) StreamInfo(ctx context.Context, stream string) (info *jetstream.StreamInfo, err error) {
	_, info, err = b.streamNow(ctx, stream)
	return info, err
}

// streamNow returns a stream, with its state and limits as they are now.
func (b *Bus) streamNow(ctx context.Context, name string) (s jetstream.Stream, info *jetstream.StreamInfo, err error) {
	read := func(ctx context.Context, found jetstream.Stream, now *jetstream.StreamInfo) (err error) {
		if s, info = found, now; now == nil {
			info, err = s.Info(ctx)
		}
		return err
	}
	err = b.withStream(ctx, name, read)
	return s, info, err
}

// MaxReplicas is the greatest number of servers that can keep one stream.
const MaxReplicas = 5

// ErrTooFewServers is returned when a stream is to be kept by more servers than are there.
var ErrTooFewServers = errors.New("too few servers")

// SetupOption changes one Setup.
type SetupOption func(*setupOptions)

type setupOptions struct{ replicas int }

// Replicas makes n servers of a cluster keep each stream, new or old. With 0, one server keeps a new stream, and old
// ones stay as they are.
func Replicas(n int) SetupOption { return func(o *setupOptions) { o.replicas = n } }

// SetReplicas makes n servers of a cluster keep each existing stream and bucket. The server copies the messages while
// work goes on. It returns ErrTooFewServers when n is more than there are; 0 changes nothing.
func (b *Bus) SetReplicas(ctx context.Context, n int) error {
	return b.retryWhileAway(ctx, func(ctx context.Context) error { return b.setReplicas(ctx, n) })
}

// setReplicas is one try of SetReplicas: it gives all streams n replicas; 0 leaves them as they are.
func (b *Bus) setReplicas(ctx context.Context, n int) error {
	if n == 0 {
		return nil
	}
	for _, name := range schemas.StreamNames() {
		s, err := b.js.Stream(ctx, name)
		if err != nil {
			return fmt.Errorf("replicas of %s: %w", name, err)
		}
		c := s.CachedInfo().Config
		if c.Replicas == n {
			continue
		}
		was := c.Replicas
		c.Replicas = n
		if _, err := b.js.UpdateStream(ctx, c); err != nil {
			return fmt.Errorf("replicas of %s: %w", name, replicasError(n, err))
		}
		b.log.Info().Str("stream", name).Int("replicas", n).Int("before", was).Msg("replicas changed")
	}
	return nil
}

// Codes of the server's API errors about replicas (nats-server, errors.json).
const (
	codeNoPeers   = 10005
	codeNoCluster = 10074
)

// replicasError adds to an error of changing to n replicas what an operator can do.
func replicasError(n int, err error) error {
	api, ok := errors.AsType[*jetstream.APIError](err)
	if !ok || n < 2 {
		return err
	}
	switch api.ErrorCode {
	case codeNoCluster:
		return fmt.Errorf("replicas: %d; must be 1 on a server that is not part of a cluster: %w", n, err)
	case codeInsufficient, codeStorageExceeded:
		return fmt.Errorf("replicas: %d; each server must have room (max_file_store) for all of the streams' limits; "+
			"make those smaller with 'meander streams limit', or the stores larger: %w", n, err)
	case codeNoPeers:
		return fmt.Errorf("%w: replicas: %d; must be at most the servers of the cluster that are up and have room: %w",
			ErrTooFewServers, n, err)
	}
	return err
}
