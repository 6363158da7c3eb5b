package schemas_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// engineSamples are events of texts that a server draws.
func engineSamples(t testing.TB) []sample {
	t.Helper()
	drawn := tokensEvent()
	drawn.Engine, drawn.Logits, drawn.LogSumExps, drawn.Entropies = "sglang 0.5.23", nil, nil, nil
	trajectory := textTrajectory(t)
	x := trajectory.Text
	x.Entropies = nil
	trajectory.Drawn = &schemas.Drawn{
		Engine: schemas.Engine{Name: "sglang", Version: "0.5.23", Values: "tempered"}, Resumed: 1,
		Weights: []schemas.WeightSpan{{Version: "step-3", Begin: 1, End: 2}},
	}
	ordered := textTrajectory(t)
	ordered.Drawn = &schemas.Drawn{Engine: schemas.Engine{
		Name: "vllm", Version: "0.32.0", Values: "logits", Filters: "min_p,top_k,top_p",
	}}
	of := schemas.Engine{Name: "vllm", Version: "0.32.0", Values: "logits"}
	text, image := textTrajectory(t), completedTrajectory(t)
	text.Drawn = &schemas.Drawn{Engine: of}
	of.Values, of.Verify = "", "none"
	image.Drawn = &schemas.Drawn{Engine: of}
	made := completedTrajectory(t)
	made.Drawn = &schemas.Drawn{Engine: schemas.Engine{Name: "sglang-diffusion", Version: "0.5.23", Precision: "fp32"}}
	return []sample{
		{"trajectory-text-drawn", text},
		{"trajectory-drawn", image},
		{"trajectory-made", made},
		{"policy-engine", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "signs", Model: "signs", Family: "qwen-image", WeightsDigest: "served by sglang-diffusion",
			Announced:      1,
			LatentChannels: 64, PixelsPerToken: 16, Height: 64, Width: 128, NumInferenceSteps: 20, TrueCFGScale: 1,
			MaxPixels: 65536,
			Engine:    &schemas.Engine{Name: "sglang-diffusion", Version: "0.5.23", Precision: "fp32"},
		}},
		{"trajectory-text-filters", ordered},
		{"tokens-engine", drawn},
		{"trajectory-text-engine", trajectory},
		{"policy-text-engine", &schemas.Policy{
			Tenant: schemas.TenantMain,
			Lane:   "sums", Model: "sums", Family: "qwen2", WeightsDigest: "served by vllm", Announced: 1,
			Text: &schemas.TextPolicy{Vocabulary: 32, MaxTokens: 64, MaxNewTokens: 16, Temperature: 1, TopP: 1, Engine: &schemas.Engine{Name: "vllm", Version: "0.32.0", Values: "raw"}},
		}},
	}
}

// Numbers are what their names say, whatever a server gives; what it cannot give is refused by name.
func TestEngine_Gives(t *testing.T) {
	t.Parallel()
	all := schemas.TokenNumbers{
		LogProbs: true, ProcessedLogProbs: true, LogSumExps: true, Entropies: true, TopLogProbs: true,
	}
	raw, processed := schemas.TokenNumbers{LogProbs: true, TopLogProbs: true},
		schemas.TokenNumbers{ProcessedLogProbs: true}
	both := schemas.TokenNumbers{LogProbs: true, ProcessedLogProbs: true, TopLogProbs: true}
	type settings struct {
		temperature, topP float64
		form              string
	}
	for _, c := range []struct {
		name, values string
		of           settings
		want         schemas.TokenNumbers
		says         string
	}{
		{"vllm", "logits", settings{0.7, 0.9, "full"}, all, ""},
		{"vllm", "raw", settings{1, 1, "none"}, both, ""},
		{"vllm", "raw", settings{0, 0.9, "none"}, both, ""},
		{"vllm", "raw", settings{0.7, 1, "none"}, raw, ""},
		{"vllm", "raw", settings{1, 1, "topk"}, schemas.TokenNumbers{}, "text.logits.form"},
		{"sglang", "tempered", settings{1, 1, "none"}, both, ""},
		{"sglang", "tempered", settings{1, 0.9, "none"}, raw, ""},
		{"sglang", "tempered", settings{0.7, 1, "none"}, processed, ""},
		{"sglang", "tempered", settings{0.7, 0.9, "none"}, schemas.TokenNumbers{}, "text.temperature: 0.7, with top_k 0, top_p 0.9"},
		{"sglang", "tempered", settings{1, 1, "full"}, schemas.TokenNumbers{}, "without --engine"},
		{"vllm", "processed", settings{0.7, 0.9, "none"}, processed, ""},
		{"vllm", "processed", settings{1, 1, "none"}, both, ""},
	} {
		e := &schemas.Engine{Name: c.name, Values: c.values}
		x := &schemas.TextRequest{
			Temperature: c.of.temperature, TopP: c.of.topP, Vocabulary: 32,
			Logits: &schemas.Logits{Form: c.of.form, K: new(int64(2))},
		}
		got, err := e.Gives(x)
		if c.says == "" && (err != nil || got != c.want) || c.says != "" &&
			(err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s, %s, %+v: %+v, %v; want %+v, %q", c.name, c.values, c.of, got, err, c.want, c.says)
		}
	}
	var none *schemas.Engine
	if got, err := none.Gives(&schemas.TextRequest{}); got != all || err != nil {
		t.Errorf("a sampler gives %+v, %v", got, err)
	}
}

