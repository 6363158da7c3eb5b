package cuda_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/meander-rl/meander/pkg/model"
	"github.com/meander-rl/meander/pkg/model/qwenimage"
	"github.com/meander-rl/meander/pkg/tensor"
	"github.com/meander-rl/meander/pkg/tensor/cpu"
	"github.com/meander-rl/meander/pkg/tensor/cuda/internal/ptxvm"
)

// Height and width of the signs that are painted here.
const signHeight, signWidth = 64, 128

// painting is what a device makes of a prompt, from the text to the pixels.
type painting struct {
	embeds, velocity, last, pixels []float32
}

// paint takes Euler steps of the shipped checkpoint, from the same noise each time.
func paint(t *testing.T, d tensor.Device, prompt string, steps int) (p painting) {
	t.Helper()
	m, err := qwenimage.Open("../../../deploy/models/signs", qwenimage.Options{Device: d})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	cond, err := m.Encode(t.Context(), []string{prompt})
	if err != nil {
		t.Fatal(err)
	}
	p.embeds = cond[0].Tensors[0].Data
	r := rand.New(rand.NewPCG(1, 2))
	x := make([]float32, signHeight/16*signWidth/16*m.Card().LatentChannels)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	v := make([]float32, len(x))
	for step := range steps {
		sigma := 1 - float32(step)/float32(steps)
		if err := m.Velocity(t.Context(), [][]float32{v}, [][]float32{x}, []float32{sigma}, []*model.Conditioning{cond[0]}, signHeight, signWidth); err != nil {
			t.Fatal(err)
		}
		if step == 0 {
			p.velocity = append([]float32(nil), v...)
		}
		for i := range x {
			x[i] -= v[i] / float32(steps)
		}
	}
	p.last = x
	if p.pixels, err = m.DecodePixels(t.Context(), x, signHeight, signWidth); err != nil {
		t.Fatal(err)
	}
	return p
}

// distance is |got - want| / |want| in the L2 norm.
func distance(got, want []float32) float64 {
	var diff, norm float64
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		diff += d * d
		norm += float64(want[i]) * float64(want[i])
	}
	return math.Sqrt(diff / norm)
}

// The shipped kernels paint what the processor does: text encoder, transformer and
// autoencoder, from the prompt to the pixels.
func TestSigns_paintsLikeTheProcessor(t *testing.T) {
	steps := 2
	const prompt = `a red sign that says "HI"`
	c, err := cpu.NewDevice(cpu.Options{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := newDevice(t, ptxvm.Options{Unchecked: true})
	want, got := paint(t, c, prompt, steps), paint(t, d, prompt, steps)
	for _, p := range []struct {
		what      string
		got, want []float32
		most      float64
	}{
		{"embeddings", got.embeds, want.embeds, 1e-5},
		{"velocity", got.velocity, want.velocity, 1e-5},
		{"last latents", got.last, want.last, 5e-5},
		{"pixels", got.pixels, want.pixels, 5e-5},
	} {
		e := distance(p.got, p.want)
		t.Logf("%s: relative L2 distance %.2g", p.what, e)
		if !(e < p.most) {
			t.Errorf("%s: relative L2 distance %.3g, want less than %g", p.what, e, p.most)
		}
	}
}
