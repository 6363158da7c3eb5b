package schemas_test

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// fault is one change to a valid event and what Validate must then say, exactly.
type fault[T any] struct {
	name   string
	change func(*T)
	want   string
}

// faults runs cases against a fresh valid event each.
func faults[T any, P interface {
	*T
	Validate() error
}](t *testing.T, valid func() P, cases []fault[T]) {
	t.Helper()
	for _, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			e := valid()
			if err := e.Validate(); err != nil {
				t.Fatalf("event is not valid before the change: %v", err)
			}
			tt.change((*T)(e))
			got := ""
			if err := e.Validate(); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("Validate = %q, want %q", got, tt.want)
			}
		})
	}
}

const (
	tokenRule      = "must be 1 to 64 characters of A-Z a-z 0-9 _ -"
	rewardNameRule = "must be KIND or KIND:INSTANCE, together at most 64 characters of A-Z a-z 0-9 _ -"
)

func TestPrompt_Validate(t *testing.T) {
	type P = schemas.Prompt
	nan, inf := math.NaN(), math.Inf(1)
	faults(t, func() *P { return fullPrompt(t) }, []fault[P]{
		{"uid with a dot", func(p *P) { p.UID = "a.b" }, `uid: "a.b"; ` + tokenRule},
		{"uid with a wildcard", func(p *P) { p.UID = "*" }, `uid: "*"; ` + tokenRule},
		{"long uid", func(p *P) { p.UID = schemas.UID(strings.Repeat("u", 65)) }, `uid: "` + strings.Repeat("u", 64) + `"...; ` + tokenRule},
		{"long prompt", func(p *P) { p.Prompt = strings.Repeat("x", schemas.MaxPromptBytes+1) }, "prompt: 16385 bytes; must be at most 16384"},
		{"prompt not UTF-8", func(p *P) { p.Prompt = "\xff" }, `prompt: "\xff"; must be UTF-8`},
		{"long negative prompt", func(p *P) { p.NegativePrompt = new(strings.Repeat("x", 16385)) }, "negative_prompt: 16385 bytes; must be at most 16384"},
		{"model with a space", func(p *P) { p.Model = "a b" }, `model: "a b"; ` + tokenRule},
		{"empty group", func(p *P) { p.GroupSize = new(int64(0)) }, "group_size: 0; must be between 1 and 1024"},
		{"large group", func(p *P) { p.GroupSize = new(int64(1025)) }, "group_size: 1025; must be between 1 and 1024"},
		{"largest group", func(p *P) { p.GroupSize = new(int64(1024)) }, ""},
		{"negative seed", func(p *P) { p.Seed = new(int64(-1)) }, "seed: -1; must not be negative"},
		{"height", func(p *P) { p.Height = new(int64(8193)) }, "height: 8193; must be between 1 and 8192"},
		{"negative width", func(p *P) { p.Width = new(int64(-16)) }, "width: -16; must be between 1 and 8192"},
		{"huge width", func(p *P) { p.Width = new(int64(8208)) }, "width: 8208; must be between 1 and 8192"},
		{"no steps", func(p *P) { p.NumInferenceSteps, p.Sigmas = new(int64(0)), nil }, "num_inference_steps: 0; must be between 1 and 1000"},
		{"many steps", func(p *P) { p.NumInferenceSteps, p.Sigmas = new(int64(1001)), nil }, "num_inference_steps: 1001; must be between 1 and 1000"},
		{"NaN scale", func(p *P) { p.TrueCFGScale = &nan }, "true_cfg_scale: NaN; must be between 0 and 100"},
		{"second scale", func(p *P) { p.TrueCFGScale2 = new(0.5) }, "true_cfg_scale_2: 0.5; must be between 1 and 100"},
		{"infinite scale", func(p *P) { p.TrueCFGScale = &inf }, "true_cfg_scale: +Inf; must be between 0 and 100"},
		{"no sigmas", func(p *P) { p.Sigmas = []float64{} }, "sigmas: 0 items; must be at least 1"},
		{"sigmas and steps differ", func(p *P) { p.Sigmas = []float64{1, 0.5} }, "sigmas: 2 items; must be 4, one per step of num_inference_steps"},
		{"sigma above 1", func(p *P) { p.Sigmas[0] = 1.5 }, "sigmas[0]: 1.5; must be above 0 and at most 1"},
		{"sigma 0", func(p *P) { p.Sigmas[3] = 0 }, "sigmas[3]: 0; must be above 0 and at most 1"},
		{"NaN sigma", func(p *P) { p.Sigmas[1] = nan }, "sigmas[1]: NaN; must be above 0 and at most 1"},
		{"equal sigmas", func(p *P) { p.Sigmas[2] = 0.75 }, "sigmas[2]: 0.75; must be below the one before it"},
		{"noise place", func(p *P) { p.InitialNoise = "both" }, `initial_noise: "both"; must be one of per_sample, shared`},
		{"metadata not a map", func(p *P) { p.Metadata = schemas.Metadata{1} }, "metadata: starts with 0x01; must be a map"},
		{"batch id", func(p *P) { p.Batch.ID = "" }, `batch.id: ""; ` + tokenRule},
		{"batch of none", func(p *P) { p.Batch.Groups = 0 }, "batch.groups: 0; must be between 1 and 4096"},
		{"deadline 0", func(p *P) { p.Deadline = new(int64(0)) }, "deadline: 0; must be positive"},
		{"priority", func(p *P) { p.Priority = new(int64(1_000_001)) }, "priority: 1000001; must be between -1000000 and 1000000"},
		{"negative policy", func(p *P) { p.MinPolicyVersion = new(int64(-1)) }, "min_policy_version: -1; must not be negative"},

		{"many rewards", func(p *P) { p.Reward = make([]schemas.RewardSpec, 17) }, "reward: 17 items; must be at most 16"},
		{"reward name", func(p *P) { p.Reward[0].Name = "a.b" }, `reward[0].name: "a.b"; ` + rewardNameRule},
		{"reward without instance", func(p *P) { p.Reward[0].Name = "http:" }, `reward[0].name: "http:"; ` + rewardNameRule},
		{"reward with two instances", func(p *P) { p.Reward[0].Name = "http:a:b" }, `reward[0].name: "http:a:b"; ` + rewardNameRule},
		{"mode", func(p *P) { p.Advantage.Mode = "a b" }, `advantage.mode: "a b"; ` + tokenRule},
		{"adv_clip_max", func(p *P) { p.Advantage.AdvClipMax = new(-1.0) }, "advantage.adv_clip_max: -1; must be between 0 and 1000000"},
		{"gamma", func(p *P) { p.Advantage.Gamma = new(1.5) }, "advantage.gamma: 1.5; must be above 0 and at most 1"},
		{"batch step", func(p *P) { p.Batch.Step = new(int64(-1)) }, "batch.step: -1; must not be negative"},
		{"zero_std", func(p *P) { p.GroupPolicy = &schemas.GroupPolicy{ZeroStd: "x"} }, `group_policy.zero_std: "x"; must be one of keep, drop, refill`},
		{"failed", func(p *P) { p.GroupPolicy = &schemas.GroupPolicy{Failed: "drop"} }, `group_policy.failed: "drop"; must be one of keep, refill`},
		{"refill_rounds", func(p *P) { p.GroupPolicy = &schemas.GroupPolicy{RefillRounds: new(int64(17))} }, "group_policy.refill_rounds: 17; must be between 0 and 16"},
		{"max_policy_span", func(p *P) { p.GroupPolicy = &schemas.GroupPolicy{MaxPolicySpan: new(int64(0))} }, "group_policy.max_policy_span: 0; must be between 1 and 1048576"},
		{"refill", func(p *P) { p.Refill = &schemas.Refill{Root: "", Round: 0} }, `refill.root: ""; ` + tokenRule + "\nrefill.round: 0; must be between 1 and 16"},
		{"reward twice", func(p *P) { p.Reward[1].Name = "ocr" }, `reward[1].name: "ocr"; must come at most once`},
		{"NaN weight", func(p *P) { p.Reward[0].Weight = &nan }, "reward[0].weight: NaN; must be between -1000000 and 1000000\nreward: weights sum to NaN; must be above 0"},
		{"weights cancel", func(p *P) { p.Reward[1].Weight = new(-1.0) }, "reward: weights sum to 0; must be above 0"},
		{"a negative weight", func(p *P) { p.Reward[1].Weight = new(-0.5) }, ""},
		{"absent weight is 1", func(p *P) { p.Reward[0].Weight, p.Reward[1].Weight = nil, new(-1.0) }, "reward: weights sum to 0; must be above 0"},
		{"long ground truth", func(p *P) { p.Reward[0].GroundTruth = schemas.Truth(strings.Repeat("x", 16385)) }, "reward[0].ground_truth: 16385 bytes; must be at most 16384"},
		{"param without a name", func(p *P) { p.Reward[0].Params = map[string]string{"": "x"} }, `reward[0].params: ""; must be a name of 1 to 64 bytes`},
		{"long param", func(p *P) { p.Reward[0].Params = map[string]string{"k": strings.Repeat("x", 4097)} }, "reward[0].params.k: 4097 bytes; must be at most 4096"},
		{"many params", func(p *P) {
			p.Reward[0].Params = map[string]string{}
			for i := range 33 {
				p.Reward[0].Params[fmt.Sprint(i)] = ""
			}
		}, "reward[0].params: 33 items; must be at most 32"},

		{"estimator", func(p *P) { p.Advantage.Estimator = "a b" }, `advantage.estimator: "a b"; ` + tokenRule},
		{"std", func(p *P) { p.Advantage.Std = "local" }, `advantage.std: "local"; must be one of group, global, none`},
		{"std basis", func(p *P) { p.Advantage.StdBasis = "n" }, `advantage.std_basis: "n"; must be one of sample, expanded, population`},
		{"negative epsilon", func(p *P) { p.Advantage.Epsilon = new(-1e-4) }, "advantage.epsilon: -0.0001; must be between 0 and 1"},
		{"no discount", func(p *P) { p.Advantage.Gamma = new(0.0) }, "advantage.gamma: 0; must be above 0 and at most 1"},
		{"global without a batch", func(p *P) { p.Batch = nil }, `advantage.std: "global"; must be group or none without a batch: there is nothing beyond the group`},
		{"two faults", func(p *P) { p.GroupSize, p.Model = new(int64(-1)), "*" }, `model: "*"; ` + tokenRule + "\ngroup_size: -1; must be between 1 and 1024"},
	})
}

