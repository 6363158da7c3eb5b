package schemas

import (
	"slices"
	"strconv"
	"strings"
)

// Prompt asks for one group of GroupSize images, or answers of a language model. Only its text is required. Names
// follow SGLang's rollout API where the meaning is the same.
type Prompt struct {
	V int64 `msgpack:"v"`
	// UID is the group key, unique in its run.
	UID UID `msgpack:"uid,omitempty" form:"token" absent:"derived by intake from the stream sequence of the prompt"`
	// Prompt is the text to paint, UTF-8, or to answer. It may be empty, not absent: a model paints without
	// a text too.
	Prompt string `msgpack:"prompt" wire:"needed" size:"0..MaxPromptBytes"`
	// Messages is the conversation that is to be answered, in place of Prompt, which is empty beside it.
	Messages []Message `msgpack:"messages,omitempty" size:"0..MaxMessages" absent:"the prompt, as a user's message"`
	// Text is how a language model answers.
	Text          *Text `msgpack:"text,omitempty" absent:"as the model does, where it is a language model"`
	ImageSettings `for:"image"`
	Routing
	// GroupSize is n, the number of samples of the prompt.
	GroupSize *int64 `msgpack:"group_size,omitempty" range:"1..MaxGroupSize" default:"8" flag:"group-size,n"`
	// Seed is the seed of all noise, which it makes independent of the run id.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.." absent:"the run id seeds" flag:"seed"`
	// Reward lists the reward functions whose weighted sum is the reward.
	Reward []RewardSpec `msgpack:"reward" size:"0..MaxRewards" absent:"the model's, else the service's"`
	// Advantage names the estimator and its options.
	Advantage AdvantageSpec `msgpack:"advantage"`
	// Credit is what of its scores each track of a sample is trained for, where states have several. With stages it is
	// in them.
	Credit []CreditShare `msgpack:"credit,omitempty" size:"1..MaxRewards*MaxTracks" absent:"the reward, for all tracks"`
	// Metadata is a map of the caller. Every event of the group carries it, unread.
	Metadata Metadata `msgpack:"metadata,omitempty"`
	// Batch joins groups that are normalised together.
	Batch *BatchSpec `msgpack:"batch,omitempty" absent:"the group is alone"`
	// Deadline is when the group closes with the rewards that it has, even with none.
	Deadline *int64 `msgpack:"deadline,omitempty" range:"1.." unit:"Unix nanoseconds" absent:"the service's, counted from the group's first reward" flag:"deadline"`
	// UnknownFields says what happens if the prompt, or a map in it, has fields that are not known:
	// the prompt is refused, or the receipt has warnings.
	UnknownFields string `msgpack:"unknown_fields,omitempty" enum:"UnknownPolicies" default:"refuse" flag:"unknown-fields"`
	// Validation asks for samples to measure, not to train on: every step is ode, whatever Rollout says, so there are
	// no log-probs. The group counts even if all its rewards are equal. Its batch has verl's metrics for validation,
	// val-core/... and val-aux/..., apart from the metrics of training.
	Validation bool `msgpack:"validation,omitempty" default:"false" flag:"validation"`
	// FreeReadSteps lets the steps of the group go, before it does, once every durable reader of its result or of its
	// batch has acknowledged that, and one has. What is left of them is their digests: they can be neither verified
	// nor replayed.
	FreeReadSteps bool `msgpack:"free_read_steps,omitempty" default:"false" flag:"free-read-steps"`
	// GroupPolicy says which groups count, and what becomes of the others.
	GroupPolicy *GroupPolicy `msgpack:"group_policy,omitempty"`
	// Rules change what the run should not do, and what happens then. Those of the newest group count.
	Rules []RuleSpec `msgpack:"rules,omitempty" size:"0..MaxRewards" absent:"all rules tell, at their own limits" flag:"rule"`
	// Substitutes are other prompts for the fresh groups that GroupPolicy asks for: round k has the k-th.
	Substitutes []Substitute `msgpack:"substitutes,omitempty" size:"0..MaxRefillRounds" absent:"the same prompt again"`
	// Refill is set on prompts that the advantage service publishes in place of a group that
	// did not count.
	Refill *Refill `msgpack:"refill,omitempty"`
	// Stages are what the samples are made of, one after the other, each on a lane of its own. What only a lane has is
	// in them, and not in the prompt.
	Stages []StageSpec `msgpack:"stages,omitempty" size:"1..MaxStages" absent:"one lane makes the samples"`
	// Rounds is how often the stages run at most, all of them again and again. An interaction may end it before.
	Rounds *int64 `msgpack:"rounds,omitempty" range:"1..MaxRounds" default:"1"`
}

