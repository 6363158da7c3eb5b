package schemas

// Prompt asks for one group of GroupSize images. Only its text is required. Names
// follow SGLang's rollout API where the meaning is the same.
type Prompt struct {
	V int64 `msgpack:"v"`
	// UID is the group key, unique in its run; absent: intake derives one from the
	// stream sequence of the prompt.
	UID string `msgpack:"uid,omitempty" form:"token"`
	// Prompt is the text to paint, UTF-8. It may be empty, not absent: a model
	// paints without a text too.
	Prompt string `msgpack:"prompt" wire:"needed" size:"0..MaxPromptBytes"`
	// NegativePrompt enables true CFG when TrueCFGScale > 1. Absent: the model's own
	// default, which its policy says, when TrueCFGScale > 1.
	NegativePrompt *string `msgpack:"negative_prompt,omitempty" size:"0..MaxPromptBytes"`
	// TruncatePrompt cuts prompt and negative prompt at the most tokens that the model takes,
	// as diffusers does; default false: a prompt that is too long is refused.
	TruncatePrompt bool `msgpack:"truncate_prompt,omitempty"`
	// Model is the lane that shall serve the prompt; absent: the only lane there is.
	Model string `msgpack:"model,omitempty" form:"token"`
	// GroupSize is n, the number of samples; default 8.
	GroupSize *int64 `msgpack:"group_size,omitempty" range:"1..MaxGroupSize" default:"8"`
	// Seed makes the noise independent of the run id; >= 0; absent: the run id seeds.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.."`
	// Height and Width in pixels, multiples of the pixels_per_token of the lane (diffusers
	// rounds others down); default the model's.
	Height *int64 `msgpack:"height,omitempty" range:"1..MaxSide"`
	Width  *int64 `msgpack:"width,omitempty" range:"1..MaxSide"`
	// NumInferenceSteps is T; default the model's.
	NumInferenceSteps *int64 `msgpack:"num_inference_steps,omitempty" range:"1..MaxSteps"`
	// TrueCFGScale is the classifier-free guidance scale; default the model's; > 1 is active.
	TrueCFGScale *float64 `msgpack:"true_cfg_scale,omitempty" range:"0..MaxCFGScale"`
	// Sigmas are T pre-shift sigmas, strictly decreasing in (0, 1].
	Sigmas []float64 `msgpack:"sigmas" absent:"the model's schedule" size:"1..MaxSteps" range:"(0..1]"`
	// Rollout chooses the transition of each step, its noise and the latents that are kept;
	// absent: all steps are sde, and all latents kept.
	Rollout Rollout `msgpack:"rollout"`
	// InitialNoise is per_sample (default) or shared: one x_T for the whole group.
	InitialNoise string `msgpack:"initial_noise,omitempty" enum:"InitialNoises" default:"per_sample"`
	// Start begins the samples with given states, at any step; absent: at step 0, with drawn noise.
	Start *Start `msgpack:"start,omitempty"`
	// Stop ends the samples before their last step; absent: all steps run.
	Stop *Stop `msgpack:"stop,omitempty"`
	// Reward lists the scorers; default: the service's.
	Reward []RewardSpec `msgpack:"reward" size:"0..MaxRewards"`
	// Advantage names the estimator and its options; absent: flow_grpo.
	Advantage AdvantageSpec `msgpack:"advantage"`
	// Metadata is a map of the caller's, handed through unread to every event of the group.
	Metadata Metadata `msgpack:"metadata,omitempty"`
	// Batch joins groups that are normalised together; absent: the group is alone.
	Batch *BatchSpec `msgpack:"batch,omitempty"`
	// Deadline is when the group closes with what it has, be it nothing, Unix nanoseconds; absent:
	// the service's default, counted from the group's first reward.
	Deadline *int64 `msgpack:"deadline,omitempty" range:"1.."`
	// Priority orders waiting requests of a lane inside one sampler, higher first; default 0.
	Priority *int64 `msgpack:"priority,omitempty" range:"-MaxPriority..MaxPriority" default:"0"`
	// MinPolicyVersion refuses the prompt where the lane serves older weights than these.
	MinPolicyVersion *int64 `msgpack:"min_policy_version,omitempty" range:"0.." default:"0"`
	// UnknownFields is what becomes of fields that no prompt has, of this map and of those in
	// it: refuse (default) them, or warn of them in the receipt.
	UnknownFields string `msgpack:"unknown_fields,omitempty" enum:"UnknownPolicies" default:"refuse"`
	// Evaluation asks for samples to measure, not to train on: every step is ode, whatever
	// Rollout says, so that there are no log-probs; the group counts though its rewards be all
	// equal; and the metrics of its batch are verl's of a validation, val-core/... and
	// val-aux/..., apart from those of training.
	Evaluation bool `msgpack:"validate,omitempty" default:"false"`
	// GroupPolicy says which groups count, and what becomes of the others.
	GroupPolicy *GroupPolicy `msgpack:"group_policy,omitempty"`
	// Refill is set on prompts that the advantage service publishes in place of a group that
	// did not count.
	Refill *Refill `msgpack:"refill,omitempty"`
}

