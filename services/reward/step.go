package reward

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
)

// Samples that functions judge in the middle ask for it (schemas.StepQuestion) and wait. What was said of one is stored
// before it is answered, and so is which samples of a group end at a step; what is stored counts, however often it is
// asked. A group is decided on when all its samples have a reward at the step or have ended, or when one has waited for
// ScorePatience: those that come later go on.

const (
	// maxStepQuestions is how many questions are held at once; others are asked again.
	maxStepQuestions = 4096
	// stepHold is how long a question is held for the rest of its group, stepLook how often it looks for what another
	// replica has stored.
	stepHold, stepLook = 5 * time.Second, 500 * time.Millisecond
)

// stepNews wakes the questions of a group that wait, by the subject of its Selection, when the last of its samples was
// judged here.
type stepNews struct {
	mu     sync.Mutex
	groups map[string]*judgedHere
}

type judgedHere struct {
	samples map[int64]bool
	all     chan struct{} // closed when all are
}

func newStepNews() *stepNews { return &stepNews{groups: map[string]*judgedHere{}} }

// of returns what is known of a group. The caller holds the lock.
func (n *stepNews) of(group string) *judgedHere {
	g := n.groups[group]
	if g == nil {
		if len(n.groups) >= maxGroupsKept { // of samples that came no more; who waits looks by itself
			clear(n.groups)
		}
		g = &judgedHere{map[int64]bool{}, make(chan struct{})}
		n.groups[group] = g
	}
	return g
}

// wait returns a channel that is closed when all samples of a group were judged here.
func (n *stepNews) wait(group string) <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.of(group).all
}

// note notes that a sample of a group of a size was judged.
func (n *stepNews) note(group string, sample, size int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := n.of(group)
	if had := int64(len(g.samples)); had < size {
		if g.samples[sample] = true; int64(len(g.samples)) == size {
			close(g.all)
		}
	}
}

// forget forgets a group that is decided on.
func (n *stepNews) forget(group string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.groups, group)
}

// answerSteps answers questions about samples in the middle until ctx ends.
func (s *service) answerSteps(ctx context.Context) error {
	places, log := make(chan struct{}, maxStepQuestions), zerolog.Ctx(ctx)
	var asked sync.WaitGroup
	sub, err := s.bus.Conn().QueueSubscribe(schemas.StepScoreSubject(), schemas.ServiceReward, func(m *nats.Msg) {
		select {
		case places <- struct{}{}:
		default:
			respond(m, schemas.StepAnswer{})
			return
		}
		asked.Go(func() {
			defer func() { <-places }()
			answer, err := s.answerStep(ctx, m.Data)
			if _, final := errors.AsType[*bus.TerminalError](err); final {
				answer = schemas.StepAnswer{Refused: err.Error()}
			} else if err != nil && ctx.Err() == nil {
				log.Warn().Err(err).Msg("a sample in the middle is asked about again")
			}
			respond(m, answer)
		})
	})
	if err != nil {
		return fmt.Errorf("answer on %s: %w", schemas.StepScoreSubject(), err)
	}
	<-ctx.Done()
	_ = sub.Unsubscribe() // it fails on a closed connection
	asked.Wait()
	return nil
}

// respond answers a question; an answer without a decision has it asked again.
func respond(m *nats.Msg, answer schemas.StepAnswer) {
	data, _ := json.Marshal(answer) // flags and a text
	_ = m.Respond(data)             // who asked has gone
}

