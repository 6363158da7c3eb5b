package scheduled_test

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/scheduled"
	"pgregory.net/rapid"
)

type reflexSpec struct {
	Clean      []float64            `json:"clean"`
	Biased     []float64            `json:"biased"`
	Pred       []float64            `json:"pred"`
	Target     []float64            `json:"target"`
	Noisy      []float64            `json:"noisy"`
	X0         []float64            `json:"x0"`
	Exposure   float64              `json:"exposure"`
	Weights    map[string][]float64 `json:"weights"`
	MeanChange float64              `json:"mean_change"`
	ADR        float64              `json:"adr"`
	ADRBeta1   float64              `json:"adr_beta1"`
	Cases      []struct {
		Alpha float64 `json:"alpha"`
		Beta1 float64 `json:"beta1"`
		Beta2 float64 `json:"beta2"`
		FC    float64 `json:"fc"`
		Loss  float64 `json:"loss"`
	} `json:"cases"`
}

func (r reflexSpec) predictions() scheduled.Predictions {
	return scheduled.Predictions{
		Clean: r.Clean, Biased: r.Biased, Pred: r.Pred, Target: r.Target, Noisy: r.Noisy, X0: r.X0,
	}
}

func terms(t *testing.T, r scheduled.ReflexFlow, p scheduled.Predictions) scheduled.Terms {
	t.Helper()
	x, err := r.Terms(p)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestReflexFlow_WorkedNumbers(t *testing.T) {
	s := readSpec(t).ReflexFlow
	for alpha, want := range s.Weights {
		a, err := strconv.ParseFloat(alpha, 64)
		if err != nil {
			t.Fatal(err)
		}
		w := scheduled.ReflexFlow{Alpha: a}.Weights(s.Clean, s.Biased)
		allNear(t, "weights at alpha "+alpha, w, want, 1e-12)
		if a == 1 {
			change := 0.0
			for _, v := range w {
				change += math.Abs(v-1) / float64(len(w))
			}
			near(t, "mean |w - 1|", change, s.MeanChange, 1e-12)
		}
	}
	adr := scheduled.AntiDriftLoss(s.Pred, s.Noisy, s.X0)
	near(t, "adr", adr, s.ADR, 6e-10)
	near(t, "10 adr", 10*adr, s.ADRBeta1, 6e-10)
	for _, c := range s.Cases {
		x := terms(t, scheduled.ReflexFlow{Alpha: c.Alpha, Beta1: c.Beta1, Beta2: c.Beta2}, s.predictions())
		near(t, "loss", x.FC+c.Beta1*x.ADR, c.Loss, 6e-10)
		near(t, "fc", x.FC, c.FC, 6e-10)
		near(t, "exposure", x.Exposure, s.Exposure, 1e-12)
		near(t, "adr", x.ADR, s.ADR, 6e-10)
	}
}

// A sample that did not roll has no weights, but the anti-drift term.
func TestReflexFlow_Still(t *testing.T) {
	s := readSpec(t).ReflexFlow
	still := s.predictions()
	still.Biased = still.Clean
	rolled, other := terms(t, scheduled.DefaultReflexFlow(), s.predictions()),
		terms(t, scheduled.DefaultReflexFlow(), still)
	near(t, "fc of the one that rolled", rolled.FC, 0.031875, 1e-12)
	near(t, "fc of the other", other.FC, 0.025, 1e-12)
	if rolled.ADR != other.ADR || rolled.WeightMin != 0.75 || rolled.WeightMax != 1.5 || other.WeightMin != 1 {
		t.Errorf("%+v, still %+v", rolled, other)
	}
}

func TestReflexFlow_OwnLossAndMask(t *testing.T) {
	s := readSpec(t).ReflexFlow
	plain := terms(t, scheduled.DefaultReflexFlow(), s.predictions())
	p := s.predictions()
	p.Mask = []float64{1, 0, 0, 0}
	masked := terms(t, scheduled.DefaultReflexFlow(), p)
	near(t, "masked fc", masked.FC, 0.04*1.5/4, 1e-12)
	if masked.ADR != plain.ADR {
		t.Error("the anti-drift term is masked")
	}
	p = s.predictions()
	p.Loss = []float64{1, 1, 1, 1}
	near(t, "fc of losses 1", terms(t, scheduled.DefaultReflexFlow(), p).FC, 4.5/4, 1e-12)
	p = s.predictions()
	p.Clean, p.Biased = nil, nil
	bare := terms(t, scheduled.ReflexFlow{Alpha: 1, Beta1: 10, Beta2: 0.5}, p)
	near(t, "fc without predictions", bare.FC, 0.0125, 1e-12)
	if bare.WeightMin != 1 || bare.WeightMax != 1 {
		t.Errorf("without predictions: %+v", bare)
	}
}

func TestReflexFlow_Laws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 30).Draw(t, "n")
		vector := func(name string) []float64 {
			return rapid.SliceOfN(rapid.Float64Range(-10, 10), n, n).Draw(t, name)
		}
		clean, biased, alpha := vector("clean"), vector("biased"), rapid.Float64Range(0, 3).Draw(t, "alpha")
		w := scheduled.ReflexFlow{Alpha: alpha}.Weights(clean, biased)
		change, exposure := 0.0, 0.0
		for i, v := range w {
			if v < 1-alpha-1e-12 || v > 1+alpha+1e-12 {
				t.Fatalf("weight %v at alpha %v", v, alpha)
			}
			change += math.Abs(v-1) / float64(n)
			exposure += math.Abs(clean[i] - biased[i])
		}
		if exposure > 1e-3 && math.Abs(change-alpha/float64(n)) > 1e-9 {
			t.Fatalf("mean |w - 1| = %v, want alpha/D = %v", change, alpha/float64(n))
		}
		pred, noisy, x0 := vector("pred"), vector("noisy"), vector("x0")
		adr := scheduled.AntiDriftLoss(pred, noisy, x0)
		if !(adr >= 0 && adr <= 4+1e-9) {
			t.Fatalf("adr %v", adr)
		}
		dot, a, b := 0.0, 0.0, 0.0
		for i, p := range pred {
			d := noisy[i] - x0[i]
			dot, a, b = dot+p*d, a+p*p, b+d*d
		}
		if a > 1e-6 && b > 1e-6 && math.Abs(adr-(2-2*dot/math.Sqrt(a*b))) > 1e-9 {
			t.Fatalf("adr %v, 2 - 2 cos is %v", adr, 2-2*dot/math.Sqrt(a*b))
		}
	})
	// At the size of a latent the weight hardly moves the loss.
	clean := make([]float64, 65536)
	for i := range clean {
		clean[i] = math.Sin(float64(i))
	}
	change := 0.0
	for _, v := range scheduled.DefaultReflexFlow().Weights(clean, make([]float64, len(clean))) {
		change += math.Abs(v-1) / float64(len(clean))
	}
	near(t, "mean |w - 1|", change, 1.52587890625e-05, 1e-14)
	near(t, "opposite directions", scheduled.AntiDriftLoss([]float64{1, 0}, []float64{0, 0}, []float64{2, 0}), 4, 1e-12)
	near(t, "no prediction", scheduled.AntiDriftLoss([]float64{0, 0}, []float64{0, 3}, []float64{0, 0}), 1, 1e-12)
}

func TestReflexFlow_Refuses(t *testing.T) {
	s := readSpec(t).ReflexFlow
	for want, spoil := range map[string]func(*scheduled.Predictions){
		"clean, biased:":     func(p *scheduled.Predictions) { p.Biased = nil },
		"pred: no elements":  func(p *scheduled.Predictions) { p.Pred = nil },
		"x0: 0 elements":     func(p *scheduled.Predictions) { p.X0 = nil },
		"biased: 3 elements": func(p *scheduled.Predictions) { p.Biased = p.Biased[:3] },
		"mask: 0 elements":   func(p *scheduled.Predictions) { p.Mask = []float64{} },
		"target[2]":          func(p *scheduled.Predictions) { p.Target = slices.Clone(p.Target); p.Target[2] = math.NaN() },
		"loss[0]: +Inf":      func(p *scheduled.Predictions) { p.Loss = []float64{math.Inf(1), 0, 0, 0} },
	} {
		p := s.predictions()
		spoil(&p)
		if _, err := scheduled.DefaultReflexFlow().Terms(p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
