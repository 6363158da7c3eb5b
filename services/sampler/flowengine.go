package sampler

import (
	"context"
	"errors"
	"fmt"
	"image"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// flowEngine is flow matching: pkg/flow takes the steps, pkg/model says where to.
type flowEngine struct {
	model      model.Model
	card       model.Card
	velocities chan *Velocities // one for each Step that runs
}

// newFlowEngine serves calls of Step from that many goroutines at once.
func newFlowEngine(m model.Model, workers int) *flowEngine {
	e := &flowEngine{model: m, card: m.Card(), velocities: make(chan *Velocities, workers)}
	for range workers {
		e.velocities <- NewVelocities(m)
	}
	return e
}

// Card is the model's.
func (e *flowEngine) Card() model.Card { return e.card }

// Backend is the model's.
func (e *flowEngine) Backend() string { return e.card.Backend }

// EncodeImage is the model's.
func (e *flowEngine) EncodeImage(ctx context.Context, img *image.NRGBA) ([]float32, error) {
	return e.model.EncodeImage(ctx, img)
}

// flowEpisode is the denoising of one image.
type flowEpisode struct {
	e             *flowEngine
	req           *schemas.Request
	rollout       *flow.Rollout
	cond, negCond *model.Conditioning // negCond is nil without guidance
	velocity      []float32           // [S, C]
	outcome
}

// outcome is what the last Step of an episode came to.
type outcome struct {
	step *schemas.Step // that it completed; nil: none
	err  error
}

// set takes what advance makes, unless there is a fault.
func (o *outcome) set(fault error, advance func() (*schemas.Step, error)) {
	*o = outcome{err: fault}
	if fault == nil {
		o.err = guarded(func() (err error) {
			o.step, err = advance()
			return err
		})
	}
}

// Take returns the step once.
func (o *outcome) Take() ([]schemas.StepEvent, error) {
	step := o.step
	o.step = nil
	if o.err != nil || step == nil {
		return nil, o.err
	}
	return []schemas.StepEvent{step}, nil
}

func (e *flowEngine) Start(ctx context.Context, req *schemas.Request, from *schemas.SegmentStart) (Episode, error) {
	if req.Text != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("text: given; the model %s makes images", e.card.Name))
	}
	tokens, err := e.card.Tokens(int(req.Height), int(req.Width))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	if got := req.ComputeScheduleDigest(); got != req.ScheduleDigest {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("schedule_digest: %q; the request's fields give %q", req.ScheduleDigest, got))
	}
	if req.ScheduledSampling != nil {
		return e.startRolled(ctx, req, from, tokens)
	}
	plan := planOf(req)
	if from != nil {
		plan.Begin = int(from.StepIndex)
	}
	x, err := e.first(req, from, tokens)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	rollout, err := flow.NewRollout(plan, x)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	p := &flowEpisode{e: e, req: req, rollout: rollout, velocity: make([]float32, len(x))}
	p.cond, p.negCond, err = e.conditions(ctx, req)
	return p, err
}

// conditions encodes the prompt and, with guidance, the negative prompt.
func (e *flowEngine) conditions(ctx context.Context, req *schemas.Request) (cond, negative *model.Conditioning, err error) {
	prompts := []string{req.Prompt}
	if req.TrueCFGScale > 1 {
		prompts = append(prompts, req.NegativePrompt)
	}
	encode := e.model.Encode
	if req.TruncatePrompt {
		encode = e.model.EncodeTruncated
	}
	conds, err := encode(ctx, prompts)
	if errors.Is(err, model.ErrPrompt) {
		return nil, nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("%w; shorten it, or set truncate_prompt to have it cut", err))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("encode prompt: %w", err)
	}
	if len(conds) > 1 {
		negative = conds[1]
	}
	return conds[0], negative, nil
}

func planOf(req *schemas.Request) flow.Plan {
	plan := flow.Plan{
		Sigmas: req.Sigmas, NoiseLevel: req.NoiseLevel, LogProb: flow.LogProbKind(req.LogProbKind),
		Solver: flow.Solver(req.Solver), Storage: tensor.DType(req.LatentsDType), Seed: req.SampleSeed,
	}
	for _, t := range req.Transitions {
		plan.Transitions = append(plan.Transitions, flow.Transition(t))
	}
	for _, s := range req.StepSeeds {
		plan.Seeds = append(plan.Seeds, flow.StepSeed{Step: int(s.StepIndex), Seed: s.Seed})
	}
	begin, end := req.Segment()
	plan.Begin, plan.End = int(begin), int(end)
	return plan
}

// first is the state that the episode begins with [S, C]: x_T, drawn, or what is given.
func (e *flowEngine) first(req *schemas.Request, from *schemas.SegmentStart, tokens int) ([]float32, error) {
	x := make([]float32, tokens*e.card.LatentChannels)
	if from == nil {
		flow.InitialNoise(x, req.NoiseSeed)
		return x, nil
	}
	shape := []int64{int64(tokens), int64(e.card.LatentChannels)}
	return x, StartFrom(x, from, from.Latents, req.SampleIndex, shape, req.Sigmas[from.StepIndex], req.NoiseSeed)
}

// evaluated is an episode that asks the model at one point at a time.
type evaluated interface {
	Episode
	// row is where it asks; advance takes what came into its Dst, and returns the step that this completes.
	row() Row
	advance() (*schemas.Step, error)
	set(fault error, advance func() (*schemas.Step, error))
	request() *schemas.Request
}

