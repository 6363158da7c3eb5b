package sampler

import (
	"cmp"
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// resumeAge is how old a step may be that an attempt takes over: by default steps are kept a
	// day longer than the trajectories that name them.
	resumeAge = 12 * time.Hour
	// resumeLooks bounds the steps that are looked at beyond one for each index: anybody may
	// store what is none.
	resumeLooks = 64
	// resumeFaults bounds the log.
	resumeFaults = 8
)

// resume finds the last stored state of the sample that an attempt can go on from, and has r take
// over the steps before it; nil where there is none. Nothing counts that was not sealed by
// a sampler of this program for this very request.
func (s *service) resume(ctx context.Context, r *recorder) (*schemas.SegmentStart, error) {
	plan := planOf(r.req)
	states := slices.DeleteFunc(slices.Concat(r.req.CheckpointStepIndices, r.req.ReturnStepIndices), func(i int64) bool {
		return i <= int64(plan.Begin) || i >= int64(plan.End) || plan.Enter(int(i)) != nil
	})
	if len(states) == 0 {
		return nil, nil
	}
	slices.Sort(states)
	search, err := s.search(ctx, r)
	if err != nil && ctx.Err() == nil {
		zerolog.Ctx(ctx).Warn().Err(err).Msg("begins again: cannot look for what earlier attempts have stored")
		return nil, nil
	}
	if err != nil || search == nil {
		return nil, err
	}
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	defer s.loaded()
	var found []*storedStep
	var from *schemas.SegmentStart
	before := r.seal
	for i := int64(plan.Begin); i <= states[len(states)-1]; i++ {
		step, err := search.find(ctx, i, before)
		if err != nil {
			return nil, err
		}
		if step == nil {
			break
		}
		if _, ok := slices.BinarySearch(states, i); ok {
			from = &schemas.SegmentStart{StepIndex: i, Latents: step.event.State(i)}
		}
		step.event.Latents, step.event.Debug, step.event.Checkpoint = nil, nil, nil
		found, before = append(found, step), step.seal
	}
	if from == nil {
		zerolog.Ctx(ctx).Info().Int("steps", len(found)).Msg("begins again: earlier attempts left no state to go on from")
		return nil, nil
	}
	from.Latents.Shape = append([]int64{1}, from.Latents.Shape...)
	for _, step := range found[:from.StepIndex-int64(plan.Begin)] {
		r.takeOver(step)
	}
	taken := len(r.steps)
	s.metrics.resumed.Inc()
	s.metrics.resumedSteps.Add(float64(taken))
	zerolog.Ctx(ctx).Info().Int64("step", from.StepIndex).Int("taken_over", taken).Str("attempt", found[taken-1].event.Attempt).Msg("goes on from a stored state")
	return from, nil
}

// storedStep is a step of an earlier attempt that counts.
type storedStep struct {
	event   *schemas.Step
	ref     schemas.StepRef
	content [32]byte
	seal    seal
}

// search looks for the steps of earlier attempts at a sample.
type search struct {
	s        *service
	req      *schemas.Request
	backend  string          // of the attempt that goes on
	weights  *weights        // that it is made with
	attempts []string        // those that may have steps, the likeliest first
	stored   map[string]int  // steps by attempt
	subjects map[string]bool // of steps
	looks    int             // that are left
	faults   int             // that were logged
	shape    []int64         // of a state
}

// search lists what is stored of a sample; nil where there is nothing.
func (s *service) search(ctx context.Context, r *recorder) (*search, error) {
	q := r.req
	filter := schemas.Address{Kind: schemas.KindStep, Run: q.Run, UID: q.UID, Sample: strconv.FormatInt(q.SampleIndex, 10)}.Filter()
	switch _, err := s.bus.Last(ctx, schemas.StreamSteps, filter); {
	case errors.Is(err, bus.ErrNotFound): // the usual case, told by one cheap request
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for steps of earlier attempts: %w", err)
	}
	subjects, err := s.bus.Subjects(ctx, schemas.StreamSteps, filter)
	if err != nil {
		return nil, fmt.Errorf("look for steps of earlier attempts: %w", err)
	}
	card := s.network.Images.Card()
	tokens, err := card.Tokens(int(q.Height), int(q.Width))
	if err != nil {
		return nil, err // the engine says so
	}
	f := &search{
		s: s, req: q, backend: r.backend, weights: r.weights, stored: map[string]int{}, subjects: map[string]bool{}, looks: len(q.Transitions) + resumeLooks,
		shape: []int64{int64(tokens), int64(card.LatentChannels)},
	}
	for subject := range subjects {
		if a, ok := schemas.ParseSubject(subject); ok && a.Kind == schemas.KindStep {
			f.subjects[subject] = true
			f.stored[a.Attempt]++
		}
	}
	for attempt := range f.stored {
		f.attempts = append(f.attempts, attempt)
	}
	slices.SortFunc(f.attempts, func(a, b string) int {
		return cmp.Or(cmp.Compare(f.stored[b], f.stored[a]), cmp.Compare(a, b))
	})
	return f, nil
}

