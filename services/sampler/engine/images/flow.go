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

type flowEngine struct {
	model      model.Model
	card       model.Card
	velocities chan *Velocities // one for each Step that runs
	files      *Files
	seen       seen // of the one goroutine that calls Seen
}

// newFlowEngine returns an engine whose Step up to o.Workers goroutines may call at once.
func newFlowEngine(m model.Model, o engine.Options) *flowEngine {
	e := &flowEngine{model: m, card: m.Card(), velocities: make(chan *Velocities, o.Workers), files: NewFiles(o.Blobs)}
	for range o.Workers {
		e.velocities <- NewVelocities(m)
	}
	return e
}

// Backend is the model's.
func (e *flowEngine) Backend() string { return e.card.Backend }

// flowEpisode is the denoising of one image.
type flowEpisode struct {
	evaluated
	rollout *flow.Rollout
	made    *flow.Step // the last step that was completed; its slices are valid until the next evaluation
}

var _ engine.Predictor = (*flowEpisode)(nil)

// evaluated is what flowEpisode and rolledEpisode share: they evaluate the model at one point at a time.
type evaluated struct {
	e             *flowEngine
	req           *schemas.Request
	cond, negCond *model.Conditioning // negCond is nil without guidance
	tracks        []schemas.Track     // nil: the state has one
	output        []float32           // [S, C], of the last evaluation
	step          *schemas.Step       // that the last Step completed; nil: it needs more evaluations
	err           error               // of the last Step
}

// evaluatedEpisode is an episode with a point to evaluate next, and what follows from the output there.
type evaluatedEpisode interface {
	engine.Episode
	point() Point
	advance() (*schemas.Step, error) // nil: no step is complete yet
	base() *evaluated
}

func (p *evaluated) base() *evaluated { return p }

// Take returns the completed step once.
func (p *evaluated) Take() ([]schemas.StepEvent, error) {
	step := p.step
	p.step = nil
	if p.err != nil || step == nil {
		return nil, p.err
	}
	return []schemas.StepEvent{step}, nil
}

// bucket is of samples that are rows of one call: of one size, by models that mix.
type bucket struct {
	mix  any
	size media.Size
}

func (p *evaluated) Bucket() any {
	return bucket{engine.MixOf(p.e.model, p.e), sampling.SizeOf(&p.req.Sampling)}
}

// Texts are what the velocity depends on besides the state.
func (p *evaluated) Texts() (card model.Card, cond, negative *model.Conditioning) {
	return p.e.card, p.cond, p.negCond
}

// shape returns [S, C] of the latents.
func (p *evaluated) shape() []int64 {
	c := int64(p.e.card.LatentChannels)
	return []int64{int64(len(p.output)) / c, c}
}

// finish adds to t what all episodes know.
func (p *evaluated) finish(t *schemas.Trajectory) {
	t.TruncatedTokens = int64(p.cond.Cut)
	t.LatentStepIndices, t.LatentsShape = p.req.ReturnStepIndices, p.shape()
	t.Tracks = p.tracks
}

// Start begins an episode and encodes its prompts; from is the state to begin with. See engine.Engine.
func (e *flowEngine) Start(ctx context.Context, req *schemas.Request, from *schemas.SegmentStart,
) (engine.Episode, error) {
	if req.Text != nil {
		return nil, engine.Invalid("text: given; the model %s makes images", e.card.Name)
	}
	tokens, err := e.card.Tokens(sampling.SizeOf(&req.Sampling))
	if err = cmp.Or(err, req.CheckSchedule(), CheckSettings(e.card, &req.Sampling)); err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	if req.ScheduledSampling != nil {
		return e.startRolled(ctx, req, from, tokens)
	}
	tracks, err := Tracks(&e.card, tokens)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	plan := sampling.Plan(&req.Sampling)
	plan.Tracks = schemas.TrackElements(tracks)
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
	p := &flowEpisode{rollout: rollout}
	p.evaluated, err = e.evaluated(ctx, req, len(x))
	p.tracks = tracks
	return p, err
}

// evaluated encodes the prompts of a sample with n elements. One that is too long is a terminal error.
func (e *flowEngine) evaluated(ctx context.Context, req *schemas.Request, n int) (p evaluated, err error) {
	conds, err := Encode(ctx, e.model, &req.Sampling, e.files)
	switch whole := e.model.Card().Pipeline != nil; {
	case errors.Is(err, model.ErrPrompt) && whole: // it refuses more than long texts, and says what
		return p, engine.Invalid("%w", err)
	case errors.Is(err, model.ErrPrompt):
		return p, engine.Invalid("%w; shorten it, or set truncate_prompt to have it cut", err)
	case errors.Is(err, ErrCondition):
		return p, bus.Terminal(schemas.CodeInvalid, err)
	}
	if err != nil {
		return p, fmt.Errorf("encode prompt: %w", err)
	}
	p = evaluated{e: e, req: req, cond: conds[0], output: make([]float32, n)}
	if len(conds) > 1 {
		p.negCond = conds[1]
	}
	return p, nil
}

// initialState returns the state [S, C] to begin with: of from, or noise of the request's seed.
func (e *flowEngine) initialState(req *schemas.Request, from *schemas.SegmentStart, tokens int) ([]float32, error) {
	x := make([]float32, tokens*e.card.LatentChannels)
	if from == nil {
		sampling.InitialNoise(x, &req.Sampling)
		return x, nil
	}
	shape := []int64{int64(tokens), int64(e.card.LatentChannels)}
	return x, StartFrom(x, from, from.Latents, req.SampleIndex, shape, req.Sigmas[from.StepIndex], req.NoiseSeed)
}

