package scorer_test

import (
	"image"
	"image/color"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/scorer"
)

// What is outside the mask counts, and nothing else.
func TestUnchanged(t *testing.T) {
	grey := func() *image.NRGBA { return flat(8, 4, color.NRGBA{100, 100, 100, 255}) }
	condition := func(kind string, img *image.NRGBA) scorer.Condition {
		file, err := media.EncodePNG(img)
		if err != nil {
			t.Fatal(err)
		}
		return scorer.Condition{Name: "of_" + kind, Type: kind, File: file}
	}
	half := flat(8, 4, color.Black) // the right half may change
	for y := range 4 {
		for x := 4; x < 8; x++ {
			half.Set(x, y, color.White)
		}
	}
	given := []scorer.Condition{condition("image", grey()), condition("mask", half)}
	inside, outside := grey(), grey()
	inside.Set(6, 1, color.White)
	outside.Set(2, 1, color.NRGBA{100, 100, 151, 255}) // a fifth of one channel of 16 pixels
	s := open(t, scorer.Unchanged)
	for _, tt := range []struct {
		name string
		in   scorer.Input
		want float64
		err  string
	}{
		{"the same", scorer.Input{Media: media.Of(grey()), Conditions: given}, 1, ""},
		{"inside", scorer.Input{Media: media.Of(inside), Conditions: given}, 1, ""},
		{"outside", scorer.Input{Media: media.Of(outside), Conditions: given}, 1 - 0.2/48, ""},
		{"no image", scorer.Input{Media: media.Of(grey()), Conditions: given[1:]}, 0, "no condition of type image"},
		{"no mask", scorer.Input{Media: media.Of(grey()), Conditions: given[:1]}, 0, "no condition of type mask"},
		{"another size", scorer.Input{Media: media.Of(flat(4, 4, color.White)), Conditions: given}, 0, "must have the size"},
		{"all may change", scorer.Input{Media: media.Of(grey()), Conditions: []scorer.Condition{
			given[0],
			condition("mask", flat(8, 4, color.White)),
		}}, 0, "must have black"},
		{"no file", scorer.Input{Media: media.Of(grey()), Conditions: []scorer.Condition{{Name: "x", Type: "image"}}}, 0, "condition x: "},
	} {
		got, err := s.Score(t.Context(), tt.in)
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) ||
			got-tt.want > 1e-12 || tt.want-got > 1e-12 {
			t.Errorf("%s: %v, %v; want %v, %q", tt.name, got, err, tt.want, tt.err)
		}
	}
	if !scorer.SeesConditions(s) || scorer.SeesConditions(open(t, scorer.Synthetic)) {
		t.Error("unchanged sees conditions, synthetic does not")
	}
	for types, want := range map[string]bool{"image mask": true, "mask image audio": true, "image": false, "": false} {
		if err := scorer.CheckConditions(scorer.Unchanged, strings.Fields(types)); (err == nil) != want {
			t.Errorf("conditions %q: %v", types, err)
		}
	}
	if err := scorer.CheckConditions(scorer.Glyph, nil); err != nil {
		t.Error(err)
	}
}
