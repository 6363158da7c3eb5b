package fields_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/schemas/document"
)

// lamp stands for a struct of the contract that has just got a field.
type lamp struct {
	// Warmth is the colour of the light. More of it is redder.
	Warmth *float64 `msgpack:"warmth,omitempty" range:"0..MaxNoiseLevel" default:"0.5" unit:"candles" flag:"warmth,w"`
	// Place is where it stands.
	Place string `msgpack:"place,omitempty" enum:"LatentsDTypes" absent:"the table" flag:"place"`
	// Steps are those that it lights.
	Steps []int64 `msgpack:"steps" absent:"all" size:"0..2,unique" range:"0..9" flag:"lit"`
	// Labels are what is written on it.
	Labels []string `msgpack:"labels,omitempty" size:"0..4,unique" flag:"label"`
	// Types are those of its bulbs.
	Types []string `msgpack:"types,omitempty" enum:"LatentsDTypes" flag:"types"`
}

func documents(t *testing.T) (schema []byte, table string) {
	t.Helper()
	comments, err := document.ReadComments("fields_test.go")
	if err != nil {
		t.Fatal(err)
	}
	if schema, err = document.JSONSchema(&lamp{}, "lamp/1", comments); err != nil {
		t.Fatal(err)
	}
	if table, err = document.Table(reflect.TypeFor[lamp](), comments); err != nil {
		t.Fatal(err)
	}
	return schema, table
}

func flags(t *testing.T) (*fields.Set, *pflag.FlagSet) {
	t.Helper()
	schema, _ := documents(t)
	set := fields.New(reflect.TypeFor[lamp](), schema, nil)
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	set.Register(f)
	return set, f
}

// A field stands once, on its struct: validation, default, schema, table and flag follow.
func TestField_StandsOnce(t *testing.T) {
	schema, table := documents(t)

	for _, tt := range []struct {
		lamp lamp
		want string
	}{
		{lamp{Warmth: new(0.7), Place: "F16", Steps: []int64{0, 9}}, ""},
		{lamp{}, ""},
		{lamp{Warmth: new(11.0)}, "warmth: 11; must be between 0 and 10"},
		{lamp{Place: "floor"}, `place: "floor"; must be one of F32, F16, BF16`},
		{lamp{Steps: []int64{3, 3}}, "steps[1]: 3; must come at most once"},
		{lamp{Steps: []int64{1, 2, 3}}, "steps: 3 items; must be at most 2"},
		{lamp{Steps: []int64{10}}, "steps[0]: 10; must be between 0 and 9"},
	} {
		got := ""
		if err := schemas.CheckFields(&tt.lamp); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("CheckFields(%+v) = %q, want %q", tt.lamp, got, tt.want)
		}
	}

	var l lamp
	schemas.SetDefaults(&l)
	if l.Warmth == nil || *l.Warmth != 0.5 || l.Place != "" {
		t.Errorf("SetDefaults gives %+v", l)
	}

	var doc struct {
		Properties map[string]map[string]any `json:"properties"`
	}
	if err := json.Unmarshal(schema, &doc); err != nil {
		t.Fatal(err)
	}
	warmth := doc.Properties["warmth"]
	for key, want := range map[string]any{
		"minimum": 0.0, "maximum": 10.0, "default": 0.5, "x-unit": "candles",
		"description": "warmth is the colour of the light. More of it is redder.",
	} {
		if !reflect.DeepEqual(warmth[key], want) {
			t.Errorf("schema of warmth: %s is %v, want %v", key, warmth[key], want)
		}
	}
	if got := doc.Properties["place"]["enum"]; !reflect.DeepEqual(got, []any{"F32", "F16", "BF16", nil}) {
		t.Errorf("schema of place: enum is %v", got)
	}

	for _, row := range []string{
		"| `warmth` | `--warmth` | number 0 to 10, candles | `0.5` | the colour of the light. More of it is redder. |\n",
		"| `place` | `--place` | `F32`, `F16`, `BF16` | the table | where it stands. |\n",
		"| `steps` | `--lit` | list of integer 0 to 9 | all | those that it lights. |\n",
	} {
		if !strings.Contains(table, row) {
			t.Errorf("the table has no row %s\n%s", row, table)
		}
	}
	testFlags(t, l)
}

