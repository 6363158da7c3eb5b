package schemas_test

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// An event as JSON is the same event, and has the same digest.
func TestDecode_JSONOfGoldens(t *testing.T) {
	goldens(t, func(t *testing.T, name string, data []byte, e schemas.Event) {
		if name == "request-extremes" {
			return // its metadata has byte strings that are too long as base64
		}
		sameAsJSON(t, data, e, func() []byte {
			twin, err := os.ReadFile(goldenDir + "/" + name + ".json")
			if err != nil {
				t.Fatal(err)
			}
			return twin
		})
	})
}

// The advantage service reads rewards with a decoder that remembers groups: it takes JSON as all readers do.
func TestGroupDecoder_ReadsJSON(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(goldenDir + "/reward*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d schemas.GroupDecoder
		asAlone(t, text, &schemas.Reward{}, &schemas.Reward{}, d.Reward)
		if err := d.Reward(text, &schemas.Reward{}); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func sameAsJSON(t *testing.T, data []byte, e schemas.Event, twin func() []byte) {
	t.Helper()
	if err := schemas.Decode(data, e); err != nil {
		t.Fatal(err)
	}
	got := reflect.New(reflect.TypeOf(e).Elem()).Interface().(schemas.Event)
	if err := schemas.Decode(twin(), got); err != nil {
		t.Fatal(err)
	}
	clearMetadata(reflect.ValueOf(e).Elem())
	clearMetadata(reflect.ValueOf(got).Elem())
	a, err1 := schemas.Encode(e)
	b, err2 := schemas.Encode(got)
	if err1 != nil || err2 != nil || string(a) != string(b) {
		t.Errorf("another event, %v, %v:\n%+v\n%+v", err1, err2, got, e)
	}
	want, err1 := schemas.ContentDigest(e)
	if digest, err2 := schemas.ContentDigest(got); digest != want || (err1 == nil) != (err2 == nil) {
		t.Errorf("another digest: %x, %v; %x, %v", digest, err2, want, err1)
	}
}

// clearMetadata empties the metadata in a value: JSON has no byte strings, which they may have.
func clearMetadata(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			clearMetadata(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				clearMetadata(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[schemas.Metadata]() {
			v.SetZero()
			return
		}
		for i := range v.Len() {
			clearMetadata(v.Index(i))
		}
	}
}

func TestDecode_JSON(t *testing.T) {
	for _, tt := range []struct{ name, data, want string }{
		{"least", `{"prompt": "a red fox"}`, ""},
		{"space", " \n" + `{"prompt": "a red fox"}` + "\n", ""},
		{"float for an integer", `{"seed": 1.5}`, "seed: the float 1.5; must be an integer"},
		{"text for a number", `{"true_cfg_scale": "4"}`, `true_cfg_scale: "4"; must be a number`},
		{"two keys", `{"prompt": "a", "prompt": "b"}`, "key that came before"},
		{"names of flags", `{"prompt": "a red fox", "n": 2, "steps": 4, "rollout": {"sde_steps": [1]}}`, ""},
		{"both names", `{"steps": 4, "num_inference_steps": 4}`, "steps and num_inference_steps: both given"},
		{"both names inside", `{"rollout": {"sde_step_indices": [1], "sde_steps": [1]}}`, "sde_step_indices and sde_steps: both given"},
		{"a flag's name of a wrong value", `{"steps": "4"}`, `num_inference_steps: "4"; must be an integer`},
		{"more", `{"prompt": "a"} {}`, "something follows the object"},
		{"words after it", `{"prompt": "a"} xyz`, "something follows the object"},
		{"a brace after it", `{"prompt": "a"}}`, "something follows the object"},
		{"no end", `{"prompt": "a"`, "JSON at byte 14"},
		{"no UTF-8", "{\"prompt\": \"\xff\"}", "not UTF-8"},
		{"half of a pair", `{"prompt": "\ud83d"}`, "half of a surrogate pair"},
		{"large integer", `{"seed": 18446744073709551616}`, "must be an integer of at most 64 bits"},
		{"no base64", `{"start": {"data": {"images": [{"data": "?"}]}}}`, "must be base64"},
		{"deep", `{"metadata": ` + strings.Repeat(`{"a":`, 100) + "1" + strings.Repeat("}", 101), "nested too deep"},
	} {
		var p schemas.Prompt
		err := schemas.Decode([]byte(tt.data), &p)
		if tt.want == "" && (err != nil || p.Prompt != "a red fox") || tt.want != "" &&
			(err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %+v, %v; want %q", tt.name, p.Prompt, err, tt.want)
		}
	}
	if err := schemas.Decode([]byte("{"), &schemas.Prompt{}); !errors.Is(err, schemas.ErrMalformed) {
		t.Errorf("%v; must be malformed", err)
	}
	var p schemas.Prompt
	const exact = `{"prompt": "a", "seed": 9007199254740993, "metadata": {"n": 18446744073709551615, "x": 1.0, "y": 1}}`
	if err := schemas.Decode([]byte(exact), &p); err != nil || *p.Seed != 9007199254740993 {
		t.Errorf("%v, %v", p.Seed, err)
	}
	m, err := p.Metadata.Map()
	if want := map[string]any{"n": uint64(math.MaxUint64), "x": 1.0, "y": int64(1)}; err != nil ||
		!reflect.DeepEqual(m, want) {
		t.Errorf("metadata %v, %v; want %v", m, err, want)
	}
	var flags schemas.Prompt
	if err := schemas.Decode([]byte(`{"prompt": "a", "n": 2, "steps": 4, "rollout": {"sde_steps": [1]}}`), &flags); err != nil ||
		*flags.GroupSize != 2 || *flags.NumInferenceSteps != 4 ||
		!slices.Equal(flags.Rollout.SDEStepIndices, []int64{1}) {
		t.Errorf("%+v, %v", flags, err)
	}
	var e schemas.Tokens
	if err := schemas.Decode([]byte(`{"v": 1, "log_probs": [null, "NaN", -0.1, "-Infinity"]}`), &e); err == nil ||
		!math.IsNaN(float64(e.LogProbs[0])) {
		if len(e.LogProbs) != 4 || e.LogProbs[2] != -0.1 || !math.IsInf(float64(e.LogProbs[3]), -1) {
			t.Errorf("log-probs %v, %v", e.LogProbs, err)
		}
	}
	if got := schemas.UnknownFields([]byte(`{"prompt": "a", "sed": 1}`), &schemas.Prompt{}); len(got) != 1 || !strings.Contains(got[0], "did you mean seed") {
		t.Errorf("unknown fields %q", got)
	}
}

// The other name of a field is none that its struct has of its own.
func TestField_AliasesAreTheirs(t *testing.T) {
	for _, of := range []reflect.Type{
		reflect.TypeFor[schemas.Prompt](), reflect.TypeFor[schemas.Rollout](), reflect.TypeFor[schemas.Text](),
		reflect.TypeFor[schemas.GroupPolicy](), reflect.TypeFor[schemas.AdvantageSpec](),
	} {
		for _, f := range schemas.Fields(of) {
			for _, name := range append(f.Aliases(), f.Name) {
				if got, ok := schemas.FieldCalled(of, name); !ok || got.Name != f.Name {
					t.Errorf("%s: %s is %s, and also a name of %s", of.Name(), name, got.Name, f.Name)
				}
			}
		}
	}
}

// Both encodings of what can be decoded give the same event and the same digest.
func FuzzDecodeJSON(f *testing.F) {
	for _, s := range samples(f) {
		if data, err := schemas.Encode(s.event); err == nil {
			if _, ok := s.event.(*schemas.Prompt); ok {
				f.Add(data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p schemas.Prompt
		if schemas.DecodeValid(data, &p) != nil || len(p.Metadata) > 0 { // whose bytes are the caller's own
			return
		}
		canonical, err := schemas.Encode(&p)
		if err != nil {
			t.Fatalf("what was decoded cannot be encoded: %v", err)
		}
		sameAsJSON(t, canonical, &schemas.Prompt{}, func() []byte { return twin(t, canonical) })
	})
}
