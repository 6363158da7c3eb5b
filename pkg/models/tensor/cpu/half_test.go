package cpu_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// Weights of bf16 stay so if they are large or for few rows: they give the bits of the same numbers in float32, take
// half the memory, and read back as they were.
func TestWeight_Half(t *testing.T) {
	t.Parallel()
	for _, kernels := range cpu.AvailableKernels() {
		d, err := cpu.NewDevice(cpu.Options{Threads: 2, Kernels: kernels})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = d.Close() }()
		for _, s := range [][3]int{
			{1, 1, 1},
			{2, 17, 5},
			{5, 100, 20},
			{12, 33, 400},
			{400, 50, 385},
			{1, 509, 512},
			{1, 700, 385},
			{5, 600, 500},
			{12, 2000, 133},
			{30, 300, 900},
			{49, 697, 384},
		} {
			t.Run(fmt.Sprint(kernels, s), func(t *testing.T) {
				compareHalf(t, d, kernels, s[0], s[1], s[2], d.Weight, 1<<18)
			})
			t.Run(fmt.Sprint("few rows", kernels, s), func(t *testing.T) {
				compareHalf(t, d, kernels, s[0], s[1], s[2], d.WeightForFewRows, 1)
			})
		}
	}
}

// compareHalf compares weights of bf16, which stay so from so many elements on, with those of float32.
func compareHalf(
	t *testing.T, d *cpu.Device, kernels cpu.Kernels, m, n, k int,
	put func(...tensor.Array) (tensor.Weight, error), least int,
) {
	r := rand.New(rand.NewPCG(uint64(m), uint64(n*k)))
	random := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return x
	}
	w := tensor.Array{DType: tensor.BF16, Shape: []int{n, k}, Data: tensor.BF16.AppendFloats(nil, random(n*k))}
	last := tensor.Array{DType: tensor.BF16, Shape: []int{3, k}, Data: tensor.BF16.AppendFloats(nil, random(3*k))}
	wide, err := d.Weight(tensor.Floats(w.Decode(), n, k), tensor.Floats(last.Decode(), 3, k))
	if err != nil {
		t.Fatal(err)
	}
	narrow, err := put(w, last)
	if err != nil {
		t.Fatal(err)
	}
	x, bias := random(m*k), random(n+3)
	vector, err := d.Vector(tensor.Floats(bias, n+3))
	if err != nil {
		t.Fatal(err)
	}
	var out [2][]float32
	for i, w := range []tensor.Weight{wide, narrow} {
		err := d.Run(t.Context(), i == 1, func(s tensor.Session) error {
			a, y := tensor.NewMatrix(s, m, k), tensor.NewMatrix(s, m, n+3)
			s.CopyIn(a, x)
			s.Linear(y, a, w, tensor.Epilogue{Bias: vector, Act: tensor.SiLU})
			out[i] = make([]float32, m*(n+3))
			s.CopyOut(out[i], y)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(out[0], out[1]) {
		t.Error("other bits than in float32")
	}
	less := 1
	if kernels != cpu.KernelsNEON && kernels != cpu.KernelsGo && (n+3)*k >= least { // they read float32 alone
		less = 2
	}
	if wide.Bytes() != less*narrow.Bytes() {
		t.Errorf("%d bytes, %d in float32, want a part of %d", narrow.Bytes(), wide.Bytes(), less)
	}
	a, b := make([]float32, (n+3)*k), make([]float32, (n+3)*k)
	if err := d.Read(a, wide); err != nil {
		t.Fatal(err)
	}
	if err := d.Read(b, narrow); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(a, b) {
		t.Error("other numbers read back")
	}
}
