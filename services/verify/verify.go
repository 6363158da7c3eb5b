// Package verify proves what a run has stored. It evaluates the model at the stored latents,
// recomputes the log-prob of every stochastic step from the stored next latents, and checks
// schedules, digests and what trajectories say of themselves.
package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/lm"
	languages "github.com/meander-rl/meander/pkg/lm/families"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/families"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// Options say what a run is recomputed with.
type Options struct {
	// Model are folders of models, or their names; none: those that the trajectories name. Each trajectory
	// is recomputed with its own: that of its weights, else that of its lane.
	Model []string
	// Open is how the model is opened: the adapter that the samples were made with. It is for runs of one model.
	Open model.Options
	// Lane and UID choose the trajectories of one lane, or of one group; empty: all.
	Lane schemas.Lane
	UID  schemas.UID
	// Compute is what it is computed with, one device; the zero value is auto.
	Compute sampler.Compute
	// Models is the families that it may be of; empty: those of this project.
	Models model.Registry
	// Languages is the families of language models that it may be of; empty: those of this project.
	Languages lm.Registry
	// EngineTolerance is how far the numbers of tokens that a server drew may be from those of the model here; 0: DefaultEngineTolerance.
	EngineTolerance float64
	// Progress, where set, hears after each trajectory how many are behind.
	Progress func(trajectories int)
}

// DefaultEngineTolerance is for servers that compute in float32.
const DefaultEngineTolerance = 1e-3

// ModelError says that the model to recompute with cannot be opened.
type ModelError struct{ Err error }

func (e *ModelError) Error() string { return e.Err.Error() }
func (e *ModelError) Unwrap() error { return e.Err }

// Run checks every trajectory of a run that is stored on b. What is wrong is in the report;
// an error means that the run could not be read to its end, or the model not be opened
// (ModelError).
func Run(ctx context.Context, b *bus.Bus, run schemas.Run, o Options) (*Report, error) {
	if o.Models == nil {
		o.Models = families.All()
	}
	if o.Languages == nil {
		o.Languages = languages.All()
	}
	v := &verifier{
		bus: b, options: o, report: Report{
			Run: run, Mismatches: []Mismatch{}, EngineTolerance: cmp.Or(o.EngineTolerance, DefaultEngineTolerance),
		},
		encoded: map[string][]byte{}, history: map[schemas.Lane][]*schemas.Policy{},
	}
	defer v.close()
	if err := v.run(ctx); err != nil {
		return nil, err
	}
	v.report.judge()
	return &v.report, nil
}

type verifier struct {
	bus     *bus.Bus
	options Options
	// models are those given, or those that trajectories have named so far.
	models []*opened
	// history is what lanes have served.
	history map[schemas.Lane][]*schemas.Policy
	report  Report
	states  *schemas.Tensor // those that a group was given last, with their ref and data
	// encoded are stored tensors of texts that came last, by digest.
	encoded map[string][]byte
}

func (v *verifier) close() {
	for _, m := range v.models {
		m.close()
	}
}

func (v *verifier) run(ctx context.Context) error {
	for _, name := range v.options.Model {
		if _, err := v.open(name); err != nil {
			return err
		}
	}
	lanes := map[schemas.Lane]bool{}
	filter := schemas.TrajectoryFilter(v.report.Run, cmp.Or(v.options.UID, "*"))
	for m, err := range v.bus.Read(ctx, schemas.StreamTrajectories, []string{filter}, bus.ReadOptions{}) {
		if err != nil {
			return fmt.Errorf("read trajectories: %w", err)
		}
		t := &schemas.Trajectory{}
		invalid := schemas.DecodeValid(m.Data, t)
		if lanes[t.Lane] = true; invalid == nil && v.options.Lane != "" && t.Lane != v.options.Lane {
			continue
		}
		v.report.Trajectories++
		if invalid != nil {
			v.report.Mismatches = append(v.report.Mismatches, Mismatch{m.Subject, t.SampleIndex, -1, invalid.Error()})
			continue
		}
		if t.StopReason != schemas.StopCompleted {
			v.report.Failed++
			continue
		}
		if err := v.trajectory(ctx, t); err != nil {
			return fmt.Errorf("%s sample %d: %w", t.UID, t.SampleIndex, err)
		}
		if v.options.Progress != nil {
			v.options.Progress(v.report.Trajectories)
		}
	}
	return v.nothing(slices.Sorted(maps.Keys(lanes)))
}

