package recorder

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
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

const (
	// resumeAge is the age up to which an attempt takes over a step. By default steps are kept a day longer than
	// trajectories, so a step taken over is kept as long as the trajectory that names it.
	resumeAge = 12 * time.Hour
	// resumeLooks bounds the messages that are read beyond one for each step: other users may store invalid ones.
	resumeLooks = 64
	// resumeFaults is how many steps that cannot be used are logged.
	resumeFaults = 8
)

// Resume returns the last stored state that the attempt can go on from, and takes over the steps before it; nil where
// there is none. It uses only steps that a sampler of this program sealed for this request (see seal). Where the
// stored steps cannot be listed, it logs that and returns nil: the attempt begins from the start. An error is one of
// the server while it reads a step, and may pass.
func (r *Recorder) Resume(ctx context.Context) (*schemas.SegmentStart, error) {
	plan := sampling.Plan(&r.req.Sampling)
	judged := r.req.Group.JudgedSteps()
	states := slices.DeleteFunc(slices.Concat(r.req.CheckpointStepIndices, r.req.ReturnStepIndices),
		func(i int64) bool {
			return i <= int64(plan.Begin) || i >= int64(plan.End) || plan.CheckStart(int(i)) != nil ||
				slices.Contains(judged, i) // it is judged there by the velocity of the step before, which is not stored
		})
	if len(states) == 0 {
		return nil, nil
	}
	slices.Sort(states)
	search, err := r.startSearch(ctx)
	if err != nil && ctx.Err() == nil {
		zerolog.Ctx(ctx).Warn().Err(err).Msg("begins again: cannot look for what earlier attempts have stored")
		return nil, nil
	}
	if err != nil || search == nil {
		return nil, err
	}
	var found []*storedStep
	var from *schemas.SegmentStart
	before := r.seal
	for i := int64(plan.Begin); i <= states[len(states)-1]; i++ {
		step, err := search.findStep(ctx, i, before)
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
		zerolog.Ctx(ctx).Info().Int("steps",
			len(found)).Msg("begins again: earlier attempts left no state to go on from")
		return nil, nil
	}
	from.Latents.Shape = append([]int64{1}, from.Latents.Shape...)
	for _, step := range found[:from.StepIndex-int64(plan.Begin)] {
		r.takeOver(step)
	}
	taken := len(r.steps)
	r.store.Metrics.Resumed.Inc()
	r.store.Metrics.ResumedSteps.Add(float64(taken))
	zerolog.Ctx(ctx).Info().Int64("step", from.StepIndex).Int("taken_over", taken).Str("attempt",
		found[taken-1].event.Attempt).Msg("goes on from a stored state")
	return from, nil
}

// Steps is where steps of earlier attempts are looked for.
type Steps interface {
	Last(ctx context.Context, stream, subject string) (*bus.Message, error)
	Subjects(ctx context.Context, stream, filter string) (map[string]uint64, error)
	LoadStep(ctx context.Context, m *bus.Message) (*schemas.Step, error)
}

// storedStep is a step of an earlier attempt whose seal is right.
type storedStep struct {
	event   *schemas.Step
	ref     schemas.StepRef
	content [32]byte
	seal    seal
}

// stepSearch looks for the steps of earlier attempts at one sample.
type stepSearch struct {
	stored       Steps
	sealer       *Sealer
	req          *schemas.Request
	backend      string          // of the attempt that searches
	policy       *schemas.Policy // of the attempt that searches
	attempts     []string        // tokens of earlier attempts; the likeliest to have the next step first
	counts       map[string]int  // stored steps by attempt
	subjects     map[string]bool // of all stored steps
	triesLeft    int             // messages that may still be read
	faultsLogged int             // steps that were logged as unused
	shape        []int64         // of a state: [S, C]
}

// startSearch lists the stored steps of the sample, for Resume; nil if there are none. An error is of the server.
func (r *Recorder) startSearch(ctx context.Context) (*stepSearch, error) {
	q := r.req
	shapeOf := r.store.Can.StateShape
	if shapeOf == nil {
		return nil, nil
	}
	shape, err := shapeOf(q)
	if err != nil || shape == nil {
		return nil, err // Engine.Start reports the same fault
	}
	filter := schemas.Address{
		Kind: schemas.KindStep, Run: q.Run, UID: q.UID,
		Sample: strconv.FormatInt(q.SampleIndex, 10),
	}.Filter()
	switch _, err := r.store.Steps.Last(ctx, schemas.StreamSteps, filter); {
	case errors.Is(err, bus.ErrNotFound): // the usual case costs one cheap request
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for steps of earlier attempts: %w", err)
	}
	subjects, err := r.store.Steps.Subjects(ctx, schemas.StreamSteps, filter)
	if err != nil {
		return nil, fmt.Errorf("look for steps of earlier attempts: %w", err)
	}
	f := &stepSearch{
		stored: r.store.Steps, sealer: r.sealer, req: q, backend: r.backend, policy: r.policy, counts: map[string]int{},
		subjects: map[string]bool{}, triesLeft: len(q.Transitions) + resumeLooks,
		shape: shape,
	}
	for subject := range subjects {
		if a, ok := schemas.ParseSubject(subject); ok && a.Kind == schemas.KindStep {
			f.subjects[subject] = true
			f.counts[a.Attempt]++
		}
	}
	for attempt := range f.counts {
		f.attempts = append(f.attempts, attempt)
	}
	slices.SortFunc(f.attempts, func(a, b string) int {
		return cmp.Or(cmp.Compare(f.counts[b], f.counts[a]), cmp.Compare(a, b))
	})
	return f, nil
}

