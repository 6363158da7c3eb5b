package jinja_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/jinja"
)

// value is JSON as a template sees it: dictionaries keep their order, integers are no floats.
type value struct{ any }

func (v *value) UnmarshalJSON(b []byte) (err error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v.any, err = read(d)
	return err
}

func read(d *json.Decoder) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case json.Number:
		if i, err := t.Int64(); err == nil {
			return i, nil
		}
		return t.Float64()
	case json.Delim:
		if t == '[' {
			list := []any{}
			for d.More() {
				v, err := read(d)
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
			_, err = d.Token()
			return list, err
		}
		dict := jinja.Dict{}
		for d.More() {
			k, err := d.Token()
			if err != nil {
				return nil, err
			}
			v, err := read(d)
			if err != nil {
				return nil, err
			}
			dict = append(dict, jinja.Pair{Key: k.(string), Value: v})
		}
		_, err = d.Token()
		return dict, err
	}
	return t, nil
}

type result struct {
	Text  *string
	Error string
}

func readJSON[T any](t testing.TB, name string) (v T) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err == nil {
		err = json.Unmarshal(b, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func variables(of map[string]value) map[string]any {
	out := map[string]any{}
	for name, v := range of {
		out[name] = v.any
	}
	return out
}

func render(source string, variables map[string]any) (string, error) {
	t, err := jinja.Parse(source)
	if err != nil {
		return "", err
	}
	return t.Render(variables)
}

// Conversations in the templates of testdata are those of transformers, byte for byte, and what one refuses the
// other does.
func TestRender_IsThatOfTransformers(t *testing.T) {
	t.Parallel()
	cases := readJSON[[]struct {
		Name      string
		Variables map[string]value
		Texts     map[string]result
	}](t, "conversations.json")
	files, err := filepath.Glob("testdata/templates/*.jinja")
	if err != nil || len(files) < 15 || len(cases) < 15 {
		t.Fatalf("%d templates, %d conversations: %v", len(files), len(cases), err)
	}
	for _, file := range files {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".jinja")
		template, err := jinja.Parse(string(source))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, c := range cases {
			want, there := c.Texts[name]
			if !there {
				t.Fatalf("%s is not recorded", name)
			}
			got, err := template.Render(variables(c.Variables))
			compare(t, name+": "+c.Name, got, err, want)
		}
	}
}

func compare(t *testing.T, what, got string, err error, want result) {
	t.Helper()
	switch {
	case want.Text == nil && err == nil:
		t.Errorf("%s: %q, must fail: %s", what, got, want.Error)
	case want.Text == nil:
		message, raised := strings.CutPrefix(want.Error, "TemplateError: ")
		var r *jinja.Raised
		if errors.As(err, &r) != raised || raised && r.Message != message {
			t.Errorf("%s: %v, want %s", what, err, want.Error)
		}
	case err != nil:
		t.Errorf("%s: %v", what, err)
	case got != *want.Text:
		t.Errorf("%s:\n got %q\nwant %q", what, got, *want.Text)
	}
}

// Expressions print what they print in Jinja, and fail where they fail there.
func TestRender_Expressions(t *testing.T) {
	t.Parallel()
	recorded := readJSON[struct {
		Variables   map[string]value
		Expressions []struct {
			Source string
			result
		}
	}](t, "expressions.json")
	if len(recorded.Expressions) < 250 {
		t.Fatalf("%d expressions", len(recorded.Expressions))
	}
	for _, e := range recorded.Expressions {
		got, err := render(e.Source, variables(recorded.Variables))
		compare(t, e.Source, got, err, e.result)
	}
}

// What a template says when it refuses is for a terminal, too: it can write nothing there but text.
func TestRaised_Error(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"roles must alternate":       "the template refuses: roles must alternate",
		"no \x1b[31mred prompts\x07": `the template refuses: "no \x1b[31mred prompts\a"`,
	} {
		_, err := render("{{ raise_exception(message) }}", map[string]any{"message": message})
		var r *jinja.Raised
		if !errors.As(err, &r) || r.Message != message || r.Error() != want {
			t.Errorf("%q: %v, want %s", message, err, want)
		}
	}
}

