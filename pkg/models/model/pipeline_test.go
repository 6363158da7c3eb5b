package model_test

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/model"
)

var edit = &model.Pipeline{
	Class: "EditPipeline", RandomAccess: model.AccessExact,
	Conditions: []model.Input{
		{Name: "image", Type: model.InputImage, Required: true},
		{Name: "more", Type: model.InputImages},
		{Name: "lyrics", Type: model.InputText, Required: true},
	},
	Arguments: []model.Input{
		{Name: "scale", Type: model.InputNumber},
		{Name: "length", Type: model.InputInteger},
		{Name: "clean", Type: model.InputBoolean},
	},
}

// Arguments are read by the types of the pipeline, and written back in one way.
func TestPipeline_Values(t *testing.T) {
	v, err := edit.Values(map[string]string{"scale": "4.0", "length": "007", "clean": "true", "lyrics": "la la"})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"scale": "4", "length": "7", "clean": "true", "lyrics": "la la"} {
		if got := model.Canonical(v[name]); got != want {
			t.Errorf("%s: %q; must be %q", name, got, want)
		}
	}
	for name, want := range map[string]string{
		"scale": "NaN: x", "length": "1.5", "clean": "yes", "callback": "f",
	} {
		_, err := edit.Values(map[string]string{"lyrics": "la", name: want})
		if err == nil || !strings.Contains(err.Error(), "arguments: "+name) {
			t.Errorf("%s=%s: %v", name, want, err)
		}
	}
	if _, err := edit.Values(map[string]string{"scale": "inf", "lyrics": ""}); err == nil {
		t.Error("an infinite number is taken")
	}
	if _, err := edit.Values(nil); err == nil || !strings.Contains(err.Error(), "arguments: lyrics: absent") {
		t.Errorf("a text that is required: %v", err)
	}
}

// Conditions are checked by name and number.
func TestPipeline_CheckConditions(t *testing.T) {
	for _, c := range []struct {
		given map[string]int
		want  string // empty: none
	}{
		{map[string]int{"image": 1}, ""},
		{map[string]int{"image": 1, "more": 3}, ""},
		{map[string]int{"more": 1}, "conditions: image: absent; must be given, EditPipeline needs an image"},
		{map[string]int{"image": 2}, "conditions: image: 2 files; must be one image"},
		{map[string]int{"image": 1, "depth": 1}, "conditions: depth; must be one that EditPipeline takes: image, more"},
		{map[string]int{"image": 1, "lyrics": 1}, "conditions: lyrics: a file; must be a text, given as an argument"},
	} {
		err := edit.CheckConditions(c.given)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v; must be %q", c.given, err, c.want)
		}
	}
}
