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

// A guarded subject keeps the message that came first, from any sender. A wrong message must not keep the true event
// out: the publisher of the true event displaces it. It copies the wrong message to the dead letters and deletes it
// by its sequence, so that of two publishers at once, neither deletes what the other has stored.

const maxDisplaced = 16

// Against adds a check of the event that is already stored on the subject. check returns what is wrong with it
// (fault), or err when it cannot tell. With a fault the stored event is displaced. Without Against, a stored event
// may stay when it is a valid event of this subject.
func Against[E schemas.Keyed](check func(stored E) (fault, err error)) PublishOption {
	return func(o *publishOptions) {
		o.against = func(stored schemas.Keyed) (fault, err error) { return check(stored.(E)) }
	}
}

// checkEvents sets the check that a publish of e makes of a message that is already stored on the subject: whether that
// message may stay.
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

// Fits decodes a stored message into e. It returns what is wrong with the message: it must be a valid event, stored
// on its own subject. Readers skip what does not fit, handlers make it a dead letter.
func Fits(m *Message, e schemas.Keyed) error {
	if err := schemas.DecodeValid(m.Data, e); err != nil {
		return err
	}
	if subject := schemas.StoredSubject(e.Subject()); subject != m.Subject {
		return fmt.Errorf("an event of %q, stored on %q", subject, m.Subject)
	}
	return nil
}

var errOther = errors.New("not the bytes that its one writer has for it")

func onePerSubject(subject string) (spec schemas.StreamSpec, ok bool) {
	spec, ok = schemas.StreamOf(subject)
	return spec, ok && (spec.Guarded || spec.WorkQueue)
}

