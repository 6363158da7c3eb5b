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
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/schemas"
)

// leaveTimeout bounds the wait for the steps of an attempt that is handed back.
const leaveTimeout = 2 * time.Second

// recorder turns what one attempt makes into events: it names them, publishes each step as
// it happens, and at the end knows the trajectory. It knows no mathematics.
type recorder struct {
	*Recording
	s     *service
	req   *schemas.Request
	token string
	// backend is what computes: of the first device until it is known.
	backend string
	// weights are those that the next step is made with; oldest and newest are the versions so far.
	weights        *weights
	oldest, newest int64

	received time.Time
	encode   time.Duration
	logProbs []*float64 // of all steps of the schedule; nil where none ran
}

func (s *service) newRecorder(req *schemas.Request, with *weights) *recorder {
	var logProbs []*float64
	if req.Text == nil {
		logProbs = make([]*float64, len(req.Transitions))
	}
	return &recorder{
		Recording: &Recording{sealer: s.sealer, publisher: s.publisher}, s: s, req: req, token: fmt.Sprintf("%s-%d", s.token, s.count.Add(1)), backend: s.network.Backend(), received: time.Now(),
		weights: with, oldest: with.version(), newest: with.version(),
		logProbs: logProbs,
	}
}

// takeOver has a step of an earlier attempt count as one of this.
func (r *recorder) takeOver(step *storedStep) {
	r.content = append(r.content, step.content)
	r.logProbs[step.event.StepIndex] = step.event.LogProb
	r.steps = append(r.steps, recorded{ref: step.ref})
	r.seal = step.seal
}

// step publishes one step without waiting for it to be stored.
func (r *recorder) step(ctx context.Context, e schemas.StepEvent, device time.Duration) error {
	e.Mark(schemas.StepMark{
		Run: r.req.Run, UID: r.req.UID, SampleIndex: r.req.SampleIndex, Attempt: r.token,
		PolicyVersion: r.weights.version(), WeightsDigest: r.weights.policy.WeightsDigest,
		Sampler: r.s.cfg.Instance, Backend: r.backend, DeviceNS: device.Nanoseconds(),
	})
	if t, ok := e.(*schemas.Tokens); ok { // of logits that are none nobody shall learn
		if err := t.Validate(); err != nil {
			return bus.Terminal(schemas.CodeFailed, err)
		}
	}
	if err := r.Step(ctx, e); err != nil {
		return err
	}
	switch e := e.(type) {
	case *schemas.Step:
		r.logProbs[e.StepIndex] = e.LogProb
		r.s.metrics.steps.Inc()
	case *schemas.Tokens:
		if e.Generated {
			r.s.metrics.tokens.Add(float64(len(e.IDs)))
		}
	}
	return nil
}

// catchUp has an attempt go on with the sampler's newest weights, where their policy says so: with the
// next step, or, with restarts, from the beginning (errRestart). What the last step made is recorded as that of the weights
// that made it.
func (r *recorder) catchUp(a *attempt, c *seat, restarts bool) error {
	next := r.s.versions.newest()
	if next != r.weights && next.policy.Rule == schemas.SwapRestart && restarts {
		return errRestart
	}
	r.take(a, c, func(to *weights) bool { return to.policy.Rule == schemas.SwapSwitch })
	return nil
}

// renew has an attempt that was admitted, and has no steps yet, begin with the newest weights: it may have waited for
// its turn since it was encoded.
func (r *recorder) renew(a *attempt, c *seat) {
	if len(r.steps) > 0 {
		return // taken over from an earlier attempt, of the weights that it has
	}
	r.take(a, c, func(*weights) bool { return true })
	r.oldest = r.newest
}

// take has an attempt go on with the newest weights, where may says so of them and its episode can.
func (r *recorder) take(a *attempt, c *seat, may func(to *weights) bool) {
	episode, can := a.episode.(Switcher)
	if !can {
		return
	}
	next := r.s.versions.move(r.weights, may)
	if next == r.weights {
		return
	}
	a.engine = next.engines[c.index]
	episode.Switch(a.engine)
	r.weights, r.newest = next, next.version()
}

// undo removes the steps of an attempt that begins again.
func (r *recorder) undo(ctx context.Context) error {
	r.leave()
	steps := schemas.AttemptFilter(r.req.Run, r.req.UID, r.req.SampleIndex, r.token)
	if _, err := r.s.bus.PurgeSubject(ctx, schemas.StreamSteps, steps); err != nil {
		return fmt.Errorf("remove the steps of an attempt that begins again: %w", err)
	}
	return nil
}

// finish completes the episode, stores its image, waits until every step is stored, and
// returns the trajectory that makes this attempt the one that counts.
func (r *recorder) finish(ctx context.Context, a *attempt) (*schemas.Trajectory, error) {
	t := r.trajectory()
	began := time.Now()
	images, err := a.episode.Finish(ctx, t)
	if err != nil {
		return nil, err
	}
	decode := time.Since(began)
	if t.Image, err = r.storeImage(ctx, images.End); err != nil {
		return nil, err
	}
	if t.Conditioning, err = r.storeTexts(ctx, a.episode); err != nil {
		return nil, err
	}
	if err := r.rolled(ctx, t.Rolled, images); err != nil {
		return nil, err
	}
	if err := r.storeText(ctx, t.Text); err != nil {
		return nil, err
	}
	t.StopReason = schemas.StopCompleted
	t.ContentDigest = schemas.StepsDigest(r.content)
	if t.Steps, err = r.Stored(ctx); err != nil {
		return nil, err
	}
	t.Timings = schemas.SampleTimings{
		Received: r.received.UnixNano(), Started: a.started.UnixNano(), Finished: time.Now().UnixNano(),
		EncodeNS: r.encode.Nanoseconds(), DenoiseNS: a.denoise.Nanoseconds(), DecodeNS: decode.Nanoseconds(),
	}
	return t, nil
}

