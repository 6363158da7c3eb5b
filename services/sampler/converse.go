package sampler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/schemas"
)

// Talker is an episode that stands still, between two steps, until somebody outside has said something.
type Talker interface {
	// Asks is what is asked, without the names of run, sample and attempt; nil while the episode does not wait.
	Asks() *schemas.InteractRequest
	// Rest lets go what others need more, until Told.
	Rest()
	// Told has it go on with the answer. It may evaluate the model.
	Told(ctx context.Context, reply *schemas.InteractReply) error
}

// asks is what an episode waits for, nil when it can be stepped.
func asks(e Episode) *schemas.InteractRequest {
	if t, ok := e.(Talker); ok {
		return t.Asks()
	}
	return nil
}

// slowReply is how long an interaction may take before the log says what is waited for.
const slowReply = 5 * time.Second

// converse has a sample wait for its interaction, outside of its micro-batch, and with its slot left to others.
func (s *service) converse(ctx context.Context, r *recorder, t Talker) error {
	ask, x := t.Asks(), r.req.Text.Interaction
	if _, err := r.Stored(ctx); err != nil { // the request names them
		return err
	}
	ask.Run, ask.UID, ask.SampleIndex, ask.Attempt = r.req.Run, r.req.UID, r.req.SampleIndex, r.token
	ask.Events = schemas.AttemptFilter(ask.Run, ask.UID, ask.SampleIndex, ask.Attempt)
	t.Rest()
	back := bus.Aside(ctx)
	defer back()
	s.metrics.conversing.Inc()
	defer s.metrics.conversing.Dec()
	log := zerolog.Ctx(ctx).With().Str("interaction", x.Name).Str("run", string(ask.Run)).Str("uid", string(ask.UID)).Int64("sample_index", ask.SampleIndex).Int64("answer", ask.Answer).Logger()
	slow := time.AfterFunc(slowReply, func() { log.Info().Dur("timeout", x.Timeout()).Msg("waits for the interaction") })
	defer slow.Stop()
	reply, err := interaction.Ask(ctx, s.bus.Conn(), ask, x.Timeout())
	if fault, ok := errors.AsType[*interaction.Fault](err); ok {
		s.metrics.replies.WithLabelValues(fault.State).Inc()
		return bus.Terminal(schemas.CodeFailed, fmt.Errorf("interaction %s, answer %d: %w", x.Name, ask.Answer, fault))
	}
	if err != nil {
		return fmt.Errorf("interaction %s, answer %d: %w", x.Name, ask.Answer, err)
	}
	s.metrics.replies.WithLabelValues(replied).Inc()
	return t.Told(ctx, reply)
}

// replied is the state of an interaction that said something.
const replied = "replied"
