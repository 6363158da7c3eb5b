package verify

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"

	"github.com/meander-rl/meander/schemas"
)

// Report is the result of Run.
type Report struct {
	Run          schemas.Run `json:"run"`
	Trajectories int         `json:"trajectories"`
	// Failed counts the trajectories of samples that were not completed: what could not be made, and what was pruned.
	Failed int `json:"failed"`
	// Said counts what interactions said as stages of samples: no model computes it again.
	Said int `json:"said,omitempty"`
	// Requests counts the requests of stages that follow from the record of their group and from what was made before.
	// StagesGone counts those that cannot be made again, as one of these is no longer stored; the first is StageGone.
	Requests   int    `json:"requests,omitempty"`
	StagesGone int    `json:"stages_gone,omitempty"`
	StageGone  string `json:"stage_gone,omitempty"`
	// Missing are the trajectories, by lane, whose model is not there to recompute them.
	Missing []Missing `json:"missing,omitempty"`
	// Steps counts recomputed log-probs; StepsSkipped stochastic steps whose latents were not kept.
	Steps        int `json:"steps"`
	StepsSkipped int `json:"steps_skipped"`
	// Predictions counts those of samples in the middle that functions judged, made again.
	Predictions int `json:"predictions,omitempty"`
	// StepsGone counts events that trajectories name and that are no longer stored, or not completely.
	StepsGone int `json:"steps_gone"`
	// StepsFreed counts those of StepsGone that were freed because all had read them: their prompt said so.
	StepsFreed int `json:"steps_freed,omitempty"`
	// StartsGone counts samples that began with states that are no longer stored.
	StartsGone int `json:"starts_gone"`
	// Versions counts the versions of weights that were fetched by their policies; WeightsGone the samples, or steps,
	// whose weights are no longer stored.
	Versions    int `json:"versions,omitempty"`
	WeightsGone int `json:"weights_gone,omitempty"`
	// Conditionings counts stored tensors of encoded prompts that were compared with those that the model makes.
	// MaxConditioning is the largest relative distance of one (see distance); ConditioningGone are no longer stored.
	Conditionings    int        `json:"conditionings,omitempty"`
	MaxConditioning  Difference `json:"max_conditioning_distance,omitempty"`
	ConditioningGone int        `json:"conditioning_gone,omitempty"`
	// Rolled counts states of scheduled sampling, and of samples without a stochastic step, that were computed again
	// from the start. MaxRolled is the largest relative distance of one from what is stored.
	Rolled    int        `json:"rolled,omitempty"`
	MaxRolled Difference `json:"max_rolled_distance,omitempty"`
	// MaxRatio is the largest |exp(recomputed - stored) - 1| of a log-prob in nats; +Inf if one is not a number.
	MaxRatio Difference `json:"max_abs_ratio_minus_1"`
	// Tolerance is the largest that the card of a model allows, for a model that does not give the same bits again.
	Tolerance float64 `json:"tolerance,omitempty"`
	// Tokens counts the tokens that were drawn again, Logits those of them with stored logits. MaxTokenDifference is
	// the largest difference of a log-prob, log-sum-exp, entropy or logit from what is stored; +Inf if one is not a
	// number.
	Tokens             int        `json:"tokens,omitempty"`
	Logits             int        `json:"logits,omitempty"`
	MaxTokenDifference Difference `json:"max_token_difference,omitempty"`
	// Drawn are tokens that a server drew: they cannot be drawn again. DrawnBy are the servers of tokens and steps.
	// What they say was computed with the weights of the folder instead, with other code: MaxDrawnDifference is the
	// largest difference of a number of a token, |ratio-1| of a step, or relative distance of a state or an encoded
	// text, EngineTolerance the most that passes. Deviations counts the numbers that are further off, Worst is the one
	// that is furthest. States counts the states of images that were made again.
	Drawn              int        `json:"drawn,omitempty"`
	DrawnBy            []string   `json:"drawn_by,omitempty"`
	States             int        `json:"states,omitempty"`
	MaxDrawnDifference Difference `json:"max_drawn_difference,omitempty"`
	// Unscored counts the numbers of tokens that such a server did not give: nothing is compared with them.
	Unscored        int        `json:"unscored,omitempty"`
	EngineTolerance float64    `json:"engine_tolerance,omitempty"`
	Deviations      int        `json:"deviations,omitempty"`
	Worst           *Deviation `json:"worst,omitempty"`
	// NotComputed counts samples of servers of which only the digests can be checked (schemas.VerifyNone).
	NotComputed int `json:"not_computed,omitempty"`
	// Mismatches are all other differences, in the order of the trajectories.
	Mismatches []Mismatch `json:"mismatches"`
	// Unproven is why the run counts as not verified although nothing is wrong. Empty: it is verified, or something is
	// wrong.
	Unproven string `json:"unproven,omitempty"`
}

// Difference is a distance between stored and recomputed numbers. In JSON a value that is not finite is a string, "NaN"
// or "+Inf".
type Difference float64

// MarshalJSON returns the number, or a string if it is not finite.
func (d Difference) MarshalJSON() ([]byte, error) {
	if x := float64(d); math.IsNaN(x) || math.IsInf(x, 0) {
		return json.Marshal(fmt.Sprint(x))
	}
	return json.Marshal(float64(d))
}

