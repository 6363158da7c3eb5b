// Package verify checks that what a run has stored is what its models compute. Run reads every completed trajectory and
// compares it with its steps and with the model:
//
//   - Images: it evaluates the model at the stored latents, and recomputes the log-prob of each stochastic step from
//     the stored latents after it (verify.go). A sample without a stochastic step is made again from its start, and
//     its stored latents are compared. Scheduled sampling is rolled again: the model denoises the same start down to
//     the timestep of training (scheduled.go).
//   - Texts: it computes the logits of each token from the stored tokens before it, and draws the token again
//     (text.go).
//   - All: schedules, digests, and what the trajectory says about its steps.
//   - Samples of several stages: it makes the request of each stage again, out of the group's record and of what was
//     made before it (stages.go).
//
// A fault is a difference; it goes into Report.Mismatches. What is no longer stored is counted as gone. Either means
// that the run is not verified. A method that returns an error ends the whole run; after a fault the run goes on.
//
// A sample is a trajectory that is being checked. An opened model has versions, one for each set of weights that
// samples name. Gone means no longer stored. A server that draws samples may be inexact: its numbers are then held to
// a tolerance. A roll is the way of a scheduled sample from its start down to the timestep of training.
//
// checkAll calls checkTrajectory for each sample: of images it loads the steps and calls checkConditioning,
// checkStart and checkLogProb, or rollAgain; of texts checkText.
package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/lm"
	languages "github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/models"
)

// Options choose the trajectories, and what they are recomputed with.
type Options struct {
	// Each trajectory is recomputed with the model that has its weights, otherwise with that of its lane.
	Model []string `key:"model" help:"model to recompute with: a folder, a name, or ORG/NAME[@REVISION] of the Hugging Face Hub, once for each model of the run; default the models that its trajectories name"`
	// Open is how the model is opened: the adapter that the samples were made with. It is for runs of one model.
	Open model.Options `key:"-"`
	// Lane and UIDs choose the trajectories of one lane, or of some groups; empty: all.
	Lane       schemas.Lane  `key:"-"`
	UIDs       []schemas.UID `key:"-"`
	WeightsDir string        `key:"weights_dir" help:"shared folder with the transformers that were pushed by path"`
	// Compute chooses the device to compute on; the zero value is auto.
	Compute models.Compute `key:"-"`
	// EngineKey is the token of the workers of Engine; EngineNone: this program computes.
	Engine    string `key:"engine" help:"torch or torch=ADDRESS where a worker computes the model; none: this program does; default what the backend of the samples names"`
	EngineKey string `key:"-"`
	Family    string `key:"family" help:"FILE.py:NAME of samples that a family or a pipeline of your own made"`
	Network   string `key:"network" help:"with a worker that starts: diffusers or vllm-omni; default what made the samples"`
	// Log is told what happens to a worker.
	Log zerolog.Logger `key:"-"`
	// Models are the known families of image models; empty: those of this project.
	Models model.Registry `key:"-"`
	// Languages are the known families of language models; empty: those of this project.
	Languages       lm.Registry `key:"-"`
	EngineTolerance float64     `key:"engine_tolerance" range:"0.." help:"largest difference that passes, of what a server drew; default by its precision: 0.001 for fp32, 0.02 for fp16, 0.2 for bf16; for images 0.00001 for fp32, else 0.02"`
	// Progress is called after each trajectory with how many are done; it may be nil.
	Progress func(trajectories int) `key:"-"`
}

// EngineNone has this program compute what a worker made.
const EngineNone = "none"

// ModelError says that the model to recompute with cannot be opened.
type ModelError struct{ Err error }

func (e *ModelError) Error() string { return e.Err.Error() }
func (e *ModelError) Unwrap() error { return e.Err }

// SettingError says that this program cannot compute as Options.Compute has it.
type SettingError struct{ Err error }

func (e *SettingError) Error() string { return e.Err.Error() }
func (e *SettingError) Unwrap() error { return e.Err }