// Step evaluates the model once for all episodes and advances each.
func (e *flowEngine) Step(ctx context.Context, episodes []Episode) error {
	v := <-e.velocities
	defer func() { e.velocities <- v }()
	rows := make([]Row, len(episodes))
	for i, ep := range episodes {
		rows[i] = ep.(evaluated).row()
	}
	size := episodes[0].(evaluated).request()
	faults, err := v.Eval(ctx, rows, int(size.Height), int(size.Width))
	if err != nil {
		return err
	}
	for i, ep := range episodes {
		p := ep.(evaluated)
		p.set(faults[i], p.advance)
	}
	return nil
}

// Switch has the next step made by another engine of flow matching. What the prompt was encoded to stays: updates are
// of the transformer.
func (p *flowEpisode) Switch(to Engine) { p.e = to.(*flowEngine) }

func (p *flowEpisode) request() *schemas.Request { return p.req }

func (p *flowEpisode) row() Row {
	x, sigma := p.rollout.Point()
	return Row{Dst: p.velocity, X: x, Sigma: sigma, Cond: p.cond, Negative: p.negCond, Scale: p.req.TrueCFGScale}
}

// advance feeds the velocity to the rollout.
func (p *flowEpisode) advance() (*schemas.Step, error) {
	step, err := p.rollout.Advance(p.velocity)
	if err != nil || step == nil { // nil: the solver wants another evaluation
		return nil, bus.Terminal(schemas.CodeFailed, err)
	}
	return p.event(step), nil
}

// Texts are what the velocity depends on besides the state.
func (p *flowEpisode) Texts() (cond, negative *model.Conditioning) { return p.cond, p.negCond }

// Bucket is the size: images of one size are rows of one call.
func (p *flowEpisode) Bucket() string { return bucketOf(p.req) }

func bucketOf(r *schemas.Request) string { return fmt.Sprintf("%dx%d", r.Height, r.Width) }

func (p *flowEpisode) Done() bool { return p.rollout.Done() }

// event copies what the step's buffers hold: they are reused by the next step.
func (p *flowEpisode) event(step *flow.Step) *schemas.Step {
	r := p.req
	e := &schemas.Step{
		StepIndex: int64(step.Index), NumInferenceSteps: int64(len(r.Transitions)),
		Transition: string(step.Transition), NoiseLevel: r.NoiseLevel,
		Sigma: step.Sigma, SigmaNext: step.SigmaNext, Timestep: step.Timestep,
		StdDevT: step.StdDevT, NoiseStd: step.NoiseStd, LogProbKind: r.LogProbKind,
		ElementCount: int64(len(step.X)), ScheduleDigest: r.ScheduleDigest,
	}
	if step.LogProb != nil {
		e.LogProb, e.LogProbSum = &step.LogProb.Mean, &step.LogProb.Sum
	}
	if slices.Contains(r.ReturnStepIndices, int64(step.Index)) {
		e.Latents = append(e.Latents, schemas.IndexedTensor{Index: int64(step.Index), Tensor: p.tensor(r.LatentsDType, step.X)})
	}
	if slices.Contains(r.CheckpointStepIndices, int64(step.Index)) {
		e.Checkpoint = new(p.tensor(r.LatentsDType, step.X))
	}
	if p.rollout.Done() && slices.Contains(r.ReturnStepIndices, int64(step.Index)+1) {
		e.Latents = append(e.Latents, schemas.IndexedTensor{Index: int64(step.Index) + 1, Tensor: p.tensor(r.LatentsDType, step.Next)})
	}
	for _, name := range r.Debug {
		e.Debug = append(e.Debug, schemas.NamedTensor{Name: name, Tensor: p.debug(name, step)})
	}
	return e
}

// debug is one of the optional tensors; F32 whatever the latents are stored as.
func (p *flowEpisode) debug(name string, step *flow.Step) schemas.Tensor {
	f32 := string(tensor.F32)
	switch name {
	case "noise":
		if step.Noise == nil { // an ode step draws none
			return p.tensor(f32, make([]float32, len(step.X)))
		}
		return p.tensor(f32, step.Noise)
	case "mean":
		return p.tensor(f32, step.Mean)
	case "std":
		return schemas.Tensor{DType: f32, Shape: []int64{1}, Data: tensor.F32.AppendFloats(nil, []float32{float32(step.NoiseStd)})}
	default: // model_output, the only other name a valid request has
		return p.tensor(f32, step.Velocity)
	}
}

func (p *flowEpisode) shape() []int64 {
	c := int64(p.e.card.LatentChannels)
	return []int64{int64(len(p.velocity)) / c, c}
}

func (p *flowEpisode) tensor(dtype string, x []float32) schemas.Tensor {
	return schemas.Tensor{DType: dtype, Shape: p.shape(), Data: tensor.DType(dtype).AppendFloats(nil, x)}
}

// Finish decodes the latents that the rollout ended with, where there is to be an image.
func (p *flowEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (images Images, err error) {
	t.TruncatedTokens = int64(p.cond.Cut)
	t.LatentStepIndices, t.LatentsShape = p.req.ReturnStepIndices, p.shape()
	if !t.Decoded() {
		return images, nil
	}
	images.End, err = p.e.decode(ctx, p.req, p.rollout.Latents())
	return images, err
}

func (e *flowEngine) decode(ctx context.Context, req *schemas.Request, latents []float32) (*image.NRGBA, error) {
	img, err := e.model.Decode(ctx, latents, int(req.Height), int(req.Width))
	if errors.Is(err, model.ErrLatents) {
		return nil, bus.Terminal(schemas.CodeFailed, err)
	}
	if err != nil {
		return nil, fmt.Errorf("decode latents: %w", err)
	}
	return img, nil
}
