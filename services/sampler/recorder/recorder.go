package recorder

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/interaction"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// leaveTimeout bounds the wait for the steps of an attempt whose request is put back.
const leaveTimeout = 2 * time.Second

// Store is what the recorders of a sampler share.
type Store struct {
	Bus       *bus.Bus
	Steps     Steps // where Resume looks for stored steps; usually Bus
	Publisher *bus.Publisher
	Sealer    *Sealer
	Can       engine.Abilities // of the network
	// Instance names the sampler in events.
	Instance string
	Metrics  Metrics
	texts    texts
}

// Metrics are the counters of recorders.
type Metrics struct {
	Steps        prometheus.Counter `metric:"steps_total" help:"denoising steps of samples"`
	Tokens       prometheus.Counter `metric:"tokens_total" help:"tokens that language models generated"`
	Resumed      prometheus.Counter `metric:"resumed_total" help:"samples that went on from a state that an earlier attempt had stored"`
	ResumedSteps prometheus.Counter `metric:"resumed_steps_total" help:"denoising steps of earlier attempts that were not made again"`
}

// Recorder records one attempt: its steps, and the trajectory at the end. It knows nothing of the mathematics.
type Recorder struct {
	*Recording
	store *Store
	req   *schemas.Request
	token string
	// backend names what computes.
	backend string
	// policy is that of the weights that make the next step; oldest and newest are the versions of the attempt so far.
	policy         *schemas.Policy
	oldest, newest int64

	received time.Time
	encoded  time.Time
	logProbs []*float64 // by the index of the step; nil where no step ran
}

// New begins the record of an attempt, which the token alone names, with the weights of policy p.
func (s *Store) New(req *schemas.Request, token, backend string, p *schemas.Policy) *Recorder {
	now := time.Now()
	r := &Recorder{
		Recording: &Recording{sealer: s.Sealer, publisher: s.Publisher}, store: s, req: req, token: token,
		backend: backend, received: now, encoded: now,
		policy: p, oldest: p.PolicyVersion, newest: p.PolicyVersion,
	}
	if req.Text == nil {
		r.logProbs = make([]*float64, len(req.Transitions))
	}
	return r
}

// Begin starts the chain of seals. Parent is the state of another sample that the attempt begins with; nil for none.
func (r *Recorder) Begin(parent *schemas.Tensor) (err error) {
	r.seal, err = r.sealer.firstSeal(r.req, parent, r.backend)
	return err
}

// Encoded notes the time: the prompt is encoded now.
func (r *Recorder) Encoded() { r.encoded = time.Now() }

// Token names the attempt.
func (r *Recorder) Token() string { return r.token }

// LogProbs returns the log-probabilities of the attempt's steps by their index, nil where no step ran.
func (r *Recorder) LogProbs() []*float64 { return r.logProbs }

// Next returns the index of the step after those that the attempt has.
func (r *Recorder) Next() int64 {
	begin, _ := r.req.Segment()
	return begin + int64(len(r.steps))
}

// SetPolicy says that the weights of p make the next step.
func (r *Recorder) SetPolicy(p *schemas.Policy) { r.policy, r.newest = p, p.PolicyVersion }

// Restart says that the weights of p make all steps of an attempt that has none yet.
func (r *Recorder) Restart(p *schemas.Policy) {
	r.SetPolicy(p)
	r.oldest = r.newest
}

// Fresh reports whether the attempt has no steps yet.
func (r *Recorder) Fresh() bool { return len(r.steps) == 0 }

// takeOver adds a step of an earlier attempt to this one.
func (r *Recorder) takeOver(step *storedStep) {
	r.content = append(r.content, step.content)
	r.logProbs[step.event.StepIndex] = step.event.LogProb
	r.steps = append(r.steps, recorded{ref: step.ref})
	r.seal = step.seal
}