// Routing says which sampler makes the samples, and when.
type Routing struct {
	// Model is the lane that serves the prompt.
	Model Lane `msgpack:"model,omitempty" form:"token" absent:"the only lane there is" flag:"lane"`
	// Tenant has the samples made with the weights of one of those who have weights of their own on the lane.
	Tenant Tenant `msgpack:"tenant,omitempty" form:"token" absent:"main, the lane's own" flag:"tenant"`
	// BaseDigest names the checkpoint that the lane must serve, with whatever weights were pushed since. A prompt for
	// another one is refused. Of a server that draws the samples it is its kind, "served by vllm".
	BaseDigest string `msgpack:"base_digest,omitempty" size:"0..MaxName" absent:"any"`
	// MinPolicyVersion holds the prompt until a sampler of the lane serves these weights, or newer ones.
	MinPolicyVersion *int64 `msgpack:"min_policy_version,omitempty" range:"0.." default:"0"`
	// PolicyVersion has the samples made with these weights of the tenant, whatever is served by then, so that versions
	// can be compared with the same prompts and noise. The prompt waits for a version that is still to come.
	PolicyVersion *int64 `msgpack:"policy_version,omitempty" range:"0.." absent:"the newest" flag:"at-version"`
	// Priority orders waiting requests of a lane inside one sampler, higher first.
	Priority *int64 `msgpack:"priority,omitempty" range:"-MaxPriority..MaxPriority" default:"0" flag:"priority"`
}