func TestRollout_Validate(t *testing.T) {
	type P = schemas.Prompt
	window := func(change func(*schemas.SDEWindow)) func(*P) {
		return func(p *P) {
			p.Rollout.SDEStepIndices = nil
			p.Rollout.SDEWindow = &schemas.SDEWindow{Size: 2, Range: []int64{0, 3}}
			change(p.Rollout.SDEWindow)
		}
	}
	unknownSteps := func(change func(*schemas.Rollout)) func(*P) {
		return func(p *P) {
			p.NumInferenceSteps, p.Sigmas = nil, nil
			change(&p.Rollout)
		}
	}
	const last = "must leave out the last step for log_prob_kind density: the last cps step has no noise (use " +
		"squared, or choose the steps)"
	faults(t, func() *P { return fullPrompt(t) }, []fault[P]{
		{"sde type", func(p *P) { p.Rollout.SDEType = "foo" }, `rollout.sde_type: "foo"; must be one of ` + transitions},
		{"kind", func(p *P) { p.Rollout.LogProbKind = "full" }, `rollout.log_prob_kind: "full"; must be one of density, scaled, squared`},
		{"solver", func(p *P) { p.Rollout.Solver = "ddim" }, `rollout.solver: "ddim"; must be one of euler, heun, unipc, dpm, rk4`},
		{"dtype", func(p *P) { p.Rollout.LatentsDType = "F64" }, `rollout.latents_dtype: "F64"; must be one of F32, F16, BF16`},
		{"debug", func(p *P) { p.Rollout.Debug = []string{"mean", "x"} }, `rollout.debug[1]: "x"; must be one of noise, mean, std, model_output`},
		{"debug twice", func(p *P) { p.Rollout.Debug = []string{"mean", "mean"} }, `rollout.debug[1]: "mean"; must come at most once`},
		{"negative noise", func(p *P) { p.Rollout.NoiseLevel = new(-0.1) }, "rollout.noise_level: -0.1; must be between 0 and 10"},
		{"NaN noise", func(p *P) { p.Rollout.NoiseLevel = new(math.NaN()) }, "rollout.noise_level: NaN; must be between 0 and 10"},
		{"sde noise above 1", func(p *P) { p.Rollout.NoiseLevel = new(1.2) }, ""},
		{"cps noise above 1", func(p *P) { p.Rollout.SDEType, p.Rollout.NoiseLevel = "cps", new(1.2) }, "rollout.noise_level: 1.2; must be between 0 and 1"},
		{"sde index T", func(p *P) { p.Rollout.SDEStepIndices = []int64{0, 4} }, "rollout.sde_step_indices[1]: 4; must be between 0 and 3"},
		{"negative sde index", func(p *P) { p.Rollout.SDEStepIndices = []int64{-1} }, "rollout.sde_step_indices[0]: -1; must be between 0 and 999"},
		{"sde index twice", func(p *P) { p.Rollout.SDEStepIndices = []int64{1, 0, 1} }, "rollout.sde_step_indices[2]: 1; must come at most once"},
		{"return index T", func(p *P) { p.Rollout.ReturnStepIndices = []int64{4} }, ""},
		{"return index above T", func(p *P) { p.Rollout.ReturnStepIndices = []int64{5} }, "rollout.return_step_indices[0]: 5; must be between 0 and 4"},
		{"return index twice", func(p *P) { p.Rollout.ReturnStepIndices = []int64{2, 2} }, "rollout.return_step_indices[1]: 2; must come at most once"},
		{"index beyond any T", unknownSteps(func(r *schemas.Rollout) { r.SDEStepIndices = []int64{1000} }), "rollout.sde_step_indices[0]: 1000; must be between 0 and 999"},
		{"index within some T", unknownSteps(func(r *schemas.Rollout) { r.SDEStepIndices = []int64{999} }), ""},
		{"T from the sigmas", func(p *P) { p.NumInferenceSteps, p.Rollout.SDEStepIndices = nil, []int64{4} }, "rollout.sde_step_indices[0]: 4; must be between 0 and 3"},
		{"too many indices", func(p *P) { p.Rollout.SDEStepIndices = make([]int64, 1002) }, "rollout.sde_step_indices: 1002 items; must be at most 1000"},

		{"window", window(func(*schemas.SDEWindow) {}), ""},
		{"window beside a list", func(p *P) { p.Rollout.SDEWindow = &schemas.SDEWindow{Size: 1} }, "rollout.sde_window: set beside sde_step_indices; must be the only one of the two"},
		{"window of none", window(func(w *schemas.SDEWindow) { w.Size = 0 }), "rollout.sde_window.size: 0; must be between 1 and 1000"},
		{"window larger than its range", window(func(w *schemas.SDEWindow) { w.Size = 4 }), "rollout.sde_window.size: 4; must be between 1 and 3, the length of the range"},
		{"window range beyond T", window(func(w *schemas.SDEWindow) { w.Range = []int64{0, 5} }), "rollout.sde_window.range: [0 5]; must be a part of [0, 4) that is not empty"},
		{"negative range", window(func(w *schemas.SDEWindow) { w.Range = []int64{-1, 3} }), "rollout.sde_window.range[0]: -1; must be between 0 and 1000"},
		{"empty range", window(func(w *schemas.SDEWindow) { w.Range = []int64{2, 2} }), "rollout.sde_window.range: [2 2]; must be a part of [0, 4) that is not empty"},
		{"range of one number", window(func(w *schemas.SDEWindow) { w.Range = []int64{2} }), "rollout.sde_window.range: 1 items; must be 2"},
		{"default range leaves out the last step", window(func(w *schemas.SDEWindow) { w.Range, w.Size = nil, 4 }), "rollout.sde_window.size: 4; must be between 1 and 3, the length of the range"},
		{"strategy", window(func(w *schemas.SDEWindow) { w.Strategy = "x" }), `rollout.sde_window.strategy: "x"; must be one of random, progressive, noncontiguous`},
		{"negative iteration", window(func(w *schemas.SDEWindow) { w.Iteration = -1 }), "rollout.sde_window.iteration: -1; must be between 0 and 4294967295"},
		{"negative window seed", window(func(w *schemas.SDEWindow) { w.Seed = new(int64(-1)) }), "rollout.sde_window.seed: -1; must not be negative"},
		{"window of unknown T", func(p *P) {
			window(func(w *schemas.SDEWindow) { w.Range = []int64{0, 900} })(p)
			p.NumInferenceSteps, p.Sigmas = nil, nil
		}, ""},

		{"density without noise", func(p *P) { p.Rollout.NoiseLevel = new(0.0) }, "rollout.noise_level: 0; must be above 0 for log_prob_kind density: without noise there is no density"},
		{"scaled without noise", func(p *P) { p.Rollout.NoiseLevel, p.Rollout.LogProbKind = new(0.0), "scaled" }, "rollout.noise_level: 0; must be above 0 for log_prob_kind scaled: without noise there is no density"},
		{"squared without noise", func(p *P) { p.Rollout.NoiseLevel, p.Rollout.LogProbKind = new(0.0), "squared" }, ""},
		{"ode without noise", func(p *P) { p.Rollout.NoiseLevel, p.Rollout.SDEType = new(0.0), "ode" }, ""},
		{"no stochastic step and no noise", func(p *P) { p.Rollout.NoiseLevel, p.Rollout.SDEStepIndices = new(0.0), []int64{} }, ""},
		{"validation without noise", func(p *P) { p.Rollout.NoiseLevel, p.Validation = new(0.0), true }, ""},
		{"cps on the last step", func(p *P) { p.Rollout.SDEType, p.Rollout.SDEStepIndices = "cps", []int64{3} }, "rollout.sde_step_indices: 3; " + last},
		{"cps on all steps", unknownSteps(func(r *schemas.Rollout) { r.SDEType, r.SDEStepIndices = "cps", nil }), "rollout.sde_step_indices: null, all steps; " + last},
		{"cps squared on all steps", func(p *P) {
			p.Rollout.SDEType, p.Rollout.SDEStepIndices, p.Rollout.LogProbKind = "cps", nil, "squared"
		}, ""},
		{"cps window up to the last step", func(p *P) {
			window(func(w *schemas.SDEWindow) { w.Range = []int64{1, 4} })(p)
			p.Rollout.SDEType = "cps"
		}, "rollout.sde_window.range: [1 4]; " + last},
		{"cps default window", func(p *P) {
			window(func(w *schemas.SDEWindow) { w.Range = nil })(p)
			p.Rollout.SDEType = "cps"
		}, ""},
	})
}

