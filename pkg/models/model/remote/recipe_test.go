package remote_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/remote"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
)

var editSize = media.ImageSize(32, 48)

// editRecipe is a recipe with an image of one value.
func editRecipe(text string, value byte) *model.Recipe {
	c := model.NewCondition(model.InputImage, media.ImageSize(8, 8), bytes.Repeat([]byte{value}, 3*64))
	c.Name = "image"
	return &model.Recipe{
		Texts: model.Texts{text}, Size: editSize, Guidance: 4, Arguments: map[string]any{"strength": 0.5},
		Conditions: []model.Condition{c},
	}
}

// openEdit opens a model of a pipeline with a worker.
func openEdit(t *testing.T) (*remotetest.Worker, *remote.Model) {
	t.Helper()
	dir := remotetest.Folder(t, remotetest.EditClass, 1)
	w, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	m, err := remote.Open(t.Context(), dir, remote.Config{Address: address}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return w, m
}

// velocityOf evaluates a state of zeros.
func velocityOf(t *testing.T, m *remote.Model, c *model.Conditioning) []float32 {
	t.Helper()
	tokens, err := m.Card().Tokens(editSize)
	if err != nil {
		t.Fatal(err)
	}
	n := tokens * m.Card().LatentChannels
	row := model.Row{X: make([]float32, n), Sigma: 0.5, Conditioning: c, Dst: make([]float32, n)}
	if err := m.Velocity(t.Context(), []model.Row{row}, editSize); err != nil {
		t.Fatal(err)
	}
	return row.Dst
}

// Conditions are sent once, and decide velocities; a worker that has forgotten all gets the recipe again.
func TestRecipe(t *testing.T) {
	w, m := openEdit(t)
	if p := m.Card().Pipeline; p == nil || p.TypeOf("image") != model.InputImage {
		t.Fatalf("pipeline of the card: %+v", p)
	}
	red, err := m.EncodeRecipe(t.Context(), editRecipe("red", 1))
	if err != nil {
		t.Fatal(err)
	}
	again, err := m.EncodeRecipe(t.Context(), editRecipe("red", 1))
	if err != nil || again != red || w.Calls("encode") != 2 || w.Calls("condition") != 1 {
		t.Errorf("an equal recipe: %v, %d calls of encode, %d of condition", err, w.Calls("encode"),
			w.Calls("condition"))
	}
	other, err := m.EncodeRecipe(t.Context(), editRecipe("red", 2))
	if err != nil {
		t.Fatal(err)
	}
	if len(red.Tensors) != 2 || red.Tensors[0].Name != "prompt_embeds" || len(red.Tensors[0].Data) == 0 ||
		slices.Equal(red.Tensors[1].Data, other.Tensors[1].Data) {
		t.Errorf("what the texts are encoded to: %v", red.Tensors)
	}
	v := velocityOf(t, m, red)
	if slices.Equal(v, velocityOf(t, m, other)) {
		t.Error("another image gives the same velocity")
	}
	w.Forget()
	if !slices.Equal(v, velocityOf(t, m, red)) || w.Calls("put") != 2 { // the first lacks the image
		t.Errorf("a worker that forgot: another velocity, or %d calls of put", w.Calls("put"))
	}
	w.Forget()
	img, err := model.Decode(t.Context(), m, v, editSize, red)
	if err != nil || img.Size() != editSize || w.Calls("put") != 4 {
		t.Errorf("decode: %v of %v, %d calls of put", err, img.Size(), w.Calls("put"))
	}
}

// Texts alone are no recipe, and a network alone takes none.
func TestRecipe_Refused(t *testing.T) {
	_, m := openEdit(t)
	if _, err := model.Encode(t.Context(), m, []model.Texts{{"red"}}, false); !errors.Is(err, model.ErrPrompt) {
		t.Errorf("texts of a pipeline: %v", err)
	}
	dir := remotetest.Folder(t, "FluxPipeline", 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir})
	flux, err := remote.Open(t.Context(), dir, remote.Config{Address: address}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flux.Close() })
	_, err = model.EncodeRecipe(t.Context(), flux, editRecipe("red", 1))
	if !errors.Is(err, model.ErrPrompt) || !strings.Contains(err.Error(), "texts alone") {
		t.Errorf("a recipe of a network: %v", err)
	}
}

// A worker that never keeps what it is sent is given up.
func TestRecipe_Forgotten(t *testing.T) {
	w, m := openEdit(t)
	for range 6 {
		w.Play("condition", remotetest.Then(w.Forget))
	}
	if _, err := m.EncodeRecipe(t.Context(), editRecipe("red", 1)); err == nil ||
		!strings.Contains(err.Error(), "conditions that are not here") {
		t.Errorf("a worker that forgets: %v", err)
	}
}
