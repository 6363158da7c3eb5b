package bus

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
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
	before := time.Now().Add(-grace)
	type blob struct {
		seq    uint64
		digest string
	}
	old := map[string]blob{} // by NUID
	for e, err := range b.blobEntries(ctx) {
		if err != nil {
			return 0, err
		}
		if !e.at.Before(before) {
			break // and so are all that come: to use a blob again is to store its entry again
		}
		old[e.NUID] = blob{e.seq, e.Name}
	}
	named := map[string]bool{}
	if len(old) > 0 {
		if named, err = b.named(ctx); err != nil {
			return 0, err
		}
	}
	for nuid, o := range old {
		if named[o.digest] {
			continue
		}
		n++
		if dry {
			continue
		}
		if err := b.Delete(ctx, BlobStream, o.seq); err != nil {
			return n, fmt.Errorf("sweep blob %s: %w", o.digest, err)
		}
		// Used again meanwhile: its entry is a new one.
		_, err := b.Last(ctx, BlobStream, blobEntry(schemas.BlobBucket, o.digest))
		if errors.Is(err, ErrNotFound) {
			_, err = b.PurgeSubject(ctx, BlobStream, chunksOf(schemas.BlobBucket, nuid))
		}
		if err != nil {
			return n, fmt.Errorf("sweep blob %s: %w", o.digest, err)
		}
	}
	if dry || !b.blobs.lookForUnfinished() {
		return n, nil
	}
	return n, b.sweepChunks(ctx, before)
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

// named are the digests that stored events have in them, wherever and for whatever: more
// than the blobs, and none less.
func (b *Bus) named(ctx context.Context) (map[string]bool, error) {
	out, spans := map[string]bool{}, map[schemas.Lane]span{}
	for _, stream := range namingStreams {
		events := b.Read(ctx, stream, nil, ReadOptions{})
		if spec, ok := specNamed(stream); ok && spec.WorkQueue {
			events = b.Queued(ctx, stream)
		}
		for m, err := range events {
			if err != nil {
				return nil, fmt.Errorf("sweep blobs: %w", err)
			}
			digests(m.Data, out)
			if stream == schemas.StreamTrajectories {
				switched(m.Data, spans)
			}
		}
	}
	return out, b.namedByPolicies(ctx, out, spans)
}

// span is the oldest and the newest version of a lane that samples had which went on with others.
type span struct{ oldest, newest int64 }

// switched notes a trajectory whose steps are of several versions: it names the last alone.
func switched(data []byte, spans map[schemas.Lane]span) {
	t := &schemas.Trajectory{}
	if schemas.Decode(data, t) != nil || t.PolicyVersionMin == t.PolicyVersionMax {
		return
	}
	s, ok := spans[t.Lane]
	if !ok {
		s = span{t.PolicyVersionMin, t.PolicyVersionMax}
	}
	spans[t.Lane] = span{min(s.oldest, t.PolicyVersionMin), max(s.newest, t.PolicyVersionMax)}
}

// keptPolicies is how many versions of a lane keep their adapters whoever names them: to go back to.
const keptPolicies = 8

// namedByPolicies adds the digests of the versions that are to be kept: the last of each lane, and
// those that samples were made with which are stored.
func (b *Bus) namedByPolicies(ctx context.Context, named map[string]bool, spans map[schemas.Lane]span) error {
	last := map[schemas.Lane][]*Message{}
	for m, err := range b.Read(ctx, schemas.StreamPolicies, nil, ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("sweep blobs: %w", err)
		}
		p := b.policy(m)
		if p == nil {
			digests(m.Data, named)
			continue
		}
		last[p.Lane] = append(last[p.Lane], m)
		if len(last[p.Lane]) > keptPolicies {
			last[p.Lane] = last[p.Lane][1:]
		}
		s, ok := spans[p.Lane]
		if named[p.WeightsDigest] || ok && s.oldest <= p.PolicyVersion && p.PolicyVersion <= s.newest {
			digests(m.Data, named)
		}
	}
	for _, lane := range last {
		for _, m := range lane {
			digests(m.Data, named)
		}
	}
	return nil
}

const digestLength = 64

// digests adds each run of 64 lower-case hex digits.
func digests(data []byte, to map[string]bool) {
	n := 0
	for i, c := range data {
		if c >= '0' && c <= '9' || c >= 'a' && c <= 'f' {
			n++
		} else {
			n = 0
		}
		if n >= digestLength {
			to[string(data[i+1-digestLength:i+1])] = true
		}
	}
}

func blobEntry(bucket, digest string) string {
	return "$O." + bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(digest))
}
