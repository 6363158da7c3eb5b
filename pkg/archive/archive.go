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
// goes on after a stop, [Read] reads and checks it, [Check] also says what it lacks, [Import] stores its run on a
// server.
//
// A check keeps what Read needs of the files that it has yielded; an importer is the state of one Import, an exporter
// that of one Write. Errors call the archive by its name on the command line, the export.
package archive

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"
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
	// Invalid says why the services refuse a prompt or a control; nil for all other entries. See isInput.
	Invalid error

	event schemas.Event // decoded; nil for blobs, parts and what cannot be decoded
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

// isInput reports whether users publish to the stream, and a service decides what of it is acceptable. What it refuses
// stays in the stream, and so in the archive. All other streams have only what services wrote.
func isInput(stream string) bool {
	return stream == schemas.StreamPrompts || stream == schemas.StreamControl
}

// file returns the name of an event's file.
func (e *Entry) file() string {
	return fmt.Sprintf("%s/%010d-%s%s", e.Stream, e.Seq, e.Subject, eventEnd)
}

// Refs returns the blobs that an event of an archive names; nil for a blob.
func (e *Entry) Refs() []schemas.Ref {
	if e.event == nil {
		return nil
	}
	return refsIn(reflect.ValueOf(e.event))
}

// parseSubjectIn parses the subject of an event of a run, which must be one of the stream.
func parseSubjectIn(stream, subject string) (schemas.Address, error) {
	if !slices.Contains(exportOrder, stream) {
		return schemas.Address{}, fmt.Errorf("%q is no stream of a run; must be one of %s", stream,
			strings.Join(exportOrder, ", "))
	}
	a, ok := schemas.ParseSubject(subject)
	if !ok {
		return a, errors.New("not a valid subject")
	}
	if spec, ok := schemas.StreamOf(schemas.PublishedSubject(subject)); !ok || spec.Name != stream {
		return a, fmt.Errorf("%s has no subject %q", stream, subject)
	}
	return a, nil
}

// decodeEvent decodes an event that is stored on a subject, and says what is wrong with it: it must be valid, and one
// of that subject. The event is nil for parts of large steps and for what cannot be decoded.
func decodeEvent(subject string, data []byte) (schemas.Event, error) {
	e, err := decode(subject, data)
	if e == nil {
		return nil, err
	}
	if err := e.Validate(); err != nil {
		return e, fmt.Errorf("%s: %w", e.Type(), err)
	}
	if k, ok := e.(schemas.Keyed); ok && schemas.StoredSubject(k.Subject()) != subject {
		return e, fmt.Errorf("an event of %q", schemas.StoredSubject(k.Subject()))
	}
	return e, nil
}

// decode decodes an event without a check of its fields. It is nil for parts of large steps and for what cannot be
// decoded.
func decode(subject string, data []byte) (schemas.Event, error) {
	a, _ := schemas.ParseSubject(subject)
	e := newEvent(a.Kind)
	if e == nil {
		return nil, nil
	}
	if err := schemas.Decode(data, e); err != nil {
		return nil, err
	}
	return e, nil
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
