package main

import (
	"encoding/json"
	"strconv"

	"github.com/invopop/jsonschema"

	"github.com/meander-rl/meander/schemas"
)

// A limit is a part of the rules that Validate enforces, stated in the schema. What
// takes more than one field to say is only in Validate.
type limit func(*jsonschema.Schema)

func number(x float64) json.Number {
	return json.Number(strconv.FormatFloat(x, 'f', -1, 64))
}

func between(low, high float64) limit {
	return func(s *jsonschema.Schema) { s.Minimum, s.Maximum = number(low), number(high) }
}

func atLeast(low float64) limit {
	return func(s *jsonschema.Schema) { s.Minimum = number(low) }
}

func def(value any) limit {
	return func(s *jsonschema.Schema) { s.Default = value }
}

func enum(values []string) limit {
	return func(s *jsonschema.Schema) {
		s.Enum = nil
		for _, v := range values {
			s.Enum = append(s.Enum, v)
		}
	}
}

func items(limits ...limit) limit {
	return func(s *jsonschema.Schema) {
		for _, set := range limits {
			set(s.Items)
		}
	}
}

func count(low, high uint64) limit {
	return func(s *jsonschema.Schema) {
		if low > 0 {
			s.MinItems = &low
		}
		s.MaxItems = &high
	}
}

func unique(s *jsonschema.Schema) { s.UniqueItems = true }

// text is a length in characters, where Validate counts bytes: necessary, not sufficient.
func text(low, high uint64) limit {
	return func(s *jsonschema.Schema) {
		if low > 0 {
			s.MinLength = &low
		}
		s.MaxLength = &high
	}
}

func tokenText(s *jsonschema.Schema) {
	s.Pattern = "^[A-Za-z0-9_-]{1," + strconv.Itoa(schemas.MaxToken) + "}$"
}

// rewardName is KIND or KIND:INSTANCE; that the whole has at most MaxToken characters is
// the length.
func rewardName(s *jsonschema.Schema) {
	s.Pattern = "^[A-Za-z0-9_-]+(:[A-Za-z0-9_-]+)?$"
	s.MaxLength = new(uint64(schemas.MaxToken))
}

func digest(s *jsonschema.Schema) { s.Pattern = "^[0-9a-f]{64}$" }

// digestOrEmpty is for fields that are empty where there was nothing to digest.
func digestOrEmpty(s *jsonschema.Schema) { s.Pattern = "^([0-9a-f]{64})?$" }

func metadataLimits(s *jsonschema.Schema) {
	keys := uint64(schemas.MaxMapKeys)
	s.MaxProperties = &keys
}

var (
	groupSize    = between(1, schemas.MaxGroupSize)
	sampleIndex  = between(0, schemas.MaxGroupSize-1)
	steps        = between(1, schemas.MaxSteps)
	stepIndex    = between(0, schemas.MaxSteps-1)
	latentIndex  = between(0, schemas.MaxSteps)
	promptText   = text(0, schemas.MaxPromptBytes)
	name         = text(0, schemas.MaxName)
	errorText    = text(0, schemas.MaxText)
	notNegative  = atLeast(0)
	weight       = between(-schemas.MaxWeight, schemas.MaxWeight)
	noiseLevel   = between(0, schemas.MaxNoiseLevel)
	guidance     = between(0, schemas.MaxCFGScale)
	batchGroups  = between(1, schemas.MaxBatchGroups)
	trainedSteps = between(0, schemas.MaxSteps)
)

