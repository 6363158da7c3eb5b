package archive

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Write writes all stored events of a run, and their blobs, as a tar. Services may work on the run meanwhile: an
// event that is stored during Write is either in the archive together with the events that it names, or left out.
// Blobs that are gone are counted in Summary.Missing, messages that are no events, and left out, in Summary.LeftOut. A
// pass has no samples of its own: they are in an archive of Summary.SourceRun. An error leaves an archive without its
// list of digests, which Read refuses.
func Write(ctx context.Context, b *bus.Bus, run schemas.Run, w io.Writer) (*Summary, error) {
	if err := schemas.CheckToken("run", run); err != nil {
		return nil, err
	}
	x := newExporter(b, run, w)
	err := x.write(ctx)
	return x.summarize(), err
}

// exporter is the state of one export: what the archive has up to here.
type exporter struct {
	bus     *bus.Bus
	run     schemas.Run
	files   *tar.Writer
	summary *Summary
	sums    strings.Builder
	refs    map[schemas.Ref]string // the event that names it
	blobs   map[string]bool        // that are written
	// leftOut and missing are for Summary.Notes, leftBefore is leftOut as it was at the last file.
	leftOut, leftBefore, missing notes
	// limits are the sequences up to which events are written, by stream; empty until the work queues are.
	limits map[string]uint64
	// created says when each stream was made, as of then.
	created map[string]time.Time
	// lastEvent is the last one outside of the work queues. lastBlob is the digest of the last blob.
	lastEvent *Entry
	lastBlob  string
	newest    time.Time // of the events
	// added is called after each file.
	added func() error
}

func newExporter(b *bus.Bus, run schemas.Run, w io.Writer) *exporter {
	return &exporter{
		bus: b, run: run, files: tar.NewWriter(w), summary: &Summary{Events: map[string]int{}},
		refs: map[schemas.Ref]string{}, blobs: map[string]bool{}, limits: map[string]uint64{},
		created: map[string]time.Time{},
		added:   func() error { return nil },
	}
}

// summarize returns what the archive has and lacks.
func (x *exporter) summarize() *Summary {
	x.summary.LeftOut, x.summary.Missing = x.leftOut.n, x.missing.n
	x.summary.Notes = append(x.leftOut.list(), x.missing.list()...)
	return x.summary
}

// write writes what is not in the archive yet.
func (x *exporter) write(ctx context.Context) error {
	err := x.writeEvents(ctx)
	if err == nil {
		err = x.writeBlobs(ctx)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = x.addFile(sumsFile, x.newest, []byte(x.sums.String()))
	}
	if err == nil {
		err = x.files.Close()
	}
	if err != nil {
		return fmt.Errorf("export %s: %w", x.run, err)
	}
	return nil
}

// writeEvents writes the events behind the last one.
func (x *exporter) writeEvents(ctx context.Context) error {
	filters, order := schemas.RunFilters(x.run), exportOrder
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
		for m, err := range storedEvents(ctx, x.bus, stream, x.run, filters[stream], from) {
			if err != nil {
				return err
			}
			if len(x.limits) > 0 && m.Seq > x.limits[stream] {
				break
			}
			e := &Entry{Stream: stream, Seq: m.Seq, Subject: m.Subject, Time: m.Time, Data: m.Data}
			if e.event, err = decodeEvent(m.Subject, m.Data); err != nil && !isInput(stream) {
				// No service reads it, and Read would refuse the archive for it.
				x.leftOut.add("left out: sequence %d of %s, %q: %v", m.Seq, stream, m.Subject, err)
				continue
			}
			if err := x.addFile(e.file(), m.Time, m.Data); err != nil {
				return err
			}
			x.count(e)
			if err := x.added(); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeBlobs writes the blobs that the events name, in the order of their digests, behind the last one.
func (x *exporter) writeBlobs(ctx context.Context) error {
	for _, ref := range slices.SortedFunc(maps.Keys(x.refs),
		func(a, b schemas.Ref) int { return cmp.Compare(a.Digest, b.Digest) }) {
		if x.blobs[ref.Digest] {
			continue
		}
		if ref.Digest < x.lastBlob {
			x.missing.add(missingBlob, ref.Digest, x.refs[ref]) // it was gone before the stop
			continue
		}
		data, err := x.bus.GetBlob(ctx, ref)
		if errors.Is(err, bus.ErrNotFound) {
			x.missing.add(missingBlob, ref.Digest, x.refs[ref])
			continue
		}
		if err == nil {
			err = x.addFile(path.Join(blobFolder, ref.Digest), x.newest, data)
		}
		if err != nil {
			return err
		}
		x.count(&Entry{Blob: ref.Digest})
		if err := x.added(); err != nil {
			return err
		}
	}
	return nil
}

// addFile writes one file of the archive.
func (x *exporter) addFile(name string, at time.Time, data []byte) error {
	err := x.files.WriteHeader(&tar.Header{
		Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: at, Format: tar.FormatPAX,
	})
	if err == nil {
		_, err = x.files.Write(data)
	}
	if name != sumsFile {
		x.addSum(name, data)
	}
	return err
}

// addSum enters a file in the list of digests.
func (x *exporter) addSum(name string, data []byte) {
	x.summary.Bytes += int64(len(data))
	fmt.Fprintf(&x.sums, "%x  %s\n", sha256.Sum256(data), name)
}

// count notes a file that is in the archive.
func (x *exporter) count(e *Entry) {
	x.leftBefore = x.leftOut
	if e.Blob != "" {
		x.summary.Blobs++
		x.blobs[e.Blob], x.lastBlob = true, e.Blob
		return
	}
	x.summary.Events[e.Stream]++
	if e.Time.After(x.newest) {
		x.newest = e.Time
	}
	for _, ref := range e.Refs() {
		if x.refs[ref] == "" {
			x.refs[ref] = e.file()
		}
	}
	x.summary.SourceRun = max(x.summary.SourceRun, sourceOf(e.event))
	if !isWorkQueue(e.Stream) {
		x.lastEvent = e
	}
}
