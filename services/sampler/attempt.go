package sampler

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/recorder"
	"github.com/meander-rl/meander/services/sampler/weights"
)

// maxRestarts is how often a sample may begin again to use newer weights.
const maxRestarts = 3

// errRestart ends an attempt that begins again with newer weights.
var errRestart = errors.New("begins again with newer weights")

// makeSample makes one sample with a worker and waits until its steps are stored. When work ends, it stops at the next
// step boundary. It begins again for newer weights where the policy's rule says so, at most maxRestarts times.
func (s *service) makeSample(ctx, work context.Context, c *worker, req *schemas.Request) (*schemas.Trajectory, error) {
	for restarts := 0; ; restarts++ {
		t, err := s.attemptOnce(ctx, work, c, req, restarts < maxRestarts)
		if !errors.Is(err, errRestart) {
			return t, err
		}
		s.metrics.Restarted.Inc()
	}
}

// attemptOnce makes one attempt at a sample, which may end pruned. With restarts it may return errRestart.
func (s *service) attemptOnce(ctx, work context.Context, c *worker, req *schemas.Request, restarts bool,
) (*schemas.Trajectory, error) {
	with, err := s.pin(work, req)
	if err != nil {
		return nil, err
	}
	a := &attempt{
		service: s, worker: c, req: req, weights: with, priority: req.Priority, expired: work.Err,
	}
	defer func() { s.versions.Release(a.weights) }()
	if a.engine, err = c.engineOf(with); err != nil {
		return nil, err
	}
	r := s.newRecorder(req, a.engine.Backend(), with.Policy)
	a.recorder = r
	defer r.Close()
	episode, err := s.startEpisode(work, c, a.engine, req, r)
	if err != nil {
		return nil, err
	}
	if held, ok := episode.(io.Closer); ok {
		defer func() { _ = held.Close() }()
	}
	r.Encoded()
	a.episode = episode
	if _, can := episode.(engine.Predictor); can {
		next := r.Next() // what it goes on from, it was judged before
		a.judged = slices.DeleteFunc(req.Group.JudgedSteps(), func(k int64) bool { return k <= next })
	}
	a.recordStep = func(step schemas.StepEvent, device time.Duration) error {
		if err := r.Record(ctx, step, device); err != nil {
			return err
		}
		return a.checkPruned()
	}
	a.betweenSteps = func() error { return a.catchUp(restarts) }
	a.onAdmitted = a.beginWithNewest
	err = a.checkPruned()
	if err == nil {
		err = a.denoise(work)
	}
	timing := recorder.Timing{Started: a.started, Denoise: a.denoised}
	pruned, ended := errors.AsType[*prunedError](err)
	switch {
	case err == nil:
		return r.Finish(ctx, a.episode, timing)
	case errors.Is(err, errRestart), errors.Is(err, errParentPending):
		return nil, cmp.Or(r.Undo(ctx), err)
	case work.Err() != nil:
		r.AwaitStored()
	}
	if ended {
		return r.Pruned(ctx, pruned.why, timing)
	}
	return nil, err
}

// pin returns the weights that a sample begins with: the newest, or those of the version that it asks for.
func (s *service) pin(ctx context.Context, req *schemas.Request) (*weights.Loaded, error) {
	if req.PolicyVersion == nil {
		return s.versions.Pin(ctx, req.Tenant, req.MinPolicyVersion)
	}
	with, err := s.versions.PinVersion(ctx, req.Tenant, *req.PolicyVersion)
	if engine.Refused(err) {
		return nil, engine.Invalid("policy_version: %d; %w", *req.PolicyVersion, err)
	}
	return with, err
}

// denoise has a scheduler step an attempt until its episode is done; in between, a conversation waits for its
// interaction, and a sample that is judged in the middle for its reward.
func (a *attempt) denoise(work context.Context) error {
	if a.episode.Done() {
		a.started = time.Now()
		return nil
	}
	for {
		err := a.runSteps(work)
		switch {
		case err != nil:
		case a.isJudged():
			err = a.service.judgeStep(work, a)
		case engine.Asks(a.episode) != nil:
			err = a.service.askInteraction(work, a.req, a.recorder, a.episode.(engine.Talker))
		default:
			return nil
		}
		if err != nil {
			return err
		}
		if a.episode.Done() {
			return nil
		}
	}
}

