package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/meander-rl/meander/schemas"
)

// ErrNoTeacher means that no teacher of that name answers.
var ErrNoTeacher = errors.New("no such teacher runs; 'meander teacher' starts one")

const teacherPause = 200 * time.Millisecond

// teacherPatience is how long TeacherReply waits before it asks for the same a second time; later twice as long.
const teacherPatience = 30 * time.Second

func (c *Client) askTeacher(
	ctx context.Context, teacher string, data []byte, patience time.Duration,
) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return c.ask(ctx, schemas.TeacherSubject(teacher), data)
}

// TeacherReply asks a teacher for the log-probs that its model gives a stored sample, and waits for them. Tensors are
// complete. A teacher that is busy or stops is asked again until ctx ends. A RefusedError says why it gives nothing,
// ErrNoTeacher that none of that name runs.
func (c *Client) TeacherReply(ctx context.Context, r schemas.TeacherRequest) (*schemas.TeacherReply, error) {
	teacher := r.Name
	r.Stage = cmp.Or(r.Stage, schemas.StageMain)
	data, err := schemas.Encode(&r)
	if err == nil {
		err = schemas.DecodeValid(data, &schemas.TeacherRequest{})
	}
	if err != nil {
		return nil, err
	}
	for patience := teacherPatience; ; {
		m, err := c.askTeacher(ctx, teacher, data, patience)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil { // the request, or who had it, may be lost
			patience *= 2
			continue
		}
		if errors.Is(err, nats.ErrNoResponders) {
			return nil, fmt.Errorf("teacher %s: %w", teacher, ErrNoTeacher)
		}
		if err != nil {
			return nil, fmt.Errorf("teacher %s: %w", teacher, err)
		}
		reply := &schemas.TeacherReply{}
		if err := schemas.DecodeValid(m.Data, reply); err != nil {
			return nil, fmt.Errorf("teacher %s: %w", teacher, err)
		}
		switch {
		case reply.Retry:
			select {
			case <-time.After(teacherPause):
			case <-ctx.Done():
				return nil, fmt.Errorf("teacher %s: %s: %w", teacher, reply.Error, ctx.Err())
			}
			continue
		case reply.Error != "":
			return nil, &RefusedError{Code: reply.Code, Reason: reply.Error, What: "request to teacher " + teacher}
		}
		var tensors []*schemas.Tensor
		for _, t := range []*schemas.Tensor{
			reply.LogProbs, reply.ProcessedLogProbs, reply.LogSumExps, reply.Entropies, reply.TopIDs, reply.TopLogits,
			reply.Velocities,
		} {
			if t != nil {
				tensors = append(tensors, t)
			}
		}
		return reply, c.bus.LoadTensors(ctx, tensors...)
	}
}

// AnswerLogits returns the logits that are stored of the answer which an interaction is asked about, of all its tokens
// and of any size: those that came with the request, or those of the answer's events. nil: the prompt asked for none of
// this answer. It fails if they are not logits of its tokens: another shape, NaN, +inf, a row of zeros.
func (c *Client) AnswerLogits(ctx context.Context, r *schemas.InteractRequest) (*schemas.TokenLogits, error) {
	logits, tokens := r.Logits, int64(len(r.IDs))
	if logits == nil && r.LogitsForm == "" {
		return nil, nil
	}
	if logits == nil {
		logits, tokens = &schemas.TokenLogits{}, 0
		for n := r.FirstEvent; n < r.FirstEvent+r.EventCount; n++ {
			subject := schemas.TokensSubject(r.Run, r.UID, r.SampleIndex, r.Stage, r.Attempt, n)
			m, err := c.bus.Last(ctx, schemas.StreamSteps, subject)
			if err != nil {
				return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
			}
			e, err := c.bus.LoadTokens(ctx, m)
			if err != nil {
				return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
			}
			if tokens += int64(len(e.IDs)); e.Logits != nil {
				logits.Append(e.Logits)
			}
		}
	}
	if tokens == 0 && len(logits.Values.Shape) > 0 { // more than the request names
		tokens = logits.Values.Shape[0]
	}
	if err := logits.Check(tokens, r.Vocabulary, r.LogitsKind); err != nil {
		return nil, fmt.Errorf("logits of answer %d: %w", r.Answer, err)
	}
	return logits, nil
}
