// Package export has runs outside of their streams: as files, and played again.
//
// An archive is one tar file with each stored event of a run, msgpack as it is stored, and the blobs that the events
// name. This package reads it without a server; so can tar and any msgpack library.
//
//	MDR_TRAJECTORIES/0000000017-mdr.v1.trajectory.night.p1.0.main.msgpack
//	MDR_POLICIES/0000000003-mdr.v1.policy.signs.main.msgpack
//	blobs/<sha-256>
//	SHA256SUMS
//
// The number is the event's sequence in the stream, the time of the file is when the event was stored. The last file
// has the SHA-256 of all others, as sha256sum writes and checks it, and in a comment that of the archive up to there,
// which [CheckSeal] compares. A run that was trained on has the versions of the weights that it names.
// [WriteArchive] writes an archive, [WriteArchiveFile] one that goes on after a stop, [ReadArchive] reads and checks
// it, [CheckArchive] also says what it lacks, [Import] stores its run on a server.
//
// A dataset is a folder of files that other programs load, each with whole groups, up to a size, in one of [Datasets]:
//
//   - webdataset: a tar in the layout of WebDataset: UID_INDEX.json, .png or .apng, .safetensors for each sample;
//   - parquet: a row for each sample, with the image as datasets.Image wants it;
//   - safetensors: tensors UID/INDEX/NAME, and the samples' records in the metadata.
//
// A sample's [Record] is the same in all of them. Groups come in the order in which they closed. index.json lists the
// files with their SHA-256. [WriteDataset] goes on where an earlier one of the same folder stopped: the files that the
// index lists never change. [CheckDataset] compares them with the index; it needs no server.
//
// [Play] yields the events of a run, of its streams or of an archive, in the order and with the pauses in which they
// were stored.
package export

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
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// ErrBegun says that an export cannot go on with the file or folder that is there: it is of another run, store or
// format, has changed, or another process writes it.
var ErrBegun = errors.New("cannot go on with the export that is there")

// What the names of files in an archive begin or end with.
const (
	blobFolder = "blobs"
	eventEnd   = ".msgpack"
	sumsFile   = "SHA256SUMS"
	notesFile  = "notes.json"
	// maxEntry bounds the size of one file.
	maxEntry = bus.MaxBlob
	// PartEnd ends the names of files that are not whole yet.
	PartEnd = ".part"
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
// first: a sample whose request is gone by then has its trajectory. The versions of the weights that a trained run
// names come last: they are of lanes, not of runs.
var exportOrder = []string{
	schemas.StreamRequests, schemas.StreamParked, schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamSteps,
	schemas.StreamTrajectories, schemas.StreamVerdicts, schemas.StreamRewards, schemas.StreamAdvantages,
	schemas.StreamControl, schemas.StreamUpdates, schemas.StreamPolicies,
}

// isWorkQueue reports whether a consumer of the stream takes its messages away.
func isWorkQueue(stream string) bool {
	spec, _ := schemas.StreamNamed(stream)
	return spec.WorkQueue
}

// storedEvents yields the events of a run in a stream. It reads the whole of a work queue and skips other runs, because
// a reader with filters would take its messages away. Of other streams it yields what begins at a sequence. After an
// error it yields no more.
func storedEvents(ctx context.Context, b *bus.Bus, stream string, run schemas.Run,
	from uint64,
) iter.Seq2[*bus.Message, error] {
	if !isWorkQueue(stream) {
		return b.Read(ctx, stream, schemas.RunFilters(run)[stream], bus.ReadOptions{FromSeq: from})
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
func (e *Entry) Refs() (refs []schemas.Ref) {
	walk(reflect.ValueOf(e.event), func(_ string, v reflect.Value) {
		if v.Type() == reflect.TypeFor[schemas.Ref]() {
			refs = append(refs, v.Interface().(schemas.Ref))
		}
	})
	return refs
}

// walk calls visit with all values in a decoded event, at any depth, but for single bytes. name is that of a field,
// with its struct: "StepRef.Seq".
func walk(v reflect.Value, visit func(name string, v reflect.Value)) {
	inner := func(name string, v reflect.Value) {
		visit(name, v)
		walk(v, visit)
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			inner("", v.Elem())
		}
	case reflect.Slice, reflect.Array:
		for i := 0; i < v.Len() && v.Type().Elem().Kind() != reflect.Uint8; i++ {
			inner("", v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			inner(v.Type().Name()+"."+v.Type().Field(i).Name, v.Field(i))
		}
	}
}

// parseSubjectIn parses the subject of an event of a run, which must be one of the stream.
func parseSubjectIn(stream, subject string) (schemas.Address, error) {
	if !slices.Contains(exportOrder, stream) {
		return schemas.Address{}, fmt.Errorf("%q is no stream of a run; must be one of %s", stream,
			strings.Join(exportOrder, ", "))
	}
	a, ok := schemas.ParseSubject(subject)
	if !ok {
		return a, errors.New("not a valid subject; a file that a version before v1 wrote can only be read by that " +
			"version")
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
func decode(subject string, data []byte) (e schemas.Event, err error) {
	a, _ := schemas.ParseSubject(subject)
	switch a.Kind {
	case schemas.KindOpening:
		e = &schemas.Opening{}
	case schemas.KindParked:
		e = &schemas.Parked{}
	default:
		var ok bool
		if e, ok = schemas.New(fmt.Sprintf("%s/%d", a.Kind, schemas.Version)); !ok {
			return nil, nil // a part of a step
		}
	}
	if err := schemas.Decode(data, e); err != nil {
		return nil, err
	}
	return e, nil
}

// headersOf returns the headers under which an event is stored.
func headersOf(subject string, data []byte) map[string][]string {
	h := map[string][]string{schemas.HeaderContentType: {schemas.ContentType}}
	if event, _ := decode(subject, data); event != nil {
		h[schemas.HeaderType] = []string{event.Type()}
		outcomes.Said(event, func(name, value string) { h[name] = []string{value} })
	}
	return h
}

// Event returns the decoded event; nil of a blob, a part of an event, and what cannot be decoded.
func (e *Entry) Event() schemas.Event { return e.event }