// ImageSettings are the settings of a prompt that only a model of images has: a prompt for text is refused with any of
// them.
type ImageSettings struct {
	// NegativePrompt is the text that guidance leads away from, where TrueCFGScale > 1.
	NegativePrompt *string `msgpack:"negative_prompt,omitempty" size:"0..MaxPromptBytes" absent:"the model's own, which its policy says; none for a whole pipeline" flag:"negative-prompt"`
	// Prompt2 is the text for the second text encoder of a network that has several; others are refused with it.
	Prompt2 string `msgpack:"prompt_2,omitempty" size:"0..MaxPromptBytes" absent:"the prompt" flag:"prompt-2"`
	// Prompt3 is the text for the third text encoder.
	Prompt3 string `msgpack:"prompt_3,omitempty" size:"0..MaxPromptBytes" absent:"the prompt" flag:"prompt-3"`
	// TruncatePrompt cuts prompt and negative prompt at the most tokens that the model takes, as diffusers does,
	// instead of refusing longer ones.
	TruncatePrompt bool `msgpack:"truncate_prompt,omitempty" default:"false" flag:"truncate-prompt"`
	// Height is the height of the image, a multiple of the pixels_per_token of the lane. Diffusers
	// rounds others down.
	Height *int64 `msgpack:"height,omitempty" range:"1..MaxSide" unit:"pixels" absent:"the model's" flag:"height"`
	// Width is the width of the image, a multiple of the pixels_per_token of the lane.
	Width *int64 `msgpack:"width,omitempty" range:"1..MaxSide" unit:"pixels" absent:"the model's" flag:"width"`
	// Frames is the number of frames of a video, 1 for an image: 1 more than a multiple of the frames_per_token of the
	// lane, and at most its max_frames.
	Frames *int64 `msgpack:"frames,omitempty" range:"1..MaxFrames" absent:"the model's" flag:"frames"`
	// NumInferenceSteps is T, the number of denoising steps.
	NumInferenceSteps *int64 `msgpack:"num_inference_steps,omitempty" range:"1..MaxSteps" absent:"the model's" flag:"steps"`
	// TrueCFGScale is the classifier-free guidance scale, active above 1.
	TrueCFGScale *float64 `msgpack:"true_cfg_scale,omitempty" range:"0..MaxCFGScale" absent:"the model's" flag:"true-cfg-scale"`
	// TrueCFGScale2 is the scale at the noise levels below the boundary_ratio of a model with two networks, which the
	// second one computes: guidance_scale_2 of diffusers. 1 is without guidance there.
	TrueCFGScale2 *float64 `msgpack:"true_cfg_scale_2,omitempty" range:"1..MaxCFGScale" absent:"true_cfg_scale" flag:"true-cfg-scale-2"`
	// CFGFrom is the share of steps before classifier-free guidance begins: step i has it where i/T >= CFGFrom, and
	// (i+1)/T <= CFGUntil. In the noisiest steps it takes variety: arXiv 2404.07724.
	CFGFrom *float64 `msgpack:"cfg_from,omitempty" range:"[0..1)" absent:"guidance begins with the first step" flag:"cfg-from"`
	// CFGUntil is the share of steps after which classifier-free guidance ends: step i has it where
	// (i+1)/T <= CFGUntil, as in cfg_trunc_ratio of diffusers. The others cost one evaluation instead of two.
	CFGUntil *float64 `msgpack:"cfg_until,omitempty" range:"(0..1]" absent:"all steps have guidance" flag:"cfg-until"`
	// GuidanceRescale moves a velocity under classifier-free guidance by this share towards the standard deviation of
	// the prompt's own, against images with too much contrast: arXiv 2305.08891, section 3.4.
	GuidanceRescale *float64 `msgpack:"guidance_rescale,omitempty" range:"0..1" absent:"no rescaling" flag:"guidance-rescale"`
	// Conditions are the files that the network is given besides texts, by the names of its card.
	Conditions []Condition `msgpack:"conditions,omitempty" size:"0..MaxConditioning"`
	// Arguments are further arguments of the network's pipeline, by the names of its card.
	Arguments map[string]string `msgpack:"arguments,omitempty" size:"0..MaxParams" absent:"the pipeline's defaults"`
	// Guidance is the guidance input of a network that was distilled with one; others are refused with it. It is not
	// the scale of classifier-free guidance, which is TrueCFGScale.
	Guidance *float64 `msgpack:"guidance,omitempty" range:"(0..MaxCFGScale]" absent:"the model's" flag:"guidance"`
	// Sigmas are T pre-shift sigmas, strictly decreasing in (0, 1].
	Sigmas []float64 `msgpack:"sigmas" absent:"the model's schedule" size:"1..MaxSteps" range:"(0..1]" flag:"sigmas"`
	// Rollout chooses the transition of each step, its noise and the latents that are kept.
	Rollout Rollout `msgpack:"rollout" absent:"all steps are sde, and all latents kept"`
	// InitialNoise says whether each sample has an x_T of its own, or the whole group one.
	InitialNoise string `msgpack:"initial_noise,omitempty" enum:"InitialNoises" default:"per_sample" flag:"initial-noise"`
	// Start begins the samples with given states, at any step.
	Start *Start `msgpack:"start,omitempty" absent:"at step 0, with drawn noise"`
	// Stop ends the samples before their last step.
	Stop *Stop `msgpack:"stop,omitempty" absent:"all steps run"`
	// ScheduledSampling makes latents to train on instead of images.
	ScheduledSampling *ScheduledSampling `msgpack:"scheduled_sampling,omitempty" absent:"ordinary rollouts"`
	// Tree makes the samples the leaves of one tree, which share their steps up to its branch
	// points. GroupSize is the number of its leaves.
	Tree *Tree `msgpack:"tree,omitempty" absent:"samples share no steps"`
	// Prune ends samples in the middle whose log-probs are out of bounds.
	Prune *Prune `msgpack:"prune,omitempty" absent:"none is"`
}

// GroupUID returns the group key of the prompt that is stored at a sequence: its own, or one made of the sequence.
func (e *Prompt) GroupUID(seq uint64) UID {
	if e.UID != "" {
		return e.UID
	}
	return UID("p" + strconv.FormatUint(seq, 10))
}

