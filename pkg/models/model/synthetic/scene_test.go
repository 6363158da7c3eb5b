package synthetic_test

import (
	"context"
	"fmt"
	"image"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/synthetic"
)

func TestModel_Mixture(t *testing.T) {
	m := synthetic.New()
	a, again := mixture(t, m, "a cat", 64, 64), mixture(t, synthetic.New(), "a cat", 64, 64)
	other := mixture(t, m, "a dog", 64, 64)
	var total float64
	for k, w := range a.Weights {
		total += w
		if !(w > 0) || !(a.Stds[k] >= 0.12 && a.Stds[k] < 0.24) {
			t.Errorf("component %d: weight %v, std %v", k, w, a.Stds[k])
		}
		if len(a.Means[k]) != 16*64 {
			t.Fatalf("component %d: mean of %d elements", k, len(a.Means[k]))
		}
		if rms(a.Means[k], again.Means[k]) != 0 {
			t.Errorf("component %d: two models give one prompt two means", k)
		}
		if d := rms(a.Means[k], other.Means[k]); d < 0.05 {
			t.Errorf("component %d: the means of two prompts are %v apart", k, d)
		}
		for j := range k {
			if d := rms(a.Means[k], a.Means[j]); d < 0.05 {
				t.Errorf("components %d and %d are %v apart", j, k, d)
			}
		}
	}
	if math.Abs(total-1) > 1e-12 {
		t.Errorf("weights sum to %v", total)
	}
}

// A prompt that names a colour leans that way: that channel is the largest, or all are
// dark or light, in the mean of the mixture's images.
func TestModel_ColourNames(t *testing.T) {
	tests := []struct {
		word string
		ok   func(r, g, b float64) bool
	}{
		{"red", func(r, g, b float64) bool { return r > g+60 && r > b+60 }},
		{"green", func(r, g, b float64) bool { return g > r+30 && g > b+30 }},
		{"blue", func(r, g, b float64) bool { return b > r+60 && b > g+30 }},
		{"yellow", func(r, g, b float64) bool { return r > b+60 && g > b+60 }},
		{"black", func(r, g, b float64) bool { return max(r, g, b) < 90 }},
		{"white", func(r, g, b float64) bool { return min(r, g, b) > 170 }},
	}
	m := synthetic.New()
	for _, tt := range tests {
		t.Run(tt.word, func(t *testing.T) {
			for _, form := range []string{"a %s cat", "%s.", "THE %s, SEA"} {
				prompt := fmt.Sprintf(form, tt.word)
				if strings.HasPrefix(form, "THE") {
					prompt = strings.ToUpper(prompt)
				}
				var sum [3]float64
				mix := mixture(t, m, prompt, 64, 64)
				for _, mean := range mix.Means {
					c := average(decode(t, m, mean, 64, 64))
					for ch := range sum {
						sum[ch] += c[ch] / float64(len(mix.Means))
					}
				}
				if !tt.ok(sum[0], sum[1], sum[2]) {
					t.Errorf("%q: mean colour %.0f", prompt, sum)
				}
			}
		})
	}
}

// Decode is affine where nothing is clamped: images of sums are sums of images,
// within the rounding to 8 bits.
func TestModel_DecodeIsLinear(t *testing.T) {
	const height, width, size = 48, 80, 15 * 64
	m := synthetic.New()
	rng := rand.New(rand.NewPCG(11, 12))
	a, b, sum := normals(rng, size), normals(rng, size), make([]float32, size)
	for i := range a {
		a[i] *= 0.1
		b[i] *= 0.1
		sum[i] = a[i] + b[i]
	}
	pa, pb, ps := decode(t, m, a, height, width), decode(t, m, b, height, width), decode(t, m, sum, height, width)
	zero := decode(t, m, make([]float32, size), height, width)
	for i := range ps.Pix {
		if i%4 == 3 {
			if ps.Pix[i] != 255 {
				t.Fatalf("alpha %d", ps.Pix[i])
			}
			continue
		}
		if zero.Pix[i] != 128 { // 255/2 rounded
			t.Fatalf("zero latents: %d, want mid-grey", zero.Pix[i])
		}
		want := float64(pa.Pix[i]) + float64(pb.Pix[i]) - 127.5
		if math.Abs(float64(ps.Pix[i])-want) > 1.5+1e-9 {
			t.Fatalf("byte %d: %d, want %v", i, ps.Pix[i], want)
		}
	}
}