// Run checks every stored trajectory of a run, for 'meander verify'. The report has what is wrong. An error means
// that the run could not be read to its end, that there is nothing to check, that a model could not be opened
// (ModelError, or SettingError for how), or that it could not load the weights of a version (WeightsError).
func Run(ctx context.Context, b *bus.Bus, run schemas.Run, o Options) (*Report, error) {
	if o.Models == nil {
		o.Models = families.All()
	}
	if o.Languages == nil {
		o.Languages = languages.All()
	}
	v := &verifier{
		bus: b, options: o, report: Report{Run: run, Mismatches: []Mismatch{}}, files: images.NewFiles(b.GetBlob),
		encoded: map[string][]byte{}, policies: map[schemas.Lineage][]*schemas.Policy{},
	}
	defer v.close()
	if err := v.checkAll(ctx); err != nil {
		return nil, err
	}
	v.report.setUnproven()
	return &v.report, nil
}

// verifier checks the trajectories of one run, one after the other.
type verifier struct {
	bus     *bus.Bus
	options Options
	// models are those of the options, or those that trajectories have named so far. named: the options' are open.
	models []*opened
	named  bool
	// policies caches those that lanes have served.
	policies map[schemas.Lineage][]*schemas.Policy
	report   Report
	states   *schemas.Tensor // the start latents of the last group, with their ref and data
	// encoded caches stored tensors of encoded prompts, by digest.
	encoded map[string][]byte
	files   *images.Files // that samples are conditioned on
}

func (v *verifier) close() {
	for _, m := range v.models {
		m.close()
	}
}

// checkAll opens the models of the options, by what computed the first sample, and checks all trajectories of the
// chosen lane and group.
func (v *verifier) checkAll(ctx context.Context) error {
	lanes := map[schemas.Lane]bool{}
	staged, isStaged := []schemas.UID{}, map[schemas.UID]bool{} // groups whose samples have several stages
	var filters []string
	for _, uid := range v.options.UIDs {
		filters = append(filters, schemas.TrajectoryFilter(v.report.Run, uid))
	}
	if len(filters) == 0 {
		filters = []string{schemas.TrajectoryFilter(v.report.Run, "*")}
	}
	for m, err := range v.bus.Read(ctx, schemas.StreamTrajectories, filters, bus.ReadOptions{}) {
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
			v.report.Mismatches = append(v.report.Mismatches, Mismatch{
				UID: m.Subject, SampleIndex: t.SampleIndex, StepIndex: -1, What: invalid.Error(),
			})
			continue
		}
		if t.Stage != schemas.StageMain && !isStaged[t.UID] {
			staged, isStaged[t.UID] = append(staged, t.UID), true
		}
		if t.StopReason != schemas.StopCompleted {
			v.report.Failed++
			continue
		}
		if t.Text != nil && t.Text.SaidBy != "" {
			v.report.Said++ // no model computes it again
			continue
		}
		if err := v.openNamed(ctx, t.Backend); err != nil {
			return err
		}
		if err := v.checkTrajectory(ctx, t); err != nil {
			return fmt.Errorf("%s sample %d: %w", t.UID, t.SampleIndex, err)
		}
		if v.options.Progress != nil {
			v.options.Progress(v.report.Trajectories)
		}
	}
	for _, uid := range staged {
		if err := v.checkRequests(ctx, uid); err != nil {
			return fmt.Errorf("%s: %w", uid, err)
		}
	}
	return v.errNoneFound(slices.Sorted(maps.Keys(lanes)))
}

// openNamed opens the models that the options name, at the first call only. backend is what computed the first sample.
func (v *verifier) openNamed(ctx context.Context, backend string) error {
	if v.named {
		return nil
	}
	v.named = true
	for _, name := range v.options.Model {
		if _, err := v.openModel(ctx, name, backend); err != nil {
			return err
		}
	}
	return nil
}