// Rollout is the sampling part of a Prompt.
type Rollout struct {
	// SDEType is the transition of stochastic steps; ode for none.
	SDEType string `msgpack:"sde_type,omitempty" enum:"SDETypes" default:"sde" flag:"sde-type"`
	// NoiseLevel is a in the formulas of the transitions, the strength of their noise. For cps it
	// is at most 1.
	NoiseLevel *float64 `msgpack:"noise_level,omitempty" range:"0..MaxNoiseLevel" default:"0.7" flag:"noise-level"`
	// SDEStepIndices are the steps that run SDEType; of an empty list none does. Every other step
	// is ode.
	SDEStepIndices []int64 `msgpack:"sde_step_indices" size:"0..MaxSteps,unique" range:"0..MaxSteps-1" absent:"all steps" flag:"sde-steps"`
	// SDEWindow draws the stochastic steps instead of naming them; the two exclude each other.
	SDEWindow *SDEWindow `msgpack:"sde_window,omitempty" flag:"sde-window"`
	// ReturnStepIndices are the latents kept: i is the state before step i, and the number of steps the final one.
	ReturnStepIndices []int64 `msgpack:"return_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps" absent:"the states before and after each stochastic step where these are a list or a window, and the last one of a sample that stops before T; else all" flag:"return-steps"`
	// CheckpointEvery is k: a state is stored at least every k steps, so that a sample whose sampler
	// died goes on from the last one and redoes k steps at most. Solvers that look back (dpm, unipc)
	// can only go on where a run of ode steps begins.
	CheckpointEvery *int64 `msgpack:"checkpoint_every,omitempty" range:"1..MaxSteps" absent:"none but the latents that are kept" flag:"checkpoint-every"`
	// LogProbKind is the full Gaussian density, the density without its logarithms (scaled), or a score that is no
	// density (squared).
	LogProbKind string `msgpack:"log_prob_kind,omitempty" enum:"LogProbKinds" default:"density" flag:"log-prob-kind"`
	// Solver integrates ode steps.
	Solver string `msgpack:"solver,omitempty" enum:"Solvers" default:"euler" flag:"solver"`
	// Debug names tensors to add to each step.
	Debug []string `msgpack:"debug" size:"0..MaxDebug,unique" enum:"DebugTensors" flag:"debug"`
	// LatentsDType is the dtype of the stored latents. The state is rounded to it before it is
	// scored, so that a replay gives ratio 1.
	LatentsDType string `msgpack:"latents_dtype,omitempty" enum:"LatentsDTypes" absent:"BF16 of a model that computes in it, else F32" flag:"latents-dtype"`
	// ReturnConditioning keeps embeddings and masks of the texts, under guidance also of the negative prompt. They are
	// stored once for all samples of a prompt.
	ReturnConditioning bool `msgpack:"return_conditioning,omitempty" default:"false" flag:"return-conditioning"`
}

// SDEWindow draws the stochastic steps, the same for all samples of all groups of a batch.
type SDEWindow struct {
	// Size is how many steps.
	Size int64 `msgpack:"size" range:"1..MaxSteps"`
	// Range is [low, high): the steps to draw from.
	Range []int64 `msgpack:"range" absent:"[0, T-1)" size:"2..2" range:"0..MaxSteps"`
	// Strategy is random (contiguous, uniform start), progressive (start moves with Iteration) or
	// noncontiguous (a random subset).
	Strategy string `msgpack:"strategy,omitempty" enum:"WindowStrategies" default:"random"`
	// Iteration is the training step: progressive windows move with it, the others draw anew for
	// each.
	Iteration int64 `msgpack:"iteration,omitempty" range:"0..4294967295" default:"0"`
	// ItersPerGroup is how many iterations a progressive window stays.
	ItersPerGroup int64 `msgpack:"iters_per_group,omitempty" range:"0..4294967295" default:"1"`
	// Seed makes the draw independent of the run id. Each batch id has a draw of its own, and
	// prompts without a batch draw alike; the seed of the noise has no part in it.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.." absent:"the run id seeds"`
}

// IsVerdict reports whether the reward comes from outside, from a person or a batch job.
func (r RewardSpec) IsVerdict() bool {
	return r.Name == "external" || strings.HasPrefix(r.Name, "external:")
}