// Equal constant terms in all tokens give one flat colour: the windows of neighbours,
// and of the border, sum to one everywhere.
func TestModel_DecodeHasNoSeams(t *testing.T) {
	const height, width = 64, 32
	m := synthetic.New()
	z := make([]float32, 8*64)
	for i := range z {
		switch i % 64 {
		case 0: // grey
			z[i] = 0.4
		case 21: // red against blue
			z[i] = 0.7
		}
	}
	img := decode(t, m, z, height, width)
	// 255*(1/2 + 0.3*0.4/sqrt(3) +- 0.12*0.7/sqrt(2)) and without the second axis.
	want := [4]uint8{160, 145, 130, 255}
	for i, p := range img.Pix {
		if p != want[i%4] {
			t.Fatalf("byte %d: %d, want %d", i, p, want[i%4])
		}
	}
}

// The last channel of a token is shown nowhere.
func TestModel_DecodeIgnoresChannel63(t *testing.T) {
	m := synthetic.New()
	z := make([]float32, 64)
	z[63] = 100
	for i, p := range decode(t, m, z, 16, 16).Pix {
		if i%4 < 3 && p != 128 {
			t.Fatalf("byte %d: %d", i, p)
		}
	}
}

func TestModel_DecodeRefuses(t *testing.T) {
	m := synthetic.New()
	nan := make([]float32, 64)
	nan[5] = float32(math.NaN())
	tests := []struct {
		name          string
		latents       []float32
		height, width int
		fault         string
	}{
		{"too few", make([]float32, 63), 16, 16, "must be 64"},
		{"size", make([]float32, 64), 16, 8, "multiples of 16"},
		{"NaN", nan, 16, 16, "latent 5 is NaN"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := m.Decode(t.Context(), tt.latents, media.ImageSize(tt.height, tt.width))
			if err == nil || !strings.Contains(err.Error(), tt.fault) {
				t.Errorf("error %v, want one about %q", err, tt.fault)
			}
		})
	}
}

func ExampleModel() {
	m := synthetic.New()
	mix, err := m.Mixture("a red fox", 64, 64)
	if err != nil {
		fmt.Println(err)
		return
	}
	sample, err := m.Decode(context.Background(), mix.Means[0], media.ImageSize(64, 64))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(len(mix.Weights), "components of", len(mix.Means[0]), "elements;", sample.Size().Height, "x",
		sample.Size().Width)
	// Output: 4 components of 1024 elements; 64 x 64
}

func BenchmarkModel(b *testing.B) {
	for _, edge := range []int{64, 1024} {
		m := synthetic.New()
		mix := mixture(b, m, "bench", edge, edge)
		x := normals(rand.New(rand.NewPCG(1, 1)), len(mix.Means[0]))
		dst := make([]float32, len(x))
		b.Run(fmt.Sprintf("op=velocity/edge=%d", edge), func(b *testing.B) {
			for b.Loop() {
				mix.Velocity(dst, x, 0.5)
			}
			b.ReportMetric(float64(len(x))*float64(b.N)/b.Elapsed().Seconds()/1e6, "Melem/s")
		})
		b.Run(fmt.Sprintf("op=decode/edge=%d", edge), func(b *testing.B) {
			for b.Loop() {
				decode(b, m, x, edge, edge)
			}
		})
		b.Run(fmt.Sprintf("op=mixture/edge=%d", edge), func(b *testing.B) {
			for b.Loop() {
				mixture(b, synthetic.New(), "bench", edge, edge)
			}
		})
	}
}

func decode(t testing.TB, m *synthetic.Model, z []float32, height, width int) *image.NRGBA {
	t.Helper()
	sample, err := m.Decode(t.Context(), z, media.ImageSize(height, width))
	if err != nil {
		t.Fatal(err)
	}
	img := sample.Frames[0]
	if img.Rect != image.Rect(0, 0, width, height) {
		t.Fatalf("image %v, want %dx%d", img.Rect, height, width)
	}
	return img
}

func average(img *image.NRGBA) (c [3]float64) {
	for i, p := range img.Pix {
		if i%4 < 3 {
			c[i%4] += float64(p) / float64(len(img.Pix)/4)
		}
	}
	return c
}

func rms(a, b []float32) float64 {
	var s float64
	for i := range a {
		d := float64(a[i] - b[i])
		s += d * d
	}
	return math.Sqrt(s / float64(len(a)))
}
