package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/scheduled"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Rolling is one sample of scheduled sampling: the rollout from its source down to its target, then the predictions of
// ReflexFlow if they are asked for. The caller evaluates the model at Point and gives the output to Advance.
type Rolling struct {
	sample *schemas.ScheduledSample
	dtype  tensor.DType
	levels *scheduled.Levels
	roller *scheduled.Roller[float32]

	x0, noise []float32
	// Noised is the state at the source, Teacher that of the data at the target. [S, C]
	Noised, Teacher []float32
	// Clean and Biased are nil until they are known.
	Clean, Biased []float32
	// Latents is the state at the target once it is reached, in latents_dtype.
	Latents []float32
	// forced is the teacher-forced state, data mixed with noise, at the sample's own timestep, which may be a fraction.
	forced   []float32
	before   []float32 // state before the step that is made
	forwards int64
}

// NewRolling begins a sample at its data x0 [S, C], which it keeps, with the noise of noiseSeed. config is the model's
// scheduler_config.json; dtype is the latents_dtype that states are rounded to. Errors name the field.
func NewRolling(config []byte, s *schemas.ScheduledSample, dtype string, x0 []float32, noiseSeed uint64) (*Rolling,
	error,
) {
	noise, err := scheduled.ParseNoise(config)
	if err != nil {
		return nil, err
	}
	set := &s.RollSettings
	if noise.Prediction != set.Prediction {
		return nil, fmt.Errorf("scheduled_sampling.settings.prediction: %q; the model's is %q", set.Prediction,
			noise.Prediction)
	}
	levels, err := noise.Levels(int(set.Timesteps))
	if err != nil {
		return nil, fmt.Errorf("scheduled_sampling.settings.%w", err)
	}
	r := &Rolling{sample: s, dtype: tensor.DType(dtype), levels: levels, x0: x0, noise: drawNoise(noiseSeed, len(x0))}
	at := func(t float64) []float32 {
		x := make([]float32, len(x0))
		scheduled.Noised(x, x0, r.noise, levels.At(t))
		r.dtype.Round(x)
		return x
	}
	r.forced = at(s.Roll.Timestep)
	r.Noised, r.Teacher = r.forced, r.forced
	if s.Roll.IsRolled() {
		r.Noised, r.Teacher = at(float64(s.Roll.Source)), at(float64(s.Roll.Base))
	}
	r.roller, err = scheduled.NewRoller(scheduled.Rollout{
		Levels: levels, Sampler: scheduled.Sampler(set.Sampler), Order: int(set.Order),
		Compat: scheduled.Compat(set.Compat),
		Source: int(s.Roll.Source), Target: int(s.Roll.Base),
	}, r.Noised)
	if err != nil {
		return nil, fmt.Errorf("scheduled_sampling.%w", err)
	}
	r.keepTarget()
	return r, nil
}

// Sigmas is the schedule that the sample is part of.
func (r *Rolling) Sigmas() []float32 { return r.levels.Sigmas() }

// Done reports whether the model need not be evaluated any more.
func (r *Rolling) Done() bool {
	return r.roller.Done() && (r.sample.RollSettings.ReflexFlow == nil || r.Clean != nil)
}

// keepTarget keeps the state at the target once it is reached.
func (r *Rolling) keepTarget() {
	if r.Latents == nil && r.roller.Done() {
		r.Latents = slices.Clone(r.roller.Latent())
		r.dtype.Round(r.Latents)
	}
}

// Point returns the latent and the sigma to evaluate the model at, valid until the next Advance.
func (r *Rolling) Point() (x []float32, sigma float32) {
	var t float64
	switch {
	case !r.roller.Done():
		x, t = r.roller.Input()
	case r.asksBiased():
		x, t = r.Latents, float64(r.sample.Roll.Base)
	default:
		x, t = r.forced, r.sample.Roll.Timestep
	}
	level := r.levels.At(t)
	if r.levels.Prediction() == scheduled.Flow {
		return x, float32(level.U)
	}
	return x, float32(min(level.U/level.A, math.MaxFloat32)) // without data, A is 0 and the quotient infinite
}