func TestRollout_ValidateSteps(t *testing.T) {
	r := schemas.Rollout{SDEStepIndices: []int64{0, 9}, ReturnStepIndices: []int64{10}}
	for _, tt := range []struct {
		steps int64
		want  string
	}{
		{10, ""},
		{9, "rollout.sde_step_indices[1]: 9; must be between 0 and 8\nrollout.return_step_indices[0]: 10; must be between 0 and 9"},
		{0, "num_inference_steps: 0; must be between 1 and 1000"},
	} {
		got := ""
		if err := r.ValidateSteps(tt.steps); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("ValidateSteps(%d) = %q, want %q", tt.steps, got, tt.want)
		}
	}
	if err := r.Validate(); err != nil {
		t.Errorf("Validate without T = %v", err)
	}
}

func TestRequest_Validate(t *testing.T) {
	type R = schemas.Request
	faults(t, func() *R { return fullRequest(t) }, []fault[R]{
		{"run", func(r *R) { r.Run = "" }, `run: ""; ` + tokenRule},
		{"uid", func(r *R) { r.UID = ">" }, `uid: ">"; ` + tokenRule},
		{"lane", func(r *R) { r.Lane = "a.b" }, `lane: "a.b"; ` + tokenRule},
		{"sample beyond the group", func(r *R) { r.SampleIndex = 8 }, "sample_index: 8; must be between 0 and 7"},
		{"group size", func(r *R) { r.GroupSize = 0 }, "group_size: 0; must be between 1 and 1024"},
		{"height", func(r *R) { r.Height = 0 }, "height: 0; must be between 1 and 8192"},
		{"second scale alone", func(r *R) { r.TrueCFGScale2 = 3 }, "boundary_ratio: 0; must be above 0 with true_cfg_scale_2, else absent"},
		{"boundary alone", func(r *R) { r.BoundaryRatio = 0.5 }, "boundary_ratio: 0.5; must be above 0 with true_cfg_scale_2, else absent"},
		{"scale", func(r *R) { r.TrueCFGScale = math.Inf(-1) }, "true_cfg_scale: -Inf; must be between 0 and 100"},
		{"last sigma", func(r *R) { r.Sigmas[4] = 0.1 }, "sigmas[4]: 0.1; must be 0, the end of the schedule"},
		{"rising sigmas", func(r *R) { r.Sigmas[2] = 0.8 }, "sigmas[2]: 0.8; must be below the one before it"},
		{"NaN sigma", func(r *R) { r.Sigmas[2] = float32(math.NaN()) }, "sigmas[2]: NaN; must be between 0 and 1"},
		{"one sigma", func(r *R) { r.Sigmas, r.Transitions, r.ReturnStepIndices = []float32{0}, nil, nil }, "sigmas: 1 items; must be at least 2\ntransitions: 0 items; must be at least 1"},
		{"too many sigmas, late indices", func(r *R) {
			r.Sigmas, r.Transitions, r.ReturnStepIndices = make([]float32, 5001), make([]string, 5000), []int64{4000}
			for i := range r.Transitions {
				r.Transitions[i] = "ode"
			}
		}, "sigmas: 5001 items; must be at most 1001\ntransitions: 5000 items; must be at most " +
			"1000\nreturn_step_indices[0]: 4000; must be between 0 and 1000"},
		{"few transitions", func(r *R) { r.Transitions = r.Transitions[:3] }, "transitions: 3 items; must be 4, one less than the sigmas"},
		{"transition", func(r *R) { r.Transitions[1] = "" }, `transitions[1]: ""; must be one of ` + transitions},
		{"noise level", func(r *R) { r.NoiseLevel = 11 }, "noise_level: 11; must be between 0 and 10"},
		{"kind", func(r *R) { r.LogProbKind = "" }, `log_prob_kind: ""; must be one of density, scaled, squared`},
		{"solver", func(r *R) { r.Solver = "" }, `solver: ""; must be one of euler, heun, unipc, dpm, rk4`},
		{"return order", func(r *R) { r.ReturnStepIndices = []int64{2, 1} }, "return_step_indices[1]: 1; must be above the one before it"},
		{"return range", func(r *R) { r.ReturnStepIndices = []int64{5} }, "return_step_indices[0]: 5; must be between 0 and 4"},
		{"debug", func(r *R) { r.Debug = []string{"x"} }, `debug[0]: "x"; must be one of noise, mean, std, model_output`},
		{"dtype", func(r *R) { r.LatentsDType = "" }, `latents_dtype: ""; must be one of F32, F16, BF16`},
		{"digest by another algorithm", func(r *R) { r.ScheduleDigest = "md5:" + strings.Repeat("0", 32) }, `schedule_digest: "md5:` + strings.Repeat("0", 32) + `"; must be blake3: and 64 lower-case hex digits, or a sha-256 of 64 lower-case hex digits`},
		{"digest", func(r *R) { r.ScheduleDigest = strings.ToUpper(r.ScheduleDigest) }, `schedule_digest: "` + strings.ToUpper(fullRequest(t).ScheduleDigest)[:64] + `"...; must be blake3: and 64 lower-case hex digits, or a sha-256 of 64 lower-case hex digits`},
		{"group batch", func(r *R) { r.Group.Batch = "" }, `group.batch: ""; ` + tokenRule},
		{"own batch with another name", func(r *R) { r.Group.BatchGroups, r.Group.Advantage.Std = 0, "" }, `group.batch: "b0"; must be the uid "p17": the group has no batch`},
		{"global without batch", func(r *R) { r.Group.BatchGroups, r.Group.Batch = 0, "p17" }, `group.advantage.std: "global"; must be group or none without a batch: there is nothing beyond the group`},
		{"group reward", func(r *R) { r.Group.Reward[0].Weight = new(math.Inf(1)) }, "group.reward[0].weight: +Inf; must be between -1000000 and 1000000"},
		{"group deadline", func(r *R) { r.Group.Deadline = -1 }, "group.deadline: -1; must not be negative"},
	})
}

