package policyloss_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/client/policyloss"
)

func near(t *testing.T, name string, got, want, tolerance float64) {
	t.Helper()
	if !(math.Abs(got-want) <= tolerance*math.Max(1, math.Abs(want))) {
		t.Errorf("%s = %.15g, want %.15g", name, got, want)
	}
}

func nearAll(t *testing.T, name string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %v, want %v", name, got, want)
	}
	for i := range want {
		near(t, fmt.Sprint(name, "[", i, "]"), got[i], want[i], tolerance)
	}
}

// Numbers computed in float64 by a plain Python reading of verl-omni's and Flow-GRPO's loss.
func TestPPO(t *testing.T) {
	l, err := policyloss.PPO(policyloss.DefaultConfig(), []float64{-.99995, -1.0003, -.9997, -1.01},
		[]float64{-1, -1, -1, -1}, []float64{1.2, -.8, 6, 0}, nil)
	if err != nil {
		t.Fatal(err)
	}
	nearAll(t, "ratio", l.Ratios, []float64{1.000050001250, .999700044996, 1.000300045005, .990049833749}, 1e-12)
	nearAll(t, "loss", l.Losses, []float64{-1.200060001500, .799920000000, -5.000500000000, 0}, 1e-12)
	near(t, "mean", l.Mean, -1.350160000375, 1e-12)
	near(t, "ppo_kl", l.PPOKL, .0024875, 1e-12)
	near(t, "clipfrac", l.ClipFraction, .75, 0)
	near(t, "higher", l.ClipFractionHigher, .25, 0)
	near(t, "lower", l.ClipFractionLower, .5, 0)
	near(t, "ratio_mean", l.RatioMean, .99752498125, 1e-11)
	near(t, "ratio_std", l.RatioStd, .00498950356, 1e-10)
	near(t, "approx_kl", l.ApproxKL, 1.25228125e-05, 1e-15)

	// The middle step of the sampling example: one sample, advantage 1.5.
	l, err = policyloss.PPO(policyloss.DefaultConfig(), []float64{-0.6657263713449176}, []float64{-0.6515271871029717},
		[]float64{1.5}, nil)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "ratio", l.Ratios[0], 0.9859011487311201, 1e-14)
	near(t, "loss", l.Mean, -1.4788517230966802, 1e-14)
	if weighted, err := policyloss.PPO(policyloss.DefaultConfig(), []float64{0, 0}, []float64{0, 0}, []float64{1, 1},
		[]float64{0.5, 0}); err != nil || weighted.Mean != -0.25 {
		t.Errorf("weighted: %+v, %v", weighted, err)
	}
}

func TestGuard(t *testing.T) {
	m, old := []float64{0.75051, -0.18477, 0.032625, 1.72263}, make([]float64, 4)
	shift := math.Sqrt(2.170035e-05)
	for i := range old {
		old[i] = m[i] - shift
	}
	noise := math.Sqrt(2.170035e-05 / (2 * 7.38107142857155e-05))
	l, err := policyloss.Guard(policyloss.DefaultConfig(), []float64{-0.6657263713449176},
		[]float64{-0.6515271871029717}, []float64{1}, nil, [][]float64{m}, [][]float64{old}, noise, 0.2)
	if err != nil {
		t.Fatal(err)
	}
	near(t, "ratio", l.Ratios[0], 0.9945988887355316, 1e-12)
	near(t, "loss", l.Mean, -0.9945988887355316/0.2, 1e-12)
	kl, err := policyloss.ImageKL([][]float64{m}, [][]float64{old}, []float64{noise})
	if err != nil {
		t.Fatal(err)
	}
	near(t, "exact kl", kl[0], 7.38107142857155e-05, 1e-15)
	if kl, err = policyloss.ImageKL([][]float64{m}, [][]float64{old}, []float64{0.8573214099741122}); err != nil {
		t.Fatal(err)
	}
	near(t, "kl with std_dev_t", kl[0], 1.47621428571431e-05, 1e-15)
}

// The squared scores of the same step under cps have a ratio like any other.
func TestRatios(t *testing.T) {
	r, err := policyloss.Ratios([]float64{-0.18009306394001376}, []float64{-0.17560904890354756})
	if err != nil {
		t.Fatal(err)
	}
	near(t, "ratio", r[0], 0.9955260231495603, 1e-15)
}

func TestImageKL(t *testing.T) {
	means, reference := [][]float64{{.1, .2}, {.3, -.1}}, [][]float64{{.12, .2}, {.25, -.1}}
	kl, err := policyloss.ImageKL(means, reference, []float64{.5, .8})
	if err != nil {
		t.Fatal(err)
	}
	nearAll(t, "kl", kl, []float64{.0004, .0009765625}, 1e-15)
	// With the step's own width, std*sqrt(0.1).
	kl, err = policyloss.ImageKL(means, reference, []float64{.5 * math.Sqrt(.1), .8 * math.Sqrt(.1)})
	if err != nil {
		t.Fatal(err)
	}
	nearAll(t, "kl with dt", kl, []float64{.004, .009765625}, 1e-14)
}

