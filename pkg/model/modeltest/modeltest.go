// Package modeltest is what a model of any family must do, as a test: whatever passes it
// can be sampled, replayed and served.
package modeltest

import (
	"context"
	"errors"
	"image"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/model"
)

// Suite is a family and a checkpoint of it.
type Suite struct {
	Family model.Family
	// Dir is the folder of the checkpoint, "" where the family needs none.
	Dir string
	// Prompts are three that the model tells apart and keeps whole.
	Prompts [3]string
	// Height and Width are a small size that it paints.
	Height, Width int
}

// Run opens the checkpoint and tests it.
func Run(t *testing.T, s Suite) {
	t.Helper()
	m := s.open(t, 1)
	t.Run("card", func(t *testing.T) { s.card(t, m.Card()) })
	t.Run("conditionings are as the card says", func(t *testing.T) { s.conditionings(t, m) })
	b := s.batch(t, m)
	want := b.velocities(t, m, b.all())
	t.Run("a row's bits depend on the row alone", func(t *testing.T) {
		for _, threads := range []int{1, 3} {
			other := s.open(t, threads)
			for _, rows := range [][]int{{0}, {1}, {2}, {3}, {4}, {5}, {3, 0, 0, 5}, {5, 4, 3, 2, 1, 0}} {
				for k, got := range b.velocities(t, other, rows) {
					if !slices.Equal(got, want[rows[k]]) {
						t.Errorf("%d threads: row %d beside %v differs", threads, rows[k], rows)
					}
				}
			}
		}
	})
	t.Run("arguments stay as they are", func(t *testing.T) {
		again := s.batch(t, m)
		for i := range b.x {
			if !slices.Equal(b.x[i], again.x[i]) {
				t.Errorf("the latents of row %d were changed", i)
			}
		}
	})
	t.Run("images have latents", func(t *testing.T) { b.images(t, m) })
	t.Run("calls side by side", func(t *testing.T) { b.sideBySide(t, s.open(t, 2), want) })
	t.Run("faulty arguments are errors", func(t *testing.T) { b.refusals(t, m) })
	t.Run("an ended context ends calls", func(t *testing.T) { b.ended(t, m) })
}

