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
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// BlobGrace is the least time that a blob stays which nothing names: it is stored before the
	// event that names it.
	BlobGrace = 2 * time.Minute
	// blobFresh is how old a stored blob may be that is named again without a word: an older one is
	// given the time of now, so that it is not swept before its new name is stored.
	blobFresh = BlobGrace / 4
	// unfinishedEvery is how often a connection looks for what was left of blobs that were not
	// finished: it takes the entries of the whole store.
	unfinishedEvery = 10 * time.Minute
)

// namingStreams are those whose events name blobs. Steps have their tensors in parts.
var namingStreams = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamRequests, schemas.StreamParked, schemas.StreamTrajectories, schemas.StreamDead,
}

// SweepBlobs removes the blobs that no stored event names and that were stored or used again longer
// than grace ago; dry: it only counts them. What was left of blobs that were not finished goes too,
// though not at every call: that is rare, and takes the entries of the whole store.
func (b *Bus) SweepBlobs(ctx context.Context, grace time.Duration, dry bool) (n int, err error) {
	x, err := b.IndexBlobs(ctx, grace)
	if err == nil {
		n, _, err = x.Sweep(ctx, dry)
	}
	return n, err
}

// BlobIndex counts the stored events that name blobs, as of when it was made. It has the blobs that were stored or used
// again longer than a grace before; what is named later has a new entry, and is none of these.
type BlobIndex struct {
	b      *Bus
	before time.Time

	mu   sync.Mutex
	old  map[string]oldBlob // by digest
	uses map[string]int
	// last is the last sequence that was read of each stream.
	last map[string]uint64
	// weights are the blobs of a version by the digest of its weights, versions those of each lane in their order.
	weights  map[string][]string
	versions map[schemas.Lane][]version
	// free are those of old that nothing names.
	free []string
}

type oldBlob struct {
	seq, size uint64
	nuid      string
}

// IndexBlobs reads which of the blobs that were stored or used again longer than grace ago are named by stored events.
func (b *Bus) IndexBlobs(ctx context.Context, grace time.Duration) (*BlobIndex, error) {
	x := &BlobIndex{
		b: b, before: time.Now().Add(-grace), old: map[string]oldBlob{}, uses: map[string]int{}, last: map[string]uint64{},
		weights: map[string][]string{}, versions: map[schemas.Lane][]version{},
	}
	for e, err := range b.blobEntries(ctx) {
		if err != nil {
			return nil, err
		}
		if !e.at.Before(x.before) {
			break // and so are all that come: to use a blob again is to store its entry again
		}
		x.old[e.Name] = oldBlob{seq: e.seq, size: e.Size, nuid: e.NUID}
	}
	if len(x.old) > 0 {
		if err := x.named(ctx); err != nil {
			return nil, fmt.Errorf("sweep blobs: %w", err)
		}
	}
	for digest := range x.old {
		if x.uses[digest] == 0 {
			x.free = append(x.free, digest)
		}
	}
	return x, ctx.Err()
}

// Forget says that events were freed: what they alone named goes with the next Sweep.
func (x *BlobIndex) Forget(events ...*Message) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, m := range events {
		if m.Seq > x.last[m.Stream] {
			continue // it was not counted
		}
		for digest := range x.names(m) {
			if x.uses[digest] == 0 {
				continue
			}
			x.uses[digest]--
			if _, ok := x.old[digest]; ok && x.uses[digest] == 0 {
				x.free = append(x.free, digest)
			}
		}
	}
}

// Sweep removes the blobs that nothing names any more, and returns their number and bytes; dry: it only counts them.
func (x *BlobIndex) Sweep(ctx context.Context, dry bool) (n int, size uint64, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for len(x.free) > 0 {
		digest := x.free[0]
		if blob := x.old[digest]; dry {
			n, size = n+1, size+blob.size
		} else if gone, err := x.b.removeBlob(ctx, digest, blob); err != nil {
			return n, size, fmt.Errorf("sweep blob %s: %w", digest, err)
		} else if gone {
			n, size = n+1, size+blob.size
		}
		x.free = x.free[1:]
	}
	if dry || !x.b.blobs.lookForUnfinished() {
		return n, size, nil
	}
	return n, size, x.b.sweepChunks(ctx, x.before)
}

// removeBlob removes a blob, unless it was used again meanwhile.
func (b *Bus) removeBlob(ctx context.Context, digest string, blob oldBlob) (gone bool, err error) {
	if err := b.Delete(ctx, BlobStream, blob.seq); err != nil {
		return false, err
	}
	// Used again meanwhile: its entry is a new one.
	if _, err = b.Last(ctx, BlobStream, blobEntry(schemas.BlobBucket, digest)); !errors.Is(err, ErrNotFound) {
		return false, err
	}
	_, err = b.PurgeSubject(ctx, BlobStream, chunksOf(schemas.BlobBucket, blob.nuid))
	return err == nil, err
}

