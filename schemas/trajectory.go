package schemas

import (
	"fmt"
	"slices"
)

// Trajectory is the authority on one sample: which attempt counts, which steps it
// has, and all a trainer needs to recompute each log-prob.
type Trajectory struct {
	V int64 `msgpack:"v" digest:"-"`
	Identity
	Outcome
	// Sampling is copied from the request.
	Sampling
	// Text is what a sample of text came to, and how it was asked for; absent: the sample is an image.
	Text *TextResult `msgpack:"text,omitempty"`
	Denoised
	// Steps are the stored step events that count, in step order: first the ones of earlier attempts that Attempt went
	// on from, then its own. A text has its events of tokens here.
	Steps []StepRef `msgpack:"steps" size:"0..MaxTokenEvents" digest:"-"`
	// ContentDigest is the digest of the content of the steps in order: equal for equal rollouts, whichever process
	// sampled them and when. Empty unless completed.
	ContentDigest string `msgpack:"content_digest" form:"digest?"`
	// Media are the decoded files of the sample, at most one of each kind, in the order of the kinds; none unless
	// completed, and where the sample stops with noise in it unless Stop asks for them. A video has its middle frame
	// beside it, as the image.
	Media          []Medium `msgpack:"media,omitempty" size:"0..MaxMedia" for:"image"`
	ScheduleDigest string   `msgpack:"schedule_digest" form:"digest?"`
	Provenance
	Group Group `msgpack:"group" digest:"-"`
}

// Outcome is how a sample ended.
type Outcome struct {
	// StopReason is completed; failed: the sample cannot be made; or pruned: it was ended at a step boundary, by the
	// prompt's rule or by a control. Steps lists the steps taken before that.
	StopReason string `msgpack:"stop_reason" enum:"StopReasons"`
	// Error says why there are no media, unless completed.
	Error string `msgpack:"error,omitempty" size:"0..MaxText,cut" digest:"-"`
}

// Denoised is what the denoising of an image came to, apart from its steps and media.
type Denoised struct {
	// TruncatedTokens is how many tokens of the prompt in its template were cut off because of truncate_prompt; absent:
	// none.
	TruncatedTokens int64 `msgpack:"truncated_tokens,omitempty" range:"0.." for:"image"`
	// CFGRule (rescaled, plain, plain_clamped or inside) says how v was combined with TrueCFGScale.
	CFGRule string `msgpack:"cfg_rule" enum:"CFGRules?" for:"image"`
	// CFGScales [T] are the scales of classifier-free guidance of the steps, as the settings say; 1: without.
	CFGScales []float64 `msgpack:"cfg_scales,omitempty" size:"0..MaxSteps" range:"1..MaxCFGScale" for:"image" digest:"-"`
	// Timesteps [T+1] are the whole schedule of Sampling, even if only a part of it ran.
	Timesteps []float32 `msgpack:"timesteps" size:"0..MaxSteps+1" range:"0..1000*MaxSigma" for:"image"`
	// LogProbs [T] are null on ode steps and on steps that did not run.
	LogProbs []*float64 `msgpack:"log_probs" size:"0..MaxSteps" for:"image"`
	// LatentStepIndices are the latents stored, ascending; LatentsShape is [S, C].
	LatentStepIndices []int64 `msgpack:"latent_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps" for:"image"`
	LatentsShape      []int64 `msgpack:"latents_shape" size:"0..MaxTensorDims" for:"image"`
	// Tracks are the parts of each state in order, where it has several: a state is their elements one after another.
	Tracks []Track `msgpack:"tracks,omitempty" size:"2..MaxTracks" for:"image"`
	// Conditioning are the encoded texts that a prompt asked to keep: prompt_embeds and prompt_embeds_mask, under
	// guidance negative_prompt_embeds and its mask, or what else the model's family has. They are blobs, so that all
	// samples of a prompt, and all prompts with one negative prompt, name the same ones.
	Conditioning []NamedTensor `msgpack:"conditioning" size:"0..MaxConditioning" for:"image"`
	// Rolled is what came of ScheduledSampling; absent: the sample is an ordinary one.
	Rolled *Rolled `msgpack:"rolled,omitempty" for:"image"`
}