// find returns the step with an index that goes on from what has that seal, of any attempt;
// nil where there is none.
func (f *search) find(ctx context.Context, index int64, before seal) (*storedStep, error) {
	for at, attempt := range f.attempts {
		subject := schemas.StepSubject(f.req.Run, f.req.UID, f.req.SampleIndex, attempt, index)
		if !f.subjects[subject] {
			continue
		}
		if f.looks--; f.looks < 0 {
			f.log(ctx, attempt, index, errors.New("too much is stored that is none"))
			return nil, nil
		}
		m, err := f.s.bus.Last(ctx, schemas.StreamSteps, subject)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look for step %d of attempt %s: %w", index, attempt, err)
		}
		step, err := f.check(ctx, m, before)
		if err == nil {
			// What follows is likely to be of the same attempt.
			copy(f.attempts[1:at+1], f.attempts[:at])
			f.attempts[0] = attempt
			return step, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		f.log(ctx, attempt, index, err)
	}
	return nil, nil
}

func (f *search) log(ctx context.Context, attempt string, index int64, fault error) {
	if f.faults++; f.faults <= resumeFaults {
		zerolog.Ctx(ctx).Warn().Err(fault).Str("attempt", attempt).Int64("step", index).Msg("a step of an earlier attempt is not used")
	}
}

// check says why a stored message is not a step to take over, or loads it.
func (f *search) check(ctx context.Context, m *bus.Message, before seal) (*storedStep, error) {
	if age := time.Since(m.Time); age > resumeAge {
		return nil, fmt.Errorf("stored %v ago; must be at most %v, so that it is kept for as long as the trajectory", age.Round(time.Minute), resumeAge)
	}
	event := &schemas.Step{}
	if err := bus.Fits(m, event); err != nil {
		return nil, err
	}
	with := f.weights
	for _, of := range []struct {
		field     string
		has, want any
	}{
		{"schedule_digest", event.ScheduleDigest, f.req.ScheduleDigest},
		{"weights_digest", event.WeightsDigest, with.policy.WeightsDigest},
		{"policy_version", event.PolicyVersion, with.version()},
		{"backend", alike(event.Backend), alike(f.backend)},
	} {
		if of.has != of.want {
			return nil, fmt.Errorf("%s: %.64q; must be %.64q", of.field, fmt.Sprint(of.has), fmt.Sprint(of.want))
		}
	}
	sums, err := event.TensorSums()
	if err != nil {
		return nil, err
	}
	content := event.ContentDigestOf(sums)
	step := &storedStep{content: content, seal: f.s.sealer.next(before, content, event, sums)}
	if !hmac.Equal([]byte(event.Seal), []byte(step.seal.String())) {
		return nil, errors.New("seal: not that of a sampler of this program for this request and the steps before")
	}
	step.ref = schemas.StepRef{Seq: m.Seq, Attempt: event.Attempt}
	if step.ref.Digest, err = schemas.PayloadDigest(m.Data); err != nil {
		return nil, err
	}
	if step.event, err = f.s.bus.LoadStep(ctx, m); err != nil {
		return nil, err
	}
	if state := step.event.State(event.StepIndex); state != nil && (state.DType != f.req.LatentsDType || !slices.Equal(state.Shape, f.shape)) {
		return nil, fmt.Errorf("state: %s of shape %v; must be %s of %v", state.DType, state.Shape, f.req.LatentsDType, f.shape)
	}
	return step, nil
}
