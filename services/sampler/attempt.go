package sampler

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"image"
	"image/png"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/schemas"
)

// attempt is one try at one sample. The handler creates and finishes it; between,
// the engine owns it.
type attempt struct {
	// ctx is the handler's: when it ends, the engine drops the attempt at the next step boundary.
	ctx   context.Context
	s     *service
	req   *schemas.Request
	token string

	rollout       *flow.Rollout
	cond, negCond *model.Conditioning
	// velocity and negVelocity receive the model's output. [S, C]
	velocity, negVelocity []float32

	tick     uint64
	logProbs []*float64
	steps    []*bus.Future
	content  [][32]byte // content digests of the steps
	// device is this attempt's share of model time since its last step event.
	device            time.Duration
	denoise, encode   time.Duration
	received, started time.Time

	finished bool
	err      error
	done     chan struct{}
}

// newAttempt validates the request against the model, encodes the prompt and
// draws x_T.
func (s *service) newAttempt(ctx context.Context, req *schemas.Request, token string) (*attempt, error) {
	tokens, err := s.card.Tokens(int(req.Height), int(req.Width))
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	if req.MinPolicyVersion > s.cfg.PolicyVersion {
		return nil, fmt.Errorf("min_policy_version: %d; this sampler has version %d", req.MinPolicyVersion, s.cfg.PolicyVersion)
	}
	plan := flow.Plan{
		Sigmas: req.Sigmas, NoiseLevel: req.NoiseLevel, LogProb: flow.LogProbKind(req.LogProbKind),
		Solver: flow.Solver(req.Solver), Storage: tensor.DType(req.LatentsDType), Seed: req.SampleSeed,
	}
	for _, t := range req.Transitions {
		plan.Transitions = append(plan.Transitions, flow.Transition(t))
	}
	if got := req.ComputeScheduleDigest(); got != req.ScheduleDigest {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("schedule_digest: %q; the request's fields give %q", req.ScheduleDigest, got))
	}
	size := tokens * s.card.LatentChannels
	x, err := s.initialLatents(ctx, req, tokens)
	if err != nil {
		return nil, err
	}
	rollout, err := flow.NewRollout(plan, x)
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	a := &attempt{
		ctx: ctx, s: s, req: req, token: token, rollout: rollout, received: time.Now(),
		velocity: make([]float32, size), done: make(chan struct{}),
	}
	prompts := []string{req.Prompt}
	if a.guided() {
		prompts = append(prompts, req.NegativePrompt)
		a.negVelocity = make([]float32, size)
	}
	encode := s.model.Encode
	if req.TruncatePrompt {
		encode = s.model.EncodeTruncated
	}
	conds, err := encode(ctx, prompts)
	if errors.Is(err, model.ErrPrompt) {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("%w; shorten it, or set truncate_prompt to have it cut", err))
	}
	if err != nil {
		return nil, fmt.Errorf("encode prompt: %w", err)
	}
	a.encode = time.Since(a.received)
	a.cond, a.negCond = conds[0], conds[len(conds)-1]
	return a, nil
}

// initialLatents is x_T [S, C]: drawn, or this sample's part of what the prompt gave.
func (s *service) initialLatents(ctx context.Context, req *schemas.Request, tokens int) ([]float32, error) {
	x := make([]float32, tokens*s.card.LatentChannels)
	t := req.InitialLatents
	if t == nil {
		flow.InitialNoise(x, req.NoiseSeed)
		return x, nil
	}
	data := t.Data
	if t.Ref != nil {
		var err error
		data, err = s.bus.GetBlob(ctx, *t.Ref)
		switch {
		case errors.Is(err, bus.ErrNotFound), errors.Is(err, bus.ErrCorrupt):
			return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("initial_latents.ref: %w", err))
		case err != nil:
			return nil, fmt.Errorf("load initial latents: %w", err)
		}
	}
	dtype := tensor.DType(t.DType)
	size := len(x) * dtype.Size()
	begin := int(req.SampleIndex) * size
	if !slices.Equal(t.Shape, []int64{req.GroupSize, int64(tokens), int64(s.card.LatentChannels)}) || len(data) < begin+size {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("initial_latents: %v in %d bytes; must be [%d %d %d]",
			t.Shape, len(data), req.GroupSize, tokens, s.card.LatentChannels))
	}
	if err := dtype.DecodeFloats(x, data[begin:begin+size]); err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("initial_latents: %w", err))
	}
	return x, nil
}

