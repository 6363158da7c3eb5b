package schemas

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Engine is a server that draws the samples of a lane in the place of its sampler, from its own generator: drawing
// again, which gives the same sample where a sampler draws, gives another.
type Engine struct {
	// Name is the kind of server: vllm or sglang for texts, sglang-diffusion for images.
	Name string `msgpack:"name" enum:"Engines"`
	// Version is the release that the server says it has.
	Version string `msgpack:"version" size:"0..MaxName"`
	// Values is what it gives of a token: its log-prob before temperature and filters (raw), after temperature and
	// before filters (tempered), after both (processed), or all logits as the model gives them (logits). Empty of
	// images.
	Values string `msgpack:"values" enum:"EngineValues?"`
	// Filters is the order in which it applies filters, and in which processed numbers of its tokens are computed from
	// logits: min_p,top_k,top_p (vllm), where top_p is a share of what the two before leave, and top_k leaves all
	// tokens with the logit of its last; or top_k,top_p,min_p (sglang). Absent: computed in the order of noise.md,
	// which is the second.
	Filters string `msgpack:"filters,omitempty" enum:"FilterOrders?"`
	// Precision is the element type of its network, such as fp32 or bf16, as far as it says it or its numbers show it:
	// numbers that are computed again in another one differ by more. Absent: not known.
	Precision string `msgpack:"precision,omitempty" size:"0..MaxName"`
	// Verify says how closely a sample can be checked: exact (the same bits), tolerance (numbers close to those of the
	// model here) or none (its steps and digests alone).
	Verify string `msgpack:"verify,omitempty" enum:"VerifyModes?" absent:"tolerance"`
}

// Precisions of an Engine that verify knows tolerances of.
const (
	PrecisionFP32 = "fp32"
	PrecisionFP16 = "fp16"
	PrecisionBF16 = "bf16"
)

// Drawn says which server drew a sample.
type Drawn struct {
	// Engine is the server that drew it, as the sampler found it.
	Engine Engine `msgpack:"engine"`
	// Resumed is how often the server's answer broke off, and was gone on with from the tokens there were.
	Resumed int64 `msgpack:"resumed,omitempty" range:"0.." digest:"-"`
	// Unscored is how many of the tokens it drew it gave no log-prob of: vLLM writes -9999.0 for what it has not. Their
	// numbers are NaN, which is null in JSON, and they are in no loss.
	Unscored int64 `msgpack:"unscored,omitempty" range:"0..MaxTokens" digest:"-"`
	// Weights are the versions that the server named, in order. Of tokens that are in none it said nothing.
	Weights []WeightSpan `msgpack:"weights,omitempty" size:"0..MaxTurns" digest:"-"`
}

// VerifyMode returns how exactly a sample that the server drew can be verified, see Verify.
func (e *Engine) VerifyMode() string { return cmp.Or(e.Verify, VerifyTolerance) }

// NoWhole says why the server takes no whole weights, and what to do.
func (e *Engine) NoWhole() string {
	says := e.Name + " takes them with --engine-adapters of its sampler"
	if e.Name == EngineVLLM {
		says += ", if it was started with --enable-scale-out and with VLLM_SERVER_DEV_MODE=1 in its environment"
	}
	return says
}

// WeightSpan is the tokens [begin, end) of a sequence that were drawn with one version of the weights.
type WeightSpan struct {
	// Version is the server's own name of it.
	Version string `msgpack:"version" size:"1..MaxName"`
	// Begin and End are its tokens, [begin, end).
	Begin int64 `msgpack:"begin" range:"0..MaxTokens"`
	End   int64 `msgpack:"end" range:"0..MaxTokens"`
}

// TokenNumbers are those that there are of the tokens of a text; of what a sampler draws there are all.
type TokenNumbers struct{ LogProbs, ProcessedLogProbs, LogSumExps, Entropies, TopLogProbs bool }

// String names the server with its release.
func (e *Engine) String() string {
	if e.Version == "" {
		return e.Name
	}
	return e.Name + " " + e.Version
}

// MinPFirst reports whether min_p is applied before top_k and top_p. A nil Engine is the sampler, whose order is that
// of noise.md.
func (e *Engine) MinPFirst() bool { return e != nil && e.Filters == FiltersMinPFirst }

// FilterOrderOf returns the order in which a kind of server applies filters.
func FilterOrderOf(engine string) string {
	if engine == EngineVLLM {
		return FiltersMinPFirst
	}
	return FiltersMinPLast
}

// The temperatures that vLLM takes, besides 0: it refuses more, and draws with the least in place of less.
const (
	vllmMinTemperature = 0.01
	vllmMaxTemperature = 2
)

