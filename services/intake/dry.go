package intake

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// dryTimeout bounds the work on one dry request.
const dryTimeout = 10 * time.Second

// Read decodes a prompt as a client publishes it, and returns it with warnings about its fields. It refuses what no
// lane could serve. Errors are terminal.
func Read(data []byte) (*schemas.Prompt, []string, error) {
	p := &schemas.Prompt{}
	if err := schemas.Decode(data, p); err != nil {
		return p, nil, bus.Terminal(schemas.CodeDecode, err)
	}
	warnings, err := p.CheckUnknown(data)
	if err := errors.Join(err, p.Validate()); err != nil {
		return p, nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	return p, warnings, nil
}

// answerDry answers dry requests until the subscription ends: it says what would become of a prompt, and does
// nothing else. It is called before the first prompt is asked for: who has a receipt can ask dry.
func (s *service) answerDry(ctx context.Context) (*nats.Subscription, error) {
	work := s.metrics.set.Work("dry", schemas.DrySubject("*"), schemas.ServiceIntake)
	answer := func(m *nats.Msg) {
		ctx, stop := context.WithTimeout(ctx, dryTimeout)
		defer stop()
		began := time.Now()
		run := schemas.Run(strings.TrimPrefix(m.Subject, schemas.DrySubject("")))
		data, err := schemas.EncodeAnswer(m.Data, s.judge(ctx, run, m.Data))
		if err == nil {
			err = m.Respond(data)
		}
		work.Done(ctx, began, err)
		if err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).Debug().Err(err).Msg("dry request not answered")
		}
	}
	return s.bus.Conn().QueueSubscribe(schemas.DrySubject("*"), schemas.ServiceIntake, answer)
}

// judge returns the receipt that a prompt would get now. It stores nothing and claims no uid.
func (s *service) judge(ctx context.Context, run schemas.Run, data []byte) *schemas.Receipt {
	p, warnings, err := Read(data)
	r := &schemas.Receipt{Run: run, UID: p.UID}
	var a *asked
	var policies []*schemas.Policy
	var waiting wait
	if err == nil {
		p.UID = cmp.Or(p.UID, "-") // intake names it by the place of its message
		policies, waiting, err = s.findPolicies(ctx, run, p, true)
	}
	if r.Waiting = waiting.says; err == nil && r.Waiting != "" {
		return r
	}
	if err == nil {
		a, err = s.resolve(ctx, &bus.Message{Time: time.Now()}, run, p, policies, refOf)
	}
	if err == nil {
		err = s.checkLimits(ctx, run, a)
	}
	if err == nil {
		err = s.checkUID(ctx, a)
	}
	if err != nil {
		return &schemas.Receipt{Run: run, UID: r.UID, Code: bus.Code(err), Error: err.Error()}
	}
	accepted := a.receipt(slices.Concat(warnings, Warnings(p, a.policy()), Unscored(a.requests[0])))
	accepted.UID = r.UID
	return accepted
}

// checkUID refuses a group whose uid another prompt has, whose deadline has passed, or that was cancelled.
func (s *service) checkUID(ctx context.Context, a *asked) error {
	mine, err := a.claims()
	if err != nil {
		return err
	}
	h, err := s.bus.ControlsOf(ctx, mine.Run, mine.UID)
	if err != nil {
		return err
	}
	if c := h.Cancelled(); c != nil {
		return bus.Terminal(schemas.CodeCancelled, errors.New(c.Sentence()))
	}
	first, err := s.bus.Group(ctx, mine.Run, mine.UID)
	switch {
	case errors.Is(err, bus.ErrNotFound) && deadlinePassed(mine):
		return tooLate(mine.Group.Deadline, "the prompt was taken up later")
	case errors.Is(err, bus.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return checkSameGroup(first, mine)
}

// putBlob stores bytes, and returns their reference.
type putBlob func(ctx context.Context, data []byte) (schemas.Ref, error)

// refOf is a putBlob that stores nothing.
func refOf(_ context.Context, data []byte) (schemas.Ref, error) {
	sum := sha256.Sum256(data)
	return schemas.Ref{
		Bucket: schemas.BlobBucket, Digest: hex.EncodeToString(sum[:]), Size: int64(len(data)),
	}, nil
}
