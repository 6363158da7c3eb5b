package bus

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// BlobGrace is the least time that a blob stays although no event names it: a blob is stored before the event
	// that names it.
	BlobGrace = 2 * time.Minute
	// blobFresh is the age up to which PutBlob leaves a stored blob as it is. PutBlob stores the entry of an older
	// one again, so that it is not swept before the event that names it is stored.
	blobFresh = BlobGrace / 4
	// unfinishedEvery is how often a connection looks for chunks of blobs that were never finished: for that it reads
	// the entries of the whole store.
	unfinishedEvery = 10 * time.Minute
)

// namingStreams are the streams whose events name blobs. MDR_STEPS is not one of them: steps carry their tensors as
// parts.
var namingStreams = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamRequests, schemas.StreamParked,
	schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamUpdates, schemas.StreamDead,
}

// SweepBlobs removes the blobs that no stored event names and that were last stored or used longer than grace ago. It
// returns their number; with dry it only counts them. Now and then a call also removes the chunks of blobs that were
// never finished; not each does, because that reads the entries of the whole store.
func (b *Bus) SweepBlobs(ctx context.Context, grace time.Duration, dry bool) (n int, err error) {
	x, err := b.IndexBlobs(ctx, grace, nil)
	if err == nil {
		n, _, err = x.Sweep(ctx, dry)
	}
	return n, err
}

// BlobIndex counts how many stored events name each blob, as of the time it was made. It covers only blobs that were
// last stored or used before `before`: a blob that is named later gets a new entry, and is not one of these.
type BlobIndex struct {
	b      *Bus
	before time.Time

	mu   sync.Mutex
	old  map[string]oldBlob // by digest
	uses map[string]int
	// countedUpTo is the last sequence that was read, by stream.
	countedUpTo map[string]uint64
	gone        func(*Message) bool
	// weights are the blobs of a policy version, by the digest of its weights; versions are the policy versions of
	// each tenant of each lane, oldest first.
	weights  map[string][]string
	versions map[schemas.Lineage][]policyBlobs
	many     bool // a lane has several versions
	// counted says that uses counts all events. Without old blobs it does not.
	counted bool
	// unused are the digests in old that no event names.
	unused []string
}

type oldBlob struct {
	seq, size uint64
	nuid      string
}

// IndexBlobs reads all events and counts which of the blobs that were last stored or used longer than grace ago are
// named by one. A janitor keeps the index and sweeps with it. Events that are gone do not count; nil: none is.
func (b *Bus) IndexBlobs(
	ctx context.Context, grace time.Duration, gone func(*Message) bool,
) (*BlobIndex, error) {
	x := &BlobIndex{
		b: b, gone: gone, before: time.Now().Add(-grace), old: map[string]oldBlob{}, uses: map[string]int{},
		countedUpTo: map[string]uint64{},
		weights:     map[string][]string{}, versions: map[schemas.Lineage][]policyBlobs{},
	}
	for e, err := range b.blobEntries(ctx) {
		if err != nil {
			return nil, err
		}
		if !e.at.Before(x.before) {
			break // all later entries are younger: using a blob again stores its entry again
		}
		x.old[e.Name] = oldBlob{seq: e.seq, size: e.Size, nuid: e.NUID}
	}
	if len(x.old) > 0 {
		if err := x.countUses(ctx); err != nil {
			return nil, fmt.Errorf("sweep blobs: %w", err)
		}
	}
	for digest := range x.old {
		if x.uses[digest] == 0 {
			x.unused = append(x.unused, digest)
		}
	}
	return x, ctx.Err()
}

// Counts reports whether the index counts events: without blobs that are old enough it does not.
func (x *BlobIndex) Counts() bool { return x.counted }

// Forget tells the index that events were removed. The next Sweep removes the blobs that only they named. Events that
// came after the index was made do not count.
func (x *BlobIndex) Forget(events ...*Message) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, m := range events {
		if m.Seq > x.countedUpTo[m.Stream] {
			continue // it was not counted
		}
		for digest := range x.neededBlobs(m) {
			if x.uses[digest] == 0 {
				continue
			}
			x.uses[digest]--
			if _, ok := x.old[digest]; ok && x.uses[digest] == 0 {
				x.unused = append(x.unused, digest)
			}
		}
	}
}

