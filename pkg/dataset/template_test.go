package dataset_test

import (
	"fmt"
	"testing"

	"github.com/meander-rl/meander/pkg/dataset"
)

func TestTemplate_Apply(t *testing.T) {
	record := func() *dataset.Record {
		return &dataset.Record{Index: 3, GroundTruth: "OPEN", Fields: object{
			"prompt": "a red sign", "seed": int64(9),
			"metadata": object{"colour": "red", "count": int64(2), "scale": 0.5, "list": []any{int64(1)}, "two words": "x"},
		}}
	}
	tests := []struct{ template, want string }{
		{`{prompt}`, `a red sign`},
		{`a sign that says "{ground_truth}"`, `a sign that says "OPEN"`},
		{`{colour}{count}: {prompt}, {scale}`, `red2: a red sign, 0.5`},
		{`{{{prompt}}} {{}}`, `{a red sign} {}`},
		{`{two words} {index} {seed}`, `x 3 9`},
	}
	for _, tt := range tests {
		parsed, err := dataset.ParseTemplate(tt.template)
		if err != nil {
			t.Errorf("%s: %v", tt.template, err)
			continue
		}
		r := record()
		if err := parsed.Apply(r); err != nil {
			t.Errorf("%s: %v", tt.template, err)
		}
		if got, _ := r.Prompt(); got != tt.want {
			t.Errorf("%s gives %q, want %q", tt.template, got, tt.want)
		}
	}
	for _, tt := range []struct{ template, want string }{
		{`{nothing}`, `nothing: must have a value, since the template has {nothing}`},
		{`{list}`, `list: a list of 1; must be a text, a number, true or false, since the template has {list}`},
		{`{negative_prompt}`, `negative_prompt: must have a value, since the template has {negative_prompt}`},
	} {
		parsed, err := dataset.ParseTemplate(tt.template)
		if err != nil {
			t.Errorf("%s: %v", tt.template, err)
			continue
		}
		if err := parsed.Apply(record()); fmt.Sprint(err) != tt.want {
			t.Errorf("%s: error %v, want %s", tt.template, err, tt.want)
		}
	}
}

func TestParseTemplate_Errors(t *testing.T) {
	for template, want := range map[string]string{
		`a sign`:    `template: "a sign"; must have at least one field, such as {prompt}`,
		``:          `template: ""; must have at least one field, such as {prompt}`,
		`{prompt`:   `template: "{prompt"; must have a } after each {; a brace itself is {{`,
		`{a{b}}`:    `template: "{a{b}}"; must have a } after each {; a brace itself is {{`,
		`prompt}`:   `template: "prompt}"; must have a { before each }; a brace itself is }}`,
		`a {} sign`: `template: "a {} sign"; must have the name of a field in {}`,
	} {
		if _, err := dataset.ParseTemplate(template); fmt.Sprint(err) != want {
			t.Errorf("%q: error %v, want %s", template, err, want)
		}
	}
}
