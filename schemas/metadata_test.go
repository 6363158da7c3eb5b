package schemas_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

func TestMetadata_Map(t *testing.T) {
	in := object{
		"s": "text", "i": int64(-5), "u": uint64(1 << 63), "f": 0.5, "b": []byte{0, 1}, "n": nil, "t": true,
		"l": []any{int64(1), "x"}, "m": object{"k": object{"deep": []any{}}},
	}
	m, err := schemas.MetadataFrom(in)
	if err != nil {
		t.Fatal(err)
	}
	got, err := m.Map()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, in) {
		t.Errorf("got %#v, want %#v", got, in)
	}
	for range 20 { // Go's map order is random
		if again, err := schemas.MetadataFrom(in); err != nil || !bytes.Equal(again, m) {
			t.Fatalf("same map encodes to\n% x\nand\n% x (%v)", m, again, err)
		}
	}
}

func TestMetadata_empty(t *testing.T) {
	for _, in := range []object{nil, {}} {
		if m, err := schemas.MetadataFrom(in); m != nil || err != nil {
			t.Errorf("MetadataFrom(%#v) = %v, %v, want nil", in, m, err)
		}
	}
	if got, err := schemas.Metadata(nil).Map(); got != nil || err != nil {
		t.Errorf("nil metadata has map %v, %v", got, err)
	}
	if got, err := json.Marshal(schemas.Metadata(nil)); string(got) != "null" || err != nil {
		t.Errorf("nil metadata is %s in JSON, %v", got, err)
	}
}

func TestMetadata_JSON(t *testing.T) {
	const in = `{"big":9007199254740993,"exp":1e3,"f":1.5,"list":[1,2.5,{"x":null}],"neg":-7,"s":"é"}`
	m, err := schemas.MetadataFromJSON([]byte(in))
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(in, "1e3", "1000", 1); string(got) != want {
		t.Errorf("comes back as %s, want %s", got, want)
	}
	var p struct{ M schemas.Metadata }
	if err := json.Unmarshal([]byte(`{"M":{"a":1}}`), &p); err != nil || string(p.M) != "\x81\xa1a\x01" {
		t.Errorf("unmarshals to % x, %v", p.M, err)
	}
	for _, bad := range []string{``, `[]`, `5`, `{} {}`, `{"a":1e999}`, strings.Repeat(`{"a":`, schemas.MaxMetadataDepth) + `{}` + strings.Repeat(`}`, schemas.MaxMetadataDepth)} {
		if m, err := schemas.MetadataFromJSON([]byte(bad)); err == nil {
			t.Errorf("%s gives % x, want an error", bad, m)
		}
	}
}

// deep returns maps of so many levels.
func deep(levels int) object {
	out := object{}
	for range levels - 1 {
		out = object{"a": out}
	}
	return out
}

func TestMetadata_limits(t *testing.T) {
	tests := []struct {
		name string
		in   object
		want string
	}{
		{"as deep as may be", deep(schemas.MaxMetadataDepth), ""},
		{"a level more", deep(schemas.MaxMetadataDepth + 1), "nested too deep"},
		{"a list a level more", object{"a": []any{deep(schemas.MaxMetadataDepth - 1)}}, "nested too deep"},
		{"too large", object{"a": strings.Repeat("x", schemas.MaxMetadataBytes)}, "must be at most 16384"},
		{"not UTF-8", object{"a": "\xff"}, "not UTF-8"},
		{"function", object{"a": func() {}}, "encode metadata"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := schemas.MetadataFrom(tt.in)
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("MetadataFrom = %v, want %q", err, tt.want)
			}
		})
	}
	if err := largestMetadata(t).Validate(); err != nil {
		t.Errorf("largest metadata: %v", err)
	}
	if _, err := schemas.Metadata("\x81").Map(); err == nil {
		t.Error("truncated metadata has a map")
	}
}

// In an event, metadata is a map among maps, not a byte string.
func TestMetadata_isEmbedded(t *testing.T) {
	m, err := schemas.MetadataFrom(object{"k": 1})
	if err != nil {
		t.Fatal(err)
	}
	data := encoded(t, &schemas.Prompt{Prompt: "x", Metadata: m})
	if !bytes.Contains(data, []byte("\xa8metadata\x81\xa1k\x01")) {
		t.Errorf("no embedded map in % x", data)
	}
}
