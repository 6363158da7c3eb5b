// Package archive keeps a run in one file: a tar that has each stored event of the run as a file with its msgpack
// bytes, and the blobs that the events name. This package reads it without a server; so can tar and any msgpack
// library.
//
//	MDR_TRAJECTORIES/0000000017-mdr.v1.trajectory.night.p1.0.msgpack
//	blobs/<sha-256>
//	SHA256SUMS
//
// The number is the event's sequence in the stream, the time of the file is when the event was stored. The last file
// has the SHA-256 of all others, as sha256sum writes and checks it. [Write] writes an archive, [WriteFile] one that
// goes on after a stop, [Read] reads and checks it, [Import] stores its run on a server.
//
// A check keeps the digests of the files that Read has yielded; an importer is the state of one Import, an exporter
// that of one Write. Errors call the archive by its name on the command line, the export.
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
	sumsFile   = "SHA256SUMS"
	// maxEntry bounds the size of one file.
	maxEntry = bus.MaxBlob
)

// Entry is an event or a blob of an archive.
type Entry struct {
	// Stream, Seq, Subject and Time describe a stored event. Blob is the digest of a blob, empty for an event.
	Stream, Subject, Blob string
	Seq                   uint64
	Time                  time.Time
	Data                  []byte
}

// Summary counts the content of an archive.
type Summary struct {
	Events map[string]int `json:"events"` // by stream
	Blobs  int            `json:"blobs"`
	// Missing counts the blobs that events name and that are no longer stored.
	Missing int   `json:"missing_blobs"`
	Bytes   int64 `json:"bytes"` // of events and blobs
	// Before are those of Bytes that an earlier WriteFile had written.
	Before int64 `json:"bytes_before,omitempty"`
	// Removed says that events which an earlier WriteFile had written are no longer stored: later ones may lack, too.
	Removed bool `json:"removed_meanwhile,omitempty"`
}

// exportOrder is the order in which streams are written: steps before the trajectories that name them. Requests come
// first: a sample whose request is gone by then has its trajectory.
var exportOrder = []string{
	schemas.StreamRequests, schemas.StreamParked, schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamSteps,
	schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamAdvantages,
	schemas.StreamControl,
}

// isWorkQueue reports whether a consumer of the stream takes its messages away.
func isWorkQueue(stream string) bool {
	named := func(s schemas.StreamSpec) bool { return s.Name == stream && s.WorkQueue }
	return slices.ContainsFunc(schemas.Streams(), named)
}

// storedEvents yields the events of a run in a stream, for Write and for Import, which compares them with an archive.
// It reads the whole of a work queue and skips other runs, because a reader with filters would take its messages
// away. Of other streams it yields what begins at a sequence. After an error it yields no more.
func storedEvents(
	ctx context.Context, b *bus.Bus, stream string, run schemas.Run, filters []string, from uint64,
) iter.Seq2[*bus.Message, error] {
	if !isWorkQueue(stream) {
		return b.Read(ctx, stream, filters, bus.ReadOptions{FromSeq: from})
	}
	return func(yield func(*bus.Message, error) bool) {
		for m, err := range b.Queued(ctx, stream) {
			if err == nil {
				if eventRun, ok := schemas.RunOf(m.Subject); !ok || eventRun != run {
					continue
				}
			}
			if !yield(m, err) {
				return
			}
		}
	}
}

// Refs returns the blobs that an event of an archive names; nil for a blob.
func (e *Entry) Refs() []schemas.Ref {
	if e.Blob != "" {
		return nil
	}
	return refsOf(e.Subject, e.Data)
}

// refsOf returns the blobs that an event names; nil for what is not an event.
func refsOf(subject string, data []byte) []schemas.Ref {
	e := decoded(subject, data)
	if e == nil {
		return nil
	}
	return refsIn(reflect.ValueOf(e))
}

