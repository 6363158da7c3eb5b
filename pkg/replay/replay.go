// Package replay plays the stored events of a run again: in the order in which they were stored, with the pauses that
// were between them, at any speed. [Events] yields them to this process; [Message] says under which subject an
// event goes to other subscribers, where no stream stores it and no service takes it for work.
package replay

import (
	"context"
	"fmt"
	"iter"
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
}

// Merge yields the stored events of all sources in the order of their times. It moves the From of each source behind
// what it has yielded.
func Merge(ctx context.Context, b *bus.Bus, sources []*Source) iter.Seq2[*bus.Message, error] {
	return func(yield func(*bus.Message, error) bool) {
		type head struct {
			*Source
			next func() (*bus.Message, error, bool)
			m    *bus.Message
		}
		var heads []*head
		// advance reads the next event of a source; false: it has none.
		advance := func(h *head) (ok bool, err error) {
			h.m, err, ok = h.next()
			return ok && err == nil, err
		}
		for _, s := range sources {
			next, stop := iter.Pull2(b.Read(ctx, s.Stream, s.Filters, s.From))
			defer stop()
			h := &head{Source: s, next: next}
			ok, err := advance(h)
			if err != nil {
				yield(nil, err)
				return
			}
			if ok {
				heads = append(heads, h)
			}
		}
		for len(heads) > 0 {
			first := slices.MinFunc(heads, func(a, b *head) int { return a.m.Time.Compare(b.m.Time) })
			m := first.m
			first.From = bus.ReadOptions{FromSeq: m.Seq + 1}
			if !yield(m, nil) {
				return
			}
			ok, err := advance(first)
			if err != nil {
				yield(nil, err)
				return
			}
			if !ok {
				heads = slices.DeleteFunc(heads, func(h *head) bool { return h == first })
			}
		}
	}
}

// kinds are those of a run in the order in which data flow, with their parts. Requests are not among them: those that
// are stored are work that is not done.
var kinds = []struct {
	name, stream string
	part         string
}{
	{name: schemas.KindPrompt, stream: schemas.StreamPrompts},
	{name: schemas.KindControl, stream: schemas.StreamControl},
	{name: schemas.KindGroup, stream: schemas.StreamGroups},
	{name: schemas.KindPlan, stream: schemas.StreamGroups},
	{name: schemas.KindOpening, stream: schemas.StreamRewards},
	{name: schemas.KindStep, stream: schemas.StreamSteps, part: schemas.KindPart},
	{name: schemas.KindTokens, stream: schemas.StreamSteps, part: schemas.KindTokensPart},
	{name: schemas.KindTrajectory, stream: schemas.StreamTrajectories},
	{name: schemas.KindVerdict, stream: schemas.StreamVerdicts},
	{name: schemas.KindReward, stream: schemas.StreamRewards},
	{name: schemas.KindAdvantage, stream: schemas.StreamAdvantages},
	{name: schemas.KindBatch, stream: schemas.StreamAdvantages},
}

// Kinds returns the kinds of events that can be played.
func Kinds() (names []string) {
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// Sources returns the sources of a run's events of some of Kinds.
func Sources(run schemas.Run, of []string) (sources []*Source) {
	for _, k := range kinds {
		if !slices.Contains(of, k.name) {
			continue
		}
		s := &Source{Stream: k.stream, Filters: []string{schemas.Address{Kind: k.name, Run: run}.Filter()}}
		if k.part != "" { // a part comes before its step
			s.Filters = append(s.Filters, schemas.Address{Kind: k.part, Run: run}.Filter())
		}
		sources = append(sources, s)
	}
	return sources
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

// Events yields the events of the sources in the order of their times, each when it is due.
func Events(ctx context.Context, b *bus.Bus, sources []*Source, p Pace) iter.Seq2[*bus.Message, error] {
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

// Root is the first token of subjects that Message may use. No stream of the pipeline stores them, and no service
// listens there.
const Root = "replay"

// CheckPrefix checks the prefix of subjects for Message.
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

// Headers of a message of Message, as the server names them: where the event is stored, and when that happened
// (RFC 3339).
const (
	HeaderStream  = "Nats-Stream"
	HeaderSeq     = "Nats-Sequence"
	HeaderSubject = "Nats-Subject"
	HeaderTime    = "Nats-Time-Stamp"
)

// Message returns the subject and the headers under which an event goes to other subscribers, with its bytes: the
// prefix stands in place of that of the contract. Those of its headers that speak to a server are left out.
func Message(prefix string, m *bus.Message) (subject string, header map[string][]string, err error) {
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