// Mismatch is a difference between what is stored and what was computed, or between a trajectory and its events.
type Mismatch struct {
	UID         string `json:"uid"` // or the subject of what cannot be read
	SampleIndex int64  `json:"sample_index"`
	// Stage is the one of several that the sample has; empty: it has one.
	Stage     schemas.Stage `json:"stage,omitempty"`
	StepIndex int64         `json:"step_index"` // -1: the trajectory as a whole
	What      string        `json:"what"`
}

// addFault adds a difference, of a step or of the whole trajectory (-1).
func (r *Report) addFault(of *schemas.Identity, step int64, what string) {
	m := Mismatch{UID: string(of.UID), SampleIndex: of.SampleIndex, StepIndex: step, What: what}
	if of.Stage != schemas.StageMain {
		m.Stage = of.Stage
	}
	r.Mismatches = append(r.Mismatches, m)
}

// addStageGone counts stages whose requests cannot be made again, for a reason.
func (r *Report) addStageGone(n int, why string) {
	r.StagesGone, r.StageGone = r.StagesGone+n, cmp.Or(r.StageGone, why)
}

// Missing counts the trajectories of a lane whose model is not there.
type Missing struct {
	Lane schemas.Lane `json:"lane"`
	// Model is the model's name, Source that of its policy, WeightsDigest the one of the first of the trajectories.
	Model         string `json:"model"`
	Source        string `json:"source,omitempty"`
	WeightsDigest string `json:"weights_digest"`
	Trajectories  int    `json:"trajectories"`
}

func (m Missing) String() string {
	return fmt.Sprintf("lane %s: %d of the samples are of the model %q (weights %.16s), which is not given",
		m.Lane, m.Trajectories, m.Model, m.WeightsDigest)
}

// setUnproven sets Unproven if something is gone, or if nothing could be checked. It runs after the last trajectory.
func (r *Report) setUnproven() {
	switch {
	case len(r.Mismatches) > 0, len(r.Missing) > 0:
	case r.StepsFreed > 0:
		r.Unproven = fmt.Sprintf("%s gone, %d of them %s", events(r.StepsGone), r.StepsFreed,
			(&schemas.Group{FreeReadSteps: true}).WhyStepsGone())
	case r.StepsGone > 0:
		r.Unproven = fmt.Sprintf("%s gone: %s", events(r.StepsGone), (&schemas.Group{}).WhyStepsGone())
	case r.StagesGone > 0:
		r.Unproven = fmt.Sprintf("the requests of %d stages cannot be made again: %s", r.StagesGone, r.StageGone)
	case r.StartsGone > 0:
		r.Unproven = fmt.Sprintf("what %d of the samples started with is gone: removed by age or by hand", r.StartsGone)
	case r.WeightsGone > 0:
		r.Unproven = fmt.Sprintf("the weights of %d samples or steps are gone: removed by hand", r.WeightsGone)
	case r.ConditioningGone > 0:
		r.Unproven = fmt.Sprintf("%d of the stored prompt embeddings and masks gone: removed by age or by hand",
			r.ConditioningGone)
	case r.Steps > 0 || r.States > 0 || r.Predictions > 0 || r.Rolled > 0 || r.Tokens > 0 || r.Drawn > 0:
	case r.NotComputed > 0:
		r.Unproven = fmt.Sprintf("%d of the samples are from a server, and cannot be computed again: their digests "+
			"alone were checked", r.NotComputed)
	case r.Failed == r.Trajectories:
		r.Unproven = "nothing was checked: no sample was completed"
	case r.StepsSkipped > 0:
		r.Unproven = "nothing was checked: no step has both latents; keep them with --return-steps"
	default:
		r.Unproven = "nothing was checked: no step is stochastic, and no state is stored; keep the last one with " +
			"--return-steps"
	}
}

// OK reports whether the run is verified: every log-prob whose latents are stored was recomputed, at least one, and no
// ratio is further from 1 than tolerance, or than the card of the model allows. The same limit holds for states of
// scheduled sampling and for stored conditionings. Use 0 for the same build, model and backend, and more to compare
// different ones. Tokens that servers drew have a tolerance of their own.
func (r *Report) OK(tolerance float64) bool { return len(r.Faults(tolerance)) == 0 }

// Faults returns why the run is not verified, one line for each reason; none if it is verified. tolerance is the
// largest difference that passes where the model itself allows none.
func (r *Report) Faults(tolerance float64) (faults []string) {
	if n := len(r.Mismatches); n > 0 {
		faults = append(faults, fmt.Sprintf("mismatches: %d", n))
	}
	passes := Difference(max(tolerance, r.Tolerance))
	for _, d := range []struct {
		what        string
		value, most Difference
		flag        string
	}{
		{"|ratio-1|", r.MaxRatio, passes, "--tolerance"},
		{"distance of a state computed again", r.MaxRolled, passes, "--tolerance"},
		{"distance of a prompt embedding or mask", r.MaxConditioning, passes, "--tolerance"},
		{"difference of a number of a token", r.MaxTokenDifference, Difference(tolerance), "--tolerance"},
	} {
		if !(d.value <= d.most) {
			faults = append(faults, fmt.Sprintf("the largest %s is %g; at most %g passes (%s)", d.what, d.value, d.most,
				d.flag))
		}
	}
	if r.Worst != nil {
		faults = append(faults, fmt.Sprintf("%d numbers of the server are further off than passes, most of all %s",
			r.Deviations, r.Worst))
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
