package estimator_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/estimator"
	"github.com/meander-rl/meander/schemas"
)

func byName(t testing.TB, list []estimator.Metric) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for i, m := range list {
		if i > 0 && list[i-1].Name >= m.Name {
			t.Errorf("%s is not above %s", m.Name, list[i-1].Name)
		}
		out[m.Name] = m.Value
	}
	return out
}

func wantMetrics(t testing.TB, got map[string]float64, want map[string]float64) {
	t.Helper()
	for name, w := range want {
		if g, ok := got[name]; !ok || math.Abs(g-w) > 1e-9*math.Max(1, math.Abs(w)) {
			t.Errorf("%s = %v (%v), want %v", name, g, ok, w)
		}
	}
}

// The numbers of three groups of 4, advantages by the standard deviation of all.
func TestMetrics(t *testing.T) {
	cfg := config(schemas.StdGlobal, schemas.BasisSample, 1)
	var b estimator.BatchStats
	for g, result := range estimate(t, cfg, exampleB) {
		for i, r := range exampleB[g] {
			b.Samples = append(b.Samples, estimator.SampleStats{
				UID: fmt.Sprint("u", g), Reward: r, Advantage: &result.Advantages[i],
				Scores:          []estimator.Metric{{Name: "ocr", Value: r / 2}},
				GenerateSeconds: -1, ScoreSeconds: -1,
			})
		}
	}
	got := byName(t, estimator.Metrics(b))
	wantMetrics(t, got, map[string]float64{
		"critic/rewards/zero_std_ratio": 1. / 3, "critic/rewards/std_mean": .192386729448,
		"critic/rewards/group_size": 4,
		"critic/rewards/mean":       .666666666667, "critic/rewards/max": 1, "critic/rewards/min": 0,
		"critic/advantages/max": 1.418116312, "critic/advantages/min": -1.418116312, "critic/advantages/mean": 0,
		"critic/returns/max": 1.418116312,
		"critic/ocr/mean":    .333333333333, "perf/total_num_images": 12, "training/off_policy/trajectory_spans/max": 1,
	})
	for name := range got {
		for _, missing := range []string{"timing", "staleness", "global_step", "epoch", "throughput", "agent_loop"} {
			if strings.Contains(name, missing) {
				t.Errorf("%s without its input", name)
			}
		}
	}
	if len(estimator.Metrics(estimator.BatchStats{})) != 0 {
		t.Error("metrics of nothing")
	}
}

func TestMetrics_Times(t *testing.T) {
	b := estimator.BatchStats{
		Seconds: 420, GenerateSeconds: 106, AdvantageSeconds: 0.512, Devices: 4, Step: new(int64(12)),
		Epoch: new(int64(3)),
	}
	lowest, highest := []int64{10, 9, 8}, []int64{10, 10, 9}
	generate, score := []float64{12, 15.5, 14.2}, []float64{1, .5, 4}
	for i := range 512 {
		b.Samples = append(b.Samples, estimator.SampleStats{
			UID: "u", Reward: 1, PolicyMin: lowest[i%3], PolicyMax: highest[i%3], GenerateSeconds: generate[i%3],
			ScoreSeconds: score[i%3],
		})
	}
	wantMetrics(t, byName(t, estimator.Metrics(b)), map[string]float64{
		"timing_s/gen": 106, "timing_per_image_ms/gen": 207.03125, "timing_per_image_ms/adv": 1,
		"perf/throughput": .304761904762, "perf/time_per_step": 420,
		"training/global_step": 12, "training/epoch": 3,
		"training/off_policy/trajectory_spans/max": 2, "training/off_policy/trajectory_spans/min": 1,
		"training/off_policy/trajectory_staleness/min": 1, "training/off_policy/trajectory_staleness/max": 2,
		"training/off_policy/staleness_worst/min": 1, "training/off_policy/staleness_worst/max": 3,
		"agent_loop/slowest/generate_sequences": 14.2, "agent_loop/slowest/compute_score": 4,
		"agent_loop/generate_sequences/max": 15.5, "agent_loop/compute_score/min": .5,
	})
}