// Step evaluates the model once for all episodes of a micro-batch and advances each. A fault of one episode, or a panic
// of its advance, is for its Take; an error ends all.
func (e *flowEngine) Step(ctx context.Context, episodes []engine.Episode) error {
	v := <-e.velocities
	defer func() { e.velocities <- v }()
	rows := make([]GuidedRow, len(episodes))
	for i, ep := range episodes {
		ep := ep.(evaluatedEpisode)
		p, at := ep.base(), ep.point()
		at.Dst = p.output
		rows[i] = RowOf(&p.req.Sampling, p.cond, p.negCond, at)
		if p.e != e { // of another version of the checkpoint
			rows[i].Of = p.e.model
		}
	}
	size := sampling.SizeOf(&episodes[0].(evaluatedEpisode).base().req.Sampling)
	faults, err := v.Eval(ctx, rows, size)
	if err != nil {
		return err
	}
	for i, ep := range episodes {
		ep := ep.(evaluatedEpisode)
		p := ep.base()
		if p.step, p.err = nil, faults[i]; p.err == nil {
			p.err = engine.Guarded(func() (err error) {
				p.step, err = ep.advance()
				return bus.Terminal(schemas.CodeFailed, err)
			})
		}
	}
	return nil
}

// Switch has another engine make the next step. The encoded prompt stays: policies change the transformer only.
func (p *flowEpisode) Switch(to engine.Engine) { p.e = to.(*flowEngine) }

func (p *flowEpisode) point() Point {
	x, sigma := p.rollout.Point()
	return Point{Step: int64(p.rollout.Index()), X: x, Sigma: sigma}
}

func (p *flowEpisode) advance() (*schemas.Step, error) {
	step, err := p.rollout.Advance(p.output)
	if err != nil || step == nil { // nil: the solver wants another evaluation
		return nil, err
	}
	p.made = step
	return p.event(step), nil
}

// Predict implements engine.Predictor.
func (p *flowEpisode) Predict(ctx context.Context, t *schemas.Trajectory, decode bool,
) (m media.Media, _ schemas.Tensor, err error) {
	p.finish(t)
	x := Predicted(p.made.X, p.made.Velocity, p.made.Sigma)
	if decode {
		m, err = p.decode(ctx, x)
	}
	return m, tensorOf(string(tensor.F32), p.shape(), x), err
}

// Predicted returns the sample that a state x [S, C] ends with if its velocity v holds until sigma 0.
func Predicted(x, v []float32, sigma float32) []float32 {
	out := make([]float32, len(x))
	for i := range x {
		out[i] = x[i] - sigma*v[i]
	}
	return out
}

func (p *flowEpisode) Done() bool { return p.rollout.Done() }

// event returns the event of a step. It copies the step's buffers, which the next step reuses.
func (p *flowEpisode) event(step *flow.Step) *schemas.Step {
	e := stepEvent(p.req, p.shape(), step, p.rollout.Done())
	for i, t := range p.tracks {
		of := schemas.StepTrack{Track: t}
		if step.LogProb != nil {
			of.LogProb, of.LogProbSum = &step.LogProb.Tracks[i].Mean, &step.LogProb.Tracks[i].Sum
		}
		e.Tracks = append(e.Tracks, of)
	}
	for _, name := range p.req.Debug {
		e.Debug = append(e.Debug, schemas.NamedTensor{Name: name, Tensor: debugTensor(name, p.shape(), step)})
	}
	return e
}

// stepEvent returns the event of a step with copies of the states, of shape [S, C], that the request asks for.
func stepEvent(r *schemas.Request, shape []int64, step *flow.Step, last bool) *schemas.Step {
	index := int64(step.Index)
	e := &schemas.Step{
		StepIndex: index, NumInferenceSteps: int64(len(r.Transitions)),
		Transition: string(step.Transition), NoiseLevel: r.NoiseLevel,
		Sigma: step.Sigma, SigmaNext: step.SigmaNext, Timestep: r.Timestep(index),
		OwnTimestep: len(r.NetworkTimesteps) > 0,
		StdDevT:     step.StdDevT, NoiseStd: step.NoiseStd, LogProbKind: r.LogProbKind,
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

// debugTensor returns an optional tensor [S, C] of a step by its name; F32 whatever the latents are stored as.
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

// Finish decodes the latents that the rollout ended with, if there is to be an image.
func (p *flowEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (images engine.Images, err error) {
	if p.finish(t); !t.Decoded() {
		return images, nil
	}
	images.End, err = p.decode(ctx, p.rollout.Latents())
	return images, err
}

// decode decodes latents [S, C]. Those that are not finite are a terminal error: the request gives them again.
func (p *evaluated) decode(ctx context.Context, latents []float32) (media.Media, error) {
	m, err := model.Decode(ctx, p.e.model, latents, sampling.SizeOf(&p.req.Sampling), p.cond)
	if errors.Is(err, model.ErrLatents) {
		return m, bus.Terminal(schemas.CodeFailed, err)
	}
	if err != nil {
		return m, fmt.Errorf("decode latents: %w", err)
	}
	return m, nil
}
