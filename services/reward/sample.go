package reward

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/pkg/stages"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// complete scores one sample and publishes its reward. If a score is missing that may still come, it returns when to
// try again. whole are the scores of functions that rated its group, by index in Group.Reward. seq is the sequence of
// the sample's trajectory.
func (s *service) complete(ctx context.Context, t *schemas.Trajectory, seq uint64,
	whole map[int]scored,
) (_ delay, err error) {
	m := s.cache.sample(t, seq)
	if err := m.lock(ctx); err != nil {
		return delay{}, err
	}
	defer m.unlock()
	if m.done {
		return delay{}, nil
	}
	if len(t.Group.Stages) > 0 && m.ran == nil {
		if m.ran, _, err = s.ranFor(ctx, t, ""); err != nil {
			return delay{}, err
		}
		switch _, err := s.stored(ctx, t, seq); { // an earlier delivery may have finished it
		case err == nil:
			m.done = true
			return delay{}, nil
		case !errors.Is(err, bus.ErrNotFound):
			return delay{}, err
		}
	}
	if t.StopReason == schemas.StopPruned {
		r := failed(t, seq, t.Error)
		r.Status = schemas.StatusPruned
		return delay{}, s.finish(ctx, m, r)
	}
	if t.StopReason != schemas.StopCompleted {
		why := fmt.Sprintf("trajectory %s: %s", t.StopReason, t.Error)
		switch {
		case t.StopReason == "": // no later stage can be asked for
			why = t.Error
		case len(t.Group.Stages) > 0:
			why = fmt.Sprintf("stage %s: %s", t.Stage, why)
		}
		return delay{}, s.finish(ctx, m, failed(t, seq, why))
	}
	if m.scores == nil {
		m.scores = make([]*scored, len(t.Group.Reward))
		m.waits = newWaits(len(m.scores))
		for i := range m.scores {
			if spec := &t.Group.Reward[i]; spec.Latent {
				m.scores[i] = &scored{} // it has no part in the reward of a sample that has ended
			} else if m.judged(t, spec) == nil {
				m.scores[i] = &scored{Result: scorer.Result{Err: whyNotJudged(t, spec)}}
			}
		}
	}
	for i, r := range whole {
		m.scores[i] = &r
	}
	due := s.due(t)
	waits, err := s.useVerdicts(ctx, t, m, due)
	if err != nil {
		return delay{}, err
	}
	after, err := s.scoreMissing(ctx, t, m, due)
	if p, ok := errors.AsType[*imageError](err); ok && errors.Is(err, bus.ErrNotFound) {
		return delay{}, s.finish(ctx, m, failed(t, seq, fmt.Sprintf("the sample is no longer stored: %v", p.error)))
	}
	switch {
	case err != nil:
		return delay{}, err
	case after > 0:
		return delay{after: after}, nil
	case waits:
		return s.waitForOthers(due), nil
	}
	for i := range m.scores {
		if m.scores[i] == nil {
			err := errors.New("the group was rated without this sample, which came too late")
			if len(t.Media) == 0 && t.Text == nil {
				err = noMedium(t, "")
			}
			m.scores[i] = &scored{Result: scorer.Result{Err: err}}
		}
	}
	return delay{}, s.finish(ctx, m, combined(t, seq, m))
}

// judged returns the trajectory that a function judges: that of the sample or, of several stages, of the newest that it
// may; nil: none of these ran.
func (m *memo) judged(t *schemas.Trajectory, spec *schemas.RewardSpec) *schemas.Trajectory {
	if len(t.Group.Stages) == 0 {
		return t
	}
	return stages.Judged(&t.Group, spec, trajectories(m.ran))
}

// whyNotJudged returns the error of a function for which no stage of a sample ran.
func whyNotJudged(t *schemas.Trajectory, spec *schemas.RewardSpec) error {
	of := spec.Stage
	for _, s := range t.Group.Stages {
		if of == "" && slices.Contains(s.JudgedBy, spec.Name) {
			of = s.Name
		}
	}
	return fmt.Errorf("stage %s did not run: the sample ended before it", of)
}

// finish publishes the reward of a sample and notes in m that it is done.
func (s *service) finish(ctx context.Context, m *memo, r *schemas.Reward) error {
	for _, x := range m.ran {
		r.Stages = append(r.Stages, x.AsStage(x.Seq))
	}
	if err := s.publish(ctx, r); err != nil {
		return err
	}
	m.done = true
	s.cache.forget(r)
	return nil
}

// combined returns the reward of a sample that has all scores: their weighted sum, or the status failed if a required
// score failed.
func combined(t *schemas.Trajectory, seq uint64, m *memo) *schemas.Reward {
	r, scores := outline(t, seq), m.scores
	var parts []scorer.Part
	var of []int // their places in scores
	for i, spec := range t.Group.Reward {
		if spec.Latent && m.midway == nil {
			continue
		}
		of, parts = append(of, i), append(parts, scorer.Part{
			Name: spec.Name, Weight: *spec.Weight, Required: *spec.Required, Value: scores[i].Value, Err: scores[i].Err,
		})
	}
	var sum float64
	var err error
	if len(parts) > 0 { // without functions the reward is 0
		sum, err = scorer.Combine(parts)
	}
	if fault := faultOf(sum); err == nil && fault != nil {
		err = fmt.Errorf("weighted sum is %w", fault)
	}
	for k, part := range parts { // after Combine, which sets the error of values that are not numbers
		i := of[k]
		score := schemas.Score{
			Name: part.Name, Version: scores[i].version, Weight: part.Weight,
			DurationNS: max(0, scores[i].took.Nanoseconds()), Members: scores[i].members,
		}
		if of := m.judged(t, &t.Group.Reward[i]); of != nil && len(t.Group.Stages) > 0 {
			score.Stage = of.Stage
		}
		if part.Err != nil {
			score.Status, score.Error = schemas.StatusFailed, part.Err.Error()
		} else {
			score.Status, score.Value = schemas.StatusScored, new(part.Value)
			score.Detail, score.Exact = scores[i].Detail, scores[i].Exact
		}
		r.Scores = append(r.Scores, score)
	}
	if err != nil {
		r.Status, r.Error = schemas.StatusFailed, err.Error()
	} else {
		r.Status, r.Reward = schemas.StatusScored, &sum
	}
	return r
}