// rules are the limits of each field, "<Go type>.<wire name>".
var rules = map[string][]limit{
	"Prompt.uid":                 {tokenText},
	"Prompt.prompt":              {promptText},
	"Prompt.negative_prompt":     {promptText},
	"Prompt.model":               {tokenText},
	"Prompt.group_size":          {groupSize, def(8)},
	"Prompt.seed":                {notNegative},
	"Prompt.height":              {between(1, schemas.MaxSide)},
	"Prompt.width":               {between(1, schemas.MaxSide)},
	"Prompt.num_inference_steps": {steps},
	"Prompt.true_cfg_scale":      {guidance},
	"Prompt.sigmas":              {count(1, schemas.MaxSteps), items(func(s *jsonschema.Schema) { s.ExclusiveMinimum, s.Maximum = "0", "1" })},
	"Prompt.initial_noise":       {enum(schemas.InitialNoises), def(schemas.NoisePerSample)},
	"Prompt.reward":              {count(0, schemas.MaxRewards)},
	"Prompt.metadata":            {metadataLimits},
	"Prompt.unknown_fields":      {enum(schemas.UnknownPolicies), def(schemas.UnknownRefuse)},
	"Prompt.deadline":            {atLeast(1)},
	"Prompt.priority":            {between(-schemas.MaxPriority, schemas.MaxPriority), def(0)},
	"Prompt.min_policy_version":  {notNegative, def(0)},
	"Prompt.validate":            {def(false)},

	"Rollout.sde_type":            {enum(schemas.SDETypes), def(schemas.TransitionSDE)},
	"Rollout.noise_level":         {noiseLevel, def(0.7)},
	"Rollout.sde_step_indices":    {count(0, schemas.MaxSteps), unique, items(stepIndex)},
	"Rollout.return_step_indices": {count(0, schemas.MaxSteps+1), unique, items(latentIndex)},
	"Rollout.log_prob_kind":       {enum(schemas.LogProbKinds), def(schemas.LogProbDensity)},
	"Rollout.solver":              {enum(schemas.Solvers), def("euler")},
	"Rollout.debug":               {count(0, schemas.MaxDebug), unique, items(enum(schemas.DebugTensors))},
	"Rollout.latents_dtype":       {enum(schemas.LatentsDTypes), def("F32")},

	"SDEWindow.size":            {steps},
	"SDEWindow.range":           {count(2, 2), items(latentIndex)},
	"SDEWindow.strategy":        {enum(schemas.WindowStrategies), def(schemas.WindowRandom)},
	"SDEWindow.iteration":       {between(0, 1<<32-1), def(0)},
	"SDEWindow.iters_per_group": {between(0, 1<<32-1), def(1)},
	"SDEWindow.seed":            {notNegative},

	"RewardSpec.name":         {rewardName},
	"RewardSpec.weight":       {weight, def(1)},
	"RewardSpec.required":     {def(true)},
	"RewardSpec.ground_truth": {promptText},
	"RewardSpec.params":       {func(s *jsonschema.Schema) { s.MaxProperties = new(uint64(schemas.MaxParams)) }},

	"AdvantageSpec.estimator": {tokenText, def("flow_grpo")},
	"AdvantageSpec.std":       {enum(schemas.StdScales)},
	"AdvantageSpec.std_basis": {enum(schemas.StdBases)},
	"AdvantageSpec.epsilon":   {between(0, schemas.MaxEpsilon)},

	"AdvantageSpec.mode":         {tokenText},
	"AdvantageSpec.adv_clip_max": {between(0, schemas.MaxAdvClip)},
	"AdvantageSpec.gamma":        {between(0, 1), def(1)},
	"AdvantageSpec.singleton":    {enum(schemas.Singletons)},

	"BatchSpec.id":     {tokenText},
	"BatchSpec.groups": {batchGroups},
	"BatchSpec.step":   {notNegative},
	"BatchSpec.epoch":  {notNegative},

	"GroupPolicy.zero_std":        {enum(schemas.ZeroStdPolicies), def(schemas.GroupKeep)},
	"GroupPolicy.failed":          {enum(schemas.FailedPolicies), def(schemas.GroupKeep)},
	"GroupPolicy.refill_rounds":   {between(0, schemas.MaxRefillRounds), def(3)},
	"GroupPolicy.max_policy_span": {between(1, schemas.MaxPolicySpan), def(1)},
	"GroupPolicy.mixed_schedules": {def(false)},
	"Refill.root":                 {tokenText},
	"Refill.round":                {between(1, schemas.MaxRefillRounds)},

	"Group.batch":        {tokenText},
	"Group.batch_groups": {between(0, schemas.MaxBatchGroups)},
	"Group.reward":       {count(0, schemas.MaxRewards)},
	"Group.deadline":     {notNegative},
	"Group.metadata":     {metadataLimits},
	"Group.created":      {notNegative},
	"Group.batch_step":   {notNegative},
	"Group.batch_epoch":  {notNegative},
	"Group.source_run":   {tokenText},

	"GroupRecord.run":             {tokenText},
	"GroupRecord.uid":             {tokenText},
	"GroupRecord.group_size":      {groupSize},
	"GroupRecord.error":           {errorText},
	"GroupRecord.prompt_digest":   {digestOrEmpty},
	"GroupRecord.prompt":          {promptText},
	"GroupRecord.negative_prompt": {promptText},
	"GroupRecord.lane":            {text(0, schemas.MaxToken)},
	"GroupRecord.schedule_digest": {digestOrEmpty},

	"Request.run":                 {tokenText},
	"Request.uid":                 {tokenText},
	"Request.sample_index":        {sampleIndex},
	"Request.group_size":          {groupSize},
	"Request.lane":                {tokenText},
	"Request.prompt":              {promptText},
	"Request.negative_prompt":     {promptText},
	"Request.height":              {between(1, schemas.MaxSide)},
	"Request.width":               {between(1, schemas.MaxSide)},
	"Request.true_cfg_scale":      {guidance},
	"Request.sigmas":              {count(2, schemas.MaxSteps+1), items(between(0, schemas.MaxSigma))},
	"Request.transitions":         {count(1, schemas.MaxSteps), items(enum(schemas.SDETypes))},
	"Request.noise_level":         {noiseLevel},
	"Request.log_prob_kind":       {enum(schemas.LogProbKinds)},
	"Request.solver":              {enum(schemas.Solvers)},
	"Request.return_step_indices": {count(0, schemas.MaxSteps+1), unique, items(latentIndex)},
	"Request.debug":               {count(0, schemas.MaxDebug), unique, items(enum(schemas.DebugTensors))},
	"Request.latents_dtype":       {enum(schemas.LatentsDTypes)},
	"Request.schedule_digest":     {digest},
	"Request.priority":            {between(-schemas.MaxPriority, schemas.MaxPriority)},
	"Request.min_policy_version":  {notNegative},

	"Tensor.dtype": {enum(schemas.DTypes)},
	"Tensor.shape": {count(0, schemas.MaxTensorDims), items(between(1, schemas.MaxTensorBytes))},
	"Ref.bucket":   {tokenText},
	"Ref.digest":   {digest},
	"Ref.size":     {between(1, schemas.MaxBlobBytes)},
	"Parts.first":  {notNegative},
	"Parts.count":  {between(1, schemas.MaxParts)},
	"Parts.size":   {between(1, schemas.MaxTensorBytes)},
	"Parts.digest": {digest},

	"IndexedTensor.index": {latentIndex},
	"NamedTensor.name":    {text(1, schemas.MaxName)},

	"Step.run":                 {tokenText},
	"Step.uid":                 {tokenText},
	"Step.sample_index":        {sampleIndex},
	"Step.attempt":             {tokenText},
	"Step.step_index":          {stepIndex},
	"Step.num_inference_steps": {steps},
	"Step.transition":          {enum(schemas.SDETypes)},
	"Step.noise_level":         {noiseLevel},
	"Step.sigma":               {func(s *jsonschema.Schema) { s.ExclusiveMinimum, s.Maximum = "0", number(schemas.MaxSigma) }},
	"Step.sigma_next":          {func(s *jsonschema.Schema) { s.Minimum, s.ExclusiveMaximum = "0", "1" }},
	"Step.timestep":            {between(0, 1000)},
	"Step.std_dev_t":           {notNegative},
	"Step.noise_std":           {notNegative},
	"Step.log_prob_kind":       {enum(schemas.LogProbKinds)},
	"Step.element_count":       {between(1, schemas.MaxTensorBytes)},
	"Step.latents":             {count(0, schemas.MaxStepLatents)},
	"Step.debug":               {count(0, schemas.MaxDebug)},
	"Step.policy_version":      {notNegative},
	"Step.weights_digest":      {name},
	"Step.schedule_digest":     {digest},
	"Step.sampler":             {name},
	"Step.backend":             {name},
	"Step.device_ns":           {notNegative},

	"Trajectory.run":                 {tokenText},
	"Trajectory.uid":                 {tokenText},
	"Trajectory.sample_index":        {sampleIndex},
	"Trajectory.group_size":          {groupSize},
	"Trajectory.lane":                {tokenText},
	"Trajectory.attempt":             {tokenText},
	"Trajectory.stop_reason":         {enum(schemas.StopReasons)},
	"Trajectory.error":               {errorText},
	"Trajectory.prompt":              {promptText},
	"Trajectory.negative_prompt":     {promptText},
	"Trajectory.height":              {between(0, schemas.MaxSide)},
	"Trajectory.width":               {between(0, schemas.MaxSide)},
	"Trajectory.true_cfg_scale":      {guidance},
	"Trajectory.cfg_rule":            {enum(append([]string{""}, schemas.CFGRules...))},
	"Trajectory.sigmas":              {count(0, schemas.MaxSteps+1), items(between(0, schemas.MaxSigma))},
	"Trajectory.timesteps":           {count(0, schemas.MaxSteps+1), items(between(0, 1000))},
	"Trajectory.transitions":         {count(0, schemas.MaxSteps), items(enum(schemas.SDETypes))},
	"Trajectory.log_probs":           {count(0, schemas.MaxSteps)},
	"Trajectory.log_prob_kind":       {enum(append([]string{""}, schemas.LogProbKinds...))},
	"Trajectory.noise_level":         {noiseLevel},
	"Trajectory.solver":              {enum(append([]string{""}, schemas.Solvers...))},
	"Trajectory.latent_step_indices": {count(0, schemas.MaxSteps+1), unique, items(latentIndex)},
	"Trajectory.latents_shape":       {count(0, schemas.MaxTensorDims)},
	"Trajectory.latents_dtype":       {enum(append([]string{""}, schemas.LatentsDTypes...))},
	"Trajectory.steps":               {count(0, schemas.MaxSteps)},
	"Trajectory.content_digest":      {digestOrEmpty},
	"Trajectory.conditioning":        {count(0, schemas.MaxConditioning)},
	"Trajectory.schedule_digest":     {digestOrEmpty},
	"Trajectory.weights_digest":      {name},
	"Trajectory.policy_version_min":  {notNegative},
	"Trajectory.policy_version_max":  {notNegative},
	"Trajectory.sampler":             {name},
	"Trajectory.backend":             {name},

	"StepRef.digest": {digest},
	"Image.format":   {enum(schemas.ImageFormats)},
	"Image.width":    {between(1, schemas.MaxSide)},
	"Image.height":   {between(1, schemas.MaxSide)},
	"Image.digest":   {digest},

	"SampleTimings.received":   {notNegative},
	"SampleTimings.started":    {notNegative},
	"SampleTimings.finished":   {notNegative},
	"SampleTimings.encode_ns":  {notNegative},
	"SampleTimings.denoise_ns": {notNegative},
	"SampleTimings.decode_ns":  {notNegative},

	"Reward.run":                {tokenText},
	"Reward.uid":                {tokenText},
	"Reward.sample_index":       {sampleIndex},
	"Reward.group_size":         {groupSize},
	"Reward.status":             {enum(schemas.RewardStatuses)},
	"Reward.error":              {errorText},
	"Reward.scores":             {count(0, schemas.MaxRewards)},
	"Reward.trained_steps":      {trainedSteps},
	"Reward.schedule_digest":    {digestOrEmpty},
	"Reward.policy_version_min": {notNegative},
	"Reward.policy_version_max": {notNegative},
	"Reward.scored":             {notNegative},
	"Reward.sample_started":     {notNegative},
	"Reward.sample_finished":    {notNegative},

	"Verdict.run":          {tokenText},
	"Verdict.uid":          {tokenText},
	"Verdict.sample_index": {sampleIndex},
	"Verdict.name":         {tokenText},
	"Verdict.error":        {errorText},
	"Verdict.comment":      {errorText},
	"Verdict.author":       {name},
	"Verdict.at":           {notNegative},

	"Score.name":        {rewardName},
	"Score.detail":      {text(0, schemas.MaxDetail)},
	"Score.version":     {name},
	"Score.weight":      {weight},
	"Score.status":      {enum(schemas.RewardStatuses)},
	"Score.error":       {errorText},
	"Score.duration_ns": {notNegative},

	"Advantage.run":                {tokenText},
	"Advantage.uid":                {tokenText},
	"Advantage.batch":              {tokenText},
	"Advantage.status":             {enum(schemas.GroupStatuses)},
	"Advantage.error":              {errorText},
	"Advantage.group_size":         {groupSize},
	"Advantage.members":            {count(0, schemas.MaxGroupSize)},
	"Advantage.scale":              {enum(schemas.StdScales)},
	"Advantage.std_basis":          {enum(schemas.StdBases)},
	"Advantage.estimator":          {tokenText},
	"Advantage.epsilon":            {between(0, schemas.MaxEpsilon)},
	"Advantage.trained_steps":      {trainedSteps},
	"Advantage.schedule_digest":    {digestOrEmpty},
	"Advantage.policy_version_min": {notNegative},
	"Advantage.policy_version_max": {notNegative},
	"Advantage.metadata":           {metadataLimits},
	"Advantage.opened":             {notNegative},
	"Advantage.closed":             {notNegative},
	"Advantage.mode":               {tokenText},
	"Advantage.adv_clip_max":       {between(0, schemas.MaxAdvClip)},
	"Advantage.gamma":              {between(0, 1)},
	"Advantage.batch_samples":      {between(0, schemas.MaxBatchGroups*schemas.MaxGroupSize)},
	"Advantage.refilled_by":        {tokenText},
	"Advantage.source_run":         {tokenText},
	"Advantage.singleton":          {enum(schemas.Singletons)},

	"Member.sample_index": {sampleIndex},
	"Member.status":       {enum(schemas.MemberStatuses)},

	"Member.step_advantages": {count(0, schemas.MaxSteps)},

	"Batch.run":       {tokenText},
	"Batch.batch":     {tokenText},
	"Batch.groups":    {between(0, schemas.MaxBatchGroups)},
	"Batch.uids":      {count(0, schemas.MaxBatchGroups), unique, items(tokenText)},
	"Batch.samples":   {between(0, schemas.MaxBatchGroups*schemas.MaxGroupSize)},
	"Batch.std_basis": {enum(schemas.StdBases)},
	"Batch.metrics":   {count(0, schemas.MaxMetrics)},
	"Batch.closed":    {notNegative},
	"Batch.status":    {enum(schemas.BatchStatuses)},
	"Batch.expected":  {between(0, schemas.MaxBatchGroups)},
	"Batch.refills":   {between(0, schemas.MaxBatchGroups*schemas.MaxRefillRounds)},
	"Batch.dropped":   {count(0, schemas.MaxListItems), unique, items(tokenText)},
	"Batch.step":      {notNegative},
	"Batch.epoch":     {notNegative},
	"Metric.name":     {text(1, schemas.MaxName)},

	"Policy.lane":                {tokenText},
	"Policy.model":               {text(1, schemas.MaxName)},
	"Policy.family":              {name},
	"Policy.policy_version":      {notNegative},
	"Policy.weights_digest":      {name},
	"Policy.latent_channels":     {between(1, schemas.MaxLatentChannels)},
	"Policy.pixels_per_token":    {between(1, schemas.MaxPixelsPerToken)},
	"Policy.height":              {between(1, schemas.MaxSide)},
	"Policy.width":               {between(1, schemas.MaxSide)},
	"Policy.num_inference_steps": {steps},
	"Policy.true_cfg_scale":      {guidance},
	"Policy.max_pixels":          {between(1, schemas.MaxSide*schemas.MaxSide)},
	"Policy.announced":           {notNegative},
	"Presence.service":           {enum(schemas.PresentServices)},
	"Presence.instance":          {tokenText},
	"Presence.lane":              {tokenText},
	"Presence.reward":            {count(0, schemas.MaxPresentRewards), items(rewardName)},
	"Presence.missing":           {count(0, schemas.MaxPresentRewards)},
	"Presence.at":                {notNegative},
	"MissingReward.name":         {rewardName},
	"MissingReward.reason":       {errorText},
	"Policy.reward":              {count(0, schemas.MaxRewards), items(rewardName)},

	"Dead.stage":   {enum(schemas.Stages)},
	"Dead.code":    {enum(schemas.DeadCodes)},
	"Dead.reason":  {text(1, schemas.MaxText)},
	"Dead.run":     {text(0, schemas.MaxToken)},
	"Dead.uid":     {text(0, schemas.MaxToken)},
	"Dead.subject": {text(0, schemas.MaxSubject)},
	"Dead.stream":  {name},
	"Dead.headers": {count(0, schemas.MaxHeaders)},
	"Dead.at":      {notNegative},
	"Header.name":  {text(1, schemas.MaxHeaderName)},
	"Header.value": {text(0, schemas.MaxHeaderValue)},

	"ScoreRequest.name":         {tokenText},
	"ScoreRequest.prompt":       {text(0, schemas.MaxPromptBytes)},
	"ScoreRequest.ground_truth": {text(0, schemas.MaxPromptBytes)},
	"ScoreRequest.image_format": {enum(schemas.ScoreImageFormats)},
	"ScoreReply.error":          {text(0, schemas.MaxScoreReply)},
	"ScoreReply.detail":         {text(0, schemas.MaxScoreReply)},

	"Receipt.run":                 {text(0, schemas.MaxToken)},
	"Receipt.uid":                 {text(0, schemas.MaxToken)},
	"Receipt.code":                {enum(schemas.DeadCodes)},
	"Receipt.waiting":             {errorText},
	"Receipt.error":               {errorText},
	"Receipt.samples":             {between(0, schemas.MaxGroupSize)},
	"Receipt.num_inference_steps": {between(0, schemas.MaxSteps)},
	"Receipt.warnings":            {count(0, 32)},
	"Receipt.sde_step_indices":    {count(0, schemas.MaxSteps), unique, items(stepIndex)},
}