// Needed returns a function that reports whether an event needs what has a digest, for files of weights that lie
// elsewhere.
func (x *BlobIndex) Needed(ctx context.Context) (func(digest string) bool, error) {
	if !x.counted {
		if err := x.countUses(ctx); err != nil {
			return nil, err
		}
	}
	return func(digest string) bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.uses[digest] > 0
	}, nil
}

// Before returns since when blobs of the index were not stored or used.
func (x *BlobIndex) Before() time.Time { return x.before }

// Sweep removes the blobs that no event names any more. It returns their number and bytes, also beside an error; with
// dry it only counts them.
func (x *BlobIndex) Sweep(ctx context.Context, dry bool) (n int, size uint64, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.unused) > 0 {
		digest := x.unused[0]
		if blob := x.old[digest]; dry {
			n, size = n+1, size+blob.size
		} else if gone, err := x.b.removeBlob(ctx, digest, blob); err != nil {
			return n, size, fmt.Errorf("sweep blob %s: %w", digest, err)
		} else if gone {
			n, size = n+1, size+blob.size
		}
		x.unused = x.unused[1:]
	}
	if dry || !x.b.unfinished.allow(unfinishedEvery) {
		return n, size, nil
	}
	return n, size, x.b.sweepChunks(ctx, x.before)
}

// removeBlob removes a blob for a sweep. It returns false when the blob was used again meanwhile, and keeps it then.
func (b *Bus) removeBlob(ctx context.Context, digest string, blob oldBlob) (gone bool, err error) {
	if err := b.Delete(ctx, schemas.StreamBlobBucket, blob.seq); err != nil {
		return false, err
	}
	// A blob that was used again meanwhile has a new entry.
	_, err = b.Last(ctx, schemas.StreamBlobBucket, blobEntry(schemas.BlobBucket, digest))
	if !errors.Is(err, ErrNotFound) {
		return false, err
	}
	_, err = b.PurgeSubject(ctx, schemas.StreamBlobBucket, chunksOf(schemas.BlobBucket, blob.nuid))
	return err == nil, err
}

type entryOfBlob struct {
	jetstream.ObjectInfo
	seq uint64
	at  time.Time
}