// nothing is the error of a run without a trajectory of those asked for; lanes are those that there are.
func (v *verifier) nothing(lanes []schemas.Lane) error {
	switch {
	case v.report.Trajectories > 0:
		return nil
	case len(lanes) > 0:
		return fmt.Errorf("lane %q: run %q has none of it; must be one of %q", v.options.Lane, v.report.Run, lanes)
	case v.options.UID != "":
		return fmt.Errorf("run %q has no stored trajectories of a group %q; 'meander show --run %s' lists the groups",
			v.report.Run, v.options.UID, v.report.Run)
	}
	return fmt.Errorf("run %q has no stored trajectories; 'meander runs ls' lists the runs", v.report.Run)
}

// trajectory checks one completed trajectory against its steps and the model.
func (v *verifier) trajectory(ctx context.Context, t *schemas.Trajectory) error {
	s := &sample{verifier: v, t: t}
	var err error
	if s.made, err = v.modelOf(ctx, s); s.made == nil || err != nil {
		return err
	}
	s.model = s.made.network
	with, err := s.weights(ctx, s.weightsDigest())
	if err != nil || !s.known(with, -1) {
		return err
	}
	s.with = with
	request := requestOf(t)
	if got := request.ComputeScheduleDigest(); got != t.ScheduleDigest {
		s.fault(-1, "schedule_digest: stored %.16s, the fields give %.16s", t.ScheduleDigest, got)
	}
	if t.Text != nil {
		return s.text(ctx)
	}
	if s.model.Images == nil {
		s.fault(-1, "image: the model %q makes texts", s.model.Name())
		return nil
	}
	steps, err := s.load(ctx)
	if err != nil {
		return err
	}
	s.steps, s.latents = steps, s.storedLatents(steps)
	if !s.shaped() {
		return nil
	}
	if err := s.encode(ctx); err != nil {
		s.fault(-1, "encode prompt: %v", err)
		return ctx.Err()
	}
	if err := s.conditioning(ctx); err != nil {
		return err
	}
	if t.ScheduledSampling != nil {
		return s.rolled(ctx)
	}
	if err := s.start(ctx); err != nil {
		return err
	}
	plan := planOf(t)
	for i := plan.Begin; i < plan.End; i++ {
		if err := s.logProb(ctx, plan, i); err != nil {
			return err
		}
	}
	return nil
}

// sample is one trajectory that is checked.
type sample struct {
	*verifier
	t       *schemas.Trajectory
	made    *opened             // what made it
	model   sampler.Network     // of made
	with    *version            // the weights that made it, or the last of its steps
	steps   []*schemas.Step     // those that are there, from where it begins
	latents map[int64][]float32 // [S, C] by index
	conds   []*model.Conditioning
}

// fault notes what is wrong with a step, or with the whole (-1).
func (s *sample) fault(step int64, format string, args ...any) {
	s.report.Mismatches = append(s.report.Mismatches, Mismatch{string(s.t.UID), s.t.SampleIndex, step, fmt.Sprintf(format, args...)})
}

// encode makes the conditioning of the prompt and, with guidance, of the negative prompt.
func (s *sample) encode(ctx context.Context) (err error) {
	prompts := []string{s.t.Prompt}
	if s.t.TrueCFGScale > 1 {
		prompts = append(prompts, s.t.NegativePrompt)
	}
	encode := s.model.Images.Encode
	if s.t.TruncatePrompt {
		encode = s.model.Images.EncodeTruncated
	}
	s.conds, err = encode(ctx, prompts)
	return err
}

