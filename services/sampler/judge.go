package sampler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

const (
	// judgeTimeout bounds one question to the reward service, which holds it for a while where it waits for others.
	judgeTimeout = 30 * time.Second
	// The pauses between two questions.
	firstJudgePause, mostJudgePause = 50 * time.Millisecond, 2 * time.Second
)

// isJudged reports whether the sample has come to a step at which functions judge it.
func (a *attempt) isJudged() bool { return len(a.judged) > 0 && a.recorder.Next() >= a.judged[0] }

// judgeStep has the reward service judge a sample by its prediction, and waits until that is stored and, where the
// prompt has a rule for it, decided: a *prunedError ends the sample. Meanwhile its slot is free for another request.
func (s *service) judgeStep(ctx context.Context, a *attempt) error {
	step := a.judged[0]
	a.judged = a.judged[1:]
	decode, latents := false, false
	for _, r := range a.req.Group.Reward {
		decode = decode || r.JudgedAt(step) && !r.Latent
		latents = latents || r.JudgedAt(step) && r.Latent
	}
	t, x, err := a.recorder.Midway(ctx, a.episode.(engine.Predictor), decode, latents)
	if err != nil {
		return fmt.Errorf("predict the sample at step %d: %w", step, err)
	}
	q := &schemas.StepQuestion{StepIndex: step, Latents: x}
	if rule := a.req.Prune; rule.ByReward() && rule.StepIndex == step {
		_, end := a.req.Segment()
		q.Prune, q.Saves = rule, sampling.Evaluations(&a.req.Sampling, step, end)
	}
	if q.Sample, err = schemas.Encode(t); err != nil {
		return bus.Terminal(schemas.CodeFailed, err)
	}
	back := bus.LeaveSlot(ctx)
	defer back()
	s.metrics.Judging.Inc()
	defer s.metrics.Judging.Dec()
	answer, err := s.askStep(ctx, q)
	switch {
	case err != nil:
		return err
	case answer.Refused != "":
		return engine.Failed("step %d cannot be judged: %s", step, answer.Refused)
	case answer.Stopped != "":
		return &prunedError{answer.Stopped}
	}
	return nil
}

// askStep asks the reward service until it has decided. An error is of ctx.
func (s *service) askStep(ctx context.Context, q *schemas.StepQuestion) (*schemas.StepAnswer, error) {
	began := time.Now()
	for pause := firstJudgePause; ; pause = min(2*pause, mostJudgePause) {
		q.Waited = time.Since(began).Nanoseconds()
		data, err := json.Marshal(q)
		if err != nil {
			return nil, bus.Terminal(schemas.CodeFailed, err)
		}
		asked, stop := context.WithTimeout(ctx, judgeTimeout)
		m, err := s.bus.Conn().RequestWithContext(asked, schemas.StepScoreSubject(), data)
		stop()
		answer := &schemas.StepAnswer{}
		if err == nil {
			err = json.Unmarshal(m.Data, answer)
		}
		if err == nil && (answer.Decided || answer.Refused != "") {
			return answer, nil
		}
		if slow := time.Since(began) > slowReply; err != nil && slow && !errors.Is(err, nats.ErrNoResponders) {
			zerolog.Ctx(ctx).Warn().Err(err).Int64("step", q.StepIndex).Msg("asks for its reward again")
		}
		if err := bus.Pause(ctx, pause); err != nil {
			return nil, err
		}
	}
}