// blobEntries yields the entries of all blobs, in the order in which they were last stored or used. After an error it
// yields no more.
func (b *Bus) blobEntries(ctx context.Context) iter.Seq2[entryOfBlob, error] {
	return func(yield func(entryOfBlob, error) bool) {
		for m, err := range b.Read(ctx, schemas.StreamBlobBucket, []string{"$O." + schemas.BlobBucket + ".M.>"},
			ReadOptions{}) {
			if err != nil {
				yield(entryOfBlob{}, fmt.Errorf("sweep blobs: %w", err))
				return
			}
			e := entryOfBlob{seq: m.Seq, at: m.Time}
			if json.Unmarshal(m.Data, &e.ObjectInfo) != nil || e.NUID == "" {
				continue // not an entry of a blob
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

// sweepChunks removes the chunks of blobs that were never finished, if they were stored before a time.
func (b *Bus) sweepChunks(ctx context.Context, before time.Time) error {
	// List the chunks before the entries: then the entry of a blob that is finished meanwhile is in the list.
	subjects, err := b.Subjects(ctx, schemas.StreamBlobBucket, chunksOf(schemas.BlobBucket, "*"))
	if err != nil {
		return err
	}
	whole := map[string]bool{}
	for e, err := range b.blobEntries(ctx) {
		if err != nil {
			return err
		}
		whole[e.NUID] = true
	}
	for subject := range subjects {
		if whole[strings.TrimPrefix(subject, chunksOf(schemas.BlobBucket, ""))] {
			continue
		}
		m, err := b.Last(ctx, schemas.StreamBlobBucket, subject)
		if err == nil && m.Time.Before(before) {
			_, err = b.PurgeSubject(ctx, schemas.StreamBlobBucket, subject)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("sweep blobs: %w", err)
		}
	}
	return nil
}

// countUses counts, for each blob, the stored events that contain its digest anywhere.
func (x *BlobIndex) countUses(ctx context.Context) error {
	if err := x.countPolicies(ctx); err != nil {
		return err
	}
	for _, stream := range namingStreams {
		events := x.b.Read(ctx, stream, nil, ReadOptions{})
		if spec, ok := schemas.StreamNamed(stream); ok && spec.WorkQueue {
			events = x.b.Queued(ctx, stream)
		}
		for m, err := range events {
			if err != nil {
				return err
			}
			if x.gone == nil || !x.gone(m) {
				for digest := range x.neededBlobs(m) {
					x.uses[digest]++
				}
			}
			x.countedUpTo[stream] = m.Seq
		}
	}
	x.counted = true
	return nil
}

// neededBlobs returns the blobs that an event needs: those that it names, and those with the weights that its sample
// was made with.
func (x *BlobIndex) neededBlobs(m *Message) map[string]bool {
	out := map[string]bool{}
	add := func(digests []string) {
		for _, digest := range digests {
			out[digest] = true
		}
	}
	for digest := range digestsOf(m.Data) {
		if _, ok := x.old[digest]; ok {
			out[digest] = true
		}
		add(x.weights[digest])
	}
	if m.Stream != schemas.StreamTrajectories || !x.many {
		return out
	}
	// A trajectory whose steps were made with several policy versions names the digest of the last one only.
	t := &schemas.Trajectory{}
	if schemas.Decode(m.Data, t) == nil && t.PolicyVersionMin != t.PolicyVersionMax {
		for _, v := range x.versions[t.Lineage()] {
			if t.PolicyVersionMin <= v.number && v.number <= t.PolicyVersionMax {
				add(v.blobs)
			}
		}
	}
	return out
}

const (
	// A lane keeps the weights of its last keptPolicies versions that were not refused, even if no event names them,
	// so that it can go back. They may take keptShare percent of the object store's limit; the last leastPolicies stay
	// in any case.
	keptPolicies, leastPolicies = 8, 2
	keptShare                   = 25
)

type policyBlobs struct {
	number int64
	size   int64
	blobs  []string
}

// countPolicies notes the blobs of each lane's policy versions, and counts those of the kept versions (the newest, as
// long as they do not take too much of the store) as used.
func (x *BlobIndex) countPolicies(ctx context.Context) error {
	info, err := x.b.StreamInfo(ctx, schemas.StreamBlobBucket)
	if err != nil {
		return err
	}
	for m, err := range x.b.Read(ctx, schemas.StreamPolicies, nil, ReadOptions{}) {
		if err != nil {
			return err
		}
		blobs := slices.Collect(maps.Keys(digestsOf(m.Data)))
		p := x.b.decodePolicy(m)
		if p == nil {
			for _, digest := range blobs {
				x.uses[digest]++
			}
			continue
		}
		v := policyBlobs{number: p.PolicyVersion, blobs: blobs}
		for _, f := range p.Files() {
			v.size += f.Size
		}
		x.weights[p.WeightsDigest] = append(x.weights[p.WeightsDigest], blobs...) // a forged policy may name the same
		x.versions[p.Lineage()] = append(x.versions[p.Lineage()], v)
	}
	for of, versions := range x.versions {
		x.many = x.many || len(versions) > 1
		refused, err := x.b.PolicyRefusals(ctx, of)
		if err != nil {
			return err
		}
		kept, room := 0, info.Config.MaxBytes/100*keptShare
		for i, v := range slices.Backward(versions) {
			if refused[v.number] != "" && i < len(versions)-1 {
				continue // a lane goes back to what it served
			}
			kept++
			if room -= v.size; kept > keptPolicies || kept > leastPolicies && room < 0 && info.Config.MaxBytes > 0 {
				break
			}
			for _, digest := range v.blobs {
				x.uses[digest]++
			}
		}
	}
	return nil
}

const digestLength = 64

// digestsOf returns all runs of 64 lower-case hex digits in data: every digest, whatever field it is in.
func digestsOf(data []byte) map[string]bool {
	n, out := 0, map[string]bool{}
	for i, c := range data {
		if c >= '0' && c <= '9' || c >= 'a' && c <= 'f' {
			n++
		} else {
			n = 0
		}
		if n >= digestLength {
			out[string(data[i+1-digestLength:i+1])] = true
		}
	}
	return out
}

func blobEntry(bucket, digest string) string {
	return "$O." + bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(digest))
}

// SweepSample removes the stored steps of a sample that its trajectory t does not name: those of superseded attempts.
// It returns the number of messages removed, also beside an error.
func (b *Bus) SweepSample(ctx context.Context, t *schemas.Trajectory) (uint64, error) {
	subjects, err := b.Subjects(ctx, schemas.StreamSteps,
		schemas.StepsFilter(t.Run, t.UID, strconv.FormatInt(t.SampleIndex, 10), t.Stage))
	if err != nil {
		return 0, fmt.Errorf("sweep sample: %w", err)
	}
	named, attempts := map[string]bool{}, map[string]bool{}
	for i := range t.Steps {
		named[t.StepSubject(i)] = true
	}
	for _, attempt := range t.Attempts() {
		attempts[attempt] = true
	}
	removed, gone := uint64(0), map[string]bool{}
	purge := func(filter string) error {
		if gone[filter] {
			return nil
		}
		gone[filter] = true
		n, err := b.PurgeSubject(ctx, schemas.StreamSteps, filter)
		removed += n
		return err
	}
	for subject := range subjects {
		a, _ := schemas.ParseSubject(subject)
		step := subject
		if a.Part != "" {
			step = strings.TrimSuffix(subject, "."+a.Part)
		}
		if named[step] {
			continue
		}
		var err error
		if attempts[a.Attempt] {
			err = purge(subject)
		} else {
			err = purge(strings.TrimSuffix(step, a.Step) + ">") // all of the attempt at once
		}
		if err != nil {
			return removed, fmt.Errorf("sweep sample: %w", err)
		}
	}
	return removed, nil
}

// SweepDead removes the steps of attempts that no trajectory names, to make space. Call it only when no sampler works
// on any sample: a sample without a trajectory is then made again from its first step.
func (b *Bus) SweepDead(ctx context.Context) error {
	subjects, err := b.Subjects(ctx, schemas.StreamSteps, schemas.StepsFilter("*", "*", "*", "*"))
	if err != nil {
		return fmt.Errorf("sweep dead attempts: %w", err)
	}
	samples := map[string]schemas.Address{}
	for subject := range subjects {
		if a, ok := schemas.ParseSubject(subject); ok {
			samples[schemas.Address{
				Kind: schemas.KindTrajectory, Run: a.Run, UID: a.UID,
				Sample: a.Sample, Stage: a.Stage,
			}.Filter()] = a
		}
	}
	removed := uint64(0)
	for trajectory, a := range samples {
		n, err := b.sweepDeadSample(ctx, trajectory, a)
		if removed += n; err != nil {
			return fmt.Errorf("sweep dead attempts: %w", err)
		}
	}
	if removed > 0 {
		b.log.Warn().Uint64("messages",
			removed).Msg("removed the steps of attempts that ended without a trajectory, to make room")
	}
	return nil
}

// sweepDeadSample removes the steps of dead attempts at one sample: all of its steps when it has no valid trajectory.
// trajectory is the subject of that, a the address of a step.
func (b *Bus) sweepDeadSample(ctx context.Context, trajectory string, a schemas.Address) (uint64, error) {
	var t schemas.Trajectory
	m, err := b.Last(ctx, schemas.StreamTrajectories, trajectory)
	if err == nil && Fits(m, &t) == nil {
		return b.SweepSample(ctx, &t)
	}
	if err != nil && !errors.Is(err, ErrNotFound) {
		return 0, err
	}
	return b.PurgeSubject(ctx, schemas.StreamSteps, schemas.StepsFilter(a.Run, a.UID, a.Sample, a.Stage))
}
