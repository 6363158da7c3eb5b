package imageserver_test

import (
	"math"
	"slices"
	"testing"

	"github.com/meander-rl/meander/integration/tools/imageserver"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/remoteimage"
	"github.com/meander-rl/meander/pkg/remoteimage/remoteimagetest"
)

const signs = "../../../deploy/models/signs"

func request(change func(q *remoteimage.Request)) *remoteimage.Request {
	q := &remoteimage.Request{
		Prompt: remoteimagetest.Prompt, CFG: 1, Seed: remoteimagetest.Seed, Height: remoteimagetest.Height,
		Width: remoteimagetest.Width, Tokens: 8, Channels: 64, Sigmas: remoteimagetest.Sigmas(),
		Type: "sde", NoiseLevel: 0.7, SDESteps: []int{0, 1, 2, 3}, Return: []int{0, 1, 2, 3, 4},
	}
	change(q)
	return q
}

// The server computes what a real one answered: the same noise to the bit, all else to the rounding of float32.
func TestServer_Recorded(t *testing.T) {
	generate := func(url string, q *remoteimage.Request) *remoteimage.Answer {
		t.Helper()
		p, err := remoteimage.NewPool(remoteimage.Config{
			Server: remoteimage.SGLangDiffusion + "=" + url, Pipeline: "QwenImagePipeline",
			Probe: *request(func(*remoteimage.Request) {}),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		if err := p.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		a, err := p.Generate(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	recorded, played := remoteimagetest.New(t), imageserver.New(t, signs, model.Options{})
	for name, change := range map[string]func(q *remoteimage.Request){
		"sde":    func(*remoteimage.Request) {},
		"debug":  func(q *remoteimage.Request) { q.Debug, q.Conditioning = true, true },
		"guided": func(q *remoteimage.Request) { q.Debug, q.Conditioning, q.CFG, q.Negative = true, true, 2.5, "red" },
		"window": func(q *remoteimage.Request) { q.Debug, q.SDESteps, q.Return = true, []int{1, 2}, []int{1, 2, 3} },
		"cps":    func(q *remoteimage.Request) { q.Debug, q.Type, q.NoiseLevel, q.Squared = true, "cps", 0.8, true },
		"ode":    func(q *remoteimage.Request) { q.Type, q.SDESteps = remoteimage.ODE, nil },
	} {
		t.Run(name, func(t *testing.T) {
			q := request(change)
			real, made := generate(recorded.URL, q), generate(played.URL, q)
			near := func(what string, x, y []float32, most float64) {
				t.Helper()
				off, largest := 0.0, 1.0
				for i := range x {
					off, largest = max(off, math.Abs(float64(x[i])-float64(y[i]))), max(largest,
						math.Abs(float64(x[i])))
				}
				if len(x) != len(y) || len(x) == 0 || !(off <= most*largest) {
					t.Errorf("%s: %d numbers of up to %g, up to %g away; want %d, %g of the largest", what, len(y),
						largest, off, len(x), most)
				}
			}
			if slices.Contains(q.Return, 0) && !slices.Equal(real.Latents[0], made.Latents[0]) {
				t.Error("x_T: other bits")
			}
			for _, i := range q.Return {
				near("a state", real.Latents[i], made.Latents[i], 1e-5)
			}
			near("log-probs", real.LogProbs, made.LogProbs, 1e-5)
			near("the image", real.Image.Data, made.Image.Data, 1.0/255)
			if q.Debug {
				if !slices.Equal(real.Debug.Noise, made.Debug.Noise) {
					t.Error("noise: other bits")
				}
				near("velocities", real.Debug.Velocity, made.Debug.Velocity, 1e-5)
				near("means", real.Debug.Mean, made.Debug.Mean, 1e-5)
				near("standard deviations", real.Debug.Std, made.Debug.Std, 1e-6)
			}
			if q.Conditioning {
				near("the text", real.Prompt.Data, made.Prompt.Data, 1e-5)
			}
		})
	}
}
