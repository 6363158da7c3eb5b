package archive

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// ErrOther means that the run is stored with other content than the archive has.
var ErrOther = errors.New("the run is stored with other content")

// importOrder is the order in which streams are stored: an event comes after the events that it names by sequence.
var importOrder = []string{
	schemas.StreamPrompts, schemas.StreamGroups, schemas.StreamSteps, schemas.StreamTrajectories, schemas.StreamVerdicts,
	schemas.StreamRewards, schemas.StreamAdvantages, schemas.StreamRequests, schemas.StreamParked, schemas.StreamControl,
}

// Imported counts what Import did.
type Imported struct {
	Run schemas.Run `json:"run"`
	// Stored counts the events that were stored, There those that were there before.
	Stored int `json:"stored"`
	There  int `json:"there"`
	Blobs  int `json:"blobs"`
}

// Import stores the run of an archive; it reads the archive several times. First it checks the archive, and compares
// it with what is stored of the run: when an event is stored that the archive does not have, it writes nothing and
// returns ErrOther. So an import can be repeated, also after it was cut off: it stores only what is missing. Events
// keep their bytes, except the sequences by which they name others: these get the values of this store. Content
// digests stay. No service may work on the server: it would treat half a run as a new one.
func Import(ctx context.Context, b *bus.Bus, r io.ReadSeeker) (*Imported, error) {
	m := &importer{b: b, r: r, archived: map[key]bool{}, stored: map[key]uint64{}, seqs: map[string]map[uint64]uint64{}}
	for _, stream := range importOrder {
		m.seqs[stream] = map[uint64]uint64{}
	}
	if err := m.readArchive(ctx); err != nil {
		return nil, err
	}
	if err := m.compareStored(ctx); err != nil {
		return nil, fmt.Errorf("import run %s: %w", m.done.Run, err)
	}
	for _, stream := range append([]string{""}, importOrder...) {
		if err := m.storeStream(ctx, stream); err != nil {
			return &m.done, fmt.Errorf("import run %s: %w", m.done.Run, err)
		}
	}
	return &m.done, ctx.Err()
}

// importer is the state of one Import.
type importer struct {
	b    *bus.Bus
	r    io.ReadSeeker
	done Imported
	// archived are the events of the archive, stored the events on the server with their sequences.
	archived map[key]bool
	stored   map[key]uint64
	// seqs maps a sequence of the archive to that of the server, by stream.
	seqs map[string]map[uint64]uint64
}

// key identifies an event in every store: its subject, and the digest of its content without sequences.
type key struct {
	subject string
	digest  [sha256.Size]byte
}