func testFlags(t *testing.T, l lamp) {
	t.Helper()
	set, f := flags(t)
	for name, want := range map[string]string{
		"warmth": "the colour of the light, in candles; between 0 and 10",
		"place":  "where it stands: F32, F16, BF16; default the table",
		"lit":    "those that it lights; e.g. 2,3 or 0-4, or none; default all",
	} {
		if got := f.Lookup(name); got == nil || got.Usage != want {
			t.Errorf("--%s: %+v, want the help %q", name, got, want)
		}
	}
	if got := f.Lookup("warmth").DefValue; got != "0.5" {
		t.Errorf("--warmth has the default %q", got)
	}
	if got := fields.Choices(f.Lookup("place")); !reflect.DeepEqual(got, schemas.LatentsDTypes) {
		t.Errorf("--place completes %q", got)
	}
	if err := f.Parse([]string{"-w", "2.5", "--lit", "1-2"}); err != nil {
		t.Fatal(err)
	}
	if got, want := set.GivenValues(), map[string]any{"warmth": 2.5, "steps": []int64{1, 2}}; !reflect.DeepEqual(got,
		want) {
		t.Errorf("Values = %v, want %v", got, want)
	}
	set.Fill(&l)
	if *l.Warmth != 2.5 || !reflect.DeepEqual(l.Steps, []int64{1, 2}) {
		t.Errorf("Fill gives %+v", l)
	}
	if got, want := set.Flags(false), map[string]string{"warmth": "warmth", "steps": "lit"}; !reflect.DeepEqual(got,
		want) {
		t.Errorf("Flags = %v, want %v", got, want)
	}
}

func TestSet_Parse(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--warmth", "hot"}, `"hot"; must be a number`},
		{[]string{"--lit", "2-x"}, `"2-x"; must be step numbers such as 2,3 or 0-4, or none`},
		{[]string{"--lit", "4-2"}, `"4-2"; must be step numbers such as 2,3 or 0-4, or none`},
		{[]string{"--lit", "0-99999"}, `"0-99999"; must be step numbers such as 2,3 or 0-4, or none`},
	} {
		_, f := flags(t)
		if err := f.Parse(tt.args); err == nil || !strings.HasSuffix(err.Error(), tt.want) {
			t.Errorf("%q: error %v, want %s", tt.args, err, tt.want)
		}
	}
	set, f := flags(t)
	if err := f.Parse([]string{"--lit", "none"}); err != nil {
		t.Fatal(err)
	}
	if got := set.GivenValues()["steps"]; !reflect.DeepEqual(got, []int64{}) {
		t.Errorf("--lit none gives %#v, want an empty list", got)
	}
}

// A text of a list is one argument, whatever is in it; words from a list of legal values have commas between them.
func TestSet_Lists(t *testing.T) {
	set, f := flags(t)
	args := []string{"--label", "0,999", "--label", ",", "--label", "", "--types", "F32,F16", "--types", "BF16"}
	if err := f.Parse(args); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"labels": []string{"0,999", ",", ""}, "types": []string{"F32", "F16", "BF16"}}
	if got := set.GivenValues(); !reflect.DeepEqual(got, want) {
		t.Errorf("%q gives %q, want %q", args, got, want)
	}
}

// A flag that nothing reads is a fault of the struct, whatever else its codec has.
func TestNew_NoCodec(t *testing.T) {
	type odd struct {
		Odd map[string]int `msgpack:"odd" flag:"odd"`
	}
	for name, codecs := range map[string]map[string]fields.Codec{
		"no codec": nil, "a codec without Parse": {"odd": {Kind: "pairs"}},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if said, _ := recover().(string); !strings.Contains(said,
					"odd.Odd: map[string]int; must have a name, and a codec") {
					t.Errorf("panics with %q", said)
				}
			}()
			fields.New(reflect.TypeFor[odd](), []byte("{}"), codecs)
		})
	}
}
