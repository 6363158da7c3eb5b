package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/schemas"
)

// A guarded subject keeps what came first, whoever sent it. What is there and is not the
// event that the subject is for must not keep that out: whoever has the true event, or
// reads the subject, displaces it. It is copied whole to the dead letters and deleted by
// its sequence, so that of two who do so at once, neither hits what the other has stored.

// maxDisplaced is how much in a row one publish displaces, before it is an error that may pass.
const maxDisplaced = 16

// Against adds to what a stored event must be to stay on its subject, where it came
// before the one that is published: check finds what is wrong with it, or fails with err.
// Without Against it must be a valid event of this very subject.
func Against[E schemas.Keyed](check func(stored E) (fault, err error)) PublishOption {
	return func(o *publishOptions) {
		o.against = func(stored schemas.Keyed) (fault, err error) { return check(stored.(E)) }
	}
}

// checkEvents makes the check of what has the subject of e.
func (o *publishOptions) checkEvents(e schemas.Keyed) {
	against := o.against
	o.check = func(m *Message) (fault, err error) {
		stored := reflect.New(reflect.TypeOf(e).Elem()).Interface().(schemas.Keyed)
		if fault := Fits(m, stored); fault != nil || against == nil {
			return fault, nil
		}
		return against(stored)
	}
}

// Fits decodes a stored message into e and says what is wrong with it: it must be a valid
// event, on the subject that it names itself.
func Fits(m *Message, e schemas.Keyed) error {
	if err := schemas.DecodeValid(m.Data, e); err != nil {
		return err
	}
	if subject := schemas.StoredSubject(e.Subject()); subject != m.Subject {
		return fmt.Errorf("an event of %q, stored on %q", subject, m.Subject)
	}
	return nil
}

// errOther is what is wrong with bytes where only one payload may be.
var errOther = errors.New("not the bytes that its one writer has for it")

// unique says whether a stream keeps one message on a subject.
func unique(subject string) (spec schemas.StreamSpec, ok bool) {
	spec, ok = specOf(subject)
	return spec, ok && (spec.Guarded || spec.WorkQueue)
}

// contest looks at what had the subject of m first, where the server took m for a
// duplicate. It returns that message if it stays, and nil when m is to be sent again:
// what had the subject was displaced, or nothing had it and the message id was somebody
// else's. Then m has no id any more: the server remembers those of what is gone.
func (b *Bus) contest(ctx context.Context, m *nats.Msg, first *Message, check func(*Message) (fault, err error)) (*Message, error) {
	if first == nil {
		spec, _ := specOf(m.Subject)
		var err error
		first, err = b.Last(ctx, spec.Name, schemas.StoredSubject(m.Subject))
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
	}
	if first != nil {
		if bytes.Equal(first.Data, m.Data) {
			return first, nil
		}
		fault, err := check(first)
		if err != nil {
			return nil, err
		}
		if fault == nil {
			return first, nil
		}
		if err := b.Displace(ctx, first, fault); err != nil {
			return nil, err
		}
	}
	m.Header.Del(jetstream.MsgIDHeader)
	return nil, nil
}

// Displace takes a stored message off its subject, for the event that the subject is for:
// it goes to the dead letters whole, with what is wrong with it, and is then deleted.
func (b *Bus) Displace(ctx context.Context, m *Message, fault error) error {
	b.log.Warn().Err(fault).Str("subject", m.Subject).Uint64("stream_seq", m.Seq).Msg("displaced: not the event that its subject is for")
	if err := b.Dead(ctx, writerOf(m.Subject), schemas.CodeDisplaced, fault.Error(), m); err != nil {
		return err
	}
	return b.Delete(ctx, m.Stream, m.Seq)
}

// Claimed returns what a guarded subject holds and decodes it into e, or ErrNotFound.
// What does not fit (Fits), or has a fault that check finds (nil: none), is displaced and
// counts as not there.
func (b *Bus) Claimed(ctx context.Context, stream, subject string, e schemas.Keyed, check func() (fault, err error)) (*Message, error) {
	m, err := b.Last(ctx, stream, subject)
	if err != nil {
		return nil, err
	}
	fault := Fits(m, e)
	if fault == nil && check != nil {
		if fault, err = check(); err != nil {
			return nil, err
		}
	}
	if fault == nil {
		return m, nil
	}
	if err := b.Displace(ctx, m, fault); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("%q of %s: %w: what it held is displaced", subject, stream, ErrNotFound)
}

// writerOf is the stage that writes the events of a subject, or that takes them in from
// outside.
func writerOf(subject string) string {
	a, _ := schemas.ParseSubject(subject)
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens, schemas.KindTrajectory:
		return "sampler"
	case schemas.KindReward, schemas.KindVerdict:
		return "reward"
	case schemas.KindAdvantage, schemas.KindBatch:
		return "advantage"
	}
	return "intake"
}

// Answers says what is wrong with a stored trajectory as the answer to a request: it must
// have what the request says, and steps that are stored.
func (b *Bus) Answers(ctx context.Context, t *schemas.Trajectory, r *schemas.Request) (fault, err error) {
	if fault := r.AnsweredBy(t); fault != nil {
		return fault, nil
	}
	return b.CheckSteps(ctx, t)
}

// Group reads the record of a group, or returns ErrNotFound: there is none for events
// that no prompt of this event plane asked for.
func (b *Bus) Group(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	record := &schemas.GroupRecord{}
	if _, err := b.Claimed(ctx, schemas.StreamGroups, schemas.GroupSubject(run, uid), record, nil); err != nil {
		return nil, fmt.Errorf("look up the group %s of run %s: %w", uid, run, err)
	}
	return record, nil
}

// Result reads the result of a group of so many samples in a batch, or returns ErrNotFound while
// it has none.
func (b *Bus) Result(ctx context.Context, run schemas.Run, uid schemas.UID, size int64, batch string) (*schemas.Advantage, error) {
	a := &schemas.Advantage{}
	check := func() (fault, err error) { return a.Of(size, batch), nil }
	if _, err := b.Claimed(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid), a, check); err != nil {
		return nil, fmt.Errorf("look up the result of group %s of run %s: %w", uid, run, err)
	}
	return a, nil
}

// CheckSteps says what is wrong with the steps that a completed trajectory names: each
// must be stored on the subject of its attempt. What its age has removed is not missed.
// The steps are not read; that each is the one named, its digest says to who reads it.
func (b *Bus) CheckSteps(ctx context.Context, t *schemas.Trajectory) (fault, err error) {
	if t.StopReason != schemas.StopCompleted {
		return nil, nil
	}
	kind := schemas.KindStep
	if t.Text != nil {
		kind = schemas.KindTokens
	}
	for _, attempt := range t.Attempts() {
		filter := schemas.Address{Kind: kind, Run: t.Run, UID: t.UID, Sample: strconv.FormatInt(t.SampleIndex, 10), Attempt: attempt}.Filter()
		state, err := b.streamState(ctx, schemas.StreamSteps, filter)
		if err != nil {
			return nil, fmt.Errorf("look up the steps of %q: %w", t.Subject(), err)
		}
		for i, ref := range t.Steps {
			if t.StepAttempt(i) != attempt {
				continue
			}
			_, stored := state.Subjects[t.StepSubject(i)]
			if ref.Seq > state.LastSeq || !stored && ref.Seq >= state.FirstSeq {
				return fmt.Errorf("steps[%d].seq: %d; no such step of attempt %s is stored", i, ref.Seq, attempt), nil
			}
		}
	}
	return nil, nil
}
