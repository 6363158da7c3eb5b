package policyloss

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Levels of importance sampling.
const (
	LevelToken    = "token"    // each step by itself
	LevelSequence = "sequence" // the product over the steps of a sample
)

// Correction is importance sampling for samples whose old log-probs differ from the rollout's, because another engine
// computed them or the policy has changed since (verl's rollout correction). A trainer that uses the rollout's
// log-probs as its old ones has the weight in its ratio already, and needs rejections only.
type Correction struct {
	// Level is LevelToken, LevelSequence, or empty for no weights.
	Level string
	// Threshold is an upper bound that truncates weights, such as "2" (TIS), or a band, such as
	// "0.5_2" (IcePop): weights outside of it become 0.
	Threshold string
	// Normalize divides the weights by their mean over the batch.
	Normalize bool
	// Rejections are rules, each with its own Threshold. A rejected sample or step has weight 0,
	// and still counts in the mean of the loss.
	Rejections []Rejection
}

// Rejection is one rule: token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2 or seq_max_k3. k1 to k3 are the
// estimates KLK1 to KLK3 of the rollout's divergence from the trainer. Threshold is the largest estimate that passes.
// For k1 it is a band of ratios such as "0.5_2", or the upper end of one whose lower end is the inverse.
type Rejection struct{ Rule, Threshold string }

// Corrected is the outcome over B samples of W steps.
type Corrected struct {
	// Weights [B][W]; nil without a Level and without rejections.
	Weights [][]float64
	// Metrics have verl's names, without the prefix rollout_corr/. Those of weights are over
	// B*W, after the threshold and before normalisation: mean, min, max, std (population) and
	// eff_sample_size, a share. With LevelSequence, min and max are from before the threshold.
	Metrics map[string]float64
}

