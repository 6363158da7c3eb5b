package schemas_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/schemas"
)

type anyMap = map[string]any

func TestUnknownFields(t *testing.T) {
	for _, c := range []struct {
		name   string
		prompt anyMap
		want   []string
	}{
		{"none", anyMap{"prompt": "x", "rollout": anyMap{"sde_window": anyMap{"size": 1}}, "reward": []any{anyMap{"name": "ocr", "params": anyMap{"gruop_size": "x"}}}, "metadata": anyMap{"gruop_size": 1}}, nil},
		{"top", anyMap{"prompt": "x", "gruop_size": 4}, []string{"gruop_size: unknown field; did you mean group_size?"}},
		{"other case", anyMap{"groupSize": 4}, []string{"groupSize: unknown field; did you mean group_size?"}},
		{"no likeness", anyMap{"prompt": "x", "colour": "red"}, []string{"colour: unknown field"}},
		{"elsewhere", anyMap{"noise_level": .5}, []string{"noise_level: unknown field; did you mean rollout.noise_level?"}},
		{"elsewhere, deep", anyMap{"strategy": "random"}, []string{"strategy: unknown field; did you mean rollout.sde_window.strategy?"}},
		{"rollout", anyMap{"rollout": anyMap{"sde_typ": "sde"}}, []string{"rollout.sde_typ: unknown field; did you mean sde_type?"}},
		{"window", anyMap{"rollout": anyMap{"sde_window": anyMap{"sise": 1}}}, []string{"rollout.sde_window.sise: unknown field; did you mean size?"}},
		{"advantage", anyMap{"advantage": anyMap{"stdbasis": "sample"}}, []string{"advantage.stdbasis: unknown field; did you mean std_basis?"}},
		{"reward", anyMap{"reward": []any{anyMap{"name": "ocr"}, anyMap{"name": "x", "wieght": 2}}}, []string{"reward[1].wieght: unknown field; did you mean weight?"}},
		{"batch", anyMap{"batch": anyMap{"id": "b", "group": 2}}, []string{"batch.group: unknown field; did you mean groups?"}},
		{"group_policy", anyMap{"group_policy": anyMap{"zero-std": "drop"}}, []string{"group_policy.zero-std: unknown field; did you mean zero_std?"}},
		{"refill", anyMap{"refill": anyMap{"rond": 1}}, []string{"refill.rond: unknown field; did you mean round?"}},
		{"start latents", anyMap{"start": anyMap{"latents": anyMap{"dtyp": "F32"}}}, []string{"start.latents.dtyp: unknown field; did you mean dtype?"}},
		{"initial latents", anyMap{"initial_latents": anyMap{"dtype": "F32"}}, []string{"initial_latents: unknown field"}},
		{"no name of a field", anyMap{"a\nb": 1, strings.Repeat("y", 200): 2}, []string{`"a\nb": unknown field`, `"` + strings.Repeat("y", 64) + `"...: unknown field`}},
		{"of another type", anyMap{"rollout": 7, "reward": anyMap{"x": 1}, "batch": nil}, nil}, // Decode says so
	} {
		data, err := msgpack.Marshal(c.prompt)
		if err != nil {
			t.Fatal(err)
		}
		got := schemas.UnknownFields(data, &schemas.Prompt{})
		slices.Sort(got) // a Go map has no order
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	many := anyMap{}
	for i := range 100 {
		many["x"+strings.Repeat("q", i)] = i
	}
	data, err := msgpack.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(schemas.UnknownFields(data, &schemas.Prompt{})); n != 32 {
		t.Errorf("%d of 100 are listed, want 32", n)
	}
	for _, data := range [][]byte{nil, {0xc1}, {0x81}, {0xdf, 0xff, 0xff, 0xff, 0xff}} {
		if got := schemas.UnknownFields(data, &schemas.Prompt{}); got != nil {
			t.Errorf("% x: %q", data, got)
		}
	}
}

// Events that we make have no unknown fields.
func TestUnknownFields_Goldens(t *testing.T) {
	goldens(t, func(t *testing.T, _ string, data []byte, e schemas.Event) {
		if got := schemas.UnknownFields(data, e); got != nil {
			t.Errorf("%q", got)
		}
	})
}

// What a stage has not, and its prompt has, is said to be there.
func TestUnknownFields_Stages(t *testing.T) {
	data := []byte(`{"prompt": "x", "stages": [{"name": "a", "reward": [], "group_size": 4, "cildren": 2, "sde_type": "sde"}]}`)
	want := []string{
		"stages[0].reward: unknown field; the prompt has it: each reward there may name its stage",
		"stages[0].group_size: unknown field; the prompt has it, for all stages",
		"stages[0].cildren: unknown field; did you mean children?",
		"stages[0].sde_type: unknown field; did you mean rollout.sde_type?",
	}
	if got := schemas.UnknownFields(data, &schemas.Prompt{}); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPrompt_CheckUnknown(t *testing.T) {
	data, err := msgpack.Marshal(anyMap{"prompt": "x", "gruop_size": 4})
	if err != nil {
		t.Fatal(err)
	}
	warnings, err := (&schemas.Prompt{}).CheckUnknown(data)
	if warnings != nil || err == nil || err.Error() != "gruop_size: unknown field; did you mean group_size?; "+
		"unknown_fields: warn takes the prompt without" {
		t.Errorf("%q, %v", warnings, err)
	}
	warnings, err = (&schemas.Prompt{UnknownFields: "warn"}).CheckUnknown(data)
	if err != nil || !slices.Equal(warnings, []string{"gruop_size: unknown field; did you mean group_size?"}) {
		t.Errorf("%q, %v", warnings, err)
	}
}