// findStep returns the step with an index whose seal continues before, of any attempt, that of the last find first;
// nil: none. Steps that do not fit, or cannot be read, are logged and made again.
func (f *stepSearch) findStep(ctx context.Context, index int64, before seal) (*storedStep, error) {
	for at, attempt := range f.attempts {
		subject := schemas.StepSubject(f.req.Run, f.req.UID, f.req.SampleIndex, f.req.Stage, attempt, index)
		if !f.subjects[subject] {
			continue
		}
		if f.triesLeft--; f.triesLeft < 0 {
			f.logUnused(ctx, attempt, index, errors.New("too many stored messages are not steps of this request"))
			return nil, nil
		}
		m, err := f.stored.Last(ctx, schemas.StreamSteps, subject)
		if errors.Is(err, bus.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look for step %d of attempt %s: %w", index, attempt, err)
		}
		step, err := f.checkStep(ctx, m, before)
		if err == nil {
			// The next step is likely to be of the same attempt: it moves to the front.
			copy(f.attempts[1:at+1], f.attempts[:at])
			f.attempts[0] = attempt
			return step, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		f.logUnused(ctx, attempt, index, err)
	}
	return nil, nil
}

// logUnused logs why a stored step is not taken over, for the first few.
func (f *stepSearch) logUnused(ctx context.Context, attempt string, index int64, fault error) {
	if f.faultsLogged++; f.faultsLogged <= resumeFaults {
		zerolog.Ctx(ctx).Warn().Err(fault).Str("attempt", attempt).Int64("step",
			index).Msg("a step of an earlier attempt is not used")
	}
}

// checkStep loads a stored message as a step that the attempt may take over; the error says why it is none.
func (f *stepSearch) checkStep(ctx context.Context, m *bus.Message, before seal) (*storedStep, error) {
	if age := time.Since(m.Time); age > resumeAge {
		return nil, fmt.Errorf("stored %v ago; must be at most %v, so that it is kept for as long as the trajectory",
			age.Round(time.Minute), resumeAge)
	}
	event := &schemas.Step{}
	if err := bus.Fits(m, event); err != nil {
		return nil, err
	}
	for _, of := range []struct {
		field     string
		has, want any
	}{
		{"schedule_digest", event.ScheduleDigest, f.req.ScheduleDigest},
		{"weights_digest", event.WeightsDigest, f.policy.WeightsDigest},
		{"policy_version", event.PolicyVersion, f.policy.PolicyVersion},
		{"backend", backendClass(event.Backend), backendClass(f.backend)},
	} {
		if of.has != of.want {
			return nil, fmt.Errorf("%s: %.64q; must be %.64q", of.field, fmt.Sprint(of.has), fmt.Sprint(of.want))
		}
	}
	sums, err := schemas.SumTensors(event)
	if err != nil {
		return nil, err
	}
	content := schemas.ContentDigestOf(event, sums)
	step := &storedStep{content: content, seal: f.sealer.sealAfter(before, content, event, sums)}
	if !hmac.Equal([]byte(event.Seal), []byte(step.seal.String())) {
		return nil, errors.New("seal: not that of a sampler of this program for this request and the steps before")
	}
	step.ref = schemas.StepRef{Seq: m.Seq, Attempt: event.Attempt}
	if step.ref.Digest, err = schemas.PayloadDigest(m.Data); err != nil {
		return nil, err
	}
	if step.event, err = f.stored.LoadStep(ctx, m); err != nil {
		return nil, err
	}
	if state := step.event.State(event.StepIndex); state != nil &&
		(state.DType != f.req.LatentsDType || !slices.Equal(state.Shape, f.shape)) {
		return nil, fmt.Errorf("state: %s of shape %v; must be %s of %v", state.DType, state.Shape, f.req.LatentsDType,
			f.shape)
	}
	return step, nil
}
