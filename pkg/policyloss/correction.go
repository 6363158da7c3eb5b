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

// Correction weighs samples whose old log-probs are not those of the rollout, because
// another engine computed them, or the policy moved on (verl's rollout correction).
type Correction struct {
	// Level is LevelToken, LevelSequence, or empty for no weights.
	Level string
	// Threshold is an upper bound that truncates weights, such as "2" (TIS), or a band that
	// sets those outside to 0, such as "0.5_2" (IcePop).
	Threshold string
	// Rejections are rules such as token_k1 or seq_mean_k3, each with its own Threshold: a
	// sample or step they reject has weight 0, and still counts in the mean.
	Rejections []Rejection
}

// Rejection is one rule: token_k1..3, seq_sum_k1..3, seq_mean_k1..3, seq_max_k2 or
// seq_max_k3. Threshold is an upper bound; of k1 a bound or a band of ratios.
type Rejection struct{ Rule, Threshold string }

// Corrected is the outcome over B samples of W steps.
type Corrected struct {
	// Weights [B][W]; nil without a Level and without rejections.
	Weights [][]float64
	// Metrics are named as verl names them, without the prefix rollout_corr/.
	Metrics map[string]float64
}

// Apply compares the log-probs of the trainer with those of the rollout, both [B][W].
func (c Correction) Apply(old, rollout [][]float64) (*Corrected, error) {
	if len(old) == 0 || len(rollout) != len(old) {
		return nil, fmt.Errorf("%d samples of the rollout; want as many as of old, %d, and at least 1", len(rollout), len(old))
	}
	logs := make([][]float64, len(old))
	for i := range old {
		if len(old[i]) == 0 || len(old[i]) != len(rollout[i]) || len(old[i]) != len(old[0]) {
			return nil, fmt.Errorf("sample %d has %d and %d steps; want %d of both", i, len(old[i]), len(rollout[i]), len(old[0]))
		}
		for j := range old[i] {
			logs[i] = append(logs[i], clamp(old[i][j]-rollout[i][j], -maxLogRatio, maxLogRatio))
		}
	}
	out := &Corrected{Metrics: compared(old, rollout, logs)}
	if c.Level != "" {
		low, high, band, err := bounds(c.Threshold)
		if err != nil {
			return nil, fmt.Errorf("threshold: %w", err)
		}
		if out.Weights, err = importance(c.Level, logs); err != nil {
			return nil, err
		}
		for _, row := range out.Weights {
			for j, w := range row {
				switch {
				case band && (w < low || w > high):
					row[j] = 0
				case !band:
					row[j] = min(w, high)
				}
			}
		}
		out.describe(out.Weights)
	}
	if len(c.Rejections) == 0 {
		return out, nil
	}
	if out.Weights == nil {
		out.Weights = make([][]float64, len(logs))
		for i := range logs {
			out.Weights[i] = slices.Repeat([]float64{1}, len(logs[i]))
		}
	}
	rejected, count := 0, 0
	for i := range logs {
		for j := range logs[i] {
			count++
			for _, r := range c.Rejections {
				reject, err := r.rejects(logs[i], j)
				if err != nil {
					return nil, err
				}
				if reject {
					rejected++
					out.Weights[i][j] = 0
					break
				}
			}
		}
	}
	out.Metrics["rollout_rs_masked_fraction"] = float64(rejected) / float64(count)
	return out, nil
}

func importance(level string, logs [][]float64) ([][]float64, error) {
	out := make([][]float64, len(logs))
	for i, row := range logs {
		switch level {
		case LevelToken:
			for _, d := range row {
				out[i] = append(out[i], math.Exp(d))
			}
		case LevelSequence:
			w := math.Exp(clamp(sum(row), -maxLogRatio, maxLogRatio))
			out[i] = slices.Repeat([]float64{w}, len(row))
		default:
			return nil, fmt.Errorf("level = %q: want %s or %s", level, LevelToken, LevelSequence)
		}
	}
	return out, nil
}