func TestStep_Validate(t *testing.T) {
	type S = schemas.Step
	faults(t, sdeStep, []fault[S]{
		{"attempt", func(s *S) { s.Attempt = "a.b" }, `attempt: "a.b"; ` + tokenRule},
		{"sample", func(s *S) { s.SampleIndex = -1 }, "sample_index: -1; must be between 0 and 1023"},
		{"step index", func(s *S) { s.StepIndex = 5; s.Latents = nil }, "step_index: 5; must be between 0 and 4"},
		{"steps", func(s *S) { s.NumInferenceSteps = 0 }, "num_inference_steps: 0; must be between 1 and 1000"},
		{"transition", func(s *S) { s.Transition = "euler" }, `transition: "euler"; must be one of ` + transitions},
		{"sigma", func(s *S) { s.Sigma, s.Timestep = 2, 2000 }, "sigma: 2; must be above 0 and at most 1\ntimestep: 2000; must be between 0 and 1000"},
		{"sigma next", func(s *S) { s.SigmaNext = 0.7 }, "sigma_next: 0.7; must be at least 0 and below sigma"},
		{"NaN sigma next", func(s *S) { s.SigmaNext = float32(math.NaN()) }, "sigma_next: NaN; must be at least 0 and below 1"},
		{"timestep", func(s *S) { s.Timestep = 601 }, "timestep: 601; must be 600, 1000 * sigma"},
		{"NaN timestep", func(s *S) { s.Timestep = float32(math.NaN()) }, "timestep: NaN; must be between 0 and 1000"},
		{"timestep off by a bit", func(s *S) { s.Timestep = math.Nextafter32(600, 0) }, "timestep: 599.99994; must be 600, 1000 * sigma"},
		{"infinite std", func(s *S) { s.StdDevT = math.Inf(1) }, "std_dev_t: +Inf; must be finite"},
		{"negative noise std", func(s *S) { s.NoiseStd = -1 }, "noise_std: -1; must not be negative"},
		{"no log-prob", func(s *S) { s.LogProb = nil }, "log_prob: null; must be a number unless the transition is ode"},
		{"no log-prob sum", func(s *S) { s.LogProbSum = nil }, "log_prob_sum: null; must be a number unless the transition is ode"},
		{"NaN log-prob", func(s *S) { s.LogProb = new(math.NaN()) }, "log_prob: NaN; must be finite"},
		{"ode with a log-prob", func(s *S) { s.Transition, s.LogProbSum = "ode", nil }, "log_prob: -0.6515271871029717; must be null on an ode step"},
		{"elements", func(s *S) { s.ElementCount = 0 }, "element_count: 0; must be between 1 and 1073741824"},
		{"device time", func(s *S) { s.DeviceNS = -1 }, "device_ns: -1; must not be negative"},
		{"three latents", func(s *S) { s.Latents = make([]schemas.IndexedTensor, 3) }, "latents: 3 items; must be at most 2"},
		{"latents after the step", func(s *S) { s.Latents[0].Index = 3 }, ""},
		{"latents of an earlier step", func(s *S) { s.Latents[0].Index = 1 }, "latents[0].index: 1; must be the step 2, or 3 on the last step that runs"},
		{"final latents too early", func(s *S) { s.Latents[0].Index = 5 }, "latents[0].index: 5; must be the step 2, or 3 on the last step that runs"},
		{"latents twice", func(s *S) { s.Latents = append(s.Latents, s.Latents[0]) }, "latents[1].index: 2; must come at most once"},
		{"debug name", func(s *S) { s.Debug[0].Name = "x" }, `debug[0].name: "x"; must be one of noise, mean, std, model_output`},
		{"debug twice", func(s *S) { s.Debug = append(s.Debug, s.Debug[0]) }, `debug[1].name: "std"; must come at most once`},
		{"tensor size", func(s *S) { s.Latents[0].Tensor.Data = make([]byte, 31) }, "latents[0].tensor.data: 31 bytes; must be 32, the size of F32 [2 4]"},
	})
}

