package export

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// WriteArchive writes all stored events of a run, and their blobs, as a tar. Services may work on the run meanwhile: an
// event that is stored meanwhile is either in the archive together with the events that it names, or left out.
// Blobs that are gone are counted in Summary.Missing, messages that are no events, and left out, in Summary.LeftOut. A
// pass has no samples of its own: they are in an archive of Summary.SourceRun. An error leaves an archive without its
// list of digests, which ReadArchive refuses.
func WriteArchive(ctx context.Context, b *bus.Bus, run schemas.Run, w io.Writer) (*Summary, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	x := newExporter(b, run, w, sha256.New())
	err := x.write(ctx)
	return x.summarize(), err
}

// exporter is the state of one export: what the archive has up to here.
type exporter struct {
	*tally
	bus   *bus.Bus
	files *tar.Writer
	sums  strings.Builder
	sum   hash.Hash // of all bytes written
	// leftBefore is leftOut as it was at the last file.
	leftBefore notes
	// limits are the sequences up to which events are written, by stream; empty until the work queues are.
	limits map[string]uint64
	// created says when each stream was made, as of then.
	created map[string]time.Time
	// lastEvent is the last one outside of the work queues. lastBlob is the digest of the last blob.
	lastEvent *Entry
	lastBlob  string
	newest    time.Time // of the events
	noted     bool      // the archive has the notes
	// added is called after each file.
	added func() error
}

func newExporter(b *bus.Bus, run schemas.Run, w io.Writer, sum hash.Hash) *exporter {
	return &exporter{
		tally: newTally(run), bus: b, files: tar.NewWriter(io.MultiWriter(w, sum)), sum: sum,
		limits:  map[string]uint64{},
		created: map[string]time.Time{}, added: func() error { return nil },
	}
}

// write writes what is not in the archive yet.
func (x *exporter) write(ctx context.Context) error {
	for _, write := range []func() error{
		func() error { return x.writeEvents(ctx) },
		func() error { return x.writeBlobs(ctx) },
		func() error { return x.writeNotes(ctx) },
		ctx.Err,
		x.writeSums,
		x.files.Close,
	} {
		if err := write(); err != nil {
			return fmt.Errorf("export %s: %w", x.run, err)
		}
	}
	return nil
}

// writeSums writes the list of digests, and the digest of all that is before it.
func (x *exporter) writeSums() error {
	if err := x.files.Flush(); err != nil {
		return err
	}
	list := fmt.Sprintf("%s%s%x\n", x.sums.String(), sealMark, x.sum.Sum(nil))
	return x.addFile(sumsFile, x.newest, []byte(list))
}

// writeEvents writes the events behind the last one.
func (x *exporter) writeEvents(ctx context.Context) error {
	order := exportOrder
	if x.lastEvent != nil {
		order = order[slices.Index(order, x.lastEvent.Stream):]
	}
	for _, stream := range order {
		if !isWorkQueue(stream) && len(x.limits) == 0 {
			// Events are written up to these sequences. Those of later streams are read first: then each event that
			// they name has a sequence within the limit of its own stream.
			for _, of := range slices.Backward(exportOrder) {
				info, err := x.bus.StreamInfo(ctx, of)
				if err != nil {
					return err
				}
				x.limits[of], x.created[of] = info.State.LastSeq, info.Created
			}
		}
		from := uint64(0)
		if x.lastEvent != nil && x.lastEvent.Stream == stream {
			from = x.lastEvent.Seq + 1
		}
		events := storedEvents(ctx, x.bus, stream, x.run, from)
		if stream == schemas.StreamPolicies {
			events = x.policies(ctx, from)
		}
		for m, err := range events {
			if err != nil {
				return err
			}
			if len(x.limits) > 0 && m.Seq > x.limits[stream] {
				break
			}
			e := &Entry{Stream: stream, Seq: m.Seq, Subject: m.Subject, Time: m.Time, Data: m.Data}
			if e.event, e.Invalid = decodeEvent(m.Subject, m.Data); e.Invalid != nil && !isInput(stream) {
				// No service reads it, and ReadArchive would refuse the archive for it.
				x.leftOut.add("left out: sequence %d of %s, %q: %v", m.Seq, stream, m.Subject, e.Invalid)
				continue
			}
			if err := x.addEntry(e, e.file(), m.Time); err != nil {
				return err
			}
		}
	}
	return nil
}