// errNoneFound returns an error if the run has none of the trajectories asked for, and nil if it has some. lanes are
// those that the run has.
func (v *verifier) errNoneFound(lanes []schemas.Lane) error {
	switch {
	case v.report.Trajectories > 0:
		return nil
	case len(lanes) > 0:
		return fmt.Errorf("lane %q: run %q has none of it; must be one of %q", v.options.Lane, v.report.Run, lanes)
	case len(v.options.UIDs) > 0:
		return fmt.Errorf("run %q has no stored trajectories of a group %q; 'meander show --run %s' lists the groups",
			v.report.Run, v.options.UIDs[0], v.report.Run)
	}
	return fmt.Errorf("run %q has no stored trajectories; 'meander runs ls' lists the runs", v.report.Run)
}

// checkTrajectory checks one completed trajectory against its steps and the model. Differences are faults; an error is
// of the server, a model or ctx.
func (v *verifier) checkTrajectory(ctx context.Context, t *schemas.Trajectory) error {
	s := &sample{verifier: v, t: t}
	if by := s.drawnBy(); by != nil && by.VerifyMode() == schemas.VerifyNone {
		return s.checkDigests(ctx)
	}
	var err error
	if s.opened, err = v.modelOf(ctx, s); s.opened == nil || err != nil {
		return err
	}
	s.model = s.opened.network
	digest, err := s.weightsDigest(ctx)
	if err != nil {
		return err
	}
	with, err := s.versionWith(ctx, digest)
	if err != nil || !s.isAvailable(with, -1) {
		return err
	}
	s.version = with
	if err := t.CheckKnown(); err != nil {
		s.fault(-1, "%v", err)
		return nil
	}
	if err := t.CheckSchedule(); err != nil {
		s.fault(-1, "%v", err)
	}
	if t.Text != nil {
		return s.checkText(ctx)
	}
	if s.image = s.opened.versions[0].image; s.image == nil {
		s.fault(-1, "image: the model %q makes texts", s.model.Name())
		return nil
	}
	s.report.Tolerance = max(s.report.Tolerance, s.image.Card().Tolerance)
	steps, err := s.loadSteps(ctx)
	if err != nil {
		return err
	}
	s.steps, s.latents = steps, s.storedLatents(steps)
	card := s.image.Card()
	if err := cmp.Or(images.CheckLatents(card, t), images.CheckSettings(card, &t.Sampling)); err != nil {
		s.fault(-1, "%v", err)
		return nil
	}
	if s.conds, err = images.Encode(ctx, s.image, &t.Sampling, s.files); err != nil {
		if end := s.endsRun(ctx, with, err); end != nil {
			return end
		}
		s.fault(-1, "encode prompt: %v", err)
		return nil
	}
	if err := s.checkConditioning(ctx); err != nil {
		return err
	}
	if t.ScheduledSampling != nil {
		return s.rollAgain(ctx)
	}
	if err := s.checkStart(ctx); err != nil {
		return err
	}
	if scales := t.CFGScales; len(scales) > 0 && !slices.Equal(scales, t.Sampling.StepScales()) {
		s.fault(-1, "cfg_scales: stored %v, the settings give %v", scales, t.Sampling.StepScales())
	}
	plan := sampling.Plan(&t.Sampling)
	plan.Tracks = schemas.TrackElements(t.Tracks)
	for i := plan.Begin; i < plan.End; i++ {
		if err := s.checkLogProb(ctx, plan, i); err != nil {
			return err
		}
	}
	if len(t.StochasticSteps()) == 0 && s.inexactServer() == nil {
		return s.makeAgain(ctx, plan)
	}
	return nil
}

