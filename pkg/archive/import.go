package archive

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"reflect"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// ErrOther means that the run is stored with other content than the archive has.
var ErrOther = errors.New("the run is stored with other content")

// importOrder is the order in which streams are stored: an event comes after the events that it names by sequence.
var importOrder = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories,
	schemas.StreamVerdicts,
	schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamRequests, schemas.StreamParked,
	schemas.StreamControl,
}

// Imported counts what Import did.
type Imported struct {
	Run schemas.Run `json:"run"`
	// Stored counts the events that were stored, AlreadyStored those that were there before.
	Stored        int `json:"stored"`
	AlreadyStored int `json:"there"`
	Blobs         int `json:"blobs"`
	// SourceRun is the run whose samples a pass scored; empty for other runs.
	SourceRun schemas.Run `json:"source_run,omitempty"`
	// MissingTrajectories counts the samples whose rewards are there, and whose trajectories are not.
	MissingTrajectories int `json:"missing_trajectories,omitempty"`
	// MissingBlobs, Refused and Notes are those of the Summary.
	MissingBlobs int      `json:"missing_blobs,omitempty"`
	Refused      int      `json:"refused,omitempty"`
	Notes        []string `json:"notes,omitempty"`
}

// ImportOptions change what Import does.
type ImportOptions struct {
	// WithoutSource stores a pass also where the run whose samples it scored is not stored.
	WithoutSource bool
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
	if err := m.compareStored(ctx); err != nil {
		return nil, fmt.Errorf("import run %s: %w", m.result.Run, err)
	}
	if err := m.findSources(ctx); err != nil {
		return nil, fmt.Errorf("import run %s: %w", m.result.Run, err)
	}
	for _, stream := range append([]string{""}, importOrder...) {
		if err := m.storeStream(ctx, stream); err != nil {
			return &m.result, fmt.Errorf("import run %s: %w", m.result.Run, err)
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

// rewind goes to the beginning of the archive.
func (m *importer) rewind() error {
	_, err := m.r.Seek(0, io.SeekStart)
	return err
}

// readArchive is the first pass of Import: it checks the archive as Check does, and notes the run's name, the keys of
// its events, and what they name by sequence.
func (m *importer) readArchive(ctx context.Context) error {
	if err := m.rewind(); err != nil {
		return err
	}
	s, err := checkAll(m.r, m.check, func(e *Entry) error {
		if e.Blob != "" || ctx.Err() != nil {
			return ctx.Err()
		}
		k, err := m.keyOf(e.Subject, e.Seq, e.Data)
		m.archived[k] = true
		return err
	})
	if err != nil {
		return err
	}
	m.result.Run, m.result.SourceRun = m.check.run, s.SourceRun
	m.result.Refused, m.result.MissingBlobs, m.result.Notes = s.Refused, s.Missing, s.Notes
	return nil
}

// compareStored is the second step of Import: it notes which events of the run the server has already. It returns
// ErrOther for one that the archive does not have; nothing is written then.
func (m *importer) compareStored(ctx context.Context) error {
	filters := schemas.RunFilters(m.result.Run)
	for _, stream := range importOrder {
		for e, err := range storedEvents(ctx, m.b, stream, m.result.Run, filters[stream], 0) {
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
	if err := m.rewind(); err != nil {
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
		m.result.Blobs++
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
	a, _ := schemas.ParseSubject(e.Subject)
	h := map[string][]string{schemas.HeaderContentType: {schemas.ContentType}}
	if event := newEvent(a.Kind); event != nil {
		h[schemas.HeaderType] = []string{event.Type()}
		if schemas.Decode(data, event) == nil {
			if outcome := view.Of(event); outcome != "" {
				h[schemas.HeaderOutcome] = []string{outcome}
			}
		}
	}
	ack, err := m.b.PublishRaw(ctx, schemas.PublishedSubject(e.Subject), data, h, "")
	if err == nil && ack.Duplicate {
		err = fmt.Errorf("%w: another event was stored meanwhile", ErrOther)
	}
	return ack.Seq, err
}

// renumberEvent returns the bytes of an event in which newSeq has replaced the sequences that name other events. A
// prompt without a uid gets the uid that it had by its old sequence. Events that name no others, and bytes that do
// not decode, are returned as they are.
func (m *importer) renumberEvent(
	subject string, seq uint64, data []byte, newSeq func(stream string, old uint64) uint64,
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
		renumberValue(reflect.ValueOf(e), newSeq)
	}
	return schemas.Encode(e)
}

// renumberValue replaces the sequences in a decoded event, at any depth: newSeq gets the stream and the old sequence.
func renumberValue(v reflect.Value, newSeq func(stream string, old uint64) uint64) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			renumberValue(v.Elem(), newSeq)
		}
	case reflect.Slice:
		for i := 0; i < v.Len() && v.Type().Elem().Kind() != reflect.Uint8; i++ {
			renumberValue(v.Index(i), newSeq)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			stream := sequences[v.Type().Field(i).Name]
			if v.Type() == reflect.TypeFor[schemas.StepRef]() && v.Type().Field(i).Name == "Seq" {
				stream = schemas.StreamSteps
			}
			f := v.Field(i)
			if stream == "" || f.Kind() != reflect.Uint64 {
				renumberValue(f, newSeq)
				continue
			}
			if f.Uint() > 0 {
				f.SetUint(newSeq(stream, f.Uint()))
			}
		}
	}
}

// sequences are the fields that name an event by its sequence, with the stream of that event.
var sequences = map[string]string{"PromptSeq": schemas.StreamPrompts, "TrajectorySeq": schemas.StreamTrajectories}
