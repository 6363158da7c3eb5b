package images

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// flowEngine makes images by flow matching: pkg/flow has the mathematics of a step, pkg/models/model
// evaluates the velocity.
type flowEngine struct {
	model      model.Model
	card       model.Card
	velocities chan *Velocities // one for each Step that runs
}

// newFlowEngine returns an engine whose Step up to workers goroutines may call at once.
func newFlowEngine(m model.Model, workers int) *flowEngine {
	e := &flowEngine{model: m, card: m.Card(), velocities: make(chan *Velocities, workers)}
	for range workers {
		e.velocities <- NewVelocities(m)
	}
	return e
}

// Backend is the model's.
func (e *flowEngine) Backend() string { return e.card.Backend }

// flowEpisode is the denoising of one image.
type flowEpisode struct {
	e             *flowEngine
	req           *schemas.Request
	rollout       *flow.Rollout
	cond, negCond *model.Conditioning // negCond is nil without guidance
	velocity      []float32           // [S, C]
	outcome
}

// outcome is the result of the last Step of an episode.
type outcome struct {
	step *schemas.Step // the completed step; nil: the step needs more evaluations
	err  error
}

// setOutcome sets what Take of an episode will return: the fault of its row, or without one what advance returns. A
// panic of advance is an error.
func (o *outcome) setOutcome(fault error, advance func() (*schemas.Step, error)) {
	*o = outcome{err: fault}
	if fault == nil {
		o.err = engine.Guarded(func() (err error) {
			o.step, err = advance()
			return err
		})
	}
}

// Take returns the completed step once.
func (o *outcome) Take() ([]schemas.StepEvent, error) {
	step := o.step
	o.step = nil
	if o.err != nil || step == nil {
		return nil, o.err
	}
	return []schemas.StepEvent{step}, nil
}

// Start begins an episode for a request, and encodes its prompts; from, if there is one, is the state to begin with.
// Faults of the request are terminal errors.
func (e *flowEngine) Start(
	ctx context.Context, req *schemas.Request, from *schemas.SegmentStart,
) (engine.Episode, error) {
	if req.Text != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("text: given; the model %s makes images", e.card.Name))
	}
	tokens, err := e.card.Tokens(sampling.SizeOf(&req.Sampling))
	if err = cmp.Or(err, req.CheckSchedule(), CheckSettings(e.card, &req.Sampling)); err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	if req.ScheduledSampling != nil {
		return e.startRolled(ctx, req, from, tokens)
	}
	plan := sampling.Plan(&req.Sampling)
	if from != nil {
		plan.Begin = int(from.StepIndex)
	}
	x, err := e.initialState(req, from, tokens)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	rollout, err := flow.NewRollout(plan, x)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	p := &flowEpisode{e: e, req: req, rollout: rollout, velocity: make([]float32, len(x))}
	p.cond, p.negCond, err = e.encodePrompts(ctx, req)
	return p, err
}

// encodePrompts encodes the prompt and, with guidance, the negative prompt; negative is nil without. A prompt that is
// too long is a terminal error.
func (e *flowEngine) encodePrompts(
	ctx context.Context, req *schemas.Request,
) (cond, negative *model.Conditioning, err error) {
	conds, err := Encode(ctx, e.model, &req.Sampling)
	if errors.Is(err, model.ErrPrompt) {
		return nil, nil, bus.Terminal(schemas.CodeInvalid,
			fmt.Errorf("%w; shorten it, or set truncate_prompt to have it cut", err))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("encode prompt: %w", err)
	}
	if len(conds) > 1 {
		negative = conds[1]
	}
	return conds[0], negative, nil
}

// initialState returns the state [S, C] that the episode begins with: noise drawn from the request's seed, or the
// state of from. It fails if that state has another shape.
func (e *flowEngine) initialState(req *schemas.Request, from *schemas.SegmentStart, tokens int) ([]float32, error) {
	x := make([]float32, tokens*e.card.LatentChannels)
	if from == nil {
		flow.InitialNoise(x, req.NoiseSeed)
		return x, nil
	}
	shape := []int64{int64(tokens), int64(e.card.LatentChannels)}
	return x, StartFrom(x, from, from.Latents, req.SampleIndex, shape, req.Sigmas[from.StepIndex], req.NoiseSeed)
}

// evaluated is an episode that needs the model's velocity at one point at a time: flowEpisode and rolledEpisode.
type evaluated interface {
	engine.Episode
	// row returns the next point to evaluate. advance reads the velocity from the row's Dst and returns the step that
	// this completes; nil: none yet.
	row() GuidedRow
	advance() (*schemas.Step, error)
	setOutcome(fault error, advance func() (*schemas.Step, error))
	request() *schemas.Request
}

// Step evaluates the model once for all episodes of a micro-batch and advances each. A fault of one episode is for
// its Take; an error ends all.
func (e *flowEngine) Step(ctx context.Context, episodes []engine.Episode) error {
	v := <-e.velocities
	defer func() { e.velocities <- v }()
	rows := make([]GuidedRow, len(episodes))
	for i, ep := range episodes {
		rows[i] = ep.(evaluated).row()
	}
	faults, err := v.Eval(ctx, rows, sampling.SizeOf(&episodes[0].(evaluated).request().Sampling))
	if err != nil {
		return err
	}
	for i, ep := range episodes {
		p := ep.(evaluated)
		p.setOutcome(faults[i], p.advance)
	}
	return nil
}

// Switch has another engine make the next step. The encoded prompt stays: policies change the transformer only.
func (p *flowEpisode) Switch(to engine.Engine) { p.e = to.(*flowEngine) }

