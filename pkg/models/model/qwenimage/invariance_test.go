package qwenimage_test

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// bench is rows to evaluate: sizes and prompts that no tile or panel divides.
type bench struct {
	x     [][]float32
	sigma []float32
	cond  []*model.Conditioning
	h, w  int
}

func newBench(t testing.TB, m model.Model, n int) bench {
	t.Helper()
	prompts := []string{`a blue sign that says "4071"`, " ", "a longer text about a round, old, red sign", "x"}
	b := bench{h: 48, w: 80}
	cond := encodeAll(t, m, prompts...)
	tokens, err := m.Card().Tokens(media.ImageSize(b.h, b.w))
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range n {
		x := make([]float32, tokens*m.Card().LatentChannels)
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
		b.x = append(b.x, x)
		b.sigma = append(b.sigma, []float32{0.9, 0.02, 0.9, 1, 0}[i%5])
		b.cond = append(b.cond, cond[i%len(cond)])
	}
	return b
}

func (b bench) run(t testing.TB, m model.Model, from, to int) [][]float32 {
	t.Helper()
	return velocities(t, m, b.x[from:to], b.sigma[from:to], b.cond[from:to], b.h, b.w)
}

// TestModel_bitsDependOnTheRowAlone is what lets a trajectory be replayed elsewhere:
// any packing, thread count and kernel set gives the same bits.
func TestModel_bitsDependOnTheRowAlone(t *testing.T) {
	dir := filepath.Join(golden, "half") // 24 columns: no panel or vector is full
	const n = 7
	var want [][]float32
	var pixels []uint8
	var latents, embeds []float32
	for _, kernels := range cpu.AvailableKernels() {
		for _, threads := range []int{1, 3} {
			d, err := cpu.NewDevice(cpu.Options{Threads: threads, Kernels: kernels})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Device: d}})
			if err != nil {
				t.Fatal(err)
			}
			b := newBench(t, m, n)
			got := b.run(t, m, 0, n)
			sample, err := m.Decode(t.Context(), b.x[0], media.ImageSize(b.h, b.w))
			if err != nil {
				t.Fatal(err)
			}
			encoded, err := m.EncodeMedia(t.Context(), sample)
			if err != nil {
				t.Fatal(err)
			}
			img := sample.Frames[0]
			if want == nil {
				want, pixels, latents, embeds = got, img.Pix, encoded, b.cond[0].Tensors[0].Data
			}
			if !slices.Equal(flat(got), flat(want)) {
				t.Errorf("%s, %d threads: other velocities", kernels, threads)
			}
			if !slices.Equal(img.Pix, pixels) || !slices.Equal(encoded, latents) ||
				!slices.Equal(b.cond[0].Tensors[0].Data, embeds) {
				t.Errorf("%s, %d threads: another image, latents or embeddings", kernels, threads)
			}
			for i := range n { // alone
				if !slices.Equal(b.run(t, m, i, i+1)[0], want[i]) {
					t.Errorf("%s, %d threads: row %d alone differs", kernels, threads, i)
				}
			}
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Rows give the same bits in any packing, on a model that has computed the modulations of none, some or all of their
// sigmas before.
func TestModel_Velocity_anyPacking(t *testing.T) {
	base := openModel(t, "full", qwenimage.Options{})
	const n = 6
	b := newBench(t, base, n)
	want := b.run(t, base, 0, n)
	rapid.Check(t, func(rt *rapid.T) {
		m, err := base.Adapted() // nothing is kept
		if err != nil {
			rt.Fatal(err)
		}
		defer m.Close()
		for _, i := range rapid.SliceOfN(rapid.IntRange(0, n-1), 0, 2).Draw(rt, "rows before") {
			if !slices.Equal(b.run(t, m, i, i+1)[0], want[i]) {
				rt.Errorf("row %d alone differs", i)
			}
		}
		pick := rapid.SliceOfN(rapid.IntRange(0, n-1), 1, 9).Draw(rt, "rows")
		var c bench
		c.h, c.w = b.h, b.w
		for _, i := range pick {
			c.x, c.sigma, c.cond = append(c.x, b.x[i]), append(c.sigma, b.sigma[i]), append(c.cond, b.cond[i])
		}
		for k, v := range c.run(t, m, 0, len(pick)) {
			if !slices.Equal(v, want[pick[k]]) {
				rt.Errorf("row %d as number %d of %v differs", pick[k], k, pick)
			}
		}
	})
}

// TestModel_isAModel is what every family must do.
func TestModel_isAModel(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	t.Run("full", func(t *testing.T) {
		modeltest.Run(t, modeltest.Suite{
			Family: qwenimage.Family(), Dir: filepath.Join(golden, "full"),
			Prompts: [3]string{
				`a blue sign that says "4071"`, " ",
				"a longer text about a round, old, red sign",
			}, Size: media.ImageSize(48, 80),
		})
	})
}

func TestModel_Velocity_allocatesLittle(t *testing.T) {
	m := openModel(t, "full", qwenimage.Options{Options: model.Options{Threads: 1}})
	b := newBench(t, m, 4)
	rows, _ := rowsOf(b.x, b.sigma, b.cond)
	step := func() {
		if err := m.Velocity(t.Context(), rows, media.ImageSize(b.h, b.w)); err != nil {
			t.Fatal(err)
		}
	}
	step()
	step() // the arena has found its size
	before, _ := memory(m)
	// A few headers and closures per call, whatever the model's depth; no tensors.
	if n := testing.AllocsPerRun(20, step); n > 12 {
		t.Errorf("%g allocations per call", n)
	}
	if after, _ := memory(m); after != before {
		t.Errorf("working memory went from %d to %d bytes", before, after)
	}
}

func memory(m *qwenimage.Model) (working, weights int) {
	weights, working = m.MemoryBytes()
	return working, weights
}

func TestModel_Encode_caches(t *testing.T) {
	m := openModel(t, "full", qwenimage.Options{})
	first := encodeAll(t, m, "one", "two", "one")
	if first[0] != first[2] {
		t.Error("one prompt twice in a call is encoded twice")
	}
	if again := encodeAll(t, m, "two"); again[0] != first[1] {
		t.Error("a prompt is not kept")
	}
	none := openModel(t, "full", qwenimage.Options{Options: model.Options{PromptCacheBytes: -1}})
	if a, b := encodeAll(t, none, "one"), encodeAll(t, none, "one"); a[0] == b[0] ||
		!slices.Equal(a[0].Tensors[0].Data, b[0].Tensors[0].Data) {
		t.Error("without a cache: want equal, separate conditionings")
	}
}
