package schemas

import (
	"embed"
	"strings"
)

// The generator imports this package, which embeds its output: to start over, empty
// the files rather than remove them.
//
//go:generate go run ./gen

//go:embed jsonschema/*.json
var documents embed.FS

// JSONSchema returns the JSON Schema (draft 2020-12) of the decoded events of a type
// such as "step/1"; false for a type that this version does not know. In the JSON
// that it describes, byte strings are base64.
func JSONSchema(eventType string) ([]byte, bool) {
	name, version, _ := strings.Cut(eventType, "/")
	data, err := documents.ReadFile("jsonschema/" + name + ".v" + version + ".json")
	return data, err == nil
}
