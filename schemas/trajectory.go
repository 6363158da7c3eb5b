package schemas

import "slices"

// Trajectory is the authority on one sample: which attempt counts, which steps it
// has, and all a trainer needs to recompute each log-prob.
type Trajectory struct {
	V           int64  `msgpack:"v"`
	Run         Run    `msgpack:"run" form:"token"`
	UID         UID    `msgpack:"uid" form:"token"`
	SampleIndex int64  `msgpack:"sample_index" range:"0..MaxGroupSize-1"`
	GroupSize   int64  `msgpack:"group_size" range:"1..MaxGroupSize"`
	Lane        Lane   `msgpack:"lane" form:"token"`
	Attempt     string `msgpack:"attempt" form:"token"`
	// StopReason is completed; failed: the sample cannot be made; or pruned: it was ended at a step
	// boundary, by the prompt's rule or by a control. Steps are those that had been taken.
	StopReason string `msgpack:"stop_reason" enum:"StopReasons"`
	// Error says why there is no image, unless completed.
	Error  string `msgpack:"error,omitempty" size:"0..MaxText"`
	Prompt string `msgpack:"prompt" size:"0..MaxPromptBytes"`
	// Text is what a sample of text came to, and how it was asked for; absent: the sample is an image. What is an
	// image's is empty then.
	Text           *TextResult `msgpack:"text,omitempty"`
	NegativePrompt string      `msgpack:"negative_prompt" size:"0..MaxPromptBytes"`
	// TruncatePrompt is the prompt's choice, TruncatedTokens how many tokens of the prompt in
	// its template were cut off because of it; absent: none.
	TruncatePrompt  bool  `msgpack:"truncate_prompt,omitempty"`
	TruncatedTokens int64 `msgpack:"truncated_tokens,omitempty" range:"0.."`
	Height          int64 `msgpack:"height" range:"0..MaxSide"`
	Width           int64 `msgpack:"width" range:"0..MaxSide"`
	// TrueCFGScale and CFGRule (rescaled or plain) say how v was combined.
	TrueCFGScale float64 `msgpack:"true_cfg_scale" range:"0..MaxCFGScale"`
	CFGRule      string  `msgpack:"cfg_rule" enum:"CFGRules?"`
	SampleSeed   uint64  `msgpack:"sample_seed"`
	NoiseSeed    uint64  `msgpack:"noise_seed"`
	// StepSeeds take over from SampleSeed at some steps: of one leaf of a tree that was made alone.
	StepSeeds []StepSeed `msgpack:"step_seeds,omitempty" size:"0..MaxBranches"`
	// Start is where the sample begins; absent: at step 0, with drawn noise.
	Start *SegmentStart `msgpack:"start,omitempty"`
	// Stop is where it ends; absent: at T.
	Stop *SegmentStop `msgpack:"stop,omitempty"`
	// ScheduledSampling is what the sample rolls, Rolled what came of it; absent: it is an ordinary one.
	ScheduledSampling *ScheduledSample `msgpack:"scheduled_sampling,omitempty"`
	Rolled            *Rolled          `msgpack:"rolled,omitempty"`
	// Sigmas [T+1]; Timesteps [T+1] = 1000 * sigma in float32, as diffusers has them: the whole
	// schedule, whatever part of it ran.
	Sigmas    []float32 `msgpack:"sigmas" size:"0..MaxSteps+1" range:"0..MaxSigma"`
	Timesteps []float32 `msgpack:"timesteps" size:"0..MaxSteps+1" range:"0..1000*MaxSigma"`
	// Transitions [T], LogProbs [T] (null on ode steps and on those that did not run).
	Transitions []string   `msgpack:"transitions" size:"0..MaxSteps" enum:"SDETypes"`
	LogProbs    []*float64 `msgpack:"log_probs" size:"0..MaxSteps"`
	LogProbKind string     `msgpack:"log_prob_kind" enum:"LogProbKinds?"`
	NoiseLevel  float64    `msgpack:"noise_level" range:"0..MaxNoiseLevel"`
	Solver      string     `msgpack:"solver" enum:"Solvers?"`
	// LatentStepIndices are the latents stored, ascending; LatentsShape is [S, C].
	LatentStepIndices []int64 `msgpack:"latent_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps"`
	LatentsShape      []int64 `msgpack:"latents_shape" size:"0..MaxTensorDims"`
	LatentsDType      string  `msgpack:"latents_dtype" enum:"LatentsDTypes?"`
	// Steps are the stored step events that count, in step order, of the steps that ran: those of
	// Attempt, and before them those of earlier attempts that it went on from. Of a text they are its events of tokens.
	Steps []StepRef `msgpack:"steps" size:"0..MaxTokenEvents"`
	// ContentDigest is the sha-256 over the content of the steps in order, in lower-case hex: equal
	// for equal rollouts, whoever sampled them and when. Empty unless completed.
	ContentDigest string `msgpack:"content_digest" form:"digest?"`
	// Image is the decoded image; absent unless completed, and where the sample stops with noise
	// in it unless Stop asks for one.
	Image *Image `msgpack:"image,omitempty"`
	// Conditioning are the encoded texts that a prompt asked to keep: prompt_embeds and prompt_embeds_mask, under
	// guidance negative_prompt_embeds and its mask, or what else the model's family has. They are blobs, so that all
	// samples of a prompt, and all prompts with one negative prompt, name the same ones.
	Conditioning   []NamedTensor `msgpack:"conditioning" size:"0..MaxConditioning"`
	ScheduleDigest string        `msgpack:"schedule_digest" form:"digest?"`
	WeightsDigest  string        `msgpack:"weights_digest" size:"0..MaxName"`
	// PolicyVersionMin and PolicyVersionMax are the oldest and newest weights the attempts used.
	PolicyVersionMin int64  `msgpack:"policy_version_min" range:"0.."`
	PolicyVersionMax int64  `msgpack:"policy_version_max" range:"0.."`
	Sampler          string `msgpack:"sampler" size:"0..MaxName"`
	Backend          string `msgpack:"backend" size:"0..MaxName"`
	Group            Group  `msgpack:"group"`
	// Timings say when Attempt was received and what its parts took.
	Timings SampleTimings `msgpack:"timings"`
}