func (c *Corrected) describe(weights [][]float64) {
	all := slices.Concat(weights...)
	mean, n := sum(all)/float64(len(all)), float64(len(all))
	variance, squares := 0.0, 0.0
	for _, w := range all {
		variance += (w - mean) * (w - mean)
		squares += w * w
	}
	c.Metrics["rollout_is_mean"], c.Metrics["rollout_is_min"], c.Metrics["rollout_is_max"] = mean, slices.Min(all), slices.Max(all)
	if n > 1 {
		c.Metrics["rollout_is_std"] = math.Sqrt(variance / (n - 1))
	}
	if squares > 0 {
		c.Metrics["rollout_is_eff_sample_size"] = mean * mean * n / squares
	}
}

// compared are the metrics of how far the two engines are apart.
func compared(old, rollout, logs [][]float64) map[string]float64 {
	m := map[string]float64{}
	b, w := float64(len(old)), float64(len(old[0]))
	for i, row := range logs {
		diff := (sum(rollout[i]) - sum(old[i])) / w
		m["training_ppl"] += math.Exp(-sum(old[i])/w) / b
		m["rollout_ppl"] += math.Exp(-sum(rollout[i])/w) / b
		m["log_ppl_diff"] += diff / b
		m["log_ppl_abs_diff"] += math.Abs(diff) / b
		m["ppl_ratio"] += math.Exp(diff) / b
		m["chi2_seq"] += math.Exp(2*sum(row)) / b
		for j, d := range row {
			m["kl"] -= d / (b * w)
			m["k3_kl"] += k3(d) / (b * w)
			m["chi2_token"] += math.Exp(2*d) / (b * w)
			m["logprob_abs_diff_mean"] += math.Abs(d) / (b * w)
			m["logprob_abs_diff_max"] = max(m["logprob_abs_diff_max"], math.Abs(d))
			m["logprob_abs_diff/ts_"+strconv.Itoa(j)] += math.Abs(d) / b
		}
	}
	m["chi2_token"]--
	m["chi2_seq"]--
	return m
}

// rejects says whether the rule rejects step j of a sample.
func (r Rejection) rejects(logs []float64, j int) (bool, error) {
	scope, kind, ok := cutLast(r.Rule)
	value := func(d float64) float64 { return -d } // k1
	switch kind {
	case "k1":
	case "k2":
		value = func(d float64) float64 { return d * d / 2 }
	case "k3":
		value = k3
	default:
		ok = false
	}
	var x float64
	switch scope {
	case "token":
		x = value(logs[j])
	case "seq_sum", "seq_mean":
		for _, d := range logs {
			x += value(d)
		}
		if scope == "seq_mean" {
			x /= float64(len(logs))
		}
	case "seq_max":
		ok = ok && kind != "k1"
		for _, d := range logs {
			x = max(x, value(d))
		}
	default:
		ok = false
	}
	if !ok {
		return false, fmt.Errorf("rule = %q: want token_k1..3, seq_sum_k1..3, seq_mean_k1..3 or seq_max_k2..3", r.Rule)
	}
	low, high, band, err := bounds(r.Threshold)
	if err != nil {
		return false, fmt.Errorf("threshold of %s: %w", r.Rule, err)
	}
	if kind == "k1" { // ratios: -log_ratio within their logarithms
		if !band {
			low = 1 / high
		}
		return x < math.Log(low) || x > math.Log(high), nil
	}
	if band {
		return false, fmt.Errorf("threshold of %s = %q: want one number, a band is for k1", r.Rule, r.Threshold)
	}
	return x > high, nil
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '_')
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}

// bounds reads "2" or "0.5_2".
func bounds(s string) (low, high float64, band bool, err error) {
	first, second, band := strings.Cut(s, "_")
	if band {
		low, err = strconv.ParseFloat(first, 64)
		first = second
	}
	high, err2 := strconv.ParseFloat(first, 64)
	if err = errors.Join(err, err2); err != nil || !(high > 0) || math.IsInf(high, 1) || band && !(low > 0 && low < high) {
		return 0, 0, false, fmt.Errorf("%q: want a number above 0, or a band LOW_HIGH", s)
	}
	return low, high, band, nil
}

func sum(x []float64) float64 {
	total := 0.0
	for _, v := range x {
		total += v
	}
	return total
}