// checkDigests checks the digests of a sample that no model here can compute again, as a server drew it.
func (s *sample) checkDigests(ctx context.Context) error {
	s.report.NotComputed++
	if err := s.t.CheckSchedule(); err != nil {
		s.fault(-1, "%v", err)
	}
	if s.t.Text == nil {
		_, err := s.loadSteps(ctx)
		return err
	}
	for i := range s.t.Steps {
		if _, err := s.loadTokens(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// sample is the trajectory that is being checked, with what is loaded of it.
type sample struct {
	*verifier
	t      *schemas.Trajectory
	opened *opened        // the model that made it
	model  engine.Network // of opened
	image  model.Model    // of opened; nil for a language model
	// version is the weights that made it; if they changed on the way, those of its last step, and of a text those
	// that compute now. It is in use, and not closed for others.
	version *version
	steps   []*schemas.Step     // from its first step on; nil: gone or faulty
	latents map[int64][]float32 // [S, C] by index
	conds   []*model.Conditioning
	noise   map[int][]float32 // [S, C] by step, as a server drew it; nil: it is not known, or the sampler drew it
}

// fault adds a difference to the report, of a step or of the whole trajectory (-1).
func (s *sample) fault(step int64, format string, args ...any) {
	s.report.addFault(&s.t.Identity, step, fmt.Sprintf(format, args...))
}

// checkLogProb recomputes the log-prob of step i, if it has one and the latents before and after it are stored; of what
// a server made also the state after it. It keeps the largest difference in report.MaxRatio, or of what a server drew
// in report.MaxDrawnDifference.
func (s *sample) checkLogProb(ctx context.Context, plan flow.Plan, i int) error {
	stored, index := s.t.LogProbs[i], int64(i)
	by := s.inexactServer()
	if stored == nil && by == nil {
		return nil // an ode step: in a valid trajectory all other steps have one
	}
	x, next := s.latents[index], s.latents[index+1]
	if x == nil || next == nil {
		if stored == nil {
			return nil
		}
		if !slices.Contains(s.t.LatentStepIndices, index) || !slices.Contains(s.t.LatentStepIndices, index+1) {
			s.report.StepsSkipped++ // otherwise the step event is gone, which is counted elsewhere
		}
		return nil
	}
	with := s.version
	begin, _ := s.t.Segment()
	digest := s.steps[index-begin].WeightsDigest
	if s.drawnBy() == nil && digest != with.digest { // the sample went on with other weights later
		var err error
		if with, err = s.versionWith(ctx, digest); err != nil || !s.isAvailable(with, index) {
			return err
		}
	}
	velocity, err := s.guidedVelocity(ctx, with, images.Point{Step: index, X: x, Sigma: s.t.Sigmas[i]})
	if err == nil && by != nil {
		err = s.compareNext(by, plan, i, x, velocity, next)
	}
	var got flow.LogProb
	if err == nil && stored != nil {
		got, err = flow.Score(plan, i, x, velocity, next)
	}
	if err != nil {
		if end := s.endsRun(ctx, with, err); end != nil {
			return end
		}
		s.fault(index, "%v", err)
		return nil
	}
	if stored == nil {
		return nil
	}
	s.report.Steps++
	if by != nil {
		s.recordServed(by, Deviation{StepIndex: index, Quantity: "ratio"}, math.Exp(got.Mean-*stored), 1)
		return nil
	}
	s.report.MaxRatio = max(s.report.MaxRatio, magnitude(math.Exp(got.Mean-*stored)-1))
	for k, track := range s.steps[index-begin].Tracks[:min(len(got.Tracks), len(s.steps[index-begin].Tracks))] {
		if track.LogProb != nil {
			s.report.MaxRatio = max(s.report.MaxRatio, magnitude(math.Exp(got.Tracks[k].Mean-*track.LogProb)-1))
		}
	}
	return nil
}

// compareNext makes step i again as a server did, from state x with a velocity, and compares the state after it with
// what is stored. A step whose noise is not known is left out.
func (s *sample) compareNext(by *schemas.Engine, plan flow.Plan, i int, x, velocity, stored []float32) error {
	k, err := plan.StepTransition(i)
	if err != nil || !plan.Solver.ByTransition() || k.Transition.Stochastic() && s.noise[i] == nil {
		return err
	}
	next := make([]float32, len(x))
	if err := k.Draw(next, make([]float32, len(x)), x, velocity, s.noise[i], plan.Storage); err != nil {
		return err
	}
	s.compareMade(by, int64(i+1), stored, next)
	return nil
}

// compareMade compares the stored state of an index, which a server made, with the same computed again.
func (s *sample) compareMade(by *schemas.Engine, index int64, stored, again []float32) {
	s.report.States++
	at := Deviation{StepIndex: index, Quantity: "relative distance of the state"}
	s.recordServed(by, at, distance(stored, again), 0)
}

// loadSteps loads the step events that the trajectory names, and checks them against it. Steps that are gone or
// faulty are nil in the result. An error is of the server.
func (s *sample) loadSteps(ctx context.Context) ([]*schemas.Step, error) {
	t := s.t
	begin, _ := t.Segment() // of a valid trajectory there is one for each that ran
	steps := make([]*schemas.Step, len(t.Steps))
	var content [][32]byte
	for i, ref := range t.Steps {
		at := begin + int64(i)
		m, err := s.storedMessage(ctx, at, ref)
		if err != nil {
			return nil, err
		}
		if m == nil {
			continue
		}
		step, err := s.bus.LoadStep(ctx, m)
		if err != nil {
			if err := s.onLoadError(ctx, at, err); err != nil {
				return nil, err
			}
			continue
		}
		s.checkStep(at, step, ref)
		digest, err := schemas.ContentDigest(step)
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

// storedMessage returns the message that ref names; at is its step, for faults. It returns nil, and reports that, if
// the message is gone or has another digest.
func (s *sample) storedMessage(ctx context.Context, at int64, ref schemas.StepRef) (*bus.Message, error) {
	m, err := s.bus.Get(ctx, schemas.StreamSteps, ref.Seq)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		s.report.StepsGone++
		if s.t.Group.FreeReadSteps {
			s.report.StepsFreed++
		}
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

// onLoadError reports why a stored step cannot be loaded: it is gone or faulty. It returns an error only if ctx has
// ended.
func (s *sample) onLoadError(ctx context.Context, at int64, err error) error {
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

// checkStep compares a step event with what its trajectory says about it.
func (s *sample) checkStep(i int64, step *schemas.Step, ref schemas.StepRef) {
	t := s.t
	begin, _ := t.Segment()
	if step.UID != t.UID || step.SampleIndex != t.SampleIndex || step.Attempt != t.StepAttempt(int(i-begin)) ||
		step.StepIndex != i {
		s.fault(i, "sequence %d holds step %d of %s #%d, attempt %s", ref.Seq, step.StepIndex, step.UID,
			step.SampleIndex, step.Attempt)
	}
	if v := step.PolicyVersion; v < t.PolicyVersionMin || v > t.PolicyVersionMax {
		s.fault(i, "policy_version: %d, the trajectory has %d to %d", v, t.PolicyVersionMin, t.PolicyVersionMax)
	}
	if step.WeightsDigest != t.WeightsDigest && (t.PolicyVersionMin == t.PolicyVersionMax ||
		i+1 == begin+int64(len(t.Steps))) {
		s.fault(i, "weights_digest: %.16s, the trajectory has %.16s", step.WeightsDigest, t.WeightsDigest)
	}
	if step.ScheduleDigest != t.ScheduleDigest {
		s.fault(i, "schedule_digest: %.16s, the trajectory has %.16s", step.ScheduleDigest, t.ScheduleDigest)
	}
	if !slices.EqualFunc(step.Tracks, t.Tracks, func(a schemas.StepTrack, b schemas.Track) bool { return a.Same(&b) }) {
		s.fault(i, "tracks: those of the event are not the trajectory's, %v", t.Tracks)
	}
	if int(i) < len(t.LogProbs) && !sameNumber(step.LogProb, t.LogProbs[i]) {
		s.fault(i, "log_prob: the event has %s, the trajectory %s", number(step.LogProb), number(t.LogProbs[i]))
	}
}

// storedLatents returns the latents of the steps that are loaded, by index, decoded to float32: the kept states and the
// checkpoints. It also checks that the kept ones are those that the trajectory lists.
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
			if x := s.decode(at, &l); x != nil {
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
		if x := s.decode(step.StepIndex, &schemas.IndexedTensor{
			Index:  step.StepIndex,
			Tensor: *step.Checkpoint,
		}); x != nil {
			latents[step.StepIndex] = x
		}
	}
	return latents
}

// decode returns stored latents [S, C] as float32; nil, and a fault of step at, if shape or bytes are wrong.
func (s *sample) decode(at int64, l *schemas.IndexedTensor) []float32 {
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