// Weights of three samples, and advantages that differ over the steps.
func TestMetrics_Elements(t *testing.T) {
	b := estimator.BatchStats{Columns: 2, Step: new(int64(12))}
	lowest, highest := []int64{10, 9, 8}, []int64{10, 10, 9}
	for i := range 3 {
		a := float64(i)
		b.Samples = append(b.Samples, estimator.SampleStats{
			UID: "u", PolicyMin: lowest[i], PolicyMax: highest[i], Advantage: &a,
			StepAdvantages: []float64{a - 1, a + 1}, GenerateSeconds: 2, ScoreSeconds: -1,
		})
	}
	got := byName(t, estimator.Metrics(b))
	wantMetrics(t, got, map[string]float64{
		"training/off_policy/trajectory_spans/mean": 5. / 3, "training/off_policy/trajectory_staleness/mean": 4. / 3,
		"training/off_policy/staleness_worst/mean": 2,
		"critic/advantages/mean":                   1, "critic/advantages/max": 3, "critic/advantages/min": -1,
		"critic/returns/max":                 3,
		"agent_loop/generate_sequences/mean": 2, "critic/rewards/zero_std_ratio": 1,
	})
	for name := range got {
		if strings.HasPrefix(name, "agent_loop/slowest") || strings.Contains(name, "compute_score") {
			t.Errorf("%s without the times of scoring", name)
		}
	}
}

// The returns of REINFORCE++ are the discounted rewards, not what they are whitened to.
func TestMetrics_Returns(t *testing.T) {
	for gamma, want := range map[float64]map[string]float64{
		1: {
			"critic/returns/mean": .6, "critic/returns/max": 1, "critic/returns/min": .2,
			"critic/advantages/max": .912870905,
		},
		.9: {
			"critic/returns/mean": .542, "critic/returns/max": 1, "critic/returns/min": .162,
			"critic/advantages/max": 1.1434573375,
		},
	} {
		cfg := of(t, "reinforce_plus_plus", func(c *estimator.Config) { c.Columns, c.Gamma = 3, gamma })
		b := estimator.BatchStats{Columns: 3}
		rewards := []float64{1, .2}
		for g, result := range estimate(t, cfg, [][]float64{{1}, {.2}}) {
			s := estimator.SampleStats{
				UID: fmt.Sprint("u", g), Reward: rewards[g], Advantage: &result.Advantages[0],
				Returns: cfg.Returns(rewards[g], cfg.Columns), GenerateSeconds: -1, ScoreSeconds: -1,
			}
			if result.StepAdvantages != nil {
				s.StepAdvantages = result.StepAdvantages[0]
			}
			b.Samples = append(b.Samples, s)
		}
		wantMetrics(t, byName(t, estimator.Metrics(b)), want)
	}
}

// The means of advantages and returns of texts are those over all their tokens.
func TestMetrics_Steps(t *testing.T) {
	b := estimator.BatchStats{Columns: 1}
	for i, steps := range []int{2, 4, 1, 3} {
		b.Samples = append(b.Samples, estimator.SampleStats{
			UID: "u", Reward: float64(i), Advantage: new(float64(i) - 1), Steps: steps, GenerateSeconds: -1,
			ScoreSeconds: -1,
		})
	}
	b.Samples[3].StepAdvantages = []float64{1, 2, 6}
	wantMetrics(t, byName(t, estimator.Metrics(b)), map[string]float64{
		"critic/rewards/mean": 1.5, "critic/advantages/mean": (-2 + 0 + 1 + 9) / 10.0, "critic/advantages/max": 6,
		"critic/advantages/min": -1,
		"critic/returns/mean":   (-2 + 0 + 1 + 9) / 10.0,
	})
}