func TestKL(t *testing.T) {
	for kind, want := range map[string]float64{"k1": -.15, "abs": .15, "k2": .01125, "k3": .0118342427283} {
		got, err := policyloss.KL(kind, -1.2, -1.05)
		if err != nil {
			t.Fatal(err)
		}
		near(t, kind, got, want, 1e-13)
	}
	if got, err := policyloss.KL("k3+", -1.2, -1.05); err != nil || math.Abs(got-.0118342427283) > 1e-13 {
		t.Errorf("k3+ = %v, %v", got, err)
	}
	if got, err := policyloss.KL("k3", -100, 0); err != nil || got != 10 {
		t.Errorf("k3 of a ratio beyond bounds = %v, %v", got, err)
	}
	if _, err := policyloss.KL("k4", 0, 0); err == nil || !strings.Contains(err.Error(), `kind: "k4"`) {
		t.Errorf("an unknown kind: error %v", err)
	}
}

var (
	oldLogs     = [][]float64{{-1, -1.1}, {-.9, -1.3}}
	rolloutLogs = [][]float64{{-1.02, -1.05}, {-1.2, -1}}
)

func TestCorrection(t *testing.T) {
	c, err := policyloss.Correction{Level: policyloss.LevelToken, Threshold: "2"}.Apply(oldLogs, rolloutLogs)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]float64{
		"kl": .0075, "k3_kl": .0230269481963, "logprob_abs_diff_mean": .1675, "logprob_abs_diff_max": .3, "log_ppl_diff": .0075, "ppl_ratio": 1.00755653231,
		"chi2_token": .0791446571782, "chi2_seq": -.0291177332079, "logprob_abs_diff/ts_0": .16, "logprob_abs_diff/ts_1": .175,
		"training_ppl": 2.9309085710047986, "rollout_ppl": 2.909636129785249, "log_ppl_abs_diff": .0075,
		"rollout_is_mean": 1.0155269481962976, "rollout_is_min": .7408182206817179, "rollout_is_max": 1.349858807576003,
		"rollout_is_std": .21874568490677648, "rollout_is_eff_sample_size": .9556596476324922,
	} {
		near(t, name, c.Metrics[name], want, 1e-11)
	}
	nearAll(t, "first", c.Weights[0], []float64{1.020201340, .951229425}, 1e-9)
	nearAll(t, "second", c.Weights[1], []float64{1.349858808, .740818221}, 1e-9)
	for _, tt := range []struct {
		name string
		c    policyloss.Correction
		want [][]float64
	}{
		{"sequence", policyloss.Correction{Level: "sequence", Threshold: "2"}, [][]float64{{.970445533548, .970445533548}, {1, 1}}},
		{"truncated", policyloss.Correction{Level: "token", Threshold: "1.01"}, [][]float64{{1.01, .951229425}, {1.01, .740818221}}},
		{"truncated and normalised", policyloss.Correction{Level: "token", Threshold: "1.25", Normalize: true}, [][]float64{{1.029921485333304, .9602924279131275}, {1.2619095919172845, .7478764948362843}}},
		{"nothing left to normalise", policyloss.Correction{Level: "token", Threshold: "3_4", Normalize: true}, [][]float64{{0, 0}, {0, 0}}},
		{"band", policyloss.Correction{Level: "token", Threshold: "0.9_1.1"}, [][]float64{{1.020201340, .951229425}, {0, 0}}},
		{"rejected steps", policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k1", "0.9_1.1"}}}, [][]float64{{1, 1}, {0, 0}}},
		{"wide band of ratios", policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k1", "0.5_2.0"}}}, [][]float64{{1, 1}, {1, 1}}},
		{"bounds of the mean", policyloss.Correction{Rejections: []policyloss.Rejection{{"seq_mean_k1", "0.5_1.0152"}}}, [][]float64{{1, 1}, {1, 1}}},
		{"rejected by either of two", policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k2", "0.01"}, {"seq_sum_k1", "1.02"}}}, [][]float64{{0, 0}, {0, 0}}},
		{"rejected by mean", policyloss.Correction{Rejections: []policyloss.Rejection{{"seq_mean_k1", "1.01"}}}, [][]float64{{0, 0}, {1, 1}}},
		{"rejected by the largest", policyloss.Correction{Rejections: []policyloss.Rejection{{"seq_max_k2", "0.04"}}}, [][]float64{{1, 1}, {0, 0}}},
		{"weighed and rejected", policyloss.Correction{Level: "sequence", Threshold: "2", Rejections: []policyloss.Rejection{{"seq_sum_k3", "0.01"}}}, [][]float64{{.970445533548, .970445533548}, {0, 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := tt.c.Apply(oldLogs, rolloutLogs)
			if err != nil {
				t.Fatal(err)
			}
			for i := range tt.want {
				nearAll(t, "weights", c.Weights[i], tt.want[i], 1e-9)
			}
		})
	}
	// The metrics are of the weights with the threshold applied.
	if c, err = (policyloss.Correction{Level: "token", Threshold: "1.25"}).Apply(oldLogs, rolloutLogs); err != nil {
		t.Fatal(err)
	}
	near(t, "std", c.Metrics["rollout_is_std"], .18173165184177797, 1e-14)
	near(t, "eff_sample_size", c.Metrics["rollout_is_eff_sample_size"], .9674373177280848, 1e-14)
	near(t, "max", c.Metrics["rollout_is_max"], 1.25, 1e-14)
	if c, err := (policyloss.Correction{}).Apply(oldLogs, rolloutLogs); err != nil || c.Weights != nil {
		t.Errorf("no correction: %+v, %v", c, err)
	}
}

func TestRefuses(t *testing.T) {
	one := []float64{0}
	means := [][]float64{{1}}
	ok := policyloss.DefaultConfig()
	for name, tt := range map[string]struct {
		err   error
		fault string
	}{
		"clip":         {second(policyloss.PPO(policyloss.Config{Clip: -1, AdvClipMax: 0}, one, one, one, nil)), "clip: -1"},
		"adv_clip_max": {second(policyloss.PPO(policyloss.Config{}, one, one, one, nil)), "adv_clip_max: 0"},
		"no samples":   {second(policyloss.PPO(ok, nil, nil, nil, nil)), "log_prob: empty"},
		"old":          {second(policyloss.PPO(ok, one, nil, one, nil)), "old: 0 values; must be one per log-prob, 1"},
		"advantages":   {second(policyloss.PPO(ok, one, one, nil, nil)), "advantages: 0 values"},
		"weights":      {second(policyloss.PPO(ok, one, one, one, []float64{})), "weights: 0 values"},
		"no noise":     {second(policyloss.Guard(ok, one, one, one, nil, means, means, 0, 1)), "noise_std, step: 0, 1"},
		"means":        {second(policyloss.Guard(ok, one, one, one, nil, means, [][]float64{{1, 2}}, 1, 1)), "1 and 2 elements"},
		"kl std":       {second(policyloss.ImageKL(means, means, one)), "std[0]: 0"},
		"level":        {second(policyloss.Correction{Level: "batch", Threshold: "2"}.Apply(oldLogs, rolloutLogs)), `level: "batch"`},
		"threshold":    {second(policyloss.Correction{Level: "token", Threshold: "2_1"}.Apply(oldLogs, rolloutLogs)), `threshold: "2_1"`},
		"no level":     {second(policyloss.Correction{Threshold: "2", Normalize: true}.Apply(oldLogs, rolloutLogs)), "threshold: \"2\"; must be beside a level: there are no weights without one\nnormalize: true"},
		"second rule":  {second(policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k1", "1.01"}, {"token_k9", "1"}}}.Apply(oldLogs, rolloutLogs)), `rejections[1]: rule: "token_k9"`},
		"k1 below 1":   {second(policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k1", "0.5"}}}.Apply(oldLogs, rolloutLogs)), "at least 1, or a band"},
		"NaN":          {second(policyloss.PPO(ok, one, []float64{math.NaN()}, one, nil)), "old[0]: NaN"},
		"NaN rollout":  {second(policyloss.Correction{}.Apply([][]float64{{0}}, [][]float64{{math.Inf(1)}})), "step 0 of sample 0: log-probs 0 and +Inf"},
		"NaN means":    {second(policyloss.ImageKL(means, [][]float64{{math.NaN()}}, []float64{1})), "means of sample 0: sum of squares is NaN"},
		"NaN kl":       {second(policyloss.KL("k1", math.NaN(), 0)), "must be finite"},
		"rule":         {second(policyloss.Correction{Rejections: []policyloss.Rejection{{"seq_max_k1", "1"}}}.Apply(oldLogs, rolloutLogs)), `rule: "seq_max_k1"`},
		"band of k3":   {second(policyloss.Correction{Rejections: []policyloss.Rejection{{"token_k3", "0.5_2"}}}.Apply(oldLogs, rolloutLogs)), "a band is for k1"},
		"steps":        {second(policyloss.Correction{}.Apply(oldLogs, [][]float64{{1}, {1, 2}})), "sample 0 has 2 and 1 steps"},
	} {
		if tt.err == nil || !strings.Contains(tt.err.Error(), tt.fault) {
			t.Errorf("%s: error %v, want one about %q", name, tt.err, tt.fault)
		}
	}
}

func second[T any](_ T, err error) error { return err }
