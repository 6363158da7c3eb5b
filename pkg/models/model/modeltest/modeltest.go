// Package modeltest tests what a model of any family must do. A model that passes can be
// sampled, replayed and served.
package modeltest

import (
	"context"
	"errors"
	"image"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
)

// Suite is a family and a checkpoint of it.
type Suite struct {
	Family model.Family
	// Dir is the folder of the checkpoint, "" if the family needs none.
	Dir string
	// Prompts are three prompts with different conditionings, none too long for the model.
	Prompts [3]string
	// Size is a small size that the model can make.
	Size model.Size
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
		if !m.Card().IndependentRows {
			t.Skip("the card says that rows depend on each other")
		}
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
		for i, r := range b.rows {
			if !slices.Equal(r.X, again.rows[i].X) {
				t.Errorf("the latents of row %d were changed", i)
			}
		}
	})
	t.Run("media have latents", func(t *testing.T) { b.media(t, m) })
	t.Run("calls side by side", func(t *testing.T) {
		if !m.Card().IndependentRows { // they are calls of one row
			for i := range b.rows {
				want[i] = b.velocities(t, m, []int{i})[0]
			}
		}
		b.sideBySide(t, s.open(t, 2), want)
	})
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

// card tests that the card is valid and that Inspect gives the same one.
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
	if !reflect.DeepEqual(i, c) {
		t.Errorf("the card before it is opened is\n%+v, after\n%+v", i, c)
	}
}

// conditionings tests that encoded prompts are as the card says, and equal for equal prompts.
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
	if several := m.Card().Prompts; several > 1 {
		texts := func(last string) model.Texts {
			return append(slices.Repeat(model.Texts{s.Prompts[0]}, several-1), last)
		}
		more, err := model.Encode(t.Context(), m, []model.Texts{texts(s.Prompts[0]), texts(s.Prompts[1])}, false)
		if err != nil || len(more) != 2 || !same(more[0], conds[1]) || same(more[1], conds[1]) ||
			same(more[1], conds[0]) {
			t.Errorf("several texts, %v: equal ones must give what one gives, others not", err)
		}
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
	rows    []model.Row // without results
	prompts []string
	size    model.Size
}

// batch returns rows with random latents, which are the same on every call.
func (s Suite) batch(t *testing.T, m model.Model) *batch {
	t.Helper()
	card := m.Card()
	tokens, err := card.Tokens(s.Size)
	if err != nil {
		t.Fatal(err)
	}
	b := &batch{size: s.Size, prompts: s.Prompts[:]}
	conds := encode(t, m, s.Prompts[:]...)
	rng := rand.New(rand.NewPCG(1, 2))
	for i, sigma := range []float32{0.9, 1, 0.25, 0.9, 0.02, 0.5} {
		x := make([]float32, tokens*card.LatentChannels)
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
		b.rows = append(b.rows, model.Row{
			X: x, Sigma: sigma, Conditioning: conds[i%len(conds)],
			Guidance: float32(card.Guidance),
		})
	}
	return b
}

func (b *batch) all() []int {
	rows := make([]int, len(b.rows))
	for i := range rows {
		rows[i] = i
	}
	return rows
}

// pick returns some rows, with new results.
func (b *batch) pick(indices ...int) []model.Row {
	rows := make([]model.Row, len(indices))
	for k, i := range indices {
		rows[k] = b.rows[i]
		rows[k].Dst = make([]float32, len(rows[k].X))
	}
	return rows
}

// velocities returns the velocities that m gives for the rows with these indices in one call. An
// error of m ends the test.
func (b *batch) velocities(t *testing.T, m model.Model, indices []int) [][]float32 {
	t.Helper()
	rows := b.pick(indices...)
	if err := m.Velocity(t.Context(), rows, b.size); err != nil {
		t.Fatal(err)
	}
	dst := make([][]float32, len(rows))
	for i, r := range rows {
		dst[i] = r.Dst
	}
	return dst
}

