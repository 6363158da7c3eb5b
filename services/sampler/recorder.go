package sampler

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"image"
	"image/png"
	"time"

	"github.com/meander-rl/meander/pkg/flow"
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
	return &recorder{
		Recording: &Recording{sealer: s.sealer, publisher: s.publisher}, s: s, req: req, token: fmt.Sprintf("%s-%d", s.token, s.count.Add(1)), backend: s.card.Backend, received: time.Now(),
		weights: with, oldest: with.version(), newest: with.version(),
		logProbs: make([]*float64, len(req.Transitions)),
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
func (r *recorder) step(ctx context.Context, e *schemas.Step, device time.Duration) error {
	e.Run, e.UID, e.SampleIndex, e.Attempt = r.req.Run, r.req.UID, r.req.SampleIndex, r.token
	e.PolicyVersion, e.WeightsDigest = r.weights.version(), r.weights.policy.WeightsDigest
	e.Sampler, e.Backend, e.DeviceNS = r.s.cfg.Instance, r.backend, device.Nanoseconds()
	if err := r.Step(ctx, e); err != nil {
		return err
	}
	r.logProbs[e.StepIndex] = e.LogProb
	r.s.metrics.steps.Inc()
	return nil
}

// catchUp has an attempt go on with the sampler's newest weights, where their policy says so: with the
// next step, or, with restarts, from the beginning (errRestart).
func (r *recorder) catchUp(a *attempt, c *seat, restarts bool) error {
	next := r.s.versions.newest()
	if next == r.weights {
		return nil
	}
	episode, can := a.episode.(Switcher)
	switch rule := next.policy.Rule; {
	case rule == schemas.SwapRestart && restarts:
		return errRestart
	case rule == schemas.SwapSwitch && can:
		a.engine = next.engines[c.index]
		episode.Switch(a.engine)
		r.s.versions.move(r.weights, next)
		r.weights, r.newest = next, next.version()
	}
	return nil
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
	if err := r.storeConditioning(ctx, t.Conditioning); err != nil {
		return nil, err
	}
	if err := r.rolled(ctx, t.Rolled, images); err != nil {
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
	t.Timings = schemas.SampleTimings{Received: now, Started: now, Finished: now}
	return t
}

// trajectory holds what is known before any step ran.
func (r *recorder) trajectory() *schemas.Trajectory {
	q, s := r.req, r.s
	t := &schemas.Trajectory{
		Run: q.Run, UID: q.UID, SampleIndex: q.SampleIndex, GroupSize: q.GroupSize, Lane: q.Lane, Attempt: r.token,
		Prompt: q.Prompt, NegativePrompt: q.NegativePrompt, TruncatePrompt: q.TruncatePrompt, Height: q.Height, Width: q.Width,
		TrueCFGScale: q.TrueCFGScale, CFGRule: s.card.CFGRule, SampleSeed: q.SampleSeed, NoiseSeed: q.NoiseSeed, StepSeeds: q.StepSeeds, Start: q.Start, Stop: q.Stop,
		ScheduledSampling: q.ScheduledSampling,
		Sigmas:            q.Sigmas, Transitions: q.Transitions, LogProbs: r.logProbs, LogProbKind: q.LogProbKind, NoiseLevel: q.NoiseLevel,
		Solver: q.Solver, LatentsDType: q.LatentsDType, ScheduleDigest: q.ScheduleDigest,
		WeightsDigest: r.weights.policy.WeightsDigest, PolicyVersionMin: r.oldest, PolicyVersionMax: r.newest,
		Sampler: s.cfg.Instance, Backend: r.backend, Group: q.Group,
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
	if err := png.Encode(&buf, img); err != nil {
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
