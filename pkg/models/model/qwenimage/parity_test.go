package qwenimage_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/qwenimage"
	"github.com/meander-rl/meander/pkg/models/safetensors"
)

// Goldens in testdata/golden come from deploy/golden/make_golden.py; versions and seed
// are in its meta.json.
const golden = "testdata/golden"

// Tolerances against the reference, as relative L2 distance in float32. Both sides round
// every operation, in different orders; a run adds up the differences of its steps.
const (
	textTolerance     = 1e-5
	velocityTolerance = 1e-5
	loraTolerance     = 1e-5
	pixelTolerance    = 1e-5
	latentTolerance   = 1e-5
	runTolerance      = 5e-5
)

// goldens is a file of reference tensors.
type goldens struct {
	t testing.TB
	a *safetensors.Archive
}

func openGoldens(t testing.TB, name string) goldens {
	t.Helper()
	a, err := safetensors.Open(filepath.Join(golden, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return goldens{t, a}
}

func (g goldens) floats(name string) []float32 {
	g.t.Helper()
	x, err := g.a.Floats(name)
	if err != nil {
		g.t.Fatal(err)
	}
	return x
}

func (g goldens) ints(name string) []int {
	g.t.Helper()
	b, err := g.a.Bytes(name)
	if err != nil {
		g.t.Fatal(err)
	}
	out := make([]int, len(b)/4)
	for i := range out {
		out[i] = int(int32(uint32(b[4*i]) | uint32(b[4*i+1])<<8 | uint32(b[4*i+2])<<16 | uint32(b[4*i+3])<<24))
	}
	return out
}

// meta is meta.json: what the goldens were made from.
type meta struct {
	Prompts []string `json:"prompts"`
	Long    []string `json:"long"`
	Signs   struct {
		Prompts []string          `json:"prompts"`
		SHA256  map[string]string `json:"sha256"`
	} `json:"signs"`
}

func readMeta(t testing.TB) (m meta) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(golden, "meta.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// goldenPrompts returns the prompts that the goldens were made from.
func goldenPrompts(t testing.TB) []string {
	t.Helper()
	return readMeta(t).Prompts
}

func openModel(t testing.TB, name string, o qwenimage.Options) *qwenimage.Model {
	t.Helper()
	m, err := qwenimage.Open(filepath.Join(golden, name), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func encodeAll(t testing.TB, m model.Model, prompts ...string) []*model.Conditioning {
	t.Helper()
	c, err := m.Encode(t.Context(), prompts)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// relative returns |got - want| / |want| in the L2 norm.
func relative(t testing.TB, got, want []float32) float64 {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d elements, want %d", len(got), len(want))
	}
	var diff, norm float64
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		diff += d * d
		norm += float64(want[i]) * float64(want[i])
	}
	return math.Sqrt(diff / norm)
}

func within(t testing.TB, what string, got, want []float32, tolerance float64) {
	t.Helper()
	r := relative(t, got, want)
	t.Logf("%s: relative L2 %.2g", what, r)
	if !(r < tolerance) {
		t.Errorf("%s: relative L2 distance %.3g, want less than %g\n got %v\nwant %v", what, r, tolerance,
			got[:min(6, len(got))], want[:min(6, len(want))])
	}
}

// rows splits x in n equal parts.
func rows(x []float32, n int) [][]float32 {
	out := make([][]float32, n)
	for i := range out {
		out[i] = x[i*len(x)/n : (i+1)*len(x)/n]
	}
	return out
}

// rowsOf are rows with new results.
func rowsOf(x [][]float32, sigma []float32, cond []*model.Conditioning) (rows []model.Row, dst [][]float32) {
	for i := range x {
		dst = append(dst, make([]float32, len(x[i])))
		rows = append(rows, model.Row{X: x[i], Sigma: sigma[i], Conditioning: cond[i], Dst: dst[i]})
	}
	return rows, dst
}

// velocities evaluates all rows in one call.
func velocities(t testing.TB, m model.Model, x [][]float32, sigma []float32, cond []*model.Conditioning, h,
	w int,
) [][]float32 {
	t.Helper()
	rows, dst := rowsOf(x, sigma, cond)
	if err := m.Velocity(t.Context(), rows, media.ImageSize(h, w)); err != nil {
		t.Fatal(err)
	}
	return dst
}

func TestParity_Encode(t *testing.T) {
	g, prompts := openGoldens(t, "text.safetensors"), goldenPrompts(t)
	for _, name := range []string{"full", "half"} {
		m := openModel(t, name, qwenimage.Options{})
		cond := encodeAll(t, m, prompts...)
		for i, c := range cond {
			within(t, fmt.Sprintf("%s prompt %d", name, i), c.Tensors[0].Data, g.floats(fmt.Sprintf("%s.%d", name, i)),
				textTolerance)
		}
	}
}

// A prompt that is too long is refused, and cut where the pipeline cuts it when asked to.
func TestParity_EncodeTruncated(t *testing.T) {
	g, long := openGoldens(t, "long.safetensors"), readMeta(t).Long
	for _, tt := range []struct{ prompt, most int }{{0, 512}, {1, 512}, {1, 1024}} {
		for _, name := range []string{"full", "half"} {
			m := openModel(t, name, qwenimage.Options{MaxPromptTokens: tt.most})
			prompts := []string{"short", long[tt.prompt]}
			cond, err := m.EncodeTruncated(t.Context(), prompts)
			if err != nil {
				t.Fatal(err)
			}
			if c := cond[0]; c.Cut != 0 {
				t.Errorf("a short prompt is cut by %d tokens", c.Cut)
			}
			c := cond[1]
			embeds := c.Tensors[0]
			tokens, width := embeds.Shape[0], embeds.Shape[1]
			if tokens != tt.most || c.Cut < 1 || c.Prompt != long[tt.prompt] {
				t.Errorf("%d tokens, %d cut off, want %d and some", tokens, c.Cut, tt.most)
			}
			var eighth []float32
			for i := 0; i < tokens; i += 8 {
				eighth = append(eighth, embeds.Data[i*width:(i+1)*width]...)
			}
			key := fmt.Sprintf("%s.%d.%d", name, tt.prompt, tt.most)
			within(t, key, eighth, g.floats(key), textTolerance)
			// Known by now, it is refused all the same.
			_, err = m.Encode(t.Context(), prompts)
			want := fmt.Sprintf("%d tokens; must be at most %d", tokens+c.Cut, tt.most)
			if !errors.Is(err, model.ErrPrompt) || !strings.Contains(err.Error(), want) {
				t.Errorf("Encode: %v, want %s", err, want)
			}
		}
	}
}

func TestParity_Velocity(t *testing.T) {
	g, prompts := openGoldens(t, "velocity.safetensors"), goldenPrompts(t)
	full, half := openModel(t, "full", qwenimage.Options{}), openModel(t, "half", qwenimage.Options{})
	for _, name := range []string{"single", "noise", "terminal", "padded", "sigmas", "token", "tall", "half"} {
		t.Run(name, func(t *testing.T) {
			m := full
			if name == "half" {
				m = half
			}
			var texts []string
			for _, i := range g.ints(name + ".prompts") {
				texts = append(texts, prompts[i])
			}
			size := g.ints(name + ".size")
			x, want := rows(g.floats(name+".x"), len(texts)), rows(g.floats(name+".v"), len(texts))
			got := velocities(t, m, x, g.floats(name+".sigma"), encodeAll(t, m, texts...), size[0], size[1])
			for i := range got {
				within(t, fmt.Sprintf("row %d", i), got[i], want[i], velocityTolerance)
			}
		})
	}
}

func TestParity_Autoencoder(t *testing.T) {
	g := openGoldens(t, "vae.safetensors")
	for _, name := range []string{"full", "half"} {
		m := openModel(t, name, qwenimage.Options{})
		for _, size := range [][2]int{{64, 128}, {16, 48}, {80, 16}} {
			h, w := size[0], size[1]
			key := fmt.Sprintf("%s.%dx%d", name, h, w)
			got, err := m.DecodePixels(t.Context(), g.floats(key+".latents"), media.ImageSize(h, w))
			if err != nil {
				t.Fatal(err)
			}
			want := make([]float32, len(got)) // the golden has channels first
			for i, p := range g.floats(key + ".pixels") {
				want[i%(h*w)*3+i/(h*w)] = p
			}
			within(t, key+" decode", got, want, pixelTolerance)

			raw, err := g.a.Bytes(key + ".image")
			if err != nil {
				t.Fatal(err)
			}
			latents, err := m.EncodeMedia(t.Context(), media.Of(toImage(raw, h, w)))
			if err != nil {
				t.Fatal(err)
			}
			within(t, key+" encode", latents, g.floats(key+".encoded"), latentTolerance)
		}
	}
}

// toImage makes an image of RGB bytes.
func toImage(rgb []byte, h, w int) *image.NRGBA {
	img := image.NewNRGBA(image.Rect(0, 0, w, h))
	for i := range h * w {
		copy(img.Pix[4*i:], rgb[3*i:3*i+3])
		img.Pix[4*i+3] = 255
	}
	return img
}

// TestParity_Run repeats whole runs of the pipeline from its own noise: Euler steps over
// its sigmas with guidance, then the image.
func TestParity_Run(t *testing.T) {
	g, prompts := openGoldens(t, "runs.safetensors"), goldenPrompts(t)
	for _, tt := range []struct{ name, model, negative string }{
		{"guided", "full", " "}, {"plain", "full", ""}, {"half", "half", "blurry, ugly"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := openModel(t, tt.model, qwenimage.Options{})
			var texts []string
			for _, i := range g.ints(tt.name + ".prompts") {
				texts = append(texts, prompts[i])
			}
			n := len(texts)
			cond := encodeAll(t, m, texts...)
			scale := float64(g.floats(tt.name + ".scale")[0])
			if scale > 1 {
				for range n {
					cond = append(cond, encodeAll(t, m, tt.negative)...)
				}
			}
			size, sigmas := g.ints(tt.name+".size"), g.floats(tt.name+".sigmas")
			steps := rows(g.floats(tt.name+".latents"), len(sigmas))
			x := rows(append([]float32(nil), steps[0]...), n)
			euler(t, m, x, sigmas, cond, scale, size[0], size[1], func(step int) {
				if step == 1 {
					within(t, "first step", flat(x), steps[1], velocityTolerance)
				}
			})
			within(t, "last latents", flat(x), steps[len(steps)-1], runTolerance)
			compareImages(t, m, x, g, tt.name+".image", size[0], size[1])
		})
	}
}

// euler moves x along the sigmas. With more conditionings than rows the second half is
// negative, for guidance. after is called after each step, unless it is nil.
func euler(
	t testing.TB, m model.Model, x [][]float32, sigmas []float32, cond []*model.Conditioning, scale float64, h, w int,
	after func(step int),
) {
	t.Helper()
	n, in := len(x), x
	guided := len(cond) > n
	if guided {
		in = append(append([][]float32(nil), x...), x...)
	}
	at := make([]float32, len(cond))
	for s := range len(sigmas) - 1 {
		for i := range at {
			at[i] = sigmas[s]
		}
		v := velocities(t, m, in, at, cond, h, w)
		for i := range x {
			if guided {
				guide(v[i], v[n+i], scale, m.Card().LatentChannels)
			}
			for j := range x[i] {
				x[i][j] += (sigmas[s+1] - sigmas[s]) * v[i][j]
			}
		}
		if after != nil {
			after(s + 1)
		}
	}
}

// compareImages decodes x: at most one byte in a thousand may differ from the golden, by
// one.
func compareImages(t testing.TB, m model.Model, x [][]float32, g goldens, name string, h, w int) {
	t.Helper()
	raw, err := g.a.Bytes(name)
	if err != nil {
		t.Fatal(err)
	}
	off, most := 0, 0
	for i := range x {
		sample, err := m.Decode(t.Context(), x[i], media.ImageSize(h, w))
		if err != nil {
			t.Fatal(err)
		}
		img, want := sample.Frames[0], toImage(raw[i*len(raw)/len(x):(i+1)*len(raw)/len(x)], h, w)
		for j := range want.Pix {
			if d := int(img.Pix[j]) - int(want.Pix[j]); d != 0 {
				off, most = off+1, max(most, d, -d)
			}
		}
	}
	t.Logf("%d of %d bytes differ, at most by %d", off, len(raw), most)
	if most > 1 || off*1000 > len(raw) {
		t.Errorf("%d of %d bytes differ, at most by %d: want 0.1 %%, by 1", off, len(raw), most)
	}
}

// guide replaces v by the guided velocity with every token rescaled to the norm of v.
func guide(v, negative []float32, scale float64, channels int) {
	for i := 0; i < len(v); i += channels {
		var norm, combined float64
		c := make([]float64, channels)
		for j := range channels {
			p, n := float64(v[i+j]), float64(negative[i+j])
			c[j] = n + scale*(p-n)
			norm += p * p
			combined += c[j] * c[j]
		}
		for j := range channels {
			v[i+j] = float32(c[j] * math.Sqrt(norm/combined))
		}
	}
}

func flat(x [][]float32) []float32 {
	var out []float32
	for _, r := range x {
		out = append(out, r...)
	}
	return out
}