// decoded returns a decoded event; nil for what is not an event.
func decoded(subject string, data []byte) schemas.Event {
	a, _ := schemas.ParseSubject(subject)
	e := newEvent(a.Kind)
	if e == nil || schemas.Decode(data, e) != nil {
		return nil
	}
	return e
}

// newEvent returns an empty event of a kind, to decode stored bytes into; nil for kinds that are no events of their
// own: the parts of large steps.
func newEvent(kind string) schemas.Event {
	switch kind {
	case schemas.KindPrompt:
		return &schemas.Prompt{}
	case schemas.KindGroup:
		return &schemas.GroupRecord{}
	case schemas.KindPlan:
		return &schemas.Plan{}
	case schemas.KindOpening:
		return &schemas.Opening{}
	case schemas.KindRequest:
		return &schemas.Request{}
	case schemas.KindParked:
		return &schemas.Parked{}
	case schemas.KindStep:
		return &schemas.Step{}
	case schemas.KindTokens:
		return &schemas.Tokens{}
	case schemas.KindTrajectory:
		return &schemas.Trajectory{}
	case schemas.KindVerdict:
		return &schemas.Verdict{}
	case schemas.KindReward:
		return &schemas.Reward{}
	case schemas.KindAdvantage:
		return &schemas.Advantage{}
	case schemas.KindBatch:
		return &schemas.Batch{}
	case schemas.KindControl:
		return &schemas.Control{}
	}
	return nil
}

// refsIn returns all references to blobs in a decoded event, at any depth, so that Write can add these blobs.
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

// Read yields the entries of an archive in order. An archive that is not as it was written ends with an error that
// names the file: a file with other bytes, a step that is not the one its trajectory names, a file that is neither
// event nor blob, or an archive that ends too early.
func Read(r io.Reader) iter.Seq2[*Entry, error] {
	return func(yield func(*Entry, error) bool) {
		files, checks := tar.NewReader(r), newCheck()
		for {
			header, err := files.Next()
			if errors.Is(err, io.EOF) {
				if !checks.complete {
					yield(nil, fmt.Errorf("read export: it ends without %s: it was cut off", sumsFile))
				}
				return
			}
			var e *Entry
			if err == nil {
				e, err = readEntry(header, files)
			}
			if err == nil {
				err = checks.addFile(header.Name, e)
			}
			if errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: it was cut off", err)
			}
			if err != nil {
				yield(nil, fmt.Errorf("read export: %w", err))
				return
			}
			if header.Name != sumsFile && !yield(e, nil) {
				return
			}
		}
	}
}

// readEntry reads one file of an archive. It checks the digest of a blob, and takes stream, sequence and subject of
// an event from the file's name. Read ends with its error, which names the file.
func readEntry(header *tar.Header, r io.Reader) (*Entry, error) {
	if header.Typeflag != tar.TypeReg || header.Size > maxEntry {
		return nil, fmt.Errorf("%q: %d bytes of type %q; must be a file of at most %d", header.Name, header.Size,
			header.Typeflag, maxEntry)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", header.Name, err)
	}
	e := &Entry{Time: header.ModTime, Data: data}
	if header.Name == sumsFile {
		return e, nil
	}
	folder, name := path.Split(header.Name)
	if folder == blobFolder+"/" {
		sum := sha256.Sum256(data)
		if e.Blob = hex.EncodeToString(sum[:]); e.Blob != name {
			return nil, fmt.Errorf("%q: %w", header.Name, bus.ErrCorrupt)
		}
		return e, nil
	}
	e.Stream = strings.TrimSuffix(folder, "/")
	seq, subject, ok := strings.Cut(strings.TrimSuffix(name, eventEnd), "-")
	if e.Seq, err = strconv.ParseUint(seq, 10, 64); err != nil || !ok {
		return nil, fmt.Errorf("%q: no event; must be STREAM/NUMBER-SUBJECT%s", header.Name, eventEnd)
	}
	e.Subject = subject
	return e, nil
}