// logProb recomputes that of step i, where it has one and both latents were kept.
func (s *sample) logProb(ctx context.Context, plan flow.Plan, i int) error {
	stored, index := s.t.LogProbs[i], int64(i)
	if stored == nil {
		return nil // an ode step: of a valid trajectory all others have one
	}
	x, next := s.latents[index], s.latents[index+1]
	if x == nil || next == nil {
		if !slices.Contains(s.t.LatentStepIndices, index) || !slices.Contains(s.t.LatentStepIndices, index+1) {
			s.report.StepsSkipped++ // else the step event is gone, which is counted
		}
		return nil
	}
	with := s.with
	begin, _ := s.t.Segment()
	if digest := s.steps[index-begin].WeightsDigest; digest != with.digest { // it went on with others later
		var err error
		if with, err = s.weights(ctx, digest); err != nil || !s.known(with, index) {
			return err
		}
	}
	velocity, err := s.velocity(ctx, with, x, s.t.Sigmas[i])
	var got flow.LogProb
	if err == nil {
		got, err = flow.Score(plan, i, x, velocity, next)
	}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.fault(index, "%v", err)
		return nil
	}
	s.report.Steps++
	off := math.Abs(math.Exp(got.Mean-*stored) - 1)
	if math.IsNaN(off) {
		off = math.Inf(1)
	}
	s.report.MaxRatio = max(s.report.MaxRatio, off)
	return nil
}

// load loads the step events the trajectory names and checks them against it. Those that
// are gone are counted and nil.
func (s *sample) load(ctx context.Context) ([]*schemas.Step, error) {
	t := s.t
	begin, _ := t.Segment() // of a valid trajectory there is one for each that ran
	steps := make([]*schemas.Step, len(t.Steps))
	var content [][32]byte
	for i, ref := range t.Steps {
		at := begin + int64(i)
		m, err := s.stored(ctx, at, ref)
		if err != nil {
			return nil, err
		}
		if m == nil {
			continue
		}
		step, err := s.bus.LoadStep(ctx, m)
		if err != nil {
			if err := s.unread(ctx, at, err); err != nil {
				return nil, err
			}
			continue
		}
		s.checkStep(at, step, ref)
		digest, err := step.ContentDigest()
		if err != nil {
			s.fault(at, "%v", err)
			continue
		}
		content = append(content, digest)
		steps[i] = step
	}
	if len(content) == len(steps) {
		if got := schemas.StepsDigest(content); got != t.ContentDigest {
			s.fault(-1, "content_digest: stored %.16s, the steps give %.16s", t.ContentDigest, got)
		}
	}
	return steps, nil
}

// stored is the message of a step that a trajectory names; nil where it is gone, or is another.
func (s *sample) stored(ctx context.Context, at int64, ref schemas.StepRef) (*bus.Message, error) {
	m, err := s.bus.Get(ctx, schemas.StreamSteps, ref.Seq)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StepsGone++
		return nil, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil: // the server does not answer
		return nil, fmt.Errorf("step %d, sequence %d: %w", at, ref.Seq, err)
	}
	payload, err := schemas.PayloadDigest(m.Data)
	switch {
	case err != nil:
		s.fault(at, "%v", err)
		return nil, nil
	case payload != ref.Digest:
		s.fault(at, "digest: the stored event has %.16s, the trajectory says %.16s", payload, ref.Digest)
		return nil, nil
	}
	return m, nil
}

// unread notes why a stored step cannot be loaded; an error ends the check.
func (s *sample) unread(ctx context.Context, at int64, err error) error {
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StepsGone++
	case ctx.Err() != nil:
		return ctx.Err()
	default:
		s.fault(at, "%v", err)
	}
	return nil
}