// StepRef points to one stored step event.
type StepRef struct {
	// Seq is its sequence in MDR_STEPS.
	Seq uint64 `msgpack:"seq" range:"1.."`
	// Digest is the payload digest of the stored event: the sha-256, in lower-case hex, over its bytes
	// with each byte string's own sha-256 in the place of its content.
	Digest string `msgpack:"digest" form:"digest"`
	// Attempt made the step, where it is another than that of the trajectory.
	Attempt string `msgpack:"attempt,omitempty" form:"token" absent:"that of the trajectory"`
}

// StepAttempt is the attempt that made Steps[i].
func (e *Trajectory) StepAttempt(i int) string {
	if of := e.Steps[i].Attempt; of != "" {
		return of
	}
	return e.Attempt
}

// StepSubject is the subject of Steps[i]. Of all steps of the sample these alone count.
func (e *Trajectory) StepSubject(i int) string {
	if e.Text != nil {
		return TokensSubject(e.Run, e.UID, e.SampleIndex, e.StepAttempt(i), int64(i))
	}
	begin, _ := e.Segment()
	return StepSubject(e.Run, e.UID, e.SampleIndex, e.StepAttempt(i), begin+int64(i))
}

// Attempts are those that contributed steps, in the order of their steps.
func (e *Trajectory) Attempts() []string {
	var list []string
	for i := range e.Steps {
		if of := e.StepAttempt(i); !slices.Contains(list, of) {
			list = append(list, of)
		}
	}
	return list
}

// Image is an encoded image. Exactly one of Data and Ref carries the bytes.
type Image struct {
	// Format of the bytes: always png.
	Format string `msgpack:"format" enum:"ImageFormats"`
	Width  int64  `msgpack:"width" range:"1..MaxSide"`
	Height int64  `msgpack:"height" range:"1..MaxSide"`
	// Digest is the sha-256 of the pixels: RGB, 8 bits, row-major, in lower-case hex.
	Digest string `msgpack:"digest" form:"digest"`
	Data   []byte `msgpack:"data,omitempty" size:"1..MaxInlineImage"`
	Ref    *Ref   `msgpack:"ref,omitempty"`
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
