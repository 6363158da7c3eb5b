package verify

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine/images"
)

// rollAgain computes a sample of scheduled sampling again from the data it started with. It compares each state, the
// result, and the sample's place in its group's plan with what is stored. Differences are faults; an error is of the
// server or of ctx.
func (s *sample) rollAgain(ctx context.Context) error {
	t := s.t
	if err := s.checkPlan(ctx); err != nil {
		return err
	}
	states, err := s.loadStart(ctx, t.Start)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StartsGone++
		return nil
	case err != nil && !errors.Is(err, bus.ErrCorrupt):
		return fmt.Errorf("load the data it started with: %w", err)
	}
	x0 := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
	if err == nil {
		err = images.StartState(x0, states, t.SampleIndex, t.LatentsShape)
	}
	if err != nil {
		s.fault(-1, "start.data: %v", err)
		return nil
	}
	r, err := images.NewRolling(s.image.Card().SchedulerConfig, t.ScheduledSampling, t.LatentsDType, x0, t.NoiseSeed)
	if err != nil {
		s.fault(-1, "%v", err)
		return nil
	}
	if !slices.Equal(r.Sigmas(), t.Sigmas) {
		s.fault(-1, "sigmas: not those of the model's training timesteps")
		return nil
	}
	for !r.Done() {
		x, sigma := r.Point()
		output, err := s.guidedVelocity(ctx, s.version, images.Point{X: x, Sigma: sigma})
		if err != nil {
			if end := s.endsRun(ctx, s.version, err); end != nil {
				return end
			}
			return s.rollFault(err)
		}
		step, before, err := r.Advance(output)
		if err != nil {
			return s.rollFault(err)
		}
		if step != nil {
			s.compareState(t.ScheduledSampling.RollSettings.Timesteps-1-int64(step.From), slices.Clone(before))
		}
	}
	if begin, end := t.Segment(); begin < end {
		s.compareState(end, r.Latents)
	}
	return s.compareResult(ctx, r)
}

// rollFault reports why a sample cannot be rolled again. It returns nil, as a fault does not end the run.
func (s *sample) rollFault(err error) error {
	s.fault(-1, "rolled: %v", err)
	return nil
}

// checkPlan checks the plan of the sample's group against the seed that it was drawn from, and the sample's place
// against the plan. Differences are faults; an error is of the server.
func (s *sample) checkPlan(ctx context.Context) error {
	t, plan := s.t, &schemas.Plan{}
	m, err := s.bus.Last(ctx, schemas.StreamGroups, schemas.PlanSubject(t.Run, t.UID))
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.fault(-1, "plan: none is stored of the group")
		return nil
	case err != nil:
		return fmt.Errorf("look up the plan: %w", err)
	}
	if err := schemas.DecodeValid(m.Data, plan); err != nil {
		s.fault(-1, "plan: %v", err)
		return nil
	}
	if why := planFault(plan); why != "" {
		s.fault(-1, "plan: %s", why)
	}
	digest, err := plan.Digest()
	if err != nil {
		s.fault(-1, "plan: %v", err)
		return nil
	}
	mine := t.ScheduledSampling
	if digest != mine.PlanDigest || t.SampleIndex >= int64(len(plan.Samples)) ||
		plan.Samples[t.SampleIndex] != mine.Roll {
		s.fault(-1, "scheduled_sampling: not what the plan %.16s has for the sample", digest)
	}
	return nil
}

// planFault draws a plan again from its seed and returns the first difference; "" if there is none.
func planFault(p *schemas.Plan) string {
	set := scheduled.DefaultSettings()
	set.Timesteps, set.MaxStepOffset, set.Strategy = int(p.RollSettings.Timesteps), int(p.MaxStepOffset),
		scheduled.Strategy(p.Strategy)
	set.Ramp.Probability = p.Probability
	timesteps := make([]float64, len(p.Samples))
	for i, x := range p.Samples {
		timesteps[i] = x.Timestep
	}
	drawn, err := set.Draw(p.Seed, int(p.TrainStep), timesteps)
	if err != nil {
		return err.Error()
	}
	for i, x := range drawn.Samples {
		if got := p.Samples[i]; got.Source != int64(x.Source) || got.Offset != int64(x.Offset) ||
			got.Reason != string(x.Reason) {
			return fmt.Sprintf("sample %d goes from %d (offset %d, %q); its seed draws %d (offset %d, %q)", i,
				got.Source, got.Offset, got.Reason, x.Source, x.Offset, x.Reason)
		}
	}
	return ""
}