func (p *flowEpisode) request() *schemas.Request { return p.req }

// row returns the point where the solver needs the next velocity.
func (p *flowEpisode) row() GuidedRow {
	x, sigma := p.rollout.Point()
	at := Point{Step: int64(p.rollout.Index()), X: x, Sigma: sigma, Dst: p.velocity}
	return RowOf(&p.req.Sampling, p.cond, p.negCond, at)
}

// advance gives the velocity to the rollout. It returns nil where the solver needs another evaluation.
func (p *flowEpisode) advance() (*schemas.Step, error) {
	step, err := p.rollout.Advance(p.velocity)
	if err != nil || step == nil { // nil: the solver wants another evaluation
		return nil, bus.Terminal(schemas.CodeFailed, err)
	}
	return p.event(step), nil
}

// Texts are what the velocity depends on besides the state.
func (p *flowEpisode) Texts() (card model.Card, cond, negative *model.Conditioning) {
	return p.e.card, p.cond, p.negCond
}

// Bucket is the size: samples of one size are rows of one call.
func (p *flowEpisode) Bucket() string { return bucketOf(p.req) }

// bucketOf names the size of a request's sample: rows of one size can share a call.
func bucketOf(r *schemas.Request) string { return sampling.SizeOf(&r.Sampling).String() }

func (p *flowEpisode) Done() bool { return p.rollout.Done() }

// event returns the event of a step. It copies the step's buffers, which the next step reuses.
func (p *flowEpisode) event(step *flow.Step) *schemas.Step {
	e := stepEvent(p.req, p.shape(), step, p.rollout.Done())
	for _, name := range p.req.Debug {
		e.Debug = append(e.Debug, schemas.NamedTensor{Name: name, Tensor: debugTensor(name, p.shape(), step)})
	}
	return e
}

// stepEvent returns the event of a step with those of its states that the request asks for; it copies them. shape is
// [S, C]. last says that no step comes after it. What the scheduler adds is not in it: see engine.Episode.Take.
func stepEvent(r *schemas.Request, shape []int64, step *flow.Step, last bool) *schemas.Step {
	index := int64(step.Index)
	e := &schemas.Step{
		StepIndex: index, NumInferenceSteps: int64(len(r.Transitions)),
		Transition: string(step.Transition), NoiseLevel: r.NoiseLevel,
		Sigma: step.Sigma, SigmaNext: step.SigmaNext, Timestep: step.Timestep,
		StdDevT: step.StdDevT, NoiseStd: step.NoiseStd, LogProbKind: r.LogProbKind,
		ElementCount: int64(len(step.X)), ScheduleDigest: r.ScheduleDigest,
	}
	if step.LogProb != nil {
		e.LogProb, e.LogProbSum = &step.LogProb.Mean, &step.LogProb.Sum
	}
	keep := func(index int64, x []float32) {
		if slices.Contains(r.ReturnStepIndices, index) {
			e.Latents = append(e.Latents, schemas.IndexedTensor{
				Index:  index,
				Tensor: tensorOf(r.LatentsDType, shape, x),
			})
		}
	}
	keep(index, step.X)
	if slices.Contains(r.CheckpointStepIndices, index) {
		e.Checkpoint = new(tensorOf(r.LatentsDType, shape, step.X))
	}
	if last {
		keep(index+1, step.Next)
	}
	return e
}

// tensorOf returns x as a tensor of a dtype.
func tensorOf(dtype string, shape []int64, x []float32) schemas.Tensor {
	return schemas.Tensor{DType: dtype, Shape: shape, Data: tensor.DType(dtype).AppendFloats(nil, x)}
}

// debugTensor returns one of the optional tensors [S, C] of a step that the request asks for by name; F32 whatever the
// latents are stored as.
func debugTensor(name string, shape []int64, step *flow.Step) schemas.Tensor {
	f32 := string(tensor.F32)
	switch name {
	case "noise":
		if step.Noise == nil { // an ode step draws none
			return tensorOf(f32, shape, make([]float32, len(step.X)))
		}
		return tensorOf(f32, shape, step.Noise)
	case "mean":
		return tensorOf(f32, shape, step.Mean)
	case "std":
		return tensorOf(f32, []int64{1}, []float32{float32(step.NoiseStd)})
	default: // model_output, the only other name a valid request has
		return tensorOf(f32, shape, step.Velocity)
	}
}

// shape returns [S, C] of the latents.
func (p *flowEpisode) shape() []int64 {
	c := int64(p.e.card.LatentChannels)
	return []int64{int64(len(p.velocity)) / c, c}
}

// Finish decodes the latents that the rollout ended with, if there is to be an image, and adds to t what the episode
// knows. Latents that are not finite are a terminal error.
func (p *flowEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (images engine.Images, err error) {
	t.TruncatedTokens = int64(p.cond.Cut)
	t.LatentStepIndices, t.LatentsShape = p.req.ReturnStepIndices, p.shape()
	if !t.Decoded() {
		return images, nil
	}
	images.End, err = p.e.decode(ctx, p.req, p.rollout.Latents())
	return images, err
}

// decode decodes latents [S, C] into the request's image or video. Latents that are not finite are a terminal error:
// the same request gives them again. Other errors may pass.
func (e *flowEngine) decode(ctx context.Context, req *schemas.Request, latents []float32) (media.Media, error) {
	m, err := e.model.Decode(ctx, latents, sampling.SizeOf(&req.Sampling))
	if errors.Is(err, model.ErrLatents) {
		return m, bus.Terminal(schemas.CodeFailed, err)
	}
	if err != nil {
		return m, fmt.Errorf("decode latents: %w", err)
	}
	return m, nil
}
