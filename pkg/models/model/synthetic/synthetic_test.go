package synthetic_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
)

var _ model.Model = (*synthetic.Model)(nil)

func TestModel_Card(t *testing.T) {
	m := synthetic.New()
	card := m.Card()
	if len(card.WeightsDigest) != 64 {
		t.Errorf("weights digest %q: want 64 hex digits", card.WeightsDigest)
	}
	var config struct {
		Dynamic  bool    `json:"use_dynamic_shifting"`
		MaxShift float64 `json:"max_shift"`
		MaxLen   int     `json:"max_image_seq_len"`
		Terminal float64 `json:"shift_terminal"`
	}
	if err := json.Unmarshal(card.SchedulerConfig, &config); err != nil {
		t.Fatal(err)
	}
	// The constants of Qwen-Image's scheduler_config.json.
	if !config.Dynamic || config.MaxShift != 0.9 || config.MaxLen != 8192 || config.Terminal != 0.02 {
		t.Errorf("scheduler config %+v", config)
	}
	clear(card.SchedulerConfig)
	if err := json.Unmarshal(m.Card().SchedulerConfig, &config); err != nil {
		t.Errorf("a caller's change reached the model: %v", err)
	}
	other := synthetic.NewWith(synthetic.Config{Components: 1, MinStd: 0.5, MaxStd: 0.5})
	if other.Card().WeightsDigest == card.WeightsDigest {
		t.Error("another configuration has the same weights digest")
	}
}

// The velocity against E[eps - x0 | x] summed component by component from the
// definition, with responsibilities from densities rather than their logarithms: in
// few dimensions and near the data they do not underflow.
func TestMixture_Velocity(t *testing.T) {
	mix := &synthetic.Mixture{
		Weights: []float64{0.2, 0.5, 0.3},
		Means:   [][]float32{{1, -0.5, 0.25}, {-1, 0.75, 0.5}, {0.5, 0.5, -1}},
		Stds:    []float64{0.3, 0.6, 0.9},
	}
	rng := rand.New(rand.NewPCG(1, 2))
	got := make([]float32, 3)
	for _, sigma := range []float64{0, 0.05, 0.3, 0.5, 0.8, 0.999, 1} {
		for range 20 {
			x := normals(rng, 3)
			mix.Velocity(got, x, sigma)
			want := naiveVelocity(mix, x, sigma)
			for i := range got {
				if math.Abs(float64(got[i])-want[i]) > 1e-6*(1+math.Abs(want[i])) {
					t.Fatalf("sigma %v, x %v: velocity %v, want %v", sigma, x, got, want)
				}
			}
		}
	}
}

func naiveVelocity(mix *synthetic.Mixture, x []float32, sigma float64) []float64 {
	a := 1 - sigma
	v := make([]float64, len(x))
	var total float64
	for k, w := range mix.Weights {
		variance := a*a*mix.Stds[k]*mix.Stds[k] + sigma*sigma
		density := w
		for i, xi := range x {
			d := float64(xi) - a*float64(mix.Means[k][i])
			density *= math.Exp(-d*d/(2*variance)) / math.Sqrt(2*math.Pi*variance)
		}
		total += density
		for i, xi := range x {
			d := float64(xi) - a*float64(mix.Means[k][i])
			x0 := float64(mix.Means[k][i]) + a*mix.Stds[k]*mix.Stds[k]/variance*d
			eps := sigma / variance * d
			v[i] += density * (eps - x0)
		}
	}
	for i := range v {
		v[i] /= total
	}
	return v
}

// With one centred component the field is the linear one of a Gaussian,
// v = x*(sigma - (1-sigma)*s^2)/((1-sigma)^2*s^2 + sigma^2).
func TestModel_VelocityOfGaussian(t *testing.T) {
	const s = 0.5
	m := synthetic.NewWith(synthetic.Config{Components: 1, MinStd: s, MaxStd: s, Contrast: 0})
	x := normals(rand.New(rand.NewPCG(3, 4)), 4*64)
	for _, sigma := range []float32{0, 0.2, 0.6, 1} {
		got := velocity(t, m, x, sigma, "any", 32, 32)
		sg := float64(sigma)
		c := (sg - (1-sg)*s*s) / ((1-sg)*(1-sg)*s*s + sg*sg)
		for i := range x {
			if want := float64(x[i]) * c; math.Abs(float64(got[i])-want) > 1e-6*(1+math.Abs(want)) {
				t.Fatalf("sigma %v: velocity of %v is %v, want %v", sigma, x[i], got[i], want)
			}
		}
	}
}