// RewardSpec is one reward function of a weighted sum.
type RewardSpec struct {
	// Name is a kind of reward function, or kind:instance where there may be several, e.g.
	// ocr, http:clip, nats:pickscore, external:human.
	Name string `msgpack:"name" form:"reward_name"`
	// Weight is the factor of the score in the sum.
	Weight *float64 `msgpack:"weight,omitempty" range:"-MaxWeight..MaxWeight" default:"1"`
	// Required fails the sample when this scorer fails. An optional score that failed is left out
	// of the sum, and the event says so.
	Required *bool `msgpack:"required,omitempty" default:"true"`
	// Track is the file of the sample that it judges: image, video or audio, or a track of the state; absent: what the
	// function is for; a function for any judges the pixels, or the sound where there are none.
	Track string `msgpack:"track,omitempty" form:"token" absent:"what the function is for"`
	// Stage is the stage of the sample that it judges, in the newest round. A sample that ended before has no score.
	Stage Stage `msgpack:"stage,omitempty" form:"token" absent:"the newest output that the function takes"`
	// GroupMin has a function of one's own (http:NAME, nats:NAME) rate the whole group in one call, and is the fewest
	// samples that it is asked about: in a group that has fewer to show, the score fails.
	GroupMin int64 `msgpack:"group_min,omitempty" range:"0..MaxGroupSize" absent:"each sample is rated by itself"`
	// GroundTruth is the right answer, for scorers that compare: a text, or any value of JSON.
	GroundTruth Truth `msgpack:"ground_truth,omitempty" size:"0..MaxPromptBytes"`
	// Params are options of the function by name, such as psm of ocr; one that it does not have
	// is refused.
	Params map[string]string `msgpack:"params,omitempty" size:"0..MaxParams"`
}

// AdvantageSpec names the estimator and its options.
type AdvantageSpec struct {
	// Estimator turns the rewards of a group into advantages.
	Estimator string `msgpack:"estimator,omitempty" form:"token" default:"flow_grpo" flag:"estimator"`
	// Std is the scale; global needs a batch, none is Dr.GRPO's. flow_grpo has group, where
	// Flow-GRPO's code and verl-omni have global: advantages of a group that stands for itself are
	// there when it closes, and its prompt needs no batch.
	Std string `msgpack:"std,omitempty" enum:"StdScales" absent:"the estimator's" flag:"std"`
	// StdBasis is how the standard deviation is estimated; with std none it is only reported. By default it is
	// population for per_prompt. For estimators that whiten (reinforce_plus_plus, its baseline form, gdpo) it is
	// expanded, as verl whitens samples and steps, or sample if no step is trained. For all others it is sample.
	StdBasis string `msgpack:"std_basis,omitempty" enum:"StdBases" absent:"the estimator's" flag:"std-basis"`
	// Epsilon is added to the standard deviation, and must be above 0. With std none it must be absent.
	Epsilon *float64 `msgpack:"epsilon,omitempty" range:"0..MaxEpsilon" absent:"the estimator's, 1e-4 for flow_grpo" flag:"epsilon"`
	// Mode is a variant of the estimator; only per_prompt and diffusion_nft have some.
	Mode string `msgpack:"mode,omitempty" form:"token" absent:"the estimator's" flag:"adv-mode"`
	// AdvClipMax clamps each advantage to plus or minus this; 0, which diffusion_nft refuses, is no clamp.
	AdvClipMax *float64 `msgpack:"adv_clip_max,omitempty" range:"0..MaxAdvClip" absent:"no clamp, 5 for diffusion_nft" flag:"adv-clip-max"`
	// Gamma discounts over the trained steps, of texts over the tokens that were generated. Only reinforce_plus_plus
	// has it.
	Gamma *float64 `msgpack:"gamma,omitempty" range:"(0..1]" default:"1" flag:"gamma"`
	// Singleton is the advantage of a group of one sample under grpo, rloo, reinforce_plus_plus_baseline, opo, gpg and
	// gdpo: its reward, as in verl, as if the mean of its group were 0 and its spread 1; or zero. All others have no
	// choice.
	Singleton string `msgpack:"singleton,omitempty" enum:"Singletons" absent:"the estimator's" flag:"singleton"`
	// BranchScope chooses the children that a child of a tree's branch point is compared with, for the advantages of
	// its steps: siblings, the children of the same branch point; or depth, all children at the same depth, as in
	// BranchGRPO. With leaves a child gets the mean of the advantages of its leaves, as in TreeGRPO.
	BranchScope string `msgpack:"branch_scope,omitempty" enum:"BranchScopes" absent:"siblings, of a tree" flag:"branch-scope"`
}