// asksBiased reports whether the prediction at the rolled latent, if there is one, comes next.
func (r *Rolling) asksBiased() bool { return r.sample.Roll.IsRolled() && r.Biased == nil }

// Advance takes the model's output at Point, and returns the step that this completes, nil for none, with the state
// before it, valid until the next Advance. It fails on output that is not finite.
func (r *Rolling) Advance(output []float32) (*scheduled.Step, []float32, error) {
	r.forwards++
	for _, v := range output {
		if v-v != 0 {
			return nil, nil, errors.New("the model's output is not finite")
		}
	}
	if r.roller.Done() {
		kept := slices.Clone(output)
		switch {
		case r.asksBiased():
			r.Biased = kept
		case r.sample.Roll.IsRolled():
			r.Clean = kept
		default:
			r.Clean, r.Biased = kept, kept
		}
		return nil, nil, nil
	}
	r.before = append(r.before[:0], r.roller.Latent()...)
	step, complete, err := r.roller.Advance(output)
	if err != nil || !complete {
		return nil, nil, err
	}
	if exact := r.sample.RollSettings.Compat == schemas.CompatExact; exact && !(step.Next.U < step.Here.U) {
		return nil, nil, fmt.Errorf("step %d to %d: noise goes from %v to %v; must fall", step.From, step.To,
			step.Here.U, step.Next.U)
	}
	r.keepTarget()
	return &step, r.before, nil
}

// Result returns the result of a sample that is done, with its tensors [S, C] inline.
func (r *Rolling) Result(shape []int64) (*schemas.Rolled, error) {
	t := r.sample.Roll.Timestep
	if r.sample.Roll.IsRolled() {
		t = float64(r.sample.Roll.Base)
	}
	level := r.levels.At(t)
	bytes := func(x []float32, dtype tensor.DType) ([]byte, string) {
		data := dtype.AppendFloats(nil, x)
		sum := sha256.Sum256(data)
		return data, hex.EncodeToString(sum[:])
	}
	latents, _ := bytes(r.Latents, r.dtype)
	_, teacher := bytes(r.Teacher, r.dtype)
	out := &schemas.Rolled{
		Timestep: t, U: level.U, A: level.A, TeacherDigest: teacher, Forwards: r.forwards,
		Latents: schemas.Tensor{DType: string(r.dtype), Shape: shape, Data: latents},
	}
	if d := scheduled.Drift(r.Latents, r.Teacher); d-d == 0 {
		out.Drift = &d
	}
	reflex := r.sample.RollSettings.ReflexFlow
	if reflex == nil {
		return out, nil
	}
	keep := func(x []float32) *schemas.Prediction {
		data, digest := bytes(x, tensor.F32)
		p := &schemas.Prediction{Digest: digest}
		if reflex.Keep == schemas.KeepTensors {
			p.Tensor = &schemas.Tensor{DType: string(tensor.F32), Shape: shape, Data: data}
		}
		return p
	}
	out.Clean, out.Biased = keep(r.Clean), keep(r.Biased)
	terms, err := r.reflexTerms(reflex)
	out.ReflexFlow = terms
	return out, err
}

// reflexTerms returns the terms of ReflexFlow's loss for a step with the same weights: the biased prediction.
func (r *Rolling) reflexTerms(c *schemas.ReflexFlow) (*schemas.ReflexTerms, error) {
	wide := func(x []float32) []float64 {
		out := make([]float64, len(x))
		for i, v := range x {
			out[i] = float64(v)
		}
		return out
	}
	target := wide(r.noise)
	for i, v := range r.x0 {
		target[i] -= float64(v)
	}
	biased := wide(r.Biased)
	loss := scheduled.ReflexFlow{Alpha: *c.Alpha, Beta1: *c.Beta1, Beta2: *c.Beta2}
	t, err := loss.Terms(scheduled.Predictions{
		Clean: wide(r.Clean), Biased: biased, Pred: biased, Target: target,
		Noisy: wide(r.Latents), X0: wide(r.x0),
	})
	if err != nil {
		return nil, fmt.Errorf("loss of reflexflow: %w", err)
	}
	return &schemas.ReflexTerms{
		ExposureL1: t.Exposure, WeightMin: t.WeightMin, WeightMax: t.WeightMax, FCLoss: t.FC,
		ADRLoss: t.ADR,
	}, nil
}

