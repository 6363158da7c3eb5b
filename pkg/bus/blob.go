package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// MaxBlob is the largest blob that GetBlob returns, in bytes: it is in memory. CopyBlob copies larger ones.
	MaxBlob = 1 << 30
	// blobChunk is the message size of a blob's bytes.
	blobChunk = 256 << 10
	// blobAtOnce bounds what is allocated on the word of a reference alone.
	blobAtOnce = 4 << 20
)

// blobStore is what this process knows of the object store.
type blobStore struct {
	mu sync.Mutex
	// unfinished is when somebody looked last for what was left of blobs that were not finished.
	unfinished time.Time
}

// PutBlob stores data under its sha-256 and returns the reference. Data that is stored
// already is not written again. A full store is ErrStreamFull, before anything is written of what is large.
func (b *Bus) PutBlob(ctx context.Context, data []byte) (schemas.Ref, error) {
	sum := sha256.Sum256(data)
	ref := schemas.Ref{Bucket: schemas.BlobBucket, Digest: hex.EncodeToString(sum[:]), Size: int64(len(data))}
	if len(data) > schemas.MaxBlobBytes {
		err := fmt.Errorf("put blob: %w: %d bytes; must be at most %d", ErrTooLarge, len(data), int64(schemas.MaxBlobBytes))
		return ref, Terminal(schemas.CodeTooLarge, err)
	}
	info, err := b.objectInfo(ctx, ref)
	if err == nil && int64(info.Size) == ref.Size && info.Digest == objectDigest(sum) {
		if time.Since(info.ModTime) < blobFresh || b.refresh(ctx, info, ref) {
			return ref, nil
		}
	}
	if err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrCorrupt) {
		return ref, fmt.Errorf("put blob %s: %w", ref.Digest, err)
	}
	if len(data) > blobChunk {
		err = b.roomForBlob(ctx, len(data))
	} else {
		err = nil
	}
	began := time.Now()
	if err == nil {
		err = b.store(ctx, ref, sum, data)
	}
	if errors.Is(err, ErrStreamFull) { // of which a chunk may fit, where the whole does not
		b.troubles.note(BlobStream, len(data), began, err)
	}
	if err != nil {
		return ref, fmt.Errorf("put blob %s: %w", ref.Digest, err)
	}
	b.troubles.took(BlobStream, len(data))
	if info != nil { // it was not what its name says
		b.dropChunks(ctx, ref.Bucket, info.NUID)
	}
	return ref, nil
}

// objectInfo is the entry of a blob, or ErrNotFound.
func (b *Bus) objectInfo(ctx context.Context, ref schemas.Ref) (*jetstream.ObjectInfo, error) {
	m, err := b.Last(ctx, "OBJ_"+ref.Bucket, blobEntry(ref.Bucket, ref.Digest))
	if err != nil {
		return nil, err
	}
	info := &jetstream.ObjectInfo{}
	if err := json.Unmarshal(m.Data, info); err != nil {
		return nil, fmt.Errorf("%w: entry: %w", ErrCorrupt, err)
	}
	if info.Deleted {
		return nil, ErrNotFound
	}
	info.ModTime = m.Time
	return info, nil
}

// store writes an object: its chunks under a name of their own, then the entry that
// makes them one. The library's writer publishes without waiting, leaves a goroutine
// behind now and then, and does not try again.
func (b *Bus) store(ctx context.Context, ref schemas.Ref, sum [32]byte, data []byte) error {
	size := min(blobChunk, max(1, b.MaxInline()))
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: ref.Digest, Opts: &jetstream.ObjectMetaOptions{ChunkSize: uint32(size)}},
		Bucket:     ref.Bucket, NUID: randomToken(), Size: uint64(ref.Size), Digest: objectDigest(sum),
	}
	put := func(subject, id string, header nats.Header, data []byte) error {
		header.Set(jetstream.MsgIDHeader, id)
		_, err := b.publish(ctx, &nats.Msg{Subject: subject, Header: header, Data: data}, publishOptions{})
		return err
	}
	// One after another: the order of the chunks is the order of the bytes.
	for chunk := range slices.Chunk(data, size) {
		if err := put(chunksOf(ref.Bucket, info.NUID), fmt.Sprintf("blob.%s.%d", info.NUID, info.Chunks), nats.Header{}, chunk); err != nil {
			b.dropChunks(ctx, ref.Bucket, info.NUID)
			return err
		}
		info.Chunks++
	}
	entry, err := json.Marshal(info)
	if err != nil {
		return err
	}
	return put(blobEntry(ref.Bucket, ref.Digest), "blob."+info.NUID, nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}}, entry)
}