// GroupPolicy says which groups count. A group that does not count has a result with
// status filtered, failed, mixed or stale, and no advantages.
type GroupPolicy struct {
	// ZeroStd decides on groups whose rewards are all equal: keep (the advantages are 0), drop, or refill: drop, and
	// ask for a fresh group of the same prompt.
	ZeroStd string `msgpack:"zero_std,omitempty" enum:"ZeroStdPolicies" default:"keep" flag:"zero-std"`
	// Failed is for groups that are failed, mixed or stale: keep (the result says so), or refill.
	Failed string `msgpack:"failed,omitempty" enum:"FailedPolicies" default:"keep" flag:"failed-groups"`
	// RefillRounds bounds how often a group is replaced.
	RefillRounds *int64 `msgpack:"refill_rounds,omitempty" range:"0..MaxRefillRounds" default:"3" flag:"refill-rounds"`
	// MaxPolicySpan is the most versions of the weights, newest - oldest + 1, that the samples of
	// one group may have. A group beyond it is mixed.
	MaxPolicySpan *int64 `msgpack:"max_policy_span,omitempty" range:"1..MaxPolicySpan" default:"1" flag:"max-policy-span"`
	// MaxPolicyLag is how many versions a group's oldest sample may be behind its lane at the time when its last one
	// was scored, by the server's clock. A group beyond it is stale.
	MaxPolicyLag *int64 `msgpack:"max_policy_lag,omitempty" range:"0..MaxPolicySpan" absent:"any" flag:"max-policy-lag"`
	// MixedSchedules accepts groups whose samples ran different schedules. Without it they are
	// mixed.
	MixedSchedules bool `msgpack:"mixed_schedules,omitempty" default:"false" flag:"mixed-schedules"`
}

// Refill names the group that a fresh one stands in for.
type Refill struct {
	// Root is the uid of the first group, Round how often it has been replaced, from 1.
	Root  UID   `msgpack:"root" form:"token"`
	Round int64 `msgpack:"round" range:"1..MaxRefillRounds"`
}

// Substitute has the settings in which a fresh group differs from the group that it replaces.
type Substitute struct {
	// Prompt is the text to paint.
	Prompt string `msgpack:"prompt" size:"0..MaxPromptBytes"`
	// NegativePrompt is the text that guidance leads away from.
	NegativePrompt *string `msgpack:"negative_prompt,omitempty" size:"0..MaxPromptBytes" absent:"the prompt's"`
	// GroundTruth is the right answer for its images, in the reward functions for which the prompt names one.
	GroundTruth Truth `msgpack:"ground_truth,omitempty" size:"0..MaxPromptBytes" absent:"the text in double quotes"`
	// Metadata replaces the prompt's.
	Metadata Metadata `msgpack:"metadata,omitempty"`
}

// Substitute replaces text, metadata and ground truth of the prompt by those for the fresh group of a round, from 1; it
// does nothing if the prompt names no substitute for that round. All text encoders get the new text.
func (p *Prompt) Substitute(round int64) {
	if round < 1 || round > int64(len(p.Substitutes)) {
		return
	}
	s := p.Substitutes[round-1]
	p.Prompt, p.Prompt2, p.Prompt3, p.Metadata = s.Prompt, "", "", s.Metadata
	if s.NegativePrompt != nil {
		p.NegativePrompt = s.NegativePrompt
	}
	p.Reward = slices.Clone(p.Reward)
	for i := range p.Reward {
		if p.Reward[i].GroundTruth != "" {
			p.Reward[i].GroundTruth = s.GroundTruth
		}
	}
}

// BatchSpec joins groups under one id, to be normalised and reported together.
type BatchSpec struct {
	// ID names the batch, unique in its run.
	ID string `msgpack:"id" form:"token"`
	// Groups is how many groups the batch waits for.
	Groups int64 `msgpack:"groups" range:"1..MaxBatchGroups"`
	// Step is where the trainer is, its count of updates, for the metrics of the batch.
	Step *int64 `msgpack:"step,omitempty" range:"0.." flag:"step"`
	// Epoch is where the trainer is in its passes over the data, for the metrics of the batch.
	Epoch *int64 `msgpack:"epoch,omitempty" range:"0.." flag:"epoch"`
}
