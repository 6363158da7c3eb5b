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
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

const (
	// MaxBlob is the most bytes that GetBlob returns, because it keeps them in memory. CopyBlob has no such limit.
	MaxBlob = 1 << 30
	// blobChunk is the message size of a blob's bytes.
	blobChunk = 256 << 10
	// blobAtOnce bounds the memory that is allocated before any byte has come: the size in a reference may be false.
	blobAtOnce = 4 << 20
)

// RefOf returns the reference under which PutBlob stores data. It stores nothing.
func RefOf(data []byte) schemas.Ref { return refOf(data, sha256.Sum256(data)) }

func refOf(data []byte, sum [sha256.Size]byte) schemas.Ref {
	return schemas.Ref{Bucket: schemas.BlobBucket, Digest: hex.EncodeToString(sum[:]), Size: int64(len(data))}
}

// PutBlob stores data under its sha-256 and returns the reference. It does not write data again that is stored
// already. When the store is full it returns ErrStreamFull; for large data it finds that out before it writes
// anything.
func (b *Bus) PutBlob(ctx context.Context, data []byte) (schemas.Ref, error) {
	sum := sha256.Sum256(data)
	ref := refOf(data, sum)
	if len(data) > schemas.MaxBlobBytes {
		err := fmt.Errorf("put blob: %w: %d bytes; must be at most %d", ErrTooLarge, len(data),
			int64(schemas.MaxBlobBytes))
		return ref, Terminal(schemas.CodeTooLarge, err)
	}
	info, err := b.objectInfo(ctx, ref)
	if err == nil && int64(info.Size) == ref.Size && info.Digest == objectDigest(sum) {
		if time.Since(info.ModTime) < blobFresh || b.touchBlob(ctx, info, ref) {
			return ref, nil
		}
	}
	if err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrCorrupt) {
		return ref, fmt.Errorf("put blob %s: %w", ref.Digest, err)
	}
	if len(data) > blobChunk {
		err = b.checkBlobSpace(ctx, len(data))
	} else {
		err = nil
	}
	began := time.Now()
	if err == nil {
		err = b.storeBlob(ctx, ref, sum, data)
	}
	if errors.Is(err, ErrStreamFull) { // one chunk may fit where the whole blob does not
		b.faultLog.noteFailure(schemas.StreamBlobBucket, len(data), began, err)
	}
	if err != nil {
		return ref, fmt.Errorf("put blob %s: %w", ref.Digest, err)
	}
	b.faultLog.noteStored(schemas.StreamBlobBucket, len(data))
	if info != nil { // the blob that was replaced was not what its name says
		b.removeChunks(ctx, ref.Bucket, info.NUID)
	}
	return ref, nil
}

// objectInfo returns the entry of a blob in the object store, with the time at which the entry was stored. The error
// is ErrNotFound when there is none or it was deleted, and ErrCorrupt when it cannot be read.
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

// storeBlob writes an object: first its chunks, under a new unique name, then the entry that points to them. On an
// error it removes the chunks again. It does not use the library's writer, which publishes without waiting, sometimes
// leaks a goroutine, and never retries.
func (b *Bus) storeBlob(ctx context.Context, ref schemas.Ref, sum [32]byte, data []byte) error {
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
		if err := put(chunksOf(ref.Bucket, info.NUID), fmt.Sprintf("blob.%s.%d", info.NUID, info.Chunks),
			nats.Header{}, chunk); err != nil {
			b.removeChunks(ctx, ref.Bucket, info.NUID)
			return err
		}
		info.Chunks++
	}
	entry, err := json.Marshal(info)
	if err != nil {
		return err
	}
	return put(blobEntry(ref.Bucket, ref.Digest), "blob."+info.NUID,
		nats.Header{jetstream.MsgRollup: {jetstream.MsgRollupSubject}}, entry)
}