// resolveDuplicate handles a message m that the server refused as a duplicate. first is the message on its subject,
// nil when it is not known yet. It returns first when that may stay. It returns nil when m must be sent again: first
// was displaced, or the subject is free and another message had the id. Then it removes the id of m, because the
// server remembers ids of messages that are gone.
func (b *Bus) resolveDuplicate(
	ctx context.Context, m *nats.Msg, first *Message, check func(*Message) (fault, err error),
) (*Message, error) {
	if first == nil {
		var err error
		if first, err = b.storedOn(ctx, m.Subject); err != nil {
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

// storedOn returns the message on a subject that keeps one, as published; nil: there is none.
func (b *Bus) storedOn(ctx context.Context, subject string) (*Message, error) {
	spec, _ := schemas.StreamOf(subject)
	m, err := b.Last(ctx, spec.Name, schemas.StoredSubject(subject))
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	return m, err
}

// Displace removes a stored message that is not the event its subject is for: it writes a dead letter with the whole
// message and the fault, then deletes the message.
func (b *Bus) Displace(ctx context.Context, m *Message, fault error) error {
	b.log.Warn().Err(fault).Str("subject", m.Subject).Uint64("stream_seq", m.Seq).
		Msg("displaced: not the event that its subject is for")
	if err := b.Dead(ctx, writerOf(m.Subject), schemas.CodeDisplaced, fault.Error(), m); err != nil {
		return err
	}
	return b.Delete(ctx, m.Stream, m.Seq)
}

// StoredEvent decodes the event on a subject into e and returns its message. It returns ErrNotFound when the subject
// is empty, and also when it holds something else: a message that does not fit (Fits), or one with a fault that check
// finds (nil: no check). It changes nothing; the publisher of the true event will displace that message.
func (b *Bus) StoredEvent(
	ctx context.Context, stream, subject string, e schemas.Keyed, check func() (fault, err error),
) (*Message, error) {
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
	if fault != nil {
		return nil, fmt.Errorf("%q of %s: %w: it holds something else: %w", subject, stream, ErrNotFound, fault)
	}
	return m, nil
}

// writerOf returns the service (stage) that writes the events of a subject, or that accepts them from outside, for dead
// letters.
func writerOf(subject string) string {
	a, _ := schemas.ParseSubject(subject)
	switch a.Kind {
	case schemas.KindStep, schemas.KindTokens, schemas.KindTrajectory:
		return "sampler"
	case schemas.KindReward, schemas.KindVerdict, schemas.KindRating, schemas.KindStepReward,
		schemas.KindSelection:
		return "reward"
	case schemas.KindAdvantage, schemas.KindBatch:
		return "advantage"
	}
	return "intake"
}

// Answers returns the fault of a stored trajectory as the answer to a request: its fields must be those of the
// request, and its steps must be stored. err means that it could not tell.
func (b *Bus) Answers(ctx context.Context, t *schemas.Trajectory, r *schemas.Request) (fault, err error) {
	if fault := r.AnsweredBy(t); fault != nil {
		return fault, nil
	}
	return b.CheckSteps(ctx, t)
}

// BranchOff has a request begin with the state of another of its group where the rule of their prompt has decided so:
// that is stored once, for all attempts. It reports whether it does.
func (b *Bus) BranchOff(ctx context.Context, r *schemas.Request) (bool, error) {
	if !r.Prune.BranchesOff() {
		return false, nil
	}
	e := &schemas.Selection{}
	_, err := b.StoredEvent(ctx, schemas.StreamVerdicts, schemas.SelectionSubject(r.Run, r.UID, r.Prune.StepIndex), e,
		nil)
	switch {
	case errors.Is(err, ErrNotFound):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look up which sample to go on from: %w", err)
	}
	r.Follow(e)
	return r.Start != nil, nil
}

// Made is a stored trajectory and its sequence in MDR_TRAJECTORIES.
type Made struct {
	*schemas.Trajectory
	Seq uint64
}

// Made returns the valid trajectories of a group, by their stage and sample: those at the given places, or all.
func (b *Bus) Made(
	ctx context.Context, run schemas.Run, uid schemas.UID, at ...schemas.Place,
) (map[schemas.Place]Made, error) {
	subjects := []string{schemas.TrajectoryFilter(run, uid)}
	if len(at) > 0 {
		subjects = nil
	}
	for _, p := range at {
		subjects = append(subjects, schemas.TrajectorySubject(run, uid, p.SampleIndex, p.Stage))
	}
	stored, err := b.LastMany(ctx, schemas.StreamTrajectories, subjects)
	if err != nil {
		return nil, fmt.Errorf("look up stored trajectories of %s: %w", uid, err)
	}
	made := make(map[schemas.Place]Made, len(stored))
	for _, m := range stored {
		if t := (&schemas.Trajectory{}); Fits(m, t) == nil {
			made[t.Place()] = Made{t, m.Seq}
		}
	}
	return made, nil
}

// Group returns the record of a group, or ErrNotFound: events of a group that no prompt asked for have no record.
func (b *Bus) Group(ctx context.Context, run schemas.Run, uid schemas.UID) (*schemas.GroupRecord, error) {
	record := &schemas.GroupRecord{}
	if _, err := b.StoredEvent(ctx, schemas.StreamGroups, schemas.GroupSubject(run, uid), record, nil); err != nil {
		return nil, fmt.Errorf("look up the group %s of run %s: %w", uid, run, err)
	}
	return record, nil
}

// Result returns the result of a group with size samples in a batch, or ErrNotFound while it has none.
func (b *Bus) Result(
	ctx context.Context, run schemas.Run, uid schemas.UID, size int64, batch string,
) (*schemas.Advantage, error) {
	a := &schemas.Advantage{}
	check := func() (fault, err error) { return a.Of(size, batch), nil }
	if _, err := b.StoredEvent(ctx, schemas.StreamAdvantages, schemas.AdvantageSubject(run, uid), a,
		check); err != nil {
		return nil, fmt.Errorf("look up the result of group %s of run %s: %w", uid, run, err)
	}
	return a, nil
}

// CheckSteps returns in fault what is wrong with the steps of a completed trajectory: each must be stored on the
// subject of its attempt, unless the stream has dropped it for its age. It does not read the steps; a reader compares
// their digests. err means that it could not tell.
func (b *Bus) CheckSteps(ctx context.Context, t *schemas.Trajectory) (fault, err error) {
	if t.StopReason != schemas.StopCompleted {
		return nil, nil
	}
	kind := schemas.KindStep
	if t.Text != nil {
		kind = schemas.KindTokens
	}
	for _, attempt := range t.Attempts() {
		filter := schemas.Address{
			Kind: kind, Run: t.Run, UID: t.UID, Sample: strconv.FormatInt(t.SampleIndex, 10),
			Attempt: attempt,
		}.Filter()
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