// Rollout is the sampling part of a Prompt.
type Rollout struct {
	// SDEType is the transition of stochastic steps: sde (default), cps, dance_sde, or ode for none.
	SDEType string `msgpack:"sde_type,omitempty" enum:"SDETypes" default:"sde"`
	// NoiseLevel is a in the formulas of the transitions, the strength of their noise; default
	// 0.7; within [0, 1] for cps.
	NoiseLevel *float64 `msgpack:"noise_level,omitempty" range:"0..MaxNoiseLevel" default:"0.7"`
	// SDEStepIndices are the steps that run SDEType; null: all steps; []: none. Every other step is ode.
	SDEStepIndices []int64 `msgpack:"sde_step_indices" size:"0..MaxSteps,unique" range:"0..MaxSteps-1"`
	// SDEWindow draws the list instead of naming it; the two exclude each other.
	SDEWindow *SDEWindow `msgpack:"sde_window,omitempty"`
	// ReturnStepIndices are the latents kept, 0..T; null: S and S+1 when the stochastic
	// steps are a list or a window, else all of 0..T.
	ReturnStepIndices []int64 `msgpack:"return_step_indices" size:"0..MaxSteps+1,unique" range:"0..MaxSteps"`
	// LogProbKind is density (default), scaled or squared.
	LogProbKind string `msgpack:"log_prob_kind,omitempty" enum:"LogProbKinds" default:"density"`
	// Solver of ode steps: euler (default), heun, unipc, dpm or rk4.
	Solver string `msgpack:"solver,omitempty" enum:"Solvers" default:"euler"`
	// Debug names tensors to add to each step: noise, mean, std, model_output.
	Debug []string `msgpack:"debug" size:"0..MaxDebug,unique" enum:"DebugTensors"`
	// LatentsDType is F32 (default), F16 or BF16: the dtype of the stored latents. The state is
	// rounded to it before it is scored, so that a replay gives ratio 1.
	LatentsDType string `msgpack:"latents_dtype,omitempty" enum:"LatentsDTypes" default:"F32"`
}

// SDEWindow draws the stochastic steps, the same for all samples of all groups of a batch.
type SDEWindow struct {
	// Size is how many steps.
	Size int64 `msgpack:"size" range:"1..MaxSteps"`
	// Range is [low, high): the steps to draw from.
	Range []int64 `msgpack:"range" absent:"[0, T-1)" size:"2..2" range:"0..MaxSteps"`
	// Strategy is random (default; contiguous, uniform start), progressive (start moves with
	// Iteration) or noncontiguous (a random subset).
	Strategy string `msgpack:"strategy,omitempty" enum:"WindowStrategies" default:"random"`
	// Iteration is the training step: progressive windows move with it, the others draw anew for
	// each; default 0.
	Iteration int64 `msgpack:"iteration,omitempty" range:"0..4294967295" default:"0"`
	// ItersPerGroup is how many iterations a progressive window stays; default 1.
	ItersPerGroup int64 `msgpack:"iters_per_group,omitempty" range:"0..4294967295" default:"1"`
	// Seed makes the draw independent of the run id; absent: the run id seeds. Each batch id has a
	// draw of its own, and prompts without a batch draw alike; the seed of the noise has no part in it.
	Seed *int64 `msgpack:"seed,omitempty" range:"0.."`
}

// RewardSpec is one reward function of a weighted sum.
type RewardSpec struct {
	// Name is a kind of reward function, or kind:instance where there may be several, e.g.
	// ocr, http:clip, nats:pickscore, external:human.
	Name string `msgpack:"name" form:"reward_name"`
	// Weight defaults to 1.
	Weight *float64 `msgpack:"weight,omitempty" range:"-MaxWeight..MaxWeight" default:"1"`
	// Required fails the sample when this scorer fails; default true. An optional score that
	// failed is left out of the sum, and the event says so.
	Required *bool `msgpack:"required,omitempty" default:"true"`
	// GroundTruth is what the picture is compared with, where the scorer compares.
	GroundTruth string `msgpack:"ground_truth,omitempty" size:"0..MaxPromptBytes"`
	// Params are options of the function by name, such as psm of ocr; one that it does not have
	// is refused.
	Params map[string]string `msgpack:"params,omitempty" size:"0..MaxParams"`
}