func TestTensor_Validate(t *testing.T) {
	type T = schemas.Tensor
	ref := &schemas.Ref{Bucket: "mdr-blobs", Digest: digestOf("x"), Size: 32}
	parts := &schemas.Parts{Count: 1, Size: 32, Digest: digestOf("x")}
	const shape = "must be between 1 and 1073741824"
	faults(t, func() *T { return new(latents("F32", 4)) }, []fault[T]{
		{"dtype", func(x *T) { x.DType = "float32" }, `dtype: "float32"; must be one of F32, F16, BF16, U8, F64, I8, I16, I32, I64, U16, U32, U64, BOOL`},
		{"scalar", func(x *T) { x.Shape, x.Data = []int64{}, x.Data[:4] }, ""},
		{"empty dimension", func(x *T) { x.Shape = []int64{0, 4} }, "shape[0]: 0; " + shape},
		{"negative dimension", func(x *T) { x.Shape = []int64{-2, -4} }, "shape[0]: -2; " + shape},
		{"nine dimensions", func(x *T) { x.Shape = []int64{1, 1, 1, 1, 1, 1, 1, 1, 8} }, "shape: 9 items; must be at most 8"},
		{"overflow", func(x *T) { x.Shape = []int64{1 << 32, 1 << 32, 2, 2, 2} }, "shape[0]: 4294967296; " + shape},
		{"overflow to the right product", func(x *T) { x.Shape = []int64{1 << 61, 1 << 3, 8} }, "shape[0]: 2305843009213693952; " + shape},
		{"too many elements", func(x *T) { x.Shape = []int64{1 << 15, 1 << 15, 2} }, "shape: [32768 32768 2]; must be of 1073741824 bytes at most"},
		{"short data", func(x *T) { x.Data = x.Data[:31] }, "data: 31 bytes; must be 32, the size of F32 [2 4]"},
		{"no carrier", func(x *T) { x.Data = nil }, "data: none; must be exactly one of data, ref and parts"},
		{"two carriers", func(x *T) { x.Ref = ref }, "data: data and ref; must be exactly one of data, ref and parts"},
		{"three carriers", func(x *T) { x.Ref, x.Parts = ref, parts }, "data: data and ref and parts; must be exactly one of data, ref and parts"},
		{"ref", func(x *T) { x.Data, x.Ref = nil, ref }, ""},
		{"ref of another size", func(x *T) { x.Data, x.Ref = nil, &schemas.Ref{Bucket: "b", Digest: digestOf("x"), Size: 33} }, "ref.size: 33 bytes; must be 32, the size of F32 [2 4]"},
		{"ref digest", func(x *T) { x.Data, x.Ref = nil, &schemas.Ref{Bucket: "b", Digest: "abc", Size: 32} }, `ref.digest: "abc"; must be a sha-256 of 64 lower-case hex digits`},
		{"ref bucket", func(x *T) { x.Data, x.Ref = nil, &schemas.Ref{Bucket: "../b", Digest: digestOf("x"), Size: 32} }, `ref.bucket: "../b"; ` + tokenRule},
		{"parts", func(x *T) { x.Data, x.Parts = nil, parts }, ""},
		{"parts of another size", func(x *T) { x.Data, x.Parts = nil, &schemas.Parts{Count: 1, Size: 31, Digest: digestOf("x")} }, "parts.size: 31 bytes; must be 32, the size of F32 [2 4]"},
		{"no parts", func(x *T) { x.Data, x.Parts = nil, &schemas.Parts{Size: 32, Digest: digestOf("x")} }, "parts.count: 0; must be between 1 and 4096"},
		{"more parts than bytes", func(x *T) { x.Data, x.Parts = nil, &schemas.Parts{Count: 33, Size: 32, Digest: digestOf("x")} }, "parts.size: 32; must be between 33 and 17301504"},
		{"negative first part", func(x *T) {
			x.Data, x.Parts = nil, &schemas.Parts{First: -1, Count: 1, Size: 32, Digest: digestOf("x")}
		}, "parts.first: -1; must be between 0 and 2147483647"},
	})
}

