package policyloss_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/client/policyloss"
)

// testdata/verl.json is made by deploy/golden/make_verl_golden.py from the functions of verl
// and verl-omni themselves, in float64; it says which. The Python client's tests read it too.
type verlGolden struct {
	PPO        []lossCase
	Guard      []lossCase    `json:"grpo_guard"`
	ImageKL    []imageKLCase `json:"image_kl"`
	KL         []klCase
	Correction []correctionCase
}

type lossCase struct {
	LogProb                  []float64 `json:"log_prob"`
	Old, Advantages, Weights []float64
	Clip                     float64
	AdvClipMax               float64       `json:"adv_clip_max"`
	Mean                     [][][]float64 // [B][S][C]
	OldMean                  [][][]float64 `json:"old_mean"`
	StdDevT                  float64       `json:"std_dev_t"`
	Step                     float64
	Want                     struct {
		Loss     float64
		Losses   []float64
		PPOKL    float64 `json:"ppo_kl"`
		ClipFrac float64 `json:"pg_clipfrac"`
		Higher   float64 `json:"pg_clipfrac_higher"`
		Lower    float64 `json:"pg_clipfrac_lower"`
		Mean     float64 `json:"ratio_mean"`
		Std      float64 `json:"ratio_std"`
	}
}

type imageKLCase struct {
	Mean, Reference, Std [][][]float64
	Want                 struct {
		Mean float64
		KL   []float64
	}
}

type klCase struct {
	Kind      string
	LogProb   []float64 `json:"log_prob"`
	Reference []float64
	Want      []float64
}

type correctionCase struct {
	Old, Rollout     [][]float64
	Level, Threshold string
	Normalize        bool
	Rejections       [][2]string
	Want             [][]float64
	Metrics          map[string]float64
}

// readExamples reads a file of worked examples.
func readExamples(t *testing.T, file string, into any) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func golden(t *testing.T) (g verlGolden) {
	t.Helper()
	readExamples(t, "testdata/verl.json", &g)
	if len(g.PPO) == 0 || len(g.Guard) == 0 || len(g.ImageKL) == 0 || len(g.KL) == 0 || len(g.Correction) == 0 {
		t.Fatal("testdata/verl.json: a section is empty")
	}
	return g
}

// flat is [B][S][C] as [B][S*C].
func flat(means [][][]float64) [][]float64 {
	out := make([][]float64, len(means))
	for i := range means {
		out[i] = slices.Concat(means[i]...)
	}
	return out
}

// Sums run in another order there: a few ulps of the largest term.
const verlTolerance = 1e-12

func TestVerl_Losses(t *testing.T) {
	g := golden(t)
	check := func(t *testing.T, c lossCase, l *policyloss.Loss, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		nearAll(t, "losses", l.Losses, c.Want.Losses, verlTolerance)
		near(t, "loss", l.Mean, c.Want.Loss, verlTolerance)
		near(t, "ppo_kl", l.PPOKL, c.Want.PPOKL, verlTolerance)
		near(t, "pg_clipfrac", l.ClipFraction, c.Want.ClipFrac, 1e-7) // shares are float32 there
		near(t, "pg_clipfrac_higher", l.ClipFractionHigher, c.Want.Higher, 1e-7)
		near(t, "pg_clipfrac_lower", l.ClipFractionLower, c.Want.Lower, 1e-7)
		near(t, "ratio_mean", l.RatioMean, c.Want.Mean, verlTolerance)
		near(t, "ratio_std", l.RatioStd, c.Want.Std, verlTolerance)
	}
	for i, c := range g.PPO {
		t.Run(fmt.Sprint("ppo ", i), func(t *testing.T) {
			l, err := policyloss.PPO(policyloss.Config{Clip: c.Clip, AdvClipMax: c.AdvClipMax}, c.LogProb, c.Old,
				c.Advantages, c.Weights)
			check(t, c, l, err)
		})
	}
	for i, c := range g.Guard {
		t.Run(fmt.Sprint("grpo_guard ", i), func(t *testing.T) {
			l, err := policyloss.Guard(policyloss.Config{Clip: c.Clip, AdvClipMax: c.AdvClipMax}, c.LogProb, c.Old,
				c.Advantages, c.Weights,
				flat(c.Mean), flat(c.OldMean), c.StdDevT*math.Sqrt(c.Step), c.Step)
			check(t, c, l, err)
		})
	}
}

func TestVerl_KL(t *testing.T) {
	g := golden(t)
	for i, c := range g.ImageKL {
		std := make([]float64, len(c.Std))
		for i := range std {
			std[i] = c.Std[i][0][0]
		}
		got, err := policyloss.ImageKL(flat(c.Mean), flat(c.Reference), std)
		if err != nil {
			t.Fatal(err)
		}
		nearAll(t, fmt.Sprint("image_kl ", i), got, c.Want.KL, verlTolerance)
	}
	for _, c := range g.KL {
		for i, want := range c.Want {
			got, err := policyloss.KL(c.Kind, c.LogProb[i], c.Reference[i])
			if err != nil {
				t.Fatal(err)
			}
			near(t, fmt.Sprintf("%s of %v, %v", c.Kind, c.LogProb[i], c.Reference[i]), got, want, verlTolerance)
		}
	}
}

func TestVerl_Correction(t *testing.T) {
	for i, c := range golden(t).Correction {
		t.Run(fmt.Sprint(i, " ", c.Level, " ", c.Threshold, " ", c.Rejections), func(t *testing.T) {
			correction := policyloss.Correction{Level: c.Level, Threshold: c.Threshold, Normalize: c.Normalize}
			for _, r := range c.Rejections {
				correction.Rejections = append(correction.Rejections, policyloss.Rejection{Rule: r[0], Threshold: r[1]})
			}
			got, err := correction.Apply(c.Old, c.Rollout)
			if err != nil {
				t.Fatal(err)
			}
			for i := range c.Want {
				nearAll(t, "weights", got.Weights[i], c.Want[i], verlTolerance)
			}
			for name, want := range c.Metrics {
				tolerance := 1e-11 // means of perplexities and squares
				if name == "rollout_is_std" {
					tolerance = 1e-7 // the root of a difference of squares there
				}
				near(t, name, got.Metrics[name], want, tolerance)
			}
		})
	}
}