// Provenance is what made a sample: the attempt that counts, its weights, its process and its times.
type Provenance struct {
	Attempt       string `msgpack:"attempt" form:"token" digest:"-"`
	WeightsDigest string `msgpack:"weights_digest" size:"0..MaxName"`
	// PolicyVersionMin and PolicyVersionMax are the oldest and newest weights the attempts used.
	PolicyVersionMin int64  `msgpack:"policy_version_min" range:"0.."`
	PolicyVersionMax int64  `msgpack:"policy_version_max" range:"0.."`
	Sampler          string `msgpack:"sampler" size:"0..MaxName" digest:"-"`
	Backend          string `msgpack:"backend" size:"0..MaxName" digest:"-"`
	// Drawn says which server drew the sample; absent: the sampler did, and drawing again gives the same. With it, of
	// the numbers of tokens those are absent that the server does not give; one of log_probs and processed_log_probs is
	// there.
	Drawn *Drawn `msgpack:"drawn,omitempty"`
	// Timings say when Attempt was received and what its parts took.
	Timings SampleTimings `msgpack:"timings" digest:"-"`
}

// StepRef points to one stored step event.
type StepRef struct {
	// Seq is its sequence in MDR_STEPS.
	Seq uint64 `msgpack:"seq" range:"1.."`
	// Digest is the payload digest of the stored event: blake3: and the blake3, in lower-case hex, over its bytes
	// with each byte string's own blake3 in the place of its content; without blake3: both are sha-256.
	Digest string `msgpack:"digest" form:"digest"`
	// Attempt made the step, where the trajectory names another.
	Attempt string `msgpack:"attempt,omitempty" form:"token" absent:"the trajectory's"`
}

// CheckKnown is Sampling.CheckKnown, and also refuses a sample with guidance whose steps do not have their scales: who
// computes with it would leave out the guidance.
func (e *Trajectory) CheckKnown() error {
	if err := e.Sampling.CheckKnown(); err != nil {
		return err
	}
	scales, steps := len(e.CFGScales), len(e.Transitions)
	if scales != steps && (scales > 0 || e.TrueCFGScale > 1 && len(e.Steps) > 0) {
		return fmt.Errorf("cfg_scales: %d; must be those of the %d steps", scales, steps)
	}
	return nil
}

// StepAttempt returns the attempt that made Steps[i].
func (e *Trajectory) StepAttempt(i int) string {
	if of := e.Steps[i].Attempt; of != "" {
		return of
	}
	return e.Attempt
}

// StepSubject returns the subject of Steps[i]. Only the steps in Steps count, of all that attempts have stored.
func (e *Trajectory) StepSubject(i int) string {
	if e.Text != nil {
		return TokensSubject(e.Run, e.UID, e.SampleIndex, e.Stage, e.StepAttempt(i), int64(i))
	}
	begin, _ := e.Segment()
	return StepSubject(e.Run, e.UID, e.SampleIndex, e.Stage, e.StepAttempt(i), begin+int64(i))
}

// Attempts returns the attempts that made the Steps, in the order of their steps.
func (e *Trajectory) Attempts() []string {
	var list []string
	for i := range e.Steps {
		if of := e.StepAttempt(i); !slices.Contains(list, of) {
			list = append(list, of)
		}
	}
	return list
}

// SampleTimings are wall-clock moments, Unix nanoseconds, and durations in nanoseconds.
type SampleTimings struct {
	Received  int64 `msgpack:"received" range:"0.."`
	Started   int64 `msgpack:"started" range:"0.."`
	Finished  int64 `msgpack:"finished" range:"0.."`
	EncodeNS  int64 `msgpack:"encode_ns" range:"0.."`
	DenoiseNS int64 `msgpack:"denoise_ns" range:"0.."`
	DecodeNS  int64 `msgpack:"decode_ns" range:"0.."`
}