// Far from every component, and in many dimensions, densities underflow; the
// responsibilities must still be a distribution and the velocity finite.
func TestMixture_FarAway(t *testing.T) {
	m := synthetic.New()
	mix := mixture(t, m, "far", 256, 256)
	x := make([]float32, len(mix.Means[0]))
	for i := range x {
		x[i] = 1e4
	}
	r := make([]float64, len(mix.Weights))
	for _, sigma := range []float64{0, 0.01, 0.5, 1} {
		mix.Responsibilities(r, x, sigma)
		var total float64
		for _, p := range r {
			if !(p >= 0) {
				t.Fatalf("sigma %v: responsibilities %v", sigma, r)
			}
			total += p
		}
		if math.Abs(total-1) > 1e-12 {
			t.Errorf("sigma %v: responsibilities sum to %v", sigma, total)
		}
		for i, v := range velocity(t, m, x, float32(sigma), "far", 256, 256) {
			if math.IsNaN(float64(v)) || math.IsInf(float64(v), 0) {
				t.Fatalf("sigma %v: velocity %d is %v", sigma, i, v)
			}
		}
	}
	mix.Responsibilities(r, x, 1) // at sigma 1 the latents say nothing of the component
	for k := range r {
		if math.Abs(r[k]-mix.Weights[k]) > 1e-12 {
			t.Errorf("at sigma 1: responsibility %v, want the weight %v", r[k], mix.Weights[k])
		}
	}
}

// Moments of 20,000 draws within 5 standard errors of Marginal, for each of 64 elements
// at three sigmas. The kurtosis of a mixture is at most that of the widest spread, so
// the variance's own standard error is estimated from the fourth moment.
func TestMixture_Marginal(t *testing.T) {
	mix := mixture(t, synthetic.New(), "a blue cat", 16, 16)
	const draws = 20000
	dims := len(mix.Means[0])
	mean, variance := make([]float64, dims), make([]float64, dims)
	for _, sigma := range []float64{0, 0.4, 1} {
		rng := rand.New(rand.NewPCG(5, 6))
		mix.Marginal(mean, variance, sigma)
		m1, m2, m4 := make([]float64, dims), make([]float64, dims), make([]float64, dims)
		for range draws {
			k := component(rng, mix)
			for i := range dims {
				x0 := float64(mix.Means[k][i]) + mix.Stds[k]*rng.NormFloat64()
				d := (1-sigma)*x0 + sigma*rng.NormFloat64() - mean[i]
				m1[i] += d / draws
				m2[i] += d * d / draws
				m4[i] += d * d * d * d / draws
			}
		}
		for i := range dims {
			if se := math.Sqrt(variance[i] / draws); math.Abs(m1[i]) > 5*se {
				t.Errorf("sigma %v, element %d: mean off by %v, standard error %v", sigma, i, m1[i], se)
			}
			if se := math.Sqrt((m4[i] - m2[i]*m2[i]) / draws); math.Abs(m2[i]-variance[i]) > 5*se {
				t.Errorf("sigma %v, element %d: variance %v, want %v, standard error %v", sigma, i, m2[i], variance[i],
					se)
			}
		}
	}
}

func TestModel_isAModel(t *testing.T) {
	modeltest.Run(t, modeltest.Suite{
		Family: synthetic.Family(), Prompts: [3]string{"a", "", "a red fox"}, Size: media.ImageSize(48, 32),
	})
}

func TestModel_VelocityRefuses(t *testing.T) {
	m := synthetic.New()
	conditioning := func(at int, v float32) *model.Conditioning {
		e := make([]float32, 44)
		e[at] = v
		return &model.Conditioning{Tensors: []model.Tensor{{Name: "prompt_embeds", Shape: []int{1, 44}, Data: e}}}
	}
	foreign, nan := conditioning(3, 0.1234567), conditioning(40, float32(math.NaN()))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	same := func(*model.Row) {}
	for _, tt := range []struct {
		name   string
		ctx    context.Context
		change func(r *model.Row)
		width  int
		fault  string
	}{
		{"short latents", t.Context(), func(r *model.Row) { r.X = r.X[:63] }, 16, "must be 64"},
		{"long result", t.Context(), func(r *model.Row) { r.Dst = make([]float32, 65) }, 16, "must be 64"},
		{"sigma above 1", t.Context(), func(r *model.Row) { r.Sigma = 1.01 }, 16, "sigma: 1.01"},
		{"sigma NaN", t.Context(), func(r *model.Row) { r.Sigma = float32(math.NaN()) }, 16, "sigma: NaN"},
		{"size", t.Context(), same, 17, "multiples of 16"},
		{"no conditioning", t.Context(), func(r *model.Row) { r.Conditioning = nil }, 16, "conditioning: none"},
		{
			"another model's conditioning", t.Context(), func(r *model.Row) { r.Conditioning = foreign }, 16,
			"not of the synthetic model",
		},
		{
			"NaN in the conditioning", t.Context(), func(r *model.Row) { r.Conditioning = nan }, 16,
			"not of the synthetic model",
		},
		{"cancelled", ended, same, 16, "canceled"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			row := model.Row{
				X: make([]float32, 64), Sigma: 0.5, Conditioning: encode(t, m, "p")[0], Dst: make([]float32, 64),
			}
			tt.change(&row)
			err := m.Velocity(tt.ctx, []model.Row{row}, media.ImageSize(16, tt.width))
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("error %v, want one about %q", err, tt.fault)
			}
		})
	}
}