// Validate checks the settings of a correction. It returns all faults, joined, each with the name of its field.
func (c Correction) Validate() error {
	var errs []error
	switch c.Level {
	case LevelToken, LevelSequence:
		if _, _, _, err := bounds(c.Threshold); err != nil {
			errs = append(errs, fmt.Errorf("threshold: %w", err))
		}
	case "":
		if c.Threshold != "" {
			errs = append(errs, fmt.Errorf("threshold: %q; must be beside a level: there are no weights without one",
				c.Threshold))
		}
		if c.Normalize {
			errs = append(errs, errors.New("normalize: true; must be beside a level: there are no weights without one"))
		}
	default:
		errs = append(errs, fmt.Errorf("level: %q; must be %s or %s", c.Level, LevelToken, LevelSequence))
	}
	for i, r := range c.Rejections {
		if _, err := r.parse(); err != nil {
			errs = append(errs, fmt.Errorf("rejections[%d]: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// Apply compares the log-probs of the trainer's network (old) with those that the rollout's engine gave, both [B][W]
// for B samples of W steps. It returns metrics of the difference, and the importance weights and rejections that the
// settings ask for. It fails on settings, shapes or numbers that are not valid.
func (c Correction) Apply(old, rollout [][]float64) (*Corrected, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	logs, err := logRatios(old, rollout)
	if err != nil {
		return nil, err
	}
	out := &Corrected{Metrics: differenceMetrics(old, rollout, logs)}
	if c.Level != "" {
		if err := out.setWeights(c, logs); err != nil {
			return nil, err
		}
	}
	if len(c.Rejections) > 0 {
		if err := out.applyRejections(c.Rejections, logs); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// logRatios returns old - rollout, [B][W]. It fails if the shapes differ or a log-prob is not finite.
func logRatios(old, rollout [][]float64) ([][]float64, error) {
	if len(old) == 0 || len(rollout) != len(old) {
		return nil, fmt.Errorf("rollout: %d samples; must be as many as old has, %d, and at least 1", len(rollout),
			len(old))
	}
	logs := make([][]float64, len(old))
	for i := range old {
		if len(old[i]) == 0 || len(old[i]) != len(rollout[i]) || len(old[i]) != len(old[0]) {
			return nil, fmt.Errorf("sample %d has %d and %d steps; must be %d of both, and at least 1", i, len(old[i]),
				len(rollout[i]), len(old[0]))
		}
		for j := range old[i] {
			d := old[i][j] - rollout[i][j]
			if !finite(d) {
				return nil, fmt.Errorf("step %d of sample %d: log-probs %v and %v; must be finite numbers", j, i,
					old[i][j], rollout[i][j])
			}
			logs[i] = append(logs[i], d)
		}
	}
	return logs, nil
}

// setWeights sets the importance weights exp(old - rollout) of each step, or of each whole sample, as c.Level says:
// bounded by the threshold, and normalised where asked. logs are the log-ratios [B][W]. It fails on a bad threshold.
func (out *Corrected) setWeights(c Correction, logs [][]float64) error {
	low, high, band, err := bounds(c.Threshold)
	if err != nil {
		return err
	}
	out.Weights = make([][]float64, len(logs))
	for i, row := range logs {
		if c.Level == LevelSequence {
			row = slices.Repeat([]float64{sum(row)}, len(row))
		}
		for _, d := range row {
			out.Weights[i] = append(out.Weights[i], math.Exp(clampLog(d)))
		}
	}
	total, count := 0.0, 0
	for _, row := range out.Weights {
		for j, w := range row {
			switch {
			case band && (w < low || w > high):
				row[j] = 0
			case !band:
				row[j] = min(w, high)
			}
			total += row[j]
			count++
		}
	}
	out.setWeightMetrics(c.Level, logs)
	if c.Normalize && total > 0 {
		for _, row := range out.Weights {
			for j := range row {
				row[j] /= total / float64(count)
			}
		}
	}
	return nil
}

// setWeightMetrics sets the metrics of the importance weights, before they are normalised; setWeights calls it.
func (out *Corrected) setWeightMetrics(level string, logs [][]float64) {
	all := slices.Concat(out.Weights...)
	n := float64(len(all))
	mean, variance, squares := sum(all)/n, 0.0, 0.0
	for _, w := range all {
		variance += (w - mean) * (w - mean) / n
		squares += w * w / n
	}
	low, high := slices.Min(all), slices.Max(all)
	if level == LevelSequence {
		low, high = math.Inf(1), math.Inf(-1)
		for _, row := range logs {
			low, high = min(low, math.Exp(sum(row))), max(high, math.Exp(min(sum(row), maxLogRatio)))
		}
	}
	m := out.Metrics
	m["rollout_is_mean"], m["rollout_is_min"], m["rollout_is_max"], m["rollout_is_std"] = mean, low, high,
		math.Sqrt(variance)
	m["rollout_is_eff_sample_size"] = 0 // nothing is left
	if squares > 0 {
		mean += 1e-8 // as verl guards its division by the mean
		m["rollout_is_eff_sample_size"] = mean * mean / squares
	}
}

// applyRejections sets the weights of all steps to 0 that any of the rules rejects, and the metric of their share.
// Without weights it begins with 1 for each step. logs are the log-ratios [B][W]. It fails on a rule that does not
// parse.
func (out *Corrected) applyRejections(rejections []Rejection, logs [][]float64) error {
	if out.Weights == nil {
		out.Weights = make([][]float64, len(logs))
		for i := range logs {
			out.Weights[i] = slices.Repeat([]float64{1}, len(logs[i]))
		}
	}
	rejected := make([][]bool, len(logs))
	for i := range logs {
		rejected[i] = make([]bool, len(logs[i]))
	}
	for _, rejection := range rejections {
		r, err := rejection.parse()
		if err != nil {
			return err
		}
		for i, row := range logs {
			for j, x := range r.judgedValues(row) {
				rejected[i][j] = rejected[i][j] || x < r.low || x > r.high
			}
		}
	}
	masked, count := 0, 0
	for i := range rejected {
		for j, is := range rejected[i] {
			count++
			if is {
				masked++
				out.Weights[i][j] = 0
			}
		}
	}
	out.Metrics["rollout_rs_masked_fraction"] = float64(masked) / float64(count)
	return nil
}

// differenceMetrics returns metrics, with verl's names, of how far the log-probs of the trainer and of the rollout's
// engine are apart. logs is old - rollout, all are [B][W].
func differenceMetrics(old, rollout, logs [][]float64) map[string]float64 {
	m := map[string]float64{}
	b, w := float64(len(old)), float64(len(old[0]))
	for i, row := range logs {
		diff := (sum(rollout[i]) - sum(old[i])) / w
		m["training_ppl"] += math.Exp(-sum(old[i])/w) / b
		m["rollout_ppl"] += math.Exp(-sum(rollout[i])/w) / b
		m["log_ppl_diff"] += diff / b
		m["log_ppl_abs_diff"] += math.Abs(diff) / b
		m["ppl_ratio"] += math.Exp(diff) / b
		m["chi2_seq"] += math.Exp(2*clampLog(sum(row))) / b
		for j, d := range row {
			m["kl"] -= d / (b * w)
			m["k3_kl"] += k3(clampLog(d)) / (b * w)
			m["chi2_token"] += math.Exp(2*clampLog(d)) / (b * w)
			m["logprob_abs_diff_mean"] += math.Abs(d) / (b * w)
			m["logprob_abs_diff_max"] = max(m["logprob_abs_diff_max"], math.Abs(d))
			m["logprob_abs_diff/ts_"+strconv.Itoa(j)] += math.Abs(d) / b
		}
	}
	m["chi2_token"]--
	m["chi2_seq"]--
	return m
}

// rule is a parsed Rejection: it rejects estimates outside of low..high.
type rule struct {
	scope     string
	estimate  func(logRatio float64) float64
	low, high float64
}

// parse reads a rejection's rule and threshold into the form that applyRejections computes with. An error lists the
// legal rules, or says what the threshold must be.
func (r Rejection) parse() (rule, error) {
	unknown := fmt.Errorf("rule: %q; must be token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3", r.Rule)
	i := strings.LastIndexByte(r.Rule, '_')
	if i < 0 {
		return rule{}, unknown
	}
	scope, kind := r.Rule[:i], r.Rule[i+1:]
	if !slices.Contains([]string{"token", "seq_sum", "seq_mean", "seq_max"}, scope) || scope == "seq_max" &&
		kind == KLK1 {
		return rule{}, unknown
	}
	low, high, band, err := bounds(r.Threshold)
	if err != nil {
		return rule{}, fmt.Errorf("threshold of %s: %w", r.Rule, err)
	}
	if band && kind != KLK1 {
		return rule{}, fmt.Errorf("threshold of %s: %q; must be one number, a band is for k1", r.Rule, r.Threshold)
	}
	switch kind {
	case KLK1:
		if !(low <= high) {
			return rule{}, fmt.Errorf("threshold of %s: %q; must be a ratio of at least 1, or a band", r.Rule,
				r.Threshold)
		}
		return rule{scope, func(d float64) float64 { return -d }, math.Log(low), math.Log(high)}, nil
	case KLK2:
		return rule{scope, func(d float64) float64 { return d * d / 2 }, 0, high}, nil
	case KLK3:
		return rule{scope, func(d float64) float64 { return k3(d) }, 0, high}, nil
	}
	return rule{}, unknown
}

// judgedValues returns, for each step of a sample, the estimate that the rule compares with its bounds: that of the
// step itself, or one of the whole sample, repeated.
func (r rule) judgedValues(logs []float64) []float64 {
	out := make([]float64, len(logs))
	for j, d := range logs {
		out[j] = r.estimate(clampLog(d))
	}
	var all float64
	switch r.scope {
	case "token":
		return out
	case "seq_sum":
		all = sum(out)
	case "seq_mean":
		all = sum(out) / float64(len(out))
	case "seq_max":
		all = slices.Max(out)
	}
	return slices.Repeat([]float64{all}, len(out))
}

// bounds reads a threshold: one number like "2", whose lower bound is the inverse, or a band like "0.5_2"; band tells
// which. Anything else is an error.
func bounds(s string) (low, high float64, band bool, err error) {
	first, last, band := strings.Cut(s, "_")
	if !band {
		last = first
	}
	high, err = strconv.ParseFloat(last, 64)
	low = 1 / high
	if band && err == nil {
		low, err = strconv.ParseFloat(first, 64)
	}
	if err != nil || !(high > 0) || math.IsInf(high, 1) || band && !(low > 0 && low < high) {
		return 0, 0, false, fmt.Errorf("%q; must be a number above 0, or a band LOW_HIGH", s)
	}
	return low, high, band, nil
}

func clampLog(d float64) float64 { return clamp(d, -maxLogRatio, maxLogRatio) }

func sum(x []float64) float64 {
	total := 0.0
	for _, v := range x {
		total += v
	}
	return total
}