// leave waits for the steps of an attempt that is handed back: whoever gets the request next goes
// on from what is stored.
func (r *recorder) leave() {
	ctx, stop := context.WithTimeout(context.Background(), leaveTimeout)
	defer stop()
	for _, step := range r.steps {
		if step.future != nil {
			_, _ = step.future.Wait(ctx) // what is not stored is made again
		}
	}
}

// failed is the trajectory of a sample that cannot be made.
func (r *recorder) failed(cause error) *schemas.Trajectory {
	now := r.received.UnixNano()
	t := r.trajectory()
	t.StopReason, t.Error = schemas.StopFailed, cause.Error()
	if fault, ok := errors.AsType[*interaction.Fault](cause); ok && t.Text != nil {
		t.Text.Conversation = fault.State
	}
	t.Timings = schemas.SampleTimings{Received: now, Started: now, Finished: now}
	return t
}

// trajectory holds what is known before any step ran.
func (r *recorder) trajectory() *schemas.Trajectory {
	q, s := r.req, r.s
	t := &schemas.Trajectory{
		Run: q.Run, UID: q.UID, SampleIndex: q.SampleIndex, GroupSize: q.GroupSize, Lane: q.Lane, Attempt: r.token,
		Prompt: q.Prompt, NegativePrompt: q.NegativePrompt, TruncatePrompt: q.TruncatePrompt, Height: q.Height, Width: q.Width,
		TrueCFGScale: q.TrueCFGScale, SampleSeed: q.SampleSeed, NoiseSeed: q.NoiseSeed, StepSeeds: q.StepSeeds, Start: q.Start, Stop: q.Stop,
		ScheduledSampling: q.ScheduledSampling,
		Sigmas:            q.Sigmas, Transitions: q.Transitions, LogProbs: r.logProbs, LogProbKind: q.LogProbKind, NoiseLevel: q.NoiseLevel,
		Solver: q.Solver, LatentsDType: q.LatentsDType, ScheduleDigest: q.ScheduleDigest,
		WeightsDigest: r.weights.policy.WeightsDigest, PolicyVersionMin: r.oldest, PolicyVersionMax: r.newest,
		Sampler: s.cfg.Instance, Backend: r.backend, Group: q.Group,
	}
	switch m := s.network.Images; {
	case q.Text != nil:
		t.Text = &schemas.TextResult{Settings: *q.Text}
	case m != nil:
		t.CFGRule = m.Card().CFGRule
	}
	for _, sigma := range q.Sigmas {
		t.Timesteps = append(t.Timesteps, flow.Timestep(sigma))
	}
	return t
}

// rolled puts the tensors of what scheduled sampling came to into the object store, and its images.
func (r *recorder) rolled(ctx context.Context, x *schemas.Rolled, images Images) (err error) {
	if x == nil {
		return nil
	}
	if x.Noised, err = r.storeImage(ctx, images.Noised); err != nil {
		return err
	}
	if x.Teacher, err = r.storeImage(ctx, images.Teacher); err != nil {
		return err
	}
	tensors := []*schemas.Tensor{&x.Latents}
	for _, p := range []*schemas.Prediction{x.Clean, x.Biased} {
		if p != nil && p.Tensor != nil {
			tensors = append(tensors, p.Tensor)
		}
	}
	for _, t := range tensors {
		ref, err := r.s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store the rolled latents: %w", err)
		}
		t.Ref, t.Data = &ref, nil
	}
	return nil
}

// storeImage puts an image, nil for none, into the object store as PNG; its digest is over the pixels,
// so it does not depend on the PNG encoder.
func (r *recorder) storeImage(ctx context.Context, img *image.NRGBA) (*schemas.Image, error) {
	if img == nil {
		return nil, nil
	}
	var buf bytes.Buffer
	// The search for a shorter file takes seven times as long, for a sixth of its size.
	if err := (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&buf, img); err != nil {
		return nil, fmt.Errorf("encode png: %w", err)
	}
	ref, err := r.s.bus.PutBlob(ctx, buf.Bytes())
	if err != nil {
		return nil, fmt.Errorf("store image: %w", err)
	}
	size := img.Bounds().Size()
	pixels := make([]byte, 0, 3*size.X*size.Y)
	for y := range size.Y {
		row := img.Pix[y*img.Stride:]
		for x := range size.X {
			pixels = append(pixels, row[4*x:4*x+3]...)
		}
	}
	digest := sha256.Sum256(pixels)
	return &schemas.Image{
		Format: schemas.ImagePNG, Width: int64(size.X), Height: int64(size.Y), Digest: hex.EncodeToString(digest[:]), Ref: &ref,
	}, nil
}

// inlineText is the size from which on a tensor of a text goes to the object store, in bytes.
const inlineText = 16 << 10

// storeText puts the large tensors of a text into the object store.
func (r *recorder) storeText(ctx context.Context, x *schemas.TextResult) error {
	if x == nil {
		return nil
	}
	for _, t := range []*schemas.Tensor{x.IDs, x.Mask, x.LogProbs, x.ProcessedLogProbs, x.Entropies, x.TopLogProbs} {
		if t == nil || len(t.Data) < inlineText {
			continue
		}
		ref, err := r.s.bus.PutBlob(ctx, t.Data)
		if err != nil {
			return fmt.Errorf("store the text: %w", err)
		}
		t.Ref, t.Data = &ref, nil
	}
	return nil
}
