package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/modeltest"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/schemas"
	recompute "github.com/meander-rl/meander/services/verify"
)

// tint is a second family, as small as one can be, and unlike the first in all that its
// card says: tokens of 4 x 4 pixels, two tensors of conditioning, plain guidance, a
// negative prompt of its own. An image of it is one colour, that of the prompt.
type tint struct{ card model.Card }

var colours = map[string][3]float32{"red": {0.5, 0.125, 0.125}, "blue": {0.125, 0.25, 0.5}, "grey": {0.25, 0.25, 0.25}}

func tintFamily() model.Family {
	card := func(dir string) model.Card {
		return model.Card{
			Name: model.NameOf(dir), Family: "tint", SchedulerConfig: []byte(`{"shift": 2}`),
			LatentChannels: 48, PixelsPerToken: 4, IndependentRows: true, Size: media.ImageSize(8, 12), NumInferenceSteps: 4,
			TrueCFGScale: 1.5,
			MaxPixels:    4096, MaxPromptTokens: 2, NegativePrompt: "grey", CFGRule: model.CFGPlain,
			Conditioning: []string{"prompt_embeds", "pooled_prompt_embeds"}, ConditioningBytes: 4096, ConditioningTokenBytes: 16,
		}
	}
	return model.Family{
		Name: "tint", Class: "TintPipeline",
		Open: func(dir string, _ model.Options) (model.Model, error) {
			m := &tint{card(dir)}
			m.card.WeightsDigest, m.card.Backend = strings.Repeat("7", 64), "paper"
			return m, nil
		},
		Inspect: func(dir string) (*model.Info, error) { return &model.Info{Card: card(dir)}, nil },
	}
}

func (m *tint) Card() model.Card                        { return m.card }
func (m *tint) MemoryBytes() (weights, working int)     { return 4 * 3 * len(colours), 0 }
func (m *tint) Close() error                            { return nil }
func (m *tint) at(c *model.Conditioning, i int) float32 { return c.Tensors[1].Data[i%3] }

func (m *tint) Encode(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := make([]*model.Conditioning, len(prompts))
	for i, p := range prompts {
		colour, ok := colours[p]
		if !ok {
			return nil, fmt.Errorf("%w: no colour: %q", model.ErrPrompt, p)
		}
		out[i] = &model.Conditioning{Prompt: p, Tensors: []model.Tensor{
			{Name: "prompt_embeds", Shape: []int{2, 1}, Data: []float32{1, 0}},
			{Name: "pooled_prompt_embeds", Shape: []int{3}, Data: colour[:]},
		}}
	}
	return out, nil
}

func (m *tint) EncodeTruncated(ctx context.Context, prompts []string) ([]*model.Conditioning, error) {
	return m.Encode(ctx, prompts)
}

// Velocity is (x - x0) / sigma: all data of a prompt is one point.
func (m *tint) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	if _, err := m.card.CheckRows(rows, size); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, r := range rows {
		for j, v := range r.X {
			r.Dst[j] = (v - m.at(r.Conditioning, j)) / r.Sigma
		}
	}
	return nil
}

func (m *tint) Decode(ctx context.Context, latents []float32, size model.Size) (model.Media, error) {
	height, width := size.Height, size.Width
	if len(latents) != 3*height*width {
		return model.Media{}, fmt.Errorf("latents: %d elements; must be %d", len(latents), 3*height*width)
	}
	if err := ctx.Err(); err != nil {
		return model.Media{}, err
	}
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for i := range height * width { // the pixels of a token lie together
		token := i/width/4*(width/4) + i%width/4
		for c := range 3 {
			img.Pix[4*i+c] = uint8(latents[48*token+3*(i/width%4*4+i%4)+c]*255 + 0.5)
		}
		img.Pix[4*i+3] = 255
	}
	return media.Of(img), nil
}

func (m *tint) EncodeMedia(ctx context.Context, sample model.Media) ([]float32, error) {
	if _, err := m.card.Tokens(sample.Size()); err != nil {
		return nil, err
	}
	img := sample.Frames[0]
	size := img.Rect.Size()
	latents := make([]float32, 3*size.X*size.Y)
	for i := range size.X * size.Y {
		x, y := i%size.X, i/size.X
		for c := range 3 {
			latents[48*(y/4*(size.X/4)+x/4)+3*(y%4*4+x%4)+c] = float32(img.Pix[img.PixOffset(img.Rect.Min.X+x,
				img.Rect.Min.Y+y)+c]) / 255
		}
	}
	return latents, ctx.Err()
}