// policies yields the policies with the weights that a trained run names, from a sequence on; of one that was announced
// again the last. Of a run that no trainer told of there are none.
func (x *exporter) policies(ctx context.Context, from uint64) iter.Seq2[*bus.Message, error] {
	return func(yield func(*bus.Message, error) bool) {
		if !x.trained {
			return
		}
		last := map[weights]*bus.Message{}
		for m, err := range x.bus.Read(ctx, schemas.StreamPolicies, nil, bus.ReadOptions{}) {
			if err != nil {
				yield(nil, err)
				return
			}
			p := &schemas.Policy{}
			named := m.Seq <= x.limits[schemas.StreamPolicies] && bus.Fits(m, p) == nil &&
				(x.weights[weights{p.Lineage(), p.WeightsDigest, 0}] ||
					x.weights[weights{p.Lineage(), "", p.PolicyVersion}])
			if named {
				last[weights{p.Lineage(), p.WeightsDigest, 0}] = m
			}
		}
		for _, m := range slices.SortedFunc(maps.Values(last), func(a, b *bus.Message) int {
			return cmp.Compare(a.Seq, b.Seq)
		}) {
			if m.Seq >= from && !yield(m, nil) {
				return
			}
		}
	}
}

// writeBlobs writes the blobs that the events name, in the order of their digests, behind the last one.
func (x *exporter) writeBlobs(ctx context.Context) error {
	for _, digest := range slices.Sorted(maps.Keys(x.refs)) {
		if x.blobs[digest] || digest < x.lastBlob { // it was written, or gone before the stop
			continue
		}
		data, err := x.bus.GetBlob(ctx, x.refs[digest].Ref)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err == nil {
			err = x.addEntry(&Entry{Blob: digest, Data: data}, path.Join(blobFolder, digest), x.newest)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// writeNotes writes what people say of the run, if there is anything and it is not in the archive yet.
func (x *exporter) writeNotes(ctx context.Context) error {
	all, err := x.bus.Notes(ctx, x.run)
	if err != nil || all[x.run] == nil || x.noted {
		return err
	}
	data, err := json.Marshal(all[x.run])
	if err == nil {
		err = x.addFile(notesFile, x.newest, data)
	}
	if err == nil {
		x.noteSum(notesFile, data)
	}
	return err
}

// noteSum notes the digest of a file that is in the archive.
func (x *exporter) noteSum(name string, data []byte) {
	fmt.Fprintf(&x.sums, "%x  %s\n", sha256.Sum256(data), name)
	x.noted = x.noted || name == notesFile
}

// addEntry writes an event or a blob.
func (x *exporter) addEntry(e *Entry, name string, at time.Time) error {
	if err := x.addFile(name, at, e.Data); err != nil {
		return err
	}
	x.note(name, e)
	return x.added()
}

// addFile writes one file of the archive.
func (x *exporter) addFile(name string, at time.Time, data []byte) error {
	err := x.files.WriteHeader(&tar.Header{
		Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: at, Format: tar.FormatPAX,
	})
	if err == nil {
		_, err = x.files.Write(data)
	}
	return err
}

// note counts a file that is in the archive.
func (x *exporter) note(name string, e *Entry) {
	x.noteSum(name, e.Data)
	x.leftBefore = x.leftOut
	x.count(e)
	if e.Blob != "" {
		x.lastBlob = e.Blob
		return
	}
	if e.Time.After(x.newest) {
		x.newest = e.Time
	}
	if !isWorkQueue(e.Stream) {
		x.lastEvent = e
	}
}
