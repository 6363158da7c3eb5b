package export

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// ErrOther means that the run is stored with other content than the archive has.
var ErrOther = errors.New("the run is stored with other content")

// importOrder is the order in which streams are stored: an event comes after the events that it names by sequence.
var importOrder = append(slices.Clone(exportOrder[2:len(exportOrder)-1]), exportOrder[:2]...)

// Imported counts what Import did. The Summary is that of the archive, but for MissingTrajectories: samples whose
// rewards are there, and whose trajectories are not.
type Imported struct {
	Run schemas.Run `json:"run"`
	// Stored counts the events that were stored, AlreadyStored those that were there before.
	Stored        int `json:"stored"`
	AlreadyStored int `json:"there"`
	*Summary
}

// ImportOptions change what Import does.
type ImportOptions struct {
	// WithoutSource stores a pass also where the run whose samples it scored is not stored.
	WithoutSource bool
	// Policies stores the versions of the weights, too: for a store of its own, as a lane that serves has its own.
	Policies bool
}

// Import stores the run of an archive; it reads the archive several times. First it checks the archive, and compares
// it with what is stored of the run: when an event is stored that the archive does not have, it writes nothing and
// returns ErrOther. So an import can be repeated, also after it was cut off: it stores only what is missing. Events
// keep their bytes, except the sequences by which they name others: these get the values of this store. Those of a
// pass name the samples of another run, which must be stored first (ErrNoSource). Content digests stay. No service may
// work on the server: it would treat half a run as a new one.
func Import(ctx context.Context, b *bus.Bus, r io.ReadSeeker, o ImportOptions) (*Imported, error) {
	m := &importer{
		b: b, r: r, options: o, archived: map[key]bool{}, stored: map[key]uint64{},
		newSeqs: map[string]map[uint64]uint64{}, check: newCheck(),
	}
	for _, stream := range importOrder {
		m.newSeqs[stream] = map[uint64]uint64{}
	}
	if err := m.readArchive(ctx); err != nil {
		return nil, err
	}
	failed := func(err error) error { return fmt.Errorf("import run %s: %w", m.result.Run, err) }
	if err := m.compareStored(ctx); err != nil {
		return nil, failed(err)
	}
	if err := m.findSources(ctx); err != nil {
		return nil, failed(err)
	}
	order := append([]string{""}, importOrder...)
	if o.Policies {
		order, m.newSeqs[schemas.StreamPolicies] = append(order, schemas.StreamPolicies), map[uint64]uint64{}
	}
	for _, stream := range order {
		if err := m.storeStream(ctx, stream); err != nil {
			return &m.result, failed(err)
		}
	}
	if n := m.check.notes; n != nil {
		if err := m.b.AddNotes(ctx, m.result.Run, n); err != nil {
			return &m.result, failed(err)
		}
	}
	return &m.result, ctx.Err()
}

// importer is the state of one Import.
type importer struct {
	b       *bus.Bus
	r       io.ReadSeeker
	options ImportOptions
	result  Imported
	// archived are the events of the archive, stored the events on the server with their sequences.
	archived map[key]bool
	stored   map[key]uint64
	// newSeqs maps a sequence of the archive to that of the server, by stream.
	newSeqs map[string]map[uint64]uint64
	check   *check // of the archive
}

// key identifies an event in every store: its subject, and the digest of its content without sequences.
type key struct {
	subject string
	digest  [sha256.Size]byte
}

// readArchive is the first pass of Import: it checks the archive as Check does, and notes the run's name, the keys of
// its events, and what they name by sequence.
func (m *importer) readArchive(ctx context.Context) error {
	if _, err := m.r.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for e, err := range readFiles(m.r, m.check.addFile) {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && e.Blob == "" {
			var k key
			k, err = m.keyOf(e.Subject, e.Seq, e.Data)
			m.archived[k] = true
		}
		if err != nil {
			return err
		}
	}
	m.result.Run, m.result.Summary = m.check.run, m.check.summarize()
	return nil
}

// compareStored is the second step of Import: it notes which events of the run the server has already. It returns
// ErrOther for one that the archive does not have; nothing is written then.
func (m *importer) compareStored(ctx context.Context) error {
	for _, stream := range importOrder {
		for e, err := range storedEvents(ctx, m.b, stream, m.result.Run, 0) {
			if err != nil {
				return err
			}
			k, err := m.keyOf(e.Subject, e.Seq, e.Data)
			if err != nil {
				return err
			}
			if !m.archived[k] {
				differs := "is not in the export"
				if m.check.subjects[e.Subject] != "" {
					differs = "has other content in the export"
				}
				return fmt.Errorf("%w: %q, sequence %d of %s, %s; import it into another store, or remove the run "+
					"first with 'meander runs rm %s'", ErrOther, e.Subject, e.Seq, stream, differs, m.result.Run)
			}
			m.stored[k] = e.Seq
		}
	}
	return ctx.Err()
}