func TestValidation(t *testing.T) {
	values := []float64{0, .25, .5, 1}
	groups := []estimator.ValidationGroup{
		{Source: "ocr", Variables: []estimator.Variable{
			{Name: "reward", Values: values}, {Name: "acc", Values: []float64{0, 0, 1, 1}},
		}},
		{Source: "ocr", Variables: []estimator.Variable{
			{Name: "reward", Values: []float64{1, 1, 1, 1}}, {Name: "acc", Values: []float64{1, 1, 1, 1}},
		}},
		{Source: "other", Variables: []estimator.Variable{{Name: "reward", Values: []float64{.5}}}},
	}
	got := byName(t, estimator.Validation(groups))
	wantMetrics(t, got, map[string]float64{
		"val-core/ocr/acc/mean@4": .75, "val-aux/ocr/reward/mean@4": (.4375 + 1) / 2,
		"val-aux/ocr/reward/std@4":     math.Sqrt(.13671875) / 2,
		"val-core/other/reward/mean@1": .5,
	})
	// The expected best of n draws with replacement, by counting; 1000 draws leave a
	// standard error of at most 0.5/sqrt(1000) = 0.016 per prompt, of two.
	for _, n := range []int{2, 4} {
		var best, worst float64
		for i, v := range values {
			k, m := float64(i), float64(len(values))
			best += v * (math.Pow((k+1)/m, float64(n)) - math.Pow(k/m, float64(n)))
			worst += v * (math.Pow((m-k)/m, float64(n)) - math.Pow((m-k-1)/m, float64(n)))
		}
		for name, want := range map[string]float64{"best": (best + 1) / 2, "worst": (worst + 1) / 2} {
			if g := got[fmt.Sprintf("val-aux/ocr/reward/%s@%d/mean", name, n)]; math.Abs(g-want) > 4*0.016/2 {
				t.Errorf("%s@%d = %v, want about %v", name, n, g, want)
			}
		}
	}
	again := estimator.Validation(groups)
	if !slices.Equal(again, estimator.Validation(groups)) {
		t.Error("two calls differ")
	}
	var core []string
	for name := range got {
		if strings.Contains(name, "maj@") {
			t.Errorf("%s without answers", name)
		}
		if strings.HasPrefix(name, "val-core/ocr/") {
			core = append(core, strings.TrimPrefix(name, "val-core/ocr/"))
		}
	}
	slices.Sort(core)
	if want := []string{"acc/best@4/mean", "acc/best@4/std", "acc/mean@4"}; !slices.Equal(core, want) {
		t.Errorf("core are %q, want %q", core, want)
	}
}

// Of four samples three say A. All votes of two draws are ties or unanimous: the first
// drawn decides, so the expected value is the mean. Of four draws, A has the majority of
// votes, or half of them and the first draw.
func TestValidation_Majority(t *testing.T) {
	got := byName(t, estimator.Validation([]estimator.ValidationGroup{{
		Source: "ocr", Answers: []string{"A", "B", "A", "A"},
		Variables: []estimator.Variable{
			{Name: "reward", Values: []float64{1, 0, 1, 1}}, {Name: "optional", Values: []float64{1, 0}},
		},
	}}))
	p := 0.75*0.75*0.75*0.75 + 4*0.75*0.75*0.75*0.25 + 3*0.75*0.75*0.25*0.25
	for name, want := range map[string]float64{
		"val-aux/ocr/reward/maj@2/mean": .75, "val-core/ocr/reward/maj@4/mean": p,
	} {
		if g := got[name]; math.Abs(g-want) > 4*math.Sqrt(want*(1-want)/1000) {
			t.Errorf("%s = %v, want about %v", name, g, want)
		}
	}
	if g, mean := got["val-core/ocr/reward/maj@4/std"],
		got["val-core/ocr/reward/maj@4/mean"]; math.Abs(g-math.Sqrt(mean*(1-mean))) > 1e-12 {
		t.Errorf("std %v of values that are 1 in %v of all draws", g, mean)
	}
	for name := range got {
		if strings.Contains(name, "optional/maj") {
			t.Errorf("%s: a vote of samples without values", name)
		}
	}
}
