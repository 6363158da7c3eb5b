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