func TestTrajectory_Validate(t *testing.T) {
	type T = schemas.Trajectory
	faults(t, func() *T { return completedTrajectory(t) }, []fault[T]{
		{"stop reason", func(e *T) { e.StopReason, e.Media, e.Error = "done", nil, "x" }, `stop_reason: "done"; must be one of completed, failed, pruned`},
		{"completed with an error", func(e *T) { e.Error = "x" }, `error: "x"; must be empty when completed`},
		{"failed without an error", func(e *T) { e.StopReason, e.Media = "failed", nil }, `error: ""; must not be empty`},
		{"failed with an image", func(e *T) { e.StopReason, e.Error = "failed", "x" }, "media: present; must be absent unless completed"},
		{"completed without an image", func(e *T) { e.Media = nil }, "media: none; must be present when completed"},
		{"guidance rule", func(e *T) { e.CFGRule = "" }, `cfg_rule: ""; must be one of rescaled, plain, plain_clamped, inside`},
		{"few timesteps", func(e *T) { e.Timesteps = e.Timesteps[:4] }, "timesteps: 4 items; must be 5, one per sigma"},
		{"timestep", func(e *T) { e.Timesteps[1] = 751 }, "timesteps[1]: 751; must be 750, 1000 * sigma"},
		{"few log-probs", func(e *T) { e.LogProbs = e.LogProbs[:3] }, "log_probs: 3 items; must be 4, one per step"},
		{"ode with a log-prob", func(e *T) { e.LogProbs[1] = new(0.0) }, `log_probs[1]: 0; must be null exactly on ode steps; this one is "ode"`},
		{"sde without a log-prob", func(e *T) { e.LogProbs[0] = nil }, `log_probs[0]: null; must be null exactly on ode steps; this one is "sde"`},
		{"NaN log-prob", func(e *T) { e.LogProbs[0] = new(math.NaN()) }, "log_probs[0]: NaN; must be finite"},
		{"latent indices", func(e *T) { e.LatentStepIndices = []int64{0, 5} }, "latent_step_indices[1]: 5; must be between 0 and 4"},
		{"latent shape", func(e *T) { e.LatentsShape = nil }, "latents_shape: []; must be the shape of a tensor, [S, C]"},
		{"missing steps", func(e *T) { e.Steps = e.Steps[:3] }, "steps: 3 items; must be 4, one per step that runs"},
		{"step sequence", func(e *T) { e.Steps[2].Seq = 0 }, "steps[2].seq: 0; must be positive"},
		{"step digest", func(e *T) { e.Steps[2].Digest = "" }, `steps[2].digest: ""; must be blake3: and 64 lower-case hex digits, or a sha-256 of 64 lower-case hex digits`},
		{"content digest", func(e *T) { e.ContentDigest = "" }, `content_digest: ""; must be blake3: and 64 lower-case hex digits, or a sha-256 of 64 lower-case hex digits`},
		{"one frame", func(e *T) { e.Frames = 1 }, `frames: 1; must be absent for an image, or more than 1`},
		{
			"frames without a video", func(e *T) { e.Frames = 5 },
			`media: no video; must have one beside the image of a sample of several frames, and none else`,
		},
		{
			"a video of an image", func(e *T) { e.Media = video(e, 5) },
			`media: a video; must have one beside the image of a sample of several frames, and none else`,
		},
		{
			"another video", func(e *T) { e.Frames, e.Media = 9, video(e, 5) },
			`media: a video of 5 of 64 x 128 pixels; must be of 9 of 64 x 128, the sample's`,
		},
		{
			"video format", func(e *T) { e.Frames, e.Media = 5, video(e, 5); e.Media[1].Format = "gif" },
			`media[1].format: "gif"; must be one of png, apng, wav`,
		},
		{
			"a video as an image file", func(e *T) { e.Frames, e.Media = 5, video(e, 5); e.Media[1].Format = "png" },
			`media[1].format: "png"; must be apng, that of video`,
		},
		{
			"a still video", func(e *T) { e.Frames, e.Media = 5, video(e, 5); e.Media[1].FPS = 0 },
			`media[1].fps: 0; must be positive: it is of video`,
		},
		{"an image that sounds", func(e *T) { e.Media[0].Rate = 5 }, `media[0].rate: 5; must be absent: it is not of image`},
		{
			"a sound without a rate", func(e *T) { e.Media = []schemas.Medium{sound()}; e.Media[0].Rate = 0 },
			`media[0].rate: 0; must be positive: it is of audio`,
		},
		{
			"much sound", func(e *T) { e.Media = []schemas.Medium{sound()}; e.Media[0].Samples = schemas.MaxAudio },
			`media[0].samples: 268435456 of 2 channels; must be at most 268435456 in all`,
		},
		{
			"two images", func(e *T) { e.Media = append(e.Media, e.Media[0]) },
			`media[1].kind: "image"; must come at most once, in the order image, video, audio`,
		},
		{
			"sound before an image", func(e *T) { e.Media = append([]schemas.Medium{sound()}, e.Media...) },
			`media[1].kind: "image"; must come at most once, in the order image, video, audio`,
		},
		{"another track", func(e *T) { e.Media[0].Track = "audio" }, `media[0].track: "audio"; must be a track of the state`},
		{"image format", func(e *T) { e.Media[0].Format = "jpeg" }, `media[0].format: "jpeg"; must be one of png, apng, wav`},
		{"image in two places", func(e *T) { e.Media[0].Data = []byte{1} }, "media[0].data: both; must be exactly one of data and ref"},
		{"image nowhere", func(e *T) { e.Media[0].Ref = nil }, "media[0].data: none; must be exactly one of data and ref"},
		{"empty image", func(e *T) { e.Media[0].Ref.Size = 0 }, "media[0].ref.size: 0; must be between 1 and 68719476736"},
		{"conditioning", func(e *T) { e.Conditioning[0].Name = "" }, `conditioning[0].name: ""; must not be empty`},
		{"policy span", func(e *T) { e.PolicyVersionMax = 4 }, "policy_version_max: 4; must not be below policy_version_min, 5"},
		{"timings", func(e *T) { e.Timings.DenoiseNS = -1 }, "timings.denoise_ns: -1; must not be negative"},
	})
}

