package schemas_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// A ground truth of any kind is on the wire what it is, and comes back as that.
func TestTruth(t *testing.T) {
	for _, tt := range []struct {
		value any
		text  string
	}{
		{"EXIT", "EXIT"},
		{"42", "42"},
		{int64(42), "42"},
		{42.5, "42.5"},
		{42.0, "42"},
		{true, "true"},
		{false, "false"},
		{int64(0), "0"},
		{[]any{"a", int64(1), nil}, `["a",1,null]`},
		{map[string]any{"target": []any{"Rembrandt <3"}}, `{"target":["Rembrandt <3"]}`},
		{uint64(1 << 63), "9223372036854775808"},
	} {
		truth, err := schemas.NewTruth(tt.value)
		if err != nil {
			t.Fatal(err)
		}
		e := &schemas.ScoreRequest{
			V: schemas.Version, Name: "x", GroundTruth: truth, Params: map[string]string{}, ScoreSample: schemas.ScoreSample{Text: new("a")},
		}
		data, err := schemas.Encode(e)
		if err != nil {
			t.Fatalf("%v: %v", tt.value, err)
		}
		var back schemas.ScoreRequest
		if err := schemas.Decode(data, &back); err != nil {
			t.Fatal(err)
		}
		if got := back.GroundTruth; got != truth || !reflect.DeepEqual(got.Value(), tt.value) || got.Text() != tt.text {
			t.Errorf("%#v came back as %#v, %q; want %q", tt.value, got.Value(), got.Text(), tt.text)
		}
		if v := schemas.JSONOfBytes(data).(map[string]any)["ground_truth"]; !strings.Contains(inText(t, v),
			inText(t, tt.value)) {
			t.Errorf("on the wire %#v is %#v", tt.value, v)
		}
		var read schemas.Truth
		if err := json.Unmarshal([]byte(inText(t, truth)), &read); err != nil || read.Text() != tt.text {
			t.Errorf("from JSON %q, %v; want %q", read.Text(), err, tt.text)
		}
	}
	if none, err := schemas.NewTruth(nil); none != "" || err != nil || none.Value() != nil {
		t.Errorf("nil is %q, %v", none, err)
	}
	deep := any("x")
	for range schemas.MaxMetadataDepth + 1 {
		deep = []any{deep}
	}
	for _, v := range []any{deep, []any{strings.Repeat("x", schemas.MaxPromptBytes)}} {
		if _, err := schemas.NewTruth(v); err == nil {
			t.Error("a truth beyond the limits is accepted")
		}
	}
}

// inText returns a value as JSON.
func inText(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
