//go:build cuda

package cuda_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage/checkpoint"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

// needsGPU skips a test that takes too long on an interpreted GPU.
func needsGPU(t *testing.T) {
	t.Helper()
	if os.Getenv("MEANDER_GPU") == "" {
		t.Skip("set MEANDER_GPU=1 on a machine with a GPU")
	}
}

// All operations with factors in bf16 by the own kernels: with cuBLASLt they make no product.
func TestGPU_ConformanceInBF16(t *testing.T) {
	needsGPU(t) // on an interpreted one: TestDevice_ConformanceInBF16
	d := openGPUAs(t, cuda.Options{Factors: tensor.BF16, Deterministic: true})
	for _, cs := range tensortest.Cases() {
		closeInBF16(t, d, cs)
	}
}

// The products and the attention of Qwen-Image at 1024 x 1024 against the CPU: grids of many blocks, strides beyond
// what small cases have.
func TestGPU_LargeShapes(t *testing.T) {
	needsGPU(t)
	host := processor(t, 0)
	const tokens, width, heads = 4096 + 61, 3072, 24
	run := func(d tensor.Device, columns, inner int) (product, attention []float32) {
		product, attention = make([]float32, tokens*columns), make([]float32, tokens*width)
		w, err := d.Weight(tensor.Array{
			DType: tensor.BF16, Shape: []int{columns, inner},
			Data: tensor.BF16.AppendFloats(nil, uniform(3, columns*inner)),
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Run(t.Context(), true, func(s tensor.Session) error {
			x, y := tensor.NewMatrix(s, tokens, inner), tensor.NewMatrix(s, tokens, columns)
			s.CopyIn(x, uniform(4, tokens*inner))
			s.Linear(y, x, w, tensor.Epilogue{Act: tensor.GELU})
			s.CopyOut(product, y)
			var in [3]tensor.Matrix
			for i := range in {
				in[i] = tensor.NewMatrix(s, tokens, width)
				s.CopyIn(in[i], uniform(uint32(i), tokens*width))
			}
			o := tensor.NewMatrix(s, tokens, width)
			s.Attention(o, in[0], in[1], in[2], tensor.Attention{Heads: heads})
			s.CopyOut(attention, o)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return product, attention
	}
	var report []string
	for _, shape := range [][2]int{{3 * width, width}, {width, 4 * width}} {
		wantProduct, wantAttention := run(host, shape[0], shape[1])
		for _, tt := range []struct {
			o    cuda.Options
			most float64
		}{
			{cuda.Options{}, 1e-5},
			{cuda.Options{Factors: tensor.BF16}, 1e-2},
			{cuda.Options{Factors: tensor.BF16, Deterministic: true}, 1e-2},
		} {
			d := openGPUAs(t, tt.o)
			product, attention := run(d, shape[0], shape[1])
			ofProduct, ofAttention := distance(product, wantProduct), distance(attention, wantAttention)
			report = append(report, fmt.Sprintf("%s, product of %d x %d %.2g, attention %.2g", d.Name(), shape[0],
				shape[1], ofProduct,
				ofAttention))
			if !(ofProduct <= tt.most) || !(ofAttention <= tt.most) {
				t.Errorf("%s: too far from the CPU: product %g, attention %g; at most %g", d.Name(), ofProduct,
					ofAttention, tt.most)
			}
		}
	}
	t.Logf("relative L2 distances: %s", strings.Join(report, "; "))
}

// Two layers of Qwen-Image in its published width, with heads of 128, against the CPU: from the text to the velocity.
func TestGPU_QwenImageLayers(t *testing.T) {
	needsGPU(t)
	dir := t.TempDir()
	if err := checkpoint.WritePublished(dir, checkpoint.Changes{
		Layers: 2, TextLayers: 2, Vocabulary: 300,
	}); err != nil {
		t.Fatal(err)
	}
	velocity := func(d tensor.Device) []float32 {
		m, err := qwenimage.Open(dir, qwenimage.Options{Options: model.Options{Device: d}})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		conds, err := m.Encode(t.Context(), []string{`a blue sign that says "4071"`, " "})
		if err != nil {
			t.Fatal(err)
		}
		size := media.ImageSize(256, 384)
		tokens, err := m.Card().Tokens(size)
		if err != nil {
			t.Fatal(err)
		}
		n := tokens * m.Card().LatentChannels
		out := make([]float32, 2*n)
		rows := []model.Row{
			{X: uniform(1, n), Sigma: 0.7, Conditioning: conds[0], Dst: out[:n]},
			{X: uniform(2, n), Sigma: 0.2, Conditioning: conds[1], Dst: out[n:]},
		}
		if err := m.Velocity(t.Context(), rows, size); err != nil {
			t.Fatal(err)
		}
		return out
	}
	host := processor(t, 0)
	want := velocity(host)
	var report []string
	for _, tt := range []struct {
		o    cuda.Options
		most float64
	}{
		{cuda.Options{}, 1e-5},
		{cuda.Options{Factors: tensor.BF16}, 2e-2},
		{cuda.Options{Factors: tensor.BF16, Deterministic: true}, 2e-2},
	} {
		d := openGPUAs(t, tt.o)
		e := distance(velocity(d), want)
		report = append(report, fmt.Sprintf("%s %.2g", d.Name(), e))
		if !(e <= tt.most) {
			t.Errorf("%s: too far from the CPU: %g; at most %g", d.Name(), e, tt.most)
		}
	}
	t.Logf("relative L2 distances: %s", strings.Join(report, "; "))
}

// uniform returns n numbers between -1 and 1.
func uniform(seed uint32, n int) []float32 {
	x := make([]float32, n)
	state := seed
	for i := range x {
		state = state*1664525 + 1013904223
		x[i] = float32(state>>8)/(1<<23) - 1
	}
	return x
}