// keyOf returns the key of an event.
func (m *importer) keyOf(subject string, seq uint64, data []byte) (key, error) {
	data, err := m.renumberEvent(subject, seq, data, func(string, uint64) uint64 { return 1 })
	return key{subject, sha256.Sum256(data)}, err
}

// storeStream stores the archive's events of one stream, or with stream "" its blobs. It skips events that the server
// has already. It notes the new sequence of each event, for the events of later streams that name it.
func (m *importer) storeStream(ctx context.Context, stream string) error {
	if _, err := m.r.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for e, err := range readFiles(m.r, m.check.checkUnchanged) {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && e.Stream == stream {
			err = m.storeEntry(ctx, e)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// storeEntry stores a blob or an event of the archive, unless the server has it.
func (m *importer) storeEntry(ctx context.Context, e *Entry) error {
	if e.Blob != "" {
		_, err := m.b.PutBlob(ctx, e.Data)
		return err
	}
	k, err := m.keyOf(e.Subject, e.Seq, e.Data)
	if err != nil {
		return err
	}
	seq, there := m.stored[k]
	if there {
		m.result.AlreadyStored++
	} else if seq, err = m.storeEvent(ctx, e); err != nil {
		return fmt.Errorf("%q: %w", e.Subject, err)
	}
	m.newSeqs[e.Stream][e.Seq], m.stored[k] = seq, seq
	return nil
}

// storeEvent publishes an event of the archive, with the sequences of this server in place of the archive's, and
// returns its own new sequence. missingSeq names an event that was gone when the archive was written: streams drop
// prompts before groups, and trajectories before rewards. It fails if another client stored a different event under
// the subject meanwhile (ErrOther).
func (m *importer) storeEvent(ctx context.Context, e *Entry) (uint64, error) {
	data, err := m.renumberEvent(e.Subject, e.Seq, e.Data, func(stream string, old uint64) uint64 {
		if seq, ok := m.newSeqs[stream][old]; ok {
			return seq
		}
		return missingSeq
	})
	if err != nil {
		return 0, err
	}
	m.result.Stored++
	if e.Stream == schemas.StreamPrompts {
		ack, err := m.b.PublishPrompt(ctx, m.result.Run, data, nil)
		return ack.Seq, err
	}
	ack, err := m.b.PublishRaw(ctx, schemas.PublishedSubject(e.Subject), data, headersOf(e.Subject, data), "")
	if err == nil && ack.Duplicate {
		err = fmt.Errorf("%w: another event was stored meanwhile", ErrOther)
	}
	return ack.Seq, err
}

// renumberEvent returns the bytes of an event in which newSeq has replaced the sequences that name other events. A
// prompt without a uid gets the uid that it had by its old sequence. Events that name no others, and bytes that do
// not decode, are returned as they are.
func (m *importer) renumberEvent(subject string, seq uint64, data []byte,
	newSeq func(stream string, old uint64) uint64,
) ([]byte, error) {
	a, _ := schemas.ParseSubject(subject)
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens, schemas.KindVerdict, schemas.KindControl:
		return data, nil
	}
	e, _ := decode(subject, data)
	if e == nil {
		return data, nil // it has no sequences
	}
	if p, ok := e.(*schemas.Prompt); ok {
		if p.UID != "" {
			return data, nil
		}
		p.UID = p.GroupUID(seq)
	} else {
		walk(reflect.ValueOf(e), func(name string, v reflect.Value) {
			_, field, _ := strings.Cut(name, ".")
			stream := cmp.Or(sequences[name], sequences[field])
			if stream != "" && v.Kind() == reflect.Uint64 && v.Uint() > 0 {
				v.SetUint(newSeq(stream, v.Uint()))
			}
		})
	}
	return schemas.Encode(e)
}

// sequences are the fields that name an event by its sequence, with the stream of that event.
var sequences = map[string]string{
	"PromptSeq": schemas.StreamPrompts, "TrajectorySeq": schemas.StreamTrajectories, "StepRef.Seq": schemas.StreamSteps,
}
