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
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/recorder"
)

// slowReply is after how long a wait for an interaction is logged.
const slowReply = 5 * time.Second

// askInteraction sends an answer of an episode to the interaction of its conversation, and gives it the reply. While it
// waits, its slot is free for another request. A fault of the interaction is a terminal error.
func (s *service) askInteraction(ctx context.Context, req *schemas.Request, r *recorder.Recorder, t engine.Talker,
) error {
	ask, x := t.Asks(), req.Text.Interaction
	if _, err := r.Stored(ctx); err != nil { // the question names the stored events
		return err
	}
	ask.Run, ask.UID, ask.SampleIndex, ask.Stage, ask.Attempt = req.Run, req.UID, req.SampleIndex, req.Stage, r.Token()
	ask.Events = schemas.AttemptFilter(ask.Run, ask.UID, ask.SampleIndex, ask.Stage, ask.Attempt)
	t.Rest()
	back := bus.LeaveSlot(ctx)
	defer back()
	s.metrics.Conversing.Inc()
	defer s.metrics.Conversing.Dec()
	log := zerolog.Ctx(ctx).With().Str("interaction", x.Name).Str("run", string(ask.Run)).Str("uid",
		string(ask.UID)).Int64("sample_index", ask.SampleIndex).Int64("answer", ask.Answer).Logger()
	slow := time.AfterFunc(slowReply, func() {
		log.Info().Dur("timeout", x.Timeout()).Msg("waits for the interaction")
	})
	defer slow.Stop()
	reply, err := interaction.Ask(ctx, s.bus.Conn(), ask, x.Timeout())
	if fault, ok := errors.AsType[*interaction.Fault](err); ok {
		s.metrics.Replies.WithLabelValues(fault.State).Inc()
		return engine.Failed("interaction %s, answer %d: %w", x.Name, ask.Answer, fault)
	}
	if err != nil {
		return fmt.Errorf("interaction %s, answer %d: %w", x.Name, ask.Answer, err)
	}
	s.metrics.Replies.WithLabelValues(replied).Inc()
	return t.Told(ctx, reply)
}