// answerStep returns the answer to a question. A terminal error says why there is none; after others it is asked again.
func (s *service) answerStep(ctx context.Context, data []byte) (answer schemas.StepAnswer, err error) {
	q, t := &schemas.StepQuestion{}, &schemas.Trajectory{}
	if err := json.Unmarshal(data, q); err != nil {
		return answer, bus.Terminal(schemas.CodeDecode, err)
	}
	if err := schemas.DecodeValid(q.Sample, t); err != nil {
		return answer, bus.Terminal(schemas.CodeDecode, err)
	}
	if t.Stop == nil || t.Stop.StepIndex != q.StepIndex || !slices.Contains(t.Group.JudgedSteps(), q.StepIndex) ||
		q.Prune != nil && q.Prune.StepIndex != q.StepIndex {
		return answer, bus.Terminal(schemas.CodeInvalid, fmt.Errorf(
			"step_index: %d; must be where the sample stops, and one of at_steps of its functions", q.StepIndex))
	}
	switch fault, err := s.check(ctx, t); {
	case err != nil:
		return answer, err
	case fault != nil:
		return answer, bus.Terminal(schemas.CodeInvalid, fault)
	}
	if err := s.judgeStep(ctx, q, t); err != nil {
		return answer, err
	}
	if q.Prune == nil {
		return schemas.StepAnswer{Decided: true}, nil
	}
	selection, err := s.selection(ctx, q, t)
	if err != nil || selection == nil {
		return answer, err
	}
	return schemas.StepAnswer{Decided: true, Stopped: selection.Stopped(t.SampleIndex)}, nil
}

// judgeStep stores what the functions of a step say of a sample, unless it is stored.
func (s *service) judgeStep(ctx context.Context, q *schemas.StepQuestion, t *schemas.Trajectory) error {
	r := &schemas.StepReward{
		Run: t.Run, UID: t.UID, SampleIndex: t.SampleIndex, GroupSize: t.GroupSize, StepIndex: q.StepIndex,
		Media: t.Media, Latents: q.Latents, ContentDigest: t.ContentDigest,
	}
	if t.PolicyVersionMin == t.PolicyVersionMax {
		r.WeightsDigest = t.WeightsDigest
	}
	_, err := s.bus.StoredEvent(ctx, schemas.StreamVerdicts, r.Subject(), &schemas.StepReward{}, nil)
	if !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	at := *t
	at.Group.Reward = slices.DeleteFunc(slices.Clone(t.Group.Reward),
		func(x schemas.RewardSpec) bool { return !x.JudgedAt(q.StepIndex) })
	m := &memo{scores: make([]*scored, len(at.Group.Reward)), waits: newWaits(len(at.Group.Reward)), midway: q}
	for {
		after, err := s.scoreMissing(ctx, &at, m, s.due(t))
		if err != nil {
			return fmt.Errorf("judge sample %d at step %d: %w", t.SampleIndex, q.StepIndex, err)
		}
		if after == 0 {
			break
		}
		if err := bus.Pause(ctx, after); err != nil {
			return err
		}
	}
	said := combined(&at, 0, m)
	r.Status, r.Error, r.Reward, r.Scores, r.Scored = said.Status, said.Error, said.Reward, said.Scores,
		time.Now().UnixNano()
	ack, err := s.bus.Publish(ctx, r, bus.WaitForSpace()) // the first counts
	if err != nil {
		return fmt.Errorf("store the reward at step %d: %w", q.StepIndex, err)
	}
	if !ack.Duplicate {
		s.metrics.StepRewards.WithLabelValues(r.Status).Inc()
	}
	return nil
}