// runSteps has a scheduler step an attempt to its end, to where it waits for its interaction, or until work ends.
func (a *attempt) runSteps(work context.Context) error {
	a.finished, a.done = false, make(chan struct{})
	joining := a.service.metrics.Joining // until the scheduler has it
	joining.Inc()
	a.worker.queue.push(a)
	select {
	case <-a.done:
		return a.err
	case <-work.Done():
	}
	if a.worker.queue.remove(a) {
		joining.Dec()
		return work.Err()
	}
	<-a.done // the scheduler has it, and removes it at the next boundary
	return a.err
}

func (s *service) newRecorder(req *schemas.Request, backend string, p *schemas.Policy) *recorder.Recorder {
	return s.recorders.New(req, fmt.Sprintf("%s-%d", s.token, s.count.Add(1)), backend, p)
}

// catchUp switches an attempt to the newest weights between two steps, if the rule of their policy says so, or returns
// errRestart.
func (a *attempt) catchUp(restarts bool) error {
	if a.req.PolicyVersion != nil {
		return nil
	}
	next := a.service.versions.NewestOf(a.req.Tenant) // nil: the tenant was removed
	if next != nil && next != a.weights && next.Policy.Rule == schemas.SwapRestart && restarts {
		return errRestart
	}
	if a.switchTo(func(to *weights.Loaded) bool { return to.Policy.Rule == schemas.SwapSwitch }) {
		a.recorder.SetPolicy(a.weights.Policy)
	}
	return nil
}

// beginWithNewest gives an attempt that was just admitted the weights that came while it waited in the queue.
func (a *attempt) beginWithNewest() {
	if a.req.PolicyVersion != nil || !a.recorder.Fresh() {
		return // it took over steps, which the weights that it has have made
	}
	if a.switchTo(func(*weights.Loaded) bool { return true }) {
		a.recorder.Restart(a.weights.Policy)
	}
}

// switchTo switches an attempt to the newest weights, if may allows them and it can; it reports whether it did.
func (a *attempt) switchTo(may func(to *weights.Loaded) bool) bool {
	episode, can := a.episode.(engine.Switcher)
	if !can {
		return false
	}
	next := a.service.versions.Move(a.weights, func(to *weights.Loaded) bool {
		_, err := a.worker.engineOf(to)
		return err == nil && may(to)
	})
	if next == a.weights {
		return false
	}
	a.weights, a.engine = next, next.Engines[a.worker.index]
	episode.Switch(a.engine)
	return true
}

// prunedError ends an episode in the middle, by the prune rule of its prompt or by a control.
type prunedError struct{ why string }

func (e *prunedError) Error() string { return e.why }

// checkPruned returns a *prunedError if the prompt's rule, or an operator, ends the sample before its next step.
func (a *attempt) checkPruned() error {
	next := a.recorder.Next()
	if _, end := a.req.Segment(); next >= end && a.req.Text == nil {
		return nil
	}
	if p := a.req.Prune; p != nil && next >= p.StepIndex {
		if why := p.Judge(a.recorder.LogProbs()); why != "" {
			return &prunedError{why}
		}
	}
	if c := a.service.controls.inForce.Pruned(a.req); c != nil && next >= c.StepIndex {
		return &prunedError{c.Sentence()}
	}
	return nil
}

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

const (
	// judgeTimeout bounds one question to the reward service, which holds it for a while where it waits for others.
	judgeTimeout = 30 * time.Second
	// The pauses between two questions.
	firstJudgePause, mostJudgePause = 50 * time.Millisecond, 2 * time.Second
)

// isJudged reports whether the sample has come to a step at which functions judge it.
func (a *attempt) isJudged() bool { return len(a.judged) > 0 && a.recorder.Next() >= a.judged[0] }

// judgeStep has the reward service judge a sample by its prediction, and waits until that is stored and, where the
// prompt has a rule for it, decided: a *prunedError ends the sample, errParentPending has it begin again from another.
// Meanwhile its slot is free for another request.
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
	case q.Prune != nil:
		if branches, err := s.bus.BranchOff(ctx, a.req); branches || err != nil {
			return cmp.Or(err, errParentPending)
		}
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