// sideBySide tests that concurrent calls give the same results as single ones.
func (b *batch) sideBySide(t *testing.T, m model.Model, want [][]float32) {
	first, err := m.Decode(t.Context(), b.rows[0].X, b.size)
	if err != nil {
		t.Fatal(err)
	}
	if size := first.Size(); size != b.size {
		t.Errorf("media of %v, want %v", size, b.size)
	}
	var group sync.WaitGroup
	for i := range b.rows {
		group.Go(func() {
			rows := b.pick(i)
			if err := m.Velocity(t.Context(), rows, b.size); err != nil || !slices.Equal(rows[0].Dst, want[i]) {
				t.Errorf("row %d differs beside other calls, or %v", i, err)
			}
			if again, err := m.Decode(t.Context(), b.rows[0].X, b.size); err != nil ||
				again.Digest() != first.Digest() {
				t.Errorf("media differ beside other calls, or %v", err)
			}
			if _, err := m.Encode(t.Context(), b.prompts); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

// refusals tests that faulty arguments are errors.
func (b *batch) refusals(t *testing.T, m model.Model) {
	beyond := float32(1.5)
	if m.Card().Prediction != "" { // whose sigmas have no bound
		beyond = float32(math.Inf(1))
	}
	for name, change := range map[string]func(r *model.Row, size *model.Size){
		"short latents":                func(r *model.Row, _ *model.Size) { r.X = r.X[1:] },
		"short result":                 func(r *model.Row, _ *model.Size) { r.Dst = r.Dst[1:] },
		"sigma above 1":                func(r *model.Row, _ *model.Size) { r.Sigma = beyond },
		"sigma that is no number":      func(r *model.Row, _ *model.Size) { r.Sigma = float32(math.NaN()) },
		"no conditioning":              func(r *model.Row, _ *model.Size) { r.Conditioning = nil },
		"conditioning without tensors": func(r *model.Row, _ *model.Size) { r.Conditioning = &model.Conditioning{} },
		"size that is no multiple":     func(_ *model.Row, size *model.Size) { size.Height++ },
		"no frames":                    func(_ *model.Row, size *model.Size) { size.Frames = 0 },
		"guidance where the network takes none": func(r *model.Row, size *model.Size) {
			if r.Guidance = 1; m.Card().Guidance != 0 {
				size.Frames = -1 // it takes any
			}
		},
	} {
		rows, size := b.pick(0), b.size
		change(&rows[0], &size)
		if m.Velocity(t.Context(), rows, size) == nil {
			t.Errorf("%s: no error", name)
		}
	}
	odd := image.NewNRGBA(image.Rect(0, 0, b.size.Width, b.size.Height+1))
	for _, sample := range []model.Media{media.Of(odd), {}} {
		if _, err := m.EncodeMedia(t.Context(), sample); err == nil {
			t.Errorf("media of %v are encoded", sample.Size())
		}
	}
	if _, err := m.Decode(t.Context(), b.rows[0].X[1:], b.size); err == nil {
		t.Error("short latents are decoded")
	}
	if err := m.Velocity(t.Context(), nil, b.size); err != nil {
		t.Errorf("no rows: %v", err)
	}
}

// ended tests that calls with a cancelled context return its error.
func (b *batch) ended(t *testing.T, m model.Model) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, encode := m.Encode(ctx, b.prompts)
	_, decode := m.Decode(ctx, b.rows[0].X, b.size)
	for name, err := range map[string]error{
		"Velocity": m.Velocity(ctx, b.pick(0, 1), b.size), "Encode": encode, "Decode": decode,
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v; want the context's end", name, err)
		}
	}
}

// media tests that media are encoded to latents of their size, with the same bits wherever their pixels are in
// memory.
func (b *batch) media(t *testing.T, m model.Model) {
	t.Helper()
	var part, alone model.Media
	for frame := range b.size.Frames {
		wide := image.NewNRGBA(image.Rect(0, 0, b.size.Width+3, b.size.Height+2))
		for i := range wide.Pix {
			wide.Pix[i] = uint8(37*i + frame)
		}
		view := wide.SubImage(image.Rect(3, 2, b.size.Width+3, b.size.Height+2)).(*image.NRGBA)
		copied := image.NewNRGBA(image.Rect(0, 0, b.size.Width, b.size.Height))
		for y := range b.size.Height {
			copy(copied.Pix[y*copied.Stride:][:4*b.size.Width], view.Pix[y*view.Stride:])
		}
		part.Frames, alone.Frames = append(part.Frames, view), append(alone.Frames, copied)
	}
	got, err1 := m.EncodeMedia(t.Context(), part)
	want, err2 := m.EncodeMedia(t.Context(), alone)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if len(got) != len(b.rows[0].X) || !slices.Equal(got, want) {
		t.Errorf("%d latents of a part of larger frames, want %d, those of the part alone", len(got), len(b.rows[0].X))
	}
}