// lookForUnfinished says whether it is time to.
func (s *blobStore) lookForUnfinished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.unfinished) < unfinishedEvery {
		return false
	}
	s.unfinished = time.Now()
	return true
}

// entryOfBlob is what the object store keeps of a blob, and the message that has it.
type entryOfBlob struct {
	jetstream.ObjectInfo
	seq uint64
	at  time.Time
}

// blobEntries are those of all blobs, the one that was stored or used last at the end.
func (b *Bus) blobEntries(ctx context.Context) iter.Seq2[entryOfBlob, error] {
	return func(yield func(entryOfBlob, error) bool) {
		for m, err := range b.Read(ctx, BlobStream, []string{"$O." + schemas.BlobBucket + ".M.>"}, ReadOptions{}) {
			if err != nil {
				yield(entryOfBlob{}, fmt.Errorf("sweep blobs: %w", err))
				return
			}
			e := entryOfBlob{seq: m.Seq, at: m.Time}
			if json.Unmarshal(m.Data, &e.ObjectInfo) != nil || e.NUID == "" {
				continue // none of ours
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

// sweepChunks removes the bytes of blobs that were never finished.
func (b *Bus) sweepChunks(ctx context.Context, before time.Time) error {
	// First the bytes: of what is finished meanwhile, the entry is seen.
	subjects, err := b.Subjects(ctx, BlobStream, chunksOf(schemas.BlobBucket, "*"))
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
		m, err := b.Last(ctx, BlobStream, subject)
		if err == nil && m.Time.Before(before) {
			_, err = b.PurgeSubject(ctx, BlobStream, subject)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("sweep blobs: %w", err)
		}
	}
	return nil
}

// named counts the stored events that have digests of blobs in them, wherever and for whatever.
func (x *BlobIndex) named(ctx context.Context) error {
	if err := x.policies(ctx); err != nil {
		return err
	}
	for _, stream := range namingStreams {
		events := x.b.Read(ctx, stream, nil, ReadOptions{})
		if spec, ok := specNamed(stream); ok && spec.WorkQueue {
			events = x.b.Queued(ctx, stream)
		}
		for m, err := range events {
			if err != nil {
				return err
			}
			for digest := range x.names(m) {
				x.uses[digest]++
			}
			x.last[stream] = m.Seq
		}
	}
	return nil
}

// names are the blobs that an event needs: those that it names, and the weights that a sample was made with.
func (x *BlobIndex) names(m *Message) map[string]bool {
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
	if m.Stream != schemas.StreamTrajectories {
		return out
	}
	// A trajectory whose steps are of several versions names the last alone.
	t := &schemas.Trajectory{}
	if schemas.Decode(m.Data, t) == nil && t.PolicyVersionMin != t.PolicyVersionMax {
		for _, v := range x.versions[t.Lane] {
			if t.PolicyVersionMin <= v.number && v.number <= t.PolicyVersionMax {
				add(v.blobs)
			}
		}
	}
	return out
}

const (
	// keptPolicies is how many versions of a lane keep their weights whoever names them, to go back to, and keptShare
	// the part of the object store's limit that they may take, in percent. The last two stay whatever they take.
	keptPolicies, leastPolicies = 8, 2
	keptShare                   = 25
)

// version is a version of a lane's weights, with the blobs that it names.
type version struct {
	number int64
	size   int64
	blobs  []string
}

// policies notes what the versions of each lane name, and counts those that are kept as in use.
func (x *BlobIndex) policies(ctx context.Context) error {
	info, err := x.b.StreamInfo(ctx, BlobStream)
	if err != nil {
		return err
	}
	for m, err := range x.b.Read(ctx, schemas.StreamPolicies, nil, ReadOptions{}) {
		if err != nil {
			return err
		}
		blobs := slices.Collect(maps.Keys(digestsOf(m.Data)))
		p := x.b.policy(m)
		if p == nil {
			for _, digest := range blobs {
				x.uses[digest]++
			}
			continue
		}
		v := version{number: p.PolicyVersion, blobs: blobs}
		if p.Adapter != nil {
			v.size = p.Adapter.File.Size
		}
		for _, ref := range p.Weights {
			v.size += ref.Size
		}
		x.weights[p.WeightsDigest] = blobs
		x.versions[p.Lane] = append(x.versions[p.Lane], v)
	}
	for _, versions := range x.versions {
		room := info.Config.MaxBytes / 100 * keptShare
		for i, v := range slices.Backward(versions) {
			age := len(versions) - i
			if room -= v.size; age > keptPolicies || age > leastPolicies && room < 0 && info.Config.MaxBytes > 0 {
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

// digestsOf are all runs of 64 lower-case hex digits.
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