// checkBlobSpace returns ErrStreamFull when size bytes do not fit into the object store, before PutBlob writes any of
// them.
func (b *Bus) checkBlobSpace(ctx context.Context, size int) error {
	info, err := b.StreamInfo(ctx, schemas.StreamBlobBucket)
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

// touchBlob stores the entry of a blob again, so that its time is now and a sweep keeps the blob. It returns false
// when the blob is gone or replaced, or the store did not answer; then the caller writes the blob again.
func (b *Bus) touchBlob(ctx context.Context, info *jetstream.ObjectInfo, ref schemas.Ref) bool {
	subject := blobEntry(ref.Bucket, ref.Digest)
	entry, err := b.Last(ctx, "OBJ_"+ref.Bucket, subject)
	if err != nil || !bytes.Contains(entry.Data, []byte(info.NUID)) {
		return false
	}
	_, err = b.js.PublishMsg(ctx, &nats.Msg{Subject: subject, Data: entry.Data, Header: nats.Header{
		jetstream.MsgRollup:                 {jetstream.MsgRollupSubject},
		jetstream.ExpectedLastSubjSeqHeader: {strconv.FormatUint(entry.Seq, 10)},
	}})
	return err == nil
}

func (b *Bus) removeChunks(ctx context.Context, bucket, nuid string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer stop()
	if _, err := b.PurgeSubject(ctx, "OBJ_"+bucket, chunksOf(bucket, nuid)); err != nil { // a later sweep removes them
		b.log.Debug().Err(err).Str("nuid", nuid).Msg("chunks of no object were not removed")
	}
}

func chunksOf(bucket, nuid string) string { return "$O." + bucket + ".C." + nuid }

func objectDigest(sum [32]byte) string {
	return "SHA-256=" + base64.URLEncoding.EncodeToString(sum[:])
}

// HasBlob returns nil when the object store lists the blob; it fetches none of it. It returns ErrNotFound when there is
// none, ErrCorrupt when what is stored under its name has another size or digest, and a terminal error for a
// reference that is not valid.
func (b *Bus) HasBlob(ctx context.Context, ref schemas.Ref) error {
	sum, err := checkRef(ref)
	if err != nil {
		return fmt.Errorf("look up blob: %w", err)
	}
	info, err := b.objectInfo(ctx, ref)
	if err == nil {
		err = checkSize(info, ref)
	}
	if err == nil && info.Digest != objectDigest(sum) {
		err = ErrCorrupt
	}
	if err != nil {
		return fmt.Errorf("look up blob %s: %w", ref.Digest, err)
	}
	return nil
}

func checkSize(info *jetstream.ObjectInfo, ref schemas.Ref) error {
	if int64(info.Size) != ref.Size {
		return fmt.Errorf("%w: %d bytes stored, %d named", ErrCorrupt, info.Size, ref.Size)
	}
	return nil
}

// checkRef returns the sha-256 that a reference names, or a terminal error when the reference is not valid. It does not
// ask the server. All that read a blob call it first, as references come from events of other programs.
func checkRef(ref schemas.Ref) (sum [sha256.Size]byte, err error) {
	refused := func(format string, args ...any) error {
		return Terminal(schemas.CodeInvalid, fmt.Errorf(format, args...))
	}
	if ref.Bucket != schemas.BlobBucket {
		return sum, refused("bucket %q; must be %s", ref.Bucket, schemas.BlobBucket)
	}
	raw, err := hex.DecodeString(ref.Digest)
	if err != nil || len(raw) != sha256.Size || strings.ToLower(ref.Digest) != ref.Digest {
		return sum, refused("digest %q; must be 64 lower-case hex digits", ref.Digest)
	}
	if ref.Size < 0 || ref.Size > schemas.MaxBlobBytes {
		return sum, refused("size: %d; must be 0 to %d bytes, in the reference to %s", ref.Size,
			int64(schemas.MaxBlobBytes), ref.Digest)
	}
	return [sha256.Size]byte(raw), nil
}

// GetBlob returns the bytes of a blob, after it has checked their size and digest. It returns ErrNotFound when there
// is none, and ErrCorrupt when the bytes are not the ones named.
func (b *Bus) GetBlob(ctx context.Context, ref schemas.Ref) ([]byte, error) {
	if ref.Size > MaxBlob {
		return nil, Terminal(schemas.CodeInvalid,
			fmt.Errorf("get blob: %d bytes in %s; must be at most %d", ref.Size, ref.Digest, MaxBlob))
	}
	var data bytes.Buffer
	data.Grow(int(max(0, min(ref.Size, blobAtOnce))))
	err := b.CopyBlob(ctx, ref, &data)
	if err != nil && !errors.Is(err, ErrNotFound) && ctx.Err() == nil {
		// When two clients write a blob at once, the later one removes the chunks of the earlier one, perhaps while we
		// read them.
		data.Reset()
		err = b.CopyBlob(ctx, ref, &data)
	}
	if err != nil {
		return nil, err
	}
	return data.Bytes(), nil
}

// CopyBlob writes a blob of any size to w, with at most one chunk in memory. Its errors are those of GetBlob. After
// an error, w may have got a part of the blob.
func (b *Bus) CopyBlob(ctx context.Context, ref schemas.Ref, w io.Writer) error {
	if _, err := checkRef(ref); err != nil {
		return fmt.Errorf("get blob: %w", err)
	}
	if err := b.copyChunks(ctx, ref, w); err != nil {
		return fmt.Errorf("get blob %s: %w", ref.Digest, err)
	}
	return nil
}

// copyChunks copies the chunks of a blob to w and checks them; CopyBlob calls it, with its errors. It does not use
// the library's reader, which always stops after 5 s, and does not stop earlier when ctx ends.
func (b *Bus) copyChunks(ctx context.Context, ref schemas.Ref, w io.Writer) error {
	info, err := b.objectInfo(ctx, ref)
	if err == nil {
		err = checkSize(info, ref)
	}
	if err != nil {
		return err
	}
	chunks, size, sum := chunksOf(ref.Bucket, info.NUID), int64(0), sha256.New()
	write := func(m *Message) error {
		if size += int64(len(m.Data)); size > ref.Size {
			return fmt.Errorf("%w: more than the %d bytes named", ErrCorrupt, ref.Size)
		}
		_, _ = sum.Write(m.Data) // never fails
		_, err := w.Write(m.Data)
		return err
	}
	stored := b.Read(ctx, "OBJ_"+ref.Bucket, []string{chunks}, ReadOptions{})
	if info.Chunks == 1 { // most images: no consumer for one message
		stored = func(yield func(*Message, error) bool) {
			m, err := b.Last(ctx, "OBJ_"+ref.Bucket, chunks)
			if errors.Is(err, ErrNotFound) {
				err = fmt.Errorf("%w: no bytes stored", ErrCorrupt)
			}
			yield(m, err)
		}
	}
	if ref.Size > 0 {
		for m, err := range stored {
			if err == nil {
				err = write(m)
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
