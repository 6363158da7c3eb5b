package verify

import (
	"fmt"

	"github.com/meander-rl/meander/schemas"
)

// Report is what was found in a run.
type Report struct {
	Run          schemas.Run `json:"run"`
	Trajectories int         `json:"trajectories"`
	// Failed of the trajectories are of samples that could not be made.
	Failed int `json:"failed"`
	// Missing are those, by lane, whose model is not there to recompute them with.
	Missing []Missing `json:"missing,omitempty"`
	// Steps were recomputed; StepsSkipped are stochastic, but their latents were not kept.
	Steps        int `json:"steps"`
	StepsSkipped int `json:"steps_skipped"`
	// StepsGone are events that trajectories name and that are stored no more, or not whole.
	StepsGone int `json:"steps_gone"`
	// StartsGone of the samples began with states that are stored no more.
	StartsGone int `json:"starts_gone"`
	// Versions of the weights were fetched as policies name them; WeightsGone is the samples, or steps,
	// whose weights are stored no more.
	Versions    int `json:"versions,omitempty"`
	WeightsGone int `json:"weights_gone,omitempty"`
	// Conditionings are the stored tensors of texts that were compared with what the model makes of them,
	// MaxConditioning the largest distance of one, in its lengths; ConditioningGone are stored no more.
	Conditionings    int     `json:"conditionings,omitempty"`
	MaxConditioning  float64 `json:"max_conditioning_distance,omitempty"`
	ConditioningGone int     `json:"conditioning_gone,omitempty"`
	// Rolled are states of scheduled sampling that were rolled again, MaxRolled the largest distance of
	// one from its stored self, in its lengths.
	Rolled    int     `json:"rolled,omitempty"`
	MaxRolled float64 `json:"max_rolled_distance,omitempty"`
	// MaxRatio is the largest |exp(recomputed - stored) - 1| of a log-prob in nats; +Inf where
	// one is no number.
	MaxRatio float64 `json:"max_abs_ratio_minus_1"`
	// Tokens were drawn again, Logits is for how many of them logits are stored, MaxTokenDifference the largest difference of a log-prob,
	// log-sum-exp, entropy or logit from its stored self; +Inf where one is no number.
	Tokens             int     `json:"tokens,omitempty"`
	Logits             int     `json:"logits,omitempty"`
	MaxTokenDifference float64 `json:"max_token_difference,omitempty"`
	// Drawn are tokens that a server drew, DrawnBy: nobody can draw them again. What it says of them was computed with the weights
	// of the folder instead, with other code: MaxDrawnDifference is the largest difference, EngineTolerance what passes.
	Drawn              int      `json:"drawn,omitempty"`
	DrawnBy            []string `json:"drawn_by,omitempty"`
	MaxDrawnDifference float64  `json:"max_drawn_difference,omitempty"`
	EngineTolerance    float64  `json:"engine_tolerance,omitempty"`
	// Mismatches are what is wrong besides, in the order of the trajectories.
	Mismatches []Mismatch `json:"mismatches"`
	// Unproven is why the run counts as not verified although nothing is wrong; empty: it
	// is verified, or something is wrong.
	Unproven string `json:"unproven,omitempty"`
}

// Mismatch is something that does not agree with what a trajectory says of itself.
type Mismatch struct {
	UID         string `json:"uid"` // or the subject of what cannot be read
	SampleIndex int64  `json:"sample_index"`
	StepIndex   int64  `json:"step_index"` // -1: the trajectory as a whole
	What        string `json:"what"`
}

// Missing are trajectories whose model is not there.
type Missing struct {
	Lane schemas.Lane `json:"lane"`
	// Model is its name, WeightsDigest that of the first of the trajectories.
	Model         string `json:"model"`
	WeightsDigest string `json:"weights_digest"`
	Trajectories  int    `json:"trajectories"`
}

func (m Missing) String() string {
	return fmt.Sprintf("lane %s: %d of the samples are of the model %q (weights %.16s), which is not given",
		m.Lane, m.Trajectories, m.Model, m.WeightsDigest)
}

// judge says why nothing, or not all, is proven.
func (r *Report) judge() {
	switch {
	case len(r.Mismatches) > 0, len(r.Missing) > 0:
	case r.StepsGone > 0:
		r.Unproven = fmt.Sprintf("%s gone: removed by age or by hand", events(r.StepsGone))
	case r.StartsGone > 0:
		r.Unproven = fmt.Sprintf("what %d of the samples started with is gone: removed by age or by hand", r.StartsGone)
	case r.WeightsGone > 0:
		r.Unproven = fmt.Sprintf("the weights of %d samples or steps are gone: removed by hand", r.WeightsGone)
	case r.ConditioningGone > 0:
		r.Unproven = fmt.Sprintf("%d of the stored prompt embeddings and masks gone: removed by age or by hand", r.ConditioningGone)
	case r.Steps > 0 || r.Rolled > 0 || r.Tokens > 0 || r.Drawn > 0:
	case r.Failed == r.Trajectories:
		r.Unproven = "nothing was checked: every sample failed"
	case r.StepsSkipped > 0:
		r.Unproven = "nothing was checked: no step has both latents; keep them with --return-steps"
	default:
		r.Unproven = "nothing was checked: no step is stochastic, so there are no log-probs"
	}
}

// OK says whether the run is verified: every log-prob that it has latents for was recomputed,
// at least one, and no ratio is further from 1 than tolerance; and no state of scheduled sampling
// and no stored conditioning is further from the one that was made again. 0 is for the same build, model and backend; more
// is for comparing them. What servers drew has a tolerance of its own.
func (r *Report) OK(tolerance float64) bool { return len(r.Faults(tolerance)) == 0 }

// Faults are why the run is not verified, each in a line; none: it is.
func (r *Report) Faults(tolerance float64) (faults []string) {
	if n := len(r.Mismatches); n > 0 {
		faults = append(faults, fmt.Sprintf("mismatches: %d", n))
	}
	for _, d := range []struct {
		what        string
		value, most float64
		flag        string
	}{
		{"|ratio-1|", r.MaxRatio, tolerance, "--tolerance"},
		{"distance of a rolled state", r.MaxRolled, tolerance, "--tolerance"},
		{"distance of a prompt embedding or mask", r.MaxConditioning, tolerance, "--tolerance"},
		{"difference of a number of a token", r.MaxTokenDifference, tolerance, "--tolerance"},
		{"difference of what the server says of a token", r.MaxDrawnDifference, r.EngineTolerance, "--engine-tolerance"},
	} {
		if !(d.value <= d.most) {
			faults = append(faults, fmt.Sprintf("the largest %s is %g; at most %g passes (%s)", d.what, d.value, d.most, d.flag))
		}
	}
	for _, m := range r.Missing {
		faults = append(faults, m.String())
	}
	if r.Unproven != "" {
		faults = append(faults, r.Unproven)
	}
	return faults
}

func events(n int) string {
	if n == 1 {
		return "1 step event"
	}
	return fmt.Sprintf("%d step events", n)
}