// A template that takes more than it may ends with ErrLimit: it neither runs on nor fills the memory.
func TestRender_IsBounded(t *testing.T) {
	t.Parallel()
	for _, source := range []string{
		"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
		"{% for i in range(99999) %}{{ s ~ s ~ s }}{% endfor %}",
		"{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
		"{% set ns = namespace(x=[1, 2]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
		"{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
		"{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == " +
			"ns.x[::-1] }}",
		"{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
		"{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
		"{{ 'a' * 999999999999 }}", "{{ [1] * 999999999999 }}", "{{ range(999999999999) }}", "{{ range(999999) }}",
		"{{ '%999999999d' % 1 }}",
		"{{ 'a'.zfill(999999999) }}",
		"{{ 'a\nb' | indent(999999999) }}",
		"{{ [1] | batch(999999999, 2) | list }}",
		"{{ s | replace('', s) | replace('', s) | replace('', s) }}",
		"{{ s.join(range(99999) | map('string')).join(range(9999) | map('string')) }}",
		"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
		"{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
		"{{ " + strings.Repeat("(", 999) + "1" + strings.Repeat(")", 999) + " }}",
		"{{ " + strings.Repeat("[", 999) + strings.Repeat("]", 999) + " }}",
		"{{ " + strings.Repeat("not ", 9999) + "1 }}",
		"{{ " + strings.Repeat("-", 9999) + "1 }}",
		"{{ 1" + strings.Repeat(" + 1", 99999) + " }}", strings.Repeat("{% if 1 %}", 9999),
	} {
		if _, err := render(source, map[string]any{"s": strings.Repeat("abcdefgh", 1000)}); !errors.Is(err,
			jinja.ErrLimit) {
			t.Errorf("%.80s: %v, want an ErrLimit", source, err)
		}
	}
	if _, err := jinja.Parse(strings.Repeat(" ", jinja.MaxSource+1)); err == nil {
		t.Error("a text of any length is read")
	}
}

// What Jinja has and this package has not is refused by name, where the text shows it before anything is rendered.
func TestParse_RefusesByName(t *testing.T) {
	t.Parallel()
	for source, want := range map[string]string{
		"{% include 'x' %}":           "include",
		"{% import 'x' as y %}":       "import",
		"{% from 'x' import y %}":     "from",
		"{% extends 'x' %}":           "extends",
		"{% block x %}{% endblock %}": "block", "{% autoescape true %}{% endautoescape %}": "autoescape",
		"{{ s | pprint }}":        `filter "pprint"`,
		"{{ s | random }}":        `filter "random"`,
		"{{ s is escaped }}":      `test "escaped"`,
		"{{ s.encode('utf-8') }}": "encode()", "{{ s.translate({}) }}": "translate()", "{{ l.append(1) }}": "append()",
		"{{ cycler(1) }}":            "cycler",
		"{{ lipsum() }}":             "lipsum",
		"{{ f(*l) }}":                "arguments of a list",
		"{{ f(**d) }}":               "arguments of a list",
		"{{ l[1, 2] }}":              "several indices",
		"{{ l[] }}":                  "empty index",
		"{{ 99999999999999999999 }}": "99999999999999999999",
		`{{ '\N{BULLET}' }}`:         `\N`,
	} {
		_, err := jinja.Parse(source)
		if !errors.Is(err, jinja.ErrUnsupported) || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "line 1") {
			t.Errorf("%s: %v, want an ErrUnsupported that names %s in line 1", source, err, want)
		}
	}
	variables := map[string]any{
		"s": "<b>", "d": jinja.Dict{{Key: "a", Value: 1}}, "l": []any{1, 2},
		"big": int64(1) << 62,
	}
	for source, want := range map[string]string{
		"{{ strftime_now('%Y') }}": "strftime_now",
		"{{ (s | safe) + s }}":     "safe",
		"{{ s ~ (s | e) }}":        "safe",
		"{{ 'ß'.upper() }}":        "'ß'",
		"{{ 'Σ' | lower }}":        "'Σ'",
		"{{ big * 2 }}":            "64 bits",
		"{{ big + big }}":          "64 bits",
		"{{ 5.5 % 2 }}":            "% of floats",
		"{{ d.items }}":            "method items",
		"{{ '%x' % 3 }}":           "%x",
		"{{ '{:>3}'.format(1) }}":  "format of {:>3}",
		"{{ s.split(none, 1) }}":   "split",
		"{{ {(1, 2): 3} }}":        "tuple",
		"{{ namespace(a=1) }}":     "Namespace",
		"{{ range }}":              "function",
		"{{ l | map('string') }}":  "generator", "{{ l | map('pprint') | list }}": `filter "pprint"`,
	} {
		if _, err := render(source, variables); !errors.Is(err, jinja.ErrUnsupported) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an ErrUnsupported that names %s", source, err, want)
		}
	}
	for _, source := range []string{
		"{{ s.__class__ }}", "{{ s['__class__'] }}", "{{ d._x }}", "{% break %}",
		"{% nothing %}",
	} {
		if text, err := render(source, variables); err == nil {
			t.Errorf("%s: %q, want an error", source, text)
		}
	}
}

// FuzzRender: any text is refused or rendered, within its bounds.
func FuzzRender(f *testing.F) {
	files, err := filepath.Glob("testdata/templates/*.jinja")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	recorded := readJSON[struct {
		Variables   map[string]value
		Expressions []struct{ Source string }
	}](f, "expressions.json")
	for _, e := range recorded.Expressions {
		f.Add(e.Source)
	}
	variables := variables(recorded.Variables)
	f.Fuzz(func(t *testing.T, source string) {
		template, err := jinja.Parse(source)
		if err != nil {
			return
		}
		first, err := template.Render(variables)
		second, again := template.Render(variables)
		if first != second || (err == nil) != (again == nil) || len(first) > jinja.MaxBytes {
			t.Errorf("%q, %v, then %q, %v", first, err, second, again)
		}
	})
}