// scoreMissing calls, in parallel, the functions whose scores a sample lacks, and adds the scores to m. A positive
// after says when to try again those that are busy or away. From due on they count as failed. The error is an
// imageError, about the sample's image or text, or that of ctx.
func (s *service) scoreMissing(ctx context.Context, t *schemas.Trajectory, m *memo, due time.Time,
) (after time.Duration, err error) {
	expired := !time.Now().Before(due)
	limited := ctx
	if !expired {
		var cancel context.CancelFunc
		limited, cancel = context.WithDeadline(ctx, due)
		defer cancel()
	}
	files, texts := map[*schemas.Trajectory]*sampleFiles{}, map[*schemas.Trajectory]*sharedText{}
	metadata, err := t.Group.Metadata.Map()
	if err != nil {
		return 0, err
	}
	results := make([]*scored, len(m.scores))
	var calls sync.WaitGroup
	for i, spec := range t.Group.Reward {
		if m.scores[i] != nil || scoredElsewhere(spec) {
			continue
		}
		e, err := s.catalog.find(spec.Name)
		var of *schemas.Medium
		t := m.judged(t, &spec)
		if files[t] == nil {
			files[t], texts[t] = s.filesOf(t), &sharedText{bus: s.bus, t: t}
		}
		files, text := files[t], texts[t]
		if t.Text == nil && err == nil && !spec.Latent {
			if of = judged(t, spec.Track, e.scorer); of == nil { // without a file only verdicts are possible
				err = noMedium(t, spec.Track)
			}
		}
		if err != nil {
			m.scores[i] = &scored{Result: scorer.Result{Err: err}}
			continue
		}
		since := m.since[i]
		if since.IsZero() {
			since = time.Now()
		}
		patient := scorer.WithRetryDeadline(limited, since.Add(s.cfg.ScorePatience))
		calls.Go(func() {
			r := e.pool.score(patient, e.scorer, func(ctx context.Context, wait bool) (scorer.Input, func(), error) {
				in := scorer.Input{
					Prompt: t.Prompt, GroundTruth: spec.GroundTruth.Text(), Truth: spec.GroundTruth.Value(),
					Params: spec.Params, Metadata: metadata, Trace: tracing.Header(patient),
				}
				err := s.seeMidway(ctx, m.midway, &spec, &in)
				if t.Text != nil {
					in.Text, err = text.load(ctx)
				}
				if t.Text != nil || spec.Latent {
					return in, func() {}, err
				}
				release, err := files.load(ctx, wait, e.scorer, of, &in)
				return in, release, err
			})
			results[i] = &r
		})
	}
	calls.Wait()
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	for i, r := range results {
		if r == nil {
			continue
		}
		if p, ok := errors.AsType[*imageError](r.Err); ok {
			err = p
			continue
		}
		wait := s.retryAfter(&m.waits, i, t.Group.Reward[i].Name, r, due, expired)
		if wait == 0 {
			m.scores[i] = r
		}
		after = max(after, wait)
	}
	return after, err
}

// retryAfter returns when to call a function again, or 0 if the result r counts. A score that does not come before the
// deadline, or before ScorePatience is over, counts as failed; then it adds that reason to r. i is the function's
// index.
func (s *service) retryAfter(m *waits, i int, name string, r *scored, due time.Time,
	expired bool,
) (again time.Duration) {
	now := time.Now()
	expired = expired || !now.Before(due)
	busy, full := errors.AsType[*busyError](r.Err)
	away := errors.Is(r.Err, scorer.ErrUnavailable)
	switch {
	case errors.Is(r.Err, errStopping):
		return shortestTurn
	case expired && (full || away || errors.Is(r.Err, context.DeadlineExceeded)):
		r.Err = fmt.Errorf("no score by %s: %w", clock(due), r.Err)
		return 0
	case full:
		s.metrics.PutBack.WithLabelValues(name, "busy").Inc()
		return until(busy.after, now, due)
	case !away:
		return 0
	}
	if m.since[i].IsZero() {
		m.since[i] = now
	}
	left := s.cfg.ScorePatience - now.Sub(m.since[i])
	if left <= 0 {
		r.Err = fmt.Errorf("no score within %v: %w", s.cfg.ScorePatience, r.Err)
		return 0
	}
	m.tries[i]++
	again = min(firstRetry<<min(m.tries[i]-1, 8), longestRetry)
	if spared, ok := errors.AsType[*breakerError](r.Err); ok {
		again = max(again, spared.after)
	}
	again = again/2 + rand.N(again) // samples that failed together need not come together
	s.metrics.PutBack.WithLabelValues(name, "away").Inc()
	return until(min(again, left+time.Millisecond), now, due)
}

const (
	firstRetry   = 500 * time.Millisecond
	longestRetry = 15 * time.Second
)

// until returns d, shortened so that the sample comes again at its deadline at the latest; at least a millisecond.
func until(d time.Duration, now, due time.Time) time.Duration {
	return max(time.Millisecond, min(d, due.Sub(now)+time.Millisecond))
}

// clock formats a time for messages.
func clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }
