package policyloss_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/client/policyloss"
)

// schemas/vectors/losses.json is made by deploy/golden/make_losses.py, a plain reading of the formulas. The Python
// client's tests read it too.
type examples struct {
	PPO   []example
	Guard []example `json:"grpo_guard"`
	DPPO  []example `json:"flow_dppo"`
	GSPO  []struct {
		LogProb    [][]float64 `json:"log_prob"`
		Old        [][]float64
		Advantages []float64
		Low        float64 `json:"clip_low"`
		High       float64 `json:"clip_high"`
		Want       gradedWant
	}
	DPO []struct {
		LogProb [][2]float64 `json:"log_prob"`
		Base    [][2]float64
		Beta    float64 `json:"dpo_beta"`
		Want    gradedWant
	}
	NFT []struct {
		Clean, Noise, Velocity [][]float64
		OldVelocity            [][]float64 `json:"old_velocity"`
		Sigma, Advantages      []float64
		MixBeta                float64 `json:"mix_beta"`
		AdaptiveWeightMin      float64 `json:"adaptive_weight_min"`
		AdvClipMax             float64 `json:"adv_clip_max"`
		Want                   gradedWant
	} `json:"diffusion_nft"`
	Tokens []struct {
		LogProb    [][]float64 `json:"log_prob"`
		Old        [][]float64
		Reference  [][]float64
		Advantages []float64
		Mask       [][]float64
		Low        float64 `json:"clip_low"`
		High       float64 `json:"clip_high"`
		Beta       float64
		Reduce     string
		Want       gradedWant
	} `json:"grpo_tokens"`
}

type example struct {
	LogProb                  []float64 `json:"log_prob"`
	Old, Advantages, Weights []float64
	Mean                     [][]float64
	OldMean                  [][]float64 `json:"old_mean"`
	NoiseStd                 float64     `json:"noise_std"`
	Step, Clip               float64
	AdvClipMax               float64 `json:"adv_clip_max"`
	Threshold                float64 `json:"kl_mask_threshold"`
	Want                     struct {
		Loss     float64
		Losses   []float64
		Gradient []float64 `json:"gradient_log_prob"`
	}
}

type gradedWant struct {
	Loss       float64
	Losses     []float64
	ByLogProb  [][]float64 `json:"gradient_log_prob"`
	ByVelocity [][]float64 `json:"gradient_velocity"`
}

func losses(t *testing.T) (e examples) {
	t.Helper()
	var file struct {
		Sets []struct {
			Name  string
			Cases []struct{ Inputs, Expected map[string]any }
		}
	}
	readExamples(t, "../../../schemas/vectors/losses.json", &file)
	byName := map[string][]map[string]any{}
	for _, s := range file.Sets {
		for _, c := range s.Cases {
			c.Inputs["want"] = c.Expected
			byName[s.Name] = append(byName[s.Name], c.Inputs)
		}
	}
	data, err := json.Marshal(byName)
	if err == nil {
		err = json.Unmarshal(data, &e)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(e.PPO) == 0 || len(e.Guard) == 0 || len(e.DPPO) == 0 || len(e.GSPO) == 0 || len(e.DPO) == 0 ||
		len(e.NFT) == 0 || len(e.Tokens) == 0 {
		t.Fatal("losses.json: a set is empty")
	}
	return e
}

func (w gradedWant) check(t *testing.T, g *policyloss.Graded, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	nearAll(t, "losses", g.Losses, w.Losses, verlTolerance)
	near(t, "loss", g.Mean, w.Loss, verlTolerance)
	want := w.ByLogProb
	if want == nil {
		want = w.ByVelocity
	}
	if len(g.Gradient) != len(want) {
		t.Fatalf("%d gradients, want %d", len(g.Gradient), len(want))
	}
	for i := range want {
		nearAll(t, fmt.Sprint("gradient ", i), g.Gradient[i], want[i], verlTolerance)
	}
}

func TestGraded_Examples(t *testing.T) {
	e := losses(t)
	for i, c := range e.PPO {
		l, err := policyloss.PPO(policyloss.Config{Clip: c.Clip, AdvClipMax: c.AdvClipMax}, c.LogProb, c.Old,
			c.Advantages, c.Weights)
		if err != nil {
			t.Fatal(err)
		}
		nearAll(t, fmt.Sprint("ppo ", i), l.Losses, c.Want.Losses, verlTolerance)
	}
	for i, c := range e.Guard {
		l, err := policyloss.Guard(policyloss.Config{Clip: c.Clip, AdvClipMax: c.AdvClipMax}, c.LogProb, c.Old,
			c.Advantages, c.Weights, c.Mean, c.OldMean, c.NoiseStd, c.Step)
		if err != nil {
			t.Fatal(err)
		}
		nearAll(t, fmt.Sprint("guard ", i), l.Losses, c.Want.Losses, verlTolerance)
	}
	for i, c := range e.DPPO {
		t.Run(fmt.Sprint("flow_dppo ", i), func(t *testing.T) {
			g, err := policyloss.DPPO(c.LogProb, c.Old, c.Advantages, c.Weights, c.Mean, c.OldMean, c.NoiseStd,
				c.Threshold)
			want := gradedWant{Loss: c.Want.Loss, Losses: c.Want.Losses}
			for _, x := range c.Want.Gradient {
				want.ByLogProb = append(want.ByLogProb, []float64{x})
			}
			want.check(t, g, err)
		})
	}
	for i, c := range e.GSPO {
		t.Run(fmt.Sprint("gspo ", i), func(t *testing.T) {
			g, err := policyloss.GSPO(c.LogProb, c.Old, c.Advantages, c.Low, c.High)
			c.Want.check(t, g, err)
		})
	}
	for i, c := range e.DPO {
		t.Run(fmt.Sprint("dpo ", i), func(t *testing.T) {
			g, err := policyloss.DPO(c.LogProb, c.Base, c.Beta)
			c.Want.check(t, g, err)
		})
	}
	for i, c := range e.NFT {
		t.Run(fmt.Sprint("diffusion_nft ", i), func(t *testing.T) {
			cfg := policyloss.NFT{MixBeta: c.MixBeta, AdaptiveWeightMin: c.AdaptiveWeightMin, AdvClipMax: c.AdvClipMax}
			samples := make([]policyloss.Noised, len(c.Clean))
			for i := range samples {
				samples[i] = policyloss.Noised{
					Clean: c.Clean[i], Noise: c.Noise[i], Velocity: c.Velocity[i], OldVelocity: c.OldVelocity[i],
					Sigma: c.Sigma[i], Probability: cfg.Probability(c.Advantages[i]),
				}
			}
			g, err := cfg.Loss(samples)
			c.Want.check(t, g, err)
		})
	}
}

// The tokens of a row are samples of PPO that share an advantage; PPO clips both sides alike.
func TestGraded_Tokens(t *testing.T) {
	compared := 0
	for i, c := range losses(t).Tokens {
		if c.Low != c.High {
			continue
		}
		compared++
		total, count := 0.0, 0.0
		for b := range c.Mask {
			for _, m := range c.Mask[b] {
				count += m
			}
		}
		for b, lp := range c.LogProb {
			a, tokens := slices.Repeat([]float64{c.Advantages[b]}, len(lp)), 0.0
			l, err := policyloss.PPO(policyloss.Config{Clip: c.Low, AdvClipMax: 1e9}, lp, c.Old[b], a, c.Mask[b])
			if err != nil {
				t.Fatal(err)
			}
			sum := 0.0
			for k := range lp {
				kl, err := policyloss.KL(policyloss.KLK3, lp[k], c.Reference[b][k])
				if err != nil {
					t.Fatal(err)
				}
				sum += l.Losses[k] + c.Beta*kl*c.Mask[b][k]
				tokens += c.Mask[b][k]
			}
			switch c.Reduce {
			case "sample_mean":
				total += sum / tokens / float64(len(c.Mask))
			case "token_mean":
				total += sum / count
			case "fixed_length":
				total += sum / float64(len(c.Mask)*len(lp))
			}
		}
		near(t, fmt.Sprint("grpo_tokens ", i), total, c.Want.Loss, verlTolerance)
	}
	if compared < 3 {
		t.Fatalf("%d cases clip both sides alike; the vectors should have more", compared)
	}
}

func TestGraded_Refuses(t *testing.T) {
	one, rows := []float64{1}, [][]float64{{1}}
	good := policyloss.Noised{Clean: one, Noise: one, Velocity: one, OldVelocity: one, Sigma: 0.5, Probability: 0.5}
	nft := func(cfg policyloss.NFT, change func(*policyloss.Noised)) error {
		s := good
		change(&s)
		_, err := cfg.Loss([]policyloss.Noised{s})
		return err
	}
	if err := nft(policyloss.DefaultNFT(), func(*policyloss.Noised) {}); err != nil {
		t.Fatal(err)
	}
	second := func(_ *policyloss.Graded, err error) error { return err }
	for name, err := range map[string]error{
		"gspo without trajectories": second(policyloss.GSPO(nil, nil, nil, 1, 1)),
		"gspo of two lengths":       second(policyloss.GSPO(rows, [][]float64{{1, 2}}, one, 1, 1)),
		"gspo without a clip":       second(policyloss.GSPO(rows, rows, one, 0, 1)),
		"gspo with NaN":             second(policyloss.GSPO(rows, rows, []float64{math.NaN()}, 1, 1)),
		"dppo with two means":       second(policyloss.DPPO(one, one, one, nil, [][]float64{{1}, {2}}, [][]float64{{1}, {2}}, 1, 1)),
		"dppo with two weights":     second(policyloss.DPPO(one, one, one, []float64{1, 2}, rows, rows, 1, 1)),
		"dppo without noise":        second(policyloss.DPPO(one, one, one, nil, rows, rows, 0, 1)),
		"dpo without pairs":         second(policyloss.DPO(nil, nil, 1)),
		"dpo with infinity":         second(policyloss.DPO([][2]float64{{math.Inf(1), 0}}, [][2]float64{{}}, 1)),
		"dpo without beta":          second(policyloss.DPO([][2]float64{{}}, [][2]float64{{}}, 0)),
		"nft without samples":       second(policyloss.DefaultNFT().Loss(nil)),
		"nft without settings":      nft(policyloss.NFT{}, func(*policyloss.Noised) {}),
		"nft with a probability":    nft(policyloss.DefaultNFT(), func(s *policyloss.Noised) { s.Probability = 1.1 }),
		"nft with a sigma":          nft(policyloss.DefaultNFT(), func(s *policyloss.Noised) { s.Sigma = 0 }),
		"nft of two lengths":        nft(policyloss.DefaultNFT(), func(s *policyloss.Noised) { s.Noise = []float64{1, 2} }),
	} {
		if err == nil {
			t.Errorf("%s is taken", name)
		}
	}
}
