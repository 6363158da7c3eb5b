package flow_test

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
)

// Float64 values from the Qwen-Image pipeline's rule by plain Python.
func TestGuide(t *testing.T) {
	pos, neg := []float32{0.5, -1, 0.75, 0.1}, []float32{0.4, -0.6, 0.5, 0.3}
	want := []float64{0.382315855718586, -1.05136860322611, 0.716842229472349, -0.238947409824116}
	dst := make([]float32, 4)
	if err := flow.Guide(dst, pos, neg, 4, 4); err != nil {
		t.Fatal(err)
	}
	allNear(t, "velocity", dst, want, 1e-6)

	if err := flow.GuidePlain(dst, pos, neg, 4); err != nil {
		t.Fatal(err)
	}
	allNear(t, "plain velocity", dst, []float64{0.8, -2.2, 1.5, -0.5}, 1e-6)
}

// Values of rescale_noise_cfg of diffusers 0.42.1 in float64, for plain guidance of scale 4.
func TestRescaleDeviation(t *testing.T) {
	pos, neg := []float32{0.5, -1, 0.75, 0.1}, []float32{0.4, -0.6, 0.5, 0.3}
	for phi, want := range map[float64][]float64{
		0:   {0.8, -2.2, 1.5, -0.5},
		0.7: {0.5060306226573095, -1.3915842123076012, 0.9488074174824552, -0.3162691391608184},
		1:   {0.3800437466532992, -1.045120303296573, 0.7125820249749361, -0.237527341658312},
	} {
		v := make([]float32, 4)
		if err := flow.GuidePlain(v, pos, neg, 4); err != nil {
			t.Fatal(err)
		}
		flow.RescaleDeviation(v, flow.Deviation(pos), phi)
		allNear(t, "rescaled", v, want, 1e-6)
	}
	flat := []float32{2, 2, 2, 2}
	flow.RescaleDeviation(flat, 1, 0.5)
	allNear(t, "without deviation", flat, []float64{2, 2, 2, 2}, 0)
	if d := flow.Deviation(nil); d != 0 {
		t.Errorf("deviation of nothing: %g", d)
	}
}

// Float64 values of the formula by plain Python. The norm is that of the whole sample, and a result that is shorter
// than the prompt's velocity stays as it is.
func TestGuideClamped(t *testing.T) {
	pos, neg := []float32{0.5, -1, 0.75, 0.1}, []float32{0.4, -0.6, 0.5, 0.3}
	want := []float64{0.382315855718586, -1.05136860322611, 0.716842229472349, -0.238947409824116}
	dst := make([]float32, 4)
	if err := flow.GuideClamped(dst, pos, neg, 4); err != nil {
		t.Fatal(err)
	}
	allNear(t, "longer", dst, want, 1e-6)
	if err := flow.GuideClamped(dst, []float32{0, 0, 3, 4}, []float32{0, 1, 3, 4}, 2); err != nil {
		t.Fatal(err)
	}
	f := math.Sqrt(25.0 / 26)
	allNear(t, "one norm for all tokens", dst, []float64{0, -f, 3 * f, 4 * f}, 1e-6)
	if err := flow.GuideClamped(dst, []float32{1, 1, 1, 1}, []float32{2, 2, 1, 1}, 1.5); err != nil {
		t.Fatal(err)
	}
	allNear(t, "shorter", dst, []float64{0.5, 0.5, 1, 1}, 0)
	for _, alias := range [][]float32{append([]float32(nil), pos...), append([]float32(nil), neg...)} {
		p, n := pos, neg
		if alias[0] == pos[0] {
			p = alias
		} else {
			n = alias
		}
		if err := flow.GuideClamped(alias, p, n, 4); err != nil {
			t.Fatal(err)
		}
		allNear(t, "in place", alias, want, 1e-6)
	}
}

// Each token keeps its own norm, and may be written over either input.
func TestGuide_PerToken(t *testing.T) {
	pos := []float32{3, 4, 0, 0.5, 1, 1}
	neg := []float32{1, -2, 1, 0.5, 2, 2}
	dst := make([]float32, 6)
	if err := flow.Guide(dst, pos, neg, 2.5, 2); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 6; i += 2 {
		got := math.Hypot(float64(dst[i]), float64(dst[i+1]))
		if want := math.Hypot(float64(pos[i]), float64(pos[i+1])); !near(got, want, 1e-6) {
			t.Errorf("token %d: norm %v, want %v", i/2, got, want)
		}
	}
	for _, alias := range [][]float32{append([]float32(nil), pos...), append([]float32(nil), neg...)} {
		p, n := pos, neg
		if alias[0] == pos[0] {
			p = alias
		} else {
			n = alias
		}
		if err := flow.Guide(alias, p, n, 2.5, 2); err != nil {
			t.Fatal(err)
		}
		for i := range dst {
			if alias[i] != dst[i] {
				t.Errorf("in place: element %d = %v, want %v", i, alias[i], dst[i])
			}
		}
	}
}

func TestGuide_ZeroNorm(t *testing.T) {
	dst := []float32{9, 9, 9, 9}
	// The first token's combination is 0, the second's positive velocity is.
	if err := flow.Guide(dst, []float32{1, -1, 0, 0}, []float32{2, -2, 1, 1}, 2, 2); err != nil {
		t.Fatal(err)
	}
	allNear(t, "velocity", dst, []float64{0, 0, 0, 0}, 0)
}

func TestGuide_Refuses(t *testing.T) {
	four, three := make([]float32, 4), make([]float32, 3)
	wantError(t, flow.Guide(four, four, three, 4, 4), "4 and 3 elements")
	wantError(t, flow.Guide(three, four, four, 4, 4), "into 3")
	wantError(t, flow.Guide(four, four, four, 4, 3), "tokens of 3")
	wantError(t, flow.Guide(four, four, four, 4, 0), "tokens of 0")
	wantError(t, flow.Guide(four, four, four, math.NaN(), 4), "true_cfg_scale: NaN")
	wantError(t, flow.GuidePlain(four, four, four, math.Inf(1)), "true_cfg_scale: +Inf")
	wantError(t, flow.GuideClamped(four, four, three, 4), "4 and 3 elements")
}