// checkStep compares a step event with what its trajectory says of it.
func (s *sample) checkStep(i int64, step *schemas.Step, ref schemas.StepRef) {
	t := s.t
	begin, _ := t.Segment()
	if step.UID != t.UID || step.SampleIndex != t.SampleIndex || step.Attempt != t.StepAttempt(int(i-begin)) || step.StepIndex != i {
		s.fault(i, "sequence %d holds step %d of %s #%d, attempt %s", ref.Seq, step.StepIndex, step.UID, step.SampleIndex, step.Attempt)
	}
	if v := step.PolicyVersion; v < t.PolicyVersionMin || v > t.PolicyVersionMax {
		s.fault(i, "policy_version: %d, the trajectory has %d to %d", v, t.PolicyVersionMin, t.PolicyVersionMax)
	}
	if step.WeightsDigest != t.WeightsDigest && (t.PolicyVersionMin == t.PolicyVersionMax || i+1 == begin+int64(len(t.Steps))) {
		s.fault(i, "weights_digest: %.16s, the trajectory has %.16s", step.WeightsDigest, t.WeightsDigest)
	}
	if step.ScheduleDigest != t.ScheduleDigest {
		s.fault(i, "schedule_digest: %.16s, the trajectory has %.16s", step.ScheduleDigest, t.ScheduleDigest)
	}
	if int(i) < len(t.LogProbs) && !sameNumber(step.LogProb, t.LogProbs[i]) {
		s.fault(i, "log_prob: the event has %s, the trajectory %s", number(step.LogProb), number(t.LogProbs[i]))
	}
}

// storedLatents are the latents by index, decoded to float32, of the steps that are there: those
// that are kept, and checkpoints.
func (s *sample) storedLatents(steps []*schemas.Step) map[int64][]float32 {
	t := s.t
	latents := map[int64][]float32{}
	begin, end := t.Segment()
	whole := true
	for i, step := range steps {
		if step == nil {
			whole = false
			continue
		}
		at := begin + int64(i)
		for _, l := range step.Latents {
			if l.Index != at && at != end-1 {
				s.fault(at, "latents %d: of the state after a step that is not the last", l.Index)
				continue
			}
			if x := s.decoded(at, &l); x != nil {
				latents[l.Index] = x
			}
		}
	}
	if kept := slices.Sorted(maps.Keys(latents)); whole && !slices.Equal(kept, t.LatentStepIndices) {
		s.fault(-1, "latent_step_indices: stored %v, the trajectory says %v", kept, t.LatentStepIndices)
	}
	for _, step := range steps {
		if step == nil || step.Checkpoint == nil {
			continue
		}
		if x := s.decoded(step.StepIndex, &schemas.IndexedTensor{Index: step.StepIndex, Tensor: *step.Checkpoint}); x != nil {
			latents[step.StepIndex] = x
		}
	}
	return latents
}

// shaped says whether the latents have the shape that the model's have.
func (s *sample) shaped() bool {
	t, card := s.t, s.model.Images.Card()
	tokens, err := card.Tokens(int(t.Height), int(t.Width))
	if err != nil {
		s.fault(-1, "%v", err)
		return false
	}
	want := []int64{int64(tokens), int64(card.LatentChannels)}
	if !slices.Equal(t.LatentsShape, want) {
		s.fault(-1, "latents_shape: %v; the model has %v", t.LatentsShape, want)
		return false
	}
	return true
}

// decoded are latents of step at; nil where they are faulty.
func (s *sample) decoded(at int64, l *schemas.IndexedTensor) []float32 {
	shape := s.t.LatentsShape
	if !slices.Equal(l.Tensor.Shape, shape) || len(shape) != 2 {
		s.fault(at, "latents %d: shape %v, the trajectory has %v", l.Index, l.Tensor.Shape, shape)
		return nil
	}
	x := make([]float32, shape[0]*shape[1])
	if err := tensor.DType(l.Tensor.DType).DecodeFloats(x, l.Tensor.Data); err != nil {
		s.fault(at, "latents %d: %v", l.Index, err)
		return nil
	}
	return x
}