// open opens the checkpoint for the length of the test.
func (s Suite) open(t *testing.T, threads int) model.Model {
	t.Helper()
	m, err := s.Family.Open(s.Dir, model.Options{Threads: threads, PromptCacheBytes: -1})
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

func (s Suite) card(t *testing.T, c model.Card) {
	if err := c.Validate(); err != nil {
		t.Error(err)
	}
	if c.Family != s.Family.Name || c.WeightsDigest == "" || c.Backend == "" {
		t.Errorf("family %q, digest %q, backend %q", c.Family, c.WeightsDigest, c.Backend)
	}
	info, err := s.Family.Inspect(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(info.Problems) > 0 {
		t.Errorf("a model that opens has problems: %q", info.Problems)
	}
	i := info.Card
	i.WeightsDigest, i.Backend = c.WeightsDigest, c.Backend
	if !slices.Equal(i.Conditioning, c.Conditioning) || !slices.Equal(i.Reward, c.Reward) || !slices.Equal(i.SchedulerConfig, c.SchedulerConfig) ||
		i.Name != c.Name || i.Height != c.Height || i.Width != c.Width || i.PixelsPerToken != c.PixelsPerToken || i.LatentChannels != c.LatentChannels ||
		i.ConditioningBytes != c.ConditioningBytes || i.NegativePrompt != c.NegativePrompt || i.CFGRule != c.CFGRule || i.TrueCFGScale != c.TrueCFGScale || i.MaxPixels != c.MaxPixels {
		t.Errorf("the card before it is opened is\n%+v, after\n%+v", i, c)
	}
}

func (s Suite) conditionings(t *testing.T, m model.Model) {
	prompts := []string{s.Prompts[1], s.Prompts[0], s.Prompts[1]}
	conds := encode(t, m, prompts...)
	for i, c := range conds {
		if c.Prompt != prompts[i] || c.Cut != 0 {
			t.Errorf("conditioning %d is of %q, %d tokens cut; want %q, none", i, c.Prompt, c.Cut, prompts[i])
		}
		var names []string
		var size int64
		for _, x := range c.Tensors {
			names = append(names, x.Name)
			size += 4 * int64(len(x.Data))
		}
		if most := m.Card().ConditioningBytes; size > most {
			t.Errorf("conditioning %d takes %d bytes; the card says at most %d", i, size, most)
		}
		if !slices.Equal(names, m.Card().Conditioning) {
			t.Errorf("tensors %v, want %v", names, m.Card().Conditioning)
		}
	}
	same := func(a, b *model.Conditioning) bool {
		return slices.EqualFunc(a.Tensors, b.Tensors, func(a, b model.Tensor) bool {
			return slices.Equal(a.Shape, b.Shape) && slices.Equal(a.Data, b.Data)
		})
	}
	if !same(conds[0], conds[2]) || same(conds[0], conds[1]) {
		t.Error("equal prompts must give equal conditionings, others not")
	}
	cut, err := m.EncodeTruncated(t.Context(), prompts)
	if err != nil {
		t.Fatal(err)
	}
	for i := range cut {
		if !same(cut[i], conds[i]) {
			t.Errorf("prompt %d fits and is changed by truncation", i)
		}
	}
}

func encode(t *testing.T, m model.Model, prompts ...string) []*model.Conditioning {
	t.Helper()
	conds, err := m.Encode(t.Context(), prompts)
	if err != nil || len(conds) != len(prompts) {
		t.Fatalf("%d conditionings of %d prompts, %v", len(conds), len(prompts), err)
	}
	return conds
}

// batch is rows of different prompts and sigmas.
type batch struct {
	x             [][]float32
	sigma         []float32
	cond          []*model.Conditioning
	prompts       []string
	height, width int
}

func (s Suite) batch(t *testing.T, m model.Model) *batch {
	t.Helper()
	tokens, err := m.Card().Tokens(s.Height, s.Width)
	if err != nil {
		t.Fatal(err)
	}
	b := &batch{sigma: []float32{0.9, 1, 0.25, 0.9, 0.02, 0.5}, height: s.Height, width: s.Width, prompts: s.Prompts[:]}
	conds := encode(t, m, s.Prompts[:]...)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range b.sigma {
		x := make([]float32, tokens*m.Card().LatentChannels)
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
		b.x, b.cond = append(b.x, x), append(b.cond, conds[i%len(conds)])
	}
	return b
}

func (b *batch) all() []int {
	rows := make([]int, len(b.x))
	for i := range rows {
		rows[i] = i
	}
	return rows
}

// pick returns the arguments for some rows.
func (b *batch) pick(rows []int) (dst, x [][]float32, sigma []float32, cond []*model.Conditioning) {
	for _, i := range rows {
		dst = append(dst, make([]float32, len(b.x[i])))
		x, sigma, cond = append(x, b.x[i]), append(sigma, b.sigma[i]), append(cond, b.cond[i])
	}
	return dst, x, sigma, cond
}

func (b *batch) velocities(t *testing.T, m model.Model, rows []int) [][]float32 {
	t.Helper()
	dst, x, sigma, cond := b.pick(rows)
	if err := m.Velocity(t.Context(), dst, x, sigma, cond, b.height, b.width); err != nil {
		t.Fatal(err)
	}
	return dst
}

func (b *batch) sideBySide(t *testing.T, m model.Model, want [][]float32) {
	first, err := m.Decode(t.Context(), b.x[0], b.height, b.width)
	if err != nil {
		t.Fatal(err)
	}
	if size := first.Rect.Size(); size != (image.Point{X: b.width, Y: b.height}) {
		t.Errorf("image of %v, want %d x %d", size, b.width, b.height)
	}
	var group sync.WaitGroup
	for i := range b.x {
		group.Go(func() {
			dst, x, sigma, cond := b.pick([]int{i})
			if err := m.Velocity(t.Context(), dst, x, sigma, cond, b.height, b.width); err != nil || !slices.Equal(dst[0], want[i]) {
				t.Errorf("row %d differs beside other calls, or %v", i, err)
			}
			if img, err := m.Decode(t.Context(), b.x[0], b.height, b.width); err != nil || !slices.Equal(img.Pix, first.Pix) {
				t.Errorf("image differs beside other calls, or %v", err)
			}
			if _, err := m.Encode(t.Context(), b.prompts); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

func (b *batch) refusals(t *testing.T, m model.Model) {
	nan := float32(math.NaN())
	for name, change := range map[string]func(dst, x [][]float32, sigma []float32, cond []*model.Conditioning) error{
		"short latents": func(dst, x [][]float32, sigma []float32, cond []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, [][]float32{x[0][1:]}, sigma, cond, b.height, b.width)
		},
		"short result": func(dst, x [][]float32, sigma []float32, cond []*model.Conditioning) error {
			return m.Velocity(t.Context(), [][]float32{dst[0][1:]}, x, sigma, cond, b.height, b.width)
		},
		"fewer sigmas": func(dst, x [][]float32, _ []float32, cond []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, x, nil, cond, b.height, b.width)
		},
		"sigma above 1": func(dst, x [][]float32, _ []float32, cond []*model.Conditioning) error {
			beyond := float32(1.5)
			if m.Card().Prediction != "" { // whose sigmas have no bound
				beyond = float32(math.Inf(1))
			}
			return m.Velocity(t.Context(), dst, x, []float32{beyond}, cond, b.height, b.width)
		},
		"sigma that is no number": func(dst, x [][]float32, _ []float32, cond []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, x, []float32{nan}, cond, b.height, b.width)
		},
		"no conditioning": func(dst, x [][]float32, sigma []float32, _ []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, x, sigma, []*model.Conditioning{nil}, b.height, b.width)
		},
		"conditioning without tensors": func(dst, x [][]float32, sigma []float32, _ []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, x, sigma, []*model.Conditioning{{}}, b.height, b.width)
		},
		"size that is no multiple": func(dst, x [][]float32, sigma []float32, cond []*model.Conditioning) error {
			return m.Velocity(t.Context(), dst, x, sigma, cond, b.height+1, b.width)
		},
		"an image of a size that is no multiple": func(_, _ [][]float32, _ []float32, _ []*model.Conditioning) error {
			_, err := m.EncodeImage(t.Context(), image.NewNRGBA(image.Rect(0, 0, b.width, b.height+1)))
			return err
		},
		"short latents to decode": func(_, x [][]float32, _ []float32, _ []*model.Conditioning) error {
			_, err := m.Decode(t.Context(), x[0][1:], b.height, b.width)
			return err
		},
	} {
		if change(b.pick([]int{0})) == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if err := m.Velocity(t.Context(), nil, nil, nil, nil, b.height, b.width); err != nil {
		t.Errorf("no rows: %v", err)
	}
}

func (b *batch) ended(t *testing.T, m model.Model) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dst, x, sigma, cond := b.pick([]int{0, 1})
	_, encode := m.Encode(ctx, b.prompts)
	_, decode := m.Decode(ctx, b.x[0], b.height, b.width)
	for name, err := range map[string]error{
		"Velocity": m.Velocity(ctx, dst, x, sigma, cond, b.height, b.width), "Encode": encode, "Decode": decode,
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v; want the context's end", name, err)
		}
	}
}

// images are encoded to the latents of their size, with the same bits wherever they lie.
func (b *batch) images(t *testing.T, m model.Model) {
	t.Helper()
	wide := image.NewNRGBA(image.Rect(0, 0, b.width+3, b.height+2))
	for i := range wide.Pix {
		wide.Pix[i] = uint8(37 * i)
	}
	part := wide.SubImage(image.Rect(3, 2, b.width+3, b.height+2)).(*image.NRGBA)
	alone := image.NewNRGBA(image.Rect(0, 0, b.width, b.height))
	for y := range b.height {
		copy(alone.Pix[y*alone.Stride:][:4*b.width], part.Pix[y*part.Stride:])
	}
	got, err1 := m.EncodeImage(t.Context(), part)
	want, err2 := m.EncodeImage(t.Context(), alone)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if len(got) != len(b.x[0]) || !slices.Equal(got, want) {
		t.Errorf("%d latents of a part of an image, want %d, those of the part alone", len(got), len(b.x[0]))
	}
}