// Gives returns which numbers the server gives for the tokens of a text; a nil Engine is the sampler, which gives all,
// and one without Values is not reached yet: it may give all.
// The error names what the request asks for and the server cannot do or give, and what to do.
func (e *Engine) Gives(x *TextRequest) (TokenNumbers, error) {
	all := TokenNumbers{true, true, true, true, true}
	if e == nil {
		return all, nil
	}
	if t := x.Temperature; e.Name == EngineVLLM && (t > vllmMaxTemperature || t > 0 && t < vllmMinTemperature) {
		return TokenNumbers{}, fmt.Errorf("text.temperature: %g; must be 0, or between %g and %d: the lane's "+
			"tokens are drawn "+
			"by %s, which takes no other", t, vllmMinTemperature, vllmMaxTemperature, e)
	}
	if e.Values == EngineLogits || e.Values == "" {
		return all, nil
	}
	if form := x.Logits.form(); form != LogitsNone {
		fix := "start it with --logprobs-mode raw_logits --max-logprobs -1"
		if e.Name == EngineSGLang {
			fix = "serve the model with vllm in its mode raw_logits, or without --engine"
		}
		return TokenNumbers{},
			fmt.Errorf("text.logits.form: %q; must be none: the lane's tokens are drawn by %s, which gives log-probs "+
				"and no logits; for these %s", form, e, fix)
	}
	whole := (x.TopK == 0 || x.TopK >= x.Vocabulary) && x.TopP >= 1 && x.MinP == 0
	cold, plain := x.Temperature == 0, x.Temperature == 1 || x.Temperature == 0
	var n TokenNumbers
	switch e.Values {
	case EngineRaw:
		n.LogProbs, n.ProcessedLogProbs = true, cold || plain && whole
	case EngineTempered:
		n.LogProbs, n.ProcessedLogProbs = plain, cold || whole
	default:
		n.LogProbs, n.ProcessedLogProbs = plain && whole, true
	}
	if !n.LogProbs && !n.ProcessedLogProbs {
		return n,
			fmt.Errorf("text.temperature: %g, with top_k %d, top_p %g, min_p %g; must be 0 or 1, or the others must "+
				"leave all tokens: %s gives log-probs after temperature and before filters, which are neither those "+
				"of "+
				"the model nor those that tokens are drawn with",
				x.Temperature, x.TopK, x.TopP, x.MinP, e)
	}
	n.TopLogProbs = n.LogProbs
	return n, nil
}

// servedFields are the fields of Sampling that a server of images is told, or that Makes checks.
var servedFields = []string{
	"prompt", "negative_prompt", "sample_seed", "noise_seed", "sigmas", "transitions", "noise_level", "solver",
	"log_prob_kind", "latents_dtype", "true_cfg_scale", "height", "width",
}

// Makes returns an error that names all that a request for an image asks for and the server cannot do; a nil Engine is
// the sampler, which can do everything. A setting that is not known here is refused, too.
func (e *Engine) Makes(r *Request) error {
	if e == nil {
		return nil
	}
	var errs []error
	refuse := func(is bool, field, value, must string) {
		if is {
			errs = append(errs, fmt.Errorf("%s: %s; must be %s: the lane's images are made by %s",
				field, value, must, e))
		}
	}
	v := reflect.ValueOf(&r.Sampling).Elem()
	fields := Fields(v.Type())
	for i := range fields {
		f := &fields[i]
		refuse(f.isSet(f.In(v)) && !slices.Contains(servedFields, f.Name), f.Name, "given", "absent")
	}
	refuse(r.NoiseSeed != r.SampleSeed, "initial_noise", NoiseShared, NoisePerSample)
	refuse(r.Prune != nil, "prune", "given", "absent")
	refuse(len(r.Group.JudgedSteps()) > 0, "reward.at_steps", "given", "absent")
	refuse(len(r.CheckpointStepIndices) > 0, "rollout.checkpoint_every", "given", "absent")
	refuse(r.Solver != Solvers[0], "rollout.solver", r.Solver, Solvers[0])
	refuse(r.LogProbKind == LogProbScaled, "rollout.log_prob_kind", r.LogProbKind, LogProbDensity+" or "+LogProbSquared)
	refuse(r.LatentsDType != "F32", "rollout.latents_dtype", r.LatentsDType, "F32")
	var kinds []string
	for _, t := range r.Transitions {
		if TransitionNamed(t).Stochastic && !slices.Contains(kinds, t) {
			kinds = append(kinds, t)
		}
	}
	refuse(len(kinds) > 1, "transitions", strings.Join(kinds, ", "), "ode and one other")
	for _, t := range kinds {
		refuse(!TransitionNamed(t).Served, "rollout.sde_type", t,
			strings.Join(namesOfTransitions(func(t Transition) bool { return t.Served }), ", "))
	}
	return errors.Join(errs...)
}