// Who drew a text is a part of what it is, and says which of its numbers there are.
func TestTrajectory_Drawn(t *testing.T) {
	t.Parallel()
	digest := func(e *schemas.Trajectory) [32]byte {
		d, err := schemas.ContentDigest(e)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	e := textTrajectory(t)
	none := digest(e)
	e.Drawn = &schemas.Drawn{Engine: schemas.Engine{Name: "vllm", Values: "raw"}}
	if digest(e) == none {
		t.Error("the digest does not depend on drawn")
	}
	e.Drawn = &schemas.Drawn{Engine: schemas.Engine{Name: "vllm"}}
	if e.Validate() == nil {
		t.Error("a text drawn by a server without values is valid")
	}
}

// Of what a server draws, and of nothing else, numbers may be absent; not all of them.
func TestTokens_EngineNumbers(t *testing.T) {
	t.Parallel()
	e := tokensEvent()
	e.Logits, e.Entropies = nil, nil
	if err := e.Validate(); err == nil || !strings.Contains(err.Error(), "entropies: 0 items") {
		t.Errorf("without a server: %v", err)
	}
	if e.Engine = "vllm"; e.Validate() != nil {
		t.Errorf("with a server: %v", e.Validate())
	}
	e.TopLogProbs = e.TopLogProbs[:1]
	if err := e.Validate(); err == nil || !strings.Contains(err.Error(), "top_log_probs: 1 items") {
		t.Errorf("one of two: %v", err)
	}
	e.TopLogProbs, e.LogProbs, e.ProcessedLogProbs = nil, nil, nil
	if err := e.Validate(); err == nil || !strings.Contains(err.Error(), "log_probs: 0 items; must be there") {
		t.Errorf("none: %v", err)
	}
}

// What a server of images cannot do is refused by name, all of it at once, also what is not known to it.
func TestEngine_Makes(t *testing.T) {
	t.Parallel()
	var samplers *schemas.Engine
	e := &schemas.Engine{Name: "sglang-diffusion", Version: "0.5.23", Precision: "fp32"}
	request := func(change func(r *schemas.Request)) *schemas.Request {
		r := &schemas.Request{Sampling: schemas.Sampling{
			Prompt: "x", SampleSeed: 7, NoiseSeed: 7, Sigmas: []float32{1, 0.5, 0}, Transitions: []string{
				"sde",
				"ode",
			}, NoiseLevel: 0.7,
			Solver: "euler", LogProbKind: "density", LatentsDType: "F32", TrueCFGScale: 4, NegativePrompt: "y",
			Height: 64, Width: 64,
		}}
		change(r)
		return r
	}
	for says, change := range map[string]func(r *schemas.Request){
		"": func(*schemas.Request) {},
		"start: given; must be absent: the lane's images are made by sglang-diffusion 0.5.23": func(r *schemas.Request) {
			r.Start = &schemas.SegmentStart{}
		},
		"stop: given":                    func(r *schemas.Request) { r.Stop = &schemas.SegmentStop{} },
		"step_seeds: given":              func(r *schemas.Request) { r.StepSeeds = []schemas.StepSeed{{}} },
		"scheduled_sampling: given":      func(r *schemas.Request) { r.ScheduledSampling = &schemas.ScheduledSample{} },
		"truncate_prompt: given":         func(r *schemas.Request) { r.TruncatePrompt = true },
		"prompt_2: given":                func(r *schemas.Request) { r.Prompt2 = "z" },
		"prompt_3: given":                func(r *schemas.Request) { r.Prompt3 = "z" },
		"guidance: given":                func(r *schemas.Request) { r.Guidance = 3.5 },
		"frames: given":                  func(r *schemas.Request) { r.Frames = 5 },
		"true_cfg_scale_2: given":        func(r *schemas.Request) { r.TrueCFGScale2 = 3 },
		"guidance_rescale: given":        func(r *schemas.Request) { r.GuidanceRescale = 0.7 },
		"cfg_until: given":               func(r *schemas.Request) { r.CFGUntil = 0.5 },
		"initial_noise: shared; must be": func(r *schemas.Request) { r.NoiseSeed = 8 },
		"prune: given":                   func(r *schemas.Request) { r.Prune = &schemas.Prune{} },
		"checkpoint_every: given":        func(r *schemas.Request) { r.CheckpointStepIndices = []int64{1} },
		"solver: heun; must be euler":    func(r *schemas.Request) { r.Solver = "heun" },
		"log_prob_kind: scaled; must be": func(r *schemas.Request) { r.LogProbKind = "scaled" },
		"latents_dtype: BF16; must be":   func(r *schemas.Request) { r.LatentsDType = "BF16" },
		"sde_type: dance_sde; must be":   func(r *schemas.Request) { r.Transitions[0] = "dance_sde" },
		"transitions: sde, cps; must be": func(r *schemas.Request) { r.Transitions[1] = "cps" },
	} {
		err := e.Makes(request(change))
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%v; want %q", err, says)
		}
		if err := samplers.Makes(request(change)); err != nil {
			t.Errorf("a sampler makes all: %v", err)
		}
	}
	many := e.Makes(request(func(r *schemas.Request) { r.Solver, r.CFGUntil = "heun", 0.5 }))
	if many == nil || strings.Count(many.Error(), "must be") != 2 {
		t.Errorf("%v; want both", many)
	}
}