// folderOf is a model folder with nothing but a class.
func folderOf(t *testing.T, class string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "paint")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "model_index.json"),
		fmt.Appendf(nil, `{"_class_name": %q}`, class), 0o600)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestFamilies_ASecondOneIsAModel(t *testing.T) {
	sequential(t)
	t.Parallel()
	modeltest.Run(t, modeltest.Suite{
		Family: tintFamily(), Dir: folderOf(t, "TintPipeline"), Prompts: [3]string{"red", "blue", "grey"},
		Size: media.ImageSize(8, 12),
	})
}

// A family that the project does not know goes the whole way, from its folder to advantages
// and back through verify: nothing outside a family's package says how a model is.
func TestFamilies_ASecondOne(t *testing.T) {
	sequential(t)
	t.Parallel()
	dir := folderOf(t, "TintPipeline")
	known := append(families.All(), tintFamily())
	w := start(t, func(c *config) { c.sampler.Model, c.sampler.Models = dir, known })
	prompt := &schemas.Prompt{
		UID: "u", Prompt: "red", GroupSize: new(int64(2)), Reward: []schemas.RewardSpec{{Name: "jpeg_compressibility"}},
		ImageSettings: schemas.ImageSettings{Rollout: schemas.Rollout{SDEStepIndices: []int64{0, 1}}},
	}
	if r, err := w.client.Publish(t.Context(), "r", prompt); err != nil || !r.Accepted {
		t.Fatalf("receipt %+v, %v", r, err)
	}
	if a := w.advantages(t, "r", 1)["u"]; a.Status != schemas.StatusComplete {
		t.Fatalf("advantage %+v", a)
	}
	tr, err := w.client.Trajectory(t.Context(), "r", "u", 1)
	if err != nil {
		t.Fatal(err)
	}
	if tr.NegativePrompt != "grey" || tr.CFGRule != schemas.CFGPlain || tr.TrueCFGScale != 1.5 ||
		!slices.Equal(tr.LatentsShape, []int64{6, 48}) || tr.Lane != "paint" || tr.Backend != "paper" {
		t.Errorf("trajectory %+v: want what the card says", tr)
	}
	data, err := w.client.Medium(t.Context(), tr, schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	// grey + 1.5 * (red - grey), in bytes.
	want := [3]uint32{159, 16, 16}
	for y := range 8 {
		for x := range 12 {
			r, g, b, _ := img.At(x, y).RGBA()
			if got := [3]uint32{r >> 8, g >> 8, b >> 8}; got != want {
				t.Fatalf("pixel %d, %d is %v, want %v", x, y, got, want)
			}
		}
	}
	report, err := recompute.Run(t.Context(), w.Bus, "r", recompute.Options{Model: []string{dir}, Models: known})
	if err != nil || !report.OK(0) {
		t.Errorf("verify: %+v, %v", report, err)
	}
}

// What a family is called, and so what is peculiar to it, is written in its package and in
// the list of families, and nowhere else.
func TestFamilies_AreNamedInTheirPackagesAlone(t *testing.T) {
	sequential(t)
	plain := strings.NewReplacer("-", "", "_", "").Replace
	for _, f := range families.All() {
		if f.Class == "" || slices.ContainsFunc(remote.Families(),
			func(r model.Family) bool { return r.Name == f.Name }) {
			continue // its name is what users type; or it is computed elsewhere
		}
		name := plain(f.Name)
		home, named := "pkg/models/model/"+name, 0
		walkFiles(t, func(file string) {
			if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") || isTool(file) {
				return
			}
			text, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case !strings.Contains(plain(strings.ToLower(string(text))), name):
			case strings.HasPrefix(file, home+"/"):
				named++
			case file != "pkg/models/model/families/families.go":
				t.Errorf("%s names the family %s; what it needs to know belongs into model.Card", file, f.Name)
			}
		})
		if named == 0 {
			t.Errorf("no file of %s names it: a family's package has its name", home)
		}
	}
}
