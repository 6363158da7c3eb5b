package verify

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// endedByReward reports whether a sample may have ended in the middle by rewards at a step.
func endedByReward(t *schemas.Trajectory) bool {
	return t.StopReason == schemas.StopPruned && t.Text == nil && len(t.Steps) > 0 && len(t.Group.JudgedSteps()) > 0
}

// checkJudgedSteps makes the predictions again by which functions judged a sample in the middle, where the state
// before is stored, and the choice of those of its group that ended.
func (s *sample) checkJudgedSteps(ctx context.Context) error {
	t := s.t
	begin, _ := t.Segment()
	for _, k := range t.Group.JudgedSteps() {
		n, givenUp := int(k-begin), k <= begin && t.Sibling() != nil
		if !givenUp && (n < 1 || n > len(s.steps) || slices.Contains(s.steps[:n], nil)) {
			continue // it ended before, or steps are gone, which is counted elsewhere
		}
		r := &schemas.StepReward{}
		subject := schemas.StepRewardSubject(t.Run, t.UID, t.SampleIndex, k)
		_, err := s.bus.StoredEvent(ctx, schemas.StreamVerdicts, subject, r, nil)
		if errors.Is(err, bus.ErrNotFound) {
			s.report.StepsGone++
			continue
		}
		switch {
		case err != nil:
		case givenUp:
			err = s.checkGivenUp(ctx, r)
		default:
			err = s.checkJudgedStep(ctx, s.steps[:n], r)
		}
		if err == nil {
			err = s.checkSelection(ctx, r)
		}
		if err != nil {
			return fmt.Errorf("what was said at step %d: %w", k, err)
		}
	}
	return nil
}

// checkJudgedStep makes the prediction after some steps again, and compares it with what was judged.
func (s *sample) checkJudgedStep(ctx context.Context, steps []*schemas.Step, r *schemas.StepReward) error {
	var content [][32]byte
	for _, step := range steps {
		digest, err := schemas.ContentDigest(step)
		if err != nil {
			return nil // loadSteps says so
		}
		content = append(content, digest)
	}
	last := steps[len(steps)-1]
	state := last.State(last.StepIndex)
	if state == nil || schemas.StepsDigest(content) != r.ContentDigest {
		s.report.StepsSkipped++ // the state is not kept; or the sample began again, and what was said first counts
		return nil
	}
	n, _ := state.ElementCount()
	x := make([]float32, n)
	if err := tensor.DType(state.DType).DecodeFloats(x, state.Data); err != nil {
		s.fault(last.StepIndex, "%v", err)
		return nil
	}
	with, err := s.versionWith(ctx, last.WeightsDigest)
	if err != nil || !s.isAvailable(with, last.StepIndex) {
		return err
	}
	v, err := s.guidedVelocity(ctx, with, images.Point{Step: last.StepIndex, X: x, Sigma: last.Sigma})
	if err == nil {
		err = s.comparePrediction(ctx, images.Predicted(x, v, last.Sigma), r)
	}
	if err != nil {
		if end := s.endsRun(ctx, with, err); end != nil {
			return end
		}
		s.fault(r.StepIndex, "prediction: %v", err)
		return nil
	}
	s.report.Predictions++
	return nil
}

// checkGivenUp takes the steps again that a sample gave up to go on from another, whose events are gone, and compares
// the prediction after them with what was judged.
func (s *sample) checkGivenUp(ctx context.Context, r *schemas.StepReward) error {
	if r.WeightsDigest == "" {
		s.report.StepsSkipped++ // not known which weights took which of them
		return nil
	}
	plan := sampling.Plan(&s.t.Sampling)
	plan.Begin, plan.End = 0, int(r.StepIndex)
	x := make([]float32, s.t.LatentsShape[0]*s.t.LatentsShape[1])
	sampling.InitialNoise(x, &s.t.Sampling)
	tensor.DType(s.t.LatentsDType).Round(x)
	var prediction []float32
	err := s.takeSteps(ctx, plan, x, func(int) string { return r.WeightsDigest }, func(step *flow.Step) {
		prediction = images.Predicted(step.X, step.Velocity, step.Sigma)
	})
	if err != nil || prediction == nil {
		return err
	}
	s.report.Predictions++
	if err := s.comparePrediction(ctx, prediction, r); err != nil {
		if end := s.endsRun(ctx, s.version, err); end != nil {
			return end
		}
		s.fault(r.StepIndex, "prediction: %v", err)
	}
	return nil
}

// comparePrediction compares latents and digests of a prediction; pixels where the model gives the same bits again.
func (s *sample) comparePrediction(ctx context.Context, x []float32, r *schemas.StepReward) error {
	if l := r.Latents; l != nil {
		data, stored := l.Data, make([]float32, len(x))
		if l.Ref != nil {
			var err error
			if data, err = s.bus.GetBlob(ctx, *l.Ref); err != nil {
				return err
			}
		}
		if err := tensor.DType(l.DType).DecodeFloats(stored, data); err != nil {
			return err
		}
		s.report.MaxRolled = max(s.report.MaxRolled, magnitude(distance(stored, x)))
	}
	if len(r.Media) == 0 || s.image.Card().Tolerance > 0 {
		return nil
	}
	m, err := model.Decode(ctx, s.image, x, sampling.SizeOf(&s.t.Sampling), s.conds[0])
	if err != nil {
		return err
	}
	for _, of := range r.Media {
		got := m.Digest()
		switch of.Kind {
		case schemas.KindImage:
			got = m.Middle().Digest()
		case schemas.KindAudio:
			got = m.Sound.Digest()
		}
		if got != of.Digest {
			s.fault(r.StepIndex, "prediction: %s %.16s was judged, the steps give %.16s", of.Kind, of.Digest, got)
		}
	}
	return nil
}

// checkSelection chooses those of a group that end at a step again, and compares it with what is stored and with what
// became of the sample.
func (s *sample) checkSelection(ctx context.Context, r *schemas.StepReward) error {
	e := &schemas.Selection{}
	subject := schemas.SelectionSubject(r.Run, r.UID, r.StepIndex)
	_, err := s.bus.StoredEvent(ctx, schemas.StreamVerdicts, subject, e, nil)
	if errors.Is(err, bus.ErrNotFound) { // no rule
		return nil
	}
	if err != nil {
		return err
	}
	again := slices.Clone(e.Members)
	e.Rule.Select(again)
	if !reflect.DeepEqual(again, e.Members) {
		s.fault(r.StepIndex, "selection: not that of its rule and rewards")
	}
	for _, m := range e.Members {
		if m.SampleIndex == r.SampleIndex && !sameNumber(m.Reward, r.Reward) {
			s.fault(r.StepIndex, "selection: reward %s, the sample has %s", number(m.Reward), number(r.Reward))
		}
	}
	if !e.FollowedBy(s.t) {
		s.fault(r.StepIndex, "selection: the sample %s, its trajectory did not", e.Of(r.SampleIndex))
	}
	if why := e.Stopped(r.SampleIndex); why != "" && s.t.Error != why {
		s.fault(r.StepIndex, "selection: the sample ends (%s), its trajectory is %s %s", why, s.t.StopReason, s.t.Error)
	}
	return nil
}