// guided says whether classifier-free guidance needs a second evaluation.
func (a *attempt) guided() bool { return a.req.TrueCFGScale > 1 }

// advance feeds the velocity to the rollout and publishes the step it completed.
func (a *attempt) advance() {
	step, err := a.rollout.Advance(a.velocity)
	if err != nil {
		a.finish(bus.Terminal(schemas.CodeFailed, err))
		return
	}
	if step == nil {
		return // the solver wants another evaluation
	}
	event := a.event(step)
	digest, err := event.ContentDigest()
	if err != nil {
		a.finish(fmt.Errorf("digest of step %d: %w", step.Index, err))
		return
	}
	a.content = append(a.content, digest)
	a.logProbs = append(a.logProbs, event.LogProb)
	a.device = 0
	future, err := a.s.publisher.PublishStep(a.ctx, event)
	if err != nil {
		a.finish(fmt.Errorf("publish step %d: %w", step.Index, err))
		return
	}
	a.steps = append(a.steps, future)
	a.s.metrics.steps.Inc()
	if a.rollout.Done() {
		a.finish(nil)
	}
}

func (a *attempt) finish(err error) {
	if a.finished {
		return
	}
	a.finished, a.err = true, err
	a.denoise = time.Since(a.started)
	a.s.metrics.denoising.Dec()
	close(a.done)
}

// event copies what the step's buffers hold: they are reused by the next step.
func (a *attempt) event(step *flow.Step) *schemas.Step {
	r := a.req
	e := &schemas.Step{
		Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, Attempt: a.token,
		StepIndex: int64(step.Index), NumInferenceSteps: int64(len(r.Transitions)),
		Transition: string(step.Transition), NoiseLevel: r.NoiseLevel,
		Sigma: step.Sigma, SigmaNext: step.SigmaNext, Timestep: step.Timestep,
		StdDevT: step.StdDevT, NoiseStd: step.NoiseStd, LogProbKind: r.LogProbKind,
		ElementCount: int64(len(step.X)), ScheduleDigest: r.ScheduleDigest,
		PolicyVersion: a.s.cfg.PolicyVersion, WeightsDigest: a.s.card.WeightsDigest,
		Sampler: a.s.cfg.Instance, Backend: "cpu", DeviceNS: a.device.Nanoseconds(),
	}
	if step.LogProb != nil {
		e.LogProb, e.LogProbSum = &step.LogProb.Mean, &step.LogProb.Sum
	}
	last := step.Index == len(r.Transitions)-1
	if slices.Contains(r.ReturnStepIndices, int64(step.Index)) {
		e.Latents = append(e.Latents, schemas.IndexedTensor{Index: int64(step.Index), Tensor: a.tensor(r.LatentsDType, step.X)})
	}
	if last && slices.Contains(r.ReturnStepIndices, int64(step.Index)+1) {
		e.Latents = append(e.Latents, schemas.IndexedTensor{Index: int64(step.Index) + 1, Tensor: a.tensor(r.LatentsDType, step.Next)})
	}
	for _, name := range r.Debug {
		e.Debug = append(e.Debug, schemas.NamedTensor{Name: name, Tensor: a.debug(name, step)})
	}
	return e
}

// debug is one of the optional tensors; F32 whatever the latents are stored as.
func (a *attempt) debug(name string, step *flow.Step) schemas.Tensor {
	f32 := string(tensor.F32)
	switch name {
	case "noise":
		if step.Noise == nil { // an ode step draws none
			return a.tensor(f32, make([]float32, len(step.X)))
		}
		return a.tensor(f32, step.Noise)
	case "mean":
		return a.tensor(f32, step.Mean)
	case "std":
		return schemas.Tensor{DType: f32, Shape: []int64{1}, Data: tensor.F32.AppendFloats(nil, []float32{float32(step.NoiseStd)})}
	default: // model_output, the only other name a valid request has
		return a.tensor(f32, step.Velocity)
	}
}

func (a *attempt) tensor(dtype string, x []float32) schemas.Tensor {
	c := int64(a.s.card.LatentChannels)
	return schemas.Tensor{DType: dtype, Shape: []int64{int64(len(x)) / c, c}, Data: tensor.DType(dtype).AppendFloats(nil, x)}
}