// roomForBlob is ErrStreamFull where so many bytes do not fit.
func (b *Bus) roomForBlob(ctx context.Context, size int) error {
	info, err := b.StreamInfo(ctx, BlobStream)
	if err != nil {
		return err
	}
	most, have := info.Config.MaxBytes, info.State.Bytes
	if most <= 0 || have+uint64(size) <= uint64(most) {
		return nil
	}
	return fmt.Errorf("%w: the object store of images, embeddings and weights holds %d of %d bytes, and these are %d",
		ErrStreamFull, have, most, size)
}

// refresh gives a blob that is there the time of now, so that it is not swept as one that nothing names;
// false: it has been, or the store is not to be asked: it is to be written again.
func (b *Bus) refresh(ctx context.Context, info *jetstream.ObjectInfo, ref schemas.Ref) bool {
	subject := blobEntry(ref.Bucket, ref.Digest)
	entry, err := b.Last(ctx, "OBJ_"+ref.Bucket, subject)
	if err != nil || !bytes.Contains(entry.Data, []byte(info.NUID)) {
		return false
	}
	_, err = b.js.PublishMsg(ctx, &nats.Msg{Subject: subject, Data: entry.Data, Header: nats.Header{
		jetstream.MsgRollup: {jetstream.MsgRollupSubject}, jetstream.ExpectedLastSubjSeqHeader: {strconv.FormatUint(entry.Seq, 10)},
	}})
	return err == nil
}

// dropChunks frees the space of an object that was not finished or is replaced, if it can.
func (b *Bus) dropChunks(ctx context.Context, bucket, nuid string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer stop()
	s, err := b.js.Stream(ctx, "OBJ_"+bucket)
	if err == nil {
		err = s.Purge(ctx, jetstream.WithPurgeSubject(chunksOf(bucket, nuid)))
	}
	if err != nil {
		b.log.Debug().Err(err).Str("nuid", nuid).Msg("chunks that no object has stay")
	}
}

func chunksOf(bucket, nuid string) string { return "$O." + bucket + ".C." + nuid }

// objectDigest is how the object store writes a sha-256.
func objectDigest(sum [32]byte) string {
	return "SHA-256=" + base64.URLEncoding.EncodeToString(sum[:])
}

// HasBlob says whether GetBlob would find the blob, without fetching it: ErrNotFound when
// there is none, ErrCorrupt when what is stored under its name is of another size or digest.
func (b *Bus) HasBlob(ctx context.Context, ref schemas.Ref) error {
	sum, err := checkRef(ref)
	if err != nil {
		return fmt.Errorf("look up blob: %w", err)
	}
	info, err := b.objectInfo(ctx, ref)
	switch {
	case err == nil && int64(info.Size) != ref.Size:
		err = fmt.Errorf("%w: %d bytes stored, %d named", ErrCorrupt, info.Size, ref.Size)
	case err == nil && info.Digest != objectDigest(sum):
		err = ErrCorrupt
	}
	if err != nil {
		return fmt.Errorf("look up blob %s: %w", ref.Digest, err)
	}
	return nil
}

