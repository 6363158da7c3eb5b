// Package archive keeps a run in one file: a tar with each of its stored events as a file of its
// msgpack bytes, and the blobs that they name. It is read without a server, by this package or
// by tar and any msgpack library.
//
//	MDR_TRAJECTORIES/0000000017-mdr.v1.trajectory.night.p1.0.msgpack
//	blobs/<sha-256>
//
// The number is the sequence in the stream, the time of the file when the event was stored.
package archive

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	blobFolder = "blobs"
	eventEnd   = ".msgpack"
	// maxEntry bounds what is read of one file.
	maxEntry = bus.MaxBlob
)

// Entry is an event or a blob of an archive.
type Entry struct {
	// Stream, Seq, Subject and Time are those of a stored event; Blob is the digest of a blob.
	Stream, Subject, Blob string
	Seq                   uint64
	Time                  time.Time
	Data                  []byte
}

// Summary is what an archive has.
type Summary struct {
	Events map[string]int `json:"events"` // by stream
	Blobs  int            `json:"blobs"`
	// Missing are blobs that events name and that are stored no more.
	Missing int   `json:"missing_blobs"`
	Bytes   int64 `json:"bytes"` // of events and blobs
}

// Write writes all that is stored of a run. What is stored while it writes may be in it or not.
func Write(ctx context.Context, b *bus.Bus, run schemas.Run, w io.Writer) (*Summary, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	t, s := tar.NewWriter(w), &Summary{Events: map[string]int{}}
	put := func(name string, at time.Time, data []byte) error {
		s.Bytes += int64(len(data))
		err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: at, Format: tar.FormatPAX})
		if err == nil {
			_, err = t.Write(data)
		}
		return err
	}
	refs, filters := map[schemas.Ref]bool{}, schemas.RunFilters(run)
	for _, stream := range slices.Sorted(maps.Keys(filters)) {
		for m, err := range stored(ctx, b, stream, run, filters[stream]) {
			if err != nil {
				return s, fmt.Errorf("export %s: %w", run, err)
			}
			name := fmt.Sprintf("%s/%010d-%s%s", stream, m.Seq, m.Subject, eventEnd)
			if err := put(name, m.Time, m.Data); err != nil {
				return s, fmt.Errorf("export %s: %w", run, err)
			}
			s.Events[stream]++
			for _, ref := range refsOf(m.Subject, m.Data) {
				refs[ref] = true
			}
		}
	}
	for ref := range refs {
		data, err := b.GetBlob(ctx, ref)
		if errors.Is(err, bus.ErrNotFound) {
			s.Missing++
			continue
		}
		if err == nil {
			err = put(path.Join(blobFolder, ref.Digest), time.Now(), data)
		}
		if err != nil {
			return s, fmt.Errorf("export %s: %w", run, err)
		}
		s.Blobs++
	}
	if err := ctx.Err(); err != nil {
		return s, err
	}
	return s, t.Close()
}

// stored yields the events of a run in a stream. A work queue has no readers beside those who
// take its messages away, and is looked through.
func stored(ctx context.Context, b *bus.Bus, stream string, run schemas.Run, filters []string) iter.Seq2[*bus.Message, error] {
	queue := slices.ContainsFunc(schemas.Streams(), func(s schemas.StreamSpec) bool { return s.Name == stream && s.WorkQueue })
	if !queue {
		return b.Read(ctx, stream, filters, bus.ReadOptions{})
	}
	return func(yield func(*bus.Message, error) bool) {
		for m, err := range b.Queued(ctx, stream) {
			if err == nil {
				if of, ok := schemas.RunOf(m.Subject); !ok || of != run {
					continue
				}
			}
			if !yield(m, err) {
				return
			}
		}
	}
}

// Refs are the blobs that an event of an archive names; a blob names none.
func (e *Entry) Refs() []schemas.Ref {
	if e.Blob != "" {
		return nil
	}
	return refsOf(e.Subject, e.Data)
}

// refsOf are the blobs that an event names.
func refsOf(subject string, data []byte) []schemas.Ref {
	a, _ := schemas.ParseSubject(subject)
	var e schemas.Event
	switch a.Kind {
	case schemas.KindPrompt:
		e = &schemas.Prompt{}
	case schemas.KindGroup:
		e = &schemas.GroupRecord{}
	case schemas.KindPlan:
		e = &schemas.Plan{}
	case schemas.KindRequest, schemas.KindParked:
		e = &schemas.Request{}
	case schemas.KindStep:
		e = &schemas.Step{}
	case schemas.KindTokens:
		e = &schemas.Tokens{}
	case schemas.KindTrajectory:
		e = &schemas.Trajectory{}
	default:
		return nil // the others have no tensors
	}
	if schemas.Decode(data, e) != nil {
		return nil
	}
	return refsIn(reflect.ValueOf(e))
}

// refsIn are all references of a value, wherever they are in it.
func refsIn(v reflect.Value) (refs []schemas.Ref) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			refs = refsIn(v.Elem())
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return nil // bytes
		}
		for i := range v.Len() {
			refs = append(refs, refsIn(v.Index(i))...)
		}
	case reflect.Struct:
		if ref, ok := v.Interface().(schemas.Ref); ok {
			return []schemas.Ref{ref}
		}
		for i := range v.NumField() {
			refs = append(refs, refsIn(v.Field(i))...)
		}
	}
	return refs
}

// Read yields what an archive has, in its order. A blob that is not what its name says, and a file
// that is neither event nor blob, is an error.
func Read(r io.Reader) iter.Seq2[*Entry, error] {
	return func(yield func(*Entry, error) bool) {
		t := tar.NewReader(r)
		for {
			h, err := t.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			var e *Entry
			if err == nil {
				e, err = entry(h, t)
			}
			if err != nil {
				yield(nil, fmt.Errorf("read export: %w", err))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

func entry(h *tar.Header, r io.Reader) (*Entry, error) {
	if h.Typeflag != tar.TypeReg || h.Size > maxEntry {
		return nil, fmt.Errorf("%q: %d bytes of type %q; must be a file of at most %d", h.Name, h.Size, h.Typeflag, maxEntry)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", h.Name, err)
	}
	e := &Entry{Time: h.ModTime, Data: data}
	folder, name := path.Split(h.Name)
	if folder == blobFolder+"/" {
		sum := sha256.Sum256(data)
		if e.Blob = hex.EncodeToString(sum[:]); e.Blob != name {
			return nil, fmt.Errorf("%q: %w", h.Name, bus.ErrCorrupt)
		}
		return e, nil
	}
	e.Stream = strings.TrimSuffix(folder, "/")
	seq, subject, ok := strings.Cut(strings.TrimSuffix(name, eventEnd), "-")
	if e.Seq, err = strconv.ParseUint(seq, 10, 64); err != nil || !ok {
		return nil, fmt.Errorf("%q: no event; must be STREAM/NUMBER-SUBJECT%s", h.Name, eventEnd)
	}
	e.Subject = subject
	return e, nil
}
