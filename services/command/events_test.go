package command

import (
	"encoding/json"
	"math"
	"reflect"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// Every field of an event that may have all 64 bits is a string in JSON; sequences, which
// count messages, stay numbers.
func TestJSONOf_Seeds(t *testing.T) {
	found := 0
	for _, e := range schemas.Events() {
		v := reflect.ValueOf(e).Elem()
		for i := range v.NumField() {
			name, field := v.Type().Field(i).Name, v.Field(i)
			if field.Kind() != reflect.Uint64 || name != "SampleSeed" && name != "NoiseSeed" {
				continue
			}
			for seed, want := range map[uint64]string{7: "7", math.MaxUint64: "18446744073709551615"} {
				field.SetUint(seed)
				text, err := json.Marshal(schemas.JSON(e))
				if err != nil {
					t.Fatal(err)
				}
				var got map[string]any
				if err := json.Unmarshal(text, &got); err != nil {
					t.Fatal(err)
				}
				key := map[string]string{"SampleSeed": "sample_seed", "NoiseSeed": "noise_seed"}[name]
				if got[key] != want {
					t.Errorf("%T.%s %d is %#v in JSON, want %q", e, name, seed, got[key], want)
				}
				found++
			}
		}
	}
	if found == 0 {
		t.Error("no event has a seed")
	}
}