// Record names one step, or some tokens, and has it published without waiting; device is the device's time for it.
// Values that are not finite are a terminal error, of a step that of the next call (see Recording.Step).
func (r *Recorder) Record(ctx context.Context, e schemas.StepEvent, device time.Duration) error {
	e.Mark(schemas.StepMark{
		Run: r.req.Run, UID: r.req.UID, SampleIndex: r.req.SampleIndex, Stage: r.req.Stage, Attempt: r.token,
		PolicyVersion: r.policy.PolicyVersion, WeightsDigest: r.policy.WeightsDigest,
		Sampler: r.store.Instance, Backend: r.backend, DeviceNS: device.Nanoseconds(),
	})
	if t, ok := e.(*schemas.Tokens); ok { // logits that are not finite are not published
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
		r.store.Metrics.Steps.Inc()
	case *schemas.Tokens:
		if e.Generated {
			r.store.Metrics.Tokens.Add(float64(len(e.IDs)))
		}
	}
	return nil
}

// Undo removes all steps of the attempt, which begins again, once those in flight are published.
func (r *Recorder) Undo(ctx context.Context) error {
	r.AwaitStored()
	r.Close()
	steps := schemas.AttemptFilter(r.req.Run, r.req.UID, r.req.SampleIndex, r.req.Stage, r.token)
	if _, err := r.store.Bus.PurgeSubject(ctx, schemas.StreamSteps, steps); err != nil {
		return fmt.Errorf("remove the steps of an attempt that begins again: %w", err)
	}
	return nil
}

// Finish ends the episode of a completed sample, stores its image and tensors, waits until every step is stored, and
// returns the trajectory. This attempt counts once the caller has published it. An error is the episode's or the
// server's.
func (r *Recorder) Finish(ctx context.Context, e engine.Episode, began Timing) (*schemas.Trajectory, error) {
	if err := r.awaitSent(ctx); err != nil {
		return nil, err
	}
	t := r.trajectory()
	ended := time.Now()
	images, err := e.Finish(ctx, t)
	if err != nil {
		return nil, err
	}
	decode := time.Since(ended)
	if err := r.storeMedia(ctx, t, images.End); err != nil {
		return nil, err
	}
	if t.Conditioning, err = r.storeTexts(ctx, e); err != nil {
		return nil, err
	}
	if err := r.storeRolled(ctx, t.Rolled, images); err != nil {
		return nil, err
	}
	if err := r.storeText(ctx, t.Text); err != nil {
		return nil, err
	}
	t.StopReason = schemas.StopCompleted
	if t.Steps, err = r.Stored(ctx); err != nil {
		return nil, err
	}
	t.ContentDigest = schemas.StepsDigest(r.content)
	t.Timings = schemas.SampleTimings{
		Received: r.received.UnixNano(), Started: began.Started.UnixNano(), Finished: time.Now().UnixNano(),
		EncodeNS: r.encoded.Sub(r.received).Nanoseconds(), DenoiseNS: began.Denoise.Nanoseconds(),
		DecodeNS: decode.Nanoseconds(),
	}
	return t, nil
}

// AwaitStored waits a short while until the steps of an attempt are stored whose request is put back: the next
// attempt goes on from what is stored.
func (r *Recorder) AwaitStored() {
	ctx, stop := context.WithTimeout(context.Background(), leaveTimeout)
	defer stop()
	_ = r.awaitSent(ctx) // what is not stored is made again
	for _, step := range r.steps {
		if step.sent != nil && step.sent.future != nil {
			_, _ = step.sent.future.Wait(ctx)
		}
	}
}

// Midway returns the trajectory of a sample that would end here, once its steps are stored, with the decoded prediction
// of its end; with latents the prediction itself, too.
func (r *Recorder) Midway(ctx context.Context, e engine.Predictor, decode, latents bool,
) (t *schemas.Trajectory, x *schemas.Tensor, err error) {
	t = r.trajectory()
	if t.Steps, err = r.Stored(ctx); err != nil {
		return nil, nil, err
	}
	m, prediction, err := e.Predict(ctx, t, decode)
	if err != nil {
		return nil, nil, err
	}
	next := r.Next()
	t.StopReason, t.Stop = schemas.StopCompleted, &schemas.SegmentStop{StepIndex: next, Decode: decode}
	t.ContentDigest = schemas.StepsDigest(r.content)
	t.LatentStepIndices = slices.DeleteFunc(slices.Clone(t.LatentStepIndices), func(i int64) bool { return i >= next })
	if latents {
		x = &prediction
		if err := r.storeTensors(ctx, inlineText, field{"prediction", x}); err != nil {
			return nil, nil, err
		}
	}
	return t, x, r.storeMedia(ctx, t, m)
}

