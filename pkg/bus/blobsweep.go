package bus

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
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
)

// namingStreams are those whose events name blobs. Steps have their tensors in parts.
var namingStreams = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamRequests, schemas.StreamParked, schemas.StreamTrajectories, schemas.StreamDead,
}

// SweepBlobs removes the blobs that no stored event names and that were stored or used again longer
// than grace ago, and what was left of blobs that were not finished; dry: it only counts them.
func (b *Bus) SweepBlobs(ctx context.Context, grace time.Duration, dry bool) (n int, err error) {
	before := time.Now().Add(-grace)
	type blob struct {
		seq    uint64
		digest string
	}
	old, whole := map[string]blob{}, map[string]bool{} // by NUID
	for m, err := range b.Read(ctx, BlobStream, []string{"$O." + schemas.BlobBucket + ".M.>"}, ReadOptions{}) {
		if err != nil {
			return 0, fmt.Errorf("sweep blobs: %w", err)
		}
		var info jetstream.ObjectInfo
		if json.Unmarshal(m.Data, &info) != nil || info.NUID == "" {
			continue // none of ours
		}
		whole[info.NUID] = true
		if m.Time.Before(before) {
			old[info.NUID] = blob{m.Seq, info.Name}
		}
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
	return n, b.sweepChunks(ctx, whole, before, dry)
}

// sweepChunks removes the bytes of blobs that were never finished.
func (b *Bus) sweepChunks(ctx context.Context, whole map[string]bool, before time.Time, dry bool) error {
	subjects, err := b.Subjects(ctx, BlobStream, chunksOf(schemas.BlobBucket, "*"))
	if err != nil || dry {
		return err
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
	out := map[string]bool{}
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
		}
	}
	return out, nil
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