// start compares the first stored state with what the trajectory says that the sample began
// with, noise that is drawn again or a state that the prompt gave, and stands in for it where
// it was not kept.
func (s *sample) start(ctx context.Context) error {
	t := s.t
	begin, _ := t.Segment()
	x := make([]float32, t.LatentsShape[0]*t.LatentsShape[1])
	if t.Start == nil {
		flow.InitialNoise(x, t.NoiseSeed)
	} else {
		states, err := s.given(ctx, t.Start)
		switch {
		case errors.Is(err, bus.ErrNotFound):
			s.report.StartsGone++
			return nil
		case err == nil:
			err = sampler.StartFrom(x, t.Start, states, t.SampleIndex, t.LatentsShape, t.Sigmas[begin], t.NoiseSeed)
		case !errors.Is(err, bus.ErrCorrupt) && !errors.Is(err, bus.ErrFailed):
			return fmt.Errorf("load the states it started with: %w", err)
		}
		if err != nil {
			s.fault(begin, "%v", err)
			return nil
		}
	}
	tensor.DType(t.LatentsDType).Round(x)
	if stored, kept := s.latents[begin]; !kept {
		s.latents[begin] = x
	} else if !slices.Equal(stored, x) {
		s.fault(begin, "latents %d: not those that the sample starts with", begin)
	}
	return nil
}

// given loads what a sample started with: states that a prompt gave, those of a group once, the one
// that its parent stored, or its data.
func (s *sample) given(ctx context.Context, start *schemas.SegmentStart) (*schemas.Tensor, error) {
	t := start.Latents
	switch {
	case start.Branch != nil:
		parent, err := s.bus.Made(ctx, *start.Branch)
		if err != nil {
			return nil, err
		}
		return s.bus.LoadBranch(ctx, *start.Branch, parent)
	case start.Data != nil:
		return sampler.LoadData(ctx, s.bus, s.model.Images, start.Data, s.t.Height, s.t.Width)
	case t.Ref == nil:
		return t, nil
	}
	if s.states == nil || *s.states.Ref != *t.Ref {
		data, err := s.bus.GetBlob(ctx, *t.Ref)
		if err != nil {
			return nil, err
		}
		s.verifier.states = &schemas.Tensor{Ref: t.Ref, Data: data}
	}
	return &schemas.Tensor{DType: t.DType, Shape: t.Shape, Data: s.states.Data}, nil
}

// velocity is the guided output [S, C] of some weights at (x, sigma).
func (s *sample) velocity(ctx context.Context, with *version, x []float32, sigma float32) ([]float32, error) {
	row := sampler.Row{Dst: make([]float32, len(x)), X: x, Sigma: sigma, Cond: s.conds[0], Scale: s.t.TrueCFGScale}
	if len(s.conds) == 2 {
		row.Negative = s.conds[1]
	}
	faults, err := with.velocities.Eval(ctx, []sampler.Row{row}, int(s.t.Height), int(s.t.Width))
	if err == nil {
		err = faults[0]
	}
	return row.Dst, err
}

func planOf(t *schemas.Trajectory) flow.Plan {
	p := flow.Plan{
		Sigmas: t.Sigmas, NoiseLevel: t.NoiseLevel, LogProb: flow.LogProbKind(t.LogProbKind), Solver: flow.Solver(t.Solver),
		Storage: tensor.DType(t.LatentsDType), Seed: t.SampleSeed,
	}
	for _, kind := range t.Transitions {
		p.Transitions = append(p.Transitions, flow.Transition(kind))
	}
	begin, end := t.Segment()
	p.Begin, p.End = int(begin), int(end)
	return p
}

// requestOf holds the fields of the schedule digest.
func requestOf(t *schemas.Trajectory) *schemas.Request {
	if t.Text != nil {
		return &schemas.Request{Text: &t.Text.Settings}
	}
	return &schemas.Request{
		Sigmas: t.Sigmas, Transitions: t.Transitions, NoiseLevel: t.NoiseLevel, Solver: t.Solver, LogProbKind: t.LogProbKind,
		LatentsDType: t.LatentsDType, TrueCFGScale: t.TrueCFGScale, Height: t.Height, Width: t.Width,
	}
}

func sameNumber(a, b *float64) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

func number(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}