// selection returns which samples of a group end at a step, once it is decided; nil: ask again.
func (s *service) selection(ctx context.Context, q *schemas.StepQuestion, t *schemas.Trajectory,
) (*schemas.Selection, error) {
	group := schemas.SelectionSubject(t.Run, t.UID, q.StepIndex)
	s.news.note(group, t.SampleIndex, t.GroupSize)
	for began := time.Now(); ; {
		all := s.news.wait(group)
		select {
		case <-all:
			all = nil // it is slower than thought: another replica has some
		default:
		}
		held := time.Since(began)
		selection, err := s.decide(ctx, q, t, held)
		if err != nil || selection != nil || held > stepHold {
			if selection != nil {
				s.news.forget(group)
			}
			return selection, err
		}
		select {
		case <-all:
		case <-time.After(stepLook):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// decide returns which samples of a group end at a step: as it is stored, or as it can be decided now, which is then
// stored. nil: it cannot yet. One question of a group at a time looks.
func (s *service) decide(ctx context.Context, q *schemas.StepQuestion, t *schemas.Trajectory, held time.Duration,
) (*schemas.Selection, error) {
	g := s.cache.group(t)
	if err := g.lock(ctx); err != nil {
		return nil, err
	}
	defer g.unlock()
	e := &schemas.Selection{Run: t.Run, UID: t.UID, GroupSize: t.GroupSize, StepIndex: q.StepIndex}
	_, err := s.bus.StoredEvent(ctx, schemas.StreamVerdicts, e.Subject(), e, nil)
	if !errors.Is(err, bus.ErrNotFound) {
		return e, err
	}
	members, err := s.judgedMembers(ctx, q, t)
	if err != nil {
		return nil, err
	}
	complete := int64(len(members)) == t.GroupSize || time.Duration(q.Waited)+held > s.cfg.ScorePatience
	if !complete && held < stepLook {
		return nil, nil
	}
	made, err := s.bus.Made(ctx, t.Run, t.UID)
	if err != nil || !complete && !othersEnded(t, members, made) {
		return nil, err
	}
	members = slices.DeleteFunc(members, func(m schemas.SelectedMember) bool {
		_, ended := made[schemas.Place{Stage: t.Stage, SampleIndex: m.SampleIndex}]
		return ended // a control ended it, or it failed
	})
	q.Prune.Select(members)
	e = &schemas.Selection{
		Run: t.Run, UID: t.UID, GroupSize: t.GroupSize, StepIndex: q.StepIndex, Rule: *q.Prune,
		Members: members, At: time.Now().UnixNano(),
	}
	for _, m := range members {
		if m.Stopped != "" {
			e.SavedEvaluations += q.Saves
		}
	}
	ack, err := s.bus.Publish(ctx, e, bus.WaitForSpace())
	switch {
	case err != nil:
		return nil, fmt.Errorf("store which samples end at step %d: %w", q.StepIndex, err)
	case ack.Duplicate: // another replica was first
		first := &schemas.Selection{}
		return first, bus.Fits(ack.First, first)
	}
	s.metrics.SavedEvaluations.Add(float64(e.SavedEvaluations))
	return e, nil
}

// seeMidway adds to in what a function sees of a sample in the middle besides files; q is nil of one that has ended.
func (s *service) seeMidway(ctx context.Context, q *schemas.StepQuestion, spec *schemas.RewardSpec, in *scorer.Input,
) error {
	if q == nil {
		return nil
	}
	in.Step = q.StepIndex
	if !spec.Latent {
		return nil
	}
	if q.Latents == nil {
		return bus.Terminal(schemas.CodeInvalid, errors.New("latents: absent; must be there for the function"))
	}
	in.Latents = &scorer.Latents{Shape: q.Latents.Shape, Data: q.Latents.Data}
	if ref := q.Latents.Ref; ref != nil {
		var err error
		if in.Latents.Data, err = s.bus.GetBlob(ctx, *ref); err != nil {
			return fmt.Errorf("load the prediction: %w", err)
		}
	}
	return nil
}

// judgedMembers returns the samples of a group that have a reward at a step, in order.
func (s *service) judgedMembers(ctx context.Context, q *schemas.StepQuestion, t *schemas.Trajectory,
) (members []schemas.SelectedMember, err error) {
	var subjects []string
	for i := range t.GroupSize {
		subjects = append(subjects, schemas.StepRewardSubject(t.Run, t.UID, i, q.StepIndex))
	}
	stored, err := s.bus.LastMany(ctx, schemas.StreamVerdicts, subjects)
	if err != nil {
		return nil, fmt.Errorf("look up rewards at step %d: %w", q.StepIndex, err)
	}
	for _, m := range stored {
		if r := (&schemas.StepReward{}); bus.Fits(m, r) == nil && r.GroupSize == t.GroupSize {
			members = append(members, schemas.SelectedMember{SampleIndex: r.SampleIndex, Reward: r.Reward})
		}
	}
	slices.SortFunc(members, func(a, b schemas.SelectedMember) int { return int(a.SampleIndex - b.SampleIndex) })
	return members, nil
}

// othersEnded reports whether all samples of a group that have no reward at a step have ended: none will come.
func othersEnded(t *schemas.Trajectory, members []schemas.SelectedMember, made map[schemas.Place]bus.Made) bool {
	for i := range t.GroupSize {
		_, ended := made[schemas.Place{Stage: t.Stage, SampleIndex: i}]
		if !ended && !slices.ContainsFunc(members, func(m schemas.SelectedMember) bool { return m.SampleIndex == i }) {
			return false
		}
	}
	return true
}
