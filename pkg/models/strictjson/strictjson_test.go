package strictjson_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/models/strictjson"
)

// Every key is taken by a field of its exact name, or unused; nothing is replaced.
func TestUnmarshal(t *testing.T) {
	t.Parallel()
	type inner struct {
		B int `json:"b"`
	}
	type outer struct {
		A    int              `json:"a"`
		In   *inner           `json:"in"`
		List []inner          `json:"list"`
		Map  map[string]inner `json:"map"`
		Any  any              `json:"any"`
		Open inner            `json:"open"`
		Raw  json.RawMessage  `json:"raw"`
	}
	type second struct {
		C  int `json:"c"`
		In struct {
			D int `json:"d"`
		} `json:"in"`
	}
	unused := strictjson.Unused{"free": "a test", "in.free": "a test", "map.*.free": "a test", "open.*": "a test"}
	for text, want := range map[string]string{
		`{"a": 1, "c": 2, "in": {"b": 1, "d": 2, "free": {"x": 1}}, "free": [1]}`:                   "",
		`{"list": [{"b": 1}], "map": {"x": {"b": 1, "free": 2}}, "any": {"x": 1}, "raw": {"y": 2}}`: "",
		`{"open": {"b": 1, "c": 2}}`:      "",
		`{"in": null, "list": null}`:      "",
		`{"z": null, "in": {"z": null}}`:  "",
		`{"z": null, "z": null}`:          "z: stands there twice",
		`{"A": 1}`:                        "A: an unknown key",
		`{"z": {"a": 1}}`:                 "z: an unknown key",
		`{"in": {"a": 1}}`:                "in.a: an unknown key",
		`{"list": [{"b": 1}, {"c": 1}]}`:  "list[1].c: an unknown key",
		`{"map": {"x": {"c": 1}}}`:        "map.x.c: an unknown key",
		`{"a": 1, "a": 2}`:                "a: stands there twice",
		`{"a": 1, "raw": "\ud800"}`:       `\ud800: half a surrogate pair`,
		`{"a": 1, "raw": "\uD83D\ude00"}`: "",
		`{"a": 1, "raw": "\\ud800"}`:      "",
		`{"a": 1, "raw": "\udc00"}`:       `\udc00: half a surrogate pair`,
		`{"a": 1, "raw": "\ud83d\ud83d"}`: `\ud83d: half a surrogate pair`,
		`{"a": 1, "raw": "\ud83dx"}`:      `\ud83d: half a surrogate pair`,
		"{\"a\": 1, \"raw\": \"\xff\"}":   "byte 17: not UTF-8",
		`{"a": "x"}`:                      "cannot unmarshal",
		`{"a": 1} {"b": 1}`:               "after top-level value",
		`{"raw": "\`:                      "in string escape code",
		`{"raw": "\ud8`:                   "in \\u hexadecimal",
		`[{"a": 1}]`:                      "cannot unmarshal array",
	} {
		var o outer
		var s second
		err := strictjson.Unmarshal([]byte(text), unused, &o, &s)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}
}
