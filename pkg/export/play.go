package export

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Source is the events of a stream that match the filters, those behind From.
type Source struct {
	Stream  string
	Filters []string
	From    bus.ReadOptions
	// Archive has the events; nil: the server has them.
	Archive io.ReaderAt
}

// Count returns how many events the source has. An error is of the server, such as bus.ErrPermission, or of the
// archive.
func (s *Source) Count(ctx context.Context, b *bus.Bus) (n uint64, err error) {
	if s.Archive == nil {
		for m, err := range b.Read(ctx, s.Stream, s.Filters, bus.ReadOptions{HeadersOnly: true}) {
			if err != nil {
				return 0, err
			}
			return 1 + m.Pending(), nil
		}
		return 0, nil
	}
	for _, err := range s.readArchive(func(*tar.Header, io.Reader) (*Entry, error) { return nil, nil }) {
		if err != nil {
			return 0, err
		}
		n++
	}
	return n, nil
}

// readArchive yields what read makes of the files of an archive that belong to the source.
func (s *Source) readArchive(read func(*tar.Header, io.Reader) (*Entry, error)) iter.Seq2[*Entry, error] {
	return func(yield func(*Entry, error) bool) {
		for files := tar.NewReader(io.NewSectionReader(s.Archive, 0, math.MaxInt64)); ; {
			header, err := files.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			var e *Entry
			if err == nil {
				stream, name, _ := strings.Cut(header.Name, "/")
				_, subject, _ := strings.Cut(strings.TrimSuffix(name, eventEnd), "-")
				if stream != s.Stream ||
					!slices.ContainsFunc(s.Filters, func(f string) bool { return schemas.Matches(f, subject) }) {
					continue
				}
				e, err = read(header, files)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// events yields the events of the source.
func (s *Source) events(ctx context.Context, b *bus.Bus) iter.Seq2[*bus.Message, error] {
	if s.Archive == nil {
		return b.Read(ctx, s.Stream, s.Filters, s.From)
	}
	return func(yield func(*bus.Message, error) bool) {
		for e, err := range s.readArchive(readEntry) {
			m := &bus.Message{}
			if err == nil {
				m = &bus.Message{
					Subject: e.Subject, Stream: e.Stream, Seq: e.Seq, Time: e.Time, Data: e.Data,
					Header: headersOf(e.Subject, e.Data),
				}
			}
			if !yield(m, err) {
				return
			}
		}
	}
}

// Merge yields the stored events of all sources in the order of their times. It moves the From of each source behind
// what it has yielded.
func Merge(ctx context.Context, b *bus.Bus, sources []*Source) iter.Seq2[*bus.Message, error] {
	return func(yield func(*bus.Message, error) bool) {
		next := make([]func() (*bus.Message, error, bool), len(sources))
		heads := make([]*bus.Message, len(sources)) // nil: it has no more
		advance := func(i int) (err error) {
			heads[i], err, _ = next[i]()
			return err
		}
		for i, s := range sources {
			var stop func()
			next[i], stop = iter.Pull2(s.events(ctx, b))
			defer stop()
			if err := advance(i); err != nil {
				yield(nil, err)
				return
			}
		}
		for {
			first := -1
			for i, m := range heads {
				if m != nil && (first < 0 || m.Time.Before(heads[first].Time)) {
					first = i
				}
			}
			if first < 0 {
				return
			}
			sources[first].From = bus.ReadOptions{FromSeq: heads[first].Seq + 1}
			if !yield(heads[first], nil) {
				return
			}
			if err := advance(first); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// kinds are those of a run in the order in which data flow. Requests are not among them: those that are stored are work
// that is not done.
var kinds = []string{
	schemas.KindPrompt, schemas.KindControl, schemas.KindGroup, schemas.KindPlan, schemas.KindOpening, schemas.KindStep,
	schemas.KindTokens, schemas.KindTrajectory, schemas.KindVerdict, schemas.KindRating,
	schemas.KindStepReward, schemas.KindSelection, schemas.KindReward, schemas.KindAdvantage, schemas.KindBatch,
}

// Kinds returns the kinds of events that can be played.
func Kinds() []string { return slices.Clone(kinds) }

// Sources returns the sources of a run's events of some of Kinds.
func Sources(run schemas.Run, of []string) (sources []*Source) {
	for _, k := range kinds {
		if !slices.Contains(of, k) {
			continue
		}
		for stream, filters := range schemas.RunFilters(run) { // those of a step's parts begin as that of the step
			other := func(filter string) bool { return !strings.HasPrefix(filter, schemas.KindPrefix(k)) }
			if filters = slices.DeleteFunc(filters, other); len(filters) > 0 {
				sources = append(sources, &Source{Stream: stream, Filters: filters})
			}
		}
	}
	return sources
}

// ArchiveSources returns the sources of an archive's events of some of Kinds, and its run.
func ArchiveSources(file io.ReaderAt, of []string) (sources []*Source, run schemas.Run, err error) {
	for e, err := range ReadArchive(io.NewSectionReader(file, 0, math.MaxInt64)) {
		if err != nil {
			return nil, "", err
		}
		if e.Blob == "" {
			run, _ = schemas.RunOf(e.Subject)
		}
	}
	sources = Sources(run, of)
	for _, s := range sources {
		s.Archive = file
	}
	return sources, run, nil
}

// Pace says when events are due.
type Pace struct {
	// Speed is how many times as fast as in the run the events come; 0: at once.
	Speed float64
	// MaxPause is the longest pause between two events; 0: as it was, by Speed.
	MaxPause time.Duration
	// Wait waits until an event is due, so long after the first one; nil waits by the clock. Events that are late,
	// because what takes them is slow, come at once.
	Wait func(ctx context.Context, due time.Duration) error
}

// longest is the latest that an event is due; the sum of two fits in time.Duration.
const longest = 100 * 365 * 24 * time.Hour

// Play yields the events of the sources in the order of their times, each when it is due.
func Play(ctx context.Context, b *bus.Bus, sources []*Source, p Pace) iter.Seq2[*bus.Message, error] {
	return func(yield func(*bus.Message, error) bool) {
		var last, begin time.Time
		due := time.Duration(0)
		for m, err := range Merge(ctx, b, sources) {
			if err == nil && p.Speed > 0 {
				if last.IsZero() {
					last, begin = m.Time, time.Now()
				}
				pause := time.Duration(min(max(0, float64(m.Time.Sub(last))/p.Speed), float64(longest)))
				if p.MaxPause > 0 {
					pause = min(pause, p.MaxPause)
				}
				last, due = m.Time, min(due+pause, longest)
				if p.Wait != nil {
					err = p.Wait(ctx, due)
				} else {
					err = sleepUntil(ctx, begin.Add(due))
				}
			}
			if !yield(m, err) || err != nil {
				return
			}
		}
	}
}

// sleepUntil returns at that time, or the cause why ctx ended before.
func sleepUntil(ctx context.Context, at time.Time) error {
	if ctx.Err() != nil { // of two that are ready, select takes either
		return context.Cause(ctx)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(time.Until(at)):
		return nil
	}
}

// Root is the first token of subjects that PlayMessage may use. No stream of the pipeline stores them, and no service
// listens there.
const Root = "replay"

// CheckPrefix checks the prefix of subjects for PlayMessage.
func CheckPrefix(prefix string) error {
	tokens := strings.Split(prefix, ".")
	for _, t := range tokens {
		if tokens[0] != Root || schemas.CheckToken("", t) != nil {
			return fmt.Errorf("%q; must be %q, or that with more tokens of A-Z a-z 0-9 _ -, e.g. %q", prefix, Root,
				Root+".night")
		}
	}
	return nil
}

// Headers of a message of PlayMessage, as the server names them: where the event is stored, and when that happened
// (RFC 3339).
const (
	HeaderStream  = "Nats-Stream"
	HeaderSeq     = "Nats-Sequence"
	HeaderSubject = "Nats-Subject"
	HeaderTime    = "Nats-Time-Stamp"
)

// PlayMessage returns the subject and the headers under which an event goes to other subscribers, with its bytes: the
// prefix stands in place of that of the contract. Those of its headers that speak to a server are left out.
func PlayMessage(prefix string, m *bus.Message) (subject string, header map[string][]string, err error) {
	if err := CheckPrefix(prefix); err != nil {
		return "", nil, err
	}
	rest, ok := schemas.SubjectTail(m.Subject)
	if !ok {
		return "", nil, fmt.Errorf("%q: no subject of an event", m.Subject)
	}
	header = map[string][]string{
		HeaderStream: {m.Stream}, HeaderSeq: {strconv.FormatUint(m.Seq, 10)}, HeaderSubject: {m.Subject},
		HeaderTime: {m.Time.UTC().Format(time.RFC3339Nano)},
	}
	for name, values := range m.Header {
		if !strings.HasPrefix(name, "Nats-") && name != schemas.HeaderReply {
			header[name] = values
		}
	}
	return prefix + "." + rest, header, nil
}