// Failed returns the trajectory of a sample that cannot be made; cause is the reason.
func (r *Recorder) Failed(cause error) *schemas.Trajectory {
	now := r.received.UnixNano()
	t := r.trajectory()
	t.StopReason, t.Error = schemas.StopFailed, cause.Error()
	if fault, ok := errors.AsType[*interaction.Fault](cause); ok && t.Text != nil {
		t.Text.Conversation = fault.State
	}
	t.Timings = schemas.SampleTimings{Received: now, Started: now, Finished: now}
	return t
}

// trajectory returns the sample's trajectory with what is known before any step ran; Finish, Failed and Pruned fill
// in the rest.
func (r *Recorder) trajectory() *schemas.Trajectory {
	q := r.req
	t := &schemas.Trajectory{
		Identity: q.Identity, Sampling: q.Sampling, ScheduleDigest: q.ScheduleDigest, Group: q.Group,
		Denoised: schemas.Denoised{LogProbs: r.logProbs},
		Provenance: schemas.Provenance{
			Attempt: r.token, WeightsDigest: r.policy.WeightsDigest, PolicyVersionMin: r.oldest,
			PolicyVersionMax: r.newest,
			Sampler:          r.store.Instance, Backend: r.backend,
		},
	}
	if q.Text != nil {
		t.Text = &schemas.TextResult{Settings: *q.Text}
	} else if describe := r.store.Can.Describe; describe != nil {
		describe(t)
	}
	if q.TrueCFGScale > 1 {
		t.CFGScales = q.StepScales()
	}
	for i := range q.Sigmas {
		t.Timesteps = append(t.Timesteps, q.Timestep(int64(i)))
	}
	return t
}

// storeRolled uploads what scheduled sampling made of a sample: the images of the latents, of which an absent one stays
// nil, the latents to train on, and the predictions that the prompt asked for. nil: the sample is of another kind.
func (r *Recorder) storeRolled(ctx context.Context, x *schemas.Rolled, images engine.Images) (err error) {
	if x == nil {
		return nil
	}
	if x.Noised, err = r.storeImage(ctx, images.Noised); err != nil {
		return err
	}
	if x.Teacher, err = r.storeImage(ctx, images.Teacher); err != nil {
		return err
	}
	tensors := []field{{"rolled.latents", &x.Latents}}
	if x.Clean != nil && x.Biased != nil {
		tensors = append(tensors, field{"rolled.clean", x.Clean.Tensor}, field{"rolled.biased", x.Biased.Tensor})
	}
	return r.storeTensors(ctx, 0, tensors...)
}

// field is a tensor of an event, with its name for errors; the tensor may be nil.
type field struct {
	name string
	of   *schemas.Tensor
}

// storeTensors uploads the data of tensors of at least some bytes and replaces it by references.
func (r *Recorder) storeTensors(ctx context.Context, least int, fields ...field) error {
	for _, f := range fields {
		if f.of == nil || len(f.of.Data) < least {
			continue
		}
		ref, err := r.store.Bus.PutBlob(ctx, f.of.Data)
		if err != nil {
			return fmt.Errorf("store %s: %w", f.name, err)
		}
		f.of.Ref, f.of.Data = &ref, nil
	}
	return nil
}