func TestReward_Validate(t *testing.T) {
	type R = schemas.Reward
	scored := func() *R { return find[R](t, "reward-scored") }
	faults(t, scored, []fault[R]{
		{"status", func(r *R) { r.Status = "ok" }, `status: "ok"; must be one of scored, failed, pruned`},
		{"scored without a reward", func(r *R) { r.Reward = nil }, "reward: null; must be a number when scored"},
		{"NaN reward", func(r *R) { r.Reward = new(math.NaN()) }, "reward: NaN; must be between -1e+30 and 1e+30"},
		{"scored with an error", func(r *R) { r.Error = "x" }, `error: "x"; must be empty when scored`},
		{"failed with a reward", func(r *R) { r.Status, r.Error = "failed", "x" }, "reward: 0.75; must be null when failed"},
		{"failed without an error", func(r *R) { r.Status, r.Reward = "failed", nil }, `error: ""; must not be empty`},
		{"score without a value", func(r *R) { r.Scores[0].Value = nil }, "scores[0].value: null; must be a number when scored"},
		{"infinite score", func(r *R) { r.Scores[0].Value = new(math.Inf(1)) }, "scores[0].value: +Inf; must be between -1e+30 and 1e+30"},
		{"failed score without an error", func(r *R) { r.Scores[1].Error = "" }, `scores[1].error: ""; must not be empty`},
		{"score name", func(r *R) { r.Scores[1].Name = "" }, `scores[1].name: ""; ` + rewardNameRule},
		{"detail", func(r *R) { r.Scores[0].Detail = strings.Repeat("x", 257) }, "scores[0].detail: 257 bytes; must be at most 256"},
		{"trained steps", func(r *R) { r.TrainedSteps = -1 }, "trained_steps: -1; must be between 0 and 1000"},
		{"group", func(r *R) { r.Group.BatchGroups = -1 }, "group.batch_groups: -1; must be between 0 and 4096\n" +
			`group.advantage.std: "global"; must be group or none without a batch: there is nothing beyond the group`},
	})
}

func TestAdvantage_Validate(t *testing.T) {
	type A = schemas.Advantage
	faults(t, func() *A { return completeAdvantage(t) }, []fault[A]{
		{"status", func(a *A) { a.Status = "ok" }, `status: "ok"; must be one of complete, partial, failed, mixed, stale, filtered, refused, cancelled`},
		{"batch", func(a *A) { a.Batch = "" }, `batch: ""; ` + tokenRule},
		{"too many members", func(a *A) { a.GroupSize = 2 }, "members: 3 items; must be at most group_size, 2\nmembers[2].sample_index: 2; must be between 0 and 1"},
		{"members out of order", func(a *A) { a.Members[0].SampleIndex = 2 }, "members[1].sample_index: 1; must be above the one before it"},
		{"member twice", func(a *A) { a.Members[1].SampleIndex = 0 }, "members[1].sample_index: 0; must be above the one before it"},
		{"member status", func(a *A) { a.Members[2].Status = "" }, `members[2].status: ""; must be one of scored, failed, missing, cancelled, pruned`},
		{"missing with a reward", func(a *A) { a.Members[2].Reward = new(0.0) }, "members[2].reward: 0; must be null unless scored"},
		{"missing with an advantage", func(a *A) { a.Members[2].Advantage = new(0.0) }, "members[2].advantage: 0; must be null unless scored"},
		{"scored without a reward", func(a *A) { a.Members[0].Reward = nil }, "members[0].reward: null; must be a number when scored"},
		{"scored without an advantage", func(a *A) { a.Members[0].Advantage = nil }, ""},
		{"NaN advantage", func(a *A) { a.Members[0].Advantage = new(math.NaN()) }, "members[0].advantage: NaN; must be finite"},
		{"infinite mean", func(a *A) { a.Mean = new(math.Inf(1)) }, "mean: +Inf; must be finite"},
		{"NaN std", func(a *A) { a.Std = new(math.NaN()) }, "std: NaN; must be finite"},
		{"scale", func(a *A) { a.Scale = "" }, `scale: ""; must be one of group, global, none`},
		{"basis", func(a *A) { a.StdBasis = "" }, `std_basis: ""; must be one of sample, expanded, population`},
		{"estimator", func(a *A) { a.Estimator = "" }, `estimator: ""; ` + tokenRule},
		{"epsilon", func(a *A) { a.Epsilon = 2 }, "epsilon: 2; must be between 0 and 1"},
	})
}

func TestBatch_Validate(t *testing.T) {
	type B = schemas.Batch
	faults(t, func() *B { return find[B](t, "batch-closed") }, []fault[B]{
		{"groups", func(b *B) { b.Groups = -1 }, "groups: -1; must be between 0 and 4096"},
		{"status", func(b *B) { b.Status = "open" }, `status: "open"; must be one of complete, short, partial`},
		{"dropped", func(b *B) { b.Dropped = []schemas.UID{"b", "a"} }, `dropped[1]: "a"; must be above the one before it`},
		{"uids out of order", func(b *B) { b.UIDs = []schemas.UID{"b", "a"} }, `uids[1]: "a"; must be above the one before it`},
		{"uid twice", func(b *B) { b.UIDs = []schemas.UID{"a", "a"} }, `uids[1]: "a"; must come at most once`},
		{"uid", func(b *B) { b.UIDs = []schemas.UID{""} }, `uids[0]: ""; ` + tokenRule},
		{"metrics out of order", func(b *B) { b.Metrics[0].Name = "z" }, `metrics[1].name: "critic/rewards/mean"; must be above the one before it`},
		{"metric twice", func(b *B) { b.Metrics[1].Name = b.Metrics[0].Name }, `metrics[1].name: "critic/rewards/max"; must be above the one before it`},
		{"NaN metric", func(b *B) { b.Metrics[1].Value = math.NaN() }, "metrics[1].value: NaN; must be finite"},
		{"samples", func(b *B) { b.Samples = -1 }, "samples: -1; must be between 0 and 4194304"},
	})
}

func TestPolicy_Validate(t *testing.T) {
	type P = schemas.Policy
	faults(t, func() *P { return find[P](t, "policy") }, []fault[P]{
		{"lane", func(p *P) { p.Lane = "" }, `lane: ""; ` + tokenRule},
		{"model", func(p *P) { p.Model = "" }, `model: ""; must not be empty`},
		{"config", func(p *P) { p.SchedulerConfig = []byte("[]") }, "scheduler_config: 2 bytes; must be a JSON object"},
		{"null config", func(p *P) { p.SchedulerConfig = []byte("null") }, "scheduler_config: 4 bytes; must be a JSON object"},
		{"no config", func(p *P) { p.SchedulerConfig = nil }, ""},
		{"channels", func(p *P) { p.LatentChannels = 0 }, "latent_channels: 0; must be between 1 and 65536"},
		{"pixels per token", func(p *P) { p.PixelsPerToken = 0 }, "pixels_per_token: 0; must be between 1 and 1024"},
		{"grid", func(p *P) { p.Grid = "cosine" }, `grid: "cosine"; must be one of linspace, linspace_torch, scheduler, uni_flow, diffusion, pipeline`},
		{"mu", func(p *P) { p.Mu = "cubic" }, `mu: "cubic"; must be one of linear, none, flux2, constant`},
		{"mu without its rule", func(p *P) { p.MuConstant = 0.5 }, "mu_constant: 0.5; must be 0 unless mu is constant"},
		{"mu too large", func(p *P) { p.Mu, p.MuConstant = "constant", 51 }, "mu_constant: 51; must be between -50 and 50"},
		{"max pixels", func(p *P) { p.MaxPixels = 0 }, "max_pixels: 0; must be between 1 and 67108864"},
	})
}