// Concurrent callers that thrash a small working set see the same bits as one caller.
func TestModel_Concurrent(t *testing.T) {
	shared := synthetic.New()
	x := normals(rand.New(rand.NewPCG(9, 10)), 16*64)
	want := map[string][]float32{}
	for i := range 6 {
		p := fmt.Sprint("prompt ", i)
		want[p] = velocity(t, synthetic.New(), x, 0.6, p, 64, 64)
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 12 {
				p := fmt.Sprint("prompt ", (i+w)%6)
				cond, err := shared.Encode(t.Context(), []string{p})
				if err != nil {
					t.Error(err)
					return
				}
				dst := make([]float32, len(x))
				row := model.Row{X: x, Sigma: 0.6, Conditioning: cond[0], Dst: dst}
				if err := shared.Velocity(t.Context(), []model.Row{row}, media.ImageSize(64, 64)); err != nil {
					t.Error(err)
					return
				}
				if !slices.Equal(dst, want[p]) {
					t.Errorf("%s: velocity differs under concurrency", p)
				}
			}
		})
	}
	wg.Wait()
}

func mixture(t testing.TB, m *synthetic.Model, prompt string, height, width int) *synthetic.Mixture {
	t.Helper()
	mix, err := m.Mixture(prompt, height, width)
	if err != nil {
		t.Fatal(err)
	}
	return mix
}

func encode(t testing.TB, m *synthetic.Model, prompts ...string) []*model.Conditioning {
	t.Helper()
	cond, err := m.Encode(t.Context(), prompts)
	if err != nil {
		t.Fatal(err)
	}
	return cond
}

func velocity(t testing.TB, m *synthetic.Model, x []float32, sigma float32, prompt string, height,
	width int,
) []float32 {
	t.Helper()
	dst := make([]float32, len(x))
	row := model.Row{X: x, Sigma: sigma, Conditioning: encode(t, m, prompt)[0], Dst: dst}
	if err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(height, width)); err != nil {
		t.Fatal(err)
	}
	return dst
}

// component draws the index of a component.
func component(rng *rand.Rand, mix *synthetic.Mixture) int {
	u := rng.Float64()
	for k, w := range mix.Weights {
		if u -= w; u < 0 {
			return k
		}
	}
	return len(mix.Weights) - 1
}

func normals(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

func TestVarianceFamilies_AreModels(t *testing.T) {
	for _, f := range synthetic.VarianceFamilies() {
		t.Run(f.Name, func(t *testing.T) {
			modeltest.Run(t, modeltest.Suite{
				Family: f, Prompts: [3]string{"a", "", "a red fox"}, Size: media.ImageSize(48, 32),
			})
		})
	}
}

// What the models predict is one posterior: of x = (1-sigma) x0 + sigma eps the velocity tells
// E[eps] = x + (1-sigma) v and E[x0] = x - sigma v, and x/n is the latent of a variance-preserving
// model, n its length.
func TestMixture_PredictionsAgree(t *testing.T) {
	m := synthetic.New()
	mix, err := m.Mixture("a red fox", 32, 32)
	if err != nil {
		t.Fatal(err)
	}
	size := len(mix.Means[0])
	x, at, got, v := make([]float32, size), make([]float32, size), make([]float32, size), make([]float32, size)
	for i := range x {
		x[i] = mix.Means[1][i] + float32(i%7)/10
	}
	for _, sigma := range []float64{0.02, 0.4, 0.9, 0.999} {
		n := math.Hypot(1-sigma, sigma)
		for i := range x {
			at[i] = float32(float64(x[i]) / n)
		}
		mix.Velocity(v, x, sigma)
		near := func(name string, i int, got float32, want float64) {
			if off := math.Abs(float64(got) - want); off > 2e-5*(1+math.Abs(want)) {
				t.Fatalf("sigma %v: %s[%d] = %v, want %v", sigma, name, i, got, want)
			}
		}
		mix.Epsilon(got, at, (1-sigma)/n, sigma/n)
		for i := range x {
			near("epsilon", i, got[i], float64(x[i])+(1-sigma)*float64(v[i]))
		}
		mix.V(got, at, (1-sigma)/n, sigma/n)
		for i := range x {
			eps, x0 := float64(x[i])+(1-sigma)*float64(v[i]), float64(x[i])-sigma*float64(v[i])
			near("v", i, got[i], (1-sigma)/n*eps-sigma/n*x0)
		}
	}
}