// storeMedia puts what a sample came to into the object store: its image, its video and its sound.
func (r *Recorder) storeMedia(ctx context.Context, t *schemas.Trajectory, m media.Media) error {
	image, err := r.storeImage(ctx, m)
	if err != nil {
		return err
	}
	if image != nil {
		t.Media = append(t.Media, *image)
	}
	if size := m.Size(); size.Frames > 1 {
		file, err := media.EncodeVideo(m, r.policy.FPS)
		video := schemas.Medium{
			Kind: schemas.KindVideo, Format: schemas.VideoAPNG, Frames: int64(size.Frames), Height: int64(size.Height),
			Width: int64(size.Width), FPS: r.policy.FPS, Digest: m.Digest(),
		}
		if err := r.storeMedium(ctx, &video, file, err); err != nil {
			return err
		}
		t.Media = append(t.Media, video)
	}
	if !m.Sound.Empty() {
		size := m.Sound.Size()
		file, err := media.EncodeWAV(m.Sound)
		sound := schemas.Medium{
			Kind: schemas.KindAudio, Format: schemas.AudioWAV, Samples: int64(size.Samples),
			Channels: int64(size.Channels), Rate: int64(size.Rate), Digest: m.Sound.Digest(),
		}
		if err := r.storeMedium(ctx, &sound, file, err); err != nil {
			return err
		}
		t.Media = append(t.Media, sound)
	}
	t.NameTracks()
	return nil
}

// storeImage puts an image, of a video the frame in the middle, into the object store. nil: there are no frames.
func (r *Recorder) storeImage(ctx context.Context, m media.Media) (*schemas.Medium, error) {
	if m.Empty() {
		return nil, nil
	}
	m = m.Middle()
	size := m.Size()
	file, err := media.EncodePNG(m.Frames[0])
	image := &schemas.Medium{
		Kind: schemas.KindImage, Format: schemas.ImagePNG, Width: int64(size.Width), Height: int64(size.Height),
		Digest: m.Digest(),
	}
	return image, r.storeMedium(ctx, image, file, err)
}

// storeMedium puts a file into the object store; its digest is over what is in it. One that could not be encoded is a
// terminal error.
func (r *Recorder) storeMedium(ctx context.Context, m *schemas.Medium, file []byte, err error) error {
	if err != nil {
		return bus.Terminal(schemas.CodeFailed, err)
	}
	ref, err := r.store.Bus.PutBlob(ctx, file)
	if err != nil {
		return fmt.Errorf("store %s: %w", m.Kind, err)
	}
	m.Ref = &ref
	return nil
}

// inlineText is the size in bytes from which on a tensor of a text, or a prediction, goes to the object store.
const inlineText = 16 << 10

// storeText uploads the large tensors of a text; nil: the sample is of another kind.
func (r *Recorder) storeText(ctx context.Context, x *schemas.TextResult) error {
	if x == nil {
		return nil
	}
	return r.storeTensors(ctx, inlineText, field{"text.ids", x.IDs}, field{"text.mask", x.Mask},
		field{"text.log_probs", x.LogProbs}, field{"text.processed_log_probs", x.ProcessedLogProbs},
		field{"text.entropies", x.Entropies}, field{"text.top_log_probs", x.TopLogProbs})
}

// Timing is when the scheduler first admitted an attempt, zero for never, and how long the attempt was in
// micro-batches.
type Timing struct {
	Started time.Time
	Denoise time.Duration
}

// Pruned returns the trajectory of a sample that was ended in the middle, once its steps are stored: it has the steps
// so far and no image. why is the reason. An error is of the server.
func (r *Recorder) Pruned(ctx context.Context, why string, began Timing) (_ *schemas.Trajectory, err error) {
	t := r.trajectory()
	t.StopReason, t.Error = schemas.StopPruned, why
	if t.Steps, err = r.Stored(ctx); err != nil {
		return nil, err
	}
	now := time.Now().UnixNano()
	t.Timings = schemas.SampleTimings{
		Received: r.received.UnixNano(), Started: now, Finished: now,
		EncodeNS: r.encoded.Sub(r.received).Nanoseconds(), DenoiseNS: began.Denoise.Nanoseconds(),
	}
	if !began.Started.IsZero() {
		t.Timings.Started = began.Started.UnixNano()
	}
	return t, nil
}
