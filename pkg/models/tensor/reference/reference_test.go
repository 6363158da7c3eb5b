package reference_test

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/reference"
	"github.com/meander-rl/meander/pkg/models/tensor/tensortest"
)

// The suite compares with this device: here it shows that operations write where they
// may, and leave their inputs.
func TestDevice_Conformance(t *testing.T) { tensortest.Run(t, reference.Device{}) }

// run computes with a session on matrices of the given rows; the first is the result.
func run(t *testing.T, f func(d reference.Device, s tensor.Session, m []tensor.Matrix), rows ...[][]float32) []float64 {
	t.Helper()
	var out []float64
	d := reference.Device{}
	err := d.Run(t.Context(), false, func(s tensor.Session) error {
		var ms []tensor.Matrix
		for _, r := range rows {
			m := tensor.NewMatrix(s, len(r), len(r[0]))
			for i, row := range r {
				s.CopyIn(m.SliceRows(i, i+1), row)
			}
			ms = append(ms, m)
		}
		f(d, s, ms)
		out = reference.Float64s(ms[0])
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Every formula by numbers worked out by hand.
func TestSession_Formulas(t *testing.T) {
	row := func(x ...float32) [][]float32 { return [][]float32{x} }
	vector := func(d reference.Device, x ...float32) tensor.Vector { return must(d.Vector(tensor.Floats(x, len(x)))) }
	sigmoid := func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }
	for _, tt := range []struct {
		name string
		rows [][][]float32
		f    func(d reference.Device, s tensor.Session, m []tensor.Matrix)
		want []float64
	}{
		{"linear", [][][]float32{row(0, 0), row(1, 2, 3)}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			// rows (1,0,0) and (0,1,1), bias (10, 20): 1+10, 2+3+20
			s.Linear(m[0], m[1], must(d.Weight(tensor.Floats([]float32{1, 0, 0}, 1, 3),
				tensor.Floats([]float32{0, 1, 1}, 1, 3))), tensor.Epilogue{Bias: vector(d, 10, 20)})
		}, []float64{11, 25}},
		{"epilogue", [][][]float32{row(100, 200), row(1, 2, 3), {{0, 0}, {2, -1}}}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			// residual + gate * silu(product)
			w := must(d.Weight(tensor.Floats([]float32{1, 0, 0, 0, 1, 0}, 2, 3)))
			s.Linear(m[0], m[1], w, tensor.Epilogue{Act: tensor.SiLU, Gate: m[2], Residual: m[0], Group: []int32{1}})
		}, []float64{100 + 2*sigmoid(1), 200 - 2*sigmoid(2)}},
		{"gelu", [][][]float32{row(0, 0), row(1, -3)}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Linear(m[0], m[1], must(d.Weight(tensor.Floats([]float32{1, 0, 0, 1}, 2, 2))),
				tensor.Epilogue{Act: tensor.GELU})
		}, []float64{0.8411919906082768, -0.00363739}}, // of torch.nn.functional.gelu(x, approximate="tanh")
		{"attention: equal scores are a mean", [][][]float32{{{0}, {0}, {0}, {9}, {0}}, {{0}, {0}, {0}, {0}, {0}}, {{1}, {10}, {2}, {4}, {20}}}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Attention(m[0], m[1], m[1], m[2], tensor.Attention{Heads: 1, Sequences: [][]int32{{0, 2}, {1, 4}}})
		}, []float64{1.5, 15, 1.5, 9, 15}},
		{"attention: weights", [][][]float32{row(0), row(1), {{0}, {1}}, {{0}, {1}}}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Attention(m[0], m[1], m[2], m[3], tensor.Attention{Heads: 1, Scale: 2})
		}, []float64{sigmoid(2)}},
		{"attention: causal", [][][]float32{{{0}, {0}}, {{1}, {1}}, {{3}, {5}}}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Attention(m[0], m[1], m[1], m[2], tensor.Attention{Heads: 1, Causal: true})
		}, []float64{3, 4}},
		{"layer norm", [][][]float32{row(0, 0), row(1, 3), row(1, 0), row(5, 7)}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			// mean 2, deviation 1: (-1, 1), times 1 + scale, plus shift
			s.LayerNormModulate(m[0], m[1], m[2], m[3], nil, 0)
		}, []float64{3, 8}},
		{"rms norm by heads", [][][]float32{row(0, 0, 0, 0), row(3, 3, 1, 7)}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.RMSNorm(m[0], m[1], vector(d, 1, 10), 0) // roots of mean squares 3 and 5
		}, []float64{1, 10, 0.2, 14}},
		{"l2 norm", [][][]float32{row(0, 0), row(3, 4)}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.L2Norm(m[0], m[1], vector(d, 1, 1), 1e-12, tensor.Identity)
		}, []float64{math.Sqrt2 * 3 / 5, math.Sqrt2 * 4 / 5}},
		{"rope pairs by a right angle", [][][]float32{row(1, 2, 3, 4), row(0, 0), row(1, 1)}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.RopePairs(m[0], m[0], m[1], m[2], nil)
		}, []float64{-2, 1, -4, 3}},
		{"rope halves by a right angle", [][][]float32{row(1, 2, 3, 4), row(0, 0), row(1, 1)}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.RopeHalves(m[0], m[0], m[1], m[2], nil)
		}, []float64{-3, -4, 1, 2}},
		{"silu mul", [][][]float32{row(0), row(2), row(3)}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.SiLUMul(m[0], m[1], m[2])
		}, []float64{6 * sigmoid(2)}},
		{"gather", [][][]float32{{{0}, {0}}}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Gather(m[0], must(d.Table(tensor.Floats([]float32{5, 6, 7}, 3, 1))), []int32{2, 0})
		}, []float64{7, 5}},
		{"convolution", [][][]float32{{{0}, {0}, {0}, {0}}, {{1}, {2}, {3}, {4}}}, func(d reference.Device, s tensor.Session, m []tensor.Matrix) {
			// 2 x 2 image, kernel with a 1 in the middle and a 10 to its right
			k := must(d.Filter(tensor.Floats([]float32{0, 0, 0, 0, 1, 10, 0, 0, 0}, 1, 1, 3, 3)))
			image := func(m tensor.Matrix) tensor.Image {
				return tensor.Image{Memory: m.Memory, Offset: m.Offset, N: 1, H: 2, W: 2, C: 1}
			}
			s.Conv2D(image(m[0]), image(m[1]), k, tensor.SamePad(3), tensor.Epilogue{})
		}, []float64{21, 2, 43, 4}},
		{"upsample", [][][]float32{{{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}}, {{1}, {2}}}, func(_ reference.Device, s tensor.Session, m []tensor.Matrix) {
			s.Upsample2(tensor.Image{Memory: m[0].Memory, Offset: m[0].Offset, N: 1, H: 2, W: 4, C: 1},
				tensor.Image{Memory: m[1].Memory, Offset: m[1].Offset, N: 1, H: 1, W: 2, C: 1})
		}, []float64{1, 1, 2, 2, 1, 1, 2, 2}},
	} {
		got := run(t, tt.f, tt.rows...)
		for i, w := range tt.want {
			if !(math.Abs(got[i]-w) <= 1e-7*max(1, math.Abs(w))) {
				t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
				break
			}
		}
	}
}

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}
