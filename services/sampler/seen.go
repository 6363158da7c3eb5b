package sampler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

const (
	// maxSeen is how many questions for predictions wait at most; one is answered at a time, beside the samples.
	maxSeen = 16
	// seenTimeout bounds one.
	seenTimeout = 2 * time.Minute
)

// answerSeen answers questions for what the network takes states of samples for, until ctx ends: see schemas.Seen.
func (s *service) answerSeen(ctx context.Context) error {
	log := zerolog.Ctx(ctx)
	waiting := make(chan *nats.Msg, maxSeen)
	subject := schemas.SeenSubject(s.cfg.Lane)
	sub, err := s.bus.Conn().QueueSubscribe(subject, string(s.cfg.Lane), func(m *nats.Msg) {
		select {
		case waiting <- m:
		default:
			refuse(m, errors.New("too many questions wait at this sampler; ask again later"))
		}
	})
	if err != nil { // without the right to it, pages show states in false colours
		log.Warn().Err(err).Str("subject", subject).Msg("the sampler answers no questions for predictions")
		return nil
	}
	defer func() { _ = sub.Unsubscribe() }() // it fails on a closed connection
	for {
		select {
		case <-ctx.Done():
			return nil
		case m := <-waiting:
			one, done := context.WithTimeout(ctx, seenTimeout)
			data, err := s.seen(one, m.Data)
			done()
			if err != nil {
				refuse(m, err)
				continue
			}
			_ = m.Respond(data) // who asked has gone
		}
	}
}

// refuse says why a question has no answer.
func refuse(m *nats.Msg, err error) {
	_ = m.RespondMsg(&nats.Msg{Header: nats.Header{schemas.HeaderSeenError: {err.Error()}}}) // who asked has gone
}

// seen answers one question.
func (s *service) seen(ctx context.Context, question []byte) ([]byte, error) {
	var q schemas.Seen
	if err := json.Unmarshal(question, &q); err != nil {
		return nil, fmt.Errorf("the question cannot be read: %w", err)
	}
	if err := q.Validate(); err != nil {
		return nil, err
	}
	m, err := s.bus.Last(ctx, schemas.StreamTrajectories,
		schemas.TrajectorySubject(q.Run, q.UID, q.SampleIndex, schemas.StageMain))
	if err != nil {
		return nil, fmt.Errorf("the sample: %w", err)
	}
	t := &schemas.Trajectory{}
	if err := schemas.Decode(m.Data, t); err != nil {
		return nil, err
	}
	if t.Text != nil || t.ScheduledSampling != nil || !slices.Contains(t.LatentStepIndices, q.Step) {
		return nil, fmt.Errorf("state %d of the sample is not stored", q.Step)
	}
	loaded, err := s.versions.Pin(ctx, t.Tenant, 0)
	if err != nil {
		return nil, err
	}
	defer s.versions.Release(loaded)
	if loaded.Policy.WeightsDigest != t.WeightsDigest {
		return nil, fmt.Errorf("it was made with version %d of the weights, and the sampler now has version %d",
			t.PolicyVersionMax, loaded.Version())
	}
	seer, ok := loaded.Engines[0].(engine.Seer)
	if !ok {
		return nil, errors.New("a server makes the images of this lane, and shows no predictions")
	}
	state, err := s.bus.LoadState(ctx, t, q.Step)
	if err != nil {
		return nil, fmt.Errorf("state %d: %w", q.Step, err)
	}
	x := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
	if err := tensor.DType(state.DType).DecodeFloats(x, state.Data); err != nil {
		return nil, fmt.Errorf("state %d: %w", q.Step, err)
	}
	return seer.Seen(ctx, t, q.Step, x)
}