// checkRef refuses what names no blob, and returns the sha-256 that it names.
func checkRef(ref schemas.Ref) (sum [sha256.Size]byte, err error) {
	if ref.Bucket != schemas.BlobBucket {
		return sum, fmt.Errorf("bucket %q; must be %s", ref.Bucket, schemas.BlobBucket)
	}
	raw, err := hex.DecodeString(ref.Digest)
	if err != nil || len(raw) != sha256.Size || strings.ToLower(ref.Digest) != ref.Digest {
		return sum, fmt.Errorf("digest %q; must be 64 lower-case hex digits", ref.Digest)
	}
	if ref.Size < 0 || ref.Size > schemas.MaxBlobBytes {
		return sum, fmt.Errorf("%d bytes in %s; must be at most %d", ref.Size, ref.Digest, int64(schemas.MaxBlobBytes))
	}
	return [sha256.Size]byte(raw), nil
}

// GetBlob fetches a blob and checks its size and digest: ErrNotFound when there is
// none, ErrCorrupt when the bytes are not the ones named.
func (b *Bus) GetBlob(ctx context.Context, ref schemas.Ref) ([]byte, error) {
	if ref.Size > MaxBlob {
		return nil, fmt.Errorf("get blob: %d bytes in %s; must be at most %d", ref.Size, ref.Digest, MaxBlob)
	}
	var data bytes.Buffer
	data.Grow(int(max(0, min(ref.Size, blobAtOnce))))
	err := b.CopyBlob(ctx, ref, &data)
	if err != nil && !errors.Is(err, ErrNotFound) && ctx.Err() == nil {
		// Two writers of one blob at once: the later one removes what the earlier one
		// wrote, perhaps under a reader.
		data.Reset()
		err = b.CopyBlob(ctx, ref, &data)
	}
	if err != nil {
		return nil, err
	}
	return data.Bytes(), nil
}

// CopyBlob is GetBlob of any size into w, of which no more than a chunk is in memory. With an error, w has had a part
// of it.
func (b *Bus) CopyBlob(ctx context.Context, ref schemas.Ref, w io.Writer) error {
	if _, err := checkRef(ref); err != nil {
		return fmt.Errorf("get blob: %w", err)
	}
	if err := b.fetch(ctx, ref, w); err != nil {
		return fmt.Errorf("get blob %s: %w", ref.Digest, err)
	}
	return nil
}

// fetch reads the chunks itself: the library's reader ends after 5 s, however large the
// blob and slow the line, and does not end before, when ctx does.
func (b *Bus) fetch(ctx context.Context, ref schemas.Ref, w io.Writer) error {
	info, err := b.objectInfo(ctx, ref)
	if err != nil {
		return err
	}
	if int64(info.Size) != ref.Size {
		return fmt.Errorf("%w: %d bytes stored, %d named", ErrCorrupt, info.Size, ref.Size)
	}
	chunks, size, sum := chunksOf(ref.Bucket, info.NUID), int64(0), sha256.New()
	take := func(m *Message) error {
		if size += int64(len(m.Data)); size > ref.Size {
			return fmt.Errorf("%w: more than the %d bytes named", ErrCorrupt, ref.Size)
		}
		_, _ = sum.Write(m.Data) // never fails
		_, err := w.Write(m.Data)
		return err
	}
	switch {
	case ref.Size == 0:
	case info.Chunks == 1: // most images: no consumer for one message
		m, err := b.Last(ctx, "OBJ_"+ref.Bucket, chunks)
		if errors.Is(err, ErrNotFound) {
			return fmt.Errorf("%w: no bytes stored", ErrCorrupt)
		}
		if err == nil {
			err = take(m)
		}
		if err != nil {
			return err
		}
	default:
		for m, err := range b.Read(ctx, "OBJ_"+ref.Bucket, []string{chunks}, ReadOptions{}) {
			if err == nil {
				err = take(m)
			}
			if err != nil {
				return err
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if size != ref.Size || hex.EncodeToString(sum.Sum(nil)) != ref.Digest {
		return ErrCorrupt
	}
	return nil
}