// entries calls each with all entries of the archive, from its beginning.
func (m *importer) entries(each func(e *Entry) error) error {
	if _, err := m.r.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for e, err := range Read(m.r) {
		if err == nil {
			err = each(e)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readArchive checks the archive and notes its run and events.
func (m *importer) readArchive(ctx context.Context) error {
	return m.entries(func(e *Entry) error {
		if e.Blob != "" || ctx.Err() != nil {
			return ctx.Err()
		}
		if !slices.Contains(importOrder, e.Stream) {
			return fmt.Errorf("read export: %s: no stream of a run", e.Stream)
		}
		run, ok := schemas.RunOf(e.Subject)
		if !ok || m.done.Run != "" && run != m.done.Run {
			return fmt.Errorf("read export: %q is no event of run %q", e.Subject, m.done.Run)
		}
		m.done.Run = run
		k, err := m.keyOf(e.Subject, e.Seq, e.Data)
		m.archived[k] = true
		return err
	})
}

// compareStored notes what is stored of the run, and returns ErrOther when the archive does not have all of that.
func (m *importer) compareStored(ctx context.Context) error {
	filters := schemas.RunFilters(m.done.Run)
	for _, stream := range importOrder {
		for e, err := range storedEvents(ctx, m.b, stream, m.done.Run, filters[stream]) {
			if err != nil {
				return err
			}
			k, err := m.keyOf(e.Subject, e.Seq, e.Data)
			if err != nil {
				return err
			}
			if !m.archived[k] {
				return fmt.Errorf("%w: %s has %q (sequence %d), which the export does not have, or otherwise; "+
					"import it into another store, or remove the run first with 'meander runs rm %s'",
					ErrOther, stream, e.Subject, e.Seq, m.done.Run)
			}
			m.stored[k] = e.Seq
		}
	}
	return ctx.Err()
}

// keyOf returns the key of an event.
func (m *importer) keyOf(subject string, seq uint64, data []byte) (key, error) {
	data, err := m.renumbered(subject, seq, data, func(string, uint64) (uint64, error) { return 1, nil })
	return key{subject, sha256.Sum256(data)}, err
}

// storeStream stores the archive's events of a stream; with stream "", its blobs.
func (m *importer) storeStream(ctx context.Context, stream string) error {
	return m.entries(func(e *Entry) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case e.Stream != stream:
			return nil
		case e.Blob != "":
			m.done.Blobs++
			_, err := m.b.PutBlob(ctx, e.Data)
			return err
		}
		k, err := m.keyOf(e.Subject, e.Seq, e.Data)
		if err != nil {
			return err
		}
		seq, there := m.stored[k]
		if there {
			m.done.There++
		} else if seq, err = m.store(ctx, e); err != nil {
			return fmt.Errorf("%q: %w", e.Subject, err)
		}
		m.seqs[stream][e.Seq], m.stored[k] = seq, seq
		return nil
	})
}

// store publishes an event with the sequences of this store, and returns its own sequence.
func (m *importer) store(ctx context.Context, e *Entry) (uint64, error) {
	data, err := m.renumbered(e.Subject, e.Seq, e.Data, func(stream string, old uint64) (uint64, error) {
		seq, ok := m.seqs[stream][old]
		if !ok && stream != schemas.StreamPrompts { // prompts may be removed while their groups stay
			return 0, fmt.Errorf("it names sequence %d of %s, which the export does not have", old, stream)
		}
		return max(seq, 1), nil
	})
	if err != nil {
		return 0, err
	}
	m.done.Stored++
	if e.Stream == schemas.StreamPrompts {
		ack, err := m.b.PublishPrompt(ctx, m.done.Run, data, nil)
		return ack.Seq, err
	}
	a, _ := schemas.ParseSubject(e.Subject)
	h := map[string][]string{schemas.HeaderContentType: {schemas.ContentType}}
	if event := eventOf(a.Kind); event != nil {
		h[schemas.HeaderType] = []string{event.Type()}
	}
	ack, err := m.b.PublishRaw(ctx, schemas.PublishedSubject(e.Subject), data, h, "")
	if err == nil && ack.Duplicate {
		err = fmt.Errorf("%w: another event was stored meanwhile", ErrOther)
	}
	return ack.Seq, err
}

// renumbered returns the bytes of an event with other sequences, which of returns for those in the event. A prompt
// without a uid gets the uid that it had by its sequence.
func (m *importer) renumbered(
	subject string, seq uint64, data []byte, of func(stream string, old uint64) (uint64, error),
) ([]byte, error) {
	a, _ := schemas.ParseSubject(subject)
	e := eventOf(a.Kind)
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens, schemas.KindVerdict, schemas.KindControl:
		return data, nil
	}
	if e == nil || schemas.Decode(data, e) != nil {
		return data, nil // it has none
	}
	if p, ok := e.(*schemas.Prompt); ok {
		if p.UID != "" {
			return data, nil
		}
		p.UID = p.GroupUID(seq)
	} else if err := renumber(reflect.ValueOf(e), of); err != nil {
		return nil, err
	}
	return schemas.Encode(e)
}

// renumber replaces the sequences in a value, at any depth.
func renumber(v reflect.Value, of func(stream string, old uint64) (uint64, error)) (err error) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			err = renumber(v.Elem(), of)
		}
	case reflect.Slice:
		for i := 0; i < v.Len() && err == nil && v.Type().Elem().Kind() != reflect.Uint8; i++ {
			err = renumber(v.Index(i), of)
		}
	case reflect.Struct:
		for i := 0; i < v.NumField() && err == nil; i++ {
			stream := sequences[v.Type().Field(i).Name]
			if v.Type() == reflect.TypeFor[schemas.StepRef]() && v.Type().Field(i).Name == "Seq" {
				stream = schemas.StreamSteps
			}
			f := v.Field(i)
			if stream == "" || f.Kind() != reflect.Uint64 {
				err = renumber(f, of)
				continue
			}
			if f.Uint() > 0 {
				var seq uint64
				seq, err = of(stream, f.Uint())
				f.SetUint(seq)
			}
		}
	}
	return err
}

// sequences are the fields that name an event by its sequence, with the stream of that event.
var sequences = map[string]string{"PromptSeq": schemas.StreamPrompts, "TrajectorySeq": schemas.StreamTrajectories}