// finish waits until every step is stored, decodes the picture, stores it, and
// returns the trajectory that makes this attempt the one that counts.
func (s *service) finish(ctx context.Context, a *attempt) (*schemas.Trajectory, error) {
	began := time.Now()
	picture, err := s.model.Decode(ctx, a.rollout.Latents(), int(a.req.Height), int(a.req.Width))
	if err != nil {
		return nil, fmt.Errorf("decode latents: %w", err)
	}
	decode := time.Since(began)
	stored, err := s.storeImage(ctx, picture)
	if err != nil {
		return nil, err
	}
	t := s.trajectory(a.req, a.token)
	t.StopReason = schemas.StopCompleted
	t.TruncatedTokens = int64(a.cond.Cut)
	t.LogProbs = a.logProbs
	t.Image = stored
	t.ContentDigest = schemas.StepsDigest(a.content)
	t.LatentStepIndices = a.req.ReturnStepIndices
	c := int64(s.card.LatentChannels)
	t.LatentsShape = []int64{int64(len(a.velocity)) / c, c}
	for i, future := range a.steps {
		ack, err := future.Wait(ctx)
		if err != nil {
			return nil, fmt.Errorf("store step %d: %w", i, err)
		}
		t.Steps = append(t.Steps, schemas.StepRef{Seq: ack.Seq, Digest: ack.Digest})
	}
	t.Timings = schemas.SampleTimings{
		Received: a.received.UnixNano(), Started: a.started.UnixNano(), Finished: time.Now().UnixNano(),
		EncodeNS: a.encode.Nanoseconds(), DenoiseNS: a.denoise.Nanoseconds(), DecodeNS: decode.Nanoseconds(),
	}
	return t, nil
}

// trajectory holds what is known before any step ran.
func (s *service) trajectory(r *schemas.Request, token string) *schemas.Trajectory {
	t := &schemas.Trajectory{
		Run: r.Run, UID: r.UID, SampleIndex: r.SampleIndex, GroupSize: r.GroupSize, Lane: r.Lane, Attempt: token,
		Prompt: r.Prompt, NegativePrompt: r.NegativePrompt, TruncatePrompt: r.TruncatePrompt, Height: r.Height, Width: r.Width,
		TrueCFGScale: r.TrueCFGScale, CFGRule: schemas.CFGRescaled, SampleSeed: r.SampleSeed, NoiseSeed: r.NoiseSeed, InitialLatents: r.InitialLatents,
		Sigmas: r.Sigmas, Transitions: r.Transitions, LogProbKind: r.LogProbKind, NoiseLevel: r.NoiseLevel,
		Solver: r.Solver, LatentsDType: r.LatentsDType, ScheduleDigest: r.ScheduleDigest,
		WeightsDigest: s.card.WeightsDigest, PolicyVersionMin: s.cfg.PolicyVersion, PolicyVersionMax: s.cfg.PolicyVersion,
		Sampler: s.cfg.Instance, Backend: "cpu", Group: r.Group,
	}
	for _, sigma := range r.Sigmas {
		t.Timesteps = append(t.Timesteps, flow.Timestep(sigma))
	}
	return t
}

// storeImage puts the picture into the object store as PNG; its digest is over
// the pixels, so it does not depend on the PNG encoder.
func (s *service) storeImage(ctx context.Context, picture *image.NRGBA) (*schemas.Image, error) {
	var buf bytes.Buffer
	if err := png.Encode(&buf, picture); err != nil {
		return nil, fmt.Errorf("encode png: %w", err)
	}
	ref, err := s.bus.PutBlob(ctx, buf.Bytes())
	if err != nil {
		return nil, fmt.Errorf("store picture: %w", err)
	}
	size := picture.Bounds().Size()
	pixels := make([]byte, 0, 3*size.X*size.Y)
	for y := range size.Y {
		row := picture.Pix[y*picture.Stride:]
		for x := range size.X {
			pixels = append(pixels, row[4*x:4*x+3]...)
		}
	}
	digest := sha256.Sum256(pixels)
	return &schemas.Image{
		Format: schemas.ImagePNG, Width: int64(size.X), Height: int64(size.Y), Digest: hex.EncodeToString(digest[:]), Ref: &ref,
	}, nil
}
