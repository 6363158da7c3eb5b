package images

import (
	"context"
	"errors"
	"fmt"
	"image"
	"math"
	"sync"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/pool"
	"github.com/meander-rl/meander/pkg/remotehttp"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// servedEpisode is one image that a server makes. All its steps come at once.
type servedEpisode struct {
	e   *Served
	req *schemas.Request
	ask *remoteimage.Request
	// begin has a server make the image; the first Step calls it.
	begin func()

	stop   context.CancelFunc
	making sync.WaitGroup
	made   chan struct{} // closed when answer or err is there
	answer *remoteimage.Answer
	err    error
	taken  bool
}

// Start checks a request against the model and what the servers can do. A server gets it with the first Step. ErrAway
// says that none can be reached; faults of the request are terminal errors.
func (s *Served) Start(ctx context.Context, req *schemas.Request, _ *schemas.SegmentStart) (engine.Episode, error) {
	if err := engine.Away(s.pool); err != nil {
		return nil, err
	}
	if req.Text != nil {
		return nil, engine.Invalid("text: given; the model %s makes images", s.card.Name)
	}
	tokens, err := s.card.Tokens(sampling.SizeOf(&req.Sampling))
	if err == nil {
		err = errors.Join(req.CheckSchedule(), s.facts().Makes(req), sampling.Plan(&req.Sampling).Validate())
	}
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	ctx, stop := context.WithCancel(ctx)
	p := &servedEpisode{e: s, req: req, ask: s.ask(req, tokens), stop: stop, made: make(chan struct{})}
	p.begin = sync.OnceFunc(func() {
		p.making.Go(func() {
			defer close(p.made)
			p.err = engine.Guarded(func() (err error) {
				p.answer, err = s.generate(ctx, p.ask)
				return err
			})
		})
	})
	return p, nil
}

// ask returns a request in the form of the servers' client.
func (s *Served) ask(req *schemas.Request, tokens int) *remoteimage.Request {
	q := &remoteimage.Request{
		Prompt: req.Prompt, Negative: req.NegativePrompt, CFG: req.TrueCFGScale, Seed: req.SampleSeed,
		Height: int(req.Height), Width: int(req.Width), Tokens: tokens, Channels: s.card.LatentChannels,
		Sigmas: req.Sigmas, Type: remoteimage.ODE, NoiseLevel: req.NoiseLevel,
		Weights: s.changed, Squared: req.LogProbKind == schemas.LogProbSquared, Debug: len(req.Debug) > 0,
		// Every token has a byte at least. A server cuts a text that is too long; its encoding tells.
		Conditioning: req.ReturnConditioning ||
			max(len(req.Prompt), len(req.NegativePrompt)) > s.card.MaxPromptTokens-templateTokens,
	}
	for _, i := range req.StochasticSteps() {
		q.Type, q.SDESteps = req.Transitions[i], append(q.SDESteps, int(i))
	}
	for _, i := range req.ReturnStepIndices {
		q.Return = append(q.Return, int(i))
	}
	if len(q.Return) == 0 {
		q.Return = []int{q.Steps()} // without any there is no schedule to check
	}
	return q
}

// templateTokens is more than what a template adds to the tokens of a prompt.
const templateTokens = 16

// generate has a server make an image. ErrAway says that none can be reached. A terminal error says that the request
// cannot be made; against others a retry may help.
func (s *Served) generate(ctx context.Context, q *remoteimage.Request) (*remoteimage.Answer, error) {
	a, err := s.pool.Generate(ctx, q)
	switch {
	case errors.Is(err, pool.ErrAway), errors.Is(err, pool.ErrWeights): // the one that has them is away
		return nil, fmt.Errorf("%w: %w", engine.ErrAway, err)
	case errors.Is(err, remotehttp.ErrRefused), errors.Is(err, remoteimage.ErrSchedule),
		errors.Is(err, remoteimage.ErrNotFinite):
		return nil, bus.Terminal(schemas.CodeFailed, err)
	case err != nil:
		return nil, err
	}
	for _, text := range []*remoteimage.Tensor{a.Prompt, a.Negative} {
		if text != nil && text.Shape[0] > s.card.MaxPromptTokens {
			return nil, engine.Invalid("prompt, or negative_prompt: %d tokens; must be at most %d: %w", text.Shape[0],
				s.card.MaxPromptTokens, model.ErrPrompt)
		}
	}
	return a, nil
}

// stepWait bounds how long a Step waits for an image, so that episodes can join and leave.
const stepWait = 20 * time.Millisecond

// Step asks for the images of episodes that are new, and waits for up to stepWait for that of the first.
func (s *Served) Step(ctx context.Context, episodes []engine.Episode) error {
	for _, e := range episodes {
		e.(*servedEpisode).begin()
	}
	patience := time.NewTimer(stepWait)
	defer patience.Stop()
	select {
	case <-episodes[0].(*servedEpisode).made:
	case <-patience.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// Bucket is one for all of an engine: servers make images one by one.
func (p *servedEpisode) Bucket() any { return p.e }

// Take returns all steps once the image is made.
func (p *servedEpisode) Take() ([]schemas.StepEvent, error) {
	select {
	case <-p.made:
	default:
		return nil, nil
	}
	if p.err != nil || p.taken {
		return nil, p.err
	}
	p.taken = true
	var events []schemas.StepEvent
	for i := range p.req.Transitions {
		e, err := p.event(i)
		if err != nil {
			return nil, bus.Terminal(schemas.CodeFailed, err)
		}
		events = append(events, e)
	}
	return events, nil
}

// event returns the event of a step: the server's states, log-prob and tensors, and the noise of the schedule.
func (p *servedEpisode) event(i int) (*schemas.Step, error) {
	r, a, steps := p.req, p.answer, len(p.req.Transitions)
	k, err := sampling.Plan(&r.Sampling).StepTransition(i)
	if err != nil {
		return nil, err
	}
	n := p.ask.Tokens * p.ask.Channels
	x := a.Latents[i]
	if x == nil {
		x = make([]float32, n) // it is not stored, only counted
	}
	step := k.Step(i, x, a.Latents[i+1])
	if k.Transition.Stochastic() {
		mean := float64(a.LogProbs[i])
		step.LogProb = &flow.LogProb{Sum: mean * float64(n), Count: n, Mean: mean}
	}
	e := stepEvent(r, p.shape(), step, i == steps-1)
	if d := a.Debug; d != nil {
		of := func(all []float32) []float32 { return all[i*n : (i+1)*n] }
		if step.Mean, step.Velocity = of(d.Mean), of(d.Velocity); k.Transition.Stochastic() {
			step.Noise = of(d.Noise)
		}
		for _, name := range r.Debug {
			e.Debug = append(e.Debug, schemas.NamedTensor{Name: name, Tensor: debugTensor(name, p.shape(), step)})
		}
	}
	return e, nil
}

// shape returns [S, C] of the latents.
func (p *servedEpisode) shape() []int64 { return []int64{int64(p.ask.Tokens), int64(p.ask.Channels)} }

func (p *servedEpisode) Done() bool { return p.taken }

// Texts are the texts as the server encoded them.
func (p *servedEpisode) Texts() (card model.Card, cond, negative *model.Conditioning) {
	of := func(prompt string, t *remoteimage.Tensor) *model.Conditioning {
		if t == nil {
			return nil
		}
		return &model.Conditioning{Prompt: prompt, Tensors: []model.Tensor{
			{Name: p.e.card.Conditioning[0], Shape: t.Shape, Data: t.Data},
		}}
	}
	return p.e.card, of(p.req.Prompt, p.answer.Prompt), of(p.req.NegativePrompt, p.answer.Negative)
}

// Finish returns the server's image, and says in t which server made it.
func (p *servedEpisode) Finish(_ context.Context, t *schemas.Trajectory) (engine.Images, error) {
	t.LatentStepIndices, t.LatentsShape = p.req.ReturnStepIndices, p.shape()
	t.Drawn = &schemas.Drawn{Engine: *p.e.facts()}
	return engine.Images{End: media.Of(pixels(p.answer.Image))}, nil
}

// pixels rounds an image [3, 1, height, width] of 0 to 1 to bytes, half to even.
func pixels(t remoteimage.Tensor) *image.NRGBA {
	height, width := t.Shape[2], t.Shape[3]
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for i := range height * width {
		for c := range 3 {
			v := float64(t.Data[c*height*width+i])
			img.Pix[4*i+c] = uint8(math.RoundToEven(min(max(v, 0), 1) * 255))
		}
		img.Pix[4*i+3] = 255
	}
	return img
}

// Close gives the image up, and waits until nothing is read any more.
func (p *servedEpisode) Close() error {
	p.stop()
	p.making.Wait()
	return nil
}