// rolledEpisode is a sample of scheduled sampling as an episode.
type rolledEpisode struct {
	evaluated
	rolling *Rolling
}

// startRolled is Start for a request with scheduled_sampling. Faults of the request are terminal errors.
func (e *flowEngine) startRolled(ctx context.Context, req *schemas.Request, from *schemas.SegmentStart,
	tokens int,
) (engine.Episode, error) {
	if e.card.Pipeline != nil && len(e.card.Pipeline.Tracks) > 1 {
		return nil, engine.Invalid("scheduled_sampling: given; must be absent: the states of %s have several tracks",
			e.card.Pipeline.Class)
	}
	x0 := make([]float32, tokens*e.card.LatentChannels)
	shape := []int64{int64(tokens), int64(e.card.LatentChannels)}
	if err := StartState(x0, from.Latents, req.SampleIndex, shape); err != nil {
		return nil, engine.Invalid("start.data.latents.%w", err)
	}
	rolling, err := NewRolling(e.card.SchedulerConfig, req.ScheduledSampling, req.LatentsDType, x0, req.NoiseSeed)
	if err == nil && !slices.Equal(rolling.Sigmas(), req.Sigmas) {
		err = errors.New("sigmas: not those of the model's training timesteps")
	}
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	p := &rolledEpisode{rolling: rolling}
	p.evaluated, err = e.evaluated(ctx, req, len(x0))
	return p, err
}

func (p *rolledEpisode) point() Point {
	x, sigma := p.rolling.Point()
	return Point{X: x, Sigma: sigma}
}

func (p *rolledEpisode) advance() (*schemas.Step, error) {
	step, before, err := p.rolling.Advance(p.output)
	if err != nil || step == nil {
		return nil, err
	}
	return p.stepEvent(step, before), nil
}

// stepEvent returns the event of a step of a roll; before is the state that it began with.
func (p *rolledEpisode) stepEvent(step *scheduled.Step, before []float32) *schemas.Step {
	r, s := p.req, p.req.ScheduledSampling
	index := int(s.RollSettings.Timesteps) - 1 - step.From
	_, end := r.Segment()
	k := flow.StepTransition{Transition: flow.ODE, Sigma: r.Sigmas[index], SigmaNext: r.Sigmas[index+1]}
	e := stepEvent(r, p.shape(), k.Step(index, before, p.rolling.Latents), int64(index)+1 == end)
	e.ScheduledSampling = &schemas.RolledStep{
		Base: s.Roll.Base, Source: s.Roll.Source, From: int64(step.From), To: int64(step.To),
		U: step.Here.U, A: step.Here.A, UNext: step.Next.U, ANext: step.Next.A,
		Sampler: s.RollSettings.Sampler, Order: int64(step.Order), Compat: s.RollSettings.Compat,
	}
	return e
}

func (p *rolledEpisode) Done() bool { return p.rolling.Done() }

// Finish adds the result of the sample to t, and decodes its states if images are asked for.
func (p *rolledEpisode) Finish(ctx context.Context, t *schemas.Trajectory) (images engine.Images, err error) {
	p.finish(t)
	if t.Rolled, err = p.rolling.Result(p.shape()); err != nil {
		return images, bus.Terminal(schemas.CodeFailed, err)
	}
	if !t.Decoded() {
		return images, nil
	}
	for _, of := range []struct {
		to      *media.Media
		latents []float32
	}{
		{&images.End, p.rolling.Latents}, {&images.Noised, p.rolling.Noised}, {&images.Teacher, p.rolling.Teacher},
	} {
		if *of.to, err = p.decode(ctx, of.latents); err != nil {
			return images, err
		}
	}
	return images, nil
}