// AdvantageSpec names the estimator and its options.
type AdvantageSpec struct {
	// Estimator defaults to flow_grpo.
	Estimator string `msgpack:"estimator,omitempty" form:"token" default:"flow_grpo"`
	// Std is the scale: group, global (needs a batch) or none (Dr.GRPO); default the estimator's.
	// flow_grpo has group, where Flow-GRPO's code and verl-omni have global: advantages of a group
	// that stands for itself are there when it closes, and its prompt needs no batch.
	Std string `msgpack:"std,omitempty" enum:"StdScales"`
	// StdBasis is sample, expanded or population; default the estimator's: population of per_prompt,
	// expanded of those that whiten (reinforce_plus_plus, its baseline form, gdpo), as verl whitens
	// samples and steps, but sample where no step is trained; sample of all others.
	StdBasis string `msgpack:"std_basis,omitempty" enum:"StdBases"`
	// Epsilon is added to the scale; default the estimator's, 1e-4 for flow_grpo.
	Epsilon *float64 `msgpack:"epsilon,omitempty" range:"0..MaxEpsilon"`
	// Mode is a variant of the estimator, of those that have some (per_prompt, diffusion_nft);
	// default the estimator's.
	Mode string `msgpack:"mode,omitempty" form:"token"`
	// AdvClipMax clamps each advantage to +-AdvClipMax; absent: no clamp (5 for diffusion_nft).
	AdvClipMax *float64 `msgpack:"adv_clip_max,omitempty" range:"0..MaxAdvClip"`
	// Gamma discounts over the trained steps; default 1. Only reinforce_plus_plus has it.
	Gamma *float64 `msgpack:"gamma,omitempty" range:"0..1" default:"1"`
	// Singleton is what a group of one sample gets from grpo, rloo, reinforce_plus_plus_baseline, opo,
	// gpg and gdpo: reward (default, as in verl: its reward, as if the mean of its group were 0 and
	// its spread 1) or zero. All others have no choice.
	Singleton string `msgpack:"singleton,omitempty" enum:"Singletons"`
}

// GroupPolicy says which groups count. A group that does not count has a result with
// status filtered, failed or stale, and no advantages.
type GroupPolicy struct {
	// ZeroStd is for groups whose rewards are all equal: keep (default; the advantages are
	// 0), drop, or refill: drop, and ask for a fresh group of the same prompt.
	ZeroStd string `msgpack:"zero_std,omitempty" enum:"ZeroStdPolicies" default:"keep"`
	// Failed is for groups that are failed or stale: keep (default; the result says so), or
	// refill.
	Failed string `msgpack:"failed,omitempty" enum:"FailedPolicies" default:"keep"`
	// RefillRounds bounds how often a group is replaced; default 3.
	RefillRounds *int64 `msgpack:"refill_rounds,omitempty" range:"0..MaxRefillRounds" default:"3"`
	// MaxPolicySpan is the most versions of the weights, newest - oldest + 1, that the samples
	// of one group may have; default 1. A group beyond it is stale.
	MaxPolicySpan *int64 `msgpack:"max_policy_span,omitempty" range:"1..MaxPolicySpan" default:"1"`
	// MixedSchedules accepts groups whose samples ran different schedules; default they are
	// stale.
	MixedSchedules bool `msgpack:"mixed_schedules,omitempty" default:"false"`
}

// Refill names the group that a fresh one stands in for.
type Refill struct {
	// Root is the uid of the first group, Round how often it has been replaced, from 1.
	Root  string `msgpack:"root" form:"token"`
	Round int64  `msgpack:"round" range:"1..MaxRefillRounds"`
}

// BatchSpec joins groups under one id, to be normalised and reported together.
type BatchSpec struct {
	// ID names the batch, unique in its run.
	ID string `msgpack:"id" form:"token"`
	// Groups is how many groups the batch waits for.
	Groups int64 `msgpack:"groups" range:"1..MaxBatchGroups"`
	// Step and Epoch are where the trainer is, for the metrics of the batch.
	Step  *int64 `msgpack:"step,omitempty" range:"0.."`
	Epoch *int64 `msgpack:"epoch,omitempty" range:"0.."`
}