func TestDead_Validate(t *testing.T) {
	type D = schemas.Dead
	faults(t, func() *D { return find[D](t, "dead-refused") }, []fault[D]{
		{"service", func(d *D) { d.Service = "x" }, `service: "x"; must be one of intake, sampler, reward, advantage`},
		{"code", func(d *D) { d.Code = "x" }, `code: "x"; must be one of decode, invalid, unknown_model, unknown_reward, uid_conflict, exhausted, late, failed, too_large, displaced, cancelled, panic`},
		{"reason", func(d *D) { d.Reason = "" }, `reason: ""; must not be empty`},
		{"headers", func(d *D) { d.Headers[0].Name = "" }, `headers[0].name: ""; must not be empty`},
	})
}

func TestReceipt_Validate(t *testing.T) {
	type R = schemas.Receipt
	faults(t, func() *R { return find[R](t, "receipt-accepted") }, []fault[R]{
		{"accepted with an error", func(r *R) { r.Error = "x" }, `code: ""; must be empty, as error, when accepted`},
		{"no samples", func(r *R) { r.Samples = 0 }, "samples: 0; must be between 1 and 1024"},
		{"steps", func(r *R) { r.SDEStepIndices = []int64{10} }, "sde_step_indices[0]: 10; must be between 0 and 9"},
		{"refused without a reason", func(r *R) { r.Accepted = false }, `code: ""; must be one of decode, invalid, unknown_model, unknown_reward, uid_conflict, exhausted, late, failed, too_large, displaced, cancelled, panic` + "\n" + `error: ""; must not be empty`},
	})
}

// What an attacker sends must not come back as a report of a megabyte.
// transitions are what a prompt may ask for, as messages list them.
var transitions = strings.Join(schemas.SDETypes, ", ")

func TestValidate_boundsTheReport(t *testing.T) {
	b := find[schemas.Batch](t, "batch-closed")
	b.Metrics = nil
	for range schemas.MaxMetrics {
		b.Metrics = append(b.Metrics, schemas.Metric{Name: strings.Repeat("*", 100)})
	}
	err := b.Validate()
	if err == nil || len(err.Error()) > 8192 || !strings.HasSuffix(err.Error(), "more faults") {
		t.Errorf("report has %d bytes: ...%s", len(err.Error()), err.Error()[max(0, len(err.Error())-100):])
	}
}

// No zero event is valid but the prompt, which asks for images of no text, and none makes
// Validate panic.
func TestValidate_zero(t *testing.T) {
	for _, e := range schemas.Events() {
		if err := e.Validate(); (err == nil) != (e.Type() == "prompt/1") {
			t.Errorf("zero %s: %v", e.Type(), err)
		}
	}
}

// find returns the sample of that name, fresh.
func find[T any](t testing.TB, name string) *T {
	t.Helper()
	for _, s := range samples(t) {
		if s.name == name {
			if e, ok := any(s.event).(*T); ok {
				return e
			}
		}
	}
	t.Fatalf("no sample %q of type %v", name, reflect.TypeFor[T]())
	return nil
}

func TestControl_Validate(t *testing.T) {
	type C = schemas.Control
	faults(t, func() *C { return find[C](t, "control-cancel") }, []fault[C]{
		{"action", func(c *C) { c.Action, c.UID = "stop", "" }, `action: "stop"; must be one of cancel, pause, resume, prune, status`},
		{"pause of a group", func(c *C) { c.Action = "pause" }, `uid: "p17"; must be absent: only cancel and prune are for a part of a run`},
		{"run", func(c *C) { c.Run = "a.b" }, `run: "a.b"; ` + tokenRule},
		{"uid", func(c *C) { c.UID = "*" }, `uid: "*"; ` + tokenRule},
	})
	faults(t, func() *C { return find[C](t, "control-prune") }, []fault[C]{
		{"no sample", func(c *C) { c.SampleIndex = nil }, "sample_index: null; must be there: prune is for one sample"},
		{"no uid", func(c *C) { c.UID = "" }, `uid: ""; ` + tokenRule},
		{"cancel of a sample", func(c *C) { c.Action = "cancel" }, "sample_index: present; must be absent, as step_index: only prune is for one sample"},
	})
	type R = schemas.ControlReceipt
	faults(t, func() *R { return find[R](t, "control_receipt") }, []fault[R]{
		{"refused without a reason", func(r *R) { r.Accepted, r.Code = false, "invalid" }, `error: ""; must not be empty`},
		{"accepted with a reason", func(r *R) { r.Code = "invalid" }, `code: "invalid"; must be empty, as error, when accepted`},
	})
}

func TestVerdict_Validate(t *testing.T) {
	type V = schemas.Verdict
	faults(t, func() *V { return find[V](t, "verdict") }, []fault[V]{
		{"no value, no reason", func(v *V) { v.Value = nil }, `error: ""; must not be empty`},
		{"value and error", func(v *V) { v.Error = "x" }, `error: "x"; must be empty when there is a value`},
		{"infinite", func(v *V) { v.Value = new(math.Inf(1)) }, "value: +Inf; must be between -1e+30 and 1e+30"},
		{"huge", func(v *V) { v.Value = new(-1e31) }, "value: -1e+31; must be between -1e+30 and 1e+30"},
		{"name", func(v *V) { v.Name = "external:human" }, `name: "external:human"; ` + tokenRule},
		{"sample", func(v *V) { v.SampleIndex = -1 }, "sample_index: -1; must be between 0 and 1023"},
	})
}

// video returns the image and a video of that many frames, in the size of a trajectory.
func video(e *schemas.Trajectory, frames int64) []schemas.Medium {
	m := e.Media[0]
	m.Kind, m.Format, m.Frames, m.FPS = schemas.KindVideo, schemas.VideoAPNG, frames, 8
	return []schemas.Medium{e.Media[0], m}
}

// sound returns two seconds of sound.
func sound() schemas.Medium {
	return schemas.Medium{
		Kind: schemas.KindAudio, Format: schemas.AudioWAV, Samples: 96_000, Channels: 2, Rate: 48_000, Digest: digestOf("samples"),
		Ref: &schemas.Ref{Bucket: schemas.BlobBucket, Digest: digestOf("wav"), Size: 768_058},
	}
}
