package cuda_test

import (
	"fmt"
	"image"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/integration/tools/ptxvm"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/sheet"
)

// Height and width of the signs that are painted side by side, and in a soak.
const signHeight, signWidth = 64, 128

// painting is what a device makes of a prompt, from the text to the pixels.
type painting struct {
	embeds, velocity, last, pixels []float32
}

// processor is the CPU with so many threads, 0 as many as there are cores, until the test ends.
func processor(t *testing.T, threads int) tensor.Device {
	t.Helper()
	c, err := cpu.NewDevice(cpu.Options{Threads: threads})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// eulerStep takes one of so many Euler steps from noise to image: it changes x and returns the velocity.
func eulerStep(
	t *testing.T, m model.Model, x []float32, cond *model.Conditioning, step, steps, height, width int,
) (v []float32) {
	t.Helper()
	v = make([]float32, len(x))
	row := model.Row{X: x, Sigma: 1 - float32(step)/float32(steps), Conditioning: cond, Dst: v}
	if err := m.Velocity(t.Context(), []model.Row{row}, media.ImageSize(height, width)); err != nil {
		t.Fatal(err)
	}
	for i := range x {
		x[i] -= v[i] / float32(steps)
	}
	return v
}

// paint takes Euler steps of the shipped checkpoint, from the same noise each time.
func paint(t *testing.T, d tensor.Device, prompt string, steps, height, width int) (p painting) {
	t.Helper()
	m, err := qwenimage.Open("../../../../deploy/models/signs", qwenimage.Options{Options: model.Options{Device: d}})
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
	x := make([]float32, height/16*width/16*m.Card().LatentChannels)
	for i := range x {
		x[i] = float32(r.NormFloat64())
	}
	for step := range steps {
		if v := eulerStep(t, m, x, cond[0], step, steps, height, width); step == 0 {
			p.velocity = v
		}
	}
	p.last = x
	if p.pixels, err = m.DecodePixels(t.Context(), x, media.ImageSize(height, width)); err != nil {
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
	if diff == 0 {
		return 0
	}
	return math.Sqrt(diff / norm)
}

// The shipped kernels paint what the processor does: text encoder, transformer and
// autoencoder, from the prompt to the pixels. A soak takes all 20 steps of a whole sign; not with factors
// in bf16, since a way of 20 steps makes a difference some thirty times as large.
func TestSigns_paintsLikeTheProcessor(t *testing.T) {
	if testing.Short() {
		t.Skip("takes long: make integration")
	}
	steps, height, width, long := 2, signHeight/2, signWidth/2, os.Getenv("MEANDER_SOAK") != ""
	if long {
		steps, height, width = 20, signHeight, signWidth
	}
	const prompt = `a red sign that says "HI"`
	c := processor(t, 1)
	for _, tt := range []struct {
		factors        tensor.DType
		steps          int
		embeds, single float64 // of the text, of one evaluation
		all            float64 // of the whole way
	}{
		{tensor.F32, steps, 1e-5, 1e-5, 5e-5},
		{tensor.BF16, 2, 1e-2, 1e-2, 3e-2},
	} {
		d, err := cuda.New(ptxvm.New(ptxvm.Options{Unchecked: !long}), cuda.Options{Factors: tt.factors})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		want, got := paint(t, c, prompt, tt.steps, height, width), paint(t, d, prompt, tt.steps, height, width)
		for _, p := range []struct {
			what      string
			got, want []float32
			most      float64
		}{
			{"embeddings", got.embeds, want.embeds, tt.embeds},
			{"velocity", got.velocity, want.velocity, tt.single},
			{"last latents", got.last, want.last, tt.all},
			{"pixels", got.pixels, want.pixels, tt.all},
		} {
			e := distance(p.got, p.want)
			t.Logf("%s, %s: relative L2 distance %.2g", tt.factors, p.what, e)
			if !(e < p.most) {
				t.Errorf("%s, %s: relative L2 distance %.3g, want less than %g", tt.factors, p.what, e, p.most)
			}
		}
	}
}

// MEANDER_SIGNS names a PNG to write: the same signs by the processor and by the kernels, in
// float32 and with factors in bf16, from the same noise in ten steps.
//
//	MEANDER_SIGNS=deploy/bench/cuda-signs.png go test -count=1 -run TestSigns_sideBySide ./pkg/models/tensor/cuda
func TestSigns_sideBySide(t *testing.T) {
	name := os.Getenv("MEANDER_SIGNS")
	if name == "" {
		t.Skip("MEANDER_SIGNS names no file to write")
	}
	const steps = 10
	c := processor(t, 0)
	var rows [3][]sheet.Tile
	for _, prompt := range []string{
		`a red sign that says "HI"`, `a blue sign that says "4071"`,
		`a green sign that says "EXIT"`, `a black sign that says "OPEN"`,
	} {
		want := paint(t, c, prompt, steps, signHeight, signWidth)
		rows[0] = append(rows[0], sheet.Tile{Media: imageOf(want.pixels), Caption: c.Name(), Note: prompt})
		for i, factors := range []tensor.DType{tensor.F32, tensor.BF16} {
			d, err := cuda.New(ptxvm.New(ptxvm.Options{Unchecked: true}), cuda.Options{Factors: factors})
			if err != nil {
				t.Fatal(err)
			}
			got := paint(t, d, prompt, steps, signHeight, signWidth)
			off := distance(got.pixels, want.pixels)
			rows[1+i] = append(rows[1+i], sheet.Tile{
				Media: imageOf(got.pixels), Caption: d.Name(),
				Note: fmt.Sprintf("relative L2 distance %.1e", off),
			})
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if most := map[tensor.DType]float64{tensor.F32: 1e-4, tensor.BF16: 0.1}[factors]; !(off < most) {
				t.Errorf("%s of %s is %.3g off", prompt, factors, off)
			}
		}
	}
	b, err := sheet.Draw("The same signs from the same noise", slices.Concat(rows[:]...))
	if err != nil {
		t.Fatal(err)
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join("../../..", name)
	}
	if err := os.WriteFile(name, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// imageOf is pixels in [-1, 1] as an image.
func imageOf(pixels []float32) media.Media {
	m := image.NewNRGBA(image.Rect(0, 0, signWidth, signHeight))
	for i := range signWidth * signHeight {
		for c := range 3 {
			m.Pix[4*i+c] = uint8(min(max(pixels[3*i+c]*127.5+128, 0), 255))
		}
		m.Pix[4*i+3] = 255
	}
	return media.Of(m)
}