// compareState compares the state at an index, if it was kept, with the one that was computed again. It rounds x.
func (s *sample) compareState(index int64, x []float32) {
	tensor.DType(s.t.LatentsDType).Round(x)
	if stored := s.latents[index]; stored != nil {
		s.report.Rolled++
		s.recordDistance(index, stored, x)
	}
}

// recordDistance adds the distance of stored latents from those computed again to report.MaxRolled.
func (s *sample) recordDistance(index int64, stored, again []float32) {
	if len(stored) != len(again) {
		s.fault(index, "%d elements; made again %d", len(stored), len(again))
		return
	}
	s.report.MaxRolled = max(s.report.MaxRolled, Difference(distance(stored, again)))
}

// distance returns how far a stored vector is from the same computed again: |stored - again| / |again|, with
// Euclidean norms; +Inf if that is not a number. Both have the same length.
func distance(stored, again []float32) float64 {
	var d, length float64
	for i, x := range again {
		e := float64(stored[i]) - float64(x)
		d += float64(e * e)
		length += float64(float64(x) * float64(x))
	}
	off := math.Sqrt(d) / max(math.Sqrt(length), math.SmallestNonzeroFloat32)
	if math.IsNaN(off) {
		return math.Inf(1)
	}
	return off
}

// compareResult compares the result of a roll with what is stored: the latents and, if the sample was made on the
// same backend, also its numbers and digests. Differences are faults; an error is of the server.
func (s *sample) compareResult(ctx context.Context, r *images.Rolling) error {
	t := s.t
	stored := t.Rolled
	want, err := r.Result(t.LatentsShape)
	if err != nil {
		return s.rollFault(err)
	}
	if stored.Latents.Ref == nil || stored.Latents.DType != t.LatentsDType ||
		!slices.Equal(stored.Latents.Shape, t.LatentsShape) {
		s.fault(-1, "rolled.latents: %s %v; must be a blob of %s %v", stored.Latents.DType, stored.Latents.Shape,
			t.LatentsDType, t.LatentsShape)
		return nil
	}
	data, err := s.bus.GetBlob(ctx, *stored.Latents.Ref)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StepsGone++
		return nil
	case errors.Is(err, bus.ErrCorrupt):
		s.fault(-1, "rolled.latents: %v", err)
		return nil
	case err != nil:
		return fmt.Errorf("load the rolled latents: %w", err)
	}
	latents := make([]float32, len(r.Latents))
	if err := tensor.DType(t.LatentsDType).DecodeFloats(latents, data); err != nil {
		s.fault(-1, "rolled.latents: %v", err)
		return nil
	}
	s.report.Rolled++
	s.recordDistance(-1, latents, r.Latents)
	same := func(field string, got, want any) {
		if got != want {
			s.fault(-1, "rolled.%s: stored %v, made again %v", field, got, want)
		}
	}
	same("timestep", stored.Timestep, want.Timestep)
	same("u", stored.U, want.U)
	same("a", stored.A, want.A)
	same("forwards", stored.Forwards, want.Forwards)
	if t.Backend != s.model.Backend() {
		return nil // another backend rounds differently; only the latents have a tolerance
	}
	same("teacher_digest", stored.TeacherDigest, want.TeacherDigest)
	same("drift", number(stored.Drift), number(want.Drift))
	for _, p := range []struct {
		field        string
		stored, want *schemas.Prediction
	}{{"clean", stored.Clean, want.Clean}, {"biased", stored.Biased, want.Biased}} {
		if p.want == nil || p.stored == nil {
			same(p.field, p.stored != nil, p.want != nil)
			continue
		}
		same(p.field+".digest", p.stored.Digest, p.want.Digest)
		if err := s.checkPrediction(ctx, p.field, p.stored); err != nil {
			return err
		}
	}
	if want.ReflexFlow != nil {
		same("reflexflow", *stored.ReflexFlow, *want.ReflexFlow)
	}
	return nil
}

// checkPrediction checks that the tensor of a prediction, if it was kept, has the prediction's digest.
func (s *sample) checkPrediction(ctx context.Context, field string, p *schemas.Prediction) error {
	if p.Tensor == nil || p.Tensor.Ref == nil {
		return nil
	}
	data, err := s.bus.GetBlob(ctx, *p.Tensor.Ref)
	switch sum := sha256.Sum256(data); {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StepsGone++
	case err != nil && !errors.Is(err, bus.ErrCorrupt):
		return fmt.Errorf("load the %s prediction: %w", field, err)
	case err != nil:
		s.fault(-1, "rolled.%s: %v", field, err)
	case hex.EncodeToString(sum[:]) != p.Digest:
		s.fault(-1, "rolled.%s.tensor: %x; must have the digest %.16s", field, sum[:8], p.Digest)
	}
	return nil
}
